"""The durable copy of the table: LMDB, written in batches, checked before it is trusted (ADR 1).

Under durability "power" every transaction waits for the device, so that after a power cut the file holds the last one
that was acknowledged, and perhaps the one after it; else nothing is synced before the close (ADR 14).

The index may be lost at any time without harm: it is rebuilt from the trailers. So nothing here raises into the store
for a storage error; calls answer False, and `errors` and `last_error` tell.

Several processes have it open at once. LMDB's own locks are not used: whoever reads or writes it holds the lock of the
root (members.py), so that no reader that was stopped keeps pages from being used again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from kvxfer.errors import IOFault, StoreError
from kvxfer.io.system import TEMPORARY, check_plain, mkdir_within, share_path, sync_directory, sys_rename, sys_unlink
from kvxfer.report import reporter
from kvxfer.store import changes, trust
from kvxfer.store.inherited import close_inherited, leave_alone
from kvxfer.store.records import (
    LEASES,
    MEMBERS,
    PLACE_BYTES,
    SLABS,
    EpochName,
    EpochRow,
    IndexRecord,
    Item,
    Put,
    Row,
    UsedRow,
    gone,
    item,
    parse,
    parse_name,
)
from kvxfer.store.trust import DATA

RECOVERY_INTERVAL_S = 1.0
BATCH = 4096  # records of one transaction when the index is written anew
# Records of the store's transactions (store.py). A transaction of that many touches at most 4 MiB of pages.
TRANSACTION = 256
_MAX_EPOCHS = 65536
# A record in pages that are half full, and pages that three transactions in a row may hold before they can be reused.
_RECORD_BYTES, _FIXED_BYTES, _TOUCHED_BYTES, _VERSIONS = 340, 64 << 10, 4 << 20, 3
_LOG_SHARE = 16  # the log of changes has this part of the file
# After these the environment is of no more use, or has no room even to delete.
_BROKEN = tuple(
    getattr(lmdb, name)
    for name in (
        "PanicError", "CorruptedError", "PageNotFoundError", "MapFullError", "MapResizedError", "InvalidError",
        "VersionMismatchError", "BadTxnError", "BadDbiError", "PageFullError", "CursorFullError",
    )
)  # fmt: skip


class _File(Enum):
    """What became of the file that is open."""

    SAME = "same"
    ANOTHER = "another process has written it anew"
    LOST = "taken away, or shorter than it was"


class Loaded(NamedTuple):
    """What an index held: records, used epochs with the order of their use, and times of use."""

    records: list[IndexRecord]
    epochs: dict[int, int]
    uses: list[UsedRow]


def max_records(map_bytes: int) -> int:
    """How many entries an index file of `map_bytes` can name with room to change them."""
    live = map_bytes - map_bytes // _LOG_SHARE - _FIXED_BYTES
    if live // (_VERSIONS + 1) <= _TOUCHED_BYTES:
        return live // (_VERSIONS + 1) // _RECORD_BYTES
    return (live - _VERSIONS * _TOUCHED_BYTES) // _RECORD_BYTES


class Index:
    """One LMDB environment. All calls but `moved` are made with the root's lock."""

    def __init__(self, directory: Path, map_bytes: int, durability: str = "process") -> None:
        self.directory = directory
        self._synced, self._kept = durability == "power", durability != "none"
        self._data = os.path.join(directory, DATA)  # looked at often
        self.map_bytes = map_bytes
        self.max_entries = max_records(map_bytes)
        self.errors = self.conflicts = self.recoveries = 0
        self.last_error = ""
        self.lost = ""  # why `load` found nothing to trust
        self.living: Callable[[], Iterable[Row]] = tuple  # all rows but epochs: what it is written anew from
        self.shared = False  # other processes have it open: they are to hear of every change
        self._env: Any = None
        self._inode = self._size = 0
        self._position = 0  # the last transaction that this process knows of
        self._broken = False
        self._marked = False  # state.json says no more that the index is whole: it may be written
        self._closed = False
        self._epochs: dict[int, int] = {}
        self._next_recovery = 0.0

    # ---- opening -----------------------------------------------------------------------------------------

    def load(self) -> Loaded | None:
        """What the index holds; None, with `lost` set, if it cannot be trusted and must be written anew."""
        try:
            mkdir_within(self.directory)
            self.lost = trust.distrust(self.directory)
            if not self.lost:
                loaded = self._read_all()
                self._epochs = dict(loaded.epochs)
                return loaded
        except (lmdb.Error, OSError) as exc:
            self.lost = f"unreadable: {exc}"
        self.drop()
        return None

    def _read_all(self) -> Loaded:
        self._reopen()
        rows = self.everything()
        records = [row for row in rows if isinstance(row, IndexRecord)]
        return Loaded(records, dict(self._epochs), [row for row in rows if isinstance(row, UsedRow)])

    def join(self) -> list[Row]:
        """Opens the index that other processes have open, and reads it.

        Raises:
            lmdb.Error, OSError: it cannot be read, or is damaged.
        """
        self._open_checked()
        return self.everything()

    def _open_checked(self) -> None:
        if problem := trust.damage(self.directory):
            raise lmdb.CorruptedError(problem)
        self._reopen()

    def everything(self) -> list[Row]:
        """All rows; from here on `changes` tells what was changed later."""
        with self._env.begin() as txn:
            found = [parse(bytes(name), bytes(value)) for name, value in txn.cursor()]
            self._position = txn.id()
        rows = [row for row in found if row is not None]
        self._epochs = {row.epoch: row.order for row in rows if isinstance(row, EpochRow)}
        return rows

    def _reopen(self, name: str = DATA) -> None:
        self.drop()
        close_inherited()
        path = self.directory / name
        check_plain(path)  # LMDB would follow a link, and wait for a pipe
        try:
            self._env = lmdb.open(
                str(path), map_size=self.map_bytes, subdir=False, mode=0o600, create=True, sync=self._synced,
                metasync=self._synced, writemap=False, lock=False, max_dbs=0,
            )  # fmt: skip
        except lmdb.Error as exc:
            if "already open in this process" in str(exc):  # no damage: a store of this process was left open
                raise StoreError(
                    f"{self.directory} is open in this process already, or was when it was forked from another"
                ) from exc
            raise
        status = os.stat(path)
        share_path(path)
        self._inode, self._size = status.st_ino, status.st_size
        self._position = 0
        self._broken = False

    # ---- what others changed -----------------------------------------------------------------------------

    def moved(self) -> bool:
        """Whether another process may have changed it since the last look. Takes no lock: a hint."""
        if self._env is None or self._broken:
            return False
        try:
            return self._look() is not _File.SAME or self._env.info()["last_txnid"] != self._position
        except lmdb.Error:
            return True

    def _look(self) -> _File:
        """Whether the file is the one that is open. Pages that it does not have any more must not be touched."""
        try:
            status = os.stat(self._data)
        except OSError:
            return _File.LOST
        if status.st_ino != self._inode:
            return _File.ANOTHER
        if status.st_size < self._size:
            return _File.LOST
        self._size = status.st_size
        return _File.SAME

    def changes(self) -> list[Item] | None:
        """What others changed since the last look, in order; None where only `everything` can tell.

        Raises:
            lmdb.Error, OSError: it cannot be read. It will be written anew from memory.
        """
        found: list[Item] | None = []
        try:
            now = self._look()
            # What broke here may be whole: others go on with it, and what they did must not be written over.
            again = self.shared and self._broken and time.monotonic() >= self._next_recovery
            if now is _File.ANOTHER or (now is _File.SAME and again):
                self._open_checked()
                return None
            if self._env is None or self._broken:
                return []
            if now is _File.LOST:
                raise OSError(errno.ENOENT, f"{DATA} was taken away or cut short")
            if self._env.info()["last_txnid"] != self._position:
                with self._env.begin() as txn:
                    if (found := changes.since(txn, self._position)) is not None:
                        self._position = txn.id()
        except (lmdb.Error, OSError):
            self._broken = True
            raise
        for name, value in found or ():
            self._note_epoch(name, value)
        return found

    def forget_position(self) -> None:
        """What was heard could not be used: the next `changes` asks for everything."""
        self._position = 0

    def _note_epoch(self, name: bytes, value: bytes | None) -> None:
        match parse_name(name):
            case EpochName(epoch):
                row = None if value is None else parse(name, value)
                if isinstance(row, EpochRow):
                    self._epochs[epoch] = row.order
                else:
                    self._epochs.pop(epoch, None)

    # ---- what state.json says ----------------------------------------------------------------------------

    def mark_open(self) -> bool:
        """Says on disk that the index is being written, or takes away what says that it is whole.

        Nothing is written before one of them has worked: False until then.
        """
        if not self._marked:
            state = "synced" if self._synced and not self.lost and self._on_device() else "open"
            self._marked = self._mark(state) or self._unmark()
        return self._marked

    def _on_device(self) -> bool:
        """Puts on the device what was written without waiting for it; whether that worked."""
        if self._env is None:
            return False
        try:
            self._env.sync(True)
            sync_directory(self.directory)
        except (lmdb.Error, OSError) as exc:
            self.failed("sync", exc)
            return False
        return True

    def _mark(self, state: str) -> bool:
        try:
            trust.mark(self.directory, state)
        except IOFault as exc:
            self.failed("state", exc)
            return False
        return True

    def _unmark(self) -> bool:
        try:
            trust.unmark(self.directory)
        except IOFault as exc:
            self.failed("state", exc)
            return False
        return True

    @property
    def data_bytes(self) -> int:
        """Size of the index file."""
        try:
            return os.stat(self._data).st_size
        except OSError:
            return 0

    # ---- changes -----------------------------------------------------------------------------------------

    def apply(self, deletes: Sequence[IndexRecord], puts: Sequence[Put], rows: Sequence[Item] = ()) -> bool:
        """One transaction: all of it, or (False) nothing as far as this process will ever say.

        A record is deleted only if the index has the same slab, slot and generation under its key. A put replaces what
        it finds: who holds the root's lock has the truth in its table; what it did not expect is counted. `rows` are
        written, or deleted, as they are.
        """
        if not deletes and not puts and not rows:
            return True
        for _ in range(2):
            if not self._ready():
                return False
            try:
                followed = self._is_followed
                with self._env.begin(write=True) as txn:
                    conflicts, done = self._change(txn, deletes, puts, rows)
                    if self.shared:
                        changes.append(txn, done, self.map_bytes // _LOG_SHARE)
                if followed:  # or what others did before would be passed over
                    self._follow_own()
            except (lmdb.Error, OSError) as exc:
                self.failed("transaction", exc)
                if not isinstance(exc, _BROKEN):
                    return False
                self._broken = True
            else:
                self.conflicts += conflicts
                return True
        return False

    @staticmethod
    def _change(
        txn: Any, deletes: Sequence[IndexRecord], puts: Sequence[Put], rows: Sequence[Item]
    ) -> tuple[int, list[Item]]:
        conflicts, done = 0, list(rows)
        for record in deletes:
            name = record.digest + record.key
            if (found := txn.get(name)) is not None and found[:PLACE_BYTES] == record.place():
                txn.delete(name)
                done.append((name, None))
        items = [(record.digest + record.key, record.pack()) for record, _ in puts]
        for (name, _), (_, expected) in zip(items, puts, strict=True):
            if (found := txn.get(name)) is None:
                conflicts += expected != 0
            else:
                known = parse(name, found)
                conflicts += (known.generation if isinstance(known, IndexRecord) else 0) != expected
        if items:
            with txn.cursor() as cursor:
                cursor.putmulti(items)
        done += items
        for name, value_or_none in rows:
            if value_or_none is None:
                txn.delete(name)
            else:
                txn.put(name, value_or_none)
        return conflicts, done

    def add_epoch(self, epoch: int, rows: Sequence[Item] = ()) -> bool:
        """Remembers that generations of `epoch` may exist, until 65,536 later ones were used; writes `rows` with it."""
        row = EpochRow(epoch, max(self._epochs.values(), default=0) + 1)
        self._epochs[epoch] = row.order
        forgotten: list[Item] = []
        if len(self._epochs) > _MAX_EPOCHS:
            oldest = sorted(self._epochs, key=lambda known: self._epochs[known])[: len(self._epochs) // 2]
            forgotten = [gone(EpochRow(old, self._epochs.pop(old))) for old in oldest]
        return self.apply([], [], [item(row), *forgotten, *rows])

    def _follow_own(self) -> None:
        """What this process has committed it need not hear of. (A transaction that changed nothing has no number.)"""
        self._position = int(self._env.info()["last_txnid"])

    @property
    def _is_followed(self) -> bool:
        """Whether this process knows of every transaction."""
        return bool(self._position == self._env.info()["last_txnid"])

    def epoch_order(self, epoch: int) -> int:
        """When an epoch was used first, against others."""
        return self._epochs.get(epoch, 0)

    def begin(self, rows: Iterable[Row]) -> bool:
        """The first process of a root: forgets what earlier ones were doing and writes down what there is now."""
        if not self._ready():
            return False
        try:
            with self._env.begin(write=True) as txn:
                changes.clear(txn)
                for prefix in (MEMBERS, LEASES, SLABS):
                    changes.delete_all(txn, prefix)
                for row in rows:
                    txn.put(*item(row))
            self._follow_own()
        except (lmdb.Error, OSError) as exc:
            self.failed("begin", exc)
            self._broken = True  # what it says of slabs is not so: it has to be written anew
            return False
        return True

    def recreate(self, rows: Iterable[Row], epochs: Mapping[int, int]) -> bool:
        """Throws the file away and writes a new one. Others find out that it is another one."""
        self.drop()
        self._epochs = dict(epochs)
        self._broken = True
        if self._closed or not self.mark_open():
            return False
        try:
            # The old one goes first, so that never two of them take room; the new one gets its name when it is whole.
            for name in (DATA, DATA + TEMPORARY, "lock.mdb"):
                sys_unlink(self.directory / name)
            self._reopen(DATA + TEMPORARY)
            self._broken = True
            source = iter([*(EpochRow(*known) for known in self._epochs.items()), *rows])
            while batch := list(islice(source, BATCH)):
                with self._env.begin(write=True) as txn:
                    for row in batch:
                        txn.put(*item(row))
            sys_rename(self.directory / (DATA + TEMPORARY), self.directory / DATA)
            if self._synced:  # or "synced" could come to stand beside the old one
                sync_directory(self.directory)
            self._follow_own()
        except (lmdb.Error, OSError) as exc:
            self.failed("recreate", exc)
            self.drop()
            return False
        self._broken = False
        if self._synced:  # it need not hold: an index of which this is not said is rebuilt
            self._mark("synced")
        return True

    def _ready(self) -> bool:
        """Whether there is an environment to write to; one that broke is written anew, but not too often."""
        if self._closed:
            return False
        usable = self._env is not None and not self._broken
        if usable and self._marked:
            return True
        now = time.monotonic()
        if now < self._next_recovery:
            return False
        self._next_recovery = now + RECOVERY_INTERVAL_S
        if usable:
            return self.mark_open()
        self.recoveries += 1
        reporter.warn("index recovery", f"the index is written anew from memory: {self.last_error}")
        return self.recreate(self.living(), self._epochs)

    @property
    def is_broken(self) -> bool:
        """Whether it has to be written anew, and that may be tried by now."""
        return (self._broken or self._env is None) and time.monotonic() >= self._next_recovery

    def recover(self) -> bool:
        """Writes the index anew if it broke; False while it is not usable."""
        return self._ready()

    def failed(self, what: str, exc: BaseException) -> None:
        """Counts a failure, and says so."""
        self.errors += 1
        self.last_error = f"{what}: {type(exc).__name__}: {exc}"
        reporter.warn("index", f"index {what} failed, the store goes on without: {exc}", error=exc)

    # ---- closing -----------------------------------------------------------------------------------------

    def close(self, last: bool = True) -> bool:
        """The last process puts everything on the device and says that it is whole; False if that isn't said.

        Under durability "none" it does neither. Nothing is read or written afterwards.
        """
        self._closed = True
        clean = False
        if last and self._kept and not self._broken:
            clean = self._on_device()
        self.drop()
        return clean and self._mark("clean")

    def inherit(self) -> None:
        """In the child of a fork: never touches what the parent has open."""
        env, self._env = self._env, None
        self._closed = True
        if env is not None:
            leave_alone(env)

    def drop(self) -> None:
        """Closes the environment and promises nothing: the next open has to judge."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
