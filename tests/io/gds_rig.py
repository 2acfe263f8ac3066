"""A machine with a device and kvikio: doubles of both. "Device memory" is memory of this process."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import DeviceError, DeviceMemoryError
from kvxfer.staging import AlignedBuffer
from tests.kvikio_double import Kvikio


class FakeCuda:
    """`libcuda.Cuda` over allocations that it makes itself."""

    def __init__(self, kvikio: Kvikio) -> None:
        self._kvikio = kvikio
        self.made: dict[int, AlignedBuffer] = {}
        self.refuses = ""

    def alloc(self, nbytes: int) -> AlignedBuffer:
        """An allocation of its own, filled with what no test writes."""
        buffer = AlignedBuffer(nbytes)
        buffer.array[:] = 0xA5
        self.made[buffer.address] = buffer
        return buffer

    def enter(self, address: int) -> None:
        """See Cuda."""
        self.locate(address)
        self._kvikio.double.here.context = self

    def locate(self, address: int) -> tuple[int, int]:
        """See Cuda."""
        if self.refuses:
            raise DeviceError(self.refuses)
        for base, buffer in self.made.items():
            if base <= address < base + len(buffer):
                return base, len(buffer)
        raise DeviceError(f"cuPointerGetAttribute answers CUDA_ERROR_INVALID_VALUE (1) for {address:#x}")


class FakeMemory:
    """`ladder.DeviceMemory` of a FakeCuda."""

    def __init__(self, cuda: FakeCuda, most: int = 1 << 30) -> None:
        self.cuda, self.most = cuda, most
        self.hangs = threading.Event()
        self.hangs.set()
        self.freed = 0

    def alloc(self, nbytes: int) -> int:
        """See DeviceMemory."""
        if nbytes > self.most:
            raise DeviceMemoryError(f"{nbytes} bytes of {self.most}")
        return self.cuda.alloc(nbytes).address

    def fill(self, address: int, data: NDArray[np.uint8]) -> None:
        """See DeviceMemory."""
        self.hangs.wait(60)
        base, _ = self.cuda.locate(address)
        self.cuda.made[base].array[address - base :][: len(data)] = data

    def fetch(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """See DeviceMemory."""
        base, _ = self.cuda.locate(address)
        return self.cuda.made[base].array[address - base :][:nbytes].copy()

    def free(self, address: int) -> None:
        """See DeviceMemory."""
        self.freed += 1
        del self.cuda.made[address]
