"""Jobs between pages on a device and host rows, on streams of their own. Knows no vLLM.

Nothing waits for the device but `wait` and `close`. What keeps bytes right:

- Every job waits for what the model's stream had to do when it was submitted: a store reads what was computed, and a
  load writes nothing that an earlier step may still read, or zero.
- Jobs of one lane are done in their order: stores, loads, and loads that are waited for within a step each have a lane,
  so that a load does not stand behind all stores that were queued before it.
- A job waits for those of other lanes that were submitted before it and touch blocks or rows of its own.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.device.calibration import Calibration
from kvxfer.device.engines import calibrated
from kvxfer.errors import DeviceError, EngineClosed, ForkError
from kvxfer.integrations.vllm_copier import EXIT_S, MOST_PASSED, Done, RowJob
from kvxfer.integrations.vllm_engines import AUTO, DevicePlan, RowEngine, Staging, Work, choose, whole_span
from kvxfer.integrations.vllm_rows import Parts
from kvxfer.report import engine_reporter

if TYPE_CHECKING:
    from kvxfer.integrations.vllm_device import RowDevice, RowEvent

__all__ = ["DeviceRowCopier", "open_device_copier"]

PAUSE_S = 0.001  # between questions at the end
_MOST_TURNS = 4096  # pages looked at for one that is this rank's turn


@dataclass(slots=True, eq=False)
class _Flight:
    """A job that is on its stream."""

    job: RowJob
    begin: RowEvent
    end: RowEvent
    nbytes: int = 0
    failed: bool = False  # not all of it could be put there

    def do(self, work: Work) -> None:
        """Called with the stream current."""
        self.nbytes += work()


class _Lane:
    """A stream, what is on it in its order, and staging that only it uses."""

    def __init__(self, stream: Any, staging: Staging | None) -> None:
        self.stream, self.staging = stream, staging
        self.flights: deque[_Flight] = deque()

    def reach(self, job: RowJob) -> RowEvent | None:
        """The end of the last flight that the job must come after, if any. Looking back is bounded: then all count."""
        for looked, flight in enumerate(reversed(self.flights)):
            if looked == MOST_PASSED or job.meets(flight.job):
                return flight.end
        return None


class DeviceRowCopier:
    """`RowCopier`'s face over a device: see the module. Every accepted job ends in exactly one Done. Thread-safe.

    Args:
        engine: the copier's own from now on: `close` closes it.
        staging: for stores and for loads, where chunks are packed.
    """

    def __init__(self, engine: RowEngine, device: RowDevice, staging: tuple[Staging | None, Staging | None]) -> None:
        self._engine, self._device, self._process = engine, device, os.getpid()
        self._lock = threading.Lock()
        self._stores = _Lane(device.stream(urgent=False), staging[0])
        self._loads = _Lane(device.stream(urgent=True), staging[1])
        self._urgent = _Lane(device.stream(urgent=True), None)
        self._unfinished: dict[int, _Flight] = {}
        self._done: list[Done] = []
        self._lost = self._closed = False
        self._astray = False  # something is on a stream whose end nobody will know
        atexit.register(self.close, EXIT_S)  # who forgets `close` must not have rows unmapped under a copy

    def submit(self, job: RowJob) -> None:
        """Puts a job onto its stream.

        Raises:
            LayoutError: it names a block or row that there is not.
            ValueError: it has the id of an unfinished job.
            DeviceError: the device was lost, or takes nothing.
            EngineClosed: after `close`.
            ForkError: in a child of the process that made this.
        """
        if os.getpid() != self._process:
            raise ForkError("this copier is another process's: its device does not exist here")
        with self._lock:
            if self._closed:
                raise EngineClosed("the copier is closed")
            if self._lost:
                raise DeviceError("the device was lost")
            if job.job_id in self._unfinished:
                raise ValueError(f"job {job.job_id} is not finished yet")
            self._engine.plan.check(job.block_ids, job.pages, job.group_pages)
            self._start(job)

    def finished(self) -> list[Done]:
        """What has ended since the last call. Never waits."""
        with self._lock:
            self._poll()
            done, self._done = self._done, []
        return done

    def wait(self, job_ids: Iterable[int]) -> None:
        """Blocks until these jobs have ended; those that nobody submitted have. Their results stay to be taken."""
        with self._lock:
            ends = [flight.end for job_id in job_ids if (flight := self._unfinished.get(job_id)) is not None]
        for end in ends:
            try:
                end.wait()
            except DeviceError as exc:
                with self._lock:
                    self._lose(exc)

    def close(self, timeout_s: float) -> bool:
        """Waits for what is on the streams, which nothing takes back.

        Returns:
            Whether all of it has ended, or will never run (the device was lost): else rows and blocks may still be
            written, and everything stays.
        """
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return False  # nothing here is this process's to let go of
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            self._poll()
            while self._unfinished and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
                self._poll()
            if self._unfinished or (self._astray and not self._lost):
                return False
            self._engine.close()
            for lane in self._lanes:
                lane.staging = None
        return True

    @property
    def _lanes(self) -> tuple[_Lane, _Lane, _Lane]:
        return self._stores, self._loads, self._urgent

    def _start(self, job: RowJob) -> None:
        """Called with the lock held."""
        lane = self._stores if job.is_store else self._urgent if job.urgent else self._loads
        device = self._device
        device.wait(lane.stream, device.mark())
        for other in self._lanes:
            if other is not lane and (event := other.reach(job)) is not None:
                device.wait(lane.stream, event)
        begin = device.record(lane.stream)
        flight = _Flight(job, begin, begin)
        try:
            for work in self._engine.work(job, lane.staging):
                device.queue(lane.stream, lambda work=work: flight.do(work))  # type: ignore[misc]
        except Exception as exc:  # a part of it may be on the stream: so it is accepted, and fails when that has ended
            flight.failed = True
            engine_reporter.failed("rows", f"job {job.job_id} failed", exc, job=job.job_id)
        try:
            flight.end = device.record(lane.stream)
        except DeviceError:
            self._astray = True
            raise
        lane.flights.append(flight)
        self._unfinished[job.job_id] = flight

    def _poll(self) -> None:
        """Takes from the lanes what has ended. Called with the lock held."""
        for lane in self._lanes:
            try:
                while lane.flights and lane.flights[0].end.done():
                    flight = lane.flights[0]
                    self._end(flight, flight.end.seconds_after(flight.begin))
                    lane.flights.popleft()
            except DeviceError as exc:
                self._lose(exc)

    def _lose(self, exc: DeviceError) -> None:
        """Fails everything: on a device that reports an error nothing goes on. Called with the lock held."""
        self._lost = True
        flights = [flight for lane in self._lanes for flight in lane.flights]
        if not flights:
            return
        engine_reporter.failed("device", f"{len(flights)} jobs failed with their device", exc, count=len(flights))
        for flight in flights:
            flight.failed = True
            self._end(flight, 0.0)
        for lane in self._lanes:
            lane.flights.clear()

    def _end(self, flight: _Flight, seconds: float) -> None:
        job, failed = flight.job, flight.failed
        del self._unfinished[job.job_id]
        self._done.append(Done(job.job_id, job.is_store, not failed, 0 if failed else flight.nbytes, seconds))


def open_device_copier(parts: Parts, *, how: str, programs: int | None) -> DeviceRowCopier:
    """A copier over pages of a CUDA device, and rows that it reaches under their own addresses.

    Raises:
        ConfigError: the engine that is asked for does not do for these rows.
        LayoutError: pages that cannot be certified.
        DeviceError: the device refuses something.
        ImportError: there is no triton.
    """
    from kvxfer.convert.launch_rows import DeviceRowPlan
    from kvxfer.integrations.vllm_device import TorchRowDevice

    device = next(tensor.device for mine in parts.tensors for tensor in mine)
    plan = DeviceRowPlan(parts.groups, parts.tensors, parts.memory)
    known = calibrated(str(device)) if how == AUTO else None
    return copier_over(plan, parts, TorchRowDevice(device), how=how, programs=programs, known=known)


def copier_over(
    plan: DevicePlan,
    parts: Parts,
    device: RowDevice,
    *,
    how: str,
    programs: int | None,
    known: Calibration | None = None,
) -> DeviceRowCopier:
    """`open_device_copier`, over a plan of these parts and a device that are given."""
    spans = [whole_span(group) for group in parts.groups]
    stores, loads = (choose(how, parts.groups, spans, direction, known) for direction in ("store", "load"))
    row_bytes, most = int(parts.rows.shape[1]), parts.memory.num_rows
    staging: list[Staging | None] = [
        Staging.make(device.allocate, parts.memory, row_bytes, most) if any(packed) else None
        for packed in (stores, loads)
    ]
    _warm(plan, parts, staging[0] or staging[1] or Staging.make(device.allocate, parts.memory, row_bytes, 1))
    return DeviceRowCopier(RowEngine(plan, parts, (loads, stores), programs), device, (staging[0], staging[1]))


def _warm(plan: DevicePlan, parts: Parts, staging: Staging | None) -> None:
    """Has the kernels compiled now, and not in the first request: block 0 goes to staging, and comes back as it was.

    On the model's own stream, which nothing is lost by: nothing has run yet.
    """
    number = next((number for number, group in enumerate(parts.groups) if group.cells), None)
    if staging is None or number is None:
        return
    # A page that is all this rank's to write: of another's turn nothing would be gathered, and that put into block 0.
    pages = range(min(parts.memory.num_rows * plan.blocks_per_chunk, _MOST_TURNS))
    cells = parts.groups[number].cells
    mine = next((page for page in pages if all(cell.page.is_writer(page) for cell in cells)), None)
    if mine is not None:
        zero, page, counts = np.zeros(1, dtype=np.int64), np.array([mine]), np.eye(len(parts.groups), dtype=np.int64)
        for move in (plan.gather, plan.scatter):
            move(zero, page, counts[number], rows=staging.memory, places=zero, programs=1)
