"""KvxferConnector in the real engine on a CPU, in float32: the output is that of an engine without offload, always."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.connector_engines import TWO_RANKS, with_connector
from tests.integrations.engines import WHOLE, run_engine, run_engines, start

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FIVE = 5 * 32
VERIFICATION = ("truncated", "bad_trailer", "foreign", "bad_sum")


def damaged(metrics: dict[str, float]) -> dict[str, int]:
    """Chunks that failed verification, by how."""
    found = {how: int(metrics[f"vllm:kvxfer_load_chunks{{{how}}}"]) for how in VERIFICATION}
    return {how: count for how, count in found.items() if count}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, where: Path, model: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A root that one process has filled, and what it said."""
    root = tmp_path_factory.mktemp("stored") / "root"
    steps = (["run"], ["fill"], ["run"], ["forget"], ["run"], ["reset"], ["run"], ["metrics"])
    return root, run_engine(where, with_connector(model, root), *steps)


def test_a_hit_after_the_device_has_forgotten(plain: list[int], stored: tuple[Path, list[dict[str, Any]]]) -> None:
    cold, _, evicted, forget, forgotten, reset, after_reset, metrics = stored[1]
    assert (cold["cached"], cold["ids"]) == (0, plain)
    assert forget["reset"] and reset["reset"]
    for hit in (evicted, forgotten, after_reset):
        assert (hit["cached"], hit["ids"]) == (WHOLE, plain)
    assert metrics["vllm:kvxfer_load_chunks{hit}"] == 3 * 12
    assert metrics["vllm:kvxfer_lookup_hit_keys{}"] == 3 * 12
    assert metrics["vllm:kvxfer_pinned_entries{}"] == 0


