"""The real engine on a CPU with a small random model in float32: what is cached, and that the output stays the same.

The configuration is as people paste it, with the spec swapped for one whose worker copies on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import APART, ROW_BYTES, WHOLE, run_engine, with_fs, with_tier

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TAIL, ALL = list(range(5, 12)), list(range(12))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, where: Path, model: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A root that one process has filled, and what it said."""
    root = tmp_path_factory.mktemp("stored") / "root"
    setup = with_tier(model, root_dir=str(root), deadline_s=8.0, **APART)
    steps = [["run"], ["fill"], ["run"], ["run"], ["forget"], ["run"], ["counters"], ["told"], ["metrics"], ["places"]]
    return root, run_engine(where, setup, *steps)


def test_a_hit_after_the_device_and_the_host_have_forgotten(
    plain: list[int], stored: tuple[Path, list[dict[str, Any]]]
) -> None:
    cold, _, hit = stored[1][:3]
    assert (cold["cached"], cold["ids"]) == (0, plain)
    assert (hit["cached"], hit["ids"]) == (WHOLE, plain)


def test_a_hit_after_the_prefix_cache_was_reset(plain: list[int], stored: tuple[Path, list[dict[str, Any]]]) -> None:
    on_device, forget, hit, counters = stored[1][3:7]
    assert forget["reset"]
    for each in (on_device, hit):
        assert (each["cached"], each["ids"]) == (WHOLE, plain)
    assert counters["load"]["hit"] == 12  # once from the drive: the host had it for the last


def test_vllm_counts_as_cached_what_was_cached_and_says_whence(stored: tuple[Path, list[dict[str, Any]]]) -> None:
    from kvxfer.integrations import vllm_compat as compat

    told, metrics = stored[1][7:9]
    vllm = told["vllm"]
    by_source = {
        name.removeprefix("prompt_tokens_cached_by_source"): n for name, n in vllm.items() if "by_source" in name
    }
    if compat.disk_source() is not None:  # 0.28 does not say whence
        assert {source: n for source, n in by_source.items() if n} == {"disk": WHOLE, "device": WHOLE, "host": WHOLE}
    assert told["cached"] == vllm["prompt_tokens_cached"] == 3 * WHOLE
    assert vllm["external_prefix_cache_hits"] == 2 * WHOLE and vllm["prefix_cache_hits"] == WHOLE
    assert metrics["vllm:kvxfer_load_chunks{hit}"] == 12
    assert sum(n for name, n in metrics.items() if name.startswith("vllm:kvxfer_load_bytes{")) == 12 * ROW_BYTES
    assert metrics["vllm:kvxfer_lookup_hit_keys{}"] >= 12
    assert not sum(metrics[f"vllm:kvxfer_load_chunks{{{why}}}"] for why in ("bad_sum", "foreign", "truncated", "miss"))


def test_another_process_gets_as_much_as_is_there_and_right(
    where: Path, model: Path, plain: list[int], stored: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Block 5 of 12 deleted before this process began; then all that a disk may do to it. Each is made good."""
    root, results = stored
    Path(results[-1]["places"][5][0]).unlink()
    # What is done, tokens that are cached then, chunks that were read and found wrong, and the word for it.
    plan: list[tuple[str, list[int], int, int, str]] = [
        ("delete", [], 5 * 32, 0, "bad_sum"),  # a deleted file is no claim at all
        ("truncate", [5], 5 * 32, 1, "truncated"),
        ("zero", [5], 5 * 32, 1, "bad_sum"),
        ("flip", [5], 5 * 32, 1, "bad_sum"),
        ("swap", [5], 5 * 32, 1, "bad_sum"),
        ("zero", TAIL, 5 * 32, len(TAIL), "bad_sum"),  # only the first five arrive
        ("flip", [3], 3 * 32, 1, "bad_sum"),  # a hole
        ("zero", ALL, 0, len(ALL), "bad_sum"),  # nothing arrives
    ]
    steps: list[list[Any]] = []
    for how, numbers, *_ in plan:
        steps += [["damage", how, numbers], ["counters"], ["run"], ["counters"], ["fill"], ["run"], ["fill"]]
    steps += [["hang"], ["run"], ["counters"], ["metrics"]]  # and it is shut down while that read hangs
    done = run_engine(where, with_tier(model, root_dir=str(root), deadline_s=8.0, **APART), *steps)
    assert [each["ids"] for each in done if "ids" in each] == [plain] * (2 * len(plan) + 1)
    for number, (how, numbers, cached, wrong, word) in enumerate(plan):
        _, before, run, after, _, again, _ = done[7 * number : 7 * number + 7]
        case = f"{how} {numbers}"
        assert (run["cached"], again["cached"]) == (cached, WHOLE), case
        rose = {name: after["load"][name] - before["load"][name] for name in after["load"]}
        whole = 5 if how == "delete" else 12 - wrong  # of a deleted chunk, and what is beyond it, nobody asked more
        assert {name: n for name, n in rose.items() if n} == {
            name: n for name, n in (("hit", whole), (word, wrong)) if n
        }, case
        read = after["read"] - before["read"]
        assert read >= (whole + wrong - (how == "truncate")) * ROW_BYTES, case
    late, counters, metrics = done[-3:]
    assert late["cached"] < WHOLE and 7.5 < late["seconds"] < 60  # the deadline is 8 s
    assert counters["load"]["cut"] >= 1
    damaged = sum(wrong for *_, wrong, word in plan if word == "bad_sum")
    assert metrics["vllm:kvxfer_load_chunks{bad_sum}"] == counters["load"]["bad_sum"] == damaged
    assert metrics["vllm:kvxfer_load_chunks{truncated}"] == 1
    assert metrics["vllm:kvxfer_load_chunks{cut}"] == counters["load"]["cut"]
    assert metrics["vllm:kvxfer_salvaged_chunks{}"] >= 4 * 5 + 5 + 3


def test_the_stock_tier_answers_wrong_where_this_one_recomputes(
    where: Path, model: Path, plain: list[int], tmp_path: Path
) -> None:
    """The contrast: `fs` believes a file of the right size. The engine counts a whole hit, and says something else."""
    steps: list[list[Any]] = [["run"], ["fill"], ["run"], ["fill"]]
    for how in ("zero", "flip", "swap", "truncate", "delete"):
        steps += [["damage", how, [5]], ["run"], ["fill"], ["drop", ALL], ["forget"], ["run"], ["fill"]]
    done = run_engine(where, with_fs(model, tmp_path), *steps)
    cold, hit, *rest = [(each["cached"], each["ids"]) for each in done if "ids" in each]
    assert (cold, hit) == ((0, plain), (WHOLE, plain))
    for how, damaged in zip(("zero", "flip", "swap"), rest[::2], strict=False):
        assert damaged[0] == WHOLE and damaged[1] != plain, how  # silently
    for how, damaged in zip(("truncate", "delete"), rest[6::2], strict=True):
        assert damaged == (5 * 32, plain), how  # these it sees
    assert rest[1::2] == [(0, plain)] * 5  # it is the files: without them all is right
