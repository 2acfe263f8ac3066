"""How long loads are waited for. Needs no vLLM."""

from __future__ import annotations

import pytest

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm_config import TierConfig
from kvxfer.integrations.vllm_deadline import Deadlines
from kvxfer.testing import ManualClock


def keys(numbers: range, group: int = 0) -> list[bytes]:
    return [bytes([number]) * 32 + group.to_bytes(4, "big") for number in numbers]


def serve(
    deadlines: Deadlines,
    clock: ManualClock,
    name: str,
    n: int,
    seconds: float,
    *,
    known: bool = False,
    decode_s: float = 0,
) -> None:
    """A request whose prompt of n chunks is computed in so many seconds, and that may decode another for a while."""
    deadlines.came(name)
    clock.advance(seconds)
    deadlines.offers(name, keys(range(n)), known=known)
    if decode_s:
        clock.advance(decode_s)
        deadlines.offers(name, keys(range(n, n + 1)), known=False)
    deadlines.left(name)


def test_there_is_none_unless_asked_for() -> None:
    deadlines = Deadlines(None, None, [16])
    assert not deadlines.measuring and deadlines.of(keys(range(5))) is None


@pytest.mark.parametrize(
    ("deadline_s", "rate", "tokens", "asked", "seconds"),
    [
        (2.0, None, [16], keys(range(5)), 2.0),
        (None, 40.0, [16], keys(range(5)), 2.0),
        (1.5, 40.0, [16], keys(range(5)), 1.5),
        (9.0, 40.0, [16], keys(range(5)), 2.0),
        (None, 40.0, [16, 64], keys(range(5)) + keys(range(5), group=1), 8.0),  # the same tokens: the longest group
        (None, 40.0, [16], keys(range(5), group=7), 2.0),
        (2.0, "measured", [16], keys(range(5)), 2.0),  # nothing was measured yet
    ],
)
def test_the_sooner_counts(
    deadline_s: float | None, rate: float | str | None, tokens: list[int], asked: list[bytes], seconds: float
) -> None:
    clock = ManualClock(100.0)
    deadlines = Deadlines(deadline_s, rate, tokens, clock)
    assert deadlines.of(asked) == pytest.approx(100.0 + seconds)


def test_a_measured_rate_is_that_of_prompts() -> None:
    clock = ManualClock()
    deadlines = Deadlines(None, "measured", [16], clock)
    assert deadlines.measuring and deadlines.of(keys(range(5))) is None
    for number in range(3):
        serve(deadlines, clock, f"r{number}", n=10, seconds=0.5, decode_s=100.0)
    assert deadlines.tokens_per_s == pytest.approx(320)
    assert deadlines.of(keys(range(20))) == pytest.approx(clock() + 1.0)


def test_what_cost_nothing_is_no_measure() -> None:
    clock = ManualClock()
    deadlines = Deadlines(None, "measured", [16], clock)
    for number in range(5):
        serve(deadlines, clock, f"known {number}", n=10, seconds=0.001, known=True)
        deadlines.came("loads")
        deadlines.loads("loads")
        clock.advance(0.001)
        deadlines.offers("loads", keys(range(10)), known=False)
        deadlines.left("loads")
    assert deadlines.tokens_per_s is None
    deadlines.left("never came")
    deadlines.offers("never came", keys(range(1)), known=False)
    for number in range(3):
        serve(deadlines, clock, f"r{number}", n=10, seconds=0.5)
    assert deadlines.tokens_per_s == pytest.approx(320)


def test_nothing_is_kept_of_requests_that_left() -> None:
    clock = ManualClock()
    deadlines = Deadlines(None, "measured", [16], clock)
    for number in range(1000):
        serve(deadlines, clock, str(number), n=1, seconds=1.0)
    assert not deadlines._requests
    given = Deadlines(None, 5.0, [16], clock)
    given.came("a")
    assert not given._requests and not given.measuring


@pytest.mark.parametrize("value", ["measure", "", 0, -1.0, True, float("nan"), [5]])
def test_a_rate_is_a_number_or_measured(value: object) -> None:
    with pytest.raises(ConfigError, match="recompute_tokens_per_s"):
        TierConfig.from_keys({"root_dir": "/x", "recompute_tokens_per_s": value})
    assert TierConfig.from_keys({"root_dir": "/x", "recompute_tokens_per_s": "measured"})
