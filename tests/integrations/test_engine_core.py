"""The real engine on a CPU with a small random model in float32: what is cached, and that the output stays the same.

The configuration is as people paste it, with the spec swapped for one whose worker copies on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.integrations.harness  # noqa: F401 - skips where there is no vLLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WHOLE = 12 * 32  # tokens of the prompt's full blocks
KEYS = {"capacity_bytes": 256 << 20, "io_threads": 2, "deadline_s": 3.0}


def run_engine(where: Path, model: Path, keys: dict[str, Any] | None, *steps: Any) -> list[dict[str, Any]]:
    """What each step gave, in a process of its own."""
    arguments = [str(model), json.dumps(keys), json.dumps(steps)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.engine_child", *arguments],
        cwd=where,
        env=os.environ | {"PYTHONPATH": str(where), "PYTHONHASHSEED": "0"},  # 0.28 hashes blocks with it
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and len(lines) == len(steps) + 1, done.stdout[-3000:] + done.stderr[-6000:]
    results = [json.loads(line) for line in lines]
    assert "site-packages" in results[-1]["kvxfer"]
    assert not results[-1]["left"]  # vLLM could unmap its memory
    return results[:-1]


@pytest.fixture(scope="module")
def where(request: pytest.FixtureRequest) -> Path:
    return request.config.rootpath


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integrations.tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def plain(where: Path, model: Path) -> list[int]:
    """The output of an engine without offloading."""
    (result,) = run_engine(where, model, None, ["run"])
    assert result["cached"] == 0
    return list(result["ids"])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, where: Path, model: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A root that one process has filled, and what it said."""
    root = tmp_path_factory.mktemp("stored") / "root"
    return root, run_engine(where, model, KEYS | {"root_dir": str(root)}, ["run"], ["fill"], ["run"])


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
        where, model, KEYS | {"root_dir": str(stored[0])}, *steps, ["hang"], ["run"], ["release"], ["metrics"]
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
