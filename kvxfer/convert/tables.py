"""What the Triton kernels read beside pages and chunks, worked out in numpy: where planes, segments and tiles are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvxfer.mapping import CanonicalMapping
from kvxfer.slot import round_up

TILE = 4096  # bytes that a program moves in one turn: a row of the checksum
WIDEST = 16  # bytes of the largest vector
UNIT_TILES = 8  # most tiles of a unit, where a table lists them

Table = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Segments whose runs are all alike: planes side by side, of blocks, of fragments. Strides and sizes in bytes."""

    planes: int  # runs of a segment
    blocks: int  # of a chunk
    fragments: int  # of a page
    fragment: int
    fragment_stride: int
    block_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Segments of any runs, cut into tiles: the tables of `kernels.move_tiles`."""

    tiles: Table
    units: Table
    payload_units: int  # the first so many units; the others are padding, which only a gather writes


def shape_of(mapping: CanonicalMapping) -> Shape | None:
    """The one shape of all of a mapping's segments, or None."""
    runs, blocks = mapping.runs, mapping.blocks_per_chunk
    sizes, counts, strides = _joined(mapping)
    block_strides = {mapping.tensors[tensor].block_stride for tensor in np.unique(runs["tensor"]).tolist()}
    if any(len(np.unique(column)) > 1 for column in (sizes, counts, strides)) or len(block_strides) > 1:
        return None
    planes, rest = divmod(len(runs), len(mapping.segments))
    page = int(sizes[0] * counts[0])
    if rest or (blocks > 1 and mapping.canonical_block_stride != page):
        return None
    segment, start = (runs[name].reshape(-1, planes).astype(np.int64) for name in ("segment", "canonical_offset"))
    if (segment != segment[:, :1]).any() or (start != np.arange(planes) * (blocks * page)).any():
        return None
    return Shape(
        planes=planes,
        blocks=blocks,
        fragments=int(counts[0]),
        fragment=int(sizes[0]),
        fragment_stride=int(strides[0]),
        block_stride=block_strides.pop(),
    )


def grain_of(mapping: CanonicalMapping, addresses: Sequence[int]) -> int:
    """The largest vector, of 1 to 16 bytes, that divides all fragments and where they are, in pages and segments."""
    sizes, _, strides = _joined(mapping)
    numbers = [*np.unique(sizes).tolist(), *np.unique(strides).tolist(), mapping.canonical_block_stride]
    numbers += [mapping.tensors[tensor].block_stride for tensor in np.unique(mapping.runs["tensor"]).tolist()]
    numbers += np.unique(_bases(mapping, addresses)).tolist()
    numbers += np.unique(mapping.runs["canonical_offset"]).tolist()
    return gcd(WIDEST, *map(int, numbers))


def places_of(mapping: CanonicalMapping) -> Table:
    """For each segment of the rank: its offset in the payload area, its number, its bytes without and with padding."""
    slot = mapping.slot
    rows = []
    for segment in mapping.segments:
        size = slot.segment_length(segment)
        rows.append((segment * slot.segment_stride, segment, size, round_up(size, slot.alignment)))
    return np.array(rows, dtype=np.int64)


def planes_of(mapping: CanonicalMapping, shape: Shape, addresses: Sequence[int]) -> Table:
    """[segments, planes]: the address of block 0's first fragment. Head, K or V, and layer are all in it."""
    return _bases(mapping, addresses).reshape(-1, shape.planes)


def tiles_of(mapping: CanonicalMapping, addresses: Sequence[int]) -> Tiles:
    """Every segment cut where a run or a block of the chunk ends, and then into tiles.

    A long fragment is cut off from the next one, so that a tile's offsets count in 32 bits.
    """
    ordinals: list[int] = []
    tiles: list[tuple[int, ...]] = []
    for tile in _pieces(mapping, addresses):
        ordinal, *entry = tile
        ordinals.append(ordinal)
        tiles.append(tuple(entry))
    units, padding = [], []
    pads: list[tuple[int, ...]] = []
    bounds = np.searchsorted(ordinals, np.arange(len(mapping.segments) + 1)).tolist()
    for ordinal, (_, _, size, padded) in enumerate(places_of(mapping).tolist()):
        first, end = bounds[ordinal], bounds[ordinal + 1]
        units += [(ordinal, at, min(at + UNIT_TILES, end)) for at in range(first, end, UNIT_TILES)]
        begin = len(tiles) + len(pads)
        pads += [(at, 0, min(TILE, padded - at), 0, 0, 0, 0, TILE, 0) for at in range(size, padded, TILE)]
        last = len(tiles) + len(pads)
        padding += [(ordinal, at, min(at + UNIT_TILES, last)) for at in range(begin, last, UNIT_TILES)]
    return Tiles(
        tiles=np.array(tiles + pads, dtype=np.int64),
        units=np.array(units + padding, dtype=np.int64),
        payload_units=len(units),
    )


def _pieces(mapping: CanonicalMapping, addresses: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """(segment's ordinal, *row of `kernels.move_tiles`' tile_table) of all payload, segments in order."""
    ordinal_of = {segment: ordinal for ordinal, segment in enumerate(mapping.segments)}
    sizes, counts, strides = (column.tolist() for column in _joined(mapping))
    bases = _bases(mapping, addresses).tolist()
    for number, run in enumerate(mapping.runs):
        ordinal = ordinal_of[int(run["segment"])]
        block_stride = mapping.tensors[run["tensor"]].block_stride
        size, stride = sizes[number], strides[number]
        # A piece is cut into tiles by itself: a whole page's part, or one fragment where that is long.
        length, pieces = (size, counts[number]) if size > TILE else (size * counts[number], 1)
        for position in range(mapping.blocks_per_chunk):
            start = int(run["canonical_offset"]) + position * mapping.canonical_block_stride
            for piece in range(pieces):
                base = bases[number] + piece * stride
                for at in range(0, length, TILE):
                    count = min(TILE, length - at)
                    whole, skip = divmod(at, size)
                    address, fragment = base + whole * stride, size
                    if size > TILE:
                        address, skip, fragment = base + at, 0, TILE
                    yield (
                        ordinal, start + piece * length + at, count, count,
                        address, block_stride, position, skip, fragment, stride,
                    )  # fmt: skip


def _joined(mapping: CanonicalMapping) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Fragment size, number and stride of each run; fragments that touch are one."""
    runs = mapping.runs
    size, count = runs["fragment_size"], runs["num_fragments"]
    touch = (runs["local_stride"] == size) | (count == 1)
    size = np.where(touch, size * count, size)
    return size, np.where(touch, np.uint64(1), count), np.where(touch, size, runs["local_stride"])


def _bases(mapping: CanonicalMapping, addresses: Sequence[int]) -> Table:
    """The address of each run's first fragment in block 0."""
    tensors: Table = np.array(addresses, dtype=np.int64)[mapping.runs["tensor"]]
    return tensors + mapping.runs["local_offset"].astype(np.int64)
