"""The store: slots on disk for chunks, an index of them, and who may use which.

Locks. `Table.lock` covers the process's picture (entries, pins, free slots, policies, counters): memory only, never
held across a system call. `Store._change` serialises what changes the disk: index transactions, making and removing
slabs, namespace files, the weight epoch; it is always taken before the table's. reserve, commit, register, bump_epoch,
maintain and close take both and may block on the disk. lookup_prefix, contains and locate take none. pin, unpin,
touch, release, quarantine, invalidate and stats take only the table's, so they never wait for the disk.

Closing. A change that waited for the lock behind a close is refused (`_changing`). Files of slabs in which something is
pinned or reserved are closed by whoever gives the last of it back (Table.close).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kvxfer.config import StoreConfig
from kvxfer.errors import ConfigError, ForkError, IOFault, StoreError
from kvxfer.keys import Namespace
from kvxfer.policy import LRUPolicy
from kvxfer.report import reporter
from kvxfer.slot import MAX_KEY_BYTES, SlotLayout
from kvxfer.store.entry import Entry, Reservation, SlotState
from kvxfer.store.index import TRANSACTION, Index, IndexRecord, Put
from kvxfer.store.namespaces import NamespaceFiles, describe
from kvxfer.store.opening import Opened, fill, open_root
from kvxfer.store.room import Made, SlabRoom
from kvxfer.store.root import INDEX, RootInfo, write_root
from kvxfer.store.stats import StoreStats
from kvxfer.store.table import Generations, Policies, Table

_OPEN: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    # The child must not keep the root locked when its parent has gone.
    for store in list(_OPEN):
        store._opened.lock.drop()


class Store:
    """Chunks on disk, by namespace and key. Made by `Store.open`; a context manager; thread-safe.

    After a fork the child's copy is of no use: every method but `close` raises ForkError there.
    """

    def __init__(self, config: StoreConfig, opened: Opened, index: Index, table: Table, room: SlabRoom) -> None:
        """For `open` only."""
        self.config = config
        self._opened = opened
        self._index = index
        self._table = table
        self._room = room
        self._namespaces = NamespaceFiles(config)
        self._change = threading.RLock()
        self._info = opened.info
        self._pid = os.getpid()
        self._closed = False
        self._gone = threading.Event()  # everything was given back
        self._commits = self._replacements = self._duplicates = self._failed_commits = 0
        self._refused = self._namespace_errors = 0

    @classmethod
    def open(cls, config: StoreConfig, *, writers: int = 8, policy: Policies = LRUPolicy) -> Store:
        """Opens a root, or makes one. What an earlier process left behind is cleaned up before this returns.

        Args:
            config: where, and how much.
            writers: threads that will write at once: the engine's `io_threads`. As many slabs are filled side by side.
            policy: makes the order of eviction for one slot layout.

        Raises:
            ConfigError: the values do not go together, the file system is a network's, or direct="on" does not work.
            FormatError: the root, or a slab, was left by another version or by something else; nothing was changed.
            StoreError: another process has the root open.
            IOFault: the root cannot be made, locked or read.
        """
        if type(writers) is not int or writers < 1:
            raise ConfigError(f"writers={writers!r} must be an integer of at least 1")
        opened = open_root(config)
        index = Index(config.root / INDEX, config.effective_index_map_bytes)
        try:
            fill(opened, config, index, writers)
            table = Table(Generations(opened.epochs), writers, policy)
            for slab in opened.slabs:
                table.attach(slab)
            table.load(opened.entries)
            table.evictions["shrunk"] = opened.shrunk
            index.living = lambda: map(IndexRecord.of, table.everything())
            index.add_epoch(table.generations.epoch)
            opened.lock.sign()
        except BaseException:
            index.drop()
            opened.close()
            raise
        store = cls(config, opened, index, table, SlabRoom(config, opened, table, writers))
        opened.entries, opened.found, opened.slabs = [], [], []
        _OPEN.add(store)
        return store

    # ---- namespaces --------------------------------------------------------------------------------------

    @property
    def weight_epoch(self) -> int:
        """The root's weight epoch, a part of every digest."""
        return self._info.weight_epoch

    @property
    def alignment(self) -> int:
        """Of the root, and so of every slot layout in it."""
        return self._info.alignment

    @property
    def direct(self) -> bool:
        """Whether slabs are open with O_DIRECT."""
        return self._opened.mode.direct

    @property
    def io_mode(self) -> str:
        """The I/O path of the slabs: "posix direct" or "posix buffered"."""
        return "posix direct" if self.direct else "posix buffered"

    def bump_epoch(self) -> int:
        """Makes everything stored so far a miss, in this process and later ones. Namespaces must be registered again.

        Raises:
            IOFault: it could not be written down; nothing has changed.
        """
        with self._changing():
            info = RootInfo(self._info.alignment, self._info.weight_epoch + 1)
            write_root(self.config.root, info)
            self._info = info
            self._table.serve_nothing()
            return info.weight_epoch

    def register(self, namespace: Namespace, slot: SlotLayout) -> bytes:
        """Opens a namespace for use and returns its digest. Entries in slots of another layout are dropped.

        Raises:
            ConfigError: the slot has another alignment than the root, or fits into no slab.
            StoreError: more namespaces are in use than the root has room for.
        """
        if slot.alignment != self.alignment:
            raise ConfigError(f"slots are aligned to {slot.alignment}, but {self.config.root} to {self.alignment}")
        with self._changing():
            self._room.slots_per_slab(slot)
            digest = namespace.digest(self.weight_epoch)
            text = describe(namespace, slot, self.weight_epoch)
            try:
                self._namespaces.write(digest, text, set(self._table.served))
            except IOFault as exc:  # the file is for people; a full disk must not keep a server from starting
                self._namespace_errors += 1
                reporter.warn("namespace", f"a namespace file cannot be written: {exc}")
            self._table.serve(digest, slot)
            return digest

    # ---- lookups -----------------------------------------------------------------------------------------

    def lookup_prefix(self, digest: bytes, keys: Iterable[bytes]) -> int:
        """How many of the first `keys` are stored, up to the first that is not. A claim: only a load verifies bytes."""
        self._check()
        return self._table.leading_run(digest, keys)

    def contains(self, digest: bytes, key: bytes, mask: int | None = None) -> bool:
        """Whether `key` is stored, and (mask given) with at least those blocks valid."""
        self._check()
        entry = self._table.find(digest, key)
        return entry is not None and (mask is None or entry.mask & mask == mask)

    def pin(self, digest: bytes, keys: Iterable[bytes]) -> list[Entry | None]:
        """The entry of every key, None for those that are not stored. Each must be unpinned once.

        While it is pinned an entry's slot keeps its bytes, and its `record` may be given to csrc.
        """
        self._check()
        return self._table.pin(digest, keys)

    def unpin(self, entries: Iterable[Entry | None]) -> None:
        """Gives pins back; each counts as a use."""
        self._check(closed_ok=True)
        self._table.unpin(entries)

    def touch(self, digest: bytes, keys: Iterable[bytes]) -> None:
        """Counts as a use of those that are stored, without loading them."""
        self._check()
        self._table.touch(digest, keys)

    def invalidate(self, entry: Entry, reason: str) -> bool:
        """Takes out an entry whose bytes are not what they should be; False if it is out already.

        Lookups miss from now on. The index hears of it with the next change, and the slot is free after that and after
        the last pin. An entry that was stored under the key since is left alone.
        """
        self._check(closed_ok=True)
        return self._table.doom(entry, reason)

    def locate(self, digest: bytes, key: bytes) -> tuple[Path, int, SlotLayout] | None:
        """(slab file, offset of the slot, layout), for tools and tests; it may be another's a moment later."""
        self._check()
        if (entry := self._table.find(digest, key)) is None:
            return None
        return entry.slab.path, entry.slot_offset, entry.slab.layout

    def keys(self, digest: bytes) -> list[bytes]:
        """The keys of a registered namespace, in no order."""
        self._check()
        return list(self._table.served.get(digest, {}))

    # ---- storing -----------------------------------------------------------------------------------------

    def reserve(self, digest: bytes, slot: SlotLayout, n: int) -> list[Reservation]:
        """Up to n slots for the caller to write; fewer where the capacity, or the disk, does not give more.

        Entries are evicted, and forgotten by the index, before their slots are handed out. Pinned entries and reserved
        slots are never touched.
        """
        with self._changing():
            if n < 1:
                return []
            if self._table.layouts.get(digest) != slot:
                self._refused += n
                return []
            self._forget_doomed()
            want = min(n, self._index_room(slot, n))
            taken = self._take(slot, want)
            self._refused += n - len(taken)
            return taken

    def _take(self, slot: SlotLayout, n: int) -> list[Reservation]:
        """Free slots, else those of a new slab, else those of what goes for them."""
        taken: list[Reservation] = []
        made, reclaim = self._room.widen(slot, n), True
        while len(taken) < n:
            if got := self._table.take(slot, min(n - len(taken), TRANSACTION)):
                taken += got
            elif made is Made.YES:
                made = self._room.create(slot)
            elif reclaim and made is not Made.FAILED and self._reclaim_colder(slot):
                # A disk that is full may be full of others' files, and stay so: one slab is enough of a try.
                made, reclaim = Made.YES, made is Made.OVER_CAP
            elif not self._evict(slot, min(n - len(taken), TRANSACTION), "capacity"):
                break
        return taken

    def _index_room(self, slot: SlotLayout, n: int) -> int:
        """How many more entries the index can name, once the coldest ones, of any layout, made way for `n`."""
        table, most = self._table, self._index.max_entries
        while (short := table.entries + table.reserved + min(n, most) - most) > 0:
            layout = table.coldest_layout() or slot
            if not self._evict(layout, min(short, TRANSACTION), "index"):
                break
        return max(0, most - table.entries - table.reserved)

    def _evict(self, slot: SlotLayout, n: int, reason: str) -> bool:
        victims = self._table.victims(slot, n)
        if not victims:
            return False
        if self._index.apply([IndexRecord.of(victim) for victim in victims], ()):
            self._table.settle(victims, reason)
            return True
        self._table.reinstate(victims)
        return False

    def _reclaim_colder(self, slot: SlotLayout) -> bool:
        """Removes the coldest slab of another layout, if this one has nothing that was used less recently."""
        slab = self._table.coldest_other(slot)
        own = self._table.next_victim_tick(slot)
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

    def commit(self, digest: bytes, items: Sequence[tuple[bytes, Reservation, int]]) -> list[bool]:
        """Publishes chunks that were written: (key, its reservation, mask of valid blocks).

        An entry under the key that lacks some of the blocks is replaced; one that has them all stays, and the new slot
        is free again. Reservations are settled either way, but for quarantined ones.

        Returns:
            For each item, whether its blocks can be looked up now.

        Raises:
            StoreError: the store is closed; the reservations are settled all the same.
        """
        outcome: list[bool] = []
        try:
            with self._changing():
                for start in range(0, len(items), TRANSACTION):
                    outcome += self._commit_batch(digest, items[start : start + TRANSACTION])
        except StoreError:
            self._table.release([slot for _, slot, _ in items if slot.state is SlotState.RESERVED])
            raise
        return outcome

    def _commit_batch(self, digest: bytes, items: Sequence[tuple[bytes, Reservation, int]]) -> list[bool]:
        layout = self._table.layouts.get(digest)
        planned: dict[bytes, tuple[Entry, Reservation]] = {}
        puts: dict[bytes, Put] = {}
        outcome: list[bool] = []
        waiting: list[bytes | None] = []  # whose commit an outcome depends on
        surplus: list[Reservation] = []
        for key, reservation, mask in items:
            usable = reservation.state is SlotState.RESERVED and _fits(layout, key, reservation, mask)
            known = self._table.find(digest, key)
            there = planned[key][0] if key in planned else known
            present = usable and there is not None and mask & ~there.mask == 0
            waiting.append(key if usable and (not present or key in planned) else None)
            outcome.append(present)
            if not usable or present:
                self._duplicates += present
                surplus += [reservation] if reservation.state is SlotState.RESERVED else []
                continue
            if key in planned:
                surplus.append(planned[key][1])
            entry = Entry(digest, key, reservation.slab, reservation.slot, reservation.generation, mask)
            planned[key] = entry, reservation
            puts[key] = Put(IndexRecord.of(entry), known.generation if known else 0)
        done = self._change_index(list(puts.values()))
        for entry, reservation in planned.values():
            if done:
                self._replacements += self._table.install(entry, reservation)
                self._commits += 1
            else:
                surplus.append(reservation)
                self._failed_commits += 1
        self._table.release(surplus)
        return [done if key is not None else present for key, present in zip(waiting, outcome, strict=True)]

    def release(self, reservations: Iterable[Reservation]) -> None:
        """Gives slots back unwritten, or those in quarantine whose write has returned."""
        self._check(closed_ok=True)
        self._table.release(reservations)

    def quarantine(self, reservation: Reservation) -> None:
        """Keeps a slot from everybody while a write that was given up may still land in it; `release` ends it."""
        self._check(closed_ok=True)
        self._table.quarantine(reservation)

    # ---- the rest ----------------------------------------------------------------------------------------

    def maintain(self) -> bool:
        """Tells the index what it has not heard yet, and mends it if it broke; for idle moments.

        Returns:
            Whether the index is as the table.
        """
        with self._changing():
            return self._index.recover() and self._forget_doomed()

    def _forget_doomed(self) -> bool:
        while self._table.has_doomed:
            if not self._change_index([]):
                return False
        return True

    def _change_index(self, puts: Sequence[Put]) -> bool:
        """One transaction: these puts, and what was invalidated since the last one."""
        doomed = self._table.doomed(TRANSACTION)
        done = self._index.apply([IndexRecord.of(entry) for entry in doomed], puts)
        if done:
            self._table.settle(doomed)
        else:
            self._table.keep_doomed(doomed)
        return done

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The lock of changes, for a store that is open. Every change of the disk but a close is inside of it."""
        self._check()  # in a fork's child, or behind a call that never returns, the lock may never come
        with self._change:
            self._check()
            yield

    def _check(self, closed_ok: bool = False) -> None:
        if os.getpid() != self._pid:
            raise ForkError(f"{self.config.root} was opened by process {self._pid}: open it anew in this one")
        if self._closed and not closed_ok:
            raise StoreError(f"the store at {self.config.root} is closed")

    def stats(self) -> StoreStats:
        """Counters and gauges; takes the table's lock alone."""
        self._check(closed_ok=True)
        table, room, index, opened = self._table, self._room, self._index, self._opened
        slab_bytes = room.used_bytes
        slabs = table.slabs()
        with table.lock:
            return StoreStats(
                capacity_bytes=self.config.capacity_bytes, disk_bytes=slab_bytes + index.data_bytes,
                live_bytes=table.live_bytes, entries=table.entries, max_entries=index.max_entries,
                pinned_entries=table.pinned, reserved_slots=table.reserved, quarantined_slots=table.quarantined,
                free_slots=sum(slab.free_slots for slab in slabs), slabs=len(slabs),
                slab_bytes=sum(slab.file_bytes for slab in slabs), index_bytes=index.data_bytes,
                namespaces=len(table.served), weight_epoch=self.weight_epoch, direct=self.direct,
                mode=opened.mode.why, commits=self._commits, replacements=self._replacements,
                duplicates=self._duplicates, failed_commits=self._failed_commits,
                refused_reservations=self._refused, evictions=dict(table.evictions),
                invalidations=dict(table.invalidations), slabs_created=room.created, slabs_removed=room.removed,
                slab_errors=room.errors, index_errors=index.errors, index_conflicts=index.conflicts,
                index_recoveries=index.recoveries, rebuilds=opened.rebuilds, rebuild_reason=opened.rebuild_reason,
                namespace_errors=self._namespace_errors,
            )  # fmt: skip

    def close(self, timeout: float = 5.0) -> bool:
        """Writes the index down and gives the root back. Closing twice is fine; in a fork's child it does nothing.

        Jobs should have ended. What is pinned or reserved keeps its slab's file open, and its record valid, until it is
        given back (unpin, release, commit); its slot may be written by the root's next owner meanwhile.

        Args:
            timeout: seconds to wait for calls on the root: those under way in other threads, and this one's own. Where
                they do not return, the root stays this process's, since they may still land.

        Returns:
            False if it was left like that.
        """
        if os.getpid() != self._pid:
            return True
        # In a thread of its own, left behind where a dead device holds it.
        closing = threading.Thread(target=self._close, name="kvxfer-close", daemon=True)
        closing.start()
        closing.join(max(0.0, timeout))
        if self._gone.is_set():
            return True
        self._closed = True
        reporter.warn("close", f"{self.config.root} is left as it is: a call on it has not returned")
        return False

    def _close(self) -> None:
        with self._change:
            if self._gone.is_set():
                return
            self._closed = True
            self._forget_doomed()
            self._index.close()
            self._table.close()
            self._opened.lock.drop()
            self._gone.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # stub: these three stand in until a root can have several owners

    @classmethod
    def open_existing(cls, root: Path) -> Store:
        """Opens a root with the limits with which it was last opened."""
        used = sum(path.lstat().st_size for path in root.rglob("*"))
        return cls.open(StoreConfig(root=root, capacity_bytes=max(64 << 30, 4 * used), max_files=65536))

    @classmethod
    def bump_epoch_of(cls, root: Path) -> tuple[int, int]:
        """Raises a root's weight epoch; the old one and the new one."""
        with cls.open_existing(root) as store:
            return store.weight_epoch, store.bump_epoch()

    def invalidate_record(self, digest: bytes, key: bytes, slab: int, slot: int, generation: int, reason: str) -> bool:
        """`invalidate`, for a namespace that need not be registered: False if the key is elsewhere by now."""
        entry = self._table._all.get(digest, {}).get(key)
        if entry is None or (entry.slab.slab_id, entry.slot, entry.generation) != (slab, slot, generation):
            return False
        return self.invalidate(entry, reason)


def _fits(layout: SlotLayout | None, key: bytes, reservation: Reservation, mask: int) -> bool:
    """Whether a reservation can become this entry."""
    return (
        layout is not None
        and reservation.slab.layout == layout
        and isinstance(key, bytes)
        and 1 <= len(key) <= MAX_KEY_BYTES
        and 0 < mask < 1 << layout.blocks_per_chunk
    )


os.register_at_fork(after_in_child=_after_fork)
