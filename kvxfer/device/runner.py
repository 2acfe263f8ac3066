"""The job runner over pages in a device's memory: the face of `jobs.JobRunner`, the work of a device and a carrier.

    store   pages --gather--> bay --carrier--> slot          load   slot --carrier--> bay --scatter--> pages

A job is cut into batches of as many chunks as a bay holds; several bays let batches convert, copy and move at once.
One thread queues all work on the device and asks, without waiting, what of it is done (flights.py).
"""

from __future__ import annotations

import atexit
import ctypes as C
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.config import EngineConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Device, Event
from kvxfer.device.carrier import Carrier
from kvxfer.device.flights import Flights
from kvxfer.device.job import DeviceJob
from kvxfer.errors import DeviceError, NativeError
from kvxfer.jobs import STORE, JobOutcome, Runner, Status, check_process

__all__ = ["DeviceRunner"]

WATCH_S = 0.1  # how long anybody sleeps at most
LEAST_PAUSE_S, MOST_PAUSE_S = 50e-6, 1e-3  # between two questions to the device
GRACE_S = 1.0  # at a shutdown, for what needs no drive
_KEPT: list[object] = []  # what a device or a write may use for ever: never freed


class DeviceRunner(Runner):
    """See the module. `shutdown` is bounded by its timeout, also where a device or a drive does not answer.

    A DeviceError from any call, or no answer within io_timeout_s, and the device counts as lost: what is open ends with
    Status.DEVICE, once nothing can be written to its pages any more as far as that can be known, and so does at once
    whatever is submitted later. `reason` says why.

    Args:
        carrier: the runner's from now on, but for a constructor that raises.
        pages: of the jobs to come. Each is converted once with no block, so that what a device compiles is compiled.
        config: bays, bay_bytes, io_timeout_s.

    Raises:
        DeviceMemoryError: there is not memory for one bay that holds one chunk.
        DeviceError
        LayoutError: the pages are of several slot layouts.
    """

    def __init__(self, device: Device, carrier: Carrier, pages: Sequence[KVPages], config: EngineConfig) -> None:
        self._device, self._carrier, self._timeout = device, carrier, config.io_timeout_s
        self._pid = os.getpid()
        self._flights = Flights(device, carrier, pages, config)
        self._lock = self._flights.lock
        self._news, self._work = self._flights.news, self._flights.work
        self._called: set[int] = set()
        self._closing = self._shut = False
        self._shutting = False  # somebody is inside `shutdown`
        self._left = 0
        self._turn_since = 0.0  # when the thread began what it is doing; 0: it sleeps
        self._suspected = 0.0, 0.0  # such a beginning, long ago, and when that was noticed
        self._thread = threading.Thread(target=self._serve, name="kvxfer-device", daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def reason(self) -> str:
        """Why the device counts as lost; empty where it does not."""
        return self._flights.reason

    def part(self, pages: KVPages, live: bool = True) -> KVPages:
        """The pages themselves. They are written after the verification only, whatever `live` says."""
        return pages

    def mark(self) -> Event | None:
        """An event after all that the calling thread's current stream has queued."""
        check_process(self._pid, "engine")
        if self.reason:
            return None
        try:
            return self._device.mark()
        except DeviceError as exc:
            self._flights.lose(str(exc))
            return None

    @property
    def refusal(self) -> Status | None:
        """DEVICE once the device was lost."""
        return Status.DEVICE if self.reason else None

    def submit(
        self,
        job_id: int,
        direction: int,
        parts: Sequence[KVPages],
        records: bytes,
        block_ids: NDArray[np.int64],
        digest: bytes,
        *,
        deadline_ns: int = 0,
        after: Event | None = None,
    ) -> None:
        """As `Runner.submit`. Where the device was lost the job ends at once."""
        check_process(self._pid, "engine")
        if len(records) != len(block_ids) * C.sizeof(_native.Chunk) or len(digest) != 32 or not len(block_ids):
            raise NativeError(
                f"{len(records)} bytes of records and {len(digest)} of digest for {len(block_ids)} chunks"
            )
        form = self._flights.form(parts)
        if block_ids.dtype != np.int64 or block_ids.shape[1:] != (form.slot.blocks_per_chunk,):
            raise NativeError("block_ids must be int64 [chunks, blocks_per_chunk]")
        if block_ids.min() < -1 or block_ids.max() >= min(pages.num_blocks for pages in parts):
            raise NativeError("a block id is out of range")
        if form.chunk_bytes > self._flights.ring.nbytes:
            raise NativeError(f"a chunk of {form.chunk_bytes} bytes does not fit a bay of {self._flights.ring.nbytes}")
        deadline_ns = 0 if direction == STORE else deadline_ns
        ids = np.array(block_ids)
        job = DeviceJob(job_id, direction, tuple(parts), form, bytes(records), ids, digest, deadline_ns, after)
        with self._lock:
            if self._closing:
                raise NativeError("the runner was shut down")
            self._flights.accept(job)

    def poll(self, direction: int) -> JobOutcome | None:
        """One finished job, or None. Never blocks."""
        check_process(self._pid, "engine")
        with self._lock:
            self._watch()
            return self._flights.take_outcome(direction)

    def late(self) -> Iterator[tuple[int, int]]:
        """(job id, chunk) of stores once reported LOST whose write has returned since: their slots are free again."""
        check_process(self._pid, "engine")
        with self._lock:
            self._watch()
            late = list(self._flights.late)
            self._flights.late.clear()
        yield from late

    def wait(self, directions: Sequence[int], timeout_s: float) -> bool:
        """Block until a job of one of the directions can be polled, or `wake()` was called for one."""
        check_process(self._pid, "engine")
        end = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._watch()
                if any(self._flights.has_news(direction) for direction in directions):
                    return True
                if called := self._called & set(directions):
                    self._called -= called
                    return True
                if (left := end - time.monotonic()) <= 0:
                    return False
                self._news.wait(min(left, WATCH_S))

    def wake(self, direction: int = STORE) -> None:
        """End the `wait` of whoever waits for this direction, or the next one."""
        check_process(self._pid, "engine")
        with self._lock:
            self._called.add(direction)
            self._news.notify_all()

    def wait_gathered(self, job_id: int, timeout_s: float) -> bool | None:
        """Block until a store's source blocks may be reused. None where the job isn't known (any more)."""
        check_process(self._pid, "engine")
        end = time.monotonic() + timeout_s
        with self._lock:
            job = self._flights.jobs.get(job_id)
            while job is not None:
                self._watch()
                if job.outcome is not None or not job.ungathered:
                    return True
                if (left := end - time.monotonic()) <= 0:
                    return False
                self._news.wait(min(left, WATCH_S))
        return None

    def cancel(self, job_id: int) -> None:
        """Close the job's gate now; its outcome follows the last gather or scatter under way.

        That of a store also waits until its carrier knows which slots a write may still reach. Unknown ids are ignored.
        """
        check_process(self._pid, "engine")
        with self._lock:
            if (job := self._flights.jobs.get(job_id)) is not None:
                self._flights.close(job, Status.CANCELLED)

    def stats(self) -> dict[str, int]:
        """The carrier's, `Rung.stats`, and of the device: its bays, their bytes, those left behind, if it was lost."""
        check_process(self._pid, "engine")
        with self._lock:
            rung = {} if self._carrier.rung is None else self._carrier.rung.stats()
            return self._carrier.stats() | self._flights.stats() | rung

    def shutdown(self, timeout_s: float) -> int:
        """As `Runner.shutdown`. Work that the device has not done by then keeps its bay, and its pages, for ever."""
        check_process(self._pid, "engine")
        end = time.monotonic() + max(0.0, timeout_s)
        with self._lock:
            while self._shutting and (left := end - time.monotonic()) > 0:
                self._news.wait(min(left, WATCH_S))
            if self._shut or self._shutting:
                return self._left
            self._closing = self._shutting = True
        try:
            return self._stop(end)
        finally:  # a signal's exception: the next one goes on with it
            with self._lock:
                self._shutting = False
                self._news.notify_all()

    def abandon(self) -> None:
        """`shutdown` without waiting, for a process that ends; nothing in a forked child."""
        if os.getpid() == self._pid:
            self.shutdown(0)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _stop(self, end: float) -> int:
        """Each step may come a second time."""
        with self._lock:
            self._flights.drop_queued()
            self._wait_for_flights(end)
            self._flights.stop()
        left = self._carrier.shutdown(max(0.0, end - time.monotonic()))  # all that it had has landed after this
        with self._lock:
            self._wait_for_flights(time.monotonic() + GRACE_S)
            self._flights.hurry = True
            self._flights.call()
        self._thread.join(GRACE_S)
        with self._lock:
            if self._thread.is_alive():
                left += 1
                self._flights.give_up("a call had not returned when the runner was shut down")
                _KEPT.append(self._flights)
            elif not self._flights.free():
                _KEPT.append(self._flights)
            self._left, self._shut = left, True
        return left

    def _wait_for_flights(self, end: float) -> None:
        """With the lock."""
        while self._flights.under_way and (left := end - time.monotonic()) > 0:
            self._watch()
            self._news.wait(min(left, WATCH_S))

    def _watch(self) -> None:
        """With the lock: what must come to pass even if the thread is in a call that does not return."""
        self._flights.expire()
        now, turn = time.monotonic(), self._turn_since
        if not turn or now - turn <= self._timeout:
            self._suspected = 0.0, 0.0
        elif self._suspected[0] != turn:  # or this process was stopped for so long: then the thread goes on now
            self._suspected = turn, now
        elif now - self._suspected[1] >= min(WATCH_S, self._timeout):
            self._flights.give_up(f"a call has not returned within io_timeout_s={self._timeout}")
        if self._shut and not self._thread.is_alive():
            self._flights.take_late()

    def _serve(self) -> None:
        pause = LEAST_PAUSE_S
        while True:
            with self._lock:
                self._turn_since = time.monotonic()
                self._flights.called = False
            try:
                moved = self._flights.turn()
            except Exception as exc:  # a defect: the thread must go on, or no job would ever end again
                moved = False
                self._flights.lose(f"a defect: {exc!r}", exc)
            with self._lock:
                self._turn_since = 0.0
                if self._flights.stopped and not self._flights.under_way:
                    self._news.notify_all()
                    return
                pause = LEAST_PAUSE_S if moved else min(2 * pause, MOST_PAUSE_S)
                if not moved and not self._flights.called:  # nothing came after the turn had looked
                    self._work.wait(pause if self._flights.under_way else self._flights.rest(WATCH_S))


# At exit the thread must be out of the device's library before that goes.
_running: weakref.WeakSet[DeviceRunner] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for runner in list(_running):
        runner.abandon()
