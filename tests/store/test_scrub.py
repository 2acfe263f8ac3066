"""A scrub finds exactly what is damaged, removes nothing else, and is no faster than told."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.errors import StoreError
from kvxfer.observe import store_values
from kvxfer.store import Store, scrub
from kvxfer.store.reading import SlotReader
from kvxfer.store.records import IndexRecord
from kvxfer.store.scrub import Scrubbed, Scrubber, Throttle
from kvxfer.testing import FaultyIO, ManualClock
from tests.store import rig

Opened = Callable[..., Store]
NAMES = [rig.key(i) for i in range(60)]


def scrubbed(store: Store, rate: float | None = None, clock: ManualClock | None = None) -> Scrubbed:
    """One pass; time passes only by waiting."""
    clock = clock or ManualClock()
    return Scrubber(lambda: store, Throttle(rate, clock.advance, clock), threading.Event()).run()


@pytest.fixture
def filled(opened: Opened) -> tuple[Store, bytes]:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, NAMES))
    return store, digest


def flip(store: Store, digest: bytes, name: bytes, at: int) -> None:
    place = store.locate(digest, name)
    assert place is not None
    with place[0].open("r+b") as file:
        file.seek(place[1] + at)
        byte = file.read(1)[0]
        file.seek(place[1] + at)
        file.write(bytes([byte ^ 1]))


def test_all_is_well(filled: tuple[Store, bytes]) -> None:
    store, digest = filled
    done = scrubbed(store)
    assert (done.chunks, done.nbytes) == (60, 60 * rig.ROW.payload_bytes)
    assert (done.removed, done.unreadable, done.changed, done.complete) == ([], [], 0, True)
    assert rig.check_all(store, digest, NAMES) == NAMES
    assert (store.stats().scrubbed_chunks, store.stats().scrubbed_bytes) == (60, done.nbytes)


@pytest.mark.parametrize(
    ("at", "what"),
    [(0, "bad_sum"), (2 * rig.ROW.segment_stride + rig.ROW.last_segment_bytes - 1, "bad_sum"),
     (rig.ROW.payload_stride + 3, "bad_trailer"), (rig.ROW.payload_stride + 125, "bad_trailer")],
)  # fmt: skip
def test_what_is_damaged_is_a_miss_and_can_be_stored_again(filled: tuple[Store, bytes], at: int, what: str) -> None:
    store, digest = filled
    flip(store, digest, NAMES[7], at)
    done = scrubbed(store)
    assert [(finding.what, finding.record and finding.record.key) for finding in done.removed] == [(what, NAMES[7])]
    assert (done.chunks, done.complete) == (59, True)
    assert set(rig.check_all(store, digest, NAMES)) == set(NAMES) - {NAMES[7]}
    assert store.stats().invalidations[what] == 1
    assert scrubbed(store).chunks == 59
    assert all(rig.put(store, digest, [NAMES[7]]))
    assert scrubbed(store).chunks == 60


def test_what_the_drive_does_not_give_stays(filled: tuple[Store, bytes], faults: FaultyIO) -> None:
    store, digest = filled
    faults.fail("pread", errno.EIO)
    done = scrubbed(store)
    faults.__exit__(None, None, None)
    assert len(done.unreadable) == 60
    assert {finding.what for finding in done.unreadable} == {"io"}
    assert done.removed == []
    assert store.stats().unreadable_chunks == 60
    assert store_values(store.stats())["kvxfer_unreadable_chunks_total", ()] == 60
    assert rig.check_all(store, digest, NAMES) == NAMES


def test_the_rate_is_kept(filled: tuple[Store, bytes]) -> None:
    store, _ = filled
    clock = ManualClock()
    scrubbed(store, 4096, clock)
    pages = 60 * (rig.ROW.slot_bytes // 4096)
    assert clock.now == pytest.approx(pages), "a second for each page, trailers included"


def test_time_that_was_not_used_is_not_made_up_for() -> None:
    clock = ManualClock()
    throttle = Throttle(100, clock.advance, clock)
    clock.advance(1000)
    throttle.moved(200)
    assert clock.now == 1002
    throttle.moved(50)
    assert clock.now == 1002.5
    Throttle(None, clock.advance, clock).moved(10**9)
    assert clock.now == 1002.5


def test_what_changes_under_it_is_no_damage(filled: tuple[Store, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is replaced while it is being read: its slot is given to another one, and written over."""
    store, digest = filled
    real = SlotReader.check
    others = iter(range(1000, 9000))
    busy = False

    def check(reader: SlotReader, record: IndexRecord) -> tuple[str, str] | None:
        nonlocal busy
        if not busy:
            busy = True
            for entry in store.pin(digest, NAMES):
                if entry is not None:
                    store.invalidate(entry, "other")
                    store.unpin([entry])
            assert store.maintain()
            assert all(rig.put(store, digest, [rig.key(next(others)) for _ in range(80)]))
        return real(reader, record)

    monkeypatch.setattr(SlotReader, "check", check)
    done = scrubbed(store)
    assert (done.removed, done.unreadable) == ([], [])
    assert done.changed > 0
    assert done.changed + done.chunks == done.looked_at
    assert len(store.keys(digest)) == 80


