"""A machine that loses power: what preload_record.c wrote down, replayed up to a moment, and what a disk may then hold.

The model is harsher than file systems are. A write, a change of a size and a change of a directory are on the disk
only once a flush that began after them has returned (fsync or fdatasync of that file, fsync of that directory, or the
end of a write under O_DSYNC). Of what is not, any part may be there: any 512-byte sector of any write, in any order.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SECTOR = 512


class Call(NamedTuple):
    """One thing that was written down."""

    kind: str
    words: tuple[str, ...]
    data: bytes = b""


def read_log(path: Path) -> list[Call]:
    """All of it, in order."""
    raw, at, calls = path.read_bytes(), 0, []
    while at < len(raw):
        end = raw.index(b"\n", at)
        kind, _, rest = raw[at:end].decode().partition(" ")
        words = tuple(rest.split("\t")) if kind in "RNUMD" else tuple(rest.split(" ", 1 if kind == "C" else -1))
        at = end + 1
        data = b""
        if kind == "W":
            data, at = raw[at : at + int(words[2])], at + int(words[2])
        calls.append(Call(kind, words, data))
    return calls


@dataclass
class File:
    """Bytes that are on the disk, and changes that may or may not be."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        """Sector by sector."""
        at = 0
        while at < len(data):
            n = min(len(data) - at, SECTOR - (offset + at) % SECTOR)
            self.pending.append(("write", offset + at, data[at : at + n]))
            at += n

    def flush(self) -> None:
        """Everything is on the disk."""
        self.durable, self.pending = _applied(self.durable, self.pending), []


def _applied(content: bytearray, changes: list[tuple[str, int, bytes]]) -> bytearray:
    out = bytearray(content)
    for kind, n, data in changes:
        if kind == "size":
            del out[n:]
        out.extend(bytes(max(0, n + len(data) - len(out))))
        out[n : n + len(data)] = data
    return out


class Disk:
    """Files and names; a name's change belongs to its directory."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}  # by inode, the latest that had it
        self.now: dict[str, File | None] = {}  # what the process sees; None: a directory
        self.durable: dict[str, File | None] = {}
        self.pending: list[tuple[str, File | None, str]] = []  # (name, what it names from then on or "gone", kind)

    def play(self, call: Call) -> None:
        """One call that has returned."""
        words = call.words
        match call.kind:
            case "C":
                self.files[words[0]] = File()
                self._name(words[1], self.files[words[0]])
            case "M":
                self._name(words[0], None)
            case "U":
                self.now.pop(words[0], None)
                self.pending.append((words[0], None, "gone"))
            case "R":
                moved = self.now.pop(words[0])
                self.now[words[1]] = moved
                self.pending.append((words[1], moved, "rename:" + words[0]))
            case "W" if words[0] in self.files:
                file = self.files[words[0]]
                file.write(int(words[1]), call.data)
                if words[3] == "1":
                    file.pending, late = file.pending[:0], file.pending  # O_DSYNC: this write alone
                    n = -(-(len(call.data) + int(words[1]) % SECTOR) // SECTOR)
                    file.durable, file.pending = _applied(file.durable, late[-n:]), late[:-n]
            case "T" | "F" if words[0] in self.files:
                self._resize(self.files[words[0]], call)
            case "S" if words[0] in self.files:
                self.files[words[0]].flush()
            case "D":
                mine = [change for change in self.pending if os.path.dirname(change[0]) == words[0]]
                self.pending = [change for change in self.pending if os.path.dirname(change[0]) != words[0]]
                self._change(self.durable, mine)

    def _name(self, name: str, what: File | None) -> None:
        self.now[name] = what
        self.pending.append((name, what, "made"))

    @staticmethod
    def _resize(file: File, call: Call) -> None:
        size, wanted = len(_applied(file.durable, file.pending)), int(call.words[1])
        if call.kind == "T" or wanted > size:
            file.pending.append(("size", wanted, b""))

    @staticmethod
    def _change(names: dict[str, File | None], changes: list[tuple[str, File | None, str]]) -> None:
        for name, what, kind in changes:
            if kind == "gone":
                names.pop(name, None)
                continue
            if kind.startswith("rename:"):
                names.pop(kind[7:], None)
            names[name] = what

    def after_a_cut(self, keep: random.Random, share: float) -> dict[str, bytes | None]:
        """What is found: all that was flushed, and each other change with a probability of `share`."""
        names = dict(self.durable)
        self._change(names, [change for change in self.pending if keep.random() < share])
        found: dict[str, bytes | None] = {}
        contents: dict[int, bytes] = {}
        for name in sorted(names):
            if (parent := os.path.dirname(name)) in self.now and parent not in found:
                continue  # its directory is gone, and everything in it
            if (file := names[name]) is None:
                found[name] = None
                continue
            if id(file) not in contents:
                kept = [change for change in file.pending if keep.random() < share]
                contents[id(file)] = bytes(_applied(file.durable, kept))
            found[name] = contents[id(file)]
        return found


def after_a_cut(calls: list[Call], seed: int, share: float) -> dict[str, bytes | None]:
    """What is found where the power went while the last of these calls was under way; None: a directory."""
    disk = Disk()
    for call in calls[:-1]:
        disk.play(call)
    last = calls[-1]
    if last.kind == "W":
        last = last._replace(words=(*last.words[:3], "0"))
    if last.kind not in "SDN":
        disk.play(last)
    return disk.after_a_cut(random.Random(seed), share)


def lay_out(found: dict[str, bytes | None], old_world: Path, world: Path) -> None:
    """Makes these files below a directory that is there."""
    for name, content in found.items():
        path = world / os.path.relpath(name, old_world)
        if content is None:
            path.mkdir(mode=0o700)
        else:
            path.write_bytes(content)


# ---- the process that is recorded: python -m tests.store.powercut ROOT DURABILITY -----------------------------------

CHUNKS = 120
HOW: dict[str, Any] = {"capacity_bytes": 4 << 20, "slab_bytes": 65 * 4096, "io": "posix"}


def note(**said: Any) -> None:
    """Into the record, between two calls."""
    ctypes.CDLL(None).record_note(json.dumps(said).encode())


def live(root: Path, durability: str) -> None:
    """Stores until chunks are evicted, replaces the index, closes, opens, and goes on; ends without a word.

    Notes say which chunks can be looked up, after everything that changes that. durability "switch": first "process",
    and "power" after the close.
    """
    from kvxfer.config import EngineConfig, StoreConfig  # the model of a disk needs none of these
    from kvxfer.engine import TransferEngine
    from kvxfer.store import Store
    from tests.engine.rig import GEOMETRY, keys_of, namespace_of, ranks
    from tests.oracle import Model

    first, second = ("process", "power") if durability == "switch" else (durability, durability)
    pages = ranks(Model.random(GEOMETRY, CHUNKS, seed=3), "nhd", 2, filled=True)
    job = 0

    def session(numbers: list[list[int]], durability: str, close: bool) -> None:
        nonlocal job
        config = StoreConfig(root=root, durability=durability, **HOW)
        store = Store.open(config, writers=2, housekeeping=False)
        engine = TransferEngine(store, namespace_of(), pages, config=EngineConfig(io_threads=2))

        def tell() -> None:
            have = [k for k in range(CHUNKS) if store.contains(engine.digest, keys_of([k])[0])]
            note(have=have, durability=durability, evicted=sum(store.stats().evictions.values()))

        tell()
        for n, chunks in enumerate(numbers):
            job += 1
            note(doing="put")
            engine.submit_store(job, keys_of(chunks), chunks)
            assert engine.wait([job], 60.0)[job].bitmap.all()
            tell()
            if n == 3:
                note(doing="recreate")
                store._index._broken, store._index._next_recovery = True, 0.0
                assert store.maintain()
                tell()
            if n == 4:
                note(doing="invalidate")
                entries = store.pin(engine.digest, keys_of(chunks[:1]))
                assert store.invalidate(entries[0], "bad_sum")
                store.unpin(entries)
                assert store.maintain()
                tell()
        if close:
            note(doing="close")
            engine.shutdown()
            store.close()

    session([[*range(8 * i, 8 * i + 8)] for i in range(6)], first, close=True)
    session([[*range(8 * i, 8 * i + 8)] for i in range(6, 15)], second, close=False)
    note(doing="end")
    os._exit(0)


if __name__ == "__main__":
    live(Path(sys.argv[1]), sys.argv[2])
