"""The real engine over a tier whose storage fills up, is too small, is shared, or whose process is killed.

In every case outputs are those of an engine without offloading.
"""

from __future__ import annotations

import errno
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import APART, SLOT_BYTES, WHOLE, results_in, run_engine, run_engines, start, with_tier

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = list(range(9))  # 108 chunks


@pytest.fixture(scope="module")
def answers(where: Path, model: Path) -> list[list[int]]:
    """The output for each of SEEDS, of an engine without offloading."""
    results = run_engine(where, {"model": str(model)}, *[["run", seed] for seed in SEEDS])
    return [result["ids"] for result in results]


def disk_bytes(root: Path) -> int:
    """What everything below a root takes."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("call", "word", "seeds"), [("fallocate", "no_space", []), ("pwrite", "io", [2])], ids=["no slab", "no write"]
)
def test_a_disk_that_is_full_costs_stores_and_nothing_else(
    where: Path, model: Path, answers: list[list[int]], tmp_path: Path, call: str, word: str, seeds: list[int]
) -> None:
    """`seeds` were stored before, so that there is a slab whose slots can be written, or not."""
    steps: list[list[Any]] = [["run", seed] for seed in seeds]
    steps += [["fill"] for _ in seeds] + [["counters"], ["fault", "fail", call, {"errno": errno.ENOSPC}]]
    steps += [["run", 0], ["fill"], ["forget", True], ["run", 0], ["counters"], ["release"]]
    steps += [["fill"], ["fill"], ["fill"], ["run", 1], ["fill"], ["run", 1], ["counters"]]  # the breaker closes again
    keys = {"breaker_cooldown_s": 0.1, "breaker_max_cooldown_s": 0.2}
    done = run_engine(where, with_tier(model, root_dir=str(tmp_path / "root"), **keys), *steps)
    runs = [each for each in done if "ids" in each]
    assert [run["ids"] for run in runs] == [answers[seed] for seed in (*seeds, 0, 0, 1, 1)]
    assert [run["cached"] for run in runs[len(seeds) :]] == [0, 0, 0, WHOLE]
    before, full, end = (each["store"] for each in done if "store" in each)
    assert full["stored"] == before["stored"] and (before["stored"] >= 12) == bool(seeds)
    assert before[word] == 0 and full[word] > 0
    assert end["stored"] >= full["stored"] + 12


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB: 22 chunks and an index do not fit."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_file_system_that_is_smaller_than_was_said(
    where: Path, model: Path, answers: list[list[int]], small_disk: Path
) -> None:
    steps: list[list[Any]] = []
    for seed in SEEDS[:4]:
        steps += [["run", seed], ["fill"], ["run", seed]]
    setup = with_tier(model, root_dir=str(small_disk / "root"), **APART)
    *done, stats = run_engine(where, setup, *steps, ["counters"], ["stats"])
    runs = [each for each in done if "ids" in each]
    assert [run["ids"] for run in runs] == [answers[seed] for seed in SEEDS[:4] for _ in range(2)]
    assert stats["slab_errors"] > 0  # it has met the end of the disk, and makes room in what it has
    assert done[-1]["store"]["stored"] > stats["entries"] > 0 and stats["evicted"] > 0
    assert disk_bytes(small_disk) <= 3 << 20


def test_eight_chunks_of_room_for_a_hundred(where: Path, model: Path, answers: list[list[int]], tmp_path: Path) -> None:
    capacity = 4 << 20
    room = {"capacity_bytes": capacity, "index_map_bytes": 2 << 20, "slab_bytes": 4096 + 8 * SLOT_BYTES}
    steps: list[list[Any]] = []
    for seed in SEEDS:
        steps += [["run", seed], ["drain"], ["stats"]]
    for seed in SEEDS[::3]:
        steps += [["forget", True], ["run", seed], ["drain"], ["stats"]]
    done = run_engine(where, with_tier(model, root_dir=str(tmp_path / "root"), **room), *steps, ["counters"])
    runs, stats = [each for each in done if "ids" in each], [each for each in done if "entries" in each]
    assert [run["ids"] for run in runs] == [answers[seed] for seed in [*SEEDS, *SEEDS[::3]]]
    assert max(each["entries"] for each in stats) == 8
    counters = done[-1]
    assert counters["store"]["stored"] >= 16 and stats[-1]["evicted"] >= 8
    assert not any(counters["load"][why] for why in ("bad_sum", "foreign", "truncated", "bad_trailer"))
    assert disk_bytes(tmp_path / "root") <= capacity


def test_what_is_being_loaded_is_not_evicted_or_is_a_miss(
    where: Path, model: Path, answers: list[list[int]], tmp_path: Path
) -> None:
    """Room for 26 chunks; slow reads of one prompt's chunks, while two others are computed and stored."""
    room = {"capacity_bytes": 6 << 20, "index_map_bytes": 1 << 20, "slab_bytes": 4096 + 13 * SLOT_BYTES}
    steps = [
        ["run", 0], ["run", 1], ["run", 0], ["drain"], ["forget", True], ["stats"],
        ["fault", "delay", "pread", {"seconds": 0.15}],
        ["many", [0, 2, 3]], ["drain"], ["release"], ["stats"], ["counters"],
        ["forget", True], ["many", [3, 2, 1, 0]], ["counters"],
    ]  # fmt: skip
    arguments = {"num_gpu_blocks_override": 60}
    setup = with_tier(model, root_dir=str(tmp_path / "root"), extra={"chunks": 50}, arguments=arguments, **room)
    done = run_engine(where, setup, *steps)
    first, second = (each for each in done if "all" in each)
    assert first["all"] == [answers[seed] for seed in (0, 2, 3)] and first["cached"] == [WHOLE, 0, 0]
    assert second["all"] == [answers[seed] for seed in (3, 2, 1, 0)]
    before, after = (each for each in done if "entries" in each)
    assert before["entries"] == 24 and after["evicted"] > before["evicted"]
    for load in (each["load"] for each in done if "load" in each):
        assert load["hit"] >= 12
        assert not any(load[why] for why in ("bad_sum", "foreign", "truncated", "bad_trailer"))


