"""The breaker in an engine: faults at the call table, a clock that the test winds."""

from __future__ import annotations

import errno
import time
from pathlib import Path

from kvxfer.breaker import BreakerState
from kvxfer.engine import TransferEngine
from kvxfer.jobs import Status
from kvxfer.results import TransferResult
from kvxfer.testing import FaultyIO, ManualClock
from tests.engine.rig import GEOMETRY, Node, keys_of
from tests.engine.test_observed import outcomes
from tests.jobs.test_faults import until
from tests.oracle import Model

MODEL = Model.random(GEOMETRY, 40)
ALL = list(range(40))
MINUTES = 120.0  # longer than any cool-down


def state(engine: TransferEngine, direction: str = "load") -> BreakerState:
    metrics = engine.metrics()
    one = {each: metrics.value("kvxfer_breaker_state", direction=direction, state=each.value) for each in BreakerState}
    assert sorted(one.values()) == [0, 0, 1]
    return max(one, key=one.__getitem__)


def statuses(result: TransferResult) -> list[Status]:
    return [error.status for error in result.errors]


def test_a_thousand_errors_in_a_row_open_it_a_probe_closes_it(tmp_root: Path) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, clock=clock) as node, FaultyIO() as io:
        node.put(ALL)
        reads = io.calls("pread")
        assert node.get(ALL).bitmap.all()
        reads_per_chunk = (io.calls("pread") - reads) // 40
        rule = io.fail("pread", errno.EIO)
        assert statuses(node.get(ALL)) == [Status.IO] * 40
        assert state(node.reader) is BreakerState.OPEN and node.reader.lookup(keys_of(ALL)) == 0
        for _ in range(24):
            assert statuses(node.get(ALL)) == [Status.BREAKER] * 40
        assert rule.hits == 40, "the device is left alone"

        clock.advance(MINUTES)
        assert state(node.reader) is BreakerState.HALF_OPEN and node.reader.lookup(keys_of(ALL)) == 2
        assert statuses(node.get(ALL)) == [Status.IO] * 2 + [Status.BREAKER] * 38
        assert state(node.reader) is BreakerState.OPEN and rule.hits == 42

        io.__exit__(None, None, None)  # the device is well again
        assert statuses(node.get(ALL)) == [Status.BREAKER] * 40, "nobody knows yet"
        clock.advance(MINUTES)
        reads = io.calls("pread")
        probe = node.get(ALL)
        assert probe.bitmap.count() == probe.bitmap.leading_run() == 2
        assert statuses(probe) == [Status.BREAKER] * 38 and io.calls("pread") - reads == 2 * reads_per_chunk
        node.poison()
        assert state(node.reader) is BreakerState.CLOSED and node.get(ALL).bitmap.all()
        node.check(ALL)
        assert outcomes(node.reader, "load") == {"hit": 82, "io": 42, "breaker": 24 * 40 + 38 + 40 + 38}
        assert node.reader.metrics().value("kvxfer_breaker_opened_total", direction="load") == 2
        assert node.store.stats().pinned_entries == 0
        assert node.store.stats().entries == 40, "an errno says nothing about the bytes"


def test_misses_go_through_a_probe_and_decide_nothing(tmp_root: Path) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, clock=clock) as node, FaultyIO() as io:
        node.put(range(20))
        io.fail("pread", errno.EIO)
        node.get(range(20))
        io.__exit__(None, None, None)
        clock.advance(MINUTES)
        assert node.get(range(20, 40)).errors == () and state(node.reader) is BreakerState.HALF_OPEN
        assert node.get([30, 5, 31, 6, 7]).bitmap.bits == 0b01010
        assert state(node.reader) is BreakerState.CLOSED


def test_damage_and_deadlines_do_not_open_it(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, breaker_failures=1, clock=ManualClock()) as node, FaultyIO() as io:
        node.put(ALL)
        assert statuses(node.get(ALL, deadline=time.monotonic() - 1)) == [Status.CUT] * 40
        io.flip(7)
        assert all(status.is_damage for status in statuses(node.get(ALL)))
        assert state(node.reader) is BreakerState.CLOSED
        assert node.reader.metrics().value("kvxfer_breaker_opened_total", direction="load") == 0
        assert node.store.stats().entries == 0