def test_another_process_gets_as_much_as_arrives(
    where: Path, model: Path, plain: list[int], stored: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Of a damaged chunk the prefix before it, the next time all of it; a read that never returns ends in time."""
    tail, all_of_it = list(range(5, 12)), list(range(12))
    plan: list[tuple[list[Any], int, dict[str, int]]] = [
        (["run"], WHOLE, {}),  # what the other process stored
        (["damage", "flip", [5]], FIVE, {"bad_sum": 1}),
        (["run"], WHOLE, {}),  # stored again
        (["damage", "zero", [5]], FIVE, {"bad_trailer": 1}),
        (["run"], WHOLE, {}),
        (["damage", "swap", [5]], FIVE, {"foreign": 2}),  # with its neighbour
        (["run"], WHOLE, {}),
        (["delete", [5]], FIVE, {}),
        (["run"], WHOLE, {}),
        (["damage", "zero", tail], FIVE, {"bad_trailer": len(tail)}),  # only the first five arrive
        (["damage", "flip", [3]], 3 * 32, {"bad_sum": 1}),  # a hole
        (["damage", "zero", all_of_it], 0, {"bad_trailer": 12}),  # nothing arrives
        (["run"], WHOLE, {}),
    ]
    steps: list[list[Any]] = []
    for step, _, _ in plan:
        steps += [step, ["run"], ["fill"]] if step[0] != "run" else [step, ["fill"]]
    setup = with_connector(model, stored[0], deadline_s=3.0)
    results = run_engine(where, setup, *steps, ["metrics"], ["fill"], ["hang"], ["run"], ["release"], ["metrics"])
    runs = [result for result in results if "ids" in result]
    assert [run["ids"] for run in runs] == [plain] * (len(plan) + 1)
    assert [run["cached"] for run in runs[:-1]] == [cached for _, cached, _ in plan]
    want: dict[str, int] = {}
    for _, _, found in plan:
        want = {how: want.get(how, 0) + found.get(how, 0) for how in {*want, *found}}
    first, last = [result for result in results if "vllm:kvxfer_entries{}" in result]
    assert damaged(first) == damaged(last) == want
    assert first["vllm:kvxfer_load_chunks{cut}"] == 0
    late = runs[-1]
    assert late["cached"] < WHOLE and 2.5 < late["seconds"] < 60  # the deadline is 3 s
    assert last["vllm:kvxfer_load_chunks{cut}"] >= 1
    assert last["vllm:kvxfer_salvaged_chunks{}"] >= 5 + 5 + 5 + 5 + 3


@pytest.fixture(scope="module")
def stored_by_two(
    tmp_path_factory: pytest.TempPathFactory, where: Path, model: Path
) -> tuple[Path, list[dict[str, Any]]]:
    """A root that two ranks have filled, and what they said."""
    root = tmp_path_factory.mktemp("two") / "root"
    return root, run_engine(where, with_connector(model, root, arguments=TWO_RANKS), ["run"], ["fill"], ["run"])


def test_one_rank_hits_what_two_have_stored(
    where: Path, model: Path, plain: list[int], stored_by_two: tuple[Path, list[dict[str, Any]]]
) -> None:
    cold, _, hit = stored_by_two[1]
    assert (cold["cached"], cold["ids"]) == (0, plain)
    assert (hit["cached"], hit["ids"]) == (WHOLE, plain)
    (result, metrics) = run_engine(where, with_connector(model, stored_by_two[0]), ["run"], ["metrics"])
    assert (result["cached"], result["ids"]) == (WHOLE, plain)
    assert metrics["vllm:kvxfer_load_chunks{hit}"] == 12 and not damaged(metrics)


def test_two_ranks_over_two_roots(where: Path, model: Path, plain: list[int], tmp_root: Path) -> None:
    """What is damaged on one root is a hole in the middle; one rank loads what two have stored."""
    roots = {"root_dir": [str(tmp_root / "one"), str(tmp_root / "two")]}
    setup = with_connector(model, tmp_root, arguments=TWO_RANKS, **roots)
    steps = (["run"], ["fill"], ["run"], ["fill"], ["damage", "flip", [5]], ["run"], ["fill"], ["usage"], ["metrics"])
    results = run_engine(where, setup, *steps)
    runs = [result for result in results if "ids" in result]
    assert [run["ids"] for run in runs] == [plain] * 3 and [run["cached"] for run in runs] == [0, WHOLE, FIVE]
    assert results[-2]["pinned"] == 0 and damaged(results[-1]) == {"bad_sum": 1}
    (result, metrics) = run_engine(where, with_connector(model, tmp_root, **roots), ["run"], ["metrics"])
    assert (result["cached"], result["ids"]) == (WHOLE, plain) and not damaged(metrics)


@pytest.mark.slow
def test_two_ranks_hit_what_one_has_stored_and_damage_that_one_of_them_sees_is_both_s(
    where: Path, model: Path, plain: list[int], stored: tuple[Path, list[dict[str, Any]]]
) -> None:
    setup = with_connector(model, stored[0], arguments=TWO_RANKS)
    steps = (
        ["run"], ["fill"],
        ["damage", "flip", [5]], ["run"], ["fill"],
        ["run"], ["fill"],
        ["damage", "flip late", [3]], ["run"], ["fill"],
        ["damage", "zero", [0]], ["run"], ["fill"],
        ["run"], ["metrics"],
    )  # fmt: skip
    results = run_engine(where, setup, *steps)
    runs = [result for result in results if "ids" in result]
    assert [run["ids"] for run in runs] == [plain] * 6
    assert [run["cached"] for run in runs] == [WHOLE, FIVE, WHOLE, 3 * 32, 0, WHOLE]
    assert damaged(results[-1]) == {"bad_sum": 2, "bad_trailer": 1}


@pytest.mark.slow
def test_a_policy_under_which_requests_would_fail_is_refused(where: Path, model: Path, tmp_root: Path) -> None:
    with pytest.raises(AssertionError, match=r'give kv_transfer_config "kv_load_failure_policy": "recompute"'):
        run_engine(where, with_connector(model, tmp_root, policy="fail"), ["run"])
    assert not tmp_root.exists()


@pytest.mark.slow
def test_larger_chunks_and_generated_tokens(where: Path, model: Path, plain: list[int], tmp_root: Path) -> None:
    """Chunks of four blocks: 12 blocks are three of them. What was generated is stored too."""
    setup = with_connector(model, tmp_root, extra={"blocks_per_chunk": 4, "offload_prompt_only": False})
    steps = (["run"], ["fill"], ["run"], ["fill"], ["damage", "flip", [1]], ["run"], ["fill"], ["run"], ["metrics"])
    results = run_engine(where, setup, *steps)
    runs = [result for result in results if "ids" in result]
    assert [run["ids"] for run in runs] == [plain] * 4
    assert [run["cached"] for run in runs] == [0, WHOLE, 4 * 32, WHOLE]
    assert damaged(results[-1]) == {"bad_sum": 1}


@pytest.mark.slow
def test_requests_at_once_and_preempted(where: Path, model: Path, tmp_root: Path) -> None:
    """20 blocks for four requests that need 36: jobs are flushed, and their blocks are others' at once."""
    tight = {"num_gpu_blocks_override": 20, "max_model_len": 512}
    step = ["many", [0, 1, 2, 3], 128, 160]
    (want,) = run_engine(where, {"model": str(model), "arguments": tight}, step)
    setup = with_connector(model, tmp_root, arguments=tight, extra={"offload_prompt_only": False})
    results = run_engine(where, setup, step, ["settle"], step, ["settle"], step, ["usage"], ["metrics"])
    rounds = [result for result in results if "all" in result]
    assert [each["all"] for each in rounds] == [want["all"]] * 3
    assert sum(rounds[1]["cached"]) > 0 and results[-2]["pinned"] == 0
    assert not damaged(results[-1])


@pytest.mark.slow
def test_a_root_with_room_for_a_few_chunks(where: Path, model: Path, plain: list[int], tmp_root: Path) -> None:
    setup = with_connector(model, tmp_root, capacity_bytes=4 << 20)
    results = run_engine(where, setup, *([["run"], ["fill"], ["usage"]] * 4))
    for run, _, usage in zip(*[iter(results)] * 3, strict=True):
        assert run["ids"] == plain
        assert usage["below"] and 0 < usage["entries"] < 30 and usage["pinned"] == 0
    assert results[-1]["evicted"] > 0


@pytest.mark.slow
def test_a_disk_that_is_full_while_chunks_are_stored(
    where: Path, model: Path, plain: list[int], tmp_root: Path
) -> None:
    steps = (
        ["fail", "pwrite", errno.ENOSPC], ["run"], ["fill"], ["usage"], ["run"],
        ["release"], ["nap", 3.0], ["fill"], ["fill"], ["run"], ["fill"], ["run"], ["metrics"],
    )  # fmt: skip
    setup = with_connector(model, tmp_root, breaker_cooldown_s=0.5, breaker_max_cooldown_s=1.0)
    results = run_engine(where, setup, *steps)
    runs = [result for result in results if "ids" in result]
    assert [run["ids"] for run in runs] == [plain] * 4
    assert results[3]["entries"] == 0
    assert [run["cached"] for run in runs] == [0, 0, 0, WHOLE]
    metrics = results[-1]
    assert metrics["vllm:kvxfer_store_chunks{io}"] >= 8
    assert metrics["vllm:kvxfer_io_errors{store,full}"] == metrics["vllm:kvxfer_store_chunks{io}"]


@pytest.mark.slow
def test_killed_in_the_middle_of_a_store_and_another_one_after_it(
    where: Path, model: Path, plain: list[int], tmp_root: Path
) -> None:
    setup = with_connector(model, tmp_root)
    killed = start(where, setup, ["kill", "pwrite"], ["run"], ["fill"])
    killed.communicate(timeout=500)
    assert killed.returncode == -signal.SIGKILL
    results = run_engine(where, setup, ["usage"], ["run"], ["fill"], ["run"], ["metrics"])
    assert results[0]["entries"] < 12
    assert [results[n]["ids"] for n in (1, 3)] == [plain] * 2
    assert results[3]["cached"] == WHOLE and not damaged(results[-1])


@pytest.mark.slow
def test_two_servers_at_once(where: Path, model: Path, plain: list[int], tmp_root: Path) -> None:
    setup = with_connector(model, tmp_root)
    steps = (["run"], ["fill"], ["run"], ["fill"], ["run"], ["metrics"])
    for result in run_engines(where, (setup, steps), (setup, steps)):
        assert [run["ids"] for run in result if "ids" in run] == [plain] * 3
        assert result[4]["cached"] == WHOLE and not damaged(result[5])


@pytest.mark.slow
def test_a_measured_deadline(where: Path, model: Path, plain: list[int], tmp_root: Path) -> None:
    """A read never returns: the request is waited for no longer than recomputing takes here, which was measured.

    It has not returned either when the server shuts down.
    """
    setup = with_connector(model, tmp_root, recompute_tokens_per_s="measured", io_timeout_s=600.0)
    steps = (["run"], ["fill"], ["usage"], ["hang"], ["run"], ["metrics"])
    results = run_engine(where, setup, *steps)
    assert results[2]["pace"] > 10
    late = results[4]
    assert late["ids"] == plain and late["cached"] < WHOLE and late["seconds"] < 120
    assert results[-1]["vllm:kvxfer_load_chunks{cut}"] >= 1
