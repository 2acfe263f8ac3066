"""Straight between a device's memory and the drive: bays are registered, kvikio moves them, the device sums them.

store   gather -> sums to the host -> trailers sealed -> payload by kvikio, trailers by pwrite
load    payload by kvikio, trailers by pread, checked -> the device sums the bay -> sums compared -> scatter
"""

from __future__ import annotations

import ctypes as C
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.config import EngineConfig
from kvxfer.device.base import Buffer, Device, Event, Stream
from kvxfer.device.bays import Bay
from kvxfer.device.carrier import Batch, Carrier, Landing, all_failed
from kvxfer.device.form import Form
from kvxfer.device.gds_slots import Journey, SlotPlan
from kvxfer.device.job import LivedTime
from kvxfer.errors import DeviceError, KvxferError
from kvxfer.io.gds import COMPAT, DEPTH, DIRECT, GdsBackend
from kvxfer.io.ladder import Rung
from kvxfer.jobs import LOAD, STORE, ChunkError, Status
from kvxfer.report import engine_reporter
from kvxfer.staging import AlignedBuffer

__all__ = ["DeviceTrial", "GdsBay", "GdsCarrier", "backend_for"]

_RECORD = C.sizeof(_native.Chunk)
_PAUSE_S = 0.001
_COUNTED = {
    Status.TRUNCATED: "truncated", Status.BAD_TRAILER: "bad_trailer", Status.FOREIGN: "foreign",
    Status.BAD_SUM: "bad_sum", Status.ABSENT: "absent", Status.IO: "io_errors", Status.CUT: "deadline_cuts",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class GdsBay(Bay):
    """A bay whose device memory is registered with the drive, if it could be."""

    host_sums: Buffer | None = None  # of `sums`, in host memory
    backend: GdsBackend | None = None

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that it has."""
        mine = (self.device, self.ids, self.device_ids, self.sums, self.host_sums)
        return tuple(buffer for buffer in mine if buffer is not None)

    def free(self) -> None:
        """Undoes the registration first; where that hangs, the memory stays."""
        assert self.backend is not None
        gone = self.backend.deregister(self.device.address)
        for buffer in self.buffers:
            if gone or buffer is not self.device:
                with suppress(DeviceError):  # as in Bay
                    buffer.free()


class _Stage(Enum):
    SUMS = auto()  # of a store: on their way to the host
    DRIVE = auto()  # transfers
    CHECK = auto()  # of a load: the device sums what has arrived


@dataclass(slots=True, eq=False)
class _Trip:
    """A batch on its way."""

    batch: Batch
    plan: SlotPlan
    stage: _Stage
    event: Event | None = None  # after the device's part
    since: float = 0.0  # when that was queued, in the carrier's LivedTime
    journeys: list[Journey] = field(default_factory=list)
    summed: list[Journey] = field(default_factory=list)  # those whose bytes had come before the device summed them
    closed: Status | None = None  # nobody waits for it: what has no answer gets this
    drain: bool = False  # closed, and what was begun is waited for
    cut: bool = False  # of a load: its deadline came; what has arrived is verified yet

    def close(self, status: Status, drain: bool) -> None:
        """No chunk of it begins any more; `drain`: those that have are waited for."""
        if self.closed is None:
            self.closed = status
        self.drain = drain
        for journey in self.journeys:
            journey.stop(midway=not drain)


class GdsCarrier(Carrier):
    """See the module.

    A chunk's transfers are one call on one of the backend's threads; one that outlives io_timeout_s is given up as
    LOST, and keeps its bay until it has returned, a load's as well as a store's.

    Args:
        backend: the carrier's from now on.
    """

    def __init__(self, device: Device, backend: GdsBackend, config: EngineConfig) -> None:
        self._device, self._backend, self._timeout = device, backend, config.io_timeout_s
        self._clock = LivedTime(config.io_timeout_s / 8)
        # A load's sums must not wait behind a store's, which wait for its pages.
        self._streams: dict[int, Stream] = {STORE: device.stream(), LOAD: device.stream()}
        self._lock = threading.RLock()  # not held over a call of the device, which may never return
        self._plans: dict[int, tuple[Form, SlotPlan]] = {}  # by id of the form, which is kept
        self._pages: dict[int, AlignedBuffer] = {}  # trailer pages in host memory, by bay
        self._trips: dict[Batch, _Trip] = {}
        self._lost: list[tuple[Batch, Journey]] = []  # writes that were given up and have not returned
        self._held: dict[Bay, list[Journey]] = {}  # landed batches' calls that may use their bay
        self._counts: Counter[str] = Counter()
        self._closing = False

    def make_bay(self, number: int, nbytes: int, ids_bytes: int, sums_bytes: int) -> GdsBay:
        """See Carrier. Where the drive does not take its memory that is said, and cuFile goes by buffers of its own."""
        device, made = self._device, []
        try:
            for on_device, size in (
                (True, nbytes), (False, ids_bytes), (True, ids_bytes), (True, sums_bytes), (False, sums_bytes),
            ):  # fmt: skip
                made.append(device.device_buffer(size) if on_device else device.host_buffer(size))
        except BaseException:
            for buffer in made:
                buffer.free()
            raise
        memory, ids, device_ids, sums, host_sums = made
        bay = GdsBay(number, nbytes, memory, ids, device_ids, None, sums, host_sums, self._backend)
        why = self._backend.register(memory.address, nbytes)
        if why and self._backend.mode == DIRECT:
            what = f"a bay of {nbytes} bytes is not registered with the drive, its transfers are slower: {why}"
            engine_reporter.warn("registration", what, device=device.label)
        return bay

    def begin_store(self, batch: Batch, filled: Event) -> None:
        """See Carrier."""
        bay = _mine(batch.bay)
        self._device.wait(self._streams[STORE], filled)
        event = self._fetch_sums(batch, bay)
        with self._lock:
            self._trips[batch] = trip = _Trip(batch, self._plan(batch.form), _Stage.SUMS, event, self._clock())
            if self._closing:
                trip.close(Status.CANCELLED, drain=True)

    def begin_load(self, batch: Batch) -> None:
        """See Carrier."""
        with self._lock:
            self._trips[batch] = trip = _Trip(batch, self._plan(batch.form), _Stage.DRIVE)
            if self._closing:
                trip.close(Status.CANCELLED, drain=True)
            else:
                self._depart(trip, None)

    def bring(self, batch: Batch) -> None:
        """None: what has landed lies in the bay."""

    def cancel(self, batch: Batch) -> None:
        """See Carrier."""
        with self._lock:
            if (trip := self._trips.get(batch)) is not None:
                trip.close(Status.CANCELLED, drain=False)

    def poll(self) -> list[Landing]:
        """See Carrier."""
        landings = []
        for batch, trip in list(self._trips.items()):  # only this thread puts trips there, or takes them away
            try:
                landing = self._advance(trip)
            except DeviceError as exc:
                with self._lock:
                    landing = self._ended(trip, all_failed(batch, Status.DEVICE, exc))
            if landing is not None:
                with self._lock:
                    del self._trips[batch]
                landings.append(landing)
        return landings

    def late(self) -> list[tuple[Batch, int]]:
        """See Carrier."""
        with self._lock:
            back = [(batch, journey) for batch, journey in self._lost if not journey.running]
            self._lost = [which for which in self._lost if which not in back]
        return [(batch, journey.number) for batch, journey in back]

    def returned(self) -> list[Bay]:
        """See Carrier."""
        with self._lock:
            free = [bay for bay, journeys in self._held.items() if not any(each.running for each in journeys)]
            for bay in free:
                del self._held[bay]
        return free

    def forsake(self) -> list[Batch]:
        """What is being summed."""
        with self._lock:
            forsaken = [batch for batch, trip in self._trips.items() if trip.stage is not _Stage.DRIVE]
            for batch in forsaken:
                del self._trips[batch]
        return forsaken

    def stats(self) -> dict[str, int]:
        """See Carrier."""
        backend = self._backend.stats()
        with self._lock:
            mine = {name: self._counts[name] for name, *_ in _native.Stats._fields_}
            mine["queued_chunks"] = sum(trip.batch.chunks for trip in self._trips.values())
        both = ("bytes_read", "bytes_written", "threads", "busy_threads", "lost_threads", "lost_calls", "late_returns")
        return mine | {name: backend[name] for name in both}

    def shutdown(self, timeout_s: float) -> int:
        """See Carrier."""
        end = time.monotonic() + max(0.0, timeout_s)
        with self._lock:
            self._closing = True
            for trip in self._trips.values():
                trip.close(Status.CANCELLED, drain=True)
        while self._running() and time.monotonic() < end:
            time.sleep(_PAUSE_S)
        with self._lock:
            for trip in self._trips.values():
                trip.drain = False
            self._backend.close()
            left = self._running()
        return left + sum(journey.running for journeys in list(self._held.values()) for journey in journeys)

    def abandon(self) -> None:
        """See Carrier."""
        self.shutdown(0)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _running(self) -> int:
        with self._lock:
            return sum(journey.running for trip in self._trips.values() for journey in trip.journeys)

    def _plan(self, form: Form) -> SlotPlan:
        if id(form) not in self._plans:
            self._plans[id(form)] = form, SlotPlan(form)
        return self._plans[id(form)][1]

    def _fetch_sums(self, batch: Batch, bay: GdsBay) -> Event:
        assert bay.sums is not None and bay.host_sums is not None  # made so
        nbytes = 8 * batch.chunks * len(batch.form.segments)
        stream = self._streams[batch.direction]
        self._device.copy(stream, bay.host_sums, 0, bay.sums, 0, nbytes)
        return self._device.record(stream)

    def _sums(self, trip: _Trip) -> NDArray[np.uint64]:
        """[chunks, segments of the form], once the trip's event is done."""
        batch, bay = trip.batch, _mine(trip.batch.bay)
        assert bay.host_sums is not None
        nbytes = 8 * batch.chunks * len(batch.form.segments)
        return bay.host_sums.host()[:nbytes].view(np.uint64).reshape(batch.chunks, -1)

    def _depart(self, trip: _Trip, sums: NDArray[np.uint64] | None) -> None:
        """Starts the transfers; `sums`: of a store."""
        batch, plan = trip.batch, trip.plan
        try:
            pages = self._trailer_pages(batch, plan)
        except (MemoryError, OSError) as exc:
            engine_reporter.failed("carrier", "there is no memory for trailers", exc)
            trip.close(Status.CANCELLED, drain=True)
            return
        for chunk in range(batch.chunks):
            record = _native.Chunk.from_buffer_copy(batch.records, chunk * _RECORD)
            address = batch.bay.device.address + chunk * batch.form.chunk_bytes
            journey = Journey(plan, chunk, record, batch.digest, address, pages[chunk], batch.block_ids[chunk])
            trip.journeys.append(journey)
            if sums is not None:
                journey.seal(sums[chunk])
            try:
                journey.begin(self._backend, store=sums is not None)
            except KvxferError as exc:  # the backend was closed: nothing was begun
                engine_reporter.failed("carrier", "a transfer could not be started", exc)
                trip.close(Status.CANCELLED, drain=True)
                return

    def _trailer_pages(self, batch: Batch, plan: SlotPlan) -> NDArray[np.uint8]:
        """[chunks, trailer_bytes]. A bay's are used with the bay alone."""
        nbytes, number = batch.chunks * plan.trailer_bytes, batch.bay.number
        known = self._pages.get(number)
        if known is None or len(known) < nbytes or known.alignment < plan.slot.alignment:
            known = self._pages[number] = AlignedBuffer(nbytes, plan.slot.alignment)
        return known.array[:nbytes].reshape(batch.chunks, -1)

    def _advance(self, trip: _Trip) -> Landing | None:
        """As far as a trip goes without waiting; its end. Without the lock where the device is asked."""
        batch = trip.batch
        if batch.deadline_ns and not trip.cut and batch.direction == LOAD and time.monotonic_ns() >= batch.deadline_ns:
            with self._lock:
                trip.cut = True
                for journey in trip.journeys:
                    journey.stop()
        if trip.stage is _Stage.SUMS:
            if not self._is_done(trip):
                return None
            with self._lock:
                if trip.closed is not None:
                    return self._ended(trip, all_failed(batch, trip.closed))
                trip.stage = _Stage.DRIVE
                self._depart(trip, self._sums(trip))
        if trip.stage is _Stage.DRIVE:
            with self._lock:
                if self._waits(trip):
                    return None
                if batch.direction == STORE or trip.closed is not None:
                    return self._land(trip)
                trip.summed = [journey for journey in trip.journeys if journey.settle(Status.CUT) is Status.PENDING]
                if not trip.summed:
                    return self._land(trip)
            self._sum(trip)
        if not self._is_done(trip):
            return None
        with self._lock:
            if trip.closed is None:
                sums = self._sums(trip)
                for journey in trip.summed:
                    journey.compare(sums[journey.number])
                    self._counts["segments_verified"] += len(batch.form.segments)
            return self._land(trip)

    def _sum(self, trip: _Trip) -> None:
        """Has the device sum what has arrived, and whatever is in the places of chunks that have not."""
        batch, bay = trip.batch, _mine(trip.batch.bay)
        assert bay.sums is not None
        for part in batch.form.gathers:  # which hold all segments
            mapping, stream = batch.form.mappings[part], self._streams[LOAD]
            self._device.checksum(stream, mapping, batch.chunks, bay.device, batch.form.chunk_bytes, bay.sums)
        trip.event, trip.since, trip.stage = self._fetch_sums(batch, bay), self._clock(), _Stage.CHECK

    @staticmethod
    def _waits(trip: _Trip) -> bool:
        """Whether there are transfers to wait for."""
        if trip.closed is None:
            return not trip.cut and not all(journey.call is None or journey.call.done() for journey in trip.journeys)
        return trip.drain and any(journey.running and not _lost(journey) for journey in trip.journeys)

    def _is_done(self, trip: _Trip) -> bool:
        """Whether the device has done its part. DeviceError where it does not answer."""
        assert trip.event is not None
        if trip.event.done():
            return True
        if self._clock() - trip.since > self._timeout:
            raise DeviceError(f"sums did not come within io_timeout_s={self._timeout}")
        return False

    def _land(self, trip: _Trip) -> Landing:
        batch = trip.batch
        status, errors = np.empty(batch.chunks, np.uint8), []
        stopped = trip.closed is not None or trip.cut
        late = Status.LOST if batch.direction == LOAD else Status.CANCELLED  # it came back after the device had summed
        closed = trip.closed or (Status.CUT if trip.cut else late)
        for journey in trip.journeys:
            end = journey.settle(closed)
            if end is Status.PENDING or (end is Status.LOST and stopped and batch.direction == LOAD):
                end = closed  # a read under way is no write, whose slot would have to rest
            status[journey.number] = end
            if end is not Status.OK:
                known = journey.error if journey.error is not None and journey.error.status is end else None
                errors.append(known or ChunkError(journey.number, end))
            if end is Status.LOST and batch.direction == STORE:
                self._lost.append((batch, journey))
                self._counts["lost_writes"] += 1
        status[len(trip.journeys) :] = closed  # it was closed before it began
        errors += [ChunkError(chunk, closed) for chunk in range(len(trip.journeys), batch.chunks)]
        return self._ended(trip, Landing(batch, status, tuple(errors)))

    def _ended(self, trip: _Trip, landing: Landing) -> Landing:
        """Counts it, and holds on to its bay where a call may still use that."""
        for journey in trip.journeys:
            journey.stop()
            name = "read_ns" if trip.batch.direction == LOAD else "write_ns"
            self._counts[name] += int(journey.seconds * 1e9)
        for value, count in zip(*np.unique(landing.status, return_counts=True), strict=True):
            if (what := _COUNTED.get(Status(int(value)))) is not None:
                self._counts[what] += int(count)
        stored = int((landing.status == Status.OK).sum())
        self._counts["chunks_stored" if trip.batch.direction == STORE else "chunks_loaded"] += stored
        running = [journey for journey in trip.journeys if journey.running]
        if not running:
            return landing
        self._held[trip.batch.bay] = running
        return Landing(landing.batch, landing.status, landing.errors, landing.fault, holds_bay=True)


def _lost(journey: Journey) -> bool:
    return journey.call is not None and journey.call.lost


def _mine(bay: Bay) -> GdsBay:
    assert isinstance(bay, GdsBay)
    return bay


class DeviceTrial:
    """`ladder.DeviceMemory` of a Device. Its calls wait."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._made: dict[int, Buffer] = {}

    def alloc(self, nbytes: int) -> int:
        """See DeviceMemory."""
        buffer = self._device.device_buffer(nbytes)
        self._made[buffer.address] = buffer
        return buffer.address

    def fill(self, address: int, data: NDArray[np.uint8]) -> None:
        """See DeviceMemory."""
        host = self._device.host_buffer(data.nbytes)
        host.host()[: data.nbytes] = data
        base, buffer = self._find(address)
        self._device.copy(self._stream, buffer, address - base, host, 0, data.nbytes)
        self._wait()
        host.free()

    def fetch(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """See DeviceMemory."""
        host = self._device.host_buffer(nbytes)
        base, buffer = self._find(address)
        self._device.copy(self._stream, host, 0, buffer, address - base, nbytes)
        self._wait()
        data = np.array(host.host()[:nbytes])
        host.free()
        return data

    def free(self, address: int) -> None:
        """See DeviceMemory."""
        self._made.pop(address).free()

    def _find(self, address: int) -> tuple[int, Buffer]:
        return next((base, each) for base, each in self._made.items() if base <= address < base + each.nbytes)

    def _wait(self) -> None:
        event = self._device.record(self._stream)
        while not event.done():
            time.sleep(_PAUSE_S)


def backend_for(rung: Rung, config: EngineConfig) -> GdsBackend | None:
    """What moves bytes on this rung; None for the host's. DeviceError where kvikio cannot be used after all."""
    if rung.name not in (DIRECT, COMPAT):
        return None
    return GdsBackend(
        rung.name,
        depth=max(config.io_threads, DEPTH),
        request_bytes=rung.request_bytes,
        io_timeout_s=config.io_timeout_s,
        max_lost=config.max_lost_threads,
    )
