"""A simulated accelerator: memory is numpy's, and work on streams happens late, in any order that is allowed.

Work is queued by calls and done while somebody asks an event whether it is done: then a few steps are taken, of streams
that a seeded generator chooses among those whose next piece waits for nothing. So a wait that was forgotten, or a
buffer that is used again too early, gives wrong bytes. What cannot be (block ids that are no blocks, memory that was
freed) is noted in `defects`, which should be empty after a test.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.checksum import segment_checksum
from kvxfer.convert import native
from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Buffer, Device, Event, Stream
from kvxfer.errors import DeviceError, DeviceMemoryError, LayoutError
from kvxfer.mapping import CanonicalMapping
from kvxfer.testing.call_faults import CallFaults, CallRule

FRESH, FREED = 0xDB, 0xDF  # what memory is full of before it was written, and after it was freed


class _Stream(Stream):
    def __init__(self, name: str) -> None:
        self.name = name
        self.pieces: deque[tuple[_Event | None, Callable[[], None] | None]] = (
            deque()
        )  # (what it waits for, what it does)


class _Event(Event):
    def __init__(self, device: FakeDevice, number: int) -> None:
        self._device, self.number = device, number
        self.happened = False

    def done(self) -> bool:
        """Takes a few steps, then says."""
        return self._device._ask(self)


class _Buffer(Buffer):
    def __init__(
        self, device: FakeDevice, number: int, nbytes: int, alignment: int, on_device: bool, pinned: bool
    ) -> None:
        memory = np.full(nbytes + alignment, FRESH, dtype=np.uint8)
        start = -memory.ctypes.data % alignment
        self.bytes = memory[start : start + nbytes]
        self.address, self.nbytes, self.on_device = int(self.bytes.ctypes.data), nbytes, on_device
        self.pinned, self.why = pinned and not on_device, "" if pinned or on_device else "told not to"
        self._device, self.number = device, number
        self.users = 0  # pieces of work queued that touch it
        self.freed = False

    def host(self) -> NDArray[np.uint8]:
        """[nbytes], the very memory."""
        if self.on_device:
            raise LayoutError("this is the device's memory")
        return self.bytes

    def free(self) -> None:
        """Fills it with FREED."""
        self._device._free(self)


class FakeDevice(Device):
    """See the module. Thread-safe.

    Args:
        seed: of the order in which streams go on.
        memory_bytes, host_bytes: as much can be had.
        most_steps: pieces of work done at one question, at most.
        pins: whether host memory is pinned.

    Attributes:
        calls: every call so far, as (name, what it was about ...): ("wait", stream, event), ("record", stream, event),
            ("mark", event), ("copy", stream, target, source, nbytes), ("gather" | "scatter", stream, buffer, chunks),
            and others. Streams are names, events and buffers numbers.
        faults: makes calls fail.
        defects: what must not have happened.
        lost: every call raises, and no work is done.
        frozen: no work is done: a device that does not answer.
        stuck: names of streams on which none is done.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        memory_bytes: int = 1 << 30,
        host_bytes: int = 1 << 30,
        most_steps: int = 4,
        pins: bool = True,
    ) -> None:
        self.name, self.label = "Fake", "fake:0"
        self.calls: list[tuple[Any, ...]] = []
        self.faults = CallFaults()
        self.defects: list[str] = []
        self.lost = self.frozen = False
        self.stuck: set[str] = set()
        self.allocated = {True: 0, False: 0}  # bytes, by whether they are the device's
        self._most_steps, self._pins = most_steps, pins
        self._limits = {True: memory_bytes, False: host_bytes}
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._numbers: Counter[str] = Counter()
        self._compute = _Stream("compute")
        self._streams = [self._compute]

    # ---- for tests -------------------------------------------------------------------------------------------------

    def launch(self, work: Callable[[], None]) -> None:
        """Queue work on the stream of the computation, the one that `mark` marks."""
        with self._lock:
            self._compute.pieces.append((None, work))

    def run(self) -> None:
        """Do all that is queued and can be done."""
        with self._lock:
            while self._step():
                pass

    @property
    def queued(self) -> int:
        """Pieces of work that are not done."""
        with self._lock:
            return sum(len(stream.pieces) for stream in self._streams)

    # ---- a device's face -------------------------------------------------------------------------------------------

    def mark(self) -> Event:
        """Recorded on the stream of the computation."""
        with self._call("mark"):
            event = self._record(self._compute)
            self.calls.append(("mark", event.number))
            return event

    def stream(self) -> Stream:
        """A new stream."""
        with self._call("stream"):
            stream = _Stream(f"stream {self._number('stream')}")
            self._streams.append(stream)
            self.calls.append(("stream", stream.name))
            return stream

    def record(self, stream: Stream) -> Event:
        """A new event."""
        with self._call("record"):
            mine = _stream(stream)
            event = self._record(mine)
            self.calls.append(("record", mine.name, event.number))
            return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Queued like work."""
        with self._call("wait"):
            mine = _stream(stream)
            assert isinstance(event, _Event)
            mine.pieces.append((event, None))
            self.calls.append(("wait", mine.name, event.number))

    def device_buffer(self, nbytes: int, alignment: int = 4096) -> Buffer:
        """Full of FRESH, as new memory is not of zeros."""
        return self._buffer("device_buffer", nbytes, alignment, True)

    def host_buffer(self, nbytes: int, alignment: int = 4096) -> Buffer:
        """The same."""
        return self._buffer("host_buffer", nbytes, alignment, False)

    def copy(
        self, stream: Stream, target: Buffer, target_offset: int, source: Buffer, source_offset: int, nbytes: int
    ) -> None:
        """Queued."""
        with self._call("copy"):
            to, of = self._usable(target, target_offset + nbytes), self._usable(source, source_offset + nbytes)

            def work() -> None:
                of_bytes = of.bytes[source_offset : source_offset + nbytes]
                to.bytes[target_offset : target_offset + nbytes] = of_bytes

            self._queue(stream, work, to, of)
            self.calls.append(("copy", _stream(stream).name, to.number, of.number, nbytes))

    def gather(
        self,
        stream: Stream,
        pages: KVPages,
        mapping: CanonicalMapping,
        block_ids: Buffer,
        chunks: int,
        out: Buffer,
        out_stride: int,
        sums: Buffer | None = None,
    ) -> None:
        """Queued; block ids are read when it is its turn."""
        with self._call("gather"):
            ids, to = self._ids(mapping, block_ids, chunks), self._chunks(mapping, out, chunks, out_stride)
            into = None if sums is None else self._sums(mapping, sums, chunks)
            work = lambda: native.gather(pages, ids(), mapping, to, into)  # noqa: E731
            self._queue(stream, work, block_ids, out, *(() if sums is None else (sums,)))
            self.calls.append(("gather", _stream(stream).name, _buffer(out).number, chunks))

    def scatter(
        self,
        stream: Stream,
        pages: KVPages,
        mapping: CanonicalMapping,
        block_ids: Buffer,
        chunks: int,
        source: Buffer,
        source_stride: int,
        sums: Buffer | None = None,
    ) -> None:
        """Queued; the same."""
        with self._call("scatter"):
            ids, of = self._ids(mapping, block_ids, chunks), self._chunks(mapping, source, chunks, source_stride)
            into = None if sums is None else self._sums(mapping, sums, chunks)
            work = lambda: native.scatter(of, ids(), mapping, pages, into)  # noqa: E731
            self._queue(stream, work, block_ids, source, *(() if sums is None else (sums,)))
            self.calls.append(("scatter", _stream(stream).name, _buffer(source).number, chunks))

    def checksum(
        self,
        stream: Stream,
        mapping: CanonicalMapping,
        chunks: int,
        source: Buffer,
        source_stride: int,
        sums: Buffer,
    ) -> None:
        """Queued."""
        with self._call("checksum"):
            of, into = self._chunks(mapping, source, chunks, source_stride), self._sums(mapping, sums, chunks)

            def work() -> None:
                slot = mapping.slot
                for chunk in range(chunks):
                    for segment in mapping.segments:
                        start = segment * slot.segment_stride
                        payload = of[chunk, start : start + slot.segment_length(segment)]
                        into[chunk, segment] = segment_checksum(payload)

            self._queue(stream, work, source, sums)
            self.calls.append(("checksum", _stream(stream).name, _buffer(source).number, chunks))

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _call(self, op: str) -> AbstractContextManager[Any]:
        """Meets what was asked of a call, before the lock that it is made under."""
        if self.faults.meet(op):
            self.lost = True
        if self.lost:
            raise DeviceError("the device was lost")
        return self._lock

    def _number(self, kind: str) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    def _buffer(self, op: str, nbytes: int, alignment: int, on_device: bool) -> Buffer:
        with self._call(op):
            if self.allocated[on_device] + nbytes > self._limits[on_device]:
                what = f"{nbytes} bytes, {self._limits[on_device] - self.allocated[on_device]} are left"
                raise DeviceMemoryError(what) if on_device else MemoryError(what)
            self.allocated[on_device] += nbytes
            buffer = _Buffer(self, self._number("buffer"), nbytes, alignment, on_device, self._pins)
            self.calls.append((op, buffer.number, nbytes))
            return buffer

    def _free(self, buffer: _Buffer) -> None:
        with self._lock:
            if buffer.freed:
                return
            if buffer.users:
                self.defects.append(f"buffer {buffer.number} was freed under work that uses it")
            buffer.freed = True
            buffer.bytes[:] = FREED
            self.allocated[buffer.on_device] -= buffer.nbytes
            self.calls.append(("free", buffer.number))

    def _usable(self, buffer: Buffer, end: int) -> _Buffer:
        mine = _buffer(buffer)
        if mine.freed:
            self.defects.append(f"buffer {mine.number} was used after it was freed")
        if end > mine.nbytes:
            self.defects.append(f"byte {end} of buffer {mine.number} was used, which has {mine.nbytes}")
        if mine.freed or end > mine.nbytes:
            raise DeviceError(self.defects[-1])
        return mine

    def _ids(self, mapping: CanonicalMapping, buffer: Buffer, chunks: int) -> Callable[[], NDArray[np.int64]]:
        """Block ids, read when it is their turn."""
        nbytes = chunks * mapping.blocks_per_chunk * 8
        raw = self._usable(buffer, nbytes).bytes[:nbytes]
        return lambda: raw.view(np.int64).reshape(chunks, -1).copy()

    def _chunks(self, mapping: CanonicalMapping, buffer: Buffer, chunks: int, stride: int) -> NDArray[np.uint8]:
        width = mapping.slot.payload_stride
        mine = self._usable(buffer, (chunks - 1) * stride + width)
        if not (mine.on_device or mine.pinned):
            self.defects.append(f"a kernel was given buffer {mine.number}, which is not pinned")
            raise DeviceError(self.defects[-1])
        raw = mine.bytes
        return np.lib.stride_tricks.as_strided(raw, (chunks, width), (stride, 1))

    def _sums(self, mapping: CanonicalMapping, buffer: Buffer, chunks: int) -> NDArray[np.uint64]:
        nbytes = chunks * mapping.slot.num_segments * 8
        return self._usable(buffer, nbytes).bytes[:nbytes].view(np.uint64).reshape(chunks, -1)

    def _queue(self, stream: Stream, work: Callable[[], None], *buffers: Buffer) -> None:
        used = [_buffer(buffer) for buffer in buffers]
        for buffer in used:
            buffer.users += 1

        def piece() -> None:
            for buffer in used:
                buffer.users -= 1
            work()

        _stream(stream).pieces.append((None, piece))

    def _record(self, stream: _Stream) -> _Event:
        event = _Event(self, self._number("event"))

        def piece() -> None:
            event.happened = True

        stream.pieces.append((None, piece))
        return event

    def _ask(self, event: _Event) -> bool:
        with self._call("done"):
            for _ in range(self._random.randrange(self._most_steps + 1)):
                self._step()
            if self.lost:
                raise DeviceError("the device was lost")
            return event.happened

    def _step(self) -> bool:
        """The next piece of one stream, if any can go on."""
        going = [each for each in self._streams if each.pieces and each.name not in self.stuck]
        ready = [each for each in going if not (on := each.pieces[0][0]) or on.happened]
        if not ready or self.lost or self.frozen:
            return False
        _, work = self._random.choice(ready).pieces.popleft()
        try:
            if work is not None:
                work()
        except LayoutError as exc:  # it would have touched what is nobody's
            self.defects.append(str(exc))
            self.lost = True
        return True


def _stream(stream: Stream) -> _Stream:
    assert isinstance(stream, _Stream)
    return stream


def _buffer(buffer: Buffer) -> _Buffer:
    assert isinstance(buffer, _Buffer)
    return buffer


__all__ = ["FREED", "FRESH", "CallRule", "FakeDevice"]
