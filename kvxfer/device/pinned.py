"""Host memory pinned by libkvx_cuda: ordinary pages that a device is told of, piece by piece, and no byte more.

torch's allocator rounds pinned memory up, to a power of two in some versions, and pins all of it in one call.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from kvxfer import _cuda
from kvxfer.errors import DeviceError, NativeError
from kvxfer.probe import Probe
from kvxfer.report import engine_reporter
from kvxfer.staging import private_memory

__all__ = ["PinnedMemory", "pinning_on"]


class PinnedMemory:
    """`array`: `nbytes` of host memory, aligned, which the device reaches under its own addresses.

    A piece is pinned by itself: whether one copy may have bytes of two is for no documentation to say, so none should.

    Raises:
        DeviceError: it cannot be pinned, or the device would reach it under other addresses.
        MemoryError: there is not as much.
    """

    def __init__(
        self,
        cuda: _cuda.CudaRuntime,
        device: int,
        nbytes: int,
        alignment: int = mmap.PAGESIZE,
        piece_bytes: int = _cuda.PIECE_BYTES,
    ) -> None:
        self.piece_bytes = piece_bytes
        slack = 0 if alignment <= mmap.PAGESIZE else alignment
        try:
            memory = private_memory(nbytes + slack)  # a child's copy would part this process's pages from the pinned
        except OSError as exc:
            raise MemoryError(f"{nbytes} bytes of host memory: {exc}") from exc
        whole = np.frombuffer(memory, np.uint8)
        start = -int(whole.ctypes.data) % alignment
        self.array = whole[start : start + nbytes]
        cuda.set_device(device)
        pinned = _cuda.Registration(cuda, int(self.array.ctypes.data), nbytes, piece_bytes)
        if not pinned.pinned:
            raise DeviceError(pinned.why)
        # Before the memory goes, whoever forgets it. Not at exit: the process's end unpins it, the driver may hang.
        self._release = weakref.finalize(self, _unpin, pinned, cuda, device, os.getpid(), memory)
        self._release.atexit = False

    def free(self) -> None:
        """Not while anything uses it. Twice is fine."""
        self._release()


def _unpin(pinned: _cuda.Registration, cuda: _cuda.CudaRuntime, device: int, pid: int, memory: mmap.mmap) -> None:
    """`memory` is here so that it goes after this."""
    if os.getpid() == pid:  # of a fork's child nothing is pinned
        with suppress(DeviceError):  # of a device that was lost
            cuda.set_device(device)
            pinned.release()


def pinning_on(device: int) -> Callable[[int, int], PinnedMemory | None] | None:
    """What pins (bytes, alignment) for a device, which has answered, or says why it can't and returns None.

    None: there is no libkvx_cuda that can be used.
    """
    if not _cuda.available(Probe(True, "torch has one")).ok:
        return None
    try:
        cuda = _cuda.load(_cuda.library_path())
    except NativeError:  # `available` has loaded it
        return None
    return partial(_pinned, cuda, device)


def _pinned(cuda: _cuda.CudaRuntime, device: int, nbytes: int, alignment: int) -> PinnedMemory | None:
    try:
        return PinnedMemory(cuda, device, nbytes, alignment)
    except DeviceError as exc:  # torch's allocator is asked next, and says why where it can't either
        engine_reporter.warn("pinning", f"{nbytes} bytes could not be pinned in place: {exc}")
        return None
