"""The simulated store beside lists, and what holds for every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.bitmap import CompletionBitmap
from kvxfer.errors import ConfigError
from kvxfer.policy import POLICIES
from kvxfer.prefix import full_attention
from kvxfer.simulate import Replay, Setup, replay, usable_tokens
from tests.simulate import oracle
from tests.simulate.oracle import Prompt
from tests.simulate.prompts import BLOCK_TOKENS, requests, traces

BLOCK = 1000  # bytes
policies = pytest.mark.parametrize("policy", POLICIES)


def setup(policy: str, capacity: int, **other: float) -> Setup:
    return Setup(policy=policy, capacity_blocks=capacity, block_bytes=BLOCK, block_tokens=BLOCK_TOKENS, **other)


@given(traces(), st.integers(1, 14))
def test_lru_is_a_list(prompts: list[Prompt], capacity: int) -> None:
    expected = oracle.least_recently_used(prompts, capacity, BLOCK_TOKENS)
    found = replay(requests(prompts), setup("lru", capacity))
    counts = found.counts
    assert (counts.requests, counts.prompt_tokens) == (len(prompts), sum(tokens for _, tokens, _ in prompts))
    assert (counts.hit_tokens, counts.hit_blocks) == (expected.hit_tokens, expected.hit_blocks)
    assert (counts.stored_blocks, counts.evicted_blocks) == (expected.stored, expected.evicted)
    assert (counts.dropped_blocks["no_room"], counts.peak_blocks) == (expected.dropped, expected.peak)
    assert (found.held_blocks, found.unreachable_blocks) == (
        len(expected.order),
        oracle.unreachable(expected.order, prompts),
    )


@policies
@settings(max_examples=60)
@given(traces(), st.integers(1, 14), st.booleans(), st.booleans())
def test_what_holds_of_every_policy(
    policy: str, prompts: list[Prompt], capacity: int, second_touch: bool, budget: bool
) -> None:
    limits = {"bytes_per_s": 2.5 * BLOCK, "burst_bytes": 3 * BLOCK} if budget else {}
    model = Replay(setup(policy, capacity, second_touch_names=100 if second_touch else 0, **limits))
    most = Replay(setup("lru", 10**6))
    counts = model.counts
    for request in requests(prompts):
        before = replace(counts)
        model.step(request)
        most.step(request)
        assert model.held_blocks == counts.stored_blocks - counts.evicted_blocks <= capacity
        assert 0 <= counts.hit_blocks - before.hit_blocks <= len(request.blocks)
        assert counts.hit_blocks <= most.counts.hit_blocks
        if budget:
            assert counts.stored_blocks * BLOCK <= 3 * BLOCK + 2.5 * BLOCK * request.ms / 1000
    assert counts.hit_tokens <= most.counts.hit_tokens
    assert counts.peak_blocks <= capacity
    blocks = [block for _, _, blocks in prompts for block in blocks]
    settled = counts.hit_blocks + counts.stored_blocks + sum(counts.dropped_blocks.values())
    assert settled <= counts.blocks == len(blocks)  # the rest was there, beyond a gap
    held_beyond_a_gap = len(blocks) - settled
    # Each block is looked at once; what was there is used, and what was not stored or evicted costs nothing.
    assert counts.operations == (
        len(blocks) + counts.hit_blocks + held_beyond_a_gap + counts.stored_blocks + counts.evicted_blocks
    )
    if second_touch:
        assert counts.stored_blocks <= len(blocks) - len(set(blocks))


@policies
@settings(max_examples=30)
@given(traces())
def test_a_store_that_is_never_full_keeps_all(policy: str, prompts: list[Prompt]) -> None:
    found = replay(requests(prompts), setup(policy, 1000))
    seen: set[int] = set()
    hits = 0
    for _, _, blocks in prompts:
        hits += sum(block in seen for block in blocks)
        seen.update(blocks)
    counts = found.counts
    assert (counts.hit_blocks, counts.stored_blocks, counts.evicted_blocks) == (hits, len(seen), 0)
    assert (found.held_blocks, found.unreachable_blocks, set(counts.dropped_blocks.values())) == (len(seen), 0, {0})


@settings(max_examples=40)
@given(traces())
def test_the_second_offer_is_stored(prompts: list[Prompt]) -> None:
    found = replay(requests(prompts), setup("lru", 1000, second_touch_names=1000))
    offered: list[int] = []
    stored: list[int] = []
    dropped = 0
    for _, _, blocks in prompts:
        missing = [block for block in blocks if block not in stored]
        fresh = [block for block in missing if block not in offered]
        # What is behind a fresh one would be of no use: it is offered, and left out.
        wanted = missing[: missing.index(fresh[0])] if fresh else missing
        stored += wanted
        dropped += len(missing) - len(wanted)
        offered += fresh
    assert found.counts.stored_blocks == len(stored)
    assert found.counts.dropped_blocks["second_touch"] == dropped


def test_a_budget_fills_with_the_traces_own_time() -> None:
    one = setup("lru", 1000, bytes_per_s=BLOCK, burst_bytes=2 * BLOCK)
    prompts = [(0, 12, [0, 1, 2]), (0, 4, [3]), (1000, 8, [4, 5]), (60_000, 12, [6, 7, 8])]
    counts = replay(requests(prompts), one).counts
    assert (counts.stored_blocks, counts.dropped_blocks["budget"]) == (2 + 0 + 1 + 2, 1 + 1 + 1 + 1)


def test_blocks_behind_a_gap_are_unreachable() -> None:
    """Policies leave no gap, so one is made: 0 and 5 are not held."""
    model = Replay(setup("lru", 10))
    model._held.update({1: 0, 2: 1, 3: None, 4: 3, 6: 5})
    assert (model.held_blocks, model.unreachable_blocks()) == (5, 3)


@policies
def test_what_is_there_behind_a_gap_is_used_and_not_stored_again(policy: str) -> None:
    model = Replay(setup(policy, 10))
    (request,) = requests([(0, 12, [0, 1, 2])])
    model.step(request)
    model._policy.remove(0)
    del model._held[0]
    assert model.unreachable_blocks() == 2
    before = model.counts.operations
    model.step(request)
    assert (model.counts.hit_blocks, model.counts.stored_blocks, model.held_blocks) == (0, 4, 3)
    assert model.counts.operations - before == 3 + 2 + 1
    assert model.unreachable_blocks() == 0


def test_a_hit_is_a_use() -> None:
    for policy in ("lru", "arc"):
        found = replay(requests([(0, 4, [block]) for block in (0, 1, 0, 2, 0, 1)]), setup(policy, 2))
        assert (found.counts.hit_blocks, found.counts.evicted_blocks) == (2, 2), policy  # of 1, and then of 2


def test_what_is_behind_a_block_that_is_not_admitted_is_left_out() -> None:
    """The filter has forgotten 0, the last of its set, and knows 1, the first of the next one."""
    prompts = [(0, 8, [8, 9]), (0, 8, [0, 1]), (0, 8, [5, 6]), (0, 4, [7]), (0, 8, [0, 1])]
    counts = replay(requests(prompts), setup("lru", 10, second_touch_names=3)).counts
    assert (counts.stored_blocks, counts.dropped_blocks["second_touch"]) == (0, 9)


def test_what_found_no_room_costs_no_budget() -> None:
    one = setup("lru", 2, bytes_per_s=1e-9, burst_bytes=4 * BLOCK)
    counts = replay(requests([(0, 16, [0, 1, 2, 3]), (0, 8, [4, 5])]), one).counts
    assert (counts.stored_blocks, counts.dropped_blocks) == (4, {"second_touch": 0, "budget": 0, "no_room": 2})


def test_what_a_prompt_uses_is_no_victim_of_its_own() -> None:
    prompts = [(0, 8, [0, 1]), (0, 4, [2]), (0, 16, [0, 1, 3, 4])]
    for policy in POLICIES:
        found = replay(requests([*prompts, prompts[-1]]), setup(policy, 4))
        assert (found.counts.hit_blocks, found.counts.evicted_blocks) == (2 + 4, 1), policy


@given(st.integers(1, 70), st.data())
def test_usable_tokens_are_those_of_the_engine(tokens: int, data: st.DataObject) -> None:
    chunks = -(-tokens // BLOCK_TOKENS)
    run = data.draw(st.integers(0, chunks))
    bitmap = CompletionBitmap(chunks, (1 << run) - 1)
    prefix = full_attention(bitmap, prompt_tokens=tokens, tokens_per_block=BLOCK_TOKENS)
    assert usable_tokens(run, tokens, BLOCK_TOKENS) == prefix.usable_tokens
    assert prefix.usable_tokens == oracle.whole_tokens(run, tokens, BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "fifo"}, "policy='fifo' must be one of lru, arc, s3fifo"),
        ({"capacity_blocks": 0}, "capacity_blocks=0 must be at least 1"),
        ({"block_bytes": 0}, "block_bytes=0"),
        ({"block_tokens": -1}, "block_tokens=-1"),
        ({"second_touch_names": -1}, "second_touch_names=-1"),
        ({"bytes_per_s": -1.0}, "bytes_per_s"),
    ],
)
def test_what_cannot_be_simulated(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay([], replace(setup("lru", 1), **change))


def test_no_request_is_no_trace() -> None:
    with pytest.raises(ConfigError, match="no request"):
        replay([], setup("lru", 1))
