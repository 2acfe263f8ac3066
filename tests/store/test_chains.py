"""Chains in a store: what it learns from calls, what leaves first, and what is counted as out of reach."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.policy import POLICIES
from kvxfer.store import Access, Store
from tests.store import rig

Opened = Callable[..., Store]
named = pytest.mark.parametrize("policy", POLICIES)
SMALL = 4 << 20


def chain(number: int, length: int, group: int = 0) -> list[bytes]:
    """Keys of one prompt."""
    return [b"%4d %4d" % (number, n) + group.to_bytes(4, "big") for n in range(length)]


class Prompts:
    """The brute force: which of the keys that were ever stored are there, and which of them a lookup gets to."""

    def __init__(self, store: Store, digest: bytes) -> None:
        self.store, self.digest = store, digest
        self.chains: list[list[bytes]] = []

    def there(self) -> set[bytes]:
        return set(self.store.keys(self.digest))

    def unreachable(self) -> int:
        """Of the keys that are there, those that no lookup along any chain gets to."""
        there, reached = self.there(), set[bytes]()
        for keys in self.chains:
            reached.update(keys[: self.store.lookup_prefix(self.digest, keys)])
        return len(there - reached)

    def check(self) -> None:
        assert self.store.stats().unreachable_entries == self.unreachable()


@named
def test_no_eviction_leaves_anything_out_of_reach(opened: Opened, policy: str) -> None:
    store = opened(capacity_bytes=SMALL, policy=policy)
    digest = store.register(rig.namespace(), rig.ROW)
    prompts, rng = Prompts(store, digest), random.Random(4)
    prompts.chains = [chain(0, 6) + chain(n, rng.randrange(1, 18)) for n in range(1, 70)]  # all begin alike
    for turn in range(100):
        keys, request = rng.choice(prompts.chains), Access()
        keys = keys[: rng.randrange(1, len(keys) + 1)]
        there = store.lookup_prefix(digest, keys)
        pinned = store.pin(digest, keys[:there], request.place(keys[:there]))
        for start in range(there, len(keys), 5):  # as a prefill goes on
            names = keys[start : start + 5]
            slots = store.reserve(digest, rig.ROW, len(names))
            items = [(name, slot, rig.FULL) for name, slot in zip(names, slots, strict=False)]
            assert all(store.commit(digest, items, request.place(names)))
            if len(slots) < len(names):
                break
        store.unpin(pinned)
        assert prompts.unreachable() == store.stats().unreachable_entries == 0, turn
    assert store.stats().evictions["capacity"] > 50


@named
def test_what_is_out_of_reach_is_counted_as_by_brute_force(opened: Opened, policy: str) -> None:
    store = opened(policy=policy)
    digest = store.register(rig.namespace(), rig.ROW)
    prompts, rng = Prompts(store, digest), random.Random(7)
    prompts.chains = [chain(0, 4) + chain(n, 12) for n in range(1, 7)] + [chain(90, 9)]
    for keys in prompts.chains:
        new = [key for key in keys if key not in prompts.there()]
        access = Access().place(keys)
        slots = store.reserve(digest, rig.ROW, len(new))
        assert all(store.commit(digest, [(k, s, rig.FULL) for k, s in zip(new, slots, strict=True)], access))
        store.touch(digest, keys)
        prompts.check()
    most = 0
    for _ in range(80):
        keys = rng.choice(prompts.chains)
        if rng.random() < 0.5:
            (entry,) = store.pin(digest, [rng.choice(keys)])
            if entry is not None:
                assert store.invalidate(entry, "bad_sum")
                prompts.check()
            store.unpin([entry])
        else:
            access = Access().place(keys)
            lost = (
                rng.sample(missing, k=rng.randrange(1, len(missing) + 1))
                if (missing := [key for key in keys if not store.contains(digest, key)])
                else []
            )
            slots = store.reserve(digest, rig.ROW, len(lost))
            assert all(store.commit(digest, [(k, s, rig.FULL) for k, s in zip(lost, slots, strict=True)], access))
        prompts.check()
        most = max(most, prompts.unreachable())
    assert most > 20
    for keys in prompts.chains:
        lost = [key for key in keys if not store.contains(digest, key)]
        slots = store.reserve(digest, rig.ROW, len(lost))
        access = Access().place(keys)
        assert all(store.commit(digest, [(k, s, rig.FULL) for k, s in zip(lost, slots, strict=True)], access))
    assert store.stats().unreachable_entries == 0


def gone_of(store: Store, digest: bytes, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if not store.contains(digest, key)]


def make_room(store: Store, digest: bytes, n: int) -> None:
    """Evicts n."""
    free = store.stats().free_slots
    slots = store.reserve(digest, rig.ROW, free + n)
    assert len(slots) == free + n
    store.release(slots)


def full(store: Store, digest: bytes) -> None:
    """Fills what is left, with what follows nothing."""
    while not store.stats().evictions["capacity"]:
        number = len(store.keys(digest))
        assert rig.put(store, digest, [b"filler %6d" % number + number.to_bytes(4, "big")]) == [True]


@named
def test_a_suffix_that_a_request_stores_leaves_before_what_it_has_loaded(opened: Opened, policy: str) -> None:
    store = opened(capacity_bytes=SMALL, policy=policy)
    digest = store.register(rig.namespace(), rig.ROW)
    keys = chain(1, 12)
    assert all(rig.put(store, digest, keys[:8]))
    request = Access()
    store.unpin(store.pin(digest, keys[:8], request.place(keys[:8])))
    slots = store.reserve(digest, rig.ROW, 4)
    assert all(
        store.commit(digest, [(k, s, rig.FULL) for k, s in zip(keys[8:], slots, strict=True)], request.place(keys[8:]))
    )
    full(store, digest)
    while len(gone := gone_of(store, digest, keys)) < 12:
        assert gone == keys[12 - len(gone) :]
        make_room(store, digest, 1)


@named
def test_what_a_pinned_chunk_follows_stays(opened: Opened, policy: str) -> None:
    store = opened(capacity_bytes=SMALL, policy=policy)
    digest = store.register(rig.namespace(), rig.ROW)
    keys = chain(1, 20)
    assert all(rig.put(store, digest, keys))
    full(store, digest)
    pinned = store.pin(digest, [keys[9]])
    others = store.stats().entries - 20
    make_room(store, digest, others)
    assert gone_of(store, digest, keys[:10]) == []
    assert store.reserve(digest, rig.ROW, 1000)  # all that may go has gone
    assert set(store.keys(digest)) == set(keys[:10])
    store.unpin(pinned)


@named
def test_groups_and_requests_are_not_chained_across(opened: Opened, policy: str) -> None:
    store = opened(capacity_bytes=SMALL, policy=policy)
    digest = store.register(rig.namespace(), rig.ROW)
    a, b = chain(1, 6, group=0), chain(1, 6, group=1)
    assert all(rig.put(store, digest, [key for pair in zip(a, b, strict=True) for key in pair]))
    store.pin(digest, [b[5]])
    full(store, digest)
    store.reserve(digest, rig.ROW, 1000)
    assert set(store.keys(digest)) == set(b), "of the other group nothing was held"


def test_after_a_reopen_chains_are_learned_anew(opened: Opened, root: Path) -> None:
    store = opened(capacity_bytes=SMALL)
    digest = store.register(rig.namespace(), rig.ROW)
    keys = chain(1, 10)
    assert all(rig.put(store, digest, keys))
    store.close()
    store = opened(capacity_bytes=SMALL)
    digest = store.register(rig.namespace(), rig.ROW)
    store.touch(digest, keys)
    full(store, digest)
    store.touch(digest, keys)
    make_room(store, digest, store.stats().entries - 5)
    assert gone_of(store, digest, keys) == keys[5:]


@named
def test_a_batch_that_could_not_be_evicted_stays_in_its_chains(
    opened: Opened, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(capacity_bytes=SMALL, policy=policy)
    digest = store.register(rig.namespace(), rig.ROW)
    keys = chain(1, 40)
    assert all(rig.put(store, digest, keys))
    full(store, digest)
    monkeypatch.setattr(store._index, "apply", lambda *_: False)
    assert store.reserve(digest, rig.ROW, store.stats().free_slots + 30) is not None
    monkeypatch.undo()
    assert store.maintain()
    assert store.stats().unreachable_entries == 0
    make_room(store, digest, 12)
    left = [key for key in keys if store.contains(digest, key)]
    assert left == keys[: len(left)]
