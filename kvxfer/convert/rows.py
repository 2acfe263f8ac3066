"""Moves bytes between a rank's pages and host rows that all ranks share: written for reading, as `reference` is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.convert.pages import span_of
from kvxfer.errors import LayoutError
from kvxfer.rows import RowMapping

__all__ = ["gather_rows", "scatter_rows"]


def gather_rows(
    tensors: Sequence[NDArray[np.uint8]],
    block_ids: NDArray[np.int64],
    mapping: RowMapping,
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.int64],
) -> None:
    """Copies this rank's part of chunks out of its pages into rows. All other bytes of the rows are kept.

    Of pages that several ranks hold, only those are copied that this rank is elected to write.

    Args:
        tensors: this rank's, one dimension of bytes each, in the mapping's order.
        block_ids: [n, blocks_per_chunk], the blocks of each chunk in order; -1 where the chunk has none.
        mapping: the rank's part of a row.
        rows: [rows, at least row_bytes].
        row_ids: [n], distinct: the row of each chunk. Which rank writes depends on them.

    Raises:
        LayoutError: a shape or id does not fit; nothing was written.
    """
    check_rows(tensors, block_ids, mapping, rows, row_ids)
    refuse_repeated("row", row_ids)
    for tensor, near, row, far, size in _pieces(block_ids, mapping, row_ids, elected=True):
        rows[row, far : far + size] = tensors[tensor][near : near + size]


def scatter_rows(
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.int64],
    mapping: RowMapping,
    tensors: Sequence[NDArray[np.uint8]],
    block_ids: NDArray[np.int64],
) -> None:
    """Copies this rank's part of rows into its pages, whoever wrote it. Only pages of the blocks named are written.

    Args:
        rows, row_ids, mapping, tensors: as for `gather_rows`.
        block_ids: [n, blocks_per_chunk], each block at most once in all; -1: these bytes are not wanted.

    Raises:
        LayoutError: a shape or id does not fit; nothing was written.
    """
    check_rows(tensors, block_ids, mapping, rows, row_ids)
    refuse_repeated("block", block_ids[block_ids >= 0])
    for tensor, near, row, far, size in _pieces(block_ids, mapping, row_ids, elected=False):
        tensors[tensor][near : near + size] = rows[row, far : far + size]


def _pieces(
    block_ids: NDArray[np.int64], mapping: RowMapping, row_ids: NDArray[np.int64], *, elected: bool
) -> Iterator[tuple[int, int, int, int, int]]:
    """Each (tensor, offset in it, row, offset in that, bytes); `elected`: only of pages that this rank writes."""
    for row, ids in zip(row_ids.tolist(), block_ids.tolist(), strict=True):
        for number, cell in enumerate(mapping.cells):
            for position, block in enumerate(ids):
                page = row * mapping.blocks_per_chunk + position
                if block < 0 or (elected and not cell.page.is_writer(page)):
                    continue
                start = cell.tensor.offset + block * cell.tensor.block_stride
                place = cell.offset + position * cell.block_stride
                for run in cell.page.runs:
                    for fragment in range(run.num_fragments):
                        near = start + run.local_offset + fragment * run.local_stride
                        far = place + run.canonical_offset + fragment * run.canonical_stride
                        yield number, near, row, far, run.fragment_size


def check_rows(
    tensors: Sequence[NDArray[np.uint8]],
    block_ids: NDArray[np.int64],
    mapping: RowMapping,
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.int64],
) -> None:
    """Raises LayoutError unless a call's arguments fit."""
    _check_array("block_ids", block_ids, np.int64, 2)
    _check_array("row_ids", row_ids, np.int64, 1)
    _check_array("rows", rows, np.uint8, 2)
    for number, tensor in enumerate(tensors):
        _check_array(f"tensor {number}", tensor, np.uint8, 1)
    if block_ids.shape != (len(row_ids), mapping.blocks_per_chunk):
        raise LayoutError(f"block_ids has shape {block_ids.shape}, want ({len(row_ids)}, {mapping.blocks_per_chunk})")
    if rows.shape[1] < mapping.row_bytes:
        raise LayoutError(f"rows of {rows.shape[1]} bytes cannot hold the mapping's {mapping.row_bytes}")
    if len(tensors) != len(mapping.cells):
        raise LayoutError(f"{len(tensors)} tensors were given, the mapping has {len(mapping.cells)}")
    blocks = int(block_ids.max(initial=-1)) + 1
    for number, (tensor, local) in enumerate(zip(tensors, mapping.tensors, strict=True)):
        if blocks and tensor.size < span_of(local, blocks):
            raise LayoutError(f"tensor {number} has {tensor.size} bytes: block {blocks - 1} lies beyond its end")
    if block_ids.min(initial=-1) < -1:
        raise LayoutError(f"block id {block_ids.min()} must be at least 0, or -1 for an absent block")
    if (wrong := row_ids[(row_ids < 0) | (row_ids >= len(rows))]).size:
        raise LayoutError(f"row id {wrong[0]} must be in 0..{len(rows) - 1}")


def check_job(
    block_ids: NDArray[np.int64],
    pages: NDArray[np.int64],
    group_pages: NDArray[np.int64],
    num_blocks: NDArray[np.int64],
    num_pages: int,
    blocks_per_chunk: int,
) -> None:
    """Raises LayoutError unless a plan of groups of `num_blocks` blocks each, over `num_pages` pages, can do a job."""
    for name, array in (("block_ids", block_ids), ("pages", pages), ("group_pages", group_pages)):
        _check_array(name, array, np.int64, 1)
    if len(group_pages) != len(num_blocks) or group_pages.min(initial=0) < 0:
        raise LayoutError(f"group_pages={group_pages.tolist()} must be a count for each of {len(num_blocks)} groups")
    if not len(block_ids) == len(pages) == group_pages.sum():
        raise LayoutError(f"{len(block_ids)} blocks, {len(pages)} pages, and {group_pages.sum()} in all groups")
    limit = np.repeat(num_blocks, group_pages)
    if (wrong := np.flatnonzero((block_ids < 0) | (block_ids >= limit))).size:
        raise LayoutError(f"block id {block_ids[wrong[0]]} must be in 0..{limit[wrong[0]] - 1}")
    if (wrong := np.flatnonzero((pages < 0) | (pages >= num_pages))).size:
        row = pages[wrong[0]] // blocks_per_chunk
        raise LayoutError(f"row id {row} must be in 0..{num_pages // blocks_per_chunk - 1}")


def _check_array(name: str, array: NDArray[Any], dtype: type[np.generic], dimensions: int) -> None:
    if array.dtype != dtype or array.ndim != dimensions:
        raise LayoutError(
            f"{name} of {array.dtype} {array.shape} must be {np.dtype(dtype)} and {dimensions}-dimensional"
        )


def refuse_repeated(what: str, ids: NDArray[np.int64]) -> None:
    """Raises LayoutError where an id is named twice."""
    ordered = np.sort(ids)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise LayoutError(f"{what} {twice[0]} is named twice: which of its bytes stay would be left to chance")
