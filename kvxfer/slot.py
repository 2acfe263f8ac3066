"""How a slot is cut into segments and trailer pages (docs/format.md)."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import LayoutError

ALIGNMENT = 4096
TRAILER_SUMS = 464
MAX_BLOCKS = 256
MAX_KEY_BYTES = 64
ROW_SEGMENT_BYTES = 256 * 1024


def round_up(n: int, unit: int) -> int:
    """`n` rounded up to a multiple of `unit`."""
    return -(-n // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """The shape of a slot: one class of slabs holds slots of one layout. Sizes in bytes.

    Raises:
        LayoutError: a field is out of the format's bounds.
    """

    segment_bytes: int  # payload of every segment but the last
    last_segment_bytes: int  # payload of the last segment
    num_segments: int
    segments_per_trailer: int  # 1 where several ranks write one slot, else TRAILER_SUMS
    blocks_per_chunk: int = 1
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        if self.alignment < ALIGNMENT or self.alignment & (self.alignment - 1):
            raise LayoutError(f"alignment={self.alignment} must be a power of two of at least {ALIGNMENT}")
        if not 1 <= self.blocks_per_chunk <= MAX_BLOCKS:
            raise LayoutError(f"blocks_per_chunk={self.blocks_per_chunk} must be 1..{MAX_BLOCKS}")
        if self.num_segments < 1 or self.segments_per_trailer not in (1, TRAILER_SUMS):
            raise LayoutError(
                f"num_segments={self.num_segments} must be positive and "
                f"segments_per_trailer={self.segments_per_trailer} 1 or {TRAILER_SUMS}"
            )
        if not 0 < self.last_segment_bytes <= self.segment_bytes <= 16 << 30:
            raise LayoutError(
                f"segment_bytes={self.segment_bytes}, last_segment_bytes={self.last_segment_bytes}: "
                "want 0 < last <= segment <= 16 GiB"
            )

    @property
    def segment_stride(self) -> int:
        """Bytes from one segment's start to the next one's."""
        return round_up(self.segment_bytes, self.alignment)

    @property
    def payload_bytes(self) -> int:
        """Payload without padding."""
        return (self.num_segments - 1) * self.segment_bytes + self.last_segment_bytes

    @property
    def payload_stride(self) -> int:
        """Bytes of the payload area, padding included; the trailers follow it."""
        return (self.num_segments - 1) * self.segment_stride + round_up(self.last_segment_bytes, self.alignment)

    @property
    def num_trailers(self) -> int:
        """Trailer pages of the slot."""
        return -(-self.num_segments // self.segments_per_trailer)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the whole slot."""
        return self.payload_stride + self.num_trailers * self.alignment

    def segment_length(self, segment: int) -> int:
        """Payload bytes of one segment."""
        return self.last_segment_bytes if segment == self.num_segments - 1 else self.segment_bytes
