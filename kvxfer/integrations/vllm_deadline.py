"""How long a load may be waited for: no longer than recomputing what it brings. Needs no vLLM.

A tier is not told when tokens are computed. What it sees of a request is when it came and when its chunks are offered
for storing, so the rate that is measured here is that of a whole request, its time in the queue included: the fastest
of those lately seen count (`Pace`). Requests of which anything was loaded, or stored before, are no measure: their
chunks were there and cost nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvxfer.pace import Pace

MEASURED = "measured"


def patience(deadline_s: float | None, tokens_per_s: float | None, tokens: int) -> float | None:
    """Seconds that a load of so many tokens may take: the sooner of both limits, None without any."""
    limits = [] if deadline_s is None else [deadline_s]
    if tokens_per_s:
        limits.append(tokens / tokens_per_s)
    return min(limits) if limits else None


@dataclass(slots=True)
class _Request:
    came: float
    tokens: int = 0  # offered so far
    best: tuple[float, int, float] = (0.0, 0, 0.0)  # tokens per second, tokens, seconds: of its fastest part
    measures: bool = True


class Deadlines:
    """Deadlines of loads, by the tier's keys `deadline_s` and `recompute_tokens_per_s`.

    Args:
        deadline_s: seconds, or None.
        rate: tokens per second; "measured"; or None. With both, the sooner counts; until there is a measure, the other.
        tokens: of a chunk, by group.
        clock: seconds, as time.monotonic().
    """

    def __init__(
        self,
        deadline_s: float | None,
        rate: float | str | None,
        tokens: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline_s, self._tokens, self._clock = deadline_s, tuple(tokens), clock
        self._given = None if rate is None or isinstance(rate, str) else float(rate)
        self._pace = Pace() if rate == MEASURED else None
        self._requests: dict[str, _Request] = {}

    @property
    def measuring(self) -> bool:
        """Whether the calls below `of` have a use."""
        return self._pace is not None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate that counts now."""
        return self._given if self._pace is None else self._pace.tokens_per_s

    def of(self, keys: Collection[bytes]) -> float | None:
        """When a load of these keys must end."""
        if self._deadline_s is None and not self.tokens_per_s:
            return None
        seconds = patience(self._deadline_s, self.tokens_per_s, self._worth(keys))
        return None if seconds is None else self._clock() + seconds

    def _worth(self, keys: Collection[bytes]) -> int:
        """Tokens. Groups are of the same tokens: the longest counts."""
        last = len(self._tokens) - 1
        counts = Counter(min(int.from_bytes(key[-4:], "big"), last) for key in keys)
        return max((n * self._tokens[group] for group, n in counts.items()), default=0)

    # ---- measuring ---------------------------------------------------------------------------------------------

    def came(self, request: str) -> None:
        """A request is there."""
        if self._pace is not None:
            self._requests.setdefault(request, _Request(self._clock()))

    def loads(self, request: str) -> None:
        """Some of its chunks are loaded."""
        if (seen := self._requests.get(request)) is not None:
            seen.measures = False

    def offers(self, request: str, keys: Collection[bytes], *, known: bool) -> None:
        """Its chunks of these keys have been computed. `known`: not all of them only now."""
        if (seen := self._requests.get(request)) is None:
            return
        seen.measures &= not known
        seen.tokens += self._worth(keys)
        seconds = self._clock() - seen.came
        if seconds > 0 and (rate := seen.tokens / seconds) > seen.best[0]:
            seen.best = (rate, seen.tokens, seconds)

    def left(self, request: str) -> None:
        """It has ended."""
        seen = self._requests.pop(request, None)
        if seen is not None and seen.measures and self._pace is not None:
            self._pace.observe(*seen.best[1:])
