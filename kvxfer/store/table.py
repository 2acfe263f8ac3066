"""The process's own picture of the store: which entry has which slot, who holds it, and what is free.

Everything here is memory: no call blocks, and `lock` is held for short, counted steps only. Lookups take no lock. Files
are closed, after the lock, where what is given back was the last in a slab that another process removed, or once the
table is closed.
The order of changes against the index is the store's business (store.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from kvxfer.policy import CachePolicy
from kvxfer.slot import SlotLayout
from kvxfer.store.access import Access, learn, use_before
from kvxfer.store.entry import Entry, Reservation, SlotState, pack_chunk
from kvxfer.store.generations import Generations
from kvxfer.store.leases import Leases
from kvxfer.store.records import IndexRecord, LeaseRow, Row
from kvxfer.store.shares import Shares
from kvxfer.store.slab import SlabFile, SlotClass
from kvxfer.store.stats import EVICTION_REASONS, INVALIDATION_REASONS
from kvxfer.store.uses import UseTimes

Policies = Callable[[], CachePolicy[Entry]]
_NONE: dict[bytes, Entry] = {}


class Table:
    """Entries by namespace and key. Methods take the lock themselves."""

    def __init__(self, generations: Generations, writers: int, policies: Policies) -> None:
        self.lock = threading.Lock()
        self.generations = generations
        self.leases = Leases(generations.epoch)
        self.uses = UseTimes()
        self.shares = Shares(lambda digest: self._all.get(digest, _NONE), self._detach)
        # What lookups see: namespaces registered since the weight epoch began. Written under the lock, read without.
        self.served: dict[bytes, dict[bytes, Entry]] = {}
        self.layouts: dict[bytes, SlotLayout] = {}
        self.classes: dict[SlotLayout, SlotClass] = {}
        self.entries = self.pinned = self.reserved = self.quarantined = 0
        self.live_bytes = 0
        self.evictions = dict.fromkeys(EVICTION_REASONS, 0)
        self.invalidations = dict.fromkeys(INVALIDATION_REASONS, 0)
        self.slabs_by_id: dict[int, SlabFile] = {}
        self._all: dict[bytes, dict[bytes, Entry]] = {}
        self._doomed: list[Entry] = []  # dead, but the index still names them
        self._writers = writers
        self._policies = policies
        self._tick = 0
        self._closed = False
        self._idle: list[SlabFile] = []  # to be closed: nobody holds anything in them

    # ---- lookups -----------------------------------------------------------------------------------------

    def leading_run(self, digest: bytes, keys: Iterable[bytes]) -> int:
        """How many of the first `keys` are there. Takes no lock: a dict answers under the interpreter's own."""
        table = self.served.get(digest)
        if table is None:
            return 0
        n = 0
        for key in keys:
            if key not in table:
                break
            n += 1
        return n

    def find(self, digest: bytes, key: bytes) -> Entry | None:
        """The entry that lookups see. Takes no lock."""
        table = self.served.get(digest)
        return None if table is None else table.get(key)

    def find_any(self, digest: bytes, key: bytes) -> Entry | None:
        """The entry, also of a namespace that is not served. Takes no lock."""
        return self._all.get(digest, {}).get(key)

    def pin(self, digest: bytes, keys: Iterable[bytes], access: Access) -> list[Entry | None]:
        """Pins what is there: its slot keeps its bytes, and its slab stays open, until `unpin`. A use."""
        table = self.served.get(digest)
        if table is None:
            return [None for _ in keys]
        with self.lock:
            found = [None if self._closed else table.get(key) for key in keys]
            for entry in found:
                if entry is not None:
                    self._use(entry, access, table)
                    self._pin(entry)
        return found

    def _pin(self, entry: Entry) -> None:
        if not entry.record:
            entry.record = pack_chunk(entry.slab, entry.slot, entry.generation, entry.key)
        entry.pins += 1
        if entry.pins == 1:
            self.shares.pin(entry)
            entry.slab.held += 1
            self.pinned += 1

    def unpin(self, entries: Iterable[Entry | None]) -> None:
        """Gives pins back. Entries that died meanwhile give their slots back here."""
        with self.lock:
            for entry in entries:
                if entry is None or entry.pins == 0:
                    continue
                entry.pins -= 1
                if entry.pins:
                    continue
                self._let_go(entry.slab)
                self.pinned -= 1
                if entry.dead:
                    self._free_if_unused(entry)
                else:
                    self.shares.unpin(entry)
        self.close_idle()

    def touch(self, digest: bytes, keys: Iterable[bytes], access: Access) -> None:
        """A use of what is there."""
        table = self.served.get(digest)
        if table is None:
            return
        with self.lock:
            for key in keys:
                if (entry := table.get(key)) is not None:
                    self._use(entry, access, table)

    def _use(self, entry: Entry, access: Access, table: dict[bytes, Entry]) -> None:
        """Counts an access's first use of an entry, and learns what it follows."""
        news = False
        if access.use(entry.key):
            self._tick_on(entry)
            news = self.uses.note(entry.slab.slab_id, entry.slot) or not access.has_used(entry.after)
            self.shares.touch(entry)
        if access.before(entry.key) not in (None, entry.after):
            learn(entry, access, table, self.shares)
            news = True
        if news and entry.after:
            use_before(entry, table, self.uses)

    def _tick_on(self, entry: Entry) -> None:
        self._tick += 1
        entry.tick = entry.slab.last_used = self._tick

    # ---- namespaces and slabs ----------------------------------------------------------------------------

    def serve(self, digest: bytes, layout: SlotLayout) -> None:
        """Lets lookups see a namespace. Entries in slots of another layout are dropped: nobody could read them."""
        with self.lock:
            table = self._all.setdefault(digest, {})
            for entry in [entry for entry in table.values() if entry.slab.layout != layout]:
                self._detach(entry)
                self._doomed.append(entry)
                self.invalidations["layout"] += 1
            self.layouts[digest] = layout
            self.served[digest] = table

    def serve_nothing(self) -> None:
        """Hides everything: the weights changed."""
        with self.lock:
            self.served.clear()
            self.layouts.clear()

    def _slot_class(self, layout: SlotLayout) -> SlotClass:
        """The class of a layout, made at its first use."""
        if (found := self.classes.get(layout)) is None:
            found = self.classes[layout] = SlotClass(layout, self._policies())
        return found

    def attach(self, slab: SlabFile) -> None:
        """Takes a slab in, with what `slab.occupy` said of its slots."""
        with self.lock:
            slab.retired = False
            slots = self._slot_class(slab.layout)
            slab.policy = slots.policy
            slots.slabs.append(slab)
            self.slabs_by_id[slab.slab_id] = slab
            if slab.free_slots:
                slots.available.append(slab)

    def slabs(self) -> list[SlabFile]:
        """All slabs."""
        with self.lock:
            return [slab for slots in self.classes.values() for slab in slots.slabs]

    def detach_slab(self, slab: SlabFile) -> list[Entry] | None:
        """Takes a slab out and returns its living entries, taken out too; None if something in it is held."""
        with self.lock:
            if slab.held or slab.lessees:
                return None
            self._retire(slab)
            entries = [entry for entry in slab.entries.values() if not entry.dead]
            for entry in entries:
                self._detach(entry)
            return entries

    def _retire(self, slab: SlabFile) -> None:
        slots = self.classes[slab.layout]
        slots.slabs.remove(slab)
        if slab in slots.available:
            slots.available.remove(slab)
        del self.slabs_by_id[slab.slab_id]
        slab.retired = True

    def coldest_other(self, layout: SlotLayout) -> SlabFile | None:
        """The slab of another layout whose latest use is longest ago, of those that can be removed."""
        with self.lock:
            others = [slots.slabs for slots in self.classes.values() if slots.layout != layout]
            removable = [slab for slabs in others for slab in slabs if not (slab.held or slab.lessees or slab.stuck)]
            removable = [slab for slab in removable if self.shares.may_lose(slab.entries.values())]
            return min(removable, key=lambda slab: slab.last_used, default=None)

    def coldest_layouts(self) -> list[SlotLayout]:
        """The layouts that have a victim, by when their first one was used last: the longest ago first."""
        with self.lock:
            firsts = [first for slots in self.classes.values() if (first := slots.policy.first()) is not None]
            return [victim.slab.layout for victim in sorted(firsts, key=lambda victim: victim.tick)]

    def next_victim_tick(self, layout: SlotLayout) -> int | None:
        """When the first victim of a class was used last; None if it has none."""
        with self.lock:
            first = self._slot_class(layout).policy.first()
            return None if first is None else first.tick

    # ---- slots -------------------------------------------------------------------------------------------

    def take(self, layout: SlotLayout, n: int) -> list[Reservation]:
        """Up to n free slots, in turns from the first `writers` slabs that have some."""
        taken: list[Reservation] = []
        with self.lock:
            lease = self.leases.new()
            slots = self._slot_class(layout)
            available = slots.available
            while available and len(taken) < n:
                slots.rotor = (slots.rotor + 1) % min(len(available), self._writers)
                slab = available[slots.rotor]
                one = Reservation(slab, slab.take(), self.generations.next(), lease)
                slab.owners[one.slot] = one.generation
                taken.append(one)
                slab.held += 1
                if not slab.free_slots:
                    del available[slots.rotor]
            self.reserved += len(taken)
            self.leases.open(lease, taken)
        return taken

    def open_slabs(self, layout: SlotLayout) -> int:
        """Slabs of a class with a free slot."""
        with self.lock:
            return len(self._slot_class(layout).available)

    def release(self, reservations: Iterable[Reservation]) -> None:
        """Gives slots back, quarantined ones too. Settled ones are left alone."""
        with self.lock:
            for reservation in reservations:
                if reservation.state is not SlotState.SETTLED:
                    self._settle_reservation(reservation)
                    self._free(reservation.slab, reservation.slot)
        self.close_idle()

    def quarantine(self, reservation: Reservation) -> None:
        """Keeps a slot from everybody until it is released."""
        with self.lock:
            if reservation.state is SlotState.RESERVED:
                reservation.state = SlotState.QUARANTINED
                self.reserved -= 1
                self.quarantined += 1

    def doubt(self, slab: SlabFile) -> None:
        """A flush failed: whatever was written in a slab by now and is not committed may not be on the device."""
        with self.lock:
            slab.doubted.update(slab.owners.values())

    def _settle_reservation(self, reservation: Reservation, told: bool = False) -> None:
        if reservation.state is SlotState.RESERVED:
            self.reserved -= 1
        else:
            self.quarantined -= 1
        reservation.state = SlotState.SETTLED
        slab = reservation.slab
        if slab.owners.get(reservation.slot) == reservation.generation:
            del slab.owners[reservation.slot]
            slab.doubted.discard(reservation.generation)
        self._let_go(slab)
        self.leases.settle(reservation, told)

    def _free(self, slab: SlabFile, slot: int) -> None:
        # After a lease that became void, or a pin that outlived its entry, the slot may be another's by now.
        if slot in slab.entries or slot in slab.lessees or slot in slab.owners:
            return
        if slab.free(slot) and not slab.retired and slab.free_slots == 1:
            self.classes[slab.layout].available.append(slab)

    def _mark(self, slab: SlabFile, slot: int) -> None:
        if slab.mark(slot) and not slab.free_slots and not slab.retired:
            self.classes[slab.layout].available.remove(slab)

    # ---- what other processes did (follow.py) ------------------------------------------------------------

    def follow_put(self, record: IndexRecord) -> None:
        """Another process has stored this. With the lock."""
        slab = self.slabs_by_id.get(record.slab_id)
        old = self._all.get(record.digest, {}).get(record.key)
        if old is not None and IndexRecord.of(old) == record:
            return
        if old is not None:
            self._forget(old)
        possible = slab is not None and record.slot < slab.usable and record.generation > 0
        if slab is None or not possible or not 0 < record.mask < 1 << slab.layout.blocks_per_chunk:
            return  # a slab that could not be opened here: its chunks are misses in this process
        if (there := slab.entries.get(record.slot)) is not None:
            if there.dead and there.indexed and there.generation == record.generation:
                return  # this process is about to tell the index that it is no good
            if not there.dead:
                self._forget(there)
            slab.entries.pop(record.slot, None)
        slab.lessees.pop(record.slot, None)
        self._mark(slab, record.slot)
        entry = Entry(record.digest, record.key, slab, record.slot, record.generation, record.mask)
        layout = self.layouts.get(record.digest)
        self._put(entry)
        if layout is not None and slab.layout != layout:
            self._detach(entry)
            self._doomed.append(entry)
            self.invalidations["layout"] += 1

    def follow_delete(self, digest: bytes, key: bytes) -> None:
        """Another process has evicted or invalidated this. With the lock."""
        if (entry := self._all.get(digest, {}).get(key)) is not None:
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self._detach(entry)
        entry.indexed = False
        self._free_if_unused(entry)

    def follow_lease(self, row: LeaseRow) -> None:
        """Another process has taken these slots. With the lock."""
        added, dropped = self.leases.set_foreign(row)
        self._give_back((row.epoch, row.number), dropped)
        for slab_id, slot, _ in added:
            if (slab := self.slabs_by_id.get(slab_id)) is not None:
                # A dead entry that is pinned here still stands in the slot; it is not to free it any more.
                if (there := slab.entries.pop(slot, None)) is not None and not there.dead:
                    self._forget(there)
                slab.lessees[slot] = row.epoch, row.number
                self._mark(slab, slot)

    def follow_lease_end(self, epoch: int, number: int) -> None:
        """The index names a lease no more. With the lock."""
        if (row := self.leases.end(epoch, number)) is not None:
            self._give_back((epoch, number), row.slots)

    def _give_back(self, name: tuple[int, int], slots: Iterable[tuple[int, int, int]]) -> None:
        """Another process's lease has these slots no more."""
        for slab_id, slot, _ in slots:
            slab = self.slabs_by_id.get(slab_id)
            if slab is not None and slab.lessees.get(slot) == name:
                del slab.lessees[slot]
                self._free(slab, slot)

    def follow_retire(self, slab_id: int) -> None:
        """Another process removes a slab. What is pinned in it can be read to its end. With the lock."""
        if (slab := self.slabs_by_id.get(slab_id)) is None:
            return
        for entry in [entry for entry in slab.entries.values() if not entry.dead]:
            self._forget(entry)
        self._retire(slab)
        if not slab.held:
            self._idle.append(slab)

    # ---- entries come and go -----------------------------------------------------------------------------

    def load(self, entries: Sequence[Entry]) -> None:
        """Takes in what an earlier process stored, the least recent first. Their slabs know (`occupy`)."""
        with self.lock:
            for entry in entries:
                self._put(entry)

    def _put(self, entry: Entry) -> None:
        self._all.setdefault(entry.digest, {})[entry.key] = entry
        entry.slab.entries[entry.slot] = entry
        self._tick_on(entry)
        self.shares.insert(entry)
        self.entries += 1
        self.live_bytes += entry.slab.slot_bytes

    def install(self, committed: Iterable[tuple[Entry, Reservation]], access: Access) -> int:
        """Makes committed entries visible in the place of what had their keys; how many keys had something. A use."""
        replaced = 0
        with self.lock:
            for entry, reservation in committed:
                old = self._all.get(entry.digest, _NONE).get(entry.key)
                if old is not None:
                    self._detach(old)
                    old.indexed = False  # the index names the new one by now
                    replaced += 1
                self._settle_reservation(reservation, told=True)
                self._put(entry)
                access.use(entry.key)
                self._use(entry, access, self._all[entry.digest])
                if old is not None:
                    self._free_if_unused(old)
        return replaced

    def victims(self, layout: SlotLayout, n: int, owner: bytes, access: Access) -> list[Entry]:
        """Takes up to n entries out, for `settle` or `reinstate`, to make room for `owner`. Pinned ones never."""
        with self.lock:
            return self.shares.victims(self._slot_class(layout).policy, n, owner, access)

    def doom(self, entry: Entry, reason: str) -> bool:
        """Takes an entry out whose bytes are no good; False if it is out already. The index hears of it later."""
        with self.lock:
            if entry.dead:
                return False
            self._detach(entry)
            self._doomed.append(entry)
            self.invalidations[reason if reason in self.invalidations else "other"] += 1
            return True

    def doomed(self, most: int) -> list[Entry]:
        """Takes up to `most` entries off the list of those that the index still has to forget."""
        with self.lock:
            taken, self._doomed = self._doomed[:most], self._doomed[most:]
            return taken

    @property
    def has_doomed(self) -> bool:
        """Whether the index has something to forget."""
        return bool(self._doomed)

    def keep_doomed(self, entries: list[Entry]) -> None:
        """Puts them back on it."""
        with self.lock:
            self._doomed = entries + self._doomed

    def settle(self, entries: Iterable[Entry], reason: str | None = None) -> None:
        """The index has forgotten them: their slots are free when their last pin goes."""
        with self.lock:
            for entry in entries:
                if entry.indexed:
                    entry.indexed = False
                    if reason:
                        self.evictions[reason] += 1
                    self._free_if_unused(entry)

    def reinstate(self, entries: Iterable[Entry]) -> None:
        """Undoes `victims`: the index could not be told."""
        with self.lock:
            for entry in entries:
                if entry.dead and entry.slab.entries.get(entry.slot) is entry:
                    entry.dead, entry.after = False, b""  # a policy need not know any more what it follows
                    self._put(entry)

    def _detach(self, entry: Entry) -> None:
        entry.dead = True
        table = self._all[entry.digest]
        if table.get(entry.key) is entry:
            del table[entry.key]
        self.shares.remove(entry)
        self.entries -= 1
        self.live_bytes -= entry.slab.slot_bytes

    def _free_if_unused(self, entry: Entry) -> None:
        if entry.dead and not entry.indexed and not entry.pins and entry.slab.entries.get(entry.slot) is entry:
            del entry.slab.entries[entry.slot]
            self._free(entry.slab, entry.slot)

    def living(self) -> list[Entry]:
        """All living entries. With the lock."""
        return [entry for table in self._all.values() for entry in table.values()]

    def everything(self) -> list[Row]:
        """The rows of all living entries, the namespaces that nobody registered included, and of all leases."""
        with self.lock:
            entries = [IndexRecord.of(entry) for entry in self.living()]
            return [*entries, *self.leases.rows()]

    # ---- closing -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the slabs in which nothing is held, and every other one when the last pin or slot in it goes."""
        with self.lock:
            self._closed = True
            self._idle += [slab for slots in self.classes.values() for slab in slots.slabs if not slab.held]
        self.close_idle()

    def _let_go(self, slab: SlabFile) -> None:
        slab.held -= 1
        if (self._closed or slab.retired) and not slab.held:
            self._idle.append(slab)

    def close_idle(self) -> None:
        """Closes the slabs that are of no more use. Without the lock."""
        if self._idle:  # only where slabs were retired by another process, or once this is closed
            with self.lock:
                idle, self._idle = self._idle, []
            for slab in idle:
                slab.close()