def test_two_engines_share_a_root(where: Path, model: Path, answers: list[list[int]], tmp_path: Path) -> None:
    """Each stores prompts of its own and some of the other's, at once; then each finds what the other stored."""
    mine, its = [0, 1, 2, 3], [4, 5, 6, 2]
    setup = with_tier(model, root_dir=str(tmp_path / "root"))

    def steps(name: str, other: str, seeds: list[int], others: list[int]) -> list[list[Any]]:
        out: list[list[Any]] = [["signal", str(tmp_path / f"{name} is up")]]
        out += [["wait_for", str(tmp_path / f"{other} is up")], *(["run", seed] for seed in seeds), ["fill"]]
        out += [["signal", str(tmp_path / name)], ["wait_for", str(tmp_path / other)]]
        return [*out, *(["run", seed] for seed in others), ["counters"], *(["run", seed] for seed in seeds)]

    one, other = run_engines(
        where, (setup, steps("one", "other", mine, its)), (setup, steps("other", "one", its, mine))
    )
    for done, seeds, others in ((one, mine, its), (other, its, mine)):
        runs = [each for each in done if "ids" in each]
        assert [run["ids"] for run in runs] == [answers[seed] for seed in [*seeds, *others, *seeds]]
        assert [run["cached"] for run in runs[4:8]] == [WHOLE] * 4
        load = next(each for each in done if "load" in each)["load"]
        assert load["hit"] >= 4 * 12
        assert not any(load[why] for why in ("bad_sum", "foreign", "truncated", "bad_trailer"))


@pytest.mark.parametrize("when", [{"after": 5, "nbytes": 65536}, {"after": 11}], ids=["in a write", "after the last"])
def test_killed_while_it_stores(
    where: Path, model: Path, answers: list[list[int]], tmp_path: Path, when: dict[str, int]
) -> None:
    """A new process has what was committed, or recomputes it; never half of anything."""
    setup = with_tier(model, root_dir=str(tmp_path / "root"))
    process = start(
        where, setup, ["rows"], ["run"], ["fault", "kill", "pwrite", when], ["run", 1], ["fill"], ["run", 2]
    )
    try:
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
    results = results_in(out)
    Path(results[0]["path"]).unlink(missing_ok=True)  # nobody else takes a killed engine's host memory away
    assert process.returncode == -signal.SIGKILL, err[-6000:]
    assert len(results) < 6 and results[1]["ids"] == answers[0]
    steps = [
        ["run"],
        ["counters"],
        ["run", 1],
        ["fill"],
        ["forget", True],
        ["run"],
        ["run", 1],
        ["stats"],
        ["counters"],
    ]
    done = run_engine(where, setup, *steps)
    runs = [each for each in done if "ids" in each]
    assert [run["ids"] for run in runs] == [answers[seed] for seed in (0, 1, 0, 1)]
    assert [run["cached"] for run in runs[2:]] == [WHOLE] * 2
    for each in done:
        if "load" in each:
            assert not any(each["load"][why] for why in ("bad_sum", "foreign", "truncated", "bad_trailer", "io"))
    assert done[1]["load"]["hit"] * 32 == runs[0]["cached"]


def test_a_read_that_hangs_is_waited_for_no_longer_than_recomputing_took(
    where: Path, model: Path, answers: list[list[int]], tmp_path: Path
) -> None:
    """Nobody gives a number: the first requests are the measure."""
    steps: list[list[Any]] = [["run", seed] for seed in (0, 1, 2, 3, 4)]
    steps += [["fill"], ["hang"], ["run", 0], ["counters"], ["release"], ["run", 1]]
    setup = with_tier(model, root_dir=str(tmp_path / "root"), recompute_tokens_per_s="measured", io_timeout_s=300.0)
    done = run_engine(where, setup, *steps)
    runs = [each for each in done if "ids" in each]
    assert [run["ids"] for run in runs] == [answers[seed] for seed in (0, 1, 2, 3, 4, 0, 1)]
    assert runs[5]["cached"] < WHOLE
    (counters,) = (each for each in done if "load" in each)
    assert counters["load"]["cut"] >= 1
