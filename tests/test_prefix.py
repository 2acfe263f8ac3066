from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.bitmap import CompletionBitmap
from kvxfer.prefix import PrefixResult, full_attention


def without(n: int, *missing: int) -> CompletionBitmap:
    return CompletionBitmap.from_bools(i not in missing for i in range(n))


def test_one_of_forty_missing_keeps_what_is_before_it() -> None:
    assert full_attention(without(40, 28), prompt_tokens=640, tokens_per_block=16) == PrefixResult(
        usable_tokens=448, recompute_tokens=192, prefix_chunks=28, kept_beyond_gap=11
    )


def test_the_rest_of_forty_missing_gives_the_same_prefix() -> None:
    result = full_attention(without(40, *range(28, 40)), prompt_tokens=640, tokens_per_block=16)
    assert (result.usable_tokens, result.recompute_tokens, result.kept_beyond_gap) == (448, 192, 0)


@pytest.mark.parametrize(
    ("chunks", "prompt", "per_block", "per_chunk", "usable"),
    [
        (40, 640, 16, 1, 624),  # a whole-prompt hit leaves a token to compute, hence a block
        (40, 641, 16, 1, 640),
        (3, 40, 16, 1, 32),  # never 48
        (2, 40, 16, 1, 32),
        (1, 16, 16, 1, 0),
        (1, 17, 16, 1, 16),
        (0, 640, 16, 1, 0),
        (0, 0, 16, 1, 0),
        (1, 1, 16, 1, 0),
        (2, 96, 16, 4, 80),  # six blocks in chunks of four
        (2, 97, 16, 4, 96),
        (1, 64, 16, 4, 48),
        (5, 5, 1, 1, 4),
    ],
)
def test_everything_arrived(chunks: int, prompt: int, per_block: int, per_chunk: int, usable: int) -> None:
    result = full_attention(
        CompletionBitmap.full(chunks), prompt_tokens=prompt, tokens_per_block=per_block, blocks_per_chunk=per_chunk
    )
    assert (result.usable_tokens, result.recompute_tokens) == (usable, prompt - usable)
    assert (result.prefix_chunks, result.kept_beyond_gap) == (chunks, 0)


@given(st.data())
def test_usable_tokens_are_whole_blocks_that_arrived_and_never_the_whole_prompt(data: st.DataObject) -> None:
    per_block, per_chunk = data.draw(st.integers(1, 64)), data.draw(st.integers(1, 8))
    prompt = data.draw(st.integers(0, 5000))
    chunks = -(-prompt // (per_block * per_chunk))
    bitmap = CompletionBitmap.from_bools(data.draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks)))
    result = full_attention(bitmap, prompt_tokens=prompt, tokens_per_block=per_block, blocks_per_chunk=per_chunk)
    assert result.usable_tokens % per_block == 0
    assert 0 <= result.usable_tokens <= result.prefix_chunks * per_chunk * per_block
    assert result.usable_tokens < prompt or prompt == 0
    assert result.usable_tokens + result.recompute_tokens == prompt
    # One block more would be too many: it did not arrive, or leaves nothing to compute.
    more = result.usable_tokens + per_block
    assert more > result.prefix_chunks * per_chunk * per_block or more >= prompt
    assert result.prefix_chunks + result.kept_beyond_gap == bitmap.count()


@pytest.mark.parametrize(
    ("prompt", "per_block", "per_chunk"), [(-1, 16, 1), (16, 0, 1), (16, 16, 0), (48, 16, 1), (0, 16, 1)]
)
def test_what_cannot_be_is_refused(prompt: int, per_block: int, per_chunk: int) -> None:
    with pytest.raises(ValueError, match="prompt"):
        full_attention(
            CompletionBitmap.full(4), prompt_tokens=prompt, tokens_per_block=per_block, blocks_per_chunk=per_chunk
        )
