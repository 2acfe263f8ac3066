"""The converter's device code: nothing but `@triton.jit`. launch.py checks, makes the tables, and chooses the grids.

Bytes are moved as integers, never computed on, so every dtype survives bit for bit. A *vector* of VECTOR bytes (1 to
16) is what divides all sizes, strides and addresses of a call; it is loaded and stored whole, as words of 4 bytes, or
of 2 or 1 where the vector is shorter. A *tile* is 4 KiB of vectors, a row of the checksum: a program moves it in one
turn of LANES vectors, or in several where vectors are so short that a thread's registers would not do. A *unit* is
consecutive tiles of one segment of one chunk; program p does the units p, p + programs, ... so that any number of
programs does the whole call.

Addresses are 64-bit integers that the launcher has checked, and so are all byte offsets. Alignment is asserted only
after an address has become a pointer: without that, accesses through a table of addresses turn scalar.
"""

import triton
import triton.language as tl

__all__ = ["clear_sums", "move_planes", "move_tiles", "sum_segments"]

# Columns of the tables, int64.
PLACE_COLUMNS = tl.constexpr(4)  # offset in the payload area, segment number, payload bytes, bytes with padding
TILE_COLUMNS = tl.constexpr(9)  # see move_tiles
UNIT_COLUMNS = tl.constexpr(3)  # ordinal of the segment, first tile, end tile


@triton.jit
def _pointers(address, VECTOR: tl.constexpr):
    """[n, words] pointers to the words of vectors at addresses [n], which are multiples of VECTOR."""
    ELEMENT: tl.constexpr = tl.int32 if VECTOR >= 4 else (tl.int16 if VECTOR == 2 else tl.int8)
    WORDS: tl.constexpr = (VECTOR + 3) // 4
    pointer = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), VECTOR)
    return pointer[:, None] + tl.arange(0, WORDS)[None, :]


