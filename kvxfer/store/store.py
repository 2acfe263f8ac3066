"""The store: slots on disk for chunks, an index of them, and who may use which.

Several processes may have a root open. The index is the truth, and each process's table a picture of it that is at most
some REFRESH_S old; whoever changes something takes the root's lock, brings its table up to date (follow.py), decides by
it, and writes the index.

Locks, in this order. `Store._change`: between threads, for what changes the disk (index transactions, making and
removing slabs, namespace files, the weight epoch), and after it the root's lock, between processes (members.py).
`Table.lock`: the process's picture (entries, pins, free slots, policies, counters), memory only, never held across a
system call. reserve, commit, register, bump_epoch, maintain and close take all of them and may block on the disk.
lookup_prefix, contains and locate take none. pin, unpin, touch, release, quarantine, invalidate and stats take only the
table's, so they never wait for the disk or another process.

Closing. A change that waited for the lock behind a close is refused (`_changing`). Files of slabs in which something is
pinned or reserved are closed by whoever gives the last of it back (Table.close).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from kvxfer.admission import WriteBudget
from kvxfer.config import StoreConfig
from kvxfer.drive_writes import DriveWatch
from kvxfer.errors import ConfigError, ForkError, IOFault, StoreError
from kvxfer.keys import Namespace
from kvxfer.policy import make_policy
from kvxfer.report import reporter
from kvxfer.slot import SlotLayout
from kvxfer.store.access import Access
from kvxfer.store.allocator import Allocator
from kvxfer.store.assembly import Parts, assemble
from kvxfer.store.budget import budget_of, check_burst, write_rate
from kvxfer.store.cleaner import Cleaner
from kvxfer.store.entry import Entry, Reservation, SlotState
from kvxfer.store.housekeeper import keep_house
from kvxfer.store.index import TRANSACTION
from kvxfer.store.ledger import Ledger
from kvxfer.store.members import RootBusy
from kvxfer.store.namespaces import NamespaceFiles, describe
from kvxfer.store.open_here import refuse_twice, remember
from kvxfer.store.opening import lock_root
from kvxfer.store.publisher import Publisher
from kvxfer.store.records import gone
from kvxfer.store.root import raise_weight_epoch, read_root
from kvxfer.store.root_watch import RootWatch
from kvxfer.store.scrub import keep_scrubbing
from kvxfer.store.stats import Counts, StoreStats, gather
from kvxfer.store.table import Policies

REAP_S = 1.0  # how often they are looked for


class Store:
    """Chunks on disk, by namespace and key. Made by `Store.open`; a context manager; thread-safe.

    After a fork the child's copy is of no use: every method but `close` raises ForkError there.
    """

    def __init__(self, config: StoreConfig, parts: Parts, budget: WriteBudget | None) -> None:
        """For `open` only."""
        self.config = config
        self.write_budget = budget  # None: none. Whoever is going to write takes from it first
        self.drives = DriveWatch(config.root)
        self.alignment = parts.opened.info.alignment  # of the root, and so of every slot layout in it
        mode = parts.opened.mode
        self.direct = mode.direct  # whether slabs are open with O_DIRECT
        self.io_mode = mode.name  # the I/O path of the slabs, such as "posix direct": one of io.modes.PATHS
        self.backend = mode.backend  # what an engine's jobs go by: posix or uring
        self._parts = parts
        self._index, self._table = parts.index, parts.table
        self._follower, self._lock = parts.follower, parts.opened.lock
        self._ledger = Ledger(self._table, self._index)
        self._allocator = Allocator(self._table, parts.room, self._index, self._ledger)
        self.counts = Counts()
        self._publisher = Publisher(self._table, self._ledger, self._allocator, self.counts)
        self._namespaces = NamespaceFiles(config)
        self._cleaner = Cleaner(config, self._table, parts.room, self._ledger, self._namespaces, self.counts)
        self._change = threading.RLock()
        self.root = RootWatch(config.root, parts.opened.info, self._table)
        self._pid = os.getpid()
        self.is_closed = False  # whether `close` was called
        self._gone = threading.Event()  # everything was given back
        self._stop = threading.Event()  # the housekeeper is to end
        self._next_reap = 0.0

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        *,
        writers: int = 8,
        policy: Policies | None = None,
        housekeeping: bool = True,
        tool: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> Store:
        """Opens a root, or makes one. What earlier processes left behind is cleaned up before this returns.

        Other processes of this machine may have it open, with the same limits.

        Args:
            config: where, and how much.
            writers: threads that will write at once: the engine's `io_threads`. As many slabs are filled side by side.
            policy: makes the order of eviction for one slot layout; None: as `config.policy` says.
            housekeeping: a thread calls `maintain` every REFRESH_S; False: the caller does.
            tool: this process writes for no request: it has no write budget, and leaves that of the others to them.
            clock: seconds, for the write budget alone; tests give one of their own.

        Raises:
            ConfigError: the values do not go together, the file system is a network's, direct="on" does not work, the
                drive for write_dwpd is not known, or other processes have it open with other limits.
            FormatError: the root, or a slab, was left by another version or by something else; nothing was changed.
            StoreError: another process keeps the root locked (it may be scanning it), too many have it open, or this
                one has: its engines share a store.
            IOFault: the root cannot be made, locked or read.
        """
        if type(writers) is not int or writers < 1:
            raise ConfigError(f"writers={writers!r} must be an integer of at least 1")
        rate = None if tool else write_rate(config)  # before anything is made
        policies = policy or partial(make_policy, config.policy)
        refuse_twice(config.root)
        lock, mode = lock_root(config)
        try:
            with lock.held(config.open_timeout_s):
                others = lock.others()
                lock.sit(tool=tool)
                parts = assemble(config, lock, others, mode, writers, policies)
                store = cls(config, parts, budget_of(config, rate, lambda: parts.follower.writers, clock))
        except BaseException:
            lock.drop()
            raise
        remember(store)
        weakref.finalize(store, lock.drop).atexit = False  # one that is forgotten leaves no seat taken
        if housekeeping:
            keep_house(weakref.ref(store), store._stop)
        if config.scrub_bytes_per_s is not None:
            keep_scrubbing(weakref.ref(store), store._stop, config.scrub_bytes_per_s)
        return store

    @classmethod
    def open_existing(cls, root: Path, **options: Any) -> Store:
        """`open`, with the limits with which the root was opened last. For tools.

        Raises:
            ConfigError: there is no root, or it does not say.
            FormatError, StoreError, IOFault: as `open`.
        """
        info = read_root(Path(root))
        if info is None:
            raise ConfigError(f"{root} is no root: it has no kvxfer.json")
        return cls.open(info.config(Path(root)), tool=True, **options)

    # ---- namespaces --------------------------------------------------------------------------------------

    @property
    def weight_epoch(self) -> int:
        """The root's weight epoch, a part of every digest."""
        return self.root.info.weight_epoch

    def bump_epoch(self) -> int:
        """Makes everything stored so far a miss, in all processes, now and later. Namespaces must be registered again.

        Other processes see it within 100 ms.

        Raises:
            IOFault: it could not be written down: `weight_epoch` says whether it is raised until the machine goes down.
            StoreError: another process keeps the root locked.
        """
        with self._changing():
            self.root.raise_epoch()
            return self.weight_epoch

    bump_epoch_of = staticmethod(raise_weight_epoch)  # without opening the store, whoever has it open

    def register(self, namespace: Namespace, slot: SlotLayout) -> bytes:
        """Opens a namespace for use and returns its digest. Entries in slots of another layout are dropped.

        Raises:
            ConfigError: the slot has another alignment than the root, or fits into no slab, or the write budget's burst
                holds none.
            StoreError: more namespaces are in use than the root has room for, or another process keeps it locked.
        """
        if slot.alignment != self.alignment:
            raise ConfigError(f"slots are aligned to {slot.alignment}, but {self.config.root} to {self.alignment}")
        with self._changing():
            self._parts.room.slots_per_slab(slot)
            check_burst(self.write_budget, slot)
            digest = namespace.digest(self.weight_epoch)
            text = describe(namespace, slot, self.weight_epoch)
            try:
                self._namespaces.write(digest, text, set(self._table.served))
            except IOFault as exc:  # the file is for people; a full disk must not keep a server from starting
                self.counts.namespace_errors += 1
                reporter.warn("namespace", f"a namespace file cannot be written: {exc}", error=exc)
            self._table.serve(digest, slot)
            return digest

    def belongs_here(self, root: Path) -> bool:
        """Whether it is this process's, of that root, and has not given it back."""
        return self._pid == os.getpid() and not self._gone.is_set() and self.config.root.resolve() == root.resolve()

    def forget(self) -> None:
        """In the child of a fork: LMDB opens a file once in a process, and counts the parent's."""
        self._index.inherit()

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

    def pin(self, digest: bytes, keys: Iterable[bytes], access: Access | None = None) -> list[Entry | None]:
        """The entry of every key, None for those that are not stored. Each must be unpinned once.

        While it is pinned an entry's slot keeps its bytes, and its `record` may be given to csrc. A use, of the request
        whose `access` it is (who gives one has placed the keys in it); else the keys are taken to be in prefix order.
        """
        self._check()
        keys = list(keys)
        return self._table.pin(digest, keys, Access().place(keys) if access is None else access)

    def unpin(self, entries: Iterable[Entry | None]) -> None:
        """Gives pins back. No use: that was the pin."""
        self._check(closed_ok=True)
        with reporter.no_further("unpin", "pins could not be given back"):
            self._table.unpin(entries)

    def touch(self, digest: bytes, keys: Iterable[bytes], access: Access | None = None) -> None:
        """Counts as a use of those that are stored, without loading them. `access`: as for `pin`."""
        self._check()
        keys = list(keys)
        self._table.touch(digest, keys, Access().place(keys) if access is None else access)

    def invalidate(self, entry: Entry, reason: str) -> bool:
        """Takes out an entry whose bytes are not what they should be; False if it is out already.

        Lookups miss from now on. The index hears of it with the next change, and the slot is free after that and after
        the last pin. An entry that was stored under the key since is left alone.
        """
        self._check(closed_ok=True)
        return self._table.doom(entry, reason)

    def invalidate_record(self, digest: bytes, key: bytes, slab: int, slot: int, generation: int, reason: str) -> bool:
        """`invalidate`, also for a namespace that nobody registered; False where the key is elsewhere by now."""
        self._check()
        entry = self._table.find_any(digest, key)
        if entry is None or (entry.slab.slab_id, entry.slot, entry.generation) != (slab, slot, generation):
            return False
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

    def reserve(self, digest: bytes, slot: SlotLayout, n: int, access: Access | None = None) -> list[Reservation]:
        """Up to n slots for the caller to write; fewer where the capacity, or the disk, does not give more.

        Entries are evicted, and forgotten by the index, before their slots are handed out. Pinned entries and reserved
        slots are never touched; what other processes have pinned may be. Nor is what the request whose `access` it is
        has used or stored: its later chunks are left out.
        """
        taken: list[Reservation] = []
        access = Access() if access is None else access
        try:
            with self._changing():
                if n < 1:
                    return []
                if self._table.layouts.get(digest) == slot:
                    taken = self._allocator.take(slot, n, digest, access)
        except (RootBusy, IOFault) as exc:
            self._keep_waiting(exc)
        self.counts.refused_reservations += n - len(taken)
        return taken

    def has_room(self, slot: SlotLayout) -> bool:
        """Whether one more chunk would evict nothing, as far as this process knows. For registered layouts."""
        return self._allocator.has_room(slot)

    def _keep_waiting(self, exc: Exception) -> None:
        self.counts.busy += 1
        reporter.warn("busy", f"the root's lock cannot be had: {exc}", error=exc)

    def commit(
        self, digest: bytes, items: Sequence[tuple[bytes, Reservation, int]], access: Access | None = None
    ) -> list[bool]:
        """Publishes chunks that were written: (key, its reservation, mask of valid blocks).

        An entry under the key that lacks some of the blocks is replaced; one that has them all stays, and the new slot
        is free again. Reservations are settled either way, but for quarantined ones. `access`: as for `pin`. Under
        durability "power" one flush of each slab, and one of the index for each TRANSACTION of them, serve all of the
        call.

        Returns:
            For each item, whether its blocks can be looked up now.

        Raises:
            StoreError: the store is closed; the reservations are settled all the same.
        """
        outcome: list[bool] = []
        access = Access().place([key for key, _, _ in items]) if access is None else access
        if self.config.durability == "power":
            self._publisher.flush({slot.slab for _, slot, _ in items if slot.state is SlotState.RESERVED})
        try:
            with self._changing():
                for start in range(0, len(items), TRANSACTION):
                    outcome += self._publisher.publish(digest, items[start : start + TRANSACTION], access)
        except (RootBusy, IOFault) as exc:
            self._keep_waiting(exc)
            self.counts.failed_commits += len(items) - len(outcome)
            self._table.release([slot for _, slot, _ in items if slot.state is SlotState.RESERVED])
            outcome += [False] * (len(items) - len(outcome))
        except StoreError:
            self.release([slot for _, slot, _ in items if slot.state is SlotState.RESERVED])
            raise
        return outcome

    def release(self, reservations: Iterable[Reservation]) -> None:
        """Gives slots back unwritten, or those in quarantine whose write has returned."""
        self._check(closed_ok=True)
        with reporter.no_further("release", "slots could not be given back"):
            self._table.release(reservations)
        self._give_seat_back()

    def quarantine(self, reservation: Reservation) -> None:
        """Keeps a slot from everybody while a write that was given up may still land in it; `release` ends it."""
        self._check(closed_ok=True)
        self._table.quarantine(reservation)

    # ---- the rest ----------------------------------------------------------------------------------------

    def maintain(self) -> bool:
        """Takes in what other processes changed, tells the index what it has not heard yet, and mends it if it broke.

        For idle moments; the housekeeper calls it every REFRESH_S where there is something to do.

        Returns:
            Whether the index is as the table.
        """
        try:
            with self._changing(mending=True):
                usable = self._index.recover()
                if usable and time.monotonic() >= self._next_reap:
                    self._next_reap = time.monotonic() + REAP_S
                    self._follower.reap()
                    self._follower.retry()
                done = usable and self._ledger.settle()
                return done and self._cleaner.tend()
        except (RootBusy, IOFault) as exc:
            self._keep_waiting(exc)
            return False

    def has_work(self) -> bool:
        """Whether `maintain` would find something to do. Touches no lock that another process can hold."""
        self.root.look()  # whoever holds which lock, and for however long
        self._cleaner.look()
        if not self._change.acquire(blocking=False):
            return False  # whoever has it looks for itself
        try:
            reap = not self._follower.is_alone and time.monotonic() >= self._next_reap
            mine = self._ledger.has_something_to_say or self._table.uses.has_changed or self._index.is_broken
            return reap or mine or self._cleaner.is_due or self._index.moved()
        finally:
            self._change.release()

    @contextmanager
    def cleaning(self) -> Iterator[Cleaner]:
        """What removes chunks, slabs and namespaces, with the locks of changes: for steps that are short.

        Raises:
            StoreError, IOFault: the store is closed; another process keeps the root locked; it cannot be locked.
        """
        with self._changing():
            yield self._cleaner

    @contextmanager
    def _changing(self, mending: bool = False) -> Iterator[None]:
        """The locks of changes, for a store that is open, and a table that is up to date.

        Every change of the disk but a close is inside of it.

        Raises:
            StoreError, RootBusy, IOFault: it is closed; another process keeps the lock; the lock cannot be had.
        """
        self._check()  # in a fork's child, or behind a call that never returns, the lock may never come
        with self._change:
            self._check()
            with self._lock.held():
                self.root.look()
                if not self._follower.catch_up() and not mending:
                    raise RootBusy(f"the index of {self.config.root} cannot be read at the moment")
                yield

    def _check(self, closed_ok: bool = False) -> None:
        if os.getpid() != self._pid:
            raise ForkError(f"{self.config.root} was opened by process {self._pid}: open it anew in this one")
        if self.is_closed and not closed_ok:
            raise StoreError(f"the store at {self.config.root} is closed")

    def stats(self) -> StoreStats:
        """Counters and gauges; takes the table's lock alone."""
        self._check(closed_ok=True)
        return gather(self.config, self.weight_epoch, self.counts, self._parts, self.write_budget)

    def close(self, timeout: float = 5.0) -> bool:
        """Writes the index down and gives the root back. Closing twice is fine; in a fork's child it does nothing.

        Jobs should have ended. What is pinned or reserved keeps its slab's file open, and its record valid, until it is
        given back (unpin, release, commit). Reserved slots stay this process's until then, also under lost writes; what
        is pinned may be overwritten by another process meanwhile.

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
        self.is_closed = True
        self._stop.set()
        reporter.warn("close", f"{self.config.root} is left as it is: a call on it has not returned")
        return False

    def _close(self) -> None:
        self._stop.set()
        with self._change:
            if self._gone.is_set():
                return
            self.is_closed = True
            try:
                with self._lock.held():
                    self._leave()
            except (RootBusy, IOFault) as exc:  # others will find the seat empty
                self._keep_waiting(exc)
            finally:
                self._index.close(last=False)
                self._table.close()
                self._gone.set()
                self._give_seat_back()
                reporter.flush()

    def _leave(self) -> None:
        """Tells the other processes, or the next one, that this one has nothing here any more."""
        self._follower.catch_up()
        self._ledger.settle(everything=True)
        if not self._table.leases.own_rows():
            self._index.apply([], [], [gone(self._follower.me)])
            self._index.close(last=not self._lock.others())

    def _give_seat_back(self) -> None:
        """Once it is closed and nothing can be written by it any more."""
        if self._gone.is_set() and not self._table.reserved and not self._table.quarantined:
            self._lock.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
