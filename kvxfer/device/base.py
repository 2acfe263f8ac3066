"""What a transfer needs of an accelerator: memory, streams, events, copies, and the converter on a stream.

Everything that a transfer does to a device goes through `Device`, so that the order of its waits and records can be
checked on one that is simulated (`kvxfer.testing.FakeDevice`), and a fault put under any call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvxfer.convert.pages import KVPages
from kvxfer.mapping import CanonicalMapping

__all__ = ["Buffer", "Device", "Event", "Stream"]


class Stream:
    """Work of one device in order. What is on two streams has no order but the one that events give."""


class Event(ABC):
    """A point on a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all that was on its stream before the record has ended. Never waits.

        Raises:
            DeviceError: the device was lost, or something before the event failed.
        """


class Buffer(ABC):
    """Memory for transfers. Given back when nobody holds it, or by `free`."""

    address: int
    nbytes: int
    on_device: bool
    pinned: bool  # host memory that the device reaches by itself
    why: str  # of host memory that is not pinned: the reason; else empty

    @abstractmethod
    def host(self) -> NDArray[np.uint8]:
        """[nbytes] of host memory as an array. What a copy under way writes there is seen when its event is done.

        Raises:
            LayoutError: it is the device's memory.
        """

    @abstractmethod
    def free(self) -> None:
        """Not while anything on a stream, or a drive, uses it. Twice is fine. Never raises, a lost device or not."""


class Device(ABC):
    """One accelerator. Thread-safe: streams belong to whoever made them.

    No call waits for the device, but those that make or free memory. Every call raises DeviceError where the device
    was lost: from then on every call does.
    """

    name: str  # as its driver calls it, "NVIDIA H200"
    label: str  # as torch calls it, "cuda:0"

    @abstractmethod
    def mark(self) -> Event:
        """Recorded on the calling thread's current stream: whatever it has queued so far comes before it."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream, beside that of the computation."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """A new event after all that is on the stream now."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What comes onto the stream from now on begins after the event."""

    @abstractmethod
    def device_buffer(self, nbytes: int, alignment: int = 4096) -> Buffer:
        """Raises DeviceMemoryError where the device has not as much left."""

    @abstractmethod
    def host_buffer(self, nbytes: int, alignment: int = 4096) -> Buffer:
        """Pinned where the system allows it, else ordinary memory that says why (copies from it are then slower).

        Raises:
            MemoryError: there is not as much.
        """

    @abstractmethod
    def copy(
        self, stream: Stream, target: Buffer, target_offset: int, source: Buffer, source_offset: int, nbytes: int
    ) -> None:
        """Copies bytes between two buffers, either of which may be the host's."""

    @abstractmethod
    def gather(
        self,
        stream: Stream,
        pages: KVPages,
        mapping: CanonicalMapping,
        block_ids: Buffer,
        chunks: int,
        out: Buffer,
        out_stride: int,
        sums: Buffer | None = None,
    ) -> None:
        """`convert.reference.gather` on a stream, in one launch.

        Args:
            block_ids: int64 [chunks, blocks_per_chunk], which the caller has checked; the device reads them when the
                stream comes to it.
            out: chunk c's payload area begins at c * out_stride; the device's memory, or pinned.
            sums: uint64 [chunks, slot.num_segments]; the same.
        """

    @abstractmethod
    def scatter(
        self,
        stream: Stream,
        pages: KVPages,
        mapping: CanonicalMapping,
        block_ids: Buffer,
        chunks: int,
        source: Buffer,
        source_stride: int,
        sums: Buffer | None = None,
    ) -> None:
        """`convert.reference.scatter` on a stream, in one launch. See `gather`."""

    @abstractmethod
    def checksum(
        self,
        stream: Stream,
        mapping: CanonicalMapping,
        chunks: int,
        source: Buffer,
        source_stride: int,
        sums: Buffer,
    ) -> None:
        """The sums that `scatter` would give, of the mapping's segments, and nothing else."""