@triton.jit
def _columns(vector, k1, VECTOR: tl.constexpr):
    """[n, words] coefficients of the words of vectors at places [n] within a row."""
    WORDS: tl.constexpr = (VECTOR + 3) // 4
    column = (vector * VECTOR // 4)[:, None] + tl.arange(0, WORDS)[None, :]
    return tl.load(k1 + column).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _row_sums(words, columns, vector, VECTOR: tl.constexpr):
    """[n] sums of words [n, words] times their coefficients, modulo 2^64.

    A word shorter than 32 bits counts as its share of the 32-bit word that it is part of: the sum is linear.
    """
    if VECTOR >= 4:
        value = words.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        UNSIGNED: tl.constexpr = tl.uint16 if VECTOR == 2 else tl.uint8
        shift = vector % (4 // VECTOR) * (8 * VECTOR)
        value = words.to(UNSIGNED, bitcast=True).to(tl.uint64) << shift.to(tl.uint64)[:, None]
    return tl.sum(value * columns, axis=1)


@triton.jit
def _add(sums, total):
    """Adds a program's part: integers modulo 2^64, so their order does not show. No fence: nobody reads them here."""
    tl.atomic_add(sums, tl.sum(total, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["sums_stride", "segments", "total"])
def clear_sums(places, sums, sums_stride: tl.int64, segments: tl.int32, total: tl.int32, SPAN: tl.constexpr):
    """sums[c, number of s] = 0 for each of `total` = chunks * segments (c, s); the sums of other segments are kept."""
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    mine = at < total
    number = tl.load(places + at % segments * PLACE_COLUMNS + 1, mask=mine, other=0)
    tl.store(sums + (at // segments).to(tl.int64) * sums_stride + number, tl.zeros([SPAN], tl.int64), mask=mine)


@triton.jit(
    do_not_specialize=[
        "stage",
        "stage_stride",
        "sums_stride",
        "block_stride",
        "fragment_stride",
        "num_planes",
        "segments",
        "parts",
        "tiles",
        "units",
    ]
)
def move_planes(
    planes,
    places,
    block_ids,
    k1,
    k2,
    sums,
    stage: tl.int64,
    stage_stride: tl.int64,
    sums_stride: tl.int64,
    block_stride: tl.int64,
    fragment_stride: tl.int64,
    num_planes: tl.int32,
    segments: tl.int32,
    parts: tl.int32,
    tiles: tl.int32,
    units: tl.int32,
    FRAGMENT: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    SCATTER: tl.constexpr,
    SUMS: tl.constexpr,
    LONG: tl.constexpr,
):
    """Segments whose runs are all alike, as those of `kvx1` are. In vectors, for chunk c and segment s:

        stage[c, s, ((p * BLOCKS + b) * FRAGMENTS + f) * FRAGMENT + w]
            <->  planes[s, p] + block_ids[c, b] * block_stride + f * fragment_stride + w * VECTOR

    A gather writes zeros for absent blocks (-1) and for the padding; a scatter leaves them out. With SUMS both add the
    checksum of what is in `stage`.

    Args:
        planes: [segments, num_planes] addresses of block 0's first fragment.
        places: [segments, PLACE_COLUMNS].
        block_ids: [chunks, BLOCKS].
        k1, k2: the checksum's coefficients, int32 [1024] and int64 [rows of a segment].
        sums: int64, `sums_stride` a chunk.
        stage: address of the first chunk's payload area, `stage_stride` bytes a chunk.
        parts, tiles, units: units of a segment, tiles of a unit, units of the call.
        FRAGMENT, FRAGMENTS, BLOCKS: vectors of a fragment, fragments of a page, blocks of a chunk.
        LANES: vectors of a turn, which divides those of a tile.
        LONG: vectors of a segment, or bytes of a page, need more than 31 bits.
    """
    INDEX: tl.constexpr = tl.uint64 if LONG else tl.uint32  # unsigned: divisions become shifts or products
    VECTORS: tl.constexpr = 4096 // VECTOR  # of a tile
    TURNS: tl.constexpr = VECTORS // LANES
    PAGE: tl.constexpr = FRAGMENT * FRAGMENTS
    PLANE: tl.constexpr = PAGE * BLOCKS
    lane = tl.arange(0, LANES).to(INDEX)
    if SUMS and TURNS == 1:
        columns = _columns(lane, k1, VECTOR)  # in registers for the whole program
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        segment = unit // parts % segments
        chunk = (unit // parts // segments).to(tl.int64)
        place = places + segment * PLACE_COLUMNS
        payload = (tl.load(place + 2) // VECTOR).to(INDEX)
        padded = (tl.load(place + 3) // VECTOR).to(INDEX)
        start = stage + chunk * stage_stride + tl.load(place)
        my_planes = planes + segment * num_planes
        my_blocks = block_ids + chunk * BLOCKS
        if SUMS:
            total = tl.zeros([LANES], tl.uint64)
        end = padded
        if SCATTER:
            end = payload
        first = unit % parts * tiles * TURNS
        for turn in range(first, tl.minimum(first + tiles * TURNS, ((end + LANES - 1) // LANES).to(tl.int32))):
            at = tl.cast(turn, INDEX) * LANES
            vector = at + lane
            inside = vector < payload
            staged = _pointers(start + vector.to(tl.int64) * VECTOR, VECTOR)
            if PLANE % LANES == 0:  # the turn is in one plane
                plane = at // PLANE
                in_plane = at % PLANE
                there = at < payload
                if PAGE % LANES == 0:  # and in one page
                    block = in_plane // PAGE
                    in_page = in_plane % PAGE + lane
                else:
                    block = (in_plane + lane) // PAGE
                    in_page = (in_plane + lane) % PAGE
            else:
                plane = vector // PLANE
                there = inside
                block = vector % PLANE // PAGE
                in_page = vector % PLANE % PAGE
            block_id = tl.load(my_blocks + block, mask=there, other=-1)
            page = tl.load(my_planes + plane, mask=there, other=0) + block_id * block_stride
            within = in_page // FRAGMENT * fragment_stride.to(INDEX) + in_page % FRAGMENT * VECTOR
            paged = _pointers(page + within.to(tl.int64), VECTOR)
            present = (inside & (block_id >= 0))[:, None]
            if SCATTER:
                words = tl.load(staged, mask=inside[:, None], other=0)
                tl.store(paged, words, mask=present)
            else:
                words = tl.load(paged, mask=present, other=0)
                tl.store(staged, words, mask=(vector < padded)[:, None])
            if SUMS:
                row = tl.load(k2 + turn // TURNS, mask=at < payload, other=0).to(tl.uint64, bitcast=True)
                if TURNS > 1:
                    columns = _columns(at % VECTORS + lane, k1, VECTOR)
                total += _row_sums(words, columns, lane, VECTOR) * row
        if SUMS:
            _add(sums + chunk * sums_stride + tl.load(place + 1), total)


@triton.jit(do_not_specialize=["stage", "stage_stride", "sums_stride", "blocks", "chunk_units", "units"])
def move_tiles(
    tile_table,
    unit_table,
    places,
    block_ids,
    k1,
    k2,
    sums,
    stage: tl.int64,
    stage_stride: tl.int64,
    sums_stride: tl.int64,
    blocks: tl.int32,
    chunk_units: tl.int32,
    units: tl.int32,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    SCATTER: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Segments of any runs, each cut into tiles that lie in one run and one block. For chunk c and byte w of a tile:

        stage[c, segment, offset + w]  <->  address + block_ids[c, position] * block_stride
                                            + (skip + w) // fragment * fragment_stride + (skip + w) % fragment

    Args:
        tile_table: [tiles, TILE_COLUMNS]: offset in the segment, payload bytes (<= TILE), bytes with padding, address,
            block stride, position of the block in the chunk, skip, fragment, fragment stride.
        unit_table: [chunk_units, UNIT_COLUMNS], of one chunk: segment's ordinal, first tile, end tile.
        blocks: of a chunk.
        units: of the call. Others as for `move_planes`.
    """
    TILE: tl.constexpr = 4096
    VECTORS: tl.constexpr = TILE // VECTOR
    TURNS: tl.constexpr = VECTORS // LANES
    lane_of_turn = tl.arange(0, LANES)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        chunk = (unit // chunk_units).to(tl.int64)
        mine = unit_table + unit % chunk_units * UNIT_COLUMNS
        place = places + tl.load(mine) * PLACE_COLUMNS
        start = stage + chunk * stage_stride + tl.load(place)
        if SUMS:
            total = tl.zeros([LANES], tl.uint64)
        for turn in range(tl.load(mine + 1) * TURNS, tl.load(mine + 2) * TURNS):
            entry = tile_table + turn // TURNS * TILE_COLUMNS
            lane = tl.cast(turn % TURNS * LANES, tl.int32) + lane_of_turn
            offset = tl.load(entry)
            inside = lane < (tl.load(entry + 1) // VECTOR).to(tl.int32)
            staged = _pointers(start + offset + lane.to(tl.int64) * VECTOR, VECTOR)
            block_id = tl.load(block_ids + chunk * blocks + tl.load(entry + 5))
            vector = (tl.load(entry + 6) // VECTOR).to(tl.uint32) + lane.to(tl.uint32)
            fragment = (tl.load(entry + 7) // VECTOR).to(tl.uint32)
            number = vector // fragment
            address = tl.load(entry + 3) + block_id * tl.load(entry + 4)
            address += number.to(tl.int64) * tl.load(entry + 8) + (vector - number * fragment).to(tl.int64) * VECTOR
            paged = _pointers(address, VECTOR)
            present = (inside & (block_id >= 0))[:, None]
            if SCATTER:
                words = tl.load(staged, mask=inside[:, None], other=0)
                tl.store(paged, words, mask=present)
            else:
                words = tl.load(paged, mask=present, other=0)
                tl.store(staged, words, mask=(lane < (tl.load(entry + 2) // VECTOR).to(tl.int32))[:, None])
            if SUMS:
                in_row = (offset % TILE // VECTOR).to(tl.int32) + lane  # a tile may begin within a row of the checksum
                row = tl.load(k2 + offset // TILE + in_row // VECTORS, mask=inside, other=0)
                part = _row_sums(words, _columns(in_row % VECTORS, k1, VECTOR), in_row, VECTOR)
                total += part * row.to(tl.uint64, bitcast=True)
        if SUMS:
            _add(sums + chunk * sums_stride + tl.load(place + 1), total)


@triton.jit(do_not_specialize=["stage", "stage_stride", "sums_stride", "segments", "parts", "tiles", "units"])
def sum_segments(
    places,
    k1,
    k2,
    sums,
    stage: tl.int64,
    stage_stride: tl.int64,
    sums_stride: tl.int64,
    segments: tl.int32,
    parts: tl.int32,
    tiles: tl.int32,
    units: tl.int32,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    LONG: tl.constexpr,
):
    """sums[c, number of s] += the checksum of the payload of segment s of chunk c in `stage`. See `move_planes`."""
    INDEX: tl.constexpr = tl.uint64 if LONG else tl.uint32
    VECTORS: tl.constexpr = 4096 // VECTOR
    TURNS: tl.constexpr = VECTORS // LANES
    lane = tl.arange(0, LANES).to(INDEX)
    if TURNS == 1:
        columns = _columns(lane, k1, VECTOR)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        chunk = (unit // parts // segments).to(tl.int64)
        place = places + unit // parts % segments * PLACE_COLUMNS
        payload = (tl.load(place + 2) // VECTOR).to(INDEX)
        start = stage + chunk * stage_stride + tl.load(place)
        total = tl.zeros([LANES], tl.uint64)
        first = unit % parts * tiles * TURNS
        for turn in range(first, tl.minimum(first + tiles * TURNS, ((payload + LANES - 1) // LANES).to(tl.int32))):
            vector = tl.cast(turn, INDEX) * LANES + lane
            staged = _pointers(start + vector.to(tl.int64) * VECTOR, VECTOR)
            words = tl.load(staged, mask=(vector < payload)[:, None], other=0)
            row = tl.load(k2 + turn // TURNS).to(tl.uint64, bitcast=True)
            if TURNS > 1:
                columns = _columns(vector % VECTORS, k1, VECTOR)
            total += _row_sums(words, columns, lane, VECTOR) * row
        _add(sums + chunk * sums_stride + tl.load(place + 1), total)
