"""The simulated store beside a real one: the same requests, policy and capacity, key for key."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.policy import POLICIES, CachePolicy, make_policy
from kvxfer.simulate import Replay, Request, Setup
from kvxfer.slot import SlotLayout
from kvxfer.store import Access, Entry, Store
from tests.simulate.oracle import Prompt
from tests.simulate.prompts import BLOCK_TOKENS, requests, traces
from tests.store import rig

CAPACITY = 4 << 20  # the least that a store has
# What was never full measures itself by what it has held: of S3-FIFO's small queue 1 of 15 entries stays, and not 2.
YOUNG: list[Prompt] = [
    *((0, 4, [block]) for block in [*range(15), *range(10), *range(10)]),
    (0, 4 * 16, list(range(20, 36))),
]


def key(block: int) -> bytes:
    return block.to_bytes(8, "big") + bytes(4)


class Real:
    """A store of chunks that nobody writes: what is there and what leaves are told by keys alone."""

    def __init__(self, root: Path, policy: str, slot_kib: int) -> None:
        self.evicted: list[int] = []
        self._policy = policy
        self._slot = SlotLayout(
            segment_bytes=slot_kib << 10, last_segment_bytes=slot_kib << 10, num_segments=1, segments_per_trailer=1,
            blocks_per_chunk=4,
        )  # fmt: skip
        config = rig.config(root, capacity_bytes=CAPACITY)
        self.store = Store.open(config, policy=self._make_policy, housekeeping=False)
        self._digest = self.store.register(rig.namespace(), self._slot)
        slots = self.store.reserve(self._digest, self._slot, 100)
        self.store.release(slots)
        self.capacity = len(slots)
        self._refused = self.store.stats().refused_reservations

    def refused(self) -> int:
        """Slots that no request got."""
        return self.store.stats().refused_reservations - self._refused

    def _make_policy(self) -> CachePolicy[Entry]:
        """One that says what is removed, in order."""
        policy: CachePolicy[Entry] = make_policy(self._policy)
        remove = policy.remove

        def told(item: Entry) -> None:
            self.evicted.append(int.from_bytes(item.key[:8], "big"))
            remove(item)

        policy.remove = told  # type: ignore[method-assign]
        return policy

    def step(self, request: Request) -> int:
        """One request, as an engine makes it; how many of its blocks were hit."""
        store, digest, keys = self.store, self._digest, [key(block) for block in request.blocks]
        access = Access().place(keys)
        run = store.lookup_prefix(digest, keys)
        pinned = store.pin(digest, keys, access)
        missing = [name for name, entry in zip(keys, pinned, strict=True) if entry is None]
        slots = store.reserve(digest, self._slot, len(missing))
        assert all(store.commit(digest, [(*each, rig.FULL) for each in zip(missing, slots, strict=False)], access))
        store.unpin(pinned)
        return run

    def held(self) -> set[int]:
        """The blocks that are stored."""
        return {int.from_bytes(name[:8], "big") for name in self.store.keys(self._digest)}


class Simulated(Replay):
    """The same, which says what is removed."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.evicted: list[int] = []
        remove = self._policy.remove

        def told(item: int) -> None:
            self.evicted.append(item)
            remove(item)

        self._policy.remove = told  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(prompts=traces(), slot_kib=st.sampled_from([100, 200, 300, 450, 700, 1200]))  # 26, 13, 9, 6, 4, 2 slots
@example(prompts=YOUNG, slot_kib=100)
def test_a_store_does_what_was_simulated(policy: str, prompts: list[Prompt], slot_kib: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        real = Real(Path(folder) / "root", policy, slot_kib)
        with real.store as store:
            model = Simulated(
                Setup(policy=policy, capacity_blocks=real.capacity, block_bytes=1000, block_tokens=BLOCK_TOKENS)
            )
            for request in requests(prompts):
                before = model.counts.hit_blocks
                model.step(request)
                assert real.step(request) == model.counts.hit_blocks - before
                assert real.evicted == model.evicted
                assert real.held() == set(model._held)
            stats, refused = store.stats(), real.refused()
    assert stats.commits == model.counts.stored_blocks
    assert stats.evictions["capacity"] == model.counts.evicted_blocks == len(model.evicted)
    assert refused == model.counts.dropped_blocks["no_room"]
    assert stats.unreachable_entries == model.unreachable_blocks() == 0
