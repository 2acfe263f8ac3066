"""What takes chunks between bays and the drive: one interface, so that the way can be chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.device.base import Buffer, Event
from kvxfer.device.bays import Bay
from kvxfer.device.calibration import PACK, ZERO
from kvxfer.device.form import Form
from kvxfer.errors import DeviceError
from kvxfer.io.ladder import Rung
from kvxfer.jobs import ChunkError, Status

__all__ = ["Batch", "Carrier", "Landing", "all_failed"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Consecutive chunks of one job that go through one bay together. Compared by identity."""

    direction: int  # jobs.STORE or jobs.LOAD
    bay: Bay
    form: Form  # which segments, and where they are in the bay: chunk c begins at c * form.chunk_bytes
    records: bytes  # packed kvx_chunk structs, one a chunk: where each slot is, and who it must be
    block_ids: NDArray[np.int64]  # [chunks, blocks_per_chunk] of the pages; -1: the chunk has none, or it isn't wanted
    digest: bytes  # of the namespace, 32 bytes
    deadline_ns: int = 0  # loads: time.monotonic_ns() at which it lands with what has arrived; 0: none
    engine: str = PACK  # PACK: pages <-> bay.device, which the carrier takes from there; ZERO: pages <-> bay.host

    @property
    def memory(self) -> Buffer:
        """Where it is gathered to and scattered from."""
        if self.engine != ZERO:
            return self.bay.device
        assert self.bay.host is not None  # Carrier.engine
        return self.bay.host

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Landing:
    """A batch is done: its chunks are on the drive, or verified and ready for `bring`, or failed."""

    batch: Batch
    status: NDArray[np.uint8]  # [chunks], Status; PENDING is none of them
    errors: tuple[ChunkError, ...] = ()  # one for each chunk that isn't OK, by its place in the batch
    fault: DeviceError | None = None  # the device failed under it: its bay may be in use for ever
    holds_bay: bool = False  # a write that was given up still reads the bay: `returned` will name it


def all_failed(batch: Batch, status: Status, fault: DeviceError | None = None) -> Landing:
    """The landing of a batch of which nothing arrived."""
    errors = tuple(ChunkError(chunk, status) for chunk in range(batch.chunks))
    return Landing(batch, np.full(batch.chunks, status, np.uint8), errors, fault)


class Carrier(ABC):
    """Moves batches between bays and files. All calls but `make_bay` and `shutdown` return at once.

    `rung` is how its way was chosen, where it was.

    One thread, the runner's, calls it; `stats`, `shutdown` and `abandon` may come from any. A batch that was begun
    lands exactly once, in any order, within io_timeout_s of its calls, unless `forsake` names it.
    """

    rung: Rung | None = None

    @abstractmethod
    def make_bay(self, number: int, nbytes: int, ids_bytes: int, sums_bytes: int) -> Bay:
        """A bay as this carrier needs it.

        Args:
            nbytes: for chunks in canonical form.
            ids_bytes, sums_bytes: for the block ids, and the segments' sums, of as many chunks.

        Raises:
            MemoryError, DeviceMemoryError: there is not as much; nothing is kept.
            DeviceError
        """

    def engine(self, direction: int, bay: Bay, form: Form, blocks: int) -> str:
        """Which copy engine a batch of so many blocks in this bay takes: see Batch. Returns at once."""
        return PACK

    @abstractmethod
    def begin_store(self, batch: Batch, filled: Event) -> None:
        """Write the batch once `filled` is done: from then on batch.memory (and `sums`) has what was gathered.

        Raises:
            DeviceError: work on the device may be under way; the batch does not land.
        """

    @abstractmethod
    def begin_load(self, batch: Batch) -> None:
        """Read and verify the batch. No byte of the bay means anything before it has landed with OK for the chunk.

        Raises:
            DeviceError: as for `begin_store`.
            KvxferError, MemoryError: it was not begun, and nothing of it is on the device; it does not land.
        """

    @abstractmethod
    def bring(self, batch: Batch) -> Event | None:
        """Of a load that has landed: have its OK chunks put into batch.memory.

        Chunks that failed may bring any bytes with them. The event is done when they are there; None: they are.

        Raises:
            DeviceError: work on the device may be under way.
        """

    @abstractmethod
    def cancel(self, batch: Batch) -> None:
        """Nobody waits for it any more: it lands soon, with what has arrived.

        A write that has not returned leaves its chunk LOST; one that was not begun, CANCELLED.
        """

    @abstractmethod
    def poll(self) -> list[Landing]:
        """Batches that have landed since the last call. Never raises: what the device did wrong is in `fault`."""

    @abstractmethod
    def late(self) -> list[tuple[Batch, int]]:
        """Chunks (by place in their batch) of stores that landed LOST, whose write has returned since: slots free.

        Also after a shutdown.
        """

    @abstractmethod
    def returned(self) -> list[Bay]:
        """Bays that a landing held on to, and nothing uses any more."""

    @abstractmethod
    def forsake(self) -> list[Batch]:
        """The device is lost: gives up what still waits for it, and only that. These do not land."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """The kvx_stats counters by name, as far as they mean something here; the others 0."""

    @abstractmethod
    def shutdown(self, timeout_s: float) -> int:
        """Cancel everything, wait for calls under way; `poll` still gives what has landed.

        Returns:
            Threads left behind in calls that have not returned.
        """

    @abstractmethod
    def abandon(self) -> None:
        """`shutdown` without waiting, for a process that ends."""
