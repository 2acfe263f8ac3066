"""Several peers on one root, and what has to be so of all of them (`agree`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lmdb

from kvxfer.store.members import RootLock
from kvxfer.store.records import EpochRow, IndexRecord, LeaseRow, MemberRow, Row, SlabRow, SlabState, parse
from kvxfer.store.slab import slab_name
from tests.store import rig
from tests.store.peer import Peer

__all__ = ["Group", "Watch", "agree", "eventually", "rows_of", "settle"]


def rows_of(root: Path) -> list[Row]:
    """The rows that the index has, read as another program would. With the root's lock held, or nobody writing."""
    env = lmdb.open(str(root / "index"), readonly=True, lock=False, create=False, map_size=64 << 20)
    try:
        with env.begin() as txn:
            found = [parse(bytes(name), bytes(value)) for name, value in txn.cursor()]
    finally:
        env.close()
    return [row for row in found if row is not None]


def eventually(look: Callable[[], bool], seconds: float = 30.0) -> float:
    """How long it took until `look` was true."""
    start = time.monotonic()
    while not look():
        assert time.monotonic() - start < seconds
        time.sleep(0.002)
    return time.monotonic() - start


def settle(peers: Iterable[Peer]) -> None:
    """Lets everybody hear of everything: what one has to say while it listens is heard in the next round."""
    peers = list(peers)
    end = time.monotonic() + 20
    while True:
        done = [peer.call("maintain") for peer in peers]
        if all(done) and not any(peer.call("picture")["behind"] for peer in peers):
            return
        assert time.monotonic() < end, done
        time.sleep(0.05)


def agree(root: Path, peers: Sequence[Peer], capacity: int, files: int = 4096) -> dict[str, Any]:
    """Asserts that all peers believe what the index says, that it can be so, and that the caps hold.

    Returns what the first one believes.
    """
    settle(peers)
    lock = RootLock.open(root)
    try:
        with lock.held(20.0):
            rows = rows_of(root)
            seats = set(lock.others())
            on_disk = {path.name: path.stat().st_size for path in (root / "slabs").iterdir()}
        _agree(rows, seats, on_disk, [peer.call("picture") for peer in peers])
    finally:
        lock.drop()
    nbytes, nfiles = rig.disk_use(root)
    assert nbytes <= capacity
    assert nfiles <= files
    return peers[0].call("picture")


def _agree(rows: list[Row], seats: set[int], on_disk: dict[str, int], pictures: list[dict[str, Any]]) -> None:
    entries = {
        (row.digest + row.key).hex(): [row.slab_id, row.slot, row.generation, row.mask]
        for row in rows
        if isinstance(row, IndexRecord)
    }
    slabs = {row.slab_id: row for row in rows if isinstance(row, SlabRow)}
    leases = {(row.epoch, row.number): [list(slot) for slot in row.slots] for row in rows if isinstance(row, LeaseRow)}
    members = {str(row.seat): [row.epoch, row.pid] for row in rows if isinstance(row, MemberRow)}
    assert len([row for row in rows if isinstance(row, EpochRow)]) >= len(members)

    # The index by itself.
    assert set(map(int, members)) == seats
    assert {epoch for epoch, _ in leases} <= {epoch for epoch, _ in members.values()}, "a lease of nobody"
    taken = [(slab, slot) for slab, slot, *_ in entries.values()]
    leased = [(slab, slot) for slots in leases.values() for slab, slot, _ in slots]
    assert len(set(taken)) == len(taken), "two entries have one slot"
    assert len(set(leased)) == len(leased), "a slot was taken twice"
    assert not set(taken) & set(leased), "a taken slot is an entry's"
    assert all(row.state is SlabState.READY for row in slabs.values()), slabs
    assert sorted(on_disk) == sorted(map(slab_name, slabs))
    assert {slab for slab, _ in taken + leased} <= slabs.keys()

    # Everybody's picture of it.
    for mine in pictures:
        assert mine["entries"] == entries
        assert mine["members"] == members
        assert mine["me"] == [int(s) for s in members if members[s] == mine["me"][1:]] + mine["me"][1:]
        assert mine["rows"] == {str(slab): [int(row.state), row.cost] for slab, row in slabs.items()}
        assert mine["used"] == [sum(row.cost for row in slabs.values()), len(slabs)]
        assert not mine["doomed"]
        epoch = mine["me"][1]
        assert mine["leases"] == {str(n): slots for (e, n), slots in leases.items() if e == epoch}
        foreign = {f"{e}:{n}": slots for (e, n), slots in leases.items() if e != epoch}
        assert mine["foreign"] == foreign
        assert mine["foreign_slots"] == sum(map(len, foreign.values()))
        assert set(mine["slabs"]) == set(mine["rows"])
        used = set(taken) | set(leased)
        for name, slab in mine["slabs"].items():
            free = {(int(name), slot) for slot in slab["free"]}
            every = {(int(name), slot) for slot in range(slab["usable"])}
            if not mine["pinned"] and not mine["held"]:
                assert free == every - used, name
            else:  # slots of entries that died under a pin are not free here yet
                assert free <= every - used, name


class Watch:
    """Looks at what a root takes on the disk, again and again; fails at the end where it was too much once."""

    def __init__(self, root: Path, capacity: int, files: int = 4096) -> None:
        self.root, self.capacity, self.files = root, capacity, files
        self.most, self.looks = (0, 0), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stop.wait(0.002):
            try:
                nbytes, nfiles = rig.disk_use(self.root)
            except FileNotFoundError:  # a file that went while it was looked at
                continue
            self.most = max(self.most[0], nbytes), max(self.most[1], nfiles)
            self.looks += 1

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            assert self.looks > 0
            assert self.most[0] <= self.capacity
            assert self.most[1] <= self.files


class Group:
    """The peers of a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.peers: list[Peer] = []
        self.capacity, self.files = 8 << 20, 4096

    def start(self, *, env: dict[str, str] | None = None, **constants: float) -> Peer:
        """A process that has not opened the root yet. constants: members_LOCK_TIMEOUT_S=1.0."""
        peer = Peer(self.root, env=env)
        self.peers.append(peer)
        for name, value in constants.items():
            where, _, what = name.partition("_")
            peer.call("set", where, what, value)
        return peer

    def open(self, *, env: dict[str, str] | None = None, register: bool = True, **config: Any) -> Peer:
        """A process that has it open, with a namespace."""
        constants = {name: config.pop(name) for name in list(config) if name.partition("_")[2].isupper()}
        self.capacity = config.get("capacity_bytes", self.capacity)
        self.files = config.get("max_files", self.files)
        peer = self.start(env=env, **constants)
        peer.call("open", **config)
        if register:
            peer.call("register")
        return peer

    def living(self) -> list[Peer]:
        """Those that have not ended."""
        return [peer for peer in self.peers if peer.is_alive()]

    def agree(self, *peers: Peer) -> dict[str, Any]:
        """`agree` of these, or of all that live."""
        return agree(self.root, peers or self.living(), self.capacity, self.files)

    def watch(self) -> Watch:
        """A Watch over the caps."""
        return Watch(self.root, self.capacity, self.files)

    def end(self) -> None:
        """Ends all of them."""
        for peer in self.peers:
            peer.end()
