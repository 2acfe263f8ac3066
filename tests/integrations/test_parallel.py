"""Several ranks in the real engine, beside vLLM's own tier where that answers wrong without a word.

Direct rows are whatever the ranks' pages were, in the order of the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import KEYS, TIER, WHOLE, run_engine, tiering

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = 24  # enough for a prompt, whatever vLLM makes of uneven stages


def setup(model: Path, *tiers: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """A setup for engine_child; with more than one rank, each is a process."""
    if arguments:
        arguments["distributed_executor_backend"] = "mp"
    if "pipeline_parallel_size" in arguments:
        arguments["worker_cls"] = "tests.integrations.parallel_child.StageWorker"
    return {
        "model": str(model),
        "transfer": tiering(*tiers, chunks=ROWS),
        "arguments": arguments,
        "child": "tests.integrations.parallel_child:TiersChild",
    }


def ours(root: Path, **keys: Any) -> dict[str, Any]:
    return TIER | KEYS | {"root_dir": str(root / "kvxfer")} | keys


def stock(root: Path) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root / "fs")}


def seen(results: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    return [(result["cached"], result["ids"]) for result in results if "ids" in result]


def test_what_two_tensor_ranks_stored_is_a_miss_for_one(
    where: Path, model: Path, plain: list[int], tmp_path: Path
) -> None:
    """vLLM's fs tier believes that direct rows do not depend on the number of ranks, and serves another's."""
    both = run_engine(
        where, setup(model, ours(tmp_path), stock(tmp_path), tensor_parallel_size=2), ["run"], ["fill"], ["run"]
    )
    assert seen(both) == [(0, plain), (WHOLE, plain)]
    one = run_engine(where, setup(model, ours(tmp_path)), ["run"], ["fill"], ["run"])
    assert seen(one) == [(0, plain), (WHOLE, plain)]
    ((cached, ids),) = seen(run_engine(where, setup(model, stock(tmp_path)), ["run"]))
    assert cached == WHOLE and ids != plain, "vLLM's own tier is right by now: say so in docs/vllm.md"


def test_uneven_pipeline_stages_are_refused(
    where: Path, model: Path, plain: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under vLLM alone they write over one another's rows in host memory: a hit gives other output."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    with pytest.raises(AssertionError, match="VLLM_PP_LAYER_PARTITION='3,1'"):
        run_engine(where, setup(model, ours(tmp_path, equal_pipeline_stages=True), pipeline_parallel_size=2), ["run"])
    results = run_engine(where, setup(model, stock(tmp_path), pipeline_parallel_size=2), ["run"], ["fill"], ["run"])
    cold, (cached, ids) = seen(results)
    assert cold == (0, plain)
    assert cached > 0 and ids != plain, "vLLM is right by now: say so in docs/vllm.md"


def test_even_pipeline_stages_hit(where: Path, model: Path, plain: list[int], tmp_path: Path) -> None:
    tier = ours(tmp_path, equal_pipeline_stages=True)
    results = run_engine(where, setup(model, tier, pipeline_parallel_size=2), ["run"], ["fill"], ["run"])
    assert seen(results) == [(0, plain), (WHOLE, plain)]
