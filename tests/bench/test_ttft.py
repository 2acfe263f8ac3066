"""Time to first token: an answer that is wrong, or was not cached as it should be, gets no speed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from bench import ttft
from bench.options import Options
from bench.table import Table

TRUTH = {prompt: [prompt] for prompt in range(ttft.PROMPTS)}


class Answers:
    """A server that answers every prompt rightly, but for what it is told."""

    def __init__(self, **wrong: Any) -> None:
        self.asked: list[int] = []
        self._wrong = wrong

    def ask(self, prompt: int) -> dict[str, Any]:
        self.asked.append(prompt)
        return {"ids": [prompt], "cached": 96, "seconds": 0.1} | self._wrong


def test_prompts_come_in_turn() -> None:
    server = Answers()
    case = ttft.Case(server, 96, TRUTH)
    assert [case.run() for _ in range(ttft.PROMPTS + 1)] == [None] * (ttft.PROMPTS + 1)
    assert server.asked == [*range(ttft.PROMPTS), 0]


@pytest.mark.parametrize(
    ("wrong", "why"), [({"ids": [99]}, r"got token \[99\], not \[0\]"), ({"cached": 64}, "64 tokens of prompt 0")]
)
def test_what_is_wrong_is_said(wrong: dict[str, Any], why: str) -> None:

    said = ttft.Case(Answers(**wrong), 96, TRUTH).run()
    assert said is not None
    assert re.search(why, said)


def test_an_engine_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ttft, "CHILD", "bench.no_such_module")
    with ttft.Server("it", tmp_path, None) as server, pytest.raises(OSError, match="the engine of it has ended with 1"):
        server.ready()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_so() -> None:
    table = Table({}, None)
    ttft.run(table, Options())
    assert not table.rows and "make bench-vllm" in table.notes[0]
