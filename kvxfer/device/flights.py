"""What the device runner's thread does: batches on their way between pages and drive, and what became of their jobs.

A bay, its block ids included, is used again when the thread has seen all done that used it; so nothing on the device
needs to wait for that.
"""

from __future__ import annotations

import ctypes as C
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvxfer import _native
from kvxfer.config import EngineConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Device
from kvxfer.device.bays import Bay, Ring
from kvxfer.device.carrier import Batch, Carrier, Landing, all_failed
from kvxfer.device.conversions import Conversions
from kvxfer.device.form import Form, form_of
from kvxfer.device.job import DeviceJob, Flight, LivedTime
from kvxfer.errors import DeviceError, NativeError
from kvxfer.jobs import LOAD, STORE, JobOutcome, Status
from kvxfer.report import engine_reporter

__all__ = ["Flights"]

_RECORD = C.sizeof(_native.Chunk)
LEAST_BATCH = 1 << 20  # bytes: smaller ones cost more than they overlap
HELD_PAUSE_S = 0.002  # between two looks at bays that somebody waits for
LANDING_NS = 10_000_000  # before a load's deadline: what the carrier has by then is still scattered


class Flights:
    """`turn`, and what it calls, is for one thread. All else: any thread, with `lock`, unless it says that it locks.

    Args, Raises: see DeviceRunner.
    """

    def __init__(self, device: Device, carrier: Carrier, pages: Sequence[KVPages], config: EngineConfig) -> None:
        self.lock = threading.RLock()
        self.work, self.news = threading.Condition(self.lock), threading.Condition(self.lock)
        self.jobs: dict[int, DeviceJob] = {}  # whose outcome was not taken
        self.late: deque[tuple[int, int]] = deque()
        self.reason = ""  # why the device counts as lost
        self.stopped = False  # nothing more begins, no gate opens
        self.hurry = False  # the device is not waited for any more
        self.called = False  # there is something that the turn under way may not have seen
        self._device, self._carrier, self._timeout = device, carrier, config.io_timeout_s
        self._forms: dict[tuple[int, ...], Form] = {}
        self._queue: dict[int, deque[DeviceJob]] = {LOAD: deque(), STORE: deque()}  # with chunks that no batch has
        self._done: dict[int, deque[DeviceJob]] = {LOAD: deque(), STORE: deque()}
        self._timed: dict[int, DeviceJob] = {}  # with a deadline, and no outcome
        self._flights: dict[Batch, Flight] = {}
        self._losses: dict[Batch, Flight] = {}  # landed, but for writes that have not returned
        self._spoiled: list[Flight] = []  # of leaked bays, with the pages that work under way may name
        self._fenced = False
        form = self.form(pages)
        self._clock = LivedTime(config.io_timeout_s / 8)
        self._conversions = Conversions(device, self._clock)
        self.ring = Ring(lambda *which: _bay(carrier, form, *which), config.bays, config.bay_bytes, form.chunk_bytes)
        try:
            self._conversions.rehearse(form, pages, self.ring.bays[0])
        except BaseException:  # goes on to the caller; what was queued may still name the bays, so they are never freed
            _SPOILED.append(self.ring)
            raise

    # ---- with the lock, by any thread ------------------------------------------------------------------------------

    def form(self, parts: Sequence[KVPages]) -> Form:
        """How chunks of these ranks lie in bays."""
        key = tuple(id(pages.mapping) for pages in parts)
        if key not in self._forms:
            self._forms[key] = form_of([pages.mapping for pages in parts])  # keeps the mappings, and so their ids
        return self._forms[key]

    def call(self) -> None:
        """There is something to do for the thread, which may just be on its way to sleep."""
        self.called = True
        self.work.notify_all()

    @property
    def under_way(self) -> bool:
        """Whether there are batches that have not landed."""
        return bool(self._flights)

    def accept(self, job: DeviceJob) -> None:
        """A job is there.

        Raises:
            NativeError: there is one of the same id.
        """
        if job.job_id in self.jobs:
            raise NativeError(f"job {job.job_id} is there already")
        self.jobs[job.job_id] = job
        if job.deadline_ns:
            self._timed[job.job_id] = job
        job.expire(time.monotonic_ns())
        if self.reason:
            job.close(Status.DEVICE)
        if not self._finish(job):
            self._queue[job.direction].append(job)
            self.call()

    def has_news(self, direction: int) -> bool:
        """Whether there is an outcome to take, or a late chunk."""
        return bool(self._done[direction]) or (direction == STORE and bool(self.late))

    def take_outcome(self, direction: int) -> JobOutcome | None:
        """One outcome, once."""
        if not self._done[direction]:
            return None
        job = self._done[direction].popleft()
        del self.jobs[job.job_id]
        return job.outcome

    def close(self, job: DeviceJob, status: Status) -> None:
        """Closes a job's gate; what has no answer gets `status`, once nobody is inside."""
        if job.closed is None:
            job.close(status)
            self.call()
        self._finish(job)

    def expire(self) -> None:
        """Closes the gates of loads whose deadline has passed."""
        now = time.monotonic_ns()
        for job in [job for job in self._timed.values() if now >= job.deadline_ns]:
            self.close(job, Status.CUT)

    def drop_queued(self) -> None:
        """What no batch has will not be tried."""
        for direction in self._queue:
            self._drop(direction, Status.CANCELLED)
        self.call()

    def stop(self) -> None:
        """Closes every gate; nothing more begins."""
        self.stopped = True
        self._close_all(Status.CANCELLED)
        self.call()

    def lose(self, reason: str, exc: BaseException | None = None) -> None:
        """The device counts as lost. What was raised leaves a trace if it is a defect. Locks."""
        with self.lock:
            if self.reason:
                return
            self.reason = reason
            what = f"{self._device.label} ({self._device.name}) was lost, nothing is moved to or from it: {reason}"
            defect = None if isinstance(exc, DeviceError) else exc
            engine_reporter.warn("device lost", what, exc_info=defect, device=self._device.label)
            self._close_all(Status.DEVICE)
            for queue in self._queue.values():
                queue.clear()
            self.call()

    def give_up(self, reason: str) -> None:
        """The thread is in a call that does not return: all jobs end now, as if nothing more came of their batches."""
        self.lose(reason)
        for flight in self._flights.values():
            flight.given_up = flight.soiled = True
            job = flight.job
            job.inside = job.carried = 0
            if flight.carried and not flight.is_load:  # the write may have begun, or may begin yet
                job.settle(flight.first, np.full(flight.batch.chunks, Status.LOST, np.uint8), ())
        for job in list(self.jobs.values()):
            self._finish(job)

    def stats(self) -> dict[str, int]:
        """Of the device: see DeviceRunner.stats."""
        bays = len(self.ring.bays) - len(self.ring.leaked)
        return {
            "device_bays": bays,
            "device_bays_in_use": self.ring.in_use,
            "device_bays_bytes": bays * self.ring.nbytes,
            "device_held_bays": self.ring.held,
            "device_leaked_bays": len(self.ring.leaked),
            "device_lost": int(bool(self.reason)),
        }

    def rest(self, most: float) -> float | None:
        """Seconds until there may be something to do though nothing is under way; None: as long as nobody calls."""
        if self.ring.held and any(self._queue.values()):
            return min(most, HELD_PAUSE_S)
        if self._losses or self.ring.held:
            return most
        soonest = min((job.deadline_ns for job in self._timed.values()), default=None)
        return None if soonest is None else min(most, max(0, soonest - time.monotonic_ns()) / 1e9)

    def free(self) -> bool:
        """Gives back the bays that nothing uses, after the thread has ended. False: there are others."""
        self.ring.free()
        return not self.ring.bays

    def take_late(self) -> None:
        """Takes in writes that have returned after they were given up. The thread's, or after it has ended."""
        for batch, chunk in self._carrier.late():
            flight = self._losses[batch]
            flight.lost -= {chunk}
            self.late.append((flight.job.job_id, flight.first + chunk))
            if not flight.lost:
                del self._losses[batch]
            self.news.notify_all()
        for bay in self._carrier.returned():
            self.ring.give_back(bay)

    def _close_all(self, status: Status) -> None:
        for job in list(self.jobs.values()):
            if job.outcome is None:
                self.close(job, status)

    def _drop(self, direction: int, status: Status) -> None:
        queue = self._queue[direction]
        while queue:
            job = queue.popleft()
            if job.untaken:
                job.drop_untaken(status)
                self._finish(job)

    def _finish(self, job: DeviceJob) -> bool:
        if not job.finish():
            return False
        self._timed.pop(job.job_id, None)
        self._done[job.direction].append(job)
        self.news.notify_all()
        return True

    # ---- the thread's ----------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Takes everything as far as it goes without waiting. Whether anything moved. Locks."""
        with self.lock:
            self.expire()
            doomed = [flight for flight in self._flights.values() if self._is_doomed(flight)]
        for flight in doomed:
            flight.cancelled = True
            self._carrier.cancel(flight.batch)
        if self.reason and not self._fenced:
            self._fence()
        moved = self._ask()
        for landing in self._carrier.poll():
            moved = True
            self._land(landing)
        with self.lock:
            self.take_late()
        if self.hurry:
            self._leave_all()
        while (fresh := self._next()) is not None:
            moved = True
            self._begin(fresh)
        return moved

    @staticmethod
    def _is_doomed(flight: Flight) -> bool:
        """Whether nobody waits for what the carrier does. What is on its way to the drive may well arrive there."""
        closed = flight.job.closed
        if not flight.carried or flight.cancelled or closed is None:
            return False
        return flight.is_load or closed is not Status.DEVICE

    def _next(self) -> Flight | None:
        """A batch of the first job that has chunks, if there is a bay: loads first."""
        with self.lock:
            if self.reason or self.stopped:
                return None
            for queue in self._queue.values():
                while queue and not queue[0].untaken:
                    queue.popleft()
            direction = LOAD if self._queue[LOAD] else STORE
            if not self._queue[direction]:
                return None
            if (bay := self.ring.take(direction)) is None:
                if self.ring.is_stuck(direction):
                    self._drop(direction, Status.STALLED)
                return None
            job = self._queue[direction][0]
            first, count = job.take(self._most(job, bay))
            ids = job.block_ids[first : first + count]
            batch = Batch(
                direction,
                bay,
                job.form,
                job.records[first * _RECORD : (first + count) * _RECORD],
                ids,
                job.digest,
                job.lands_ns(LANDING_NS),
                self._carrier.engine(direction, bay, job.form, int((ids >= 0).sum())),
            )
            flight = self._flights[batch] = Flight(job, batch, first)
            flight.carried = True
            if not flight.is_load:
                job.carried += 1
                self._enter(flight)
            return flight

    def _most(self, job: DeviceJob, bay: Bay) -> int:
        """Chunks of a batch: what the bay holds; less where a job can so be in all bays at once."""
        holds = min(bay.nbytes // job.form.chunk_bytes, bay.ids.nbytes // (8 * job.form.slot.blocks_per_chunk))
        share = -(-job.chunks // (2 * len(self.ring.bays)))
        return min(holds, max(share, LEAST_BATCH // job.form.chunk_bytes, 1))

    def _begin(self, flight: Flight) -> None:
        try:
            if flight.is_load:
                self._carrier.begin_load(flight.batch)
            else:
                self._conversions.gather(flight)
                assert flight.event is not None
                self._carrier.begin_store(flight.batch, flight.event)
        except Exception as exc:  # whatever it is, the batch was taken from its job, which must end
            if isinstance(exc, DeviceError) or not flight.is_load:
                self._fail(flight, exc)
                return
            # A carrier that was shut down, no memory: nothing of it is on the device.
            engine_reporter.failed("carrier", "a load could not be started", exc)
            self._land(all_failed(flight.batch, Status.CANCELLED))

    def _ask(self) -> bool:
        """Asks the events of gathers and scatters. Whether any was done."""
        moved = False
        for flight in list(self._flights.values()):
            if not flight.inside or flight.event is None:
                continue
            try:
                done = flight.event.done()
                if not done and self._clock() - flight.since > self._timeout:
                    flight.soiled = True
                    self.lose(f"it did not answer within io_timeout_s={self._timeout}")
                    done = True  # it counts as if
            except DeviceError as exc:
                flight.soiled = True
                done = bool(self.reason)  # the first time it is asked once more: a call may fail, and a scatter go on
                self.lose(str(exc))
            if done:
                moved = True
                self._leave(flight)
        return moved

    def _land(self, landing: Landing) -> None:
        """The carrier is done with a batch. What it brought of a load goes on, if the gate is open."""
        flight = self._flights[landing.batch]
        job, status = flight.job, landing.status
        enters = False
        with self.lock:
            flight.held = landing.holds_bay
            if job.closed is not None or not (status == Status.LOST).any():  # cancelled, or cut: not given up for long
                flight.patience = self._timeout
            self._uncarry(flight)
            if landing.fault is not None:
                flight.soiled = True
            if flight.is_load:
                job.expire(time.monotonic_ns())
                arrived = status == Status.OK
                flight.good = np.where(arrived, np.uint8(Status.OK), np.uint8(Status.PENDING))
                settled = np.where(arrived, np.uint8(Status.PENDING), status)
                enters = bool(arrived.any()) and job.closed is None and job.outcome is None and not self.stopped
            else:
                flight.lost = frozenset(np.flatnonzero(status == Status.LOST).tolist())
                if flight.lost:
                    self._losses[flight.batch] = flight
                settled = status.copy()
            if job.closed is not None:  # why it was told to stop is what counts
                settled[(settled == Status.CANCELLED) | (settled == Status.CUT)] = Status.PENDING
            job.settle(flight.first, settled, landing.errors)
            if enters:
                self._enter(flight)
        if landing.fault is not None:
            self.lose(str(landing.fault))
        if enters:
            try:
                self._conversions.scatter(flight, self._carrier.bring(flight.batch))
            except Exception as exc:
                self._fail(flight, exc)
        self._retire(flight)

    def _fail(self, flight: Flight, exc: Exception) -> None:
        """A call for a batch has failed: what it had queued before is not known, and it is not the carrier's."""
        with self.lock:
            flight.soiled = True
            self._uncarry(flight)
        self.lose(str(exc), exc)
        self._retire(flight)

    def _fence(self) -> None:
        """The device was lost, or a call failed: finds out, if possible, when nothing is written to pages any more."""
        self._fenced = True
        for batch in self._carrier.forsake():
            flight = self._flights[batch]
            with self.lock:
                flight.soiled = True
                self._uncarry(flight)
            self._retire(flight)
        unknown = [flight for flight in self._flights.values() if flight.inside and flight.event is None]
        if not unknown:
            return
        try:
            event = self._conversions.record()
        except DeviceError:
            for flight in unknown:
                self._leave(flight)
            return
        for flight in unknown:
            flight.event, flight.since = event, self._clock()

    def _leave_all(self) -> None:
        """Nobody waits for the device any more."""
        for flight in list(self._flights.values()):
            flight.soiled |= flight.inside
            self._leave(flight)
        for batch in self._carrier.forsake():
            flight = self._flights[batch]
            with self.lock:
                flight.soiled = True
                self._uncarry(flight)
            self._retire(flight)

    def _enter(self, flight: Flight) -> None:
        """With the lock: from here on the batch may touch pages."""
        flight.inside = True
        flight.job.inside += 1

    def _leave(self, flight: Flight) -> None:
        """From here on it does not."""
        with self.lock:
            if flight.inside:
                flight.inside = False
                job = flight.job
                job.inside -= not flight.given_up
                if not flight.is_load:
                    job.ungathered -= flight.batch.chunks
                    self.news.notify_all()
                elif flight.good is not None:
                    came = np.uint8(Status.DEVICE if flight.soiled else Status.OK)  # blocks may be half written
                    job.settle(flight.first, np.where(flight.good == Status.OK, came, flight.good), ())
        self._retire(flight)

    def _uncarry(self, flight: Flight) -> None:
        """With the lock: the carrier does not have the batch any more."""
        if flight.carried:
            flight.carried = False
            if not flight.is_load:
                flight.job.carried -= not flight.given_up

    def _retire(self, flight: Flight) -> None:
        """Takes a batch out where nothing of it is under way: its bay comes back, its job may end."""
        with self.lock:
            if flight.inside or flight.carried or self._flights.pop(flight.batch, None) is None:
                return
            if flight.given_up and not flight.is_load:  # its chunks were told to be LOST
                places = set(range(flight.batch.chunks)) - flight.lost
                self.late.extend((flight.job.job_id, flight.first + place) for place in sorted(places))
            if flight.soiled:
                self.ring.leak(flight.batch.bay)
                self._spoiled.append(flight)
            elif flight.held:
                self.ring.hold(flight.batch.bay, flight.patience)
            else:
                self.ring.give_back(flight.batch.bay)
            self._finish(flight.job)
            self.news.notify_all()


_SPOILED: list[Ring] = []  # of runners that did not start: a device may use them for ever


def _bay(carrier: Carrier, form: Form, number: int, nbytes: int) -> Bay:
    chunks = nbytes // form.chunk_bytes
    return carrier.make_bay(number, nbytes, chunks * 8 * form.slot.blocks_per_chunk, chunks * 8 * len(form.segments))
