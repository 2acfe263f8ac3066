"""One chunk between a bay and its slot, where kvikio moves the payload and the host makes and reads the trailers.

A slot's trailer pages are a few KiB that the processor seals, or checks: they go by pwrite and pread, beside a payload
that does not touch the host. The same bytes come of it as of the native engine (csrc/trips.cpp), and the same verdicts.
"""

from __future__ import annotations

import ctypes as C
import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.device.form import Form
from kvxfer.errors import IOFault
from kvxfer.io.gds import GdsBackend, Window
from kvxfer.io.workers import Call
from kvxfer.jobs import ChunkError, Status
from kvxfer.report import engine_reporter
from kvxfer.slot import TRAILER_SUMS

__all__ = ["Journey", "Owner", "SlotPlan", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that are contiguous on both sides."""

    slot_offset: int
    offset: int  # from the start of the chunk's place in the bay, or of its trailer pages in host memory
    nbytes: int


class SlotPlan:
    """Which bytes of a slot a form's chunks have, and where in a bay.

    Attributes:
        payload, trailers: one transfer each.
        pages: numbers of the trailer pages, in their order in memory.
        places: for each of them, the places of its segments among `form.segments`.
    """

    def __init__(self, form: Form) -> None:
        slot = form.slot
        self.slot = slot
        ends = ((s, min((s + 1) * slot.segment_stride, slot.payload_stride)) for s in form.segments)
        self.payload = _spans((s * slot.segment_stride, end - s * slot.segment_stride) for s, end in ends)
        self.pages = tuple(sorted({segment // slot.segments_per_trailer for segment in form.segments}))
        page_at = ((slot.payload_stride + page * slot.alignment, slot.alignment) for page in self.pages)
        self.trailers = _spans(page_at)
        numbers = np.array(form.segments) // slot.segments_per_trailer
        self.places = tuple(np.flatnonzero(numbers == page) for page in self.pages)
        self.segments = form.segments

    @property
    def trailer_bytes(self) -> int:
        """Of a chunk's trailer pages in host memory."""
        return len(self.pages) * self.slot.alignment


def _spans(items: Iterator[tuple[int, int]]) -> tuple[Span, ...]:
    """Items (slot offset, bytes) one behind the other in memory; those that are so in the slot are one."""
    spans: list[Span] = []
    offset = 0
    for slot_offset, nbytes in items:
        last = spans[-1] if spans else None
        if last is not None and last.slot_offset + last.nbytes == slot_offset:
            spans[-1] = Span(last.slot_offset, last.offset, last.nbytes + nbytes)
        else:
            spans.append(Span(slot_offset, offset, nbytes))
        offset += nbytes
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who a slot's trailers must say it is."""

    digest: bytes
    key: bytes
    generation: int


class Journey:
    """One chunk on its way: its transfers are one call on the backend's threads.

    Args:
        number: the chunk's place in its batch.
        record: its kvx_chunk; the file in it must live while this is made.
        address: where its payload is in the device's memory.
        pages: [trailer_bytes] of host memory, aligned, which must live until the call has returned.
        block_ids: [blocks_per_chunk]; -1: not in the chunk, or not wanted.
    """

    def __init__(
        self,
        plan: SlotPlan,
        number: int,
        record: _native.Chunk,
        digest: bytes,
        address: int,
        pages: NDArray[np.uint8],
        block_ids: NDArray[np.int64],
    ) -> None:
        self.number = number
        self.status = Status.PENDING  # of a load whose bytes are there to be compared with `promised`, too
        self.error: ChunkError | None = None
        self.promised = np.zeros(len(plan.segments), np.uint64)  # the sums that its trailers give
        self.seconds = 0.0  # in transfers that have returned
        self.call: Call | None = None
        self._plan, self._address, self._pages, self._block_ids = plan, address, pages, block_ids
        self._start, self._handle = int(record.slot_offset), record.file
        self._owner = Owner(digest, bytes(record.key)[: record.key_bytes], int(record.generation))
        self._lock = threading.Lock()
        self._begun = self._stopped = self._midway = False
        self._arrived = False  # of a load: all of it, by trailers that are right

    def seal(self, sums: NDArray[np.uint64]) -> None:
        """Makes the trailer pages of a store. `sums`: [segments of the form]."""
        slot, fields = self._plan.slot, self._fields()
        for n, (page, places) in enumerate(zip(self._plan.pages, self._plan.places, strict=True)):
            fields.first_segment = page * slot.segments_per_trailer
            fields.segment_count = len(places)
            mine = np.ascontiguousarray(sums[places])
            at = self._pages.ctypes.data + n * slot.alignment
            answer = _native.lib().kvx_trailer_seal(C.byref(fields), mine.ctypes.data, at, slot.alignment)
            if answer:
                raise AssertionError(f"kvx_trailer_seal answers {answer}: a part writes whole trailer pages")

    def begin(self, backend: GdsBackend, *, store: bool) -> None:
        """Starts it. Whatever is wrong with its file is its `status`."""
        try:
            file = backend.adopt(_native.lib().kvx_file_fd(self._handle))
            what = "write" if store else "read"

            def transfers() -> int:
                with self._lock:
                    if self._stopped:
                        return 0
                    self._begun = True
                for span in self._plan.payload:
                    place = Window(self._address + span.offset, span.nbytes)
                    if not self._moves(file.move, what, place, span):
                        return 0
                for span in self._plan.trailers:
                    if not self._moves(file.move, what, self._pages[span.offset : span.offset + span.nbytes], span):
                        return 0
                if store:
                    self.status = Status.OK
                else:
                    self._read_trailers()
                return 0

            self.call = file.start(transfers)
        except OSError as exc:
            self._fail(Status.IO, code=exc.errno or 0)

    def stop(self, midway: bool = True) -> bool:
        """Does not begin any more; `midway`: nor go on after the transfer under way. Whether it has begun."""
        with self._lock:
            self._stopped = True
            self._midway |= midway
            return self._begun

    def settle(self, closed: Status) -> Status:
        """What became of it; `closed`: of what was stopped. PENDING: a load's bytes are there, for `compare`."""
        call = self.call
        if call is None or (call.returned() and not call.stalled):
            self._look_for_defect()
            return closed if self.status is Status.PENDING and not self._arrived else self.status
        if call.stalled:
            return Status.STALLED
        return Status.LOST if self.stop() else closed

    @property
    def running(self) -> bool:
        """Whether its call may still use the bay."""
        return self._begun and self.call is not None and not self.call.returned()

    def _look_for_defect(self) -> None:
        """What a thread of the backend's raised that is no failure of a transfer."""
        if self.call is None or not self.call.done() or self.call.lost:
            return
        try:
            self.call.get()
        except IOFault:  # given up; its status says so where it has not returned
            if self.status is Status.PENDING:
                self._fail(Status.IO, code=errno.ETIMEDOUT)
        except BaseException as exc:  # raised on a thread of the backend's: no interrupt of this one
            engine_reporter.failed("carrier", "a transfer ended by a defect", exc)
            self._fail(Status.IO, code=errno.EIO)

    def compare(self, sums: NDArray[np.uint64]) -> None:
        """The end of a load: whether its bytes are what its trailers promised. `sums`: [segments of the form]."""
        wrong = np.flatnonzero(sums != self.promised)
        if not len(wrong):
            self.status = Status.OK
            return
        segment, slot = self._plan.segments[int(wrong[0])], self._plan.slot
        begin = segment * slot.segment_stride
        nbytes = min(slot.segment_stride, slot.payload_stride - begin)
        self._fail(Status.BAD_SUM, segment, self._start + begin, nbytes, nbytes)

    def _moves(self, move: Callable[..., int], what: str, place: Window | NDArray[np.uint8], span: Span) -> bool:
        """One transfer; False where the chunk ends there."""
        if self._midway:
            return False
        offset, since = self._start + span.slot_offset, time.monotonic()
        try:
            moved = move(what, place, span.nbytes, offset)
        except IOFault as exc:
            self._fail(Status.IO, None, offset, span.nbytes, code=exc.errno or 0)
            return False
        finally:
            self.seconds += time.monotonic() - since
        if moved < span.nbytes:
            self._fail(Status.TRUNCATED, None, offset, span.nbytes, moved)
            return False
        return True

    def _read_trailers(self) -> None:
        slot = self._plan.slot
        fields, sums = _native.Trailer(), np.zeros(TRAILER_SUMS, np.uint64)
        for n, (page, places) in enumerate(zip(self._plan.pages, self._plan.places, strict=True)):
            at = self._pages.ctypes.data + n * slot.alignment
            parsed = _native.lib().kvx_trailer_parse(at, slot.alignment, C.byref(fields), sums.ctypes.data)
            if (status := self._verdict(fields, page) if parsed == Status.OK else Status.BAD_TRAILER) is not Status.OK:
                first, offset = page * slot.segments_per_trailer, slot.payload_stride + page * slot.alignment
                self._fail(status, first, self._start + offset, slot.alignment, slot.alignment)
                return
            held = np.array(self._plan.segments)[places] - page * slot.segments_per_trailer
            self.promised[places] = sums[held]
        self._arrived = True

    def _verdict(self, found: _native.Trailer, page: int) -> Status:
        """As trailer_verify and mask_covers in csrc/trailer.cpp."""
        wanted, slot = self._fields(), self._plan.slot
        for name in ("num_segments", "segment_bytes", "payload_bytes", "blocks_per_chunk"):
            if getattr(found, name) != getattr(wanted, name):
                return Status.BAD_TRAILER
        first = page * slot.segments_per_trailer
        count = min(slot.segments_per_trailer, slot.num_segments - first)
        if (found.first_segment, found.segment_count) != (first, count):
            return Status.FOREIGN
        who = Owner(bytes(found.namespace_digest), bytes(found.key)[: found.key_bytes], found.generation)
        if who != self._owner:
            return Status.FOREIGN
        held = np.unpackbits(np.frombuffer(bytes(found.mask), np.uint8), bitorder="little")
        return Status.OK if held[np.flatnonzero(self._block_ids != -1)].all() else Status.ABSENT

    def _fields(self) -> _native.Trailer:
        """All of a trailer page's fields but its segments."""
        slot, who = self._plan.slot, self._owner
        fields = _native.Trailer(
            key_bytes=len(who.key),
            num_segments=slot.num_segments,
            blocks_per_chunk=slot.blocks_per_chunk,
            generation=who.generation,
            payload_bytes=slot.payload_bytes,
            segment_bytes=slot.segment_bytes,
        )
        fields.namespace_digest[:] = who.digest
        fields.key[: len(who.key)] = who.key
        mask = np.zeros(256, np.uint8)
        mask[: len(self._block_ids)] = self._block_ids != -1
        fields.mask[:] = np.packbits(mask, bitorder="little").view(np.uint64).tolist()
        return fields

    def _fail(
        self,
        status: Status,
        segment: int | None = None,
        offset: int = 0,
        wanted: int = 0,
        moved: int = 0,
        code: int = 0,
    ) -> None:
        self.error = ChunkError(self.number, status, code, segment, offset, wanted, moved)
        self.status = status
