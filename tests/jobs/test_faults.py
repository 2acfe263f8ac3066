"""Calls that fail, stop short, crawl or never return: what a job makes of them, and what it gives back."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import ConfigError, NativeError
from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.testing import FaultyIO
from tests.jobs.rig import EACH, GEOMETRY, MODEL, Rig, expect, poisoned, ranks
from tests.oracle import Model


def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def slot_range(rig: Rig, slot: int) -> tuple[int, int]:
    return slot * rig.slot.slot_bytes, (slot + 1) * rig.slot.slot_bytes


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EBADF, errno.ENOMEM])
def test_a_failing_read_is_a_miss_of_that_chunk(tmp_path: Path, source, target, code: int) -> None:
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.fail("pread", code, offset=slot_range(rig, 3))
        outcome = rig.load(target, EACH)
        assert rule.hits == 1
        (error,) = outcome.errors
        assert (error.chunk, error.status, error.errno, error.offset) == (3, Status.IO, code, slot_range(rig, 3)[0])
        assert f"[Errno {code}]" in str(error) and f"0 of {rig.slot.slot_bytes} bytes" in str(error)
        stats = rig.runner.stats()
        assert stats["io_errors"] == 1
        assert stats["chunks_verified"] == 7, "an errno says nothing about the bytes"
    expect(MODEL, "hnd", target, [b for b in range(8) if b != 3])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_failing_write_is_reported_with_its_count(tmp_path: Path, source, code: int) -> None:
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        io.short("pwrite", 4096, times=1, offset=slot_range(rig, 2))
        io.fail("pwrite", code, offset=slot_range(rig, 2))
        outcome = rig.store(source, EACH)
        (error,) = outcome.errors
        assert (error.chunk, error.status, error.errno, error.moved) == (2, Status.IO, code, 4096)
        assert error.wanted == rig.slot.slot_bytes
        assert rig.runner.stats()["chunks_stored"] == 7


def test_a_thousand_errors_in_a_row_cost_nothing_but_themselves(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.fail("pread", errno.EIO, times=1000)
        for _ in range(125):
            assert set(rig.load(target, EACH).status.tolist()) == {Status.IO}
        assert rule.hits == 1000 and poisoned(target)
        assert not rig.load(target, EACH).status.any()
        until(lambda: rig.runner.stats()["busy_threads"] == 0, "threads leave their last chunk")
        stats = rig.runner.stats()
        assert (stats["lost_threads"], stats["leaked_bytes"]) == (0, 0)


@pytest.mark.parametrize("most", [1, 100, 4096])
def test_short_transfers_are_looped(tmp_path: Path, source, target, most: int) -> None:
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        times = 3000 if most == 1 else None
        writes, reads = io.short("pwrite", most, times=times), io.short("pread", most, times=times)
        assert not rig.store(source, EACH).status.any()
        assert not rig.load(target, EACH).status.any()
        assert writes.hits > 8 and reads.hits > 8
    expect(MODEL, "hnd", target, range(8))


def test_a_write_that_stops_at_nothing_is_an_error(tmp_path: Path, source) -> None:
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        io.short("pwrite", 0, offset=slot_range(rig, 1))
        (error,) = rig.store(source, EACH).errors
        assert (error.chunk, error.status) == (1, Status.IO)


def test_damage_on_the_way_is_found(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.flip(99, times=1, offset=slot_range(rig, 6))
        outcome = rig.load(target, EACH)
        assert rule.hits == 1 and outcome.status[6] == Status.BAD_SUM
        assert rig.runner.stats()["bad_sum"] == 1
        assert not rig.load(target, [[6]], chunks=[6]).status.any(), "the disk has the right bytes"


def test_no_memory_for_staging_fails_the_chunk_only(tmp_path: Path, source) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig, FaultyIO() as io:
        io.fail("mmap", errno.ENOMEM, times=1)
        outcome = rig.store(source, EACH)
        assert [(e.chunk, e.errno) for e in outcome.errors] == [(0, errno.ENOMEM)]


def test_memory_for_staging_that_does_not_come_is_given_up_as_any_call(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1, io_timeout_s=0.5) as rig, FaultyIO() as io:
        io.hang("mmap", times=1)
        outcome = rig.store(source, EACH)
        assert [(e.chunk, e.status) for e in outcome.errors] == [(0, Status.CANCELLED)], "nothing was written"
        io.release()
        until(lambda: rig.runner.stats()["lost_threads"] == 0, "the thread comes back")
        assert not rig.store(source, EACH).status.any()
        assert not rig.load(target, EACH).status.any()
    expect(MODEL, "hnd", target, range(8))


# ---- deadlines ------------------------------------------------------------------------------------------------


def test_a_deadline_cuts_a_read_that_never_returns(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.hang("pread", times=1, offset=slot_range(rig, 4))
        start = time.monotonic()
        outcome = rig.load(target, EACH, deadline_s=1.5)  # time for the seven others, on a busy machine too
        assert 1.45 < time.monotonic() - start < 15
        assert rule.hits == 1
        assert [(e.chunk, e.status) for e in outcome.errors] == [(4, Status.CUT)]
        assert rig.runner.stats()["deadline_cuts"] == 1
        expect(MODEL, "hnd", target, [b for b in range(8) if b != 4])
        io.release()
        until(lambda: rig.runner.stats()["busy_threads"] == 0, "the thread comes back")
        expect(MODEL, "hnd", target, [b for b in range(8) if b != 4])  # its bytes came too late for anybody
        assert not rig.load(target, EACH).status.any()


def test_a_cut_keeps_the_longest_prefix(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=2) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.hang("pread", offset=(slot_range(rig, 5)[0], 1 << 40))
        outcome = rig.load(target, EACH, deadline_s=1.5)
        assert rule.hits == 2, "both threads hang, so neither is in another chunk"
        assert outcome.status.tolist() == [Status.OK] * 5 + [Status.CUT] * 3, "reads are issued in prefix order"
    expect(MODEL, "hnd", target, range(5))


def test_a_deadline_that_has_passed_reads_nothing(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        before = FaultyIO.calls("pread")
        assert set(rig.load(target, EACH, deadline_s=-1).status.tolist()) == {Status.CUT}
        assert FaultyIO.calls("pread") == before and poisoned(target)


@pytest.mark.parametrize("live", [True, False])
def test_nothing_is_written_after_the_result(tmp_path: Path, source, target, live: bool) -> None:
    """Deadlines all over the time that a load takes: the pages hold exactly what the result says, and stay so."""
    with Rig(tmp_path / "slots", source, threads=2, live=live, read_piece_bytes=4096) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        io.delay("pread", 0.002)
        seen: set[int] = set()
        step = 0
        while step < 40 or (len(seen) < 3 and step < 400):  # more of them on a machine that is that slow
            for mine in target:
                for tensor in mine.tensors:
                    tensor[:] = 0xA5
            outcome = rig.load(target, EACH, deadline_s=0.001 * step)
            step += 1
            snapshot = [tensor.copy() for mine in target for tensor in mine.tensors]
            arrived = [c for c, status in enumerate(outcome.status) if status == Status.OK]
            seen.add(len(arrived))
            if live:
                expect(MODEL, "hnd", target, arrived)
            until(lambda: rig.runner.stats()["busy_threads"] == 0, "threads come back")
            after = [tensor for mine in target for tensor in mine.tensors]
            assert all(np.array_equal(a, b) for a, b in zip(snapshot, after, strict=True))
        assert len(seen) > 2, f"every deadline gave the same answer: {seen}"


def test_cancel_answers_at_once(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.hang("pread")
        job = rig.submit(LOAD, target, EACH)
        until(lambda: rule.hits == 2, "both threads hang")
        rig.runner.cancel(job)
        assert set(rig.finish(LOAD).status.tolist()) == {Status.CANCELLED}, "while the reads still hang"
        io.release()
    assert poisoned(target)


# ---- calls that never return -----------------------------------------------------------------------------------


def test_a_lost_read_is_given_up_and_its_thread_replaced(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1, io_timeout_s=0.5) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        io.hang("pread", times=1, offset=slot_range(rig, 0))
        outcome = rig.load(target, EACH)
        assert [(e.chunk, e.status) for e in outcome.errors] == [(0, Status.LOST)]
        stats = rig.runner.stats()
        assert (stats["lost_calls"], stats["lost_threads"]) == (1, 1) and stats["leaked_bytes"] >= rig.slot.slot_bytes
        assert stats["staging_bytes"] == stats["staging_peak_bytes"] == 2 * stats["leaked_bytes"]
        one_buffer = stats["leaked_bytes"]
        expect(MODEL, "hnd", target, range(1, 8))
        io.release()
        until(lambda: rig.runner.stats()["late_returns"] == 1, "the call returns")
        stats = rig.runner.stats()
        assert (stats["lost_threads"], stats["leaked_bytes"]) == (0, 0)
        assert stats["staging_bytes"] == one_buffer, "given back before the thread no longer counts as lost"
        expect(MODEL, "hnd", target, range(1, 8))
        assert not rig.load(target, EACH).status.any()


def test_a_lost_write_keeps_its_slot_until_it_returns(tmp_path: Path, source) -> None:
    with Rig(tmp_path / "slots", source, threads=2, io_timeout_s=0.5) as rig, FaultyIO() as io:
        io.hang("pwrite", times=1, offset=slot_range(rig, 3))
        outcome = rig.store(source, EACH)
        assert [(e.chunk, e.status) for e in outcome.errors] == [(3, Status.LOST)]
        assert list(rig.runner.late()) == []
        io.release()
        late: list[tuple[int, int]] = []
        until(lambda: bool(late.extend(rig.runner.late()) or late), "the write returns")
        assert late == [(outcome.job_id, 3)]


def test_when_no_thread_is_left_jobs_still_end(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=2, io_timeout_s=0.5, max_lost_threads=0) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        io.hang("pread")
        outcome = rig.load(target, EACH)
        assert sorted(set(outcome.status.tolist())) == [Status.LOST, Status.STALLED]
        assert set(rig.load(target, EACH).status.tolist()) == {Status.STALLED}
        io.release()
        until(lambda: rig.runner.stats()["lost_threads"] == 0, "the threads take their places again")
        assert not rig.load(target, EACH).status.any()
    expect(MODEL, "hnd", target, range(8))


@pytest.mark.parametrize("direction, op", [(LOAD, "pread"), (STORE, "pwrite")])
def test_shutdown_is_bounded_while_calls_hang(tmp_path: Path, source, target, direction: int, op: str) -> None:
    with Rig(tmp_path / "slots", source, threads=2) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.hang(op)
        rig.submit(direction, source if direction == STORE else target, EACH)
        stuck = 2 if direction == LOAD else 1  # stores leave a thread to the loads
        until(lambda: rule.hits == stuck, "threads hang")
        start = time.monotonic()
        assert rig.runner.shutdown(0.2) == stuck
        assert 0.15 < time.monotonic() - start < 20
        status = rig.finish(direction).status
        lost = stuck if direction == STORE else 0  # only a slot that may still be written is no plain cancellation
        assert sorted(status.tolist()) == [Status.CANCELLED] * (8 - lost) + [Status.LOST] * lost
        assert rig.runner.stats()["lost_calls"] == stuck
        with pytest.raises(NativeError, match="shutdown"):
            rig.submit(LOAD, target, EACH)
        io.release()
        until(lambda: rig.runner.stats()["lost_threads"] == 0, "the threads leave")
    assert poisoned(target)


def test_several_shutdowns_at_once(tmp_path: Path, source, target) -> None:
    for step in range(60):
        with Rig(tmp_path / f"slots{step}", source, threads=2) as rig:
            rig.submit(STORE, source, EACH)
            threads = [threading.Thread(target=rig.runner.shutdown, args=(0.5,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()
            assert rig.finish(STORE).status.size == 8


def test_a_shutdown_in_the_midst_of_copies_says_what_was_written(tmp_path: Path) -> None:
    """Whatever instant it comes at: a chunk's bit is set exactly if its page was written."""
    big = Model.random(
        GEOMETRY.__class__(**{f: getattr(GEOMETRY, f) for f in GEOMETRY.__slots__} | {"num_layers": 60}), 8
    )
    source = ranks(big, "nhd", 1, filled=True)
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
    for step in range(30):
        target = ranks(big, "nhd", 1, filled=False)
        with Rig(tmp_path / "slots", target, threads=2) as rig:
            rig.submit(LOAD, target, EACH)
            time.sleep(step * 0.0001)
            rig.runner.shutdown(0)
            status = rig.finish(LOAD).status
            expect(big, "nhd", target, [c for c in range(8) if status[c] == Status.OK])


