"""Memory that requests move: the host's, or a device's, cut into slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.cli.bench_content import PAGE
from kvxfer.io import ladder
from kvxfer.staging import AlignedBuffer

STEP_BYTES = 16 << 20  # that the host holds of a device's memory at a time
_POISON = 0xA5

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


class Allocator(ladder.DeviceMemory, Protocol):
    """A device's memory, as CudaMemory has it. Every call waits for it; calls come from many threads at once."""

    def fetch_into(self, address: int, data: U8) -> None:
        """As `fetch`, to where the host wants it."""

    def pin(self, data: U8) -> str:
        """Makes host memory fast to copy from and to; why not, where it cannot."""

    def unpin(self, data: U8) -> None:
        """Undoes it."""

    def bus(self) -> str:
        """Where the device is, of PCI: "0000:3B:00.0"."""


class DeviceMemory(Memory):
    """A device's. `wrap` makes what the drive's library takes of (address, bytes).

    `let_go` is asked, with the address, before the memory is freed: whether nothing holds it any more.
    """

    kind = "device"

    def __init__(
        self,
        allocator: Allocator,
        nbytes: int,
        wrap: Callable[[int, int], Any],
        let_go: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Raises DeviceMemoryError where there is not as much."""
        self.nbytes = nbytes
        self._allocator, self._wrap, self._let_go = allocator, wrap, let_go
        self._whole = allocator.alloc(nbytes + PAGE)
        self.address = self._whole + -self._whole % PAGE

    def place(self, offset: int, nbytes: int) -> Any:
        """What `wrap` makes."""
        return self._wrap(self.address + offset, nbytes)

    def put(self, offset: int, data: U8) -> None:
        """See Memory."""
        self._allocator.fill(self.address + offset, data)

    def get(self, offset: int, nbytes: int) -> U8:
        """See Memory."""
        return self._allocator.fetch(self.address + offset, nbytes)

    def close(self) -> None:
        """Frees it, unless it is held."""
        if self._let_go(self.address):
            self._allocator.free(self._whole)


class Bounce:
    """A slot of a device's memory that a drive reaches through one of the host's."""

    def __init__(self, allocator: Allocator, address: int, host: U8) -> None:
        self._allocator, self._address, self.host = allocator, address, host

    def push(self, nbytes: int) -> None:
        """From the host to the device."""
        if nbytes:
            self._allocator.fill(self._address, self.host[:nbytes])

    def pull(self, nbytes: int) -> None:
        """From the device to the host."""
        if nbytes:
            self._allocator.fetch_into(self._address, self.host[:nbytes])


class BouncedMemory(DeviceMemory):
    """A device's, for files that move the host's: each slot has pinned memory beside it."""

    def __init__(self, allocator: Allocator, nbytes: int, alignment: int) -> None:
        super().__init__(allocator, nbytes, lambda *_: None)
        self._beside = AlignedBuffer(nbytes, alignment).array
        self.unpinned = allocator.pin(self._beside)  # why, where it is not

    def place(self, offset: int, nbytes: int) -> Bounce:
        """See Bounce."""
        return Bounce(self._allocator, self.address + offset, self._beside[offset : offset + nbytes])

    def poison(self, offset: int, nbytes: int) -> None:
        """Both: what a read does not bring must not come from the host's either, where it lies since it was written."""
        super().poison(offset, nbytes)
        self._beside[offset : offset + nbytes] = _POISON

    def close(self) -> None:
        """Frees both."""
        if not self.unpinned:
            self._allocator.unpin(self._beside)
        super().close()
