"""Device code of `launch_rows`, and nothing else: every check and every table is the launcher's."""

import triton
import triton.language as tl

from kvxfer.convert import row_tables

__all__ = ["move_rows"]

# Words of the tables' rows: a test holds that row_tables has them in this order.
NEAR = tl.constexpr(0)
NEAR_BLOCK = tl.constexpr(1)
NEAR_GAP = tl.constexpr(2)
FAR = tl.constexpr(3)
FAR_BLOCK = tl.constexpr(4)
FAR_GAP = tl.constexpr(5)
COUNT = tl.constexpr(6)
PHASE = tl.constexpr(7)
RECIPROCAL = tl.constexpr(8)
KIND = tl.constexpr(9)
TILE_WORDS = tl.constexpr(10)

FIRST_UNIT = tl.constexpr(0)
FIRST_ENTRY = tl.constexpr(1)
SPANS = tl.constexpr(2)
FIRST_TILE = tl.constexpr(3)
END_TILE = tl.constexpr(4)
GROUP_WORDS = tl.constexpr(5)

BLOCK = tl.constexpr(0)
ROW = tl.constexpr(1)
POSITION = tl.constexpr(2)
CLASSES = tl.constexpr(3)
ENTRY_WORDS = tl.constexpr(4)

TILE = tl.constexpr(row_tables.TILE)
SHIFT = tl.constexpr(row_tables.SHIFT)


@triton.jit
def _move_tile(tile, block, row, position, WIDTH: tl.constexpr, SCATTER: tl.constexpr):
    """Moves one tile of a page: far[row, position, i] = near[block, i] for its vectors i, or the other way round.

    With i' = phase + i, the vector i lies i * WIDTH + i' // (vectors of a fragment) * gap bytes after the tile's first.
    The alignment is asserted after the cast to a pointer: without that, accesses turn scalar.
    """
    BYTES: tl.constexpr = WIDTH if WIDTH < 8 else 8
    WORD: tl.constexpr = tl.int64 if BYTES == 8 else (tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8))
    lane = tl.arange(0, TILE)
    step = tl.load(tile + PHASE).to(tl.int32) + lane
    fragment = (step * tl.load(tile + RECIPROCAL).to(tl.int32) >> SHIFT).to(tl.int64)
    near = (
        tl.load(tile + NEAR) + block * tl.load(tile + NEAR_BLOCK) + lane * WIDTH + fragment * tl.load(tile + NEAR_GAP)
    )
    far = row + tl.load(tile + FAR) + position * tl.load(tile + FAR_BLOCK)
    far = far + lane * WIDTH + fragment * tl.load(tile + FAR_GAP)
    word = tl.arange(0, WIDTH // BYTES)[None, :]
    near_words = tl.multiple_of(near.to(tl.pointer_type(WORD)), WIDTH)[:, None] + word
    far_words = tl.multiple_of(far.to(tl.pointer_type(WORD)), WIDTH)[:, None] + word
    here = (lane < tl.load(tile + COUNT).to(tl.int32))[:, None]
    if SCATTER:
        tl.store(near_words, tl.load(far_words, mask=here), mask=here)
    else:
        tl.store(far_words, tl.load(near_words, mask=here), mask=here)


@triton.jit(do_not_specialize=["num_groups", "units", "span"])
def move_rows(
    tiles, job, num_groups: tl.int32, units: tl.int32, span: tl.int32, WIDTH: tl.constexpr, SCATTER: tl.constexpr
):
    """Moves all tiles of all pages of a job between the pages' blocks and their rows.

    A unit is up to `span` tiles of one page; a program takes every num_programs-th, so any number of programs will do.
    Bytes are moved as integers and never computed on. Addresses and what is added to them are 64-bit; counts of units,
    tiles and pages fit 31 bits.

    Args:
        tiles: int64 [tiles of all groups, TILE_WORDS].
        job: int64: GROUP_WORDS for each of `num_groups` groups by rising FIRST_UNIT, then ENTRY_WORDS for each page.
        WIDTH: bytes of a vector in tiles that are not marked to have 16; everything is a multiple of it.
        SCATTER: from rows to blocks.
    """
    entries = job + num_groups * GROUP_WORDS
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        group = 0
        for later in range(1, num_groups):
            group += (unit >= tl.load(job + later * GROUP_WORDS + FIRST_UNIT)).to(tl.int32)
        header = job + group * GROUP_WORDS
        spans = tl.load(header + SPANS).to(tl.int32)
        local = unit - tl.load(header + FIRST_UNIT).to(tl.int32)
        entry = entries + (tl.load(header + FIRST_ENTRY) + local // spans) * ENTRY_WORDS
        block, row = tl.load(entry + BLOCK), tl.load(entry + ROW)
        position, classes = tl.load(entry + POSITION), tl.load(entry + CLASSES)
        skipped = local % spans * span
        first, end = tl.load(header + FIRST_TILE) + skipped, tl.load(header + END_TILE)
        for number in range(tl.minimum(end - first, span).to(tl.int32)):
            tile = tiles + (first + number) * TILE_WORDS
            kind = tl.load(tile + KIND)
            if kind & classes != 0:  # classes have no sign
                if WIDTH == 16:  # noqa: SIM114  known to the compiler, the other not
                    _move_tile(tile, block, row, position, 16, SCATTER)
                elif kind < 0:
                    _move_tile(tile, block, row, position, 16, SCATTER)
                else:
                    _move_tile(tile, block, row, position, WIDTH, SCATTER)
