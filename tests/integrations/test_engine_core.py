"""The real engine on a CPU with a small random model in float32: what is cached, and that the output stays the same.

The configuration is as people paste it, with the spec swapped for one whose worker copies on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import WHOLE, run_engine, with_tier

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, where: Path, model: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A root that one process has filled, and what it said."""
    root = tmp_path_factory.mktemp("stored") / "root"
    setup = with_tier(model, root_dir=str(root), deadline_s=3.0)
    return root, run_engine(where, setup, ["run"], ["fill"], ["run"])


def test_a_hit_after_the_device_and_the_host_have_forgotten(
    plain: list[int], stored: tuple[Path, list[dict[str, Any]]]
) -> None:
    cold, _, hit = stored[1]
    assert (cold["cached"], cold["ids"]) == (0, plain)
    assert (hit["cached"], hit["ids"]) == (WHOLE, plain)


def test_another_process_gets_as_much_as_arrives(
    where: Path, model: Path, plain: list[int], stored: tuple[Path, list[dict[str, Any]]]
) -> None:
    tail, all_of_it = list(range(5, 12)), list(range(12))
    plan: list[tuple[list[Any], int]] = [
        (["run"], WHOLE),  # what the other process stored
        (["damage", "flip", [5]], 5 * 32),
        (["run"], WHOLE),  # stored again
        (["damage", "zero", [5]], 5 * 32),
        (["run"], WHOLE),
        (["damage", "zero", tail], 5 * 32),  # only the first five arrive
        (["damage", "flip", [3]], 3 * 32),  # a hole
        (["damage", "zero", all_of_it], 0),  # nothing arrives
        (["run"], WHOLE),
    ]
    steps: list[list[Any]] = []
    for step, _ in plan:
        steps += [step, ["run"], ["fill"]] if step[0] == "damage" else [step, ["fill"]]
    results = run_engine(
        where,
        with_tier(model, root_dir=str(stored[0]), deadline_s=3.0),
        *steps,
        ["hang"],
        ["run"],
        ["release"],
        ["metrics"],
    )
    runs = [result for result in results if "ids" in result]
    assert [run["ids"] for run in runs] == [plain] * (len(plan) + 1)
    assert [run["cached"] for run in runs[:-1]] == [cached for _, cached in plan]
    late = runs[-1]
    assert late["cached"] < WHOLE and 2.5 < late["seconds"] < 60  # the deadline is 3 s
    metrics = results[-1]
    assert metrics["vllm:kvxfer_load_chunks{bad_sum}"] == 1 + 1 + len(tail) + 1 + len(all_of_it)
    assert metrics["vllm:kvxfer_load_chunks{cut}"] >= 1
    assert metrics["vllm:kvxfer_salvaged_chunks{}"] >= 5 + 5 + 5 + 3
