"""Random traces whose ids mean what they must: a block is named by all of the prompt up to its end."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st

from kvxfer.simulate import Request
from tests.simulate.oracle import Prompt

BLOCK_TOKENS = 4


@st.composite
def traces(draw: st.DrawFn, most: int = 30) -> list[Prompt]:
    """Prompts over three words, so that many begin alike."""
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=most))
    ids: dict[tuple[int, ...], int] = {}
    prompts, now = [], 0
    for path in paths:
        now += draw(st.integers(0, 3000))
        tokens = (len(path) - 1) * BLOCK_TOKENS + draw(st.integers(1, BLOCK_TOKENS))
        prompts.append((now, tokens, [ids.setdefault(path[: end + 1], len(ids)) for end in range(len(path))]))
    return prompts


def requests(prompts: list[Prompt]) -> list[Request]:
    return [Request(*prompt) for prompt in prompts]


def line(prompt: Prompt) -> str:
    ms, tokens, blocks = prompt
    return json.dumps({"timestamp": ms, "input_length": tokens, "output_length": 1, "hash_ids": blocks})


def write(path: Path, prompts: list[Prompt]) -> Path:
    path.write_text("".join(line(prompt) + "\n" for prompt in prompts))
    return path
