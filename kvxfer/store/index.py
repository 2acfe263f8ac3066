"""The durable copy of the table: LMDB, written in batches without fsync, checked before it is trusted (ADR 1).

The index may be lost at any time without harm: it is rebuilt from the trailers. So nothing here raises into the store
for a storage error; calls answer False, and `errors` and `last_error` tell.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from kvxfer.errors import IOFault
from kvxfer.io.system import read_small, replace_file, sync_directory, sys_mkdir, sys_unlink
from kvxfer.report import reporter
from kvxfer.slot import MAX_KEY_BYTES
from kvxfer.store.entry import Entry

try:
    from lmdb import verify as lmdb_verify
except ImportError:  # before lmdb 3: what cannot be checked is rebuilt
    lmdb_verify = None

DATA, STATE = "data.mdb", "state.json"
RECOVERY_INTERVAL_S = 1.0
BATCH = 4096  # records of one transaction when the index is written anew
# Records of the store's transactions (store.py). A transaction of that many touches at most 4 MiB of pages.
TRANSACTION = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORMAT = 1
_DIGEST = 32
_VALUE = struct.Struct("<QQQ32s")  # slab, slot, generation, mask
_EPOCH = b"epoch"
_EPOCH_VALUE = struct.Struct("<Q")
_MAX_EPOCHS = 65536
# A record in pages that are half full, and pages that three transactions in a row may hold before they can be reused.
_RECORD_BYTES, _FIXED_BYTES, _TOUCHED_BYTES, _VERSIONS = 330, 64 << 10, 4 << 20, 3
# After these the environment is of no more use, or has no room even to delete.
_BROKEN = tuple(
    getattr(lmdb, name)
    for name in (
        "PanicError", "CorruptedError", "PageNotFoundError", "MapFullError", "MapResizedError", "InvalidError",
        "VersionMismatchError", "BadTxnError", "BadDbiError", "PageFullError", "CursorFullError",
    )
)  # fmt: skip


class IndexRecord(NamedTuple):
    """Where one chunk is."""

    digest: bytes
    key: bytes
    slab_id: int
    slot: int
    generation: int
    mask: int

    @classmethod
    def of(cls, entry: Entry) -> IndexRecord:
        """The record of an entry."""
        return cls(entry.digest, entry.key, entry.slab.slab_id, entry.slot, entry.generation, entry.mask)


class Put(NamedTuple):
    """A record to write, and the generation that the table knows under its key (0: none)."""

    record: IndexRecord
    expected: int


class Loaded(NamedTuple):
    """What an index held: records, and used epochs with the order of their use."""

    records: list[IndexRecord]
    epochs: dict[int, int]


def max_records(map_bytes: int) -> int:
    """How many entries an index file of `map_bytes` can name with room to change them."""
    live = map_bytes - _FIXED_BYTES
    if live // (_VERSIONS + 1) <= _TOUCHED_BYTES:
        return live // (_VERSIONS + 1) // _RECORD_BYTES
    return (live - _VERSIONS * _TOUCHED_BYTES) // _RECORD_BYTES


def boot_id() -> str:
    """Names the time since the machine was started; empty where the kernel does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _pack(record: IndexRecord) -> bytes:
    return _VALUE.pack(record.slab_id, record.slot, record.generation, record.mask.to_bytes(32, "little"))


def _unpack(key: bytes, value: bytes) -> IndexRecord | None:
    if not _DIGEST < len(key) <= _DIGEST + MAX_KEY_BYTES or len(value) != _VALUE.size:
        return None
    slab_id, slot, generation, mask = _VALUE.unpack(value)
    return IndexRecord(key[:_DIGEST], key[_DIGEST:], slab_id, slot, generation, int.from_bytes(mask, "little"))


