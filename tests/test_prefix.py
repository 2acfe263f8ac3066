from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.bitmap import CompletionBitmap
from kvxfer.geometry import MODELS, Kind, KVGeometry
from kvxfer.prefix import (
    GroupHits,
    PrefixResult,
    full_attention,
    on_all_ranks,
    sliding_window,
    state_space,
    usable_prefix,
)


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


# ---- sliding windows


@pytest.mark.parametrize(
    ("missing", "window", "usable"),
    [
        ((), 128, 624),
        ((0,), 128, 624),  # far behind the window
        (range(31), 128, 624),  # of 39 blocks before the cut, the last eight hold 127 tokens
        (range(32), 128, 0),
        ((31,), 128, 31 * 16),
        ((38,), 128, 608),
        ((39,), 128, 624),  # the last block is never used
        ((30,), 129, 624),  # 128 tokens are eight blocks
        ((30,), 130, 480),  # 129 reach into a ninth
        ((38,), 2, 608),
        (range(40), 1, 624),  # a token that looks at itself alone needs nothing
        (range(40), 2, 0),
        ((5, 12, 20), 128, 624),
        (range(5, 40), 64, 80),
        (range(3, 40), 64, 48),  # fewer tokens than a window: all there are
        ((0, *range(3, 40)), 64, 0),
        ((0, *range(5, 40)), 65, 80),
        ((0, *range(5, 40)), 66, 0),
    ],
)
def test_the_last_window_before_the_cut_must_have_arrived(missing: Any, window: int, usable: int) -> None:
    result = sliding_window(without(40, *missing), window=window, prompt_tokens=640, tokens_per_block=16)
    assert (result.usable_tokens, result.recompute_tokens) == (usable, 640 - usable)


def test_blocks_of_one_token() -> None:
    gap = GroupHits(bitmap=without(2, 0), tokens_per_block=1, kind=Kind.SLIDING_WINDOW, window=2)
    assert usable_prefix([gap], prompt_tokens=2).usable_tokens == 0
    assert usable_prefix([gap], prompt_tokens=3).usable_tokens == 2
    assert usable_prefix([replace(gap, window=9)], prompt_tokens=3).usable_tokens == 0


def test_windows_that_cross_chunks() -> None:
    """Chunks of 64 tokens; a cut at 112 with a window of 50 looks back to 63, in the first of them."""
    hits = {"prompt_tokens": 120, "tokens_per_block": 16, "blocks_per_chunk": 4}
    assert sliding_window(without(2), window=50, **hits).usable_tokens == 112
    assert sliding_window(without(2, 0), window=50, **hits).usable_tokens == 0
    assert sliding_window(without(2, 0), window=49, **hits).usable_tokens == 112
    assert sliding_window(without(2, 1), window=49, **hits).usable_tokens == 64


# ---- states


