"""A request's own chunks make no room for it, and finding what does costs no look at what stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.policy import POLICIES, LRUPolicy
from kvxfer.policy.order import Order
from kvxfer.store import Access, Entry, Reservation, Store
from kvxfer.store.shares import Quota, Shares
from tests.store import rig
from tests.store.test_chains import chain
from tests.store.test_shares import SLOT, set_quota

Opened = Callable[..., Store]
named = pytest.mark.parametrize("policy", POLICIES)


def commit(store: Store, digest: bytes, keys: list[bytes], slots: list[Reservation], access: Access) -> int:
    """As many as there are slots for; how many can be looked up."""
    items = [(key, slot, rig.FULL) for key, slot in zip(keys, slots, strict=False)]
    return sum(store.commit(digest, items, access))


@pytest.mark.parametrize("ahead", [False, True], ids=["one after the other", "all slots first"])
def test_of_a_request_that_is_larger_than_the_quota_the_head_is_kept(opened: Opened, root: Path, ahead: bool) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    old = chain(1, 20)
    assert all(rig.put(store, digest, old))
    set_quota(root, digest, "--at-most", 25 * SLOT)
    keys, access = chain(2, 60), Access()
    access.place(keys)
    batches = [keys[start : start + 8] for start in range(0, 60, 8)]
    taken = [store.reserve(digest, rig.ROW, len(names), access) for names in batches] if ahead else []
    for number, names in enumerate(batches):
        slots = taken[number] if ahead else store.reserve(digest, rig.ROW, len(names), access)
        assert commit(store, digest, names, slots, access) == len(slots), "nothing is written in vain"
        assert store.lookup_prefix(digest, keys) == len(set(keys) & set(store.keys(digest)))
    assert store.lookup_prefix(digest, keys) == 25
    assert store.stats().refused_reservations == 60 - 25
    assert store.stats().unreachable_entries == 0
    assert store.stats().reserved_slots == 0
    assert all(rig.put(store, digest, chain(3, 25))), "another request has it all"


def test_what_the_request_found_stays_too_and_what_that_follows(opened: Opened, root: Path) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    keys, other = chain(1, 30), chain(2, 10)
    assert all(rig.put(store, digest, keys[:10]))
    assert all(rig.put(store, digest, other))
    set_quota(root, digest, "--at-most", 20 * SLOT)
    access = Access().place(keys)
    store.touch(digest, keys[5:10], access)  # the device has what is before
    slots = store.reserve(digest, rig.ROW, 20, access)
    assert commit(store, digest, keys[10:], slots, access) == 10
    assert set(store.keys(digest)) == set(keys[:20])


@named
def test_of_a_request_that_is_larger_than_the_store_the_head_is_kept(opened: Opened, policy: str) -> None:
    store = opened(capacity_bytes=4 << 20, policy=policy)
    digest = store.register(rig.namespace(), rig.ROW)
    room = len(slots := store.reserve(digest, rig.ROW, 1000))
    store.release(slots)
    assert all(rig.put(store, digest, chain(1, room)))
    keys, access = chain(2, 2 * room), Access()
    access.place(keys)
    for start in range(0, 2 * room, 16):
        names = keys[start : start + 16]
        commit(store, digest, names, store.reserve(digest, rig.ROW, len(names), access), access)
    assert store.lookup_prefix(digest, keys) == len(store.keys(digest)) == room
    assert store.stats().unreachable_entries == 0


@named
def test_whatever_a_request_holds_it_gets_what_others_can_give(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Its own are the first to be looked at, and none hides another: each is a chain by itself."""
    monkeypatch.setattr("kvxfer.store.shares._PASSED", 16)
    store = opened(capacity_bytes=4 << 20, policy=policy)
    digest = store.register(rig.namespace(), rig.ROW)
    room = len(slots := store.reserve(digest, rig.ROW, 1000))
    store.release(slots)
    names = [b"%4d" % n + n.to_bytes(4, "big") for n in range(room + 30)]
    assert all(rig.put(store, digest, names[:room]))
    access = Access().place(names[:50])
    store.touch(digest, names[:50], access)
    for _ in range(3):
        store.touch(digest, names[50:room])
    slots = store.reserve(digest, rig.ROW, 30, access)
    assert commit(store, digest, names[room:], slots, access) == 30
    assert set(names[:50]) <= set(store.keys(digest))


