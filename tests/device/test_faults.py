"""Devices that fail: in any call, in time, in memory. One answer to every job, right bytes or none, nothing left."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvxfer.config import EngineConfig
from kvxfer.device.host_carrier import HostCarrier
from kvxfer.device.job import LivedTime
from kvxfer.device.runner import DeviceRunner
from kvxfer.errors import DeviceError, DeviceMemoryError, ForkError, NativeError
from kvxfer.jobs import LOAD, STORE, JobOutcome, Status
from kvxfer.testing import FakeDevice, FaultyIO, ManualClock
from tests.device.rig import MODEL, Card, card, chunk_bytes, chunks_of, device_threads
from tests.jobs.rig import expect, poisoned, ranks
from tests.jobs.test_faults import until

OPS = ("mark", "record", "wait", "copy", "gather", "scatter")
STEPS = (STORE, LOAD, STORE, LOAD)


def run_jobs(both: Card, source: list, target: list) -> list[JobOutcome]:
    """Two stores of six chunks each, in two batches, and loads of both."""
    outcomes = []
    for step, direction in enumerate(STEPS):
        chunks = range(6 * (step // 2), 6 * (step // 2) + 6)
        both.submit(direction, source if direction == STORE else target, [[c] for c in chunks], chunks=chunks)
        outcomes.append(both.finish(direction))
    return outcomes


def counted(tmp_path: Path) -> Counter[str]:
    """How often each call is made by `run_jobs`, at the runner's start included."""
    source, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
    with card(tmp_path, source) as both:
        assert not any(outcome.errors for outcome in run_jobs(both, source, target))
        return Counter(both.device.faults.counts)


@pytest.mark.parametrize("action", ["fail", "lose"])
@pytest.mark.parametrize("op", [*OPS, "done"])
def test_any_call_may_fail(tmp_path: Path, op: str, action: str) -> None:
    """At each index of each call: one answer to every job, each chunk right or failed, and nothing is written later."""
    started = Counter(mark=0, record=1, wait=0, copy=1, gather=2, scatter=2, done=0)  # the rehearsal's
    total = counted(tmp_path)[op] if op != "done" else 12
    for index in range(total):
        source, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
        device = FakeDevice(seed=index)
        rule = None if op == "done" else getattr(device.faults, action)(op, after=index)
        if index < started[op]:
            with pytest.raises(DeviceError):
                Card(tmp_path / f"{op}{index}", source, device=device)
            continue
        with Card(tmp_path / f"{op}{index}", source, device=device) as both:
            rule = rule or getattr(device.faults, action)(op, after=index)
            outcomes = run_jobs(both, source, target)
            assert len(outcomes) == 4 and both.runner.poll(STORE) is None and both.runner.poll(LOAD) is None
            arrived = check_outcomes(outcomes, target)
            before = [tensor.copy() for mine in target for tensor in mine.tensors]
            both.device.run()  # whatever is still queued
            after = [tensor for mine in target for tensor in mine.tensors]
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), "written after the result"
            until(lambda: both.runner.stats()["device_bays_in_use"] == 0, "every bay is back, or left behind")
            stats = both.runner.stats()
            assert stats["device_bays"] + stats["device_leaked_bays"] == 3
            assert rule.hits == 1 and stats["device_lost"] == 1
            assert len(arrived) < 24, "a call failed, and nobody noticed"
            assert both.runner.refusal is Status.DEVICE and both.runner.reason
    until(lambda: not device_threads(), "no thread is left")


