"""How chunks lie in bays: the segments that this process moves, side by side, and nothing of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvxfer.errors import LayoutError
from kvxfer.mapping import CanonicalMapping
from kvxfer.slot import SlotLayout

__all__ = ["Form", "form_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Of the jobs of some ranks. Segment `segments[i]` of a slot lies at i * slot.segment_stride of a chunk's place.

    So a rank of eight has bays, and copies, of an eighth of a slot.
    """

    slot: SlotLayout  # of a chunk on the drive
    segments: tuple[int, ...]  # of it, those that any of the ranks holds, ascending
    packed: SlotLayout  # a chunk's place in a bay, as if the others did not exist; its payload_stride parts chunks
    sources: tuple[CanonicalMapping, ...]  # of the ranks, to `slot`
    mappings: tuple[CanonicalMapping, ...]  # the same to `packed`: what a device is given
    gathers: tuple[int, ...]  # ranks to gather, in this order: a segment that several hold is the first one's
    block_fragments: int = field(init=False)  # of all ranks, that a block is in
    fragment_bytes: int = field(init=False)  # of each of these, on average

    def __post_init__(self) -> None:
        runs = np.concatenate([mapping.runs for mapping in self.mappings])
        fragments = int(runs["num_fragments"].sum())
        nbytes = int((runs["num_fragments"] * runs["fragment_size"]).sum())
        object.__setattr__(self, "block_fragments", fragments)
        object.__setattr__(self, "fragment_bytes", max(1, nbytes // fragments))

    @property
    def chunk_bytes(self) -> int:
        """Bytes from one chunk's place to the next one's."""
        return self.packed.payload_stride

    @property
    def payload_bytes(self) -> int:
        """Of a chunk, without padding."""
        return self.packed.payload_bytes


def form_of(mappings: Sequence[CanonicalMapping]) -> Form:
    """The form of jobs of these ranks.

    Raises:
        LayoutError: they are of several slot layouts, or part blocks differently.
    """
    if len({(mapping.slot, mapping.canonical_block_stride) for mapping in mappings}) != 1:
        raise LayoutError("the ranks of a job must have one slot layout and one canonical_block_stride")
    slot = mappings[0].slot
    segments = sorted({segment for mapping in mappings for segment in mapping.segments})
    gathers: list[int] = []
    covered: set[int] = set()
    for rank, mapping in enumerate(mappings):
        if not covered.issuperset(mapping.segments):
            gathers.insert(0, rank)
        covered.update(mapping.segments)
    if len(segments) == slot.num_segments:
        return Form(slot, tuple(segments), slot, tuple(mappings), tuple(mappings), tuple(gathers))
    whole_last = segments[-1] != slot.num_segments - 1
    packed = replace(
        slot,
        num_segments=len(segments),
        last_segment_bytes=slot.segment_bytes if whole_last else slot.last_segment_bytes,
    )
    moved = tuple(_packed(mapping, packed, segments) for mapping in mappings)
    return Form(slot, tuple(segments), packed, tuple(mappings), moved, tuple(gathers))


def _packed(mapping: CanonicalMapping, packed: SlotLayout, segments: Sequence[int]) -> CanonicalMapping:
    """The same runs to segments numbered anew; their order stays."""
    runs = mapping.runs.copy()
    runs["segment"] = np.searchsorted(segments, mapping.runs["segment"])
    held = tuple(np.searchsorted(segments, mapping.segments).tolist())
    return replace(mapping, slot=packed, runs=runs, segments=held)