@pytest.mark.parametrize("seconds", [-1.0, 0.0])
def test_a_timeout_that_has_passed_is_none(tmp_path: Path, source, seconds: float) -> None:
    with Rig(tmp_path / "slots", source) as rig:
        start = time.monotonic()
        assert rig.runner.wait([LOAD], seconds) is False
        assert rig.runner.shutdown(seconds) == 0
        assert time.monotonic() - start < 20
        with pytest.raises(ConfigError, match="nan"):
            rig.runner.wait([LOAD], float("nan"))


def test_a_close_that_hangs_stops_nobody(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=2) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        copy = tmp_path / "copy"
        copy.write_bytes((tmp_path / "slots").read_bytes())
        other = rig.lib.kvx_file_adopt(os.open(copy, os.O_RDWR), b"copy", 0)
        record = _native.Chunk.from_buffer_copy(rig.record(0))
        record.file = other
        slow = io.delay("pread", 1.5, times=1)
        closing = io.hang("close")
        job = rig.submit(LOAD, target, EACH[:1], records=[bytes(record)])
        until(lambda: slow.hits == 1, "its read is under way")
        rig.lib.kvx_file_release(other)
        rig.runner.cancel(job)
        assert rig.finish(LOAD).status.tolist() == [
            Status.CANCELLED
        ]  # forgotten with that: the thread has the last word
        until(lambda: closing.hits == 1, "the file is closed by the thread that comes back")
        for _ in range(3):
            assert rig.load(target, EACH).status.tolist() == [0] * 8
        assert rig.runner.stats()["chunks_loaded"] == 24
        io.release()