def check_outcomes(outcomes: list[JobOutcome], target: list) -> list[int]:
    """Each chunk is OK, and if loaded there, or failed for a reason that fits."""
    arrived: list[int] = []
    stored: set[int] = set()
    for step, outcome in enumerate(outcomes):
        assert outcome.direction == STEPS[step] and len(outcome.status) == 6
        good = {6 * (step // 2) + int(c) for c in np.flatnonzero(outcome.status == Status.OK)}
        assert {e.status for e in outcome.errors} <= {Status.DEVICE, Status.TRUNCATED, Status.BAD_TRAILER}
        assert len(outcome.errors) == 6 - len(good)
        if outcome.direction == STORE:
            stored |= good
        else:
            assert good <= stored
            check_blocks(target, good)
        arrived += sorted(good)
    return arrived


def check_blocks(target: list, blocks: set[int]) -> None:
    """These blocks hold the model's bytes."""
    for rank, mine in enumerate(target):
        want = MODEL.pages("nhd", tp_size=2, tp_rank=rank, padding=24, offset=8)
        for got, right in zip(mine.tensors, want, strict=True):
            for block in blocks:
                at = slice(8 + block * mine.mapping.tensors[0].block_stride, None)
                size = mine.mapping.tensors[0].page_bytes
                assert np.array_equal(got[at][:size], right[at][:size]), f"block {block}"


def test_a_lost_device_is_said_once_and_later_jobs_are_refused_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with caplog.at_level(logging.WARNING), card(tmp_path, pages) as both:
        both.device.faults.lose("gather", after=6)
        outcome = both.store(pages, chunks_of(1))
        assert Status.DEVICE in {error.status for error in outcome.errors}
        assert "the device failed" in str(outcome.errors[-1])
        calls = len(both.device.calls)
        for direction in (STORE, LOAD):
            start = time.monotonic()
            both.submit(direction, pages, chunks_of(1, 3))
            outcome = both.finish(direction)
            assert [error.status for error in outcome.errors] == [Status.DEVICE] * 3
            assert time.monotonic() - start < 10
        assert len(both.device.calls) == calls, "a lost device is not asked again"
        assert both.runner.stats()["device_lost"] == 1
    (said,) = [record for record in caplog.records if getattr(record, "event", "") == "device lost"]
    assert "fake:0" in said.getMessage() and "the device was lost" in said.getMessage()


def test_what_was_copied_to_host_memory_before_the_device_was_lost_is_stored(tmp_path: Path) -> None:
    pages, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
    with card(tmp_path, pages, bays=4) as both, FaultyIO() as io:
        rule = io.hang("pwrite")
        both.submit(STORE, pages, chunks_of(1, 3))
        until(lambda: rule.hits > 0, "it is being written")
        both.device.faults.lose("mark")
        both.submit(STORE, pages, [[5]], chunks=[5])
        assert [error.status for error in both.finish(STORE).errors] == [Status.DEVICE]
        io.release()
        assert not both.finish(STORE).errors
    with card(tmp_path, target) as reader:
        assert not reader.load(target, chunks_of(1, 3)).errors
    expect(MODEL, "nhd", target, range(3))


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_device_that_does_not_answer_counts_as_lost(tmp_path: Path, direction: int) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as writer:
        assert not writer.store(pages, chunks_of(1, 6)).errors
    with card(tmp_path, pages, io_timeout_s=0.2) as both:
        both.device.frozen = True
        start = time.monotonic()
        both.submit(direction, pages, chunks_of(1, 6))
        outcome = both.finish(direction)
        assert 0.15 < time.monotonic() - start < 15
        assert {error.status for error in outcome.errors} == {Status.DEVICE}
        assert "io_timeout_s=0.2" in both.runner.reason
        stats = both.runner.stats()
        assert stats["device_leaked_bays"] > 0 and stats["device_bays_in_use"] == 0
        assert both.runner.shutdown(0.2) == 0


def test_a_copy_that_does_not_end_counts_as_lost_though_the_blocks_are_free(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages, io_timeout_s=0.3) as both:
        assert not both.store(pages, [[0]]).errors
        (down,) = {call[1] for call in both.calls if call[0] == "copy" and call[-1] > 1000}
        both.device.stuck.add(down)
        job = both.submit(STORE, pages, [[1]], chunks=[1])
        both.wait_gathered(job, 10)
        assert {error.status for error in both.finish(STORE).errors} == {Status.DEVICE}
        assert "a copy took longer" in both.runner.reason
        until(lambda: both.runner.stats()["device_leaked_bays"] == 1, "its bay is left behind")


def test_copies_of_a_device_that_was_lost_are_not_waited_for(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as both:
        assert not both.store(pages, [[0]]).errors
        both.device.stuck |= {call[1] for call in both.calls if call[0] == "copy" and call[-1] > 1000}
        both.wait_gathered(both.submit(STORE, pages, [[1]], chunks=[1]), 10)
        both.device.faults.fail("mark")
        start = time.monotonic()
        both.submit(STORE, pages, [[2]], chunks=[2])
        for _ in range(2):
            assert {error.status for error in both.finish(STORE).errors} == {Status.DEVICE}
        assert time.monotonic() - start < 10, "io_timeout_s is 20"


def test_a_process_that_was_stopped_does_not_take_its_device_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(50.0)
    monkeypatch.setattr("kvxfer.device.job.time.monotonic", clock)
    lived = LivedTime(2.0)
    start = lived()
    for seconds, total in ((0.5, 0.5), (1.5, 2.0), (1000.0, 4.0), (0.25, 4.25)):
        clock.advance(seconds)
        assert lived() - start == total


@pytest.mark.parametrize("op", ["wait", "copy", "gather", "record", "done"])
def test_a_call_that_does_not_return_costs_its_jobs_and_a_thread_at_the_shutdown(tmp_path: Path, op: str) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with Card(tmp_path / "slots", pages, io_timeout_s=0.2) as both:
        both.device.faults.hang(op)
        job = both.submit(STORE, pages, chunks_of(1))
        outcome = both.finish(STORE)
        assert {error.status for error in outcome.errors} == {Status.DEVICE, Status.LOST}
        assert both.runner.wait_gathered(job, 0.1) is None
        lost = {error.chunk for error in outcome.errors if error.status is Status.LOST}
        both.submit(LOAD, pages, chunks_of(1, 2))
        assert [error.status for error in both.finish(LOAD).errors] == [Status.DEVICE] * 2
        start = time.monotonic()
        assert both.runner.shutdown(0.1) == 1
        assert time.monotonic() - start < 15
        with pytest.raises(NativeError, match="shut down"):
            both.submit(STORE, pages, chunks_of(1))
        assert list(both.runner.late()) == []
        both.device.faults.release()
        until(lambda: not device_threads(), "the thread comes back, and ends")
        assert {chunk for _, chunk in both.runner.late()} == lost, "their slots are free"


def test_a_load_ends_at_its_deadline_though_the_device_is_in_a_call(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with Card(tmp_path / "slots", pages) as both:
        both.device.faults.hang("gather")
        both.submit(STORE, pages, chunks_of(1))
        until(lambda: both.device.faults.counts["gather"] > 2, "the call hangs")
        start = time.monotonic()
        both.submit(LOAD, pages, chunks_of(1, 2), deadline_s=0.2)
        assert [error.status for error in both.finish(LOAD).errors] == [Status.CUT] * 2
        assert time.monotonic() - start < 15
        both.device.faults.release()
        assert not both.finish(STORE).errors


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_shutdown_does_not_wait_for_a_device_that_hangs(tmp_path: Path, direction: int) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as writer:
        assert not writer.store(pages, chunks_of(1, 6)).errors
    with card(tmp_path, pages) as both:
        both.device.frozen = True
        both.submit(direction, pages, chunks_of(1, 6))
        until(lambda: bool({"gather", "scatter"} & {call[0] for call in both.calls}), "work is queued")
        start = time.monotonic()
        assert both.runner.shutdown(0.2) == 0
        assert time.monotonic() - start < 15
        outcome = both.finish(direction)
        assert {error.status for error in outcome.errors} <= {Status.CANCELLED, Status.DEVICE}
        assert len(outcome.errors) == 6
        assert both.runner.stats()["device_leaked_bays"] >= 1
        freed = {call[1] for call in both.calls if call[0] == "free"}
        assert not freed & {call[2] for call in both.calls if call[0] in ("gather", "scatter")}
    assert both.device.defects == []


def test_a_shutdown_lets_what_is_under_way_end(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages, bays=2) as both, FaultyIO() as io:
        rule = io.hang("pwrite")
        both.submit(STORE, pages, chunks_of(1))
        until(lambda: rule.hits == 1, "it has begun")
        left: list[int] = []
        stopping = threading.Thread(target=lambda: left.append(both.runner.shutdown(20)))
        stopping.start()
        until(lambda: not both.runner._flights._queue[STORE], "what no batch has is dropped")
        io.release()
        stopping.join(20)
        assert left == [0]
        outcome = both.finish(STORE)
        good = int((outcome.status == Status.OK).sum())
        assert 0 < good < 24 and {error.status for error in outcome.errors} == {Status.CANCELLED}
        assert both.runner.shutdown(5) == 0
    assert both.device.allocated == {True: 0, False: 0}


@pytest.mark.parametrize("op", ["stream", "device_buffer", "host_buffer"])
def test_a_runner_that_cannot_start_leaves_nothing(tmp_path: Path, op: str) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as both:
        total = both.device.faults.counts[op]
    assert total >= 3
    for index in range(total):
        device = FakeDevice()
        device.faults.fail(op, after=index)
        with pytest.raises(DeviceError, match="was made to fail"):
            Card(tmp_path / "slots", pages, device=device)
        assert device.allocated == {True: 0, False: 0}


# ---- memory ------------------------------------------------------------------------------------------------------


def runner_in(memory: int, host: int, bays: int, chunks: int) -> tuple[DeviceRunner, HostCarrier, int]:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    size = chunk_bytes(pages)
    device = FakeDevice(memory_bytes=int(memory), host_bytes=int(host))
    config = EngineConfig(io_threads=1, bays=bays, bay_bytes=chunks * size)
    carrier = HostCarrier(device, config, pages[0].mapping.slot, memory=False)
    try:
        return DeviceRunner(device, carrier, pages, config), carrier, size
    except BaseException:
        carrier.shutdown(0)
        assert device.allocated == {True: 0, False: 0}, "memory is left"
        raise


@pytest.mark.parametrize(
    "memory, host, bays, bytes_of_chunks",
    [
        (100.0, 100.0, 4, 4),  # all of it
        (14.5, 100.0, 3, 4),  # three of four
        (10.5, 100.0, 4, 2),  # two large ones: rather four small ones
        (100.0, 5.5, 4, 1),  # the same of host memory
        (2.5, 100.0, 2, 1),
        (1.5, 100.0, 1, 1),
    ],
)
def test_less_memory_means_fewer_or_smaller_bays_and_is_said(
    memory: float, host: float, bays: int, bytes_of_chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    size = chunk_bytes(ranks(MODEL, "nhd", 2, filled=False))
    with caplog.at_level(logging.WARNING):
        runner, _, _ = runner_in(memory * size, host * size, 4, 4)
    stats = runner.stats()
    assert (stats["device_bays"], stats["device_bays_bytes"]) == (bays, bays * bytes_of_chunks * size)
    said = [record for record in caplog.records if getattr(record, "event", "") == "bays"]
    assert bool(said) == (memory + host < 200) and all(f"{bays} of 4 bays" in r.getMessage() for r in said)
    assert runner.shutdown(1) == 0


def test_no_memory_for_one_chunk_is_an_error_with_advice() -> None:
    size = chunk_bytes(ranks(MODEL, "nhd", 2, filled=False))
    for memory, host in ((0.9, 100), (100, 0.9), (1.0, 100)):
        with pytest.raises(DeviceMemoryError, match="chunks of fewer blocks"):
            runner_in(memory * size, host * size, 4, 4)
    until(lambda: not device_threads(), "no thread is left")


def test_one_bay_serves_both_directions(tmp_path: Path) -> None:
    pages, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
    with card(tmp_path, pages, bays=1, chunks_per_bay=1) as both:
        assert not both.store(pages, chunks_of(1, 5)).errors
        assert not both.load(target, chunks_of(1, 5)).errors
    expect(MODEL, "nhd", target, range(5))


def test_a_forks_child_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as both:
        with monkeypatch.context() as child:
            child.setattr("kvxfer.jobs.os.getpid", lambda: 1)
            for call in (
                both.runner.mark,
                lambda: both.runner.poll(LOAD),
                lambda: both.runner.cancel(1),
                both.runner.stats,
                lambda: both.submit(STORE, pages, [[0]]),
            ):
                with pytest.raises(ForkError):
                    call()
            calls = len(both.device.calls)
            both.runner.abandon()
            assert len(both.device.calls) == calls
        assert not both.store(pages, [[0]]).errors


def test_bad_jobs_are_refused(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as both:
        for ids in ([[24]], [[-2]], [[0, 1]]):
            with pytest.raises(NativeError):
                both.submit(STORE, pages, ids)
        with pytest.raises(NativeError):
            both.submit(STORE, pages, [])
        with pytest.raises(NativeError):
            both.submit(STORE, pages, [[0]], digest=b"short")
        both.submit(STORE, pages, [[0]])
        both.next_id -= 1
        with pytest.raises(NativeError):
            both.submit(STORE, pages, [[0]])
        assert not both.finish(STORE).errors
    assert poisoned([]) and threading.active_count() >= 1


EXIT = """
import sys, time
from pathlib import Path
from kvxfer.jobs import STORE, LOAD
from kvxfer.testing import FaultyIO
from tests.device.rig import MODEL, Card, chunks_of
from tests.jobs.rig import ranks
pages = ranks(MODEL, "nhd", 2, filled=True)
both, io = Card(Path(sys.argv[1]), pages), FaultyIO()
if sys.argv[2] == "a call hangs":
    both.device.faults.hang("copy")
elif sys.argv[2] == "the device hangs":
    both.device.frozen = True
elif sys.argv[2] == "a write hangs":
    io.hang("pwrite")
both.submit(STORE, pages, chunks_of(1))
time.sleep(0.2)
print("end", flush=True)
"""


@pytest.mark.parametrize("how", ["all is well", "a call hangs", "the device hangs", "a write hangs"])
def test_a_process_that_ends_without_a_shutdown_ends(tmp_path: Path, how: str) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-c", EXIT, str(tmp_path / "slots"), how],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Traceback" not in done.stderr and time.monotonic() - start < 30


@pytest.mark.parametrize("what", ["submit", "cancel", "shutdown"])
def test_what_comes_while_the_thread_goes_to_sleep_is_not_slept_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Between the end of a turn that found nothing and the sleep that follows it."""
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as both:
        came = threading.Event()
        flights = both.runner._flights
        turn = flights.turn

        def and_then() -> bool:
            moved = turn()
            if not moved and not came.is_set():
                came.set()
                if what == "submit":
                    both.submit(STORE, pages, chunks_of(1, 3))
                elif what == "cancel":
                    both.submit(STORE, pages, chunks_of(1, 3))
                    both.runner.cancel(both.next_id)
                else:
                    threading.Thread(target=both.runner.shutdown, args=(5.0,)).start()
                    until(lambda: flights.stopped, "it was told to stop")
            return moved

        monkeypatch.setattr(flights, "turn", and_then)
        with flights.lock:
            flights.call()
        assert came.wait(20)
        if what != "shutdown":
            assert both.finish(STORE).job_id == both.next_id
        else:
            until(lambda: not device_threads(), "the thread has ended")


def test_a_shutdown_that_was_interrupted_is_taken_up_by_the_next(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as both:
        both.device.frozen = True
        both.submit(STORE, pages, chunks_of(1, 6))
        until(lambda: "gather" in [call[0] for call in both.calls], "work is queued")

        def interrupt() -> None:
            until(lambda: both.runner._closing, "the shutdown has begun")
            time.sleep(0.2)
            _thread.interrupt_main()

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
        try:
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                both.runner.shutdown(10.0)
        finally:
            signal.signal(signal.SIGINT, before)
        start = time.monotonic()
        assert both.runner.shutdown(0.1) == 0
        assert len(both.finish(STORE).errors) == 6
        assert time.monotonic() - start < 15
