"""KvxferTieringSpec in the real engine on a CPU, configured as people paste it, with nothing swapped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import KEYS, ROW_BYTES, TIER, WHOLE, environment, run_engine, tiering
from tests.integrations.test_tiering_docs import pasted

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

OURS = {key: pasted()["kv_connector_extra_config"][key] for key in ("spec_name", "spec_module_path")}
WORKER = "kvxfer.integrations.vllm_tiering_worker.KvxferTieringWorker"
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CANONICAL = {"canonical_layout": True}
ROWS = 64  # of the host tier: what is under way to the drive leaves room for a prompt, and `fill` fills it
FEW = {"num_gpu_blocks_override": 20, "max_model_len": 512}  # four requests of nine blocks push one another out
SEEDS = [0, 50, 51, 52]  # prompts


def kvxfer_tier(root: Path) -> dict[str, Any]:
    return TIER | KEYS | {"root_dir": str(root)}


def fs_tier(root: Path) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root), "n_read_threads": 2, "n_write_threads": 2}


def setup(model: Path, *tiers: dict[str, Any], arguments: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """KvxferTieringSpec, unless `extra` names another."""
    return {
        "model": str(model),
        "transfer": tiering(*tiers, **({"chunks": ROWS} | OURS | extra)),
        "child": "tests.integrations.tiering_child:TieringChild",
        "arguments": arguments or {},
    }


@pytest.fixture(scope="module")
def plains(where: Path, model: Path) -> dict[int, list[int]]:
    """The outputs of an engine without offloading, by prompt."""
    results = run_engine(where, {"model": str(model)}, *(["run", seed] for seed in SEEDS))
    return {seed: result["ids"] for seed, result in zip(SEEDS, results, strict=True)}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiering")


def expect(result: dict[str, Any], plain: list[int], cached: int = WHOLE) -> None:
    assert (result["cached"], result["ids"]) == (cached, plain)


def hits_after_everything_was_forgotten(where: Path, one: dict[str, Any], plains: dict[int, list[int]]) -> None:
    """Cold; from the tier, when device and host have other prompts; when vLLM has reset its prefix cache; at once."""
    steps = [["worker"], ["run"], ["fill"], ["run"], ["forget"], ["run"], ["many", SEEDS], ["fill"], ["moved"]]
    worker, cold, _, evicted, _, forgotten, several, _, moved = run_engine(where, one, *steps)
    assert worker["worker"] == WORKER
    expect(cold, plains[0], 0)
    expect(evicted, plains[0])
    expect(forgotten, plains[0])
    assert several == {"all": [plains[seed] for seed in SEEDS], "cached": [WHOLE, 0, 0, 0]}
    assert moved["load"] == 2 * 12 * ROW_BYTES  # the third time the device has the prompt itself
    assert moved["store"] >= (1 + 7 + 3) * 12 * ROW_BYTES and moved["store"] % ROW_BYTES == 0


@pytest.fixture(scope="module")
def canonical_root(where: Path, model: Path, plains: dict[int, list[int]], roots: Path) -> Path:
    """Filled by one rank, with the configuration that docs/vllm.md prints, but for its sizes and places."""
    one, config = setup(model, **CANONICAL), pasted()
    extra = config["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = one["transfer"]["kv_connector_extra_config"]["cpu_bytes_to_use"]
    (tier,) = extra["secondary_tiers"]
    tier |= KEYS | {"root_dir": str(roots / "canonical")}
    hits_after_everything_was_forgotten(where, one | {"transfer": config}, plains)
    return roots / "canonical"


def test_direct_rows(where: Path, model: Path, plains: dict[int, list[int]], roots: Path) -> None:
    one = setup(model, kvxfer_tier(roots / "direct"))
    hits_after_everything_was_forgotten(where, one, plains)
    found = run_engine(where, one, *(["run", seed] for seed in SEEDS))  # a new process
    for seed, result in zip(SEEDS, found, strict=True):
        expect(result, plains[seed])


def test_canonical_rows_of_any_tensor_parallel_size(
    where: Path, model: Path, plains: dict[int, list[int]], canonical_root: Path
) -> None:
    """What one rank has stored two find, and the other way round."""
    tier = kvxfer_tier(canonical_root)
    two = setup(model, tier, arguments=TWO, **CANONICAL)
    theirs, mine, _, again = run_engine(where, two, ["run"], ["run", 77], ["fill"], ["run", 77])
    expect(theirs, plains[0])
    expect(again, mine["ids"])
    assert mine["cached"] == 0
    plain, found = (
        run_engine(where, one, ["run", 77])[0] for one in ({"model": str(model)}, setup(model, tier, **CANONICAL))
    )
    assert plain["ids"] == mine["ids"]
    expect(found, plain["ids"])


@pytest.mark.slow
def test_direct_rows_of_two_ranks_are_theirs(
    where: Path, model: Path, plains: dict[int, list[int]], tmp_path: Path
) -> None:
    two = setup(model, kvxfer_tier(tmp_path / "root"), arguments=TWO)
    cold, _, hit = run_engine(where, two, ["run"], ["fill"], ["run"])
    expect(cold, plains[0], 0)
    expect(hit, plains[0])
    (one,) = run_engine(where, setup(model, kvxfer_tier(tmp_path / "root")), ["run"])
    expect(one, plains[0], 0)  # a miss: these rows mean something else to one rank


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, CANONICAL], ids=["direct", "canonical"])
def test_chunks_of_four_blocks(
    where: Path, model: Path, plains: dict[int, list[int]], tmp_path: Path, layout: dict[str, Any]
) -> None:
    """With two threads for a job's copies. A prompt of 400 tokens has three chunks of 128."""
    more: dict[str, Any] = {"blocks_per_chunk": 4, "kvxfer_copy_threads": 2, "cpu_bytes_to_use": 60 * ROW_BYTES}
    one = setup(model, kvxfer_tier(tmp_path / "root"), **layout, **more)
    cold, _, hit, _, again = run_engine(where, one, ["run"], ["fill"], ["run"], ["forget"], ["run"])
    expect(cold, plains[0], 0)
    expect(hit, plains[0])
    expect(again, plains[0])
    (found,) = run_engine(where, one, ["run"])
    expect(found, plains[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, CANONICAL], ids=["direct", "canonical"])
