"""Takes out of a store what nobody wants any more: chunks, empty slabs, namespace files."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from kvxfer.config import StoreConfig
from kvxfer.errors import IOFault, StoreError
from kvxfer.report import reporter
from kvxfer.staging import AlignedBuffer
from kvxfer.store import uses
from kvxfer.store.entry import Entry
from kvxfer.store.ledger import Ledger
from kvxfer.store.namespaces import NamespaceFiles
from kvxfer.store.rebuild import read_record
from kvxfer.store.room import SlabRoom
from kvxfer.store.scrub_pass import read_scrubs
from kvxfer.store.slab import SlabFile
from kvxfer.store.stats import Counts
from kvxfer.store.table import Table

STEP = 256  # chunks that are taken out with the root's lock held once
TEND_S = 60.0  # how often a store looks for chunks that are past their time
LOOK_S = 1.0  # how often it looks whether somebody removed the file of a namespace that is served here

Chosen = Callable[[Entry, int], bool]  # an entry, and when it was used last


class Cleaner:
    """Removes at a store's word (`Store.cleaning`). All calls but `look` and `is_due` are made with the root's lock."""

    def __init__(
        self,
        config: StoreConfig,
        table: Table,
        room: SlabRoom,
        ledger: Ledger,
        namespaces: NamespaceFiles,
        counts: Counts,
    ) -> None:
        self._table, self._room, self._ledger, self._namespaces = table, room, ledger, namespaces
        self._root, self._ttl_s, self._counts = config.root, config.ttl_s, counts
        self._next_tend = self._next_touch = self._next_look = 0.0
        self._missing = False  # a file of a namespace that is served

    # ---- at somebody's word ------------------------------------------------------------------------------

    def find(self, chosen: Chosen) -> list[Entry]:
        """The entries, of all namespaces, that `chosen` says: in the order in which they go, so that whoever is stopped
        half-way leaves heads. What has one time was stored from head to tail."""
        with self._table.lock:
            living = [(entry, self._used(entry)) for entry in self._table.living()]
        found = [(used, -entry.tick, entry) for entry, used in living if chosen(entry, used)]
        return [entry for _, _, entry in sorted(found, key=lambda each: each[:2])]

    def slabs(self) -> list[SlabFile]:
        """All slabs, by number."""
        return sorted(self._table.slabs(), key=lambda slab: slab.slab_id)

    def in_slab(self, slab: SlabFile) -> list[Entry]:
        """The entries in a slab, in the order in which they lie there."""
        with self._table.lock:
            return [entry for _, entry in sorted(slab.entries.items()) if not entry.dead]

    def behind(self, place: tuple[int, int]) -> tuple[int, int]:
        """(Entries that lie before a slab's slot, all entries); slabs go by number."""
        with self._table.lock:
            places = [(entry.slab.slab_id, entry.slot) for entry in self._table.living()]
        return sum(each < place for each in places), len(places)

    def before(self, place: tuple[int, int]) -> tuple[int, int]:
        """(Entries that a pass has before it at a place, bytes of their slots)."""
        with self._table.lock:
            sizes = [e.slab.slot_bytes for e in self._table.living() if (e.slab.slab_id, e.slot) >= place]
        return len(sizes), sum(sizes)

    def last_used(self) -> dict[bytes, int]:
        """When a chunk of a namespace was used last, by its digest; as exact as UseTimes."""
        latest: dict[bytes, int] = defaultdict(int)
        with self._table.lock:
            for entry in self._table.living():
                latest[entry.digest] = max(latest[entry.digest], self._used(entry))
        return latest

    def drop(
        self, entries: Sequence[Entry], reason: str, *, chosen: Chosen | None = None, wipe: bool = True
    ) -> tuple[int, int]:
        """Takes out those of at most STEP entries that are still there; (chunks, bytes of their slots).

        Args:
            chosen: which stay if it does not say them any more: somebody may have used them since they were found.
            wipe: their first trailer pages are overwritten, on the device, so that no rebuild finds them again.

        Raises:
            StoreError: the index could not be told; they are misses all the same.
        """
        entries = entries[:STEP]
        if chosen is not None:
            with self._table.lock:
                entries = [entry for entry in entries if chosen(entry, self._used(entry))]
        gone = [entry for entry in entries if self._table.doom(entry, reason)]
        if wipe:  # while the index names them still, and so nobody has their slots
            self._wipe([(entry.slab, entry.slot) for entry in gone])
        if not self._ledger.settle():
            raise StoreError("the index could not be written: what was taken out may be there again at the next open")
        return len(gone), sum(entry.slab.slot_bytes for entry in gone)

    def wipe_free(self, slab: SlabFile, first: int, digests: Collection[bytes]) -> None:
        """Overwrites what up to STEP free slots, `first` and those after it, still say of chunks of these namespaces.

        They were evicted or replaced; a rebuild of the index would find them.
        """
        if slab.retired:
            return
        layout, found = slab.layout, []
        buffer = AlignedBuffer(layout.num_trailers * layout.alignment, layout.alignment)
        for slot in range(first, min(first + STEP, slab.usable)):
            if slot in slab.entries or slot in slab.lessees or slot in slab.owners:
                continue
            record = read_record(slab, slot, buffer)[0]
            if record is not None and record.digest in digests:
                found.append((slab, slot))
        self._wipe(found)

    def _wipe(self, slots: Collection[tuple[SlabFile, int]]) -> None:
        for slab, slot in slots:
            layout = slab.layout
            page = AlignedBuffer(layout.alignment, layout.alignment)
            page.array[:] = 0
            try:
                slab.write(page, slab.slot_offset(slot) + layout.payload_stride)
            except IOFault as exc:
                reporter.warn("wipe", f"a removed chunk's trailer cannot be overwritten: {exc}", error=exc)
        for slab in {slab for slab, _ in slots}:  # or a power cut brings back what the index knows no more
            try:
                slab.flush()
            except IOFault as exc:
                reporter.warn("wipe", f"{slab.name} cannot be flushed; what was removed may return: {exc}", error=exc)
                self._table.doubt(slab)

    def drop_empty_slabs(self) -> tuple[int, int]:
        """Removes slabs in which nothing is, and that nobody writes into; (slabs, bytes of their files)."""
        removed = nbytes = 0
        for slab in self._table.slabs():
            if slab.entries or slab.held or slab.lessees or slab.stuck or self._table.detach_slab(slab) is None:
                continue
            if self._room.remove(slab):
                removed, nbytes = removed + 1, nbytes + slab.file_bytes
        return removed, nbytes

    def drop_namespaces(self, digests: Iterable[bytes]) -> int:
        """Removes the files of namespaces; how many. A process that uses one writes it again."""
        return sum([self._namespaces.remove(digest) for digest in digests])

    def _used(self, entry: Entry) -> int:
        return self._table.uses.at(entry.slab.slab_id, entry.slot) or uses.now()

    # ---- by itself ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """Looks now and then whether somebody removed the file of a namespace that is served here. Needs no lock."""
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_S
            with self._table.lock:
                served = set(self._table.served)
            self._missing = bool(self._namespaces.missing(served))

    @property
    def is_due(self) -> bool:
        """Whether `tend` would find something to do."""
        return self._missing or time.monotonic() >= self._next_tend

    def tend(self) -> bool:
        """Says now and then that the namespaces served here are in use, looks how scrubs get on, and takes out what is
        past the store's ttl.

        Returns:
            False where the index could not be told; they are misses all the same, and it is told later.
        """
        self.look()
        if self._missing:  # what is served is of the epoch that holds: the root's lock is held, and it was looked at
            self._missing = False
            self._namespaces.restore(set(self._table.served))
        if not self.is_due:
            return True
        now = time.monotonic()
        if now >= self._next_touch:
            self._next_touch = now + uses.GRAIN_S
            self._namespaces.touch(set(self._table.served))
            self._counts.scrub_ended = read_scrubs(self._root).ended
        if self._ttl_s is None:
            self._next_tend = self._next_touch
            return True
        old = self._expired(self._ttl_s)
        if len(old) < STEP:  # else there are more: the others get the lock in between
            self._next_tend = now + min(TEND_S, max(1.0, self._ttl_s / 10))
        try:
            self.drop(old, "expired", wipe=False)
        except StoreError:
            return False
        return True

    def _expired(self, ttl_s: float) -> list[Entry]:
        """At most STEP entries that were certainly not used for `ttl_s`, and that nothing follows which was."""
        found: dict[Entry, None] = {}
        kept: set[Entry] = set()
        cutoff = uses.unused_since(uses.now(), ttl_s)
        for slab in self._table.slabs():
            if len(found) >= STEP:
                break
            with self._table.lock:  # for one slab at a time: pins wait for it
                for slot in self._table.uses.before(slab.slab_id, cutoff):
                    entry = slab.entries.get(slot)
                    if entry is not None and not entry.dead and not entry.pins and entry not in found:
                        self._add(entry, cutoff, found, kept)
        return list(found)

    def _add(self, first: Entry, cutoff: float, found: dict[Entry, None], kept: set[Entry]) -> None:
        """Finds an old entry, after all that follow it: unless one of those stays, or STEP are found before."""
        path = [(first, iter(first.slab.policy.followers(first)))]
        while path and len(found) < STEP and path[-1][0] not in kept:
            entry, behind = path[-1]
            follower = next((one for one in behind if one not in found), None)
            if follower is None:
                found[entry] = None
                path.pop()
            elif follower in kept or follower.pins or self._used(follower) >= cutoff:
                kept.update(entry for entry, _ in path)
            else:
                path.append((follower, iter(follower.slab.policy.followers(follower))))


def all_of(digests: Collection[bytes], unused_since: float | None) -> Chosen:
    """Entries of these namespaces; only those that were last used before `unused_since`, if that is given."""
    return lambda entry, used: entry.digest in digests and (unused_since is None or used < unused_since)
