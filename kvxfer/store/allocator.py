"""Where slots come from: free ones, else those of a new slab, else those of what is evicted for them."""

from __future__ import annotations

from kvxfer.slot import SlotLayout
from kvxfer.store.access import Access
from kvxfer.store.entry import Entry, Reservation
from kvxfer.store.index import TRANSACTION, Index
from kvxfer.store.ledger import Ledger
from kvxfer.store.records import IndexRecord
from kvxfer.store.room import Made, SlabRoom
from kvxfer.store.table import Table


class Allocator:
    """Hands out slots within the capacity. All calls are made with the root's lock."""

    def __init__(self, table: Table, room: SlabRoom, index: Index, ledger: Ledger) -> None:
        self._table, self._room, self._index, self._ledger = table, room, index, ledger
        self._owner, self._access = b"", Access()  # for which namespace, and request, room is being made

    def take(self, slot: SlotLayout, n: int, digest: bytes, access: Access) -> list[Reservation]:
        """Up to n slots for a namespace, of which other processes know that they are taken."""
        if self._table.has_doomed:
            self._ledger.settle()  # their slots are free then
        self._owner, self._access = digest, access
        n = self.fit(digest, slot, n, access, access.pending)
        n = min(n, self._index_room(slot, n))
        taken: list[Reservation] = []
        try:
            self._fill(slot, n, taken)
        except BaseException:  # whatever it is, nobody else knows of these slots
            self._table.release(taken)
            raise
        access.took(taken)
        return taken

    def fit(self, digest: bytes, slot: SlotLayout, n: int, access: Access, pending: int = 0) -> int:
        """How many more chunks a namespace's quota allows, once its own oldest ones made way for n.

        Args:
            access: of the request that stores them: what it has used or stored stays.
            pending: chunks that it is storing already, besides.
        """
        with self._table.lock:
            victims = self._table.shares.over(digest, slot.slot_bytes, n + pending, access)
        for start in range(0, len(victims), TRANSACTION):
            if not self._forget(victims[start : start + TRANSACTION], "quota"):
                self._table.reinstate(victims[start + TRANSACTION :])
                break
        with self._table.lock:
            left = self._table.shares.left(digest, slot.slot_bytes)
        return n if left is None else max(0, min(n, left - pending))

    def _fill(self, slot: SlotLayout, n: int, taken: list[Reservation]) -> None:
        made, reclaim = self._room.widen(slot, n), True
        while len(taken) < n:
            if got := self._table.take(slot, min(n - len(taken), TRANSACTION)):
                if not self._lease(got):
                    break
                taken += got
            elif made is Made.YES:
                made = self._room.create(slot)
            elif reclaim and made is not Made.FAILED and self._reclaim_colder(slot):
                # A disk that is full may be full of others' files, and stay so: one slab is enough of a try.
                made, reclaim = Made.YES, made is Made.OVER_CAP
            elif self._evict(slot, min(n - len(taken), TRANSACTION), "capacity"):
                pass
            elif made is Made.OVER_CAP and self._reclaim_colder(slot, protected=True):
                made = Made.YES
            else:
                break

    def _lease(self, taken: list[Reservation]) -> bool:
        """Tells other processes that these slots are taken; where that fails they are given back."""
        told = False
        try:
            told = self._ledger.tell([], [self._table.leases.item(taken[0].lease)])
        finally:
            if not told:
                self._table.release(taken)
        return told

    def _index_room(self, slot: SlotLayout, n: int) -> int:
        """How many more entries the index can name, once the coldest ones, of any layout, made way for `n`."""
        table, most = self._table, self._index.max_entries
        while (short := self._named() + min(n, most) - most) > 0:
            # A layout all of whose entries are protected has none to give.
            if not any(self._evict(layout, min(short, TRANSACTION), "index") for layout in table.coldest_layouts()):
                break
        return max(0, most - self._named())

    def has_room(self, slot: SlotLayout) -> bool:
        """Whether one more entry would push out none. Without the root's lock: as far as the table knows."""
        named = self._named() < self._index.max_entries
        return named and (self._table.open_slabs(slot) > 0 or self._room.fits(slot))

    def _named(self) -> int:
        table = self._table
        return table.entries + table.reserved + table.leases.foreign_slots

    def _evict(self, slot: SlotLayout, n: int, reason: str) -> bool:
        victims = self._table.victims(slot, n, self._owner, self._access)
        return bool(victims) and self._forget(victims, reason)

    def _forget(self, victims: list[Entry], reason: str) -> bool:
        """Has the index forget entries that were taken out; False where they are back."""
        if self._index.apply([IndexRecord.of(victim) for victim in victims], ()):
            self._table.settle(victims, reason)
            return True
        self._table.reinstate(victims)
        return False

    def _reclaim_colder(self, slot: SlotLayout, *, protected: bool = False) -> bool:
        """Removes the coldest slab of another layout, if this one has nothing that was used less recently.

        Args:
            protected: what this one has cannot go, however long ago it was used.
        """
        slab = self._table.coldest_other(slot)
        own = self._table.next_victim_tick(slot)
        if protected and own is None:
            return False  # nothing was in the way before either
        own = None if protected else own
        if slab is None or (own is not None and own <= slab.last_used):
            return False
        if (entries := self._table.detach_slab(slab)) is None:
            return False
        for start in range(0, len(entries), TRANSACTION):
            batch = entries[start : start + TRANSACTION]
            if not self._index.apply([IndexRecord.of(entry) for entry in batch], ()):
                self._table.attach(slab)
                self._table.reinstate(entries[start:])
                return False
            self._table.settle(batch, "reclaimed")
        return self._room.remove(slab)