# ---- who goes, by a brute force ----------------------------------------------------------------------------


class Namespace:
    """Entries of one namespace, and shares over them, as a table has them."""

    def __init__(self, at_most: int) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.gone: list[bytes] = []
        self.shares = Shares(lambda digest: self.entries, self._detach)
        self.shares.quotas = {b"d": Quota(at_most)}
        self.slab = SimpleNamespace(policy=LRUPolicy[Entry](), slot_bytes=1)
        self.ticks = 0

    def _detach(self, entry: Entry) -> None:
        self.gone.append(entry.key)
        del self.entries[entry.key]
        self.shares.remove(entry)

    def store(self, key: bytes, after: bytes) -> None:
        entry = Entry(b"d", key, cast(Any, self.slab), 0, 1, 1)
        self.entries[key] = entry
        self.shares.insert(entry)
        self.use(key)
        if after in self.entries:
            items = [self.entries[after], entry]
            if self.shares.chain(entry, [(b"d", after), (b"d", key)], items):
                entry.after = after

    def use(self, key: bytes) -> None:
        self.ticks += 1
        self.entries[key].tick = self.ticks
        self.shares.touch(self.entries[key])

    def pin(self, key: bytes) -> None:
        entry = self.entries[key]
        entry.pins = 1 - entry.pins
        (self.shares.pin if entry.pins else self.shares.unpin)(entry)

    def coldest(self, n: int, mine: set[bytes]) -> list[bytes]:
        """The n that are to go: again and again the least recent that is not held and that nothing follows."""
        left, found = dict(self.entries), list[bytes]()
        while len(found) < n:
            followed = {entry.after for entry in left.values()}
            ends = [entry for entry in left.values() if entry.key not in followed | mine and not entry.pins]
            if not ends:
                break
            found.append(min(ends, key=lambda entry: entry.tick).key)
            del left[found[-1]]
        return found

    def over(self, n: int, mine: Iterable[bytes]) -> None:
        access = Access()
        for key in mine:
            access.use(key)
        room = self.shares.quotas[b"d"].at_most or 0
        excess = len(self.entries) + n - room
        want = self.coldest(excess + room // 64, set(mine)) if excess > 0 else []
        self.gone = []
        assert [entry.key for entry in self.shares.over(b"d", 1, n, access)] == self.gone == want
        assert len(self.entries) == len(self.shares._orders.get(b"d", ())) + sum(
            e.pins for e in self.entries.values()
        ) or (b"d" not in self.shares._orders)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "use", "pin", "over"]), st.integers(0, 39), st.integers(0, 39)
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=150)
@given(STEPS, st.integers(1, 20))
def test_at_its_quota_go_those_that_a_brute_force_names(steps: list[tuple[str, int, int]], at_most: int) -> None:
    held = Namespace(at_most)
    for what, one, two in steps:
        key, other = b"%d" % one, b"%d" % two
        if what == "store" and key not in held.entries:
            held.over(1, [])
            if len(held.entries) < at_most:
                held.store(key, other if two < one else b"")
        elif what == "use" and key in held.entries:
            held.use(key)
        elif what == "pin" and key in held.entries:
            held.pin(key)
        elif what == "over":
            held.over(1 + one % 5, [name for name in held.entries if int(name) % 7 == two % 7])


def test_finding_what_goes_looks_at_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: the first time all, then those that go and what is held of the request."""
    looks = 0

    class Counted(LRUPolicy[Entry]):
        def _least(self) -> tuple[Entry, Order[Entry]] | None:
            nonlocal looks
            looks += 1
            return super()._least()

    class Seen(dict[bytes, Entry]):
        def values(self) -> Any:
            nonlocal looks
            looks += len(self)
            return super().values()

    monkeypatch.setattr("kvxfer.store.shares.LRUPolicy", Counted)
    held = Namespace(4000)
    held.entries = Seen()
    for n in range(4000):
        held.store(b"%d" % n, b"%d" % (n - 1) if n % 20 else b"")
    assert looks == 0
    before = 0
    for n in range(4000, 6000):
        taken = held.shares.over(b"d", 1, 1, Access())
        if n == 4000:
            assert looks <= 2 * 4000 + len(taken) + 1
        else:
            assert looks - before <= len(taken) + 1
        before = looks
        held.store(b"%d" % n, b"")
    assert looks < 2 * 4000 + 2 * 2000 + 2 * 64
