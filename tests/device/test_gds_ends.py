"""Chunks straight between a device and the drive: calls that never return, deadlines, cancelled jobs, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvxfer.device.base import Buffer
from kvxfer.device.carrier import Batch
from kvxfer.device.form import form_of
from kvxfer.device.gds_carrier import GdsCarrier
from kvxfer.errors import DeviceError
from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.testing import ManualClock
from tests.device.gds_rig import Make, found, make, ok, until
from tests.jobs.rig import DIGEST, EACH, MODEL, expect, poisoned, ranks
from tests.kvikio_double import kvikio

__all__ = ["kvikio", "make"]


# ---- calls that do not return, deadlines, ends


def test_a_write_that_never_returns_is_lost_and_its_bay_kept_until_it_does(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=3, bay_chunks=2, depth=2, io_timeout_s=0.6)
    rig.kvikio.double.faults.update(hang=["raw_write"])
    job = rig.start(STORE, source, EACH[:2])
    outcome = rig.end(STORE)
    assert outcome.status.tolist() == [Status.LOST, Status.LOST]
    assert rig.gds.wait_gathered(job, 0) is not False
    assert list(rig.gds.late()) == []
    stats = rig.gds.stats()
    assert (stats["device_held_bays"], stats["lost_writes"], stats["lost_threads"]) == (1, 2, 2)
    rig.kvikio.double.faults.clear()
    ok(rig.put(source, EACH[4:], chunks=range(4, 8)))  # by the other bay, and other threads
    late: list[tuple[int, int]] = []
    rig.kvikio.double.release.set()
    until(lambda: late.extend(rig.gds.late()) or len(late) == 2)
    assert sorted(late) == [(job, 0), (job, 1)]
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    ok(rig.put(source, EACH))
    ok(rig.load(target := ranks(MODEL, "hnd", 1, filled=False), EACH))
    expect(MODEL, "hnd", target, range(8))


def test_a_read_that_never_returns_is_lost_and_writes_into_no_bay_of_others(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=1, io_timeout_s=0.6)
    ok(rig.store(source, EACH))
    rig.kvikio.double.faults.update(hang=["raw_read"], hang_from=2 * rig.slot.slot_bytes)
    target = ranks(MODEL, "hnd", 1, filled=False)
    rig.start(LOAD, target, EACH)
    until(lambda: len(rig.calls("raw_read")) == 3)
    rig.kvikio.double.faults.clear()
    errors = found(rig.end(LOAD))
    assert [(error.chunk, error.status) for error in errors] == [(2, Status.LOST)]
    expect(MODEL, "hnd", target, [b for b in range(8) if b != 2])
    assert rig.gds.stats()["device_held_bays"] == 1
    other = ranks(MODEL, "hnd", 1, filled=False)
    ok(rig.get(other, EACH))
    expect(MODEL, "hnd", other, range(8))
    rig.kvikio.double.release.set()
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    expect(MODEL, "hnd", target, [b for b in range(8) if b != 2])


def test_where_no_thread_is_left_chunks_are_stalled(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=3, bay_chunks=8, depth=1, max_lost=0, io_timeout_s=0.6)
    rig.kvikio.double.faults["hang"] = ["raw_write"]
    outcome = rig.put(source, EACH)
    assert outcome.status.tolist() == [Status.LOST] + [Status.STALLED] * 7
    assert rig.put(source, EACH[:1]).status.tolist() == [Status.STALLED]
    rig.kvikio.double.faults.clear()
    rig.kvikio.double.release.set()
    until(lambda: rig.carrier.stats()["lost_threads"] == 0)
    ok(rig.put(source, EACH))


def test_at_the_deadline_what_has_arrived_is_kept_and_nothing_else_reaches_the_pages(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch: three chunks have come, two hang, and the others have not begun."""
    monkeypatch.setattr("kvxfer.device.flights.LANDING_NS", 10**9)  # a busy machine's time to sum and to scatter
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    ok(rig.store(source, EACH))
    rig.flip(0, 100)  # and one of the three is damaged
    # Whichever thread comes first to which chunk.
    rig.kvikio.double.faults.update(hang=["raw_read"], hang_from=3 * rig.slot.slot_bytes)
    target = ranks(MODEL, "hnd", 1, filled=False)
    outcome = rig.get(target, EACH, deadline_s=4.0)
    assert outcome.status.tolist() == [Status.BAD_SUM] + [Status.OK] * 2 + [Status.CUT] * 5
    done = [1, 2]
    expect(MODEL, "hnd", target, done)
    until(lambda: rig.gds.stats()["device_held_bays"] == 1)
    rig.kvikio.double.faults.clear()
    rig.kvikio.double.release.set()
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    expect(MODEL, "hnd", target, done)
    assert len(rig.calls("raw_read")) == 5
    assert rig.carrier.stats()["deadline_cuts"] == 5