def test_over_the_stock_fs_tier(
    where: Path, model: Path, plains: dict[int, list[int]], tmp_path: Path, layout: dict[str, Any]
) -> None:
    one = setup(model, fs_tier(tmp_path / "root"), **layout)
    cold, _, hit, _, again = run_engine(where, one, ["run"], ["fill"], ["run"], ["forget"], ["run"])
    expect(cold, plains[0], 0)
    expect(hit, plains[0])
    expect(again, plains[0])
    (found,) = run_engine(where, one, ["run"])
    expect(found, plains[0])


@pytest.mark.slow
def test_files_of_another_worker_are_read_and_the_other_way_round(
    where: Path, model: Path, plains: dict[int, list[int]], tmp_path: Path
) -> None:
    """The stock fs tier under the test-only worker that copies page by page, and under kvxfer's: one set of files."""
    other = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.integrations.cpu_spec"}
    tier = fs_tier(tmp_path / "root")
    for seed, writer, reader in ((0, other, OURS), (50, OURS, other)):
        cold, _ = run_engine(where, setup(model, tier, **writer), ["run", seed], ["fill"])
        expect(cold, plains[seed], 0)
        (found,) = run_engine(where, setup(model, tier, **reader), ["run", seed])
        expect(found, plains[seed])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, CANONICAL], ids=["direct", "canonical"])
def test_preempted_requests(where: Path, model: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Blocks are taken away from requests whose stores must end first."""
    ask = ["many", SEEDS, 128, 160]
    (want,) = run_engine(where, {"model": str(model), "arguments": FEW}, ask)
    one = setup(model, kvxfer_tier(tmp_path / "root"), arguments=FEW, offload_prompt_only=False, **layout)
    first, second, moved = run_engine(where, one, ask, ask, ["moved"])
    assert first["all"] == second["all"] == want["all"]
    assert second["cached"] == [128] * 4
    assert moved["preempted"] > 0 and moved["store"] > 0
    assert moved["load"] >= 4 * 4 * ROW_BYTES  # the prompts' blocks, the second time


def start_fails(where: Path, one: dict[str, Any], **environ: str) -> str:
    """What an engine says that does not start."""
    command = [sys.executable, "-m", "tests.integrations.engine_child", json.dumps(one), "[]"]
    done = subprocess.run(
        command, cwd=where, env=environment(where) | environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode != 0, done.stdout[-2000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_key_that_cannot_be_is_refused_at_start(where: Path, model: Path, tmp_path: Path) -> None:
    one = setup(model, kvxfer_tier(tmp_path / "root"), kvxfer_threads=2)
    assert "unknown keys ['kvxfer_threads']" in start_fails(where, one)


@pytest.mark.slow
def test_pipeline_stages_of_unequal_layers_are_refused_at_start(where: Path, model: Path, tmp_path: Path) -> None:
    """vLLM's own spec lays their rows over one another, and hits give wrong output."""
    arguments = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": False}
    one = setup(model, kvxfer_tier(tmp_path / "root"), arguments=arguments)
    assert "pipeline stages of unequal layers" in start_fails(where, one, VLLM_PP_LAYER_PARTITION="3,1")
