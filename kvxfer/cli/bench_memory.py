"""Memory that requests move: the host's, or a device's, cut into slots."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.device.base import Buffer, Device, Event, Stream
from kvxfer.staging import AlignedBuffer

STEP_BYTES = 16 << 20  # that the host holds of a device's memory at a time
_POISON = 0xA5
_PAUSE_S = 20e-6
_STREAMS = 16

U8 = NDArray[np.uint8]


class Memory(ABC):
    """`nbytes` of it. What a file takes is a `place`; the bench itself puts bytes in and gets them out, untimed."""

    kind: str  # host | device
    nbytes: int

    @abstractmethod
    def place(self, offset: int, nbytes: int) -> Any:
        """What a file's read and write take for these bytes."""

    @abstractmethod
    def put(self, offset: int, data: U8) -> None:
        """Bytes of the host into it."""

    @abstractmethod
    def get(self, offset: int, nbytes: int) -> U8:
        """At most STEP_BYTES, or one slot, as the host sees them; until the next `get`."""

    def window(self, offset: int, nbytes: int) -> U8:
        """Host memory to make content in, which `put` then takes: at most STEP_BYTES."""
        return np.empty(nbytes, dtype=np.uint8)

    def poison(self, offset: int, nbytes: int) -> None:
        """Writes over what a read must bring."""
        bad = np.full(min(nbytes, STEP_BYTES), _POISON, dtype=np.uint8)
        for start in range(0, nbytes, STEP_BYTES):
            self.put(offset + start, bad[: min(STEP_BYTES, nbytes - start)])

    @abstractmethod
    def close(self) -> None:
        """Nothing uses it any more."""


class HostMemory(Memory):
    """Aligned anonymous memory."""

    kind = "host"

    def __init__(self, nbytes: int, alignment: int) -> None:
        self.nbytes = nbytes
        self._buffer = AlignedBuffer(nbytes, alignment)

    def place(self, offset: int, nbytes: int) -> U8:
        """A view."""
        return self._buffer.array[offset : offset + nbytes]

    def put(self, offset: int, data: U8) -> None:
        """See Memory."""
        if (there := self.place(offset, len(data))).ctypes.data != data.ctypes.data:
            there[:] = data

    def get(self, offset: int, nbytes: int) -> U8:
        """A view."""
        return self.place(offset, nbytes)

    def window(self, offset: int, nbytes: int) -> U8:
        """The place itself."""
        return self.place(offset, nbytes)

    def poison(self, offset: int, nbytes: int) -> None:
        """See Memory."""
        self.place(offset, nbytes).fill(_POISON)

    def close(self) -> None:
        """Its views may live on."""


class DeviceMemory(Memory):
    """A device's. `wrap` makes what the drive's library takes of (address, bytes)."""

    kind = "device"

    def __init__(self, device: Device, nbytes: int, alignment: int, wrap: Callable[[int, int], Any], step: int) -> None:
        """`step`: the most that one `get` asks for. DeviceMemoryError where there is not as much."""
        self.nbytes = nbytes
        self._device, self._wrap = device, wrap
        self.buffer: Buffer = device.device_buffer(nbytes, alignment)
        self._host: Buffer = device.host_buffer(max(step, STEP_BYTES), alignment)
        self._stream = device.stream()

    def place(self, offset: int, nbytes: int) -> Any:
        """What `wrap` makes."""
        return self._wrap(self.buffer.address + offset, nbytes)

    def put(self, offset: int, data: U8) -> None:
        """See Memory."""
        self._host.host()[: len(data)] = data
        self._device.copy(self._stream, self.buffer, offset, self._host, 0, len(data))
        settle(self._device.record(self._stream))

    def get(self, offset: int, nbytes: int) -> U8:
        """See Memory."""
        self._device.copy(self._stream, self._host, 0, self.buffer, offset, nbytes)
        settle(self._device.record(self._stream))
        return self._host.host()[:nbytes]

    def close(self) -> None:
        """Frees it."""
        self.buffer.free()
        self._host.free()


class Bounce:
    """A slot of a device's memory that a drive reaches through one of the host's. One request at a time uses it."""

    def __init__(self, device: Device, stream: Stream, buffer: Buffer, offset: int, host: Buffer, nbytes: int) -> None:
        self._device, self._stream = device, stream
        self._buffer, self._offset, self._host = buffer, offset, host
        self.nbytes = nbytes
        self.array = host.host()[offset : offset + nbytes]

    def push(self, nbytes: int) -> None:
        """From the host to the device, waited for."""
        self._copy(self._buffer, self._host, nbytes)

    def pull(self, nbytes: int) -> None:
        """From the device to the host, waited for."""
        self._copy(self._host, self._buffer, nbytes)

    def _copy(self, target: Buffer, source: Buffer, nbytes: int) -> None:
        if nbytes:
            self._device.copy(self._stream, target, self._offset, source, self._offset, nbytes)
            settle(self._device.record(self._stream))


class BouncedMemory(DeviceMemory):
    """A device's, for files that move the host's: each slot has pinned host memory beside it."""

    def __init__(self, device: Device, nbytes: int, alignment: int, step: int) -> None:
        super().__init__(device, nbytes, alignment, lambda *_: None, step)
        self._beside: Buffer = device.host_buffer(nbytes, alignment)
        self._streams = [device.stream() for _ in range(_STREAMS)]

    def place(self, offset: int, nbytes: int) -> Bounce:
        """See Bounce."""
        stream = self._streams[offset // nbytes % _STREAMS]
        return Bounce(self._device, stream, self.buffer, offset, self._beside, nbytes)

    def close(self) -> None:
        """Frees both."""
        super().close()
        self._beside.free()


def settle(event: Event) -> None:
    """Waits for it."""
    while not event.done():
        time.sleep(_PAUSE_S)
