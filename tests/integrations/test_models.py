"""Models whose rows are not one for each chunk of tokens, in the real engine: sliding windows, latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import KEYS, TIER, WHOLE, run_engine, tiering

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def setup(model: Path, root: Path, *, chunks: int, **arguments: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "transfer": tiering(TIER | KEYS | {"root_dir": str(root)}, chunks=chunks),
        "arguments": arguments,
        "child": "tests.integrations.models_child:GroupsChild",
    }


def test_sliding_windows(where: Path, tmp_path: Path) -> None:
    """Three groups: two of sliding layers, whose rows are the window at a prompt's end, and one that has them all.

    So there is a hit exactly at the end of a prompt that was stored, and none where any group has lost a chunk of it.
    """
    from tests.integrations.tiny_model import write_sliding_model

    model, device = write_sliding_model(tmp_path / "model"), {"num_gpu_blocks_override": 100}
    without = {
        "model": str(model),
        "arguments": device,
        "child": "tests.integrations.models_child:BranchChild",
    }
    prompts: list[list[Any]] = [["run"], ["branch", 384], ["branch", 352], ["branch", 256]]
    right = [result["ids"] for result in run_engine(where, without, *prompts)]
    assert len(set(map(tuple, right))) == len(prompts)

    damage: list[list[Any]] = [["damage", 2, 5], ["damage", 0, -1], ["damage", 1, -1]]
    steps: list[list[Any]] = [["run"], ["fill"]]
    for step in prompts:
        steps += [step, ["fill"]]
    for step in damage:
        steps += [step, ["run"], ["fill"], ["run"], ["fill"]]
    results = run_engine(where, setup(model, tmp_path / "root", chunks=40, **device), *steps, ["metrics"], ["rows"])
    runs = [(result["cached"], result["ids"]) for result in results if "ids" in result]
    assert runs[0] == (0, right[0])
    assert runs[1:5] == list(zip([WHOLE, WHOLE, 0, 0], right, strict=True))
    assert runs[5:] == [(0, right[0]), (WHOLE, right[0])] * len(damage)
    metrics, rows = results[-2:]
    assert metrics["vllm:kvxfer_load_chunks{bad_sum}"] == len(damage)
    assert rows["groups"]["2"] == 12 and 2 <= rows["groups"]["0"] == rows["groups"]["1"] < 12
    check(rows["stored"], rows["loaded"], atleast=12 + 2 * rows["groups"]["0"])


def test_latent_attention(where: Path, tmp_path: Path) -> None:
    """Ids are not compared: this machine's kernels round otherwise after a hit. The bytes of the rows are."""
    from tests.integrations.tiny_model import write_latent_model

    model = write_latent_model(tmp_path / "model")
    there = setup(model, tmp_path / "root", chunks=16, dtype="bfloat16")  # some kernels know no float32
    cold, _, first = run_engine(where, there, ["run"], ["fill"], ["rows"])
    assert cold["cached"] == 0
    hit, metrics, second = run_engine(where, there, ["run"], ["metrics"], ["rows"])
    assert hit["cached"] == WHOLE
    assert metrics["vllm:kvxfer_load_chunks{hit}"] == len(second["loaded"]) == 12
    assert metrics["vllm:kvxfer_verified_segments{}"] >= 12
    check(first["stored"], second["loaded"], atleast=12)


def check(stored: dict[str, str], loaded: dict[str, str], *, atleast: int) -> None:
    """What was loaded is what was stored under its key, and not all the same."""
    assert len(loaded) >= atleast and len(set(loaded.values())) == len(loaded)
    assert {key: stored.get(key) for key in loaded} == loaded
