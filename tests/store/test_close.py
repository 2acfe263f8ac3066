"""What a close leaves to those that come late: changes that waited for it, pins and reservations that outlive it."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer import _native
from kvxfer.errors import IOFault, StoreError
from kvxfer.staging import AlignedBuffer
from kvxfer.store import Entry, Store
from kvxfer.store.slab import SlabFile
from kvxfer.testing import FaultyIO
from tests.store import rig

Opened = Callable[..., Store]
KEYS = [rig.key(i) for i in range(20)]


def open_slabs(root: Path) -> int:
    """Descriptors of this process on slabs of a root, by whatever name."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the listing's own
    return sum(link.startswith(f"{root}/slabs/") for link in links)


def read_record(record: bytes) -> bytes | None:
    """The first segment of the slot that a kvx_chunk names, read as csrc reads it; None for an errno."""
    handle, offset = struct.unpack_from("=QQ", record)
    buffer, moved = AlignedBuffer(8192), ctypes.c_uint64()
    n = _native.lib().kvx_file_pread(handle, buffer.address, len(buffer), offset, ctypes.byref(moved))
    return None if n < 0 else buffer.array[: rig.ROW.segment_bytes].tobytes()


class Watched:
    """A lock that says when somebody else is about to wait for it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.waiting = threading.Event()

    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        self.waiting.set()
        return self.lock.acquire(*args, **kwargs)

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> Any:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


# ---- changes that waited -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["reserve", "commit", "register", "bump_epoch", "maintain"])
def test_a_change_that_waited_for_a_close_leaves_the_root_alone(opened: Opened, root: Path, what: str) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    (slot,) = store.reserve(digest, rig.ROW, 1)
    rig.write(slot, digest, KEYS[0])
    calls: dict[str, Callable[[], object]] = {
        "reserve": lambda: store.reserve(digest, rig.ROW, 200),
        "commit": lambda: store.commit(digest, [(KEYS[0], slot, rig.FULL)]),
        "register": lambda: store.register(rig.namespace(extra={"n": 1}), rig.ROW),
        "bump_epoch": store.bump_epoch,
        "maintain": store.maintain,
    }
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(calls[what]())
        except Exception as exc:  # the main thread looks at it
            outcome.append(exc)

    worker = threading.Thread(target=work)
    with store._change:
        watched = Watched(store._change)
        store._change = watched  # type: ignore[assignment]
        worker.start()
        assert watched.waiting.wait(10)
        store._close()  # the closing thread's part, which has the lock first
        after_close = rig.snapshot(root)
    worker.join(10)
    assert store.close() is True
    assert isinstance(outcome[0], StoreError)
    assert "is closed" in str(outcome[0])
    assert rig.snapshot(root) == after_close
    assert store.weight_epoch == 0
    store.release([slot])
    assert open_slabs(root) == 0
    again = opened()  # the root is nobody's
    assert again.stats().rebuilds == 0


def test_nothing_changes_after_a_close_that_many_changes_wait_beside(
    opened: Opened, root: Path, faults: FaultyIO
) -> None:
    store = opened(writers=1)
    digest = store.register(rig.namespace(), rig.ROW)
    hung = faults.hang("fallocate", times=1)
    outcomes: list[int | None] = []

    def reserve() -> None:
        try:
            outcomes.append(len(store.reserve(digest, rig.ROW, 30)))
        except StoreError:
            outcomes.append(None)

    threads = [threading.Thread(target=reserve) for _ in range(4)]
    threads[0].start()
    while not hung.hits:
        time.sleep(0.001)
    closer = threading.Thread(target=store.close)
    for thread in (threads[1], closer, *threads[2:]):
        thread.start()
        time.sleep(0.02)
    faults.release()
    closer.join(10)
    after_close = rig.snapshot(root)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert set(outcomes) <= {30, None}
    assert outcomes[0] == 30
    assert rig.snapshot(root) == after_close
    assert opened(writers=1).stats().slabs == len(list((root / "slabs").iterdir()))


# ---- pins and reservations that outlive it -------------------------------------------------------------------


def test_what_is_pinned_can_be_read_until_it_is_unpinned(opened: Opened, root: Path) -> None:
    store = opened(writers=4)
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, KEYS))
    assert open_slabs(root) == 4
    first, twin, other = store.pin(digest, [KEYS[0], KEYS[0], KEYS[1]])
    assert first is not None and other is not None
    assert first is twin
    assert first.slab is not other.slab
    assert store.close()
    assert open_slabs(root) == 2
    for entry in (first, other):
        want = rig.payload(entry.key, rig.ROW, 0).tobytes()
        assert read_record(entry.record) == want
    store.unpin([other])
    assert open_slabs(root) == 1
    assert store.invalidate(first, "bad_sum")
    store.unpin([first])
    assert open_slabs(root) == 1
    assert read_record(first.record) == rig.payload(first.key, rig.ROW, 0).tobytes()
    store.unpin([twin, None])
    store.unpin([twin])
    assert open_slabs(root) == 0
    with pytest.raises(StoreError, match="is closed"):
        _ = first.slab.handle


@pytest.mark.parametrize("end", ["release", "commit", "quarantine"])
def test_what_is_reserved_can_be_written_until_it_is_settled(opened: Opened, root: Path, end: str) -> None:
    store = opened(writers=1)
    digest = store.register(rig.namespace(), rig.ROW)
    slots = store.reserve(digest, rig.ROW, 3)
    assert store.close()
    assert open_slabs(root) == 1
    for slot in slots:
        rig.write(slot, digest, KEYS[0])
    store.release(slots[:1])
    assert open_slabs(root) == 1
    if end == "release":
        store.release(slots)
    elif end == "commit":
        with pytest.raises(StoreError, match="is closed"):
            store.commit(digest, [(KEYS[i], slot, rig.FULL) for i, slot in enumerate(slots)])
    else:
        store.quarantine(slots[1])
        with pytest.raises(StoreError, match="is closed"):
            store.commit(digest, [(KEYS[i], slot, rig.FULL) for i, slot in enumerate(slots)])
        assert open_slabs(root) == 1  # a write may still land in it
        store.release(slots)
    assert open_slabs(root) == 0
    stats = store.stats()
    assert (stats.reserved_slots, stats.quarantined_slots) == (0, 0)


def test_a_pin_that_passed_the_check_before_a_close_finds_nothing(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    store.close()
    assert store._table.pin(digest, iter(KEYS)) == [None] * len(KEYS)
    assert store.stats().pinned_entries == 0


def test_a_close_under_readers(opened: Opened, root: Path) -> None:
    for _ in range(5):
        store = opened(writers=2)
        digest = store.register(rig.namespace(), rig.ROW)
        rig.put(store, digest, KEYS)
        started = threading.Barrier(5)
        failures: list[object] = []

        def read(store: Store, digest: bytes, started: threading.Barrier, failures: list[object]) -> None:
            started.wait()
            try:
                while True:
                    entries: list[Entry | None] = store.pin(digest, KEYS[:4])
                    time.sleep(0.03)  # so that the close comes in here
                    for entry in filter(None, entries):
                        if read_record(entry.record) != rig.payload(entry.key, rig.ROW, 0).tobytes():
                            failures.append(entry)
                    store.unpin(entries)
            except StoreError:
                return
            except BaseException as exc:  # the main thread shows it
                failures.append(exc)

        threads = [threading.Thread(target=read, args=(store, digest, started, failures)) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.01)
        assert store.close()
        for thread in threads:
            thread.join(10)
        assert failures == []
        assert open_slabs(root) == 0


# ---- an index that cannot be marked --------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "code"), [("fsync", errno.ENOSPC), ("rename", errno.EIO)])
def test_an_index_that_cannot_be_marked_is_not_trusted(
    opened: Opened, root: Path, faults: FaultyIO, op: str, code: int
) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, KEYS[:10]))
    store.close()
    state = root / "index" / "state.json"
    assert '"clean"' in state.read_text()
    rule = faults.fail(op, code, times=1)
    store = opened()
    assert rule.hits == 1
    assert not state.exists()
    assert store.stats().index_errors == 1
    store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, KEYS[10:]))
    copy = rig.snapshot(root)  # what would be found if the machine went down now
    assert not any(name.startswith("index/state.json") for name in copy)
    store.close()
    assert '"clean"' in state.read_text()
    store = opened()
    assert store.stats().rebuilds == 0
    store.register(rig.namespace(), rig.ROW)
    assert rig.check_all(store, digest, KEYS) == KEYS


def test_an_index_that_says_it_is_whole_is_not_written(
    opened: Opened, root: Path, faults: FaultyIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.store.index.RECOVERY_INTERVAL_S", 0.0)
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, KEYS[:10]))
    store.close()
    before = (root / "index" / "data.mdb").read_bytes()
    faults.fail("fsync", errno.EIO)
    faults.fail("unlink", errno.EIO, after=1)  # the probe's file goes
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    assert store.lookup_prefix(digest, KEYS) == 10
    assert rig.put(store, digest, KEYS[10:]) == [False] * 10
    assert not store.maintain()
    assert '"clean"' in (root / "index" / "state.json").read_text()
    assert (root / "index" / "data.mdb").read_bytes() == before
    faults.__exit__(None, None, None)
    assert store.maintain()
    assert all(rig.put(store, digest, KEYS[10:]))
    assert '"open"' in (root / "index" / "state.json").read_text()


# ---- a slab that cannot be made ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["PosixFile", "sys_fallocate", "pack_header", "sys_rename"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, IOFault])
def test_a_slab_whose_making_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: type[BaseException]
) -> None:
    (tmp_path / "slabs").mkdir()
    if at == "PosixFile":
        monkeypatch.setattr("kvxfer.io.posix._native", SimpleNamespace(lib=failing(error)))
    else:
        monkeypatch.setattr(f"kvxfer.store.slab.{at}", failing(error))
    with pytest.raises(error):
        SlabFile.create(tmp_path / "slabs", 1, rig.ROW, 5, direct=False)
    assert list((tmp_path / "slabs").iterdir()) == []
    assert open_slabs(tmp_path) == 0


def failing(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error(errno.EIO, "as asked")

    return fail


@pytest.mark.parametrize("op", ["pwrite", "fsync", "rename"])
def test_a_close_whose_own_calls_hang_is_bounded(root: Path, op: str) -> None:
    store = Store.open(rig.config(root), writers=1)
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(0)]))
    with FaultyIO() as io:
        rule = io.hang(op)
        start = time.monotonic()
        assert store.close(0.2) is False
        assert time.monotonic() - start < 20
        assert rule.hits == 1
        with pytest.raises(StoreError, match="closed"):
            store.lookup_prefix(digest, [rig.key(0)])
        with pytest.raises(StoreError, match="open in this process already"):
            Store.open(rig.config(root), writers=1)
    assert store.close(5) is True
    with Store.open(rig.config(root), writers=1) as again:
        assert again.lookup_prefix(again.register(rig.namespace(), rig.ROW), [rig.key(0)]) == 1
