"""Aligned private memory for direct I/O: probes, slab headers, scans. (Jobs have their own, in csrc.)

None of it is shared with the child of a fork. A page that is would be copied at this process's next write to it, and
a transfer under way would go on with the page that the child has. The child has zeros in its place (MADV_WIPEONFORK),
and not nothing (MADV_DONTFORK): its copies of these objects go, and would take along what it has mapped there since.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ConfigError

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, Linux 4.14; Python has no name for it


def private_memory(nbytes: int) -> mmap.mmap:
    """Zeroed anonymous pages that are this process's alone.

    Raises:
        OSError: there are not as many.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_WIPE_ON_FORK)
    except OSError:  # an older kernel: this process's bytes come before a child's life
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


class AlignedBuffer:
    """`nbytes` of zeroed private memory that starts at a multiple of `alignment`. A fork's child has zeros in its copy.

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
        whole = np.frombuffer(private_memory(nbytes + slack), dtype=np.uint8)
        start = -int(whole.ctypes.data) % alignment
        self.array = whole[start : start + nbytes]

    @property
    def address(self) -> int:
        """Where it starts."""
        return int(self.array.ctypes.data)

    def __len__(self) -> int:
        return int(self.array.nbytes)