def test_a_slab_that_was_taken_away(filled: tuple[Store, bytes]) -> None:
    store, digest = filled
    place = store.locate(digest, NAMES[0])
    assert place is not None
    place[0].unlink()
    done = scrubbed(store)
    assert done.unreadable
    assert done.chunks + len(done.unreadable) == 60


def test_it_stops_when_it_is_told_and_with_its_store(filled: tuple[Store, bytes]) -> None:
    store, _ = filled
    stop = threading.Event()
    seen: list[int] = []

    def progress(done: int) -> None:
        seen.append(done)
        if done == 5:
            stop.set()

    done = Scrubber(lambda: store, Throttle(None, stop.wait), stop, progress).run()
    assert (done.chunks, done.complete, seen) == (5, False, [1, 2, 3, 4, 5])
    assert Scrubber(lambda: None, Throttle(None, stop.wait), threading.Event()).run().chunks == 0


def test_a_store_scrubs_itself(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "PAUSE_S", 0.0)
    found = threading.Event()
    real = Store.invalidate

    def invalidate(store: Store, entry: object, reason: str) -> bool:
        done = real(store, entry, reason)
        if reason == "bad_sum":
            found.set()
        return done

    monkeypatch.setattr(Store, "invalidate", invalidate)
    with Store.open(rig.config(root, scrub_bytes_per_s=1 << 40), writers=2, housekeeping=False) as store:
        digest = store.register(rig.namespace(), rig.ROW)
        assert all(rig.put(store, digest, NAMES))
        flip(store, digest, NAMES[3], 10)
        assert found.wait(60)
        assert not store.contains(digest, NAMES[3])
        (thread,) = [each for each in threading.enumerate() if each.name == "kvxfer-scrub"]
    thread.join(60)
    assert not thread.is_alive()


def test_a_read_that_goes_wrong_once_is_no_damage(filled: tuple[Store, bytes], faults: FaultyIO) -> None:
    store, digest = filled
    rule = faults.flip(0, times=1, offset=(4096, 8192))
    done = scrubbed(store)
    assert rule.hits == 1
    assert (done.chunks, done.removed, done.unreadable) == (60, [], [])
    assert len(store.keys(digest)) == 60


def test_what_cannot_be_read_and_went_is_neither_damaged_nor_unreadable(
    filled: tuple[Store, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, digest = filled
    real = SlotReader.check
    first = True

    def check(reader: SlotReader, record: IndexRecord) -> tuple[str, str] | None:
        nonlocal first
        if not first:
            return real(reader, record)
        first = False
        for entry in store.pin(digest, [record.key]):
            assert entry is not None
            store.invalidate(entry, "other")
            store.unpin([entry])
        return "io", "gone"

    monkeypatch.setattr(SlotReader, "check", check)
    done = scrubbed(store)
    assert (done.chunks, done.changed, done.removed, done.unreadable) == (59, 1, [], [])
    assert store.stats().unreadable_chunks == 0


def test_a_thread_whose_pass_ended_early_keeps_no_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, go_on = threading.Event(), threading.Event()

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if failed.is_set():
                looked.set()
                go_on.wait(60)
            return self.is_set()

    def fail(scrubber: Scrubber) -> Scrubbed:
        failed.set()
        raise StoreError("the root is locked")

    looked = threading.Event()
    monkeypatch.setattr(Scrubber, "run", fail)
    store = Store.open(rig.config(root), housekeeping=False)
    known, stop = weakref.ref(store), Stop()
    scrub.keep_scrubbing(known, stop, 1)
    try:
        assert looked.wait(60)
        assert store.close()
        del store
        gc.collect()
        assert known() is None
    finally:
        stop.set()
        go_on.set()
