"""The converter written for reading: what it does is the answer that every other converter is held to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvxfer.checksum import segment_checksum
from kvxfer.convert.pages import KVPages, check_gather, check_scatter
from kvxfer.mapping import CanonicalMapping
from kvxfer.slot import round_up


def gather(
    pages: KVPages,
    block_ids: NDArray[np.int64],
    mapping: CanonicalMapping,
    out: NDArray[np.uint8],
    sums: NDArray[np.uint64] | None = None,
) -> None:
    """Copies this rank's part of chunks out of its pages. Bytes are moved, never computed on.

    Args:
        pages: the rank's tensors.
        block_ids: [n, blocks_per_chunk], the blocks of each chunk in order; -1 where the chunk has none.
        mapping: the rank's part of a slot, over the tensors of `pages`.
        out: [n, slot.payload_stride]. The rank's segments are written whole, with zeros for absent blocks and for the
            padding after each; the bytes of other segments are kept.
        sums: [n, slot.num_segments] or None. The checksums of the rank's segments are written; others are kept.

    Raises:
        LayoutError: a shape or block id does not fit; nothing was written.
    """
    check_gather(pages, block_ids, mapping, out, sums)
    slot = mapping.slot
    views = [pages.flat(tensor) for tensor in range(mapping.num_tensors)]
    for chunk, ids in enumerate(block_ids.tolist()):
        for segment in mapping.segments:
            start = segment * slot.segment_stride
            out[chunk, start : start + round_up(slot.segment_length(segment), slot.alignment)] = 0
        for tensor, local, canonical, size in _pieces(mapping, ids):
            out[chunk, canonical : canonical + size] = views[tensor][local : local + size]
    _sum(mapping, out, sums)


def scatter(
    src: NDArray[np.uint8],
    block_ids: NDArray[np.int64],
    mapping: CanonicalMapping,
    pages: KVPages,
    sums: NDArray[np.uint64] | None = None,
) -> None:
    """Copies this rank's part of chunks into its pages. Nothing but the pages of the blocks named is written.

    Args:
        src: [n, slot.payload_stride], of which the rank's segments are read.
        block_ids: [n, blocks_per_chunk], each block at most once in all; -1: these bytes are not wanted.
        mapping: the rank's part of a slot, over the tensors of `pages`.
        pages: the rank's tensors.
        sums: [n, slot.num_segments] or None. The checksums of the rank's segments as read, absent blocks included, are
            written; others are kept.

    Raises:
        LayoutError: a shape or block id does not fit, or a tensor is read-only; nothing was written.
    """
    check_scatter(pages, block_ids, mapping, src, sums)
    views = [pages.flat(tensor) for tensor in range(mapping.num_tensors)]
    for chunk, ids in enumerate(block_ids.tolist()):
        for tensor, local, canonical, size in _pieces(mapping, ids):
            views[tensor][local : local + size] = src[chunk, canonical : canonical + size]
    _sum(mapping, src, sums)


def _pieces(mapping: CanonicalMapping, ids: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Each (tensor, offset in it, offset in the payload area, bytes) of one chunk's blocks."""
    for tensor, segment, run in mapping.copy_runs():
        for position, block in enumerate(ids):
            if block < 0:
                continue
            local = block * mapping.tensors[tensor].block_stride + run.local_offset
            canonical = segment * mapping.slot.segment_stride + run.canonical_offset
            canonical += position * mapping.canonical_block_stride
            for fragment in range(run.num_fragments):
                yield (
                    tensor,
                    local + fragment * run.local_stride,
                    canonical + fragment * run.canonical_stride,
                    run.fragment_size,
                )


def _sum(mapping: CanonicalMapping, payloads: NDArray[np.uint8], sums: NDArray[np.uint64] | None) -> None:
    if sums is None:
        return
    for chunk, payload in enumerate(payloads):
        for segment in mapping.segments:
            start = segment * mapping.slot.segment_stride
            sums[chunk, segment] = segment_checksum(payload[start : start + mapping.slot.segment_length(segment)])
