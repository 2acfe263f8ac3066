"""What the row kernel reads instead of mappings: tiles, once for a plan, and a job's groups and pages.

A run's vectors, counted through its fragments, are cut into tiles. Within a tile the vector i lies i * width bytes
after the first, and one gap further for each fragment that ends between them. So a tile needs no more of its run than
how far its first vector is in a fragment, the fragment's length, and the gap; and since a fragment of at least a tile's
length ends in it once at most, both are below 2 * TILE: the kernel divides by multiplying, in 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import LayoutError
from kvxfer.mapping import MAX_BYTES, CopyRun
from kvxfer.rows import RowCell

__all__ = ["ENTRY_DTYPE", "GROUP_DTYPE", "SHIFT", "TILE", "TILE_DTYPE", "WIDEST", "PlacedCell", "RowTables", "joined",
           "place_cell"]  # fmt: skip

WIDEST = 16  # bytes of a vector
TILE = 512  # vectors
# x // d is x * -(-2**SHIFT // d) >> SHIFT for every x < 2 * TILE and d <= TILE, within 31 bits.
SHIFT = 20


def _words(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


TILE_DTYPE = _words(
    "near",  # address of its first vector in block 0
    "near_block",  # bytes from a block to the next
    "near_gap",  # bytes from a fragment's end to the next one's start; may be below 0
    "far",  # of its first vector in a row, for the first block of a chunk
    "far_block",
    "far_gap",
    "count",  # vectors, 1..TILE
    "phase",  # how far its first vector is in a fragment of `period` vectors, which `reciprocal` divides by
    "reciprocal",
    "kind",  # a bit for its class of writers; the sign: its vectors have WIDEST bytes
)
GROUP_DTYPE = _words("first_unit", "first_entry", "spans", "first_tile", "end_tile")
ENTRY_DTYPE = _words("block", "row", "position", "classes")
_WIDE = -(1 << 63)
_MAX_CLASSES = 63
_MAX_UNITS = 1 << 30  # so that a program's step beyond the last one stays within 31 bits


@dataclass(frozen=True, slots=True)
class PlacedCell:
    """A cell of a mapping over a tensor."""

    cell: RowCell
    runs: tuple[CopyRun, ...]
    base: int  # address of block 0
    num_blocks: int

    @property
    def writer(self) -> tuple[int, int]:
        """Cells of one class are written for the same pages."""
        return self.cell.page.num_writers, self.cell.page.writer_index

    def width(self, run: CopyRun, per_chunk: int) -> int:
        """Bytes of the widest vectors that a run can be moved by, as far as it depends on the cell."""
        cell = self.cell
        width = gcd(WIDEST, self.base, run.local_offset, run.fragment_size, cell.offset, run.canonical_offset)
        if self.num_blocks > 1:
            width = gcd(width, cell.tensor.block_stride)
        if per_chunk > 1:
            width = gcd(width, cell.block_stride)
        return gcd(width, run.local_stride, run.canonical_stride) if run.num_fragments > 1 else width


def place_cell(cell: RowCell, index: int, address: int, available: int, per_chunk: int, row_stride: int) -> PlacedCell:
    """A cell over the tensor at an address, which has `available` bytes.

    Raises:
        LayoutError: the tensor has no block; the cell leaves the row, or a run its page or place.
    """
    local, page = cell.tensor, cell.page
    room = available - local.offset - local.page_bytes
    if min(local.offset, local.page_bytes, local.block_stride) < 0 or room < 0:
        raise LayoutError(f"tensor {index} has {available} bytes, which hold no block of {local.page_bytes}")
    if not page.runs or not 0 <= page.writer_index < page.num_writers:
        raise LayoutError(f"tensor {index}: a cell needs runs, and a writer_index below num_writers")
    if cell.offset < 0 or cell.block_stride < 0 or cell.offset + cell.block_stride * per_chunk > row_stride:
        raise LayoutError(f"tensor {index}: its cell ends beyond the row")
    for run in page.runs:
        steps = run.num_fragments - 1
        near, far = run.local_offset + steps * run.local_stride, run.canonical_offset + steps * run.canonical_stride
        sizes = run.local_offset, run.canonical_offset, run.local_stride, run.canonical_stride
        if min(*sizes, run.fragment_size - 1, steps) < 0 or (
            near + run.fragment_size > local.page_bytes or far + run.fragment_size > cell.block_stride
        ):
            raise LayoutError(f"tensor {index}: a run leaves its page or its place in the row")
    num_blocks = room // local.block_stride + 1 if local.block_stride else 1
    return PlacedCell(cell, joined(page.runs), address + local.offset, num_blocks)


def joined(runs: Sequence[CopyRun]) -> tuple[CopyRun, ...]:
    """The same bytes with fragments joined that touch on both sides, within a run and between neighbours."""
    found: list[CopyRun] = []
    for run in runs:
        if run.num_fragments == 1 or run.local_stride == run.canonical_stride == run.fragment_size:
            run = _single(run, run.fragment_size * run.num_fragments)
        last = found[-1] if found else None
        if last is not None and last.num_fragments == run.num_fragments == 1:
            step = run.local_offset - last.local_offset, run.canonical_offset - last.canonical_offset
            if step == (last.fragment_size, last.fragment_size):
                found[-1] = _single(last, last.fragment_size + run.fragment_size)
                continue
        found.append(run)
    return tuple(found)


def _single(run: CopyRun, size: int) -> CopyRun:
    return replace(run, fragment_size=size, num_fragments=1, local_stride=size, canonical_stride=size)


class RowTables:
    """The tiles of a plan's groups, for rows whose addresses are multiples of `alignment`, and tables of jobs.

    Args:
        groups: the cells of each group.
        alignment: a power of two, at most WIDEST.

    Raises:
        LayoutError: cells of more kinds of writers than a word has bits.
    """

    def __init__(self, groups: Sequence[Sequence[PlacedCell]], per_chunk: int, alignment: int) -> None:
        self.per_chunk = per_chunk
        self._classes = sorted({cell.writer for cells in groups for cell in cells})
        if len(self._classes) > _MAX_CLASSES:
            raise LayoutError(f"cells of {len(self._classes)} kinds of writers are more than {_MAX_CLASSES}")
        widths = [gcd(alignment, cell.width(run, per_chunk)) for cells in groups for cell in cells for run in cell.runs]
        self.width = min(widths, default=WIDEST)  # of vectors in tiles that are not wide
        parts: list[NDArray[np.void]] = [np.zeros(0, dtype=TILE_DTYPE)]
        self._first, self._end = [], []
        self._class_bytes = np.zeros((len(groups), len(self._classes)), dtype=np.int64)  # that a page has
        total, wide = 0, iter(width == WIDEST for width in widths)
        for number, cells in enumerate(groups):
            self._first.append(total)
            for cell in cells:
                kind = self._classes.index(cell.writer)
                for run in cell.runs:
                    parts.append(_tiles(cell, run, self.width, 1 << kind, next(wide)))
                    total += len(parts[-1])
                    self._class_bytes[number, kind] += run.fragment_size * run.num_fragments
            self._end.append(total)
        self.tiles = np.concatenate(parts)

    def count(self, group_pages: NDArray[np.int64]) -> int:
        """Tiles of a job with so many pages of each group."""
        return int((np.array(self._end) - self._first) @ group_pages)

    def job(
        self,
        block_ids: NDArray[np.int64],
        pages: NDArray[np.int64],
        group_pages: NDArray[np.int64],
        addresses: NDArray[np.int64],
        positions: NDArray[np.int64],
        *,
        span: int,
        elected: bool,
    ) -> JobTable:
        """A checked job's table.

        Args:
            pages: [n], which elect the writers.
            addresses, positions: [n], of the row, and of the block in the chunk that is there.
            span: tiles that are moved one after another, at least.
            elected: move only what this rank is elected to write.
        """
        entries = np.zeros(len(block_ids), dtype=ENTRY_DTYPE)
        entries["block"], entries["row"], entries["position"] = block_ids, addresses, positions
        moved = np.ones((len(pages), len(self._classes)), dtype=bool)
        for kind, (writers, index) in enumerate(self._classes if elected else ()):
            moved[:, kind] = pages % writers == index
        bits = np.left_shift(1, np.arange(len(self._classes), dtype=np.int64))
        entries["classes"] = moved @ bits
        nbytes = int((moved * np.repeat(self._class_bytes, group_pages, axis=0)).sum())
        last = np.cumsum(group_pages)
        span = max(span, -(-self.count(group_pages) // (_MAX_UNITS - len(pages))))
        groups: list[tuple[int, ...]] = []
        units = 0
        for number, count in enumerate(group_pages.tolist()):
            first, end = self._first[number], self._end[number]
            if count and first < end:
                spans = -(-(end - first) // span)
                groups.append((units, int(last[number]) - count, spans, first, end))
                units += count * spans
        headers = np.array(groups, dtype=GROUP_DTYPE)
        words = np.concatenate([headers.view(np.int64), entries.view(np.int64)])
        return JobTable(words, len(groups), units, span, nbytes)


@dataclass(frozen=True, slots=True)
class JobTable:
    """What the kernel is handed for a job."""

    words: NDArray[np.int64]  # GROUP_DTYPE of the groups that have work, then ENTRY_DTYPE of all pages
    num_groups: int
    units: int
    span: int
    nbytes: int  # that are moved


def _tiles(cell: PlacedCell, run: CopyRun, narrow: int, kind: int, wide: bool) -> NDArray[np.void]:
    """The tiles of one run of a cell."""
    width = WIDEST if wide else narrow
    length = run.fragment_size // width
    total = length * run.num_fragments
    if total * width > MAX_BYTES:
        raise LayoutError(f"a run of {total * width} bytes is longer than any page")
    first = np.arange(0, total, TILE, dtype=np.int64)
    fragment, within = np.divmod(first, length)
    period = min(length, TILE)  # of a longer fragment only what is left matters, and only if it ends in the tile
    tiles = np.zeros(first.size, dtype=TILE_DTYPE)
    local = run.local_offset + fragment * run.local_stride + within * width
    tiles["near"] = cell.base + local
    tiles["near_block"] = cell.cell.tensor.block_stride
    tiles["near_gap"] = run.local_stride - run.fragment_size
    tiles["far"] = cell.cell.offset + run.canonical_offset + fragment * run.canonical_stride + within * width
    tiles["far_block"] = cell.cell.block_stride
    tiles["far_gap"] = run.canonical_stride - run.fragment_size
    tiles["count"] = np.minimum(TILE, total - first)
    tiles["phase"] = period - np.minimum(length - within, period)
    tiles["reciprocal"] = -(-(1 << SHIFT) // period)
    tiles["kind"] = kind | (_WIDE if wide else 0)
    return tiles