def test_a_cancelled_store_leaves_what_was_begun_lost_and_the_rest_untouched(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    rig.kvikio.double.faults["hang"] = ["raw_write"]
    job = rig.start(STORE, source, EACH)
    until(lambda: len(rig.calls("raw_write")) == 2)
    rig.gds.cancel(job)
    outcome = rig.end(STORE)
    assert sorted(outcome.status.tolist()) == [Status.CANCELLED] * 6 + [Status.LOST] * 2
    rig.kvikio.double.release.set()
    late: list[tuple[int, int]] = []
    until(lambda: late.extend(rig.gds.late()) or len(late) == 2)
    assert sorted(late) == [(job, chunk) for chunk in np.flatnonzero(outcome.status == Status.LOST).tolist()]
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    assert len(rig.calls("raw_write")) == 2


def test_a_cancelled_load_touches_no_page_any_more(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    ok(rig.store(source, EACH))
    rig.kvikio.double.faults["hang"] = ["raw_read"]
    target = ranks(MODEL, "hnd", 1, filled=False)
    job = rig.start(LOAD, target, EACH)
    until(lambda: len(rig.calls("raw_read")) == 2)
    rig.gds.cancel(job)
    assert rig.end(LOAD).status.tolist() == [Status.CANCELLED] * 8
    rig.kvikio.double.release.set()
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    assert poisoned(target)


def test_a_device_that_is_lost_while_it_sums_ends_the_job(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    for op, after in (("checksum", 1), ("done", 3), ("copy", 3)):
        rig = make(source, f"slots {op}")
        ok(rig.store(source, EACH))
        rig.device.faults.lose(op, after=after)
        target = ranks(MODEL, "hnd", 1, filled=False)
        rig.start(LOAD, target, EACH)
        outcome = rig.end(LOAD)
        assert Status.DEVICE in outcome.status
        assert rig.get(target, EACH).status.tolist() == [Status.DEVICE] * 8
    rig = make(source, "slots of a store")
    rig.device.faults.lose("done", after=4)
    assert Status.DEVICE in rig.put(source, EACH).status


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_process_that_was_stopped_does_not_take_its_device_for_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch, direction: int
) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, io_timeout_s=8.0)
    ok(rig.store(source, EACH[:1]))
    form = form_of([source[0].mapping])
    with monkeypatch.context() as patch:
        patch.setattr("kvxfer.device.job.time.monotonic", clock := ManualClock(50.0))
        carrier = GdsCarrier(rig.device, rig.backend, rig.config)
        bay = carrier.make_bay(9, form.chunk_bytes, 8 * form.slot.blocks_per_chunk, 8 * len(form.segments))
        batch = Batch(direction, bay, form, rig.record(0), np.array(EACH[:1], dtype=np.int64), DIGEST)
        if direction == STORE:
            rig.device.frozen = True
            carrier.begin_store(batch, rig.device.mark())
        else:
            carrier.begin_load(batch)
            until(lambda: carrier.stats()["busy_threads"] == 0 and bool(carrier.stats()["bytes_read"]))
            rig.device.frozen = True
        assert carrier.poll() == [], "the device sums, or is asked for its sums"
        clock.advance(1000.0)
        assert carrier.poll() == [], "nothing was lived through meanwhile"
        for _ in range(8):
            assert carrier.poll() == []
            clock.advance(0.9)
        (landing,) = carrier.poll()
        assert landing.status.tolist() == [Status.DEVICE] and landing.fault is not None
    rig.device.frozen = False
    rig.device.run()


def test_a_shutdown_is_bounded_though_calls_hang(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    rig.kvikio.double.faults["hang"] = ["raw_write"]
    rig.start(STORE, source, EACH)
    until(lambda: len(rig.calls("raw_write")) == 2)
    start = time.monotonic()
    assert rig.gds.shutdown(0.3) == 2
    assert time.monotonic() - start < 10
    outcome = rig.end(STORE)
    assert sorted(outcome.status.tolist()) == [Status.CANCELLED] * 6 + [Status.LOST] * 2
    rig.kvikio.double.release.set()
    late: list[tuple[int, int]] = []
    until(lambda: late.extend(rig.gds.late()) or len(late) == 2)


def test_a_shutdown_waits_for_writes_under_way(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    rig.kvikio.double.faults["hang"] = ["raw_write"]
    rig.start(STORE, source, EACH)
    until(lambda: len(rig.calls("raw_write")) == 2)

    def release() -> None:
        until(lambda: rig.carrier._closing)
        rig.kvikio.double.release.set()

    threading.Thread(target=release).start()
    assert rig.carrier.shutdown(20.0) == 0
    outcome = rig.end(STORE)
    assert sorted(outcome.status.tolist()) == [Status.OK] * 2 + [Status.CANCELLED] * 6


def test_after_a_shutdown_all_memory_is_given_back(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source)
    ok(rig.put(source, EACH))
    assert len(rig.kvikio.double.registered) == 3
    assert rig.gds.shutdown(5.0) == 0
    assert rig.kvikio.double.registered == {}
    assert rig.device.allocated == {True: 0, False: 0}


# ---- calls of the device that do not return


@pytest.mark.parametrize(("op", "direction"), [("done", STORE), ("done", LOAD), ("copy", LOAD), ("checksum", LOAD)])
def test_a_device_call_that_hangs_holds_up_neither_figures_nor_results_nor_the_end(
    make: Make, op: str, direction: int
) -> None:
    """Wherever the thread is in it: in the carrier, too, whose state others ask for."""
    source = ranks(MODEL, "nhd", 1, filled=True)
    ok(make(source).put(source, EACH))
    for after in range(1 + (op == "done")):
        rig = make(source, io_timeout_s=0.2, bays=2, bay_chunks=8)
        rule = rig.device.faults.hang(op, after=after)
        asked: list[object] = []

        def answers(what: Callable[[], object], asked: list[object] = asked) -> bool:
            asking = threading.Thread(target=lambda: asked.append(what()), daemon=True)
            asking.start()
            asking.join(20)
            return not asking.is_alive()

        try:
            rig.start(direction, source, EACH)
            stop = time.monotonic() + 5
            while not rule.hits and rig.gds.poll(direction) is None and time.monotonic() < stop:
                time.sleep(0.002)
            if rule.hits:
                assert answers(rig.gds.stats), f"figures, call {after}"
                assert answers(lambda rig=rig: rig.end(direction, 15)), f"its result, call {after}"  # type: ignore[misc]
                assert answers(lambda rig=rig: rig.gds.shutdown(0.1)), f"the end, call {after}"  # type: ignore[misc]
                assert asked[-1] == 1, "the thread is left behind"
        finally:
            rig.device.faults.release()


# ---- what else is odd


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_calls_of_a_cancelled_job_that_return_soon_stall_nobody(make: Make, direction: int) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "hnd", 1, filled=False)
    rig = make(source, bay_chunks=1, bays=2)
    ok(rig.store(source, EACH))
    name = "raw_write" if direction == STORE else "raw_read"
    pages = source if direction == STORE else target
    rig.kvikio.double.faults["hang"] = [name]
    job = rig.start(direction, pages, EACH)
    until(lambda: len(rig.calls(name)) == (1 if direction == STORE else 2))
    rig.gds.cancel(job)
    assert rig.end(direction).job_id == job
    rig.start(direction, pages, EACH)
    time.sleep(0.05)
    rig.kvikio.double.faults.clear()
    rig.kvikio.double.release.set()
    ok(rig.end(direction))


def test_bays_of_a_lost_device_that_cannot_be_freed_do_not_keep_a_runner_from_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(ranks(MODEL, "nhd", 1, filled=True))

    def lost(_: Buffer) -> None:
        raise DeviceError("the device was lost")

    with monkeypatch.context() as patched:
        patched.setattr(type(rig.cuda.made[0]), "free", lost)
        assert rig.gds.shutdown(1.0) == 0
