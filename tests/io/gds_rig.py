"""A machine with a device and kvikio: doubles of both. "Device memory" is memory of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.errors import DeviceError, DeviceMemoryError
from kvxfer.io.gds import DIRECT, GdsBackend, Window
from kvxfer.staging import AlignedBuffer
from tests.kvikio_double import Kvikio

KIB = 1 << 10


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


class Machine:
    """Backends over one FakeCuda, and a file."""

    def __init__(self, kvikio: Kvikio, folder: Path) -> None:
        self.kvikio, self.cuda, self.path = kvikio, FakeCuda(kvikio), folder / "slab-0"
        self.backends: list[GdsBackend] = []

    def backend(self, mode: str = DIRECT, **options: Any) -> GdsBackend:
        self.backends.append(GdsBackend(mode, cuda=self.cuda, **options))
        return self.backends[-1]

    def device(self, data: Any) -> Window:
        """New device memory that holds this, on an allocation of its own."""
        buffer = self.cuda.alloc(len(data))
        buffer.array[:] = data
        return Window(buffer.address, len(data))

    def bytes_at(self, window: Window) -> np.ndarray:
        base, _ = self.cuda.locate(window.address)
        return self.cuda.made[base].array[window.address - base :][: window.nbytes]

    def requests(self, name: str) -> list[tuple[Any, ...]]:
        """(size, file_offset, dev_offset, straight) of each."""
        return [call[1:] for call in self.kvikio.double.calls if call[0] == name]


@pytest.fixture
def machine(kvikio: Kvikio, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(kvikio, tmp_path)
    yield made
    for backend in made.backends:
        backend.close()


def random(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=n, dtype=np.uint8)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.002)
