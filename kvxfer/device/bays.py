"""Bays: places in a device's memory where batches of chunks lie in canonical form, between pages and drive."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.device.base import Buffer
from kvxfer.errors import DeviceMemoryError
from kvxfer.jobs import STORE
from kvxfer.report import engine_reporter

__all__ = ["Bay", "Ring"]

LEAST = 3  # bays that convert, copy and move at once; with fewer, something waits


@dataclass(slots=True, eq=False)
class Bay:
    """Room for one batch: chunk c begins at c * form.chunk_bytes of `device`, and of `host` where there is one."""

    number: int
    nbytes: int
    device: Buffer  # [nbytes]
    ids: Buffer  # host memory for a batch's block ids, int64 [chunks, blocks_per_chunk]
    device_ids: Buffer  # the same in the device's
    host: Buffer | None = None  # [nbytes], of a carrier that goes through host memory
    sums: Buffer | None = None  # device memory for uint64 [chunks, len(form.segments)], of a carrier that wants them

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that it has."""
        mine = (self.device, self.ids, self.device_ids, self.host, self.sums)
        return tuple(buffer for buffer in mine if buffer is not None)

    def free(self) -> None:
        """Gives the memory back. Not while anything uses it."""
        for buffer in self.buffers:
            buffer.free()


class Ring:
    """Bays that are free, in use, or left behind. The runner's lock guards it.

    Args:
        make: a bay of this number and size in bytes.
        count, nbytes: as many, and as large, as is asked for.
        least_bytes: a bay that holds one chunk.

    Raises:
        DeviceMemoryError: there is not even room for one chunk.
    """

    def __init__(self, make: Callable[[int, int], Bay], count: int, nbytes: int, least_bytes: int) -> None:
        self.bays, self.nbytes = _made(make, count, max(nbytes, least_bytes), least_bytes)
        self._free = list(self.bays)
        self._storing: set[Bay] = set()
        self._held: dict[Bay, float] = {}  # under calls that were given up and have not returned; until when they may
        self.leaked: list[Bay] = []  # something may still use them: kept for good
        what = f"{len(self.bays)} of {count} bays of {self.nbytes} bytes ({nbytes} were asked for)"
        if len(self.bays) < count or self.nbytes < nbytes:
            engine_reporter.warn("bays", f"out of memory: transfers run with {what}; they are slower")
        if why := next((buffer.why for bay in self.bays for buffer in bay.buffers if buffer.why), ""):
            engine_reporter.warn("pinned", f"host memory of bays is not pinned, copies are slower: {why}")

    def take(self, direction: int) -> Bay | None:
        """A free bay, if there is one for this direction: stores leave one to loads where there are several."""
        if not self._free or (direction == STORE and len(self._storing) >= self._most_storing):
            return None
        bay = self._free.pop(0)  # the one that has rested longest
        if direction == STORE:
            self._storing.add(bay)
        return bay

    @property
    def _most_storing(self) -> int:
        return max(1, len(self.bays) - len(self.leaked) - 1)

    def is_stuck(self, direction: int) -> bool:
        """Whether no bay comes back for this direction before a call that outlived its time has returned."""
        now = time.monotonic()
        hung = {bay for bay, until in self._held.items() if now >= until}
        if direction == STORE and len(self._storing) >= self._most_storing:
            return self._storing <= hung
        return set(self.bays) <= hung.union(self.leaked)

    def hold(self, bay: Bay, patience_s: float = 0.0) -> None:
        """A call that was given up still uses it; one that nobody waited for any more has `patience_s` to return."""
        self._held[bay] = time.monotonic() + patience_s

    def give_back(self, bay: Bay) -> None:
        """Nothing uses it any more."""
        self._held.pop(bay, None)
        self._storing.discard(bay)
        if bay not in self.leaked and bay not in self._free:
            self._free.append(bay)

    def leak(self, bay: Bay) -> None:
        """Something may use it for ever: it is not given to anybody again."""
        self._held.pop(bay, None)
        self._storing.discard(bay)
        if bay not in self.leaked:
            self.leaked.append(bay)

    @property
    def held(self) -> int:
        """Bays under writes that were given up."""
        return len(self._held)

    @property
    def in_use(self) -> int:
        """Bays that are neither free nor leaked."""
        return len(self.bays) - len(self._free) - len(self.leaked)

    def free(self) -> None:
        """Gives back the memory of all that are free."""
        while self._free:
            bay = self._free.pop()
            self.bays.remove(bay)
            bay.free()


def _made(make: Callable[[int, int], Bay], count: int, nbytes: int, least_bytes: int) -> tuple[list[Bay], int]:
    """As many as there is memory for: smaller ones rather than fewer than LEAST."""
    while True:
        bays: list[Bay] = []
        try:
            while len(bays) < count:
                bays.append(make(len(bays), nbytes))
            return bays, nbytes
        except MemoryError as exc:  # DeviceMemoryError is one
            smaller = max(least_bytes, nbytes // 2)
            if len(bays) >= min(LEAST, count) or (bays and smaller == nbytes):
                return bays, nbytes
            for bay in bays:
                bay.free()
            if smaller == nbytes:
                raise DeviceMemoryError(
                    f"there is no memory for one bay of {least_bytes} bytes, which holds one chunk: {exc}; leave more "
                    "of the device's memory to kvxfer, or make chunks of fewer blocks"
                ) from exc
            nbytes = smaller
        except BaseException:  # whatever it is, it goes on to the caller, and no bay stays behind
            for bay in bays:
                bay.free()
            raise
