"""What was moved, compared: with the content it must have, or, of files that are only read, with a first reading."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.cli.bench_content import PAGE, UNKNOWN, Content
from kvxfer.cli.bench_lanes import READ, WRITE, Burst
from kvxfer.cli.bench_memory import STEP_BYTES, Memory
from kvxfer.cli.bench_ways import Opened
from kvxfer.errors import IOFault
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import sys_open
from kvxfer.staging import AlignedBuffer

Mask = NDArray[np.bool_]
PageWork = Callable[[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]], None]


class Checker(ABC):
    """Knows what files hold. Its work is between the timed parts."""

    said: str  # how it was verified, for people

    def begin(self, size: int) -> None:  # noqa: B027 - most have nothing to prepare
        """Requests of `size` bytes follow."""

    def readable(self, file: NDArray[np.int64], offset: NDArray[np.int64], size: int) -> Mask:
        """Of which requests it is known what a read must bring."""
        return np.ones(len(file), dtype=bool)

    def prepare(self, burst: Burst, memory: Memory) -> None:
        """Puts what is to be written into the slots of writes, and writes over the others."""
        for start, count in _runs(burst.op == READ):
            memory.poison(start * burst.nbytes, count * burst.nbytes)

    def settle(self, burst: Burst) -> None:  # noqa: B027 - nor to keep
        """The burst was made: takes in what its writes changed."""

    @abstractmethod
    def wrong(self, burst: Burst, memory: Memory, of: Mask) -> list[str]:
        """What is wrong in the slots of these requests: one text for each such request."""


class Made(Checker):
    """Files that the bench filled: every byte is compared with what it must be, of a write after reading it back."""

    def __init__(self, content: Content, file_bytes: list[int], mode: str) -> None:
        self.content = content
        self._versions = [np.zeros(nbytes // PAGE, dtype=np.uint32) for nbytes in file_bytes]
        self._next: dict[int, NDArray[np.uint32]] = {}  # slot of a write: the versions that it brings
        self._lost = 0  # the highest version of a write that was made: pages that nobody knows go on from there
        back = "read back through the page cache" if mode == "buffered" else "read back"
        self.said = (
            f"outside the timing, every byte that was read or written (and {back}) compared with content made from "
            "(seed, file, page, version)"
        )

    def fill(self, files: list[Opened], memory: Memory, step: int) -> None:
        """Gives the files their first content.

        Args:
            step: bytes of a write.

        Raises:
            IOFault: it cannot be written.
        """
        for index, (file, versions) in enumerate(zip(files, self._versions, strict=True)):
            whole = len(versions) * PAGE
            for offset in range(0, whole, step):
                nbytes = min(step, whole - offset)
                pages = np.arange(offset // PAGE, (offset + nbytes) // PAGE)
                for start in range(0, nbytes, STEP_BYTES):
                    part = pages[start // PAGE : (start + STEP_BYTES) // PAGE]
                    self._put(memory, start, np.full(len(part), index), part, versions[part])
                if (moved := file.write(memory.place(0, nbytes), nbytes, offset)) != nbytes:
                    raise IOFault(errno.EIO, f"{moved} of {nbytes} bytes were written at {offset:#x}")

    def readable(self, file: NDArray[np.int64], offset: NDArray[np.int64], size: int) -> Mask:
        """See Checker."""
        known = [
            bool((self._versions[f][o // PAGE : (o + size) // PAGE] != UNKNOWN).all())
            for f, o in zip(file.tolist(), offset.tolist(), strict=True)
        ]
        return np.array(known, dtype=bool)

    def prepare(self, burst: Burst, memory: Memory) -> None:
        """See Checker: a write brings every page's next version."""
        super().prepare(burst, memory)
        self._next = {}
        for start, count in _runs(burst.op == WRITE):
            for slot in range(start, start + count):
                file, first = int(burst.file[slot]), int(burst.offset[slot]) // PAGE
                pages = slice(first, first + burst.nbytes // PAGE)
                known = self._versions[file][pages]
                self._next[slot] = (np.where(known == UNKNOWN, self._lost, known) + 1).astype(np.uint32)
            self._each_step(burst, start, count, partial(self._put, memory))

    def settle(self, burst: Burst) -> None:
        """See Checker: pages under a write that failed hold what nobody knows."""
        made, done = burst.made, burst.done
        for slot, version in self._next.items():
            if made[slot]:
                first = int(burst.offset[slot]) // PAGE
                self._lost = max(self._lost, int(version.max()))
                self._versions[int(burst.file[slot])][first : first + len(version)] = version if done[slot] else UNKNOWN
        self._next = {}

    def wrong(self, burst: Burst, memory: Memory, of: Mask) -> list[str]:
        """See Checker."""
        found: dict[int, str] = {}

        def check(at: int, file: NDArray[np.int64], page: NDArray[np.int64], version: NDArray[np.uint32]) -> None:
            stamps = self.content.stamps(file, page, version)
            got = memory.get(at, len(page) * PAGE)
            for each in self.content.wrong_pages(got, stamps).tolist():
                first, count = self.content.first_wrong(got[each * PAGE : (each + 1) * PAGE], stamps[each : each + 1])
                slot = (at + each * PAGE) // burst.nbytes
                text = f"file {file[each]} offset {int(page[each]) * PAGE + first:#x}: {count} bytes of the page differ"
                found.setdefault(slot, text)

        for start, count in _runs(of):
            self._each_step(burst, start, count, check)
        return list(found.values())

    def _put(
        self,
        memory: Memory,
        at: int,
        file: NDArray[np.int64],
        page: NDArray[np.int64],
        version: NDArray[np.uint32],
    ) -> None:
        window = memory.window(at, len(page) * PAGE)
        self.content.fill(window, self.content.stamps(file, page, version))
        memory.put(at, window)

    def _each_step(self, burst: Burst, start: int, count: int, work: PageWork) -> None:
        """Calls `work(first byte, file, page, version of each page)` for slots start to start + count, in steps."""
        pages = burst.nbytes // PAGE
        slots = np.repeat(np.arange(start, start + count), pages)
        file = burst.file[slots]
        page = burst.offset[slots] // PAGE + np.tile(np.arange(pages), count)
        version = np.empty(len(slots), dtype=np.uint32)
        for slot in range(start, start + count):
            place = slice((slot - start) * pages, (slot - start + 1) * pages)
            coming = self._next.get(slot)
            version[place] = self._versions[int(file[place.start])][page[place]] if coming is None else coming
        step = STEP_BYTES // PAGE
        for at in range(0, len(slots), step):
            part = slice(at, at + step)
            work(start * burst.nbytes + at * PAGE, file[part], page[part], version[part])


class OnlyRead(Checker):
    """Files that must not change: every read is compared, by its segment checksum, with a first reading of the file."""

    said = (
        "outside the timing, every byte that was read compared, by kvxfer's segment checksum, with a first reading of "
        "the file through the page cache; what the files ought to hold, nobody here knows"
    )

    def __init__(self, paths: list[Path], file_bytes: list[int]) -> None:
        self._paths, self._bytes = paths, file_bytes
        self._sums: dict[tuple[int, int], int] = {}

    def begin(self, size: int) -> None:
        """Reads everything once. IOFault where it cannot be read."""
        self._sums = {}
        buffer = AlignedBuffer(size).array
        for index, (path, whole) in enumerate(zip(self._paths, self._bytes, strict=True)):
            with PosixFile(sys_open(path, os.O_RDONLY), path.name, False) as file:
                for offset in range(0, whole - size + 1, size):
                    if (moved := file.read(buffer, size, offset)) != size:
                        raise IOFault(errno.EIO, f"{moved} of {size} bytes at {offset:#x}: it is being cut", str(path))
                    self._sums[index, offset] = _sum(buffer)

    def wrong(self, burst: Burst, memory: Memory, of: Mask) -> list[str]:
        """See Checker."""
        found = []
        for slot in np.flatnonzero(of).tolist():
            place = int(burst.file[slot]), int(burst.offset[slot])
            if _sum(memory.get(slot * burst.nbytes, burst.nbytes)) != self._sums[place]:
                name = self._paths[place[0]].name
                found.append(f"{name} offset {place[1]:#x}: {burst.nbytes} bytes do not match their first reading")
        return found


def _sum(data: NDArray[np.uint8]) -> int:
    return int(_native.lib().kvx_checksum(data.ctypes.data, data.nbytes, 0))


def _runs(mask: Mask) -> Iterator[tuple[int, int]]:
    """Where the mask is set: (first, count) of each run."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield first, end - first
