"""The real engine with several requests at once, preemption, chunks of several blocks, stored output, and resets.

In every case outputs are those of an engine without offloading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import ROW_BYTES, WHOLE, run_engine, with_tier

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

FOUR = [10, 11, 12, 13]


@pytest.fixture(scope="module")
def answers(where: Path, model: Path) -> list[dict[str, Any]]:
    """Of an engine without offloading: four prompts of 128 tokens with 160 more each, four of 400, a dialogue."""
    steps = [["many", FOUR, 128, 160], ["forget"], ["many", FOUR], ["run", 0, 400, 100], ["follow"]]
    many, _, short, dialogue, follow = run_engine(where, {"model": str(model)}, *steps)
    return [many, short, dialogue, follow]


def test_preemption_and_stored_output(where: Path, model: Path, answers: list[dict[str, Any]], tmp_path: Path) -> None:
    many, short, dialogue, follow = answers
    extra = {"offload_prompt_only": False, "chunks": 40}
    arguments = {"num_gpu_blocks_override": 20, "max_model_len": 600}
    setup = with_tier(model, root_dir=str(tmp_path / "root"), extra=extra, arguments=arguments)
    steps = [
        ["many", FOUR, 128, 160], ["told"], ["drain"], ["forget", True], ["many", FOUR, 128, 160], ["drain"],
        ["many", FOUR], ["drain"], ["forget", True], ["many", FOUR],
        ["run", 0, 400, 100], ["drain"], ["forget", True], ["follow"], ["counters"],
    ]  # fmt: skip
    done = run_engine(where, setup, *steps)
    pressed, again, first, second = (each for each in done if "all" in each)
    assert pressed["all"] == again["all"] == many["all"]
    assert done[1]["vllm"]["num_preemptions"] > 0
    assert sum(again["cached"]) > sum(pressed["cached"])
    assert first["all"] == second["all"] == short["all"] and max(second["cached"]) == WHOLE
    said, then = (each for each in done if "ids" in each)
    assert said["ids"] == dialogue["ids"] and then["ids"] == follow["ids"]
    assert then["cached"] == 15 * 32  # of 499: 400 of the prompt, and 99 that were computed after it
    load = done[-1]["load"]
    assert load["hit"] > 12 and not any(load[why] for why in ("bad_sum", "foreign", "truncated", "bad_trailer"))


def test_chunks_of_four_blocks(
    where: Path, model: Path, answers: list[dict[str, Any]], plain: list[int], tmp_path: Path
) -> None:
    extra = {"blocks_per_chunk": 4, "chunks": 160}
    keys = {"slab_bytes": 4096 + 4 * ROW_BYTES + 4096}
    arguments = {"num_gpu_blocks_override": 80}
    steps = [
        ["run"], ["fill"], ["forget", True], ["run"], ["places"],
        ["many", FOUR], ["fill"], ["forget", True], ["many", FOUR], ["counters"],
    ]  # fmt: skip
    setup = with_tier(model, root_dir=str(tmp_path / "root"), extra=extra, arguments=arguments, **keys)
    cold, _, _, hit, places, first, _, _, second, counters = run_engine(where, setup, *steps)
    assert (cold["cached"], cold["ids"]) == (0, plain) and (hit["cached"], hit["ids"]) == (WHOLE, plain)
    assert first["all"] == second["all"] == answers[1]["all"] and second["cached"] == [WHOLE] * 4
    assert counters["load"]["hit"] == 3 + 4 * 3
    path, offset, size = places["places"][1]  # of three
    assert size == 4 * ROW_BYTES
    with Path(path).open("r+b") as file:
        file.seek(offset + size - 1)
        last = file.read(1)[0]
        file.seek(offset + size - 1)
        file.write(bytes([last ^ 1]))
    steps = [["run"], ["counters"], ["fill"], ["forget", True], ["run"]]
    damaged, counters, _, _, again = run_engine(where, setup, *steps)
    assert (damaged["cached"], damaged["ids"]) == (4 * 32, plain) and (again["cached"], again["ids"]) == (WHOLE, plain)
    assert (counters["load"]["hit"], counters["load"]["bad_sum"]) == (2, 1)


@pytest.mark.parametrize("reset", [False, True], ids=["kept", "reset_on_drain"])
def test_a_reset_of_vllms_caches(where: Path, model: Path, plain: list[int], tmp_path: Path, reset: bool) -> None:
    """vLLM's reset empties device and host. The tier keeps what it has, or forgets it, as it was told."""
    steps: list[list[Any]] = [["run"], ["run", 1], ["stats"], ["forget", True], ["run"], ["counters"]]
    steps += [["run", 1], ["forget"], ["run"], ["stats"]]
    done = run_engine(where, with_tier(model, root_dir=str(tmp_path / "root"), reset_on_drain=reset), *steps)
    runs = [each for each in done if "ids" in each]
    assert [runs[0]["ids"], runs[2]["ids"], runs[4]["ids"]] == [plain] * 3
    assert done[3]["reset"]
    assert [runs[0]["cached"], runs[2]["cached"], runs[4]["cached"]] == [0, 0 if reset else WHOLE, WHOLE]
    assert done[5]["load"]["hit"] == (0 if reset else 12)
    before, after = (each for each in done if "epoch" in each)
    assert after["epoch"] - before["epoch"] == int(reset)
    (run,) = run_engine(where, with_tier(model, root_dir=str(tmp_path / "root"), reset_on_drain=reset), ["run"])
    assert run["ids"] == plain and run["cached"] == WHOLE  # stored again
