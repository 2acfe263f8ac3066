"""Bitmaps and prefixes are sets and searches: the plainest way to say it, against what is shipped."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.bitmap import CompletionBitmap
from kvxfer.geometry import Kind
from kvxfer.prefix import GroupHits, full_attention, on_all_ranks, usable_prefix
from tests.examples import examples

few = settings(max_examples=examples(60))
FLAGS = st.lists(st.booleans(), max_size=200)


@few
@given(st.integers(0, 200), st.data())
def test_a_bitmap_is_a_set_of_numbers(n: int, data: st.DataObject) -> None:
    arrived = data.draw(st.sets(st.integers(0, max(0, n - 1)), max_size=n) if n else st.just(set()))
    for bitmap in (
        CompletionBitmap(n, sum(1 << i for i in arrived)),
        CompletionBitmap.from_bools(i in arrived for i in range(n)),
        CompletionBitmap.from_status(bytes(0 if i in arrived else 1 + i % 255 for i in range(n))),
    ):
        assert {i for i, bit in enumerate(bitmap) if bit} == arrived
        assert {i for i in range(n) if bitmap[i]} == {i for i in range(n) if bitmap[i - n]} == arrived
        assert bitmap.count() == len(arrived)
        assert set(bitmap.missing()) == set(range(n)) - arrived
        run = 0
        while run in arrived:
            run += 1
        assert bitmap.leading_run() == run
        assert (bitmap.all(), bitmap.none()) == (len(arrived) == n, not arrived)


@few
@given(st.integers(1, 100), st.data())
def test_ranks_agree_on_what_all_of_them_have(n: int, data: st.DataObject) -> None:
    """Whatever order they answer in, and whoever answers twice."""
    ranks = data.draw(st.lists(st.sets(st.integers(0, n - 1)), min_size=1, max_size=5))
    bitmaps = [CompletionBitmap(n, sum(1 << i for i in rank)) for rank in ranks]
    together = on_all_ranks(bitmaps)
    assert {i for i in range(n) if together[i]} == set.intersection(*ranks)
    order = data.draw(st.permutations([*bitmaps, bitmaps[0]]))
    assert on_all_ranks(order) == together
    assert together.leading_run() == min(bitmap.leading_run() for bitmap in bitmaps)


@few
@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 120), st.data())
def test_full_attention_counts_tokens_one_by_one(
    per_block: int, per_chunk: int, prompt: int, data: st.DataObject
) -> None:
    most = -(-prompt // (per_block * per_chunk))
    arrived = data.draw(st.lists(st.booleans(), min_size=most, max_size=most))
    result = full_attention(
        CompletionBitmap.from_bools(arrived),
        prompt_tokens=prompt,
        tokens_per_block=per_block,
        blocks_per_chunk=per_chunk,
    )
    usable = 0
    for token in range(prompt):
        if not arrived[token // (per_block * per_chunk)]:
            break
        if (token + 1) % per_block == 0 and token + 1 < prompt:  # a whole block, and something is left to compute
            usable = token + 1
    assert result.usable_tokens == usable
    assert result.usable_tokens + result.recompute_tokens == prompt
    assert result.prefix_chunks + result.kept_beyond_gap == sum(arrived)
    assert result.usable_tokens < prompt or prompt == 0


@few
@given(st.lists(FLAGS, min_size=1, max_size=3), st.data())
def test_no_group_and_no_gap_ever_adds_tokens(groups: list[list[bool]], data: st.DataObject) -> None:
    prompt = max(map(len, groups)) * 6 + 5
    kinds = [data.draw(st.sampled_from(list(Kind))) for _ in groups]
    hits = [
        GroupHits(
            bitmap=CompletionBitmap.from_bools(flags),
            tokens_per_block=data.draw(st.sampled_from([1, 2, 3, 6])),
            kind=kind,
            window=data.draw(st.integers(1, 30)) if kind is Kind.SLIDING_WINDOW else None,
        )
        for flags, kind in zip(groups, kinds, strict=True)
    ]
    together = usable_prefix(hits, prompt_tokens=prompt).usable_tokens
    for hit in hits:
        assert together <= usable_prefix([hit], prompt_tokens=prompt).usable_tokens
        assert together % hit.tokens_per_block == 0
    assert together < prompt