@pytest.mark.parametrize(
    ("missing", "prompt", "usable"),
    [
        ((), 640, 624),  # strictly before the prompt's end
        ((), 641, 640),
        ((39,), 641, 624),
        (range(39), 640, 0),  # the only state is after the whole prompt
        (range(39), 641, 640),  # one state is all it takes
        ((0, 1, 2), 640, 624),
        ((38,), 640, 608),
        (range(20, 40), 640, 320),
        (range(40), 640, 0),
    ],
)
def test_a_state_at_exactly_the_cut(missing: Any, prompt: int, usable: int) -> None:
    chunks = -(-prompt // 16)
    result = state_space(without(chunks, *missing, *range(40, chunks)), prompt_tokens=prompt, tokens_per_block=16)
    assert result.usable_tokens == usable


def test_a_chunk_keeps_the_state_after_its_last_block() -> None:
    hits = {"tokens_per_block": 16, "blocks_per_chunk": 4}
    assert state_space(without(2), prompt_tokens=128, **hits).usable_tokens == 64  # never 112
    assert state_space(without(2), prompt_tokens=97, **hits).usable_tokens == 96  # a chunk of two blocks
    assert state_space(without(2), prompt_tokens=96, **hits).usable_tokens == 64
    assert state_space(without(2), prompt_tokens=70, **hits).usable_tokens == 64  # a chunk without a whole block
    assert state_space(without(2, 0), prompt_tokens=70, **hits).usable_tokens == 0


# ---- several groups


def hits(bitmap: CompletionBitmap, per_block: int = 16, per_chunk: int = 1, **kind: Any) -> GroupHits:
    return GroupHits(bitmap=bitmap, tokens_per_block=per_block, blocks_per_chunk=per_chunk, **kind)


def window(tokens: int) -> dict[str, Any]:
    return {"kind": Kind.SLIDING_WINDOW, "window": tokens}


def test_a_cut_that_every_group_can_use() -> None:
    """Full attention reaches 28 blocks; the window's last blocks are missing there, and present before block 20."""
    full = hits(without(40, 28))
    sliding = hits(without(40, 25), **window(64))
    assert usable_prefix([full], prompt_tokens=640).usable_tokens == 448
    assert usable_prefix([sliding], prompt_tokens=640).usable_tokens == 624
    assert usable_prefix([full, sliding], prompt_tokens=640) == PrefixResult(
        usable_tokens=400, recompute_tokens=240, prefix_chunks=50, kept_beyond_gap=28
    )


def test_groups_that_only_meet_far_below() -> None:
    """Each lowers the other's cut in turn: 9 -> 7 -> 4 -> 2."""
    states = hits(without(9, 7, 6, 5, 4, 2), kind=Kind.OPAQUE)  # after blocks 1, 2, 4 and 9
    sliding = hits(without(9, 8, 7, 2), **window(17))  # one block before the cut
    assert [usable_prefix([g], prompt_tokens=145).usable_tokens for g in (states, sliding)] == [144, 112]
    for order in ([states, sliding], [sliding, states]):
        assert usable_prefix(order, prompt_tokens=145).usable_tokens == 64
    later = [states, hits(without(9, 8, 7, 3, 2), **window(17))]
    assert usable_prefix(later, prompt_tokens=145).usable_tokens == 32


def test_blocks_of_unequal_sizes() -> None:
    """A cut lies between whole blocks of every group: 48-token and 16-token blocks meet every 48 tokens."""
    wide, narrow = hits(without(4), 48), hits(without(10), 16)
    assert usable_prefix([wide, narrow], prompt_tokens=160).usable_tokens == 144
    assert usable_prefix([wide, hits(without(10, 8), 16)], prompt_tokens=160).usable_tokens == 96
    assert usable_prefix([wide, narrow, hits(without(5), 32)], prompt_tokens=160).usable_tokens == 96
    states = hits(without(2), 96, kind=Kind.OPAQUE)
    assert usable_prefix([narrow, states], prompt_tokens=160).usable_tokens == 96


def test_a_chunk_counts_where_all_ranks_have_it() -> None:
    ranks = [without(10, 7), without(10), without(10, 4, 9)]
    assert on_all_ranks(ranks) == without(10, 4, 7, 9)
    geometries = [replace(g, tokens_per_block=16) for g in MODELS["gpt-oss-120b"]]
    sliding, full = (GroupHits.of(g, ranks) for g in geometries)
    assert (sliding.kind, sliding.window, full.kind, full.window) == (Kind.SLIDING_WINDOW, 128, Kind.ATTENTION, None)
    assert usable_prefix([sliding, full], prompt_tokens=160).usable_tokens == 64
    states = GroupHits.of(KVGeometry.opaque((4,), tokens_per_block=32), ranks[1:2], blocks_per_chunk=2)
    assert (states.kind, states.tokens_per_chunk) == (Kind.OPAQUE, 64)
    with pytest.raises(ValueError, match="no rank"):
        on_all_ranks([])
    with pytest.raises(ValueError, match="different jobs"):
        on_all_ranks([without(3), without(4)])


# ---- against a search over all cuts, token by token


def can_use(group: GroupHits, cut: int, prompt: int) -> bool:
    """Whether a group can go on after `cut` tokens, asked of each token by itself."""
    block, chunk = group.tokens_per_block, group.tokens_per_block * group.blocks_per_chunk
    arrived = list(group.bitmap)

    def held(token: int) -> bool:
        return token // chunk < len(arrived) and arrived[token // chunk]

    if cut == 0:
        return True
    if cut % block:
        return False
    if group.kind is Kind.OPAQUE:
        whole_blocks = [b for b in range(prompt // block) if b // group.blocks_per_chunk == (cut - 1) // chunk]
        return held(cut - 1) and cut == (whole_blocks[-1] + 1) * block
    if group.kind is Kind.SLIDING_WINDOW:
        assert group.window is not None
        return all(held(token) for token in range(cut) if cut - token < group.window)
    return all(held(token) for token in range(cut))


def by_search(groups: list[GroupHits], prompt: int) -> PrefixResult:
    def greatest(limit: int) -> int:
        return max(cut for cut in range(limit + 1) if all(can_use(group, cut, prompt) for group in groups))

    usable, reach = greatest(max(prompt - 1, 0)), greatest(prompt)
    most = prompt - prompt % lcm(*(group.tokens_per_block for group in groups))
    before = sum(
        arrived
        for group in groups
        for index, arrived in enumerate(group.bitmap)
        if reach == most or index * group.tokens_per_block * group.blocks_per_chunk < reach
    )
    arrived = sum(sum(group.bitmap) for group in groups)
    return PrefixResult(
        usable_tokens=usable,
        recompute_tokens=prompt - usable,
        prefix_chunks=before,
        kept_beyond_gap=arrived - before,
    )


@st.composite
def group_hits(draw: st.DrawFn, prompt: int) -> GroupHits:
    per_block, per_chunk = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.integers(1, 3))
    most = -(-prompt // (per_block * per_chunk))
    count = most if draw(st.booleans()) else draw(st.integers(0, most))
    # Mostly there, mostly missing, or as it comes.
    rate = draw(st.sampled_from([1, 5, 9]))
    bits = [draw(st.integers(0, 9)) < rate for _ in range(count)]
    kind = draw(st.sampled_from([Kind.ATTENTION, Kind.MLA, Kind.SLIDING_WINDOW, Kind.OPAQUE]))
    return GroupHits(
        bitmap=CompletionBitmap.from_bools(bits),
        tokens_per_block=per_block,
        blocks_per_chunk=per_chunk,
        kind=kind,
        window=draw(st.integers(1, 20)) if kind is Kind.SLIDING_WINDOW else None,
    )


@settings(max_examples=150)
@given(st.data())
def test_the_answer_is_the_best_of_all_cuts(data: st.DataObject) -> None:
    check_best(data)


@pytest.mark.slow
@settings(max_examples=2000)
@given(st.data())
def test_the_answer_is_the_best_of_all_cuts_of_many(data: st.DataObject) -> None:
    check_best(data)


def check_best(data: st.DataObject) -> None:
    prompt = data.draw(st.integers(0, 60))
    groups = data.draw(st.lists(group_hits(prompt), min_size=1, max_size=3))
    assert usable_prefix(groups, prompt_tokens=prompt) == by_search(groups, prompt)


@given(st.data())
def test_a_chunk_more_never_makes_it_less(data: st.DataObject) -> None:
    prompt = data.draw(st.integers(1, 60))
    groups = data.draw(st.lists(group_hits(prompt), min_size=1, max_size=3))
    before = usable_prefix(groups, prompt_tokens=prompt).usable_tokens
    number = data.draw(st.integers(0, len(groups) - 1))
    bitmap = groups[number].bitmap
    if bitmap.n:
        more = CompletionBitmap(bitmap.n, bitmap.bits | 1 << data.draw(st.integers(0, bitmap.n - 1)))
        groups[number] = replace(groups[number], bitmap=more)
    assert usable_prefix(groups, prompt_tokens=prompt).usable_tokens >= before


def test_a_long_prompt_is_answered_at_once() -> None:
    """A million tokens, every other chunk of the window's group missing."""
    n = 62_500
    holes = CompletionBitmap(n, int("01" * (n // 2), 2))
    groups = [hits(CompletionBitmap.full(n)), hits(holes, **window(64))]
    assert usable_prefix(groups, prompt_tokens=16 * n).usable_tokens == 16


@pytest.mark.parametrize(
    "group",
    [
        {"tokens_per_block": 0},
        {"tokens_per_block": 16, "blocks_per_chunk": 0},
        {"tokens_per_block": 16, "window": 4},
        {"tokens_per_block": 16, "kind": Kind.SLIDING_WINDOW},
        {"tokens_per_block": 16, "kind": Kind.SLIDING_WINDOW, "window": 0},
        {"tokens_per_block": 16, "kind": Kind.OPAQUE, "window": 4},
    ],
)
def test_a_group_that_cannot_be_is_refused(group: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of a prompt's group"):
        GroupHits(bitmap=without(1), **group)


def test_what_cannot_be_answered_is_refused() -> None:
    for groups, prompt in (([], 5), ([hits(without(1))], -1), ([hits(without(1)), hits(without(3))], 32)):
        with pytest.raises(ValueError, match="prompt"):
            usable_prefix(groups, prompt_tokens=prompt)
