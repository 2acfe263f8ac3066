"""Runs between local tensors and canonical bytes, and the proof that they move every byte exactly once.

Nothing here knows of heads, layers or ranks' places: layout.py makes the runs, this says what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import LayoutError
from kvxfer.slot import SlotLayout

# kvx_run of csrc/kvx.h.
RUN_DTYPE = np.dtype(
    [
        ("tensor", "<u4"),
        ("segment", "<u4"),
        ("local_offset", "<u8"),
        ("canonical_offset", "<u8"),
        ("fragment_size", "<u8"),
        ("num_fragments", "<u8"),
        ("local_stride", "<u8"),
    ]
)
MAX_BYTES = 1 << 62  # sums of two offsets stay below 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRun:
    """Equal pieces between a local page and canonical bytes, in vLLM's words. Sizes in bytes.

    For f in [0, num_fragments): local_offset + f * local_stride <-> canonical_offset + f * canonical_stride.
    """

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One tensor's blocks. Block i uses [offset + i * block_stride, + page_bytes) of it, every byte of that."""

    block_stride: int
    page_bytes: int
    offset: int = 0


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class CanonicalMapping:
    """One rank's part of a slot: which local bytes are which canonical bytes. Immutable, compared by identity.

    Take it from `kvx1_mapping`, `row_mapping` or `opaque_mapping`: those prove it. The constructor checks what needs no
    proof. A rank holds whole segments; host rows that ranks share byte by byte are `rows.RowMapping`s.

    Raises:
        LayoutError: `runs` are not sorted, or name a tensor or segment that is not there.
    """

    slot: SlotLayout
    runs: NDArray[np.void]  # RUN_DTYPE, sorted by (segment, canonical_offset), read-only; offsets as in kvx_run
    segments: tuple[int, ...]  # those the runs name, ascending
    canonical_block_stride: int  # bytes between two blocks of a chunk in a run's canonical bytes
    tensors: tuple[LocalTensor, ...]
    num_writers: int = 1  # ranks that hold these same segments
    writer_index: int = 0  # this rank's place among them
    # None: certified not to depend on the sharding. Else ShardSpec.topology, which the namespace must name.
    topology: str | None = None

    def __post_init__(self) -> None:
        if self.runs.dtype != RUN_DTYPE or self.runs.ndim != 1 or not len(self.runs):
            raise LayoutError(f"runs of {self.runs.dtype} {self.runs.shape} must be one dimension of RUN_DTYPE")
        if not 0 <= self.writer_index < self.num_writers:
            raise LayoutError(f"writer_index={self.writer_index} must be in 0..{self.num_writers - 1}")
        segment, start = self.runs["segment"].astype(np.int64), self.runs["canonical_offset"]
        step = np.diff(segment)
        if np.any(step < 0) or np.any((step == 0) & (start[1:] < start[:-1])):
            raise LayoutError("runs must be sorted by (segment, canonical_offset)")
        if tuple(np.unique(segment).tolist()) != self.segments or self.segments[-1] >= self.slot.num_segments:
            raise LayoutError(
                f"segments={_short(self.segments)} must be those of the runs, of {self.slot.num_segments}"
            )
        if int(self.runs["tensor"].max()) >= len(self.tensors):
            raise LayoutError(f"a run names tensor {self.runs['tensor'].max()} of {len(self.tensors)}")
        runs = np.ascontiguousarray(self.runs).copy()
        runs.flags.writeable = False
        object.__setattr__(self, "runs", runs)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks stored under one key."""
        return self.slot.blocks_per_chunk

    @property
    def num_tensors(self) -> int:
        """Tensors of this rank: for each local layer one, or K and V."""
        return len(self.tensors)

    @property
    def tensor_block_strides(self) -> tuple[int, ...]:
        """Bytes between blocks, for each tensor."""
        return tuple(tensor.block_stride for tensor in self.tensors)

    @property
    def tensor_extent(self) -> tuple[int, ...]:
        """Bytes from a tensor's address to the end of its block 0, for each tensor; block i ends i strides later."""
        return tuple(tensor.offset + tensor.page_bytes for tensor in self.tensors)

    @property
    def part_bytes(self) -> int:
        """Payload of this rank's segments."""
        return sum(self.slot.segment_length(segment) for segment in self.segments)

    def is_writer(self, slot_index: int) -> bool:
        """Whether this rank, of those that hold the same segments, writes them into the slot of this number."""
        return slot_index % self.num_writers == self.writer_index

    def copy_runs(self) -> Iterator[tuple[int, int, CopyRun]]:
        """The runs one by one as (tensor, segment, run)."""
        for tensor, segment, local, canonical, size, count, stride in self.runs.tolist():
            yield (
                tensor,
                segment,
                CopyRun(
                    local_offset=local,
                    canonical_offset=canonical,
                    fragment_size=size,
                    num_fragments=count,
                    local_stride=stride,
                    canonical_stride=size,
                ),
            )


def verify_tiling(per_rank: Sequence[CanonicalMapping]) -> None:
    """Proves that these ranks' mappings, all of one model's, move every byte exactly once.

    Each rank's runs cover its pages once, and its segments once over the blocks of a chunk; for every slot number, the
    elected writers together write every segment once.

    Raises:
        LayoutError: what is left out or doubled.
    """
    if not per_rank:
        raise LayoutError("no rank's mapping was given")
    for rank, mapping in enumerate(per_rank):
        verify_mapping(mapping, f"rank {rank}: ")
    verify_writers(per_rank)