def test_submit_is_quick_however_many_deadlines_are_open(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        io.hang("pread")
        took = []
        for step in range(6000):
            start = time.perf_counter()
            rig.submit(LOAD, target, EACH[:1], deadline_s=100 + step % 7)
            took.append(time.perf_counter() - start)
        took.sort()
        assert took[len(took) * 9 // 10] < 0.005
        rig.runner.shutdown(0)
        io.release()


# ---- order ------------------------------------------------------------------------------------------------------


def test_loads_go_ahead_of_stores_that_came_first(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig, FaultyIO() as io:
        rig.store(source, EACH[:4], chunks=range(4))
        first = io.hang("pwrite", times=1)
        rig.submit(STORE, source, EACH[:1], chunks=[0])
        until(lambda: first.hits == 1, "the only thread is held")
        rig.submit(STORE, source, EACH[4:], chunks=range(4, 8))
        rig.submit(LOAD, target, EACH[1:4], chunks=range(1, 4))
        written = FaultyIO.calls("pwrite")
        io.delay("pwrite", 1.0, times=1)  # of the store that comes next: time enough to look
        io.release()
        assert not rig.finish(LOAD).status.any()
        assert FaultyIO.calls("pwrite") <= written + 1, "a load waited for stores that were only queued"
        rig.finish(STORE)
        rig.finish(STORE)


def test_slow_stores_leave_a_thread_for_loads(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=4) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.hang("pwrite")
        rig.submit(STORE, source, EACH)
        until(lambda: rule.hits == 3, "three of four threads store")
        assert not rig.load(target, EACH).status.any()
        assert rule.hits == 3
        io.release()
        rig.finish(STORE)


def test_source_blocks_are_free_before_the_write_is_done(tmp_path: Path, source) -> None:
    with Rig(tmp_path / "slots", source, threads=2) as rig, FaultyIO() as io:
        rule = io.hang("pwrite")
        job = rig.submit(STORE, source, [[0]])
        until(lambda: rule.hits == 1, "the write hangs")
        assert rig.runner.wait_gathered(job, 10.0) is True
        more = rig.submit(STORE, source, [[1], [2]], chunks=[1, 2])
        assert rig.runner.wait_gathered(more, 0.05) is False, "its thread hangs in the other job's write"
        io.release()
        rig.finish(STORE)
        rig.finish(STORE)
        assert rig.runner.wait_gathered(12345, 0.0) is None


def test_submit_does_not_wait_for_slow_storage(tmp_path: Path, source) -> None:
    with Rig(tmp_path / "slots", source, threads=2) as rig, FaultyIO() as io:
        io.delay("pwrite", 0.05, times=20)
        took = []
        for _ in range(200):
            start = time.perf_counter()
            rig.submit(STORE, source, [[0]])
            took.append(time.perf_counter() - start)
        for _ in range(200):
            assert not rig.finish(STORE).status.any()
        # The machine may hold a thread up now and then; the storage would each time, for 50 ms.
        assert sorted(took)[150] < 0.025