def test_a_full_disk_stops_stores_and_not_loads(tmp_root: Path) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, clock=clock) as node, FaultyIO() as io:
        node.put(range(20))
        io.fail("pwrite", errno.ENOSPC)
        assert {(e.status, e.errno) for e in node.put(range(20, 40)).errors} == {(Status.IO, errno.ENOSPC)}
        assert state(node.writer, "store") is BreakerState.OPEN and state(node.writer) is BreakerState.CLOSED
        writes = io.calls("pwrite")
        for _ in range(50):
            assert statuses(node.put(range(20, 40))) == [Status.BREAKER] * 20
        assert io.calls("pwrite") == writes
        assert node.get(range(20)).bitmap.all() and node.writer.lookup(keys_of(ALL)) == 20

        io.__exit__(None, None, None)
        clock.advance(MINUTES)
        probe = node.put(ALL)
        assert probe.bitmap.leading_run() == probe.bitmap.count() == 22, "what is there already needs no probe"
        assert statuses(probe) == [Status.BREAKER] * 18
        assert state(node.writer, "store") is BreakerState.CLOSED and node.put(ALL).bitmap.all()
        assert outcomes(node.writer, "store") == {
            "stored": 40,
            "present": 20 + 22,
            "io": 20,
            "breaker": 50 * 20 + 18,
        }
        assert node.writer.metrics().value("kvxfer_io_errors_total", direction="store", kind="full") == 20
        stats = node.store.stats()
        assert (stats.reserved_slots, stats.pinned_entries) == (0, 0)


def test_a_store_that_gets_no_slot_is_no_failure_and_no_probe(tmp_root: Path) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, capacity_bytes=8 << 20, clock=clock) as node, FaultyIO() as io:
        io.fail("pwrite", errno.ENOSPC, offset=(4096, 1 << 40))
        assert {error.errno for error in node.put(ALL).errors} == {errno.ENOSPC}
        io.__exit__(None, None, None)
        others = node.store.reserve(node.digest, node.source[0].mapping.slot, 10_000)
        clock.advance(MINUTES)
        for _ in range(5):
            assert set(statuses(node.put(ALL))) == {Status.NO_SPACE, Status.BREAKER}
            assert state(node.writer, "store") is BreakerState.HALF_OPEN
        node.store.release(others)
        assert node.put(ALL).bitmap.count() == 2
        assert state(node.writer, "store") is BreakerState.CLOSED


def test_reads_that_hang_open_it_although_deadlines_come_first(tmp_root: Path) -> None:
    clock = ManualClock()
    with (
        Node(tmp_root, MODEL, clock=clock, io_threads=2, io_timeout_s=0.5, breaker_failures=2) as node,
        FaultyIO() as io,
    ):
        node.put(ALL)
        io.hang("pread")
        result = node.get(ALL, deadline=time.monotonic() + 0.02)
        assert set(statuses(result)) == {Status.CUT}
        until(lambda: state(node.reader) is BreakerState.OPEN, "calls are given up")
        assert statuses(node.get(ALL)) == [Status.BREAKER] * 40
        metrics = node.reader.metrics()
        assert metrics.value("kvxfer_lost_calls_total", direction="load") >= 2
        assert metrics.value("kvxfer_lost_threads") >= 2
        assert metrics.value("kvxfer_leaked_staging_bytes") <= metrics.value("kvxfer_staging_bytes")
        assert state(node.reader, "store") is BreakerState.CLOSED
        io.__exit__(None, None, None)
        until(lambda: node.reader.metrics().value("kvxfer_lost_threads") == 0, "the calls return")
        clock.advance(MINUTES)
        assert node.get([0]).bitmap.all() and state(node.reader) is BreakerState.CLOSED
        assert node.get(ALL).bitmap.all()
        assert node.reader.metrics().value("kvxfer_leaked_staging_bytes") == 0


def test_a_probe_that_hangs_opens_it_again(tmp_root: Path) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, clock=clock, io_timeout_s=0.5, breaker_failures=2) as node, FaultyIO() as io:
        node.put(ALL)
        io.fail("pread", errno.EIO)
        node.get(ALL)
        io.__exit__(None, None, None)
        io.hang("pread")
        clock.advance(MINUTES)
        assert statuses(node.get(ALL)) == [Status.LOST] * 2 + [Status.BREAKER] * 38
        assert state(node.reader) is BreakerState.OPEN
        assert node.reader.metrics().value("kvxfer_breaker_opened_total", direction="load") == 2


def test_every_job_has_one_result_whatever_the_breaker_does(tmp_root: Path) -> None:
    """Submitted without waiting, so that they find it in every state."""
    with (
        Node(tmp_root, MODEL, breaker_failures=3, breaker_cooldown_s=0.002, breaker_max_cooldown_s=0.01) as node,
        FaultyIO() as io,
    ):
        for job in range(300):
            if job % 20 == 0:
                io.fail("pread", errno.EIO, after=30, times=10)
                io.fail("pwrite", errno.ENOSPC, after=10, times=10)
            chunks = [(job + i) % 40 for i in range(5)]
            node.writer.submit_store(job, keys_of(chunks, prompt=job % 9), chunks)
            node.reader.submit_load(job, keys_of(chunks, prompt=job % 9), chunks)
        for engine, direction in ((node.writer, "store"), (node.reader, "load")):
            assert engine.drain(30)
            assert sorted(result.job_id for result in engine.poll()) == list(range(300))
            assert sum(outcomes(engine, direction).values()) == 1500
            assert engine.metrics().value("kvxfer_queued_chunks", direction=direction) == 0
        stats = node.store.stats()
        assert (stats.reserved_slots, stats.pinned_entries) == (0, 0)