def verify_mapping(mapping: CanonicalMapping, whose: str = "") -> None:
    """Proves one rank's half of `verify_tiling`. `whose` begins the message.

    Raises:
        LayoutError: what is left out or doubled.
    """
    runs, tensors, slot = mapping.runs, mapping.tensors, mapping.slot
    owned = np.array(mapping.segments, dtype=np.int64)
    lengths = np.full(owned.size, slot.segment_bytes, dtype=np.int64)
    lengths[owned == slot.num_segments - 1] = slot.last_segment_bytes
    pages = np.array([(t.offset, t.page_bytes, t.block_stride) for t in tensors], dtype=np.int64)
    if np.any(pages[:, 1] > pages[:, 2]):
        raise LayoutError(
            f"{whose}page_bytes of tensor {int(np.argmax(pages[:, 1] > pages[:, 2]))} exceeds its block_stride"
        )
    size, count, stride = (runs[name] for name in ("fragment_size", "num_fragments", "local_stride"))
    # Bounds first, by division, so that nothing below can wrap around.
    page_bytes = pages[runs["tensor"], 1].astype(np.uint64)
    sound = (size > 0) & (count > 0) & (size <= page_bytes) & (count <= page_bytes // np.maximum(size, 1))
    sound &= (runs["local_offset"] < MAX_BYTES) & (runs["canonical_offset"] < MAX_BYTES)
    sound &= stride <= page_bytes // np.maximum(count - np.minimum(count, 1), 1)
    if not sound.all() or not 0 <= mapping.canonical_block_stride < MAX_BYTES // slot.blocks_per_chunk:
        raise LayoutError(
            f"{whose}run {int(np.argmin(sound))} does not fit its page or canonical_block_stride is out of range"
        )
    index, fragment = unroll(count)
    start = runs["local_offset"][index] + fragment * stride[index]
    tensor = runs["tensor"][index].astype(np.int64)
    verify_cover(f"{whose}tensor", np.arange(len(tensors)), pages[:, 0], pages[:, 1], tensor, start, size[index])
    index, block = unroll(np.full(len(runs), slot.blocks_per_chunk, dtype=np.uint64))
    start = runs["canonical_offset"][index] + block * np.uint64(mapping.canonical_block_stride)
    segment = runs["segment"][index].astype(np.int64)
    verify_cover(f"{whose}segment", owned, np.zeros_like(owned), lengths, segment, start, (size * count)[index])


def unroll(counts: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """For each i, counts[i] times: the index i, and 0, 1, 2 ..."""
    repeats = counts.astype(np.int64)
    index = np.repeat(np.arange(repeats.size), repeats)
    first = np.cumsum(repeats) - repeats
    return index, (np.arange(index.size) - first[index]).astype(np.uint64)


def verify_cover(
    what: str,
    owners: NDArray[np.int64],
    low: NDArray[np.int64],
    length: NDArray[np.int64],
    owner: NDArray[np.int64],
    start: NDArray[np.uint64],
    size: NDArray[np.uint64],
) -> None:
    """Raises LayoutError unless the pieces [start, start + size) of each owner are exactly its [low, low + length)."""
    if lacking := np.setdiff1d(owners, owner).tolist():
        raise LayoutError(f"{what} {lacking[0]}: no run covers any of its bytes")
    hint = "; bytes of a page that are no head's cannot be certified" if what.endswith("tensor") else ""
    begin, end = start.astype(np.int64), (start + size).astype(np.int64)
    order = np.lexsort((begin, owner))
    owner, begin, end = owner[order], begin[order], end[order]
    place = np.searchsorted(owners, owner)
    first = np.append(True, owner[1:] != owner[:-1])
    expected = np.where(first, low[place], np.append(0, end[:-1]))
    if wrong := np.flatnonzero(begin != expected).tolist():
        here, due = int(begin[wrong[0]]), int(expected[wrong[0]])
        name, start_of = f"{what} {owner[wrong[0]]}", int(low[place[wrong[0]]])
        if here > due:
            raise LayoutError(f"{name}: no run covers bytes [{due}, {here}){hint}")
        if first[wrong[0]]:
            raise LayoutError(f"{name}: a run begins at byte {here}, before the page's first, {start_of}")
        raise LayoutError(f"{name}: two runs cover bytes [{here}, {min(due, int(end[wrong[0]]))})")
    last = np.append(first[1:], True)
    bound = (low + length)[place]
    if wrong := np.flatnonzero(last & (end != bound)).tolist():
        name, here, due = f"{what} {owner[wrong[0]]}", int(end[wrong[0]]), int(bound[wrong[0]])
        if here < due:
            raise LayoutError(f"{name}: no run covers bytes [{here}, {due}){hint}")
        raise LayoutError(f"{name}: runs cover bytes [{due}, {here}), beyond its end")


def verify_writers(per_rank: Sequence[CanonicalMapping]) -> None:
    """Raises LayoutError unless, for every slot number, each segment has exactly one elected writer."""
    first = per_rank[0]
    for rank, mapping in enumerate(per_rank):
        if (mapping.slot, mapping.num_writers, mapping.topology) != (first.slot, first.num_writers, first.topology):
            raise LayoutError(f"rank {rank}: its slot layout, number of writers or topology differs from rank 0's")
    for slot_index in range(first.num_writers):
        written = np.zeros(first.slot.num_segments, dtype=np.int64)
        for mapping in per_rank:
            if mapping.is_writer(slot_index):
                written[list(mapping.segments)] += 1
        if wrong := np.flatnonzero(written != 1).tolist():
            raise LayoutError(
                f"segment {wrong[0]}: {written[wrong[0]]} ranks write it in slots of number {slot_index} modulo "
                f"{first.num_writers}, where one must"
            )


def _short(numbers: Sequence[int]) -> str:
    """A tuple of numbers for a message, cut where it is long."""
    return f"({', '.join(map(str, numbers[:6]))}{', ...' if len(numbers) > 6 else ''})"
