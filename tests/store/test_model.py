"""A store against a set: whatever is done in whatever order, what it says it has is there, and no loss is hidden."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.store import Entry, Reservation, Store
from tests.store import rig

KEYS = st.lists(st.integers(0, 130), min_size=1, max_size=25, unique=True)
CAPACITIES = st.sampled_from([4 << 20, 5 << 20, 6 << 20])


class StoreMachine(RuleBasedStateMachine):
    """Two namespaces of different layouts in one small store."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="kvxfer-model-"))
        self.root = self.place / "root"
        self.store: Store | None = None
        self.maybe: list[set[int]] = [set(), set()]  # stored once and not invalidated since
        self.ever: list[set[int]] = [set(), set()]
        self.pins: list[tuple[int, Entry]] = []
        self.slots: list[tuple[int, Reservation]] = []
        self.quarantined: list[Reservation] = []

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.place)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def open(self, capacity: int) -> None:
        self.capacity = capacity
        config = rig.config(self.root, capacity_bytes=capacity, slab_bytes=64 * 4096, max_files=40)
        self.store = Store.open(config, writers=2)
        self.layouts = [rig.ROW, rig.SHARED]
        self.digests = [
            self.store.register(rig.namespace(extra={"n": n}), layout) for n, layout in enumerate(self.layouts)
        ]

    @property
    def live(self) -> Store:
        assert self.store is not None
        return self.store

    def present(self) -> list[set[int]]:
        return [{i for i in range(131) if self.live.contains(digest, rig.key(i))} for digest in self.digests]

    def losses(self) -> int:
        stats = self.live.stats()
        return sum(stats.evictions.values()) + sum(stats.invalidations.values())

    # ---- rules -----------------------------------------------------------------------------------------------

    @initialize(capacity=CAPACITIES)
    def start(self, capacity: int) -> None:
        self.open(capacity)

    @rule(which=st.integers(0, 1), items=KEYS, mask=st.integers(1, 15))
    def put(self, which: int, items: list[int], mask: int) -> None:
        before, lost = self.present(), self.losses()
        names = [rig.key(i) for i in items]
        done = rig.put(self.live, self.digests[which], names, layout=self.layouts[which], mask=mask)
        for i, ok in zip(items, done, strict=True):
            if ok:
                assert self.live.contains(self.digests[which], rig.key(i), mask)
                self.maybe[which].add(i)
                self.ever[which].add(i)
        after = self.present()
        gone = sum(len(old - new) for old, new in zip(before, after, strict=True))
        assert gone <= self.losses() - lost
        for n, entry in self.pins:
            assert entry.dead or self.live.contains(self.digests[n], entry.key)

    @rule(which=st.integers(0, 1), n=st.integers(1, 20))
    def reserve(self, which: int, n: int) -> None:
        self.slots += [(which, slot) for slot in self.live.reserve(self.digests[which], self.layouts[which], n)]

    @precondition(lambda self: self.slots)
    @rule(i=st.integers(0, 130), mask=st.integers(1, 15))
    def commit(self, i: int, mask: int) -> None:
        which, slot = self.slots.pop()
        rig.write(slot, self.digests[which], rig.key(i), mask)
        assert self.live.commit(self.digests[which], [(rig.key(i), slot, mask)]) == [True]
        self.maybe[which].add(i)
        self.ever[which].add(i)

    @precondition(lambda self: self.slots)
    @rule(n=st.integers(1, 20))
    def release(self, n: int) -> None:
        self.live.release([slot for _, slot in self.slots[:n]])
        del self.slots[:n]

    @precondition(lambda self: self.slots)
    @rule()
    def quarantine(self) -> None:
        self.quarantined.append(self.slots.pop()[1])
        self.live.quarantine(self.quarantined[-1])

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.live.release(self.quarantined)
        self.quarantined.clear()

    @rule(which=st.integers(0, 1), items=KEYS)
    def pin(self, which: int, items: list[int]) -> None:
        found = self.live.pin(self.digests[which], [rig.key(i) for i in items])
        self.pins += [(which, entry) for entry in found if entry is not None]

    @precondition(lambda self: self.pins)
    @rule(n=st.integers(1, 30))
    def unpin(self, n: int) -> None:
        self.live.unpin([entry for _, entry in self.pins[:n]])
        del self.pins[:n]

    @precondition(lambda self: self.pins)
    @rule(n=st.integers(0, 100))
    def invalidate(self, n: int) -> None:
        which, entry = self.pins[n % len(self.pins)]
        if self.live.invalidate(entry, "bad_sum"):
            number = next(i for i in range(131) if rig.key(i) == entry.key)
            self.maybe[which].discard(number)
            assert not self.live.contains(self.digests[which], entry.key)

    @rule(capacity=CAPACITIES, lose_index=st.booleans())
    def reopen(self, capacity: int, lose_index: bool) -> None:
        before = self.present()
        smaller = capacity < self.capacity
        self.live.close()
        # Until its last slot is given back it counts as a process that has the root open.
        self.live.release([slot for _, slot in self.slots])
        self.live.release(self.quarantined)
        self.pins, self.slots, self.quarantined = [], [], []
        if lose_index:
            shutil.rmtree(self.root / "index")
        self.open(capacity)
        after = self.present()
        if lose_index:
            self.maybe = [set(ever) for ever in self.ever]
        elif not smaller:
            assert after == before
        for old, new, maybe in zip(before, after, self.maybe, strict=True):
            assert new <= maybe
            assert lose_index or new <= old
            assert smaller or old <= new

    @rule()
    def bump(self) -> None:
        if self.live.weight_epoch < 2:
            self.live.unpin([entry for _, entry in self.pins])
            self.live.release([slot for _, slot in self.slots])
            self.pins, self.slots = [], []
            self.live.bump_epoch()
            self.digests = [
                self.live.register(rig.namespace(extra={"n": n}), layout) for n, layout in enumerate(self.layouts)
            ]
            assert self.present() == [set(), set()]
            self.maybe, self.ever = [set(), set()], [set(), set()]

    # ---- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def pinned_bytes_stay(self) -> None:
        for _, entry in self.pins:
            assert rig.verify(entry)

    @invariant()
    def what_is_there_is_right(self) -> None:
        if self.store is None:
            return
        for which, digest in enumerate(self.digests):
            found = rig.check_all(self.live, digest, [rig.key(i) for i in range(131)])
            assert set(found) <= {rig.key(i) for i in self.maybe[which]}

    @invariant()
    def the_cap_holds(self) -> None:
        if self.store is not None:
            nbytes, nfiles = rig.disk_use(self.root)
            assert nbytes <= self.capacity
            assert nfiles <= 40

    @invariant()
    def every_slot_is_somebodys(self) -> None:
        if self.store is None:
            return
        assert self.live.maintain()
        stats = self.live.stats()
        dead = {(entry.slab.slab_id, entry.slot) for _, entry in self.pins if entry.dead}
        slabs = self.live._table.slabs()
        counted = stats.entries + stats.reserved_slots + stats.quarantined_slots + stats.free_slots + len(dead)
        assert counted == sum(slab.num_slots for slab in slabs)
        assert (stats.reserved_slots, stats.quarantined_slots) == (len(self.slots), len(self.quarantined))
        assert stats.pinned_entries == len({id(entry) for _, entry in self.pins})
        assert stats.index_errors == stats.index_conflicts == 0
        held = [slab.held for slab in slabs]
        assert sum(held) == stats.pinned_entries + stats.reserved_slots + stats.quarantined_slots


class ManyTurns(StoreMachine):
    """The same, more and longer."""


FEW = settings(max_examples=5, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
StoreMachine.TestCase.settings = FEW
TestStore = pytest.mark.timeout(300)(StoreMachine.TestCase)
ManyTurns.TestCase.settings = settings(FEW, max_examples=40, stateful_step_count=40)
TestStoreForLong = pytest.mark.slow(ManyTurns.TestCase)
