"""What a review of several processes on one root found: each broke once, and is held here."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvxfer.errors import IOFault
from kvxfer.slot import SlotLayout
from kvxfer.store import Store
from kvxfer.store.rebuild import scan_slabs
from kvxfer.store.root import RootInfo, read_root, write_root
from kvxfer.store.slab import SlabFile, SlabHeader, inspect_slab, pack_header, slab_file_bytes, whole_slots
from kvxfer.testing import FaultyIO
from tests.store import rig
from tests.store.peer import Refused
from tests.store.sharing import Group, eventually

Opened = Callable[..., Store]


def test_what_cannot_be_read_of_others_is_read_later(
    opened: Opened, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, peer = opened(), group.open()
    digest = store.register(rig.namespace(extra={"n": 0}), rig.ROW)
    store.maintain()
    assert peer.call("put", [1])
    store._index.forget_position()  # as after a log that does not reach back: everything has to be read
    with monkeypatch.context() as broken:

        def fail() -> Any:
            raise lmdb.Error("once")

        broken.setattr(store._index, "everything", fail)
        assert store.reserve(digest, rig.ROW, 1) == [], "nothing is decided by a picture that is known to be old"
        assert not store.maintain() or store.lookup_prefix(digest, [rig.key(1)]) == 0
    assert store.stats().busy > 0
    assert store.maintain()
    assert store.contains(digest, rig.key(1))
    assert rig.put(store, digest, [rig.key(2)]) == [True]
    peer.call("maintain")
    assert peer.call("find", [1, 2]) == [1, 2]
    store.close()
    group.agree()


def test_a_slot_under_a_lost_write_stays_taken_after_a_close(opened: Opened, group: Group) -> None:
    store, peer = opened(), group.open()
    digest = store.register(rig.namespace(), rig.ROW)
    lost, other = store.reserve(digest, rig.ROW, 2)
    store.quarantine(lost)
    store.release([other])
    assert store.close()
    place = lost.slab.slab_id, lost.slot
    peer.call("maintain")
    assert peer.call("stats")["processes"] == 2
    taken = peer.call("reserve", 273)
    assert place not in {(slab, slot) for _, slab, slot, _ in taken}
    peer.call("release", [one[0] for one in taken])
    store.release([lost])  # the write has returned
    peer.call("maintain")
    stats = peer.call("stats")
    assert (stats["processes"], stats["foreign_slots"]) == (1, 0)
    group.agree()


def test_a_release_during_a_commit_of_the_same_lease_is_heard_of(
    opened: Opened, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, peer = opened(), group.open()
    digest = store.register(rig.namespace(), rig.ROW)
    first, second = store.reserve(digest, rig.ROW, 2)
    rig.write(first, digest, rig.key(1))
    tell = store._ledger.tell

    def meanwhile(*args: Any, **named: Any) -> bool:
        store.release([second])  # another thread
        return tell(*args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(store._ledger, "tell", meanwhile)
        assert store.commit(digest, [(rig.key(1), first, rig.FULL)]) == [True]
    assert store.maintain()
    peer.call("maintain")
    assert peer.call("stats")["foreign_slots"] == 0
    store.close()
    group.agree()


def test_limits_that_cannot_be_written_are_not_taken_on(opened: Opened, faults: FaultyIO) -> None:
    opened().close()
    faults.fail("rename", errno.ENOSPC, times=1)
    with pytest.raises(IOFault, match="rename"):
        opened(capacity_bytes=6 << 20)
    opened(capacity_bytes=6 << 20).close()


def test_a_root_that_was_made_anew_is_another_root(opened: Opened, group: Group) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert rig.put(store, digest, [rig.key(1)]) == [True]
    shutil.rmtree(group.root)
    peer = group.open()
    assert peer.call("put", [2])
    assert store.reserve(digest, rig.ROW, 1) == []
    assert not store.maintain()
    assert store.contains(digest, rig.key(1)), "what it has open it can still read"
    assert store.close()
    assert peer.call("check_all", [1, 2]) == [2]
    group.agree()


def test_a_forgotten_store_leaves_no_seat(group: Group) -> None:
    peer = group.open()
    store = Store.open(rig.config(group.root), housekeeping=False)
    digest = store.register(rig.namespace(), rig.ROW)
    assert len(store.reserve(digest, rig.ROW, 3)) == 3
    peer.call("maintain")
    assert peer.call("stats")["foreign_slots"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del store
        gc.collect()
    peer.call("maintain")
    stats = peer.call("stats")
    assert (stats["processes"], stats["foreign_slots"]) == (1, 0)
    group.agree()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_close_that_fails_within_gives_the_root_back(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, [rig.key(1)])

    def fail() -> bool:
        raise MemoryError

    monkeypatch.setattr(store._follower, "catch_up", fail)
    assert store.close()
    again = opened()
    again.register(rig.namespace(), rig.ROW)
    assert rig.check_all(again, digest, [rig.key(1)]) == [rig.key(1)]


def test_a_bump_that_took_effect_is_seen_although_it_failed(opened: Opened, faults: FaultyIO) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, [rig.key(1)])
    faults.fail("fsync", errno.EIO, after=1, times=1)  # the file's passes, the directory's fails
    with pytest.raises(IOFault):
        store.bump_epoch()
    assert store.weight_epoch == 1
    assert not store.contains(digest, rig.key(1))


def test_a_slot_of_a_void_lease_is_not_given_twice(opened: Opened, group: Group) -> None:
    store, peer = opened(writers=1), group.open()
    digest = store.register(rig.namespace(), rig.ROW)
    (stalled,) = store.reserve(digest, rig.ROW, 1)
    assert peer.call("take_leases") == 1
    taken = peer.call("reserve", 273)
    assert (stalled.slab.slab_id, stalled.slot) in {(slab, slot) for _, slab, slot, _ in taken}
    peer.call("release", [one[0] for one in taken])
    peer.call("maintain")
    held = store.reserve(digest, rig.ROW, 272)
    places = {(one.slab.slab_id, one.slot) for one in held}
    assert (stalled.slab.slab_id, stalled.slot) not in places
    store.release([stalled])
    more = store.reserve(digest, rig.ROW, 10)
    assert not places & {(one.slab.slab_id, one.slot) for one in more}
    store.release([*held, *more])
    store.close()
    group.agree()


def test_slab_sizes_that_differ_are_refused(group: Group) -> None:
    group.open(slab_bytes=256 << 10)
    with pytest.raises(Refused, match="effective_slab_bytes"):
        group.open(slab_bytes=512 << 10)


def test_a_bump_is_seen_while_another_process_keeps_the_lock(opened: Opened, group: Group) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert rig.put(store, digest, [rig.key(1)]) == [True]
    peer = group.open()
    peer.call("fault", "hang", "fallocate")
    peer.send("reserve", 80)  # makes a slab, with the root's lock
    eventually(lambda: any(path.suffix == ".tmp" for path in (group.root / "slabs").iterdir()))
    info = read_root(group.root)
    assert info is not None
    write_root(group.root, replace(info, weight_epoch=1))  # as one that was stopped right behind it
    store.has_work()  # what the housekeeper does
    assert store.weight_epoch == 1
    assert not store.contains(digest, rig.key(1))
    peer.end()


def test_only_the_lock_file_was_taken_away(opened: Opened, group: Group) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    (group.root / "lock").unlink()
    peer = group.open()
    assert peer.call("put", [2])
    assert store.reserve(digest, rig.ROW, 1) == []
    assert store.stats().busy > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forks_in_the_middle_of_transactions_never_wait(root: Path) -> None:
    """LMDB's close waits for the threads that were inside of it when the process was forked."""
    code = (
        "import os, sys, threading, time, warnings\n"
        "from pathlib import Path\n"
        "from kvxfer.store import Store\n"
        "from tests.store import rig\n"
        "warnings.simplefilter('ignore')\n"
        "store = Store.open(rig.config(Path(sys.argv[1])))\n"
        "digest = store.register(rig.namespace(), rig.ROW)\n"
        "def work():\n"
        "    for i in range(10**9):\n"
        "        store.release(store.reserve(digest, rig.ROW, 3))\n"
        "        store.maintain()\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "end = time.monotonic() + 4\n"
        "forks = 0\n"
        "while time.monotonic() < end:\n"
        "    child = os.fork()\n"
        "    if child == 0: os._exit(0)\n"
        "    until = time.monotonic() + 10\n"
        "    while os.waitpid(child, os.WNOHANG) == (0, 0):\n"
        "        if time.monotonic() > until: os.kill(child, 9); sys.exit('a child hangs')\n"
        "        time.sleep(0.0005)\n"
        "    forks += 1\n"
        "print(forks); sys.stdout.flush(); os._exit(0)\n"
    )
    done = rig.run_python(code, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 10


def test_a_header_that_claims_more_than_there_is(opened: Opened, root: Path) -> None:
    opened().close()
    shutil.rmtree(root / "index")
    layout = SlotLayout(
        segment_bytes=4096, last_segment_bytes=4096, num_segments=1 << 24, segments_per_trailer=1, blocks_per_chunk=1
    )
    (root / "slabs" / "slab-00000009.kvx").write_bytes(pack_header(9, layout, 1).ljust(1 << 20, b"\0"))
    with (root / "slabs" / "slab-00000010.kvx").open("wb") as file:  # sparse, and larger than the cap
        file.write(pack_header(10, rig.ROW, 1 << 21))
        file.truncate(slab_file_bytes(rig.ROW, 1 << 21))
    store = opened()
    assert store.stats().slabs == 0
    assert not list((root / "slabs").iterdir())


def test_a_slab_without_a_whole_slot_takes_no_memory_for_its_trailers(tmp_path: Path) -> None:
    layout = SlotLayout(
        segment_bytes=4096, last_segment_bytes=4096, num_segments=1 << 24, segments_per_trailer=1, blocks_per_chunk=1
    )
    path = tmp_path / "slab-00000009.kvx"
    path.write_bytes(pack_header(9, layout, 1))
    found = inspect_slab(path, 9, 4096)
    assert found.header is not None
    slab = SlabFile.open(found, found.header, direct=False)
    slab.usable = whole_slots(found.header, found.size)
    scan = scan_slabs([slab], 1)
    slab.close()
    assert (scan.records, scan.epochs) == ([], set())


def test_whole_slots_are_counted_to_the_byte() -> None:
    header = SlabHeader(1, 3, rig.ROW)
    size = rig.ROW.slot_bytes
    for slots in range(5):
        end = rig.ROW.alignment + slots * size
        assert whole_slots(header, end) == min(3, slots)
        assert whole_slots(header, end - 1) == min(3, max(0, slots - 1))
    assert whole_slots(header, 0) == 0


def test_a_root_that_appears_while_it_is_looked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    listdir = os.listdir

    def meanwhile(path: Any) -> list[str]:
        if not (root / "kvxfer.json").exists():
            write_root(root, RootInfo(4096, 7))
            (root / "slabs").mkdir()
        return listdir(path)

    monkeypatch.setattr(os, "listdir", meanwhile)
    info = read_root(root)
    assert info is not None
    assert info.weight_epoch == 7


def test_what_is_no_file_does_not_keep_its_reader_waiting(root: Path) -> None:
    root.mkdir()
    os.mkfifo(root / "kvxfer.json")
    with pytest.raises(IOFault, match="no regular file"):
        read_root(root)