class Index:
    """One LMDB environment. The store's change lock serialises all calls."""

    def __init__(self, directory: Path, map_bytes: int) -> None:
        self.directory = directory
        self.map_bytes = map_bytes
        self.max_entries = max_records(map_bytes)
        self.errors = self.conflicts = self.recoveries = 0
        self.last_error = ""
        self.lost = ""  # why `load` found nothing to trust
        self.living: Callable[[], Iterable[IndexRecord]] = tuple  # what it must name: written anew from that
        self._env: Any = None
        self._broken = False
        self._marked = False  # state.json says no more that the index is whole: it may be written
        self._closed = False
        self._epochs: dict[int, int] = {}
        self._next_recovery = 0.0

    # ---- opening -----------------------------------------------------------------------------------------

    def load(self) -> Loaded | None:
        """What the index holds; None, with `lost` set, if it cannot be trusted and must be written anew."""
        try:
            sys_mkdir(self.directory)
            self.lost = self._distrust()
            if not self.lost:
                loaded = self._read_all()
                self._epochs = dict(loaded.epochs)
                return loaded
        except (lmdb.Error, OSError) as exc:
            self.lost = f"unreadable: {exc}"
        self.drop()
        return None

    def _distrust(self) -> str:
        """Why the files cannot be trusted; empty if they can."""
        if not (self.directory / DATA).exists():
            return "there is no index"
        try:
            state = json.loads(read_small(self.directory / STATE) or b"")
            format_, boot, mark = state["format"], state["boot_id"], state["state"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return "state.json is missing or damaged"
        if format_ != _FORMAT or mark not in ("open", "clean"):
            return f"state.json is of format {format_!r}, state {mark!r}"
        if mark == "open" and (not boot or boot != boot_id()):
            return "the machine went down while the index was open"
        if lmdb_verify is None:
            return "this lmdb has no verifier (lmdb >= 3 has)"
        try:
            problems = lmdb_verify.verify(str(self.directory))
        except Exception as exc:  # whatever a walk over damaged bytes trips over, it means damage
            return f"not an index: {exc}"
        return f"damaged: {problems[0]}" if problems else ""

    def _read_all(self) -> Loaded:
        records: list[IndexRecord] = []
        epochs: dict[int, int] = {}
        self._env = self._open_env()
        with self._env.begin() as txn:
            for key, value in txn.cursor():
                if key.startswith(_EPOCH) and len(key) == len(_EPOCH) + 4 and len(value) == _EPOCH_VALUE.size:
                    epochs[int.from_bytes(key[len(_EPOCH) :], "big")] = _EPOCH_VALUE.unpack(value)[0]
                elif (record := _unpack(bytes(key), bytes(value))) is not None:
                    records.append(record)
        return Loaded(records, epochs)

    def _open_env(self) -> Any:
        return lmdb.open(
            str(self.directory), map_size=self.map_bytes, subdir=True, mode=0o600, create=True, sync=False,
            metasync=False, writemap=False, lock=False, max_dbs=0,
        )  # fmt: skip

    def mark_open(self) -> bool:
        """Says on disk that the index is being written, or takes away what says that it is whole.

        Nothing is written before one of them has worked: False until then.
        """
        if not self._marked:
            self._marked = self._mark("open") or self._unmark()
        return self._marked

    def _unmark(self) -> bool:
        try:
            sys_unlink(self.directory / STATE)
            sync_directory(self.directory)
        except IOFault as exc:
            self._count("state", exc)
            return False
        return True

    def _mark(self, state: str) -> bool:
        body = {"format": _FORMAT, "boot_id": boot_id(), "state": state}
        try:
            replace_file(self.directory / STATE, json.dumps(body).encode())
        except IOFault as exc:
            self._count("state", exc)
            return False
        return True

    @property
    def data_bytes(self) -> int:
        """Size of the index file."""
        try:
            return os.stat(self.directory / DATA).st_size
        except OSError:
            return 0

    # ---- changes -----------------------------------------------------------------------------------------

    def apply(self, deletes: Sequence[IndexRecord], puts: Sequence[Put]) -> bool:
        """One transaction: all of it, or (False) nothing as far as this process will ever say.

        A record is deleted only if the index has the same slab, slot and generation under its key. A put replaces what
        it finds: the process that holds the root's lock has the truth in its table; what it did not expect is counted.
        """
        if not deletes and not puts:
            return True
        for _ in range(2):
            if not self._ready():
                return False
            try:
                with self._env.begin(write=True) as txn:
                    conflicts = self._change(txn, deletes, puts)
            except (lmdb.Error, OSError) as exc:
                self._count("transaction", exc)
                if not isinstance(exc, _BROKEN):
                    return False
                self._broken = True
            else:
                self.conflicts += conflicts
                return True
        return False

    @staticmethod
    def _change(txn: Any, deletes: Sequence[IndexRecord], puts: Sequence[Put]) -> int:
        conflicts = 0
        for record in deletes:
            name = record.digest + record.key
            if (found := txn.get(name)) is not None and found[:24] == _pack(record)[:24]:
                txn.delete(name)
        for record, expected in puts:
            name = record.digest + record.key
            found = txn.get(name)
            known = _unpack(name, found) if found is not None else None
            conflicts += (known.generation if known else 0) != expected
            txn.put(name, _pack(record))
        return conflicts

    def add_epoch(self, epoch: int) -> None:
        """Remembers that generations of `epoch` may exist, until 65,536 later ones were used."""
        self._epochs[epoch] = max(self._epochs.values(), default=0) + 1
        forgotten = []
        if len(self._epochs) > _MAX_EPOCHS:
            forgotten = sorted(self._epochs, key=lambda known: self._epochs[known])[: len(self._epochs) // 2]
        for old in forgotten:
            del self._epochs[old]
        if not self._ready():
            return
        try:
            with self._env.begin(write=True) as txn:
                txn.put(*self._epoch_item(epoch))
                for old in forgotten:
                    txn.delete(_EPOCH + old.to_bytes(4, "big"))
        except (lmdb.Error, OSError) as exc:
            self._broken = isinstance(exc, _BROKEN)
            self._count("epoch", exc)

    def _epoch_item(self, epoch: int) -> tuple[bytes, bytes]:
        return _EPOCH + epoch.to_bytes(4, "big"), _EPOCH_VALUE.pack(self._epochs[epoch])

    def recreate(self, records: Iterable[IndexRecord], epochs: Mapping[int, int]) -> bool:
        """Throws the files away and writes new ones."""
        self.drop()
        self._epochs = dict(epochs)
        self._broken = True
        if self._closed or not self.mark_open():
            return False
        try:
            for name in (DATA, "lock.mdb"):
                sys_unlink(self.directory / name)
            self._env = self._open_env()
            with self._env.begin(write=True) as txn:
                for epoch in self._epochs:
                    txn.put(*self._epoch_item(epoch))
            source = iter(records)
            while batch := list(islice(source, BATCH)):
                with self._env.begin(write=True) as txn:
                    for record in batch:
                        txn.put(record.digest + record.key, _pack(record))
        except (lmdb.Error, OSError) as exc:
            self._count("recreate", exc)
            self.drop()
            return False
        self._broken = False
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

    def recover(self) -> bool:
        """Writes the index anew if it broke; False while it is not usable."""
        return self._ready()

    def _count(self, what: str, exc: BaseException) -> None:
        self.errors += 1
        self.last_error = f"{what}: {type(exc).__name__}: {exc}"
        reporter.warn("index", f"index {what} failed, the store goes on without: {exc}")

    # ---- closing -----------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Puts everything on the device and says that it is whole; False if the next open may not believe that.

        Nothing is read or written afterwards.
        """
        self._closed = True
        clean = False
        if self._env is not None and not self._broken:
            try:
                self._env.sync(True)
                clean = True
            except (lmdb.Error, OSError) as exc:
                self._count("sync", exc)
        self.drop()
        return clean and self._mark("clean")

    def drop(self) -> None:
        """Closes the environment and promises nothing: the next open has to judge."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
