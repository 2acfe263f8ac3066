"""A double of `_cuda.CudaRuntime` in Python, for what is above it: one device whose memory is the host's."""

from __future__ import annotations

import ctypes as C
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer import _cuda
from kvxfer.errors import DeviceError


class FakeCuda:
    """Copies happen at once. Every call is noted; `fail[name]` is raised by the call of that name, once."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Exception] = {}
        self.how = "batch"  # what copy_batch says that it did
        self.registered: dict[int, int] = {}
        self.streams: set[int] = set()
        self._memory: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def _enter(self, *call: Any) -> None:
        self.calls.append(call)
        if error := self.fail.pop(call[0], None):
            raise error

    def versions(self) -> tuple[str, str]:
        self._enter("versions")
        return "13.0", "13.0"

    def device_count(self) -> int:
        self._enter("device_count")
        return 1

    def set_device(self, device: int) -> None:
        self._enter("set_device", device)

    def describe(self, device: int) -> _cuda.Description:
        self._enter("describe", device)
        return _cuda.Description("Fake H200", "GPU-00000000-0000-0000-0000-000000000000", 141 << 30, 132, 3)

    def stream_new(self) -> int:
        self._enter("stream_new")
        self.streams.add(stream := next(self._numbers))
        return stream

    def stream_done(self, stream: int) -> bool:
        self._enter("stream_done", stream)
        return True

    def stream_wait(self, stream: int) -> None:
        self._enter("stream_wait", stream)

    def stream_free(self, stream: int) -> None:
        self._enter("stream_free", stream)
        self.streams.discard(stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._enter("copy", target, source, nbytes, stream)
        C.memmove(target, source, nbytes)

    def copy_batch(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
    ) -> str:
        self._enter("copy_batch", len(targets), stream)
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            C.memmove(target, source, size)
        return self.how if len(targets) else "nothing"

    def register(self, address: int, nbytes: int, piece_bytes: int = _cuda.PIECE_BYTES) -> None:
        self._enter("register", address, nbytes, piece_bytes)
        if address in self.registered:
            raise DeviceError("cudaErrorHostMemoryAlreadyRegistered (712)")
        self.registered[address] = nbytes

    def unregister(self, address: int, nbytes: int, piece_bytes: int = _cuda.PIECE_BYTES) -> None:
        self._enter("unregister", address, nbytes, piece_bytes)
        if self.registered.pop(address, None) != nbytes:
            raise DeviceError("cudaErrorHostMemoryNotRegistered (713)")

    def host_alloc(self, nbytes: int) -> int:
        self._enter("host_alloc", nbytes)
        memory = C.create_string_buffer(max(nbytes, 1))
        self._memory[C.addressof(memory)] = memory
        return C.addressof(memory)

    def host_free(self, address: int) -> None:
        self._enter("host_free", address)
        if address:
            del self._memory[address]

    def where(self, address: int) -> _cuda.Where:
        self._enter("where", address)
        pinned = address in self._memory or any(at <= address < at + n for at, n in self.registered.items())
        return _cuda.Where("pinned", 0, address) if pinned else _cuda.Where("pageable", 0, 0)
