"""Aligned private memory for direct I/O: probes, slab headers, scans. (Jobs have their own, in csrc.)"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ConfigError


class AlignedBuffer:
    """`nbytes` of zeroed anonymous memory that starts at a multiple of `alignment`.

    The memory goes when the buffer and every view of it have gone.

    Raises:
        ConfigError: no bytes, or an alignment that is no power of two.
    """

    __slots__ = ("alignment", "array")

    array: npt.NDArray[np.uint8]  # [nbytes]

    def __init__(self, nbytes: int, alignment: int = mmap.PAGESIZE) -> None:
        if nbytes < 1 or alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"a buffer of {nbytes} bytes aligned to {alignment}: want bytes, and a power of two")
        self.alignment = alignment
        slack = 0 if alignment <= mmap.PAGESIZE else alignment
        whole = np.frombuffer(mmap.mmap(-1, nbytes + slack), dtype=np.uint8)
        start = -int(whole.ctypes.data) % alignment
        self.array = whole[start : start + nbytes]

    @property
    def address(self) -> int:
        """Where it starts."""
        return int(self.array.ctypes.data)

    def __len__(self) -> int:
        return int(self.array.nbytes)
