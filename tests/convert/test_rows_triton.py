"""The row converter of devices, in the interpreter: plans of several groups, widths, tiles, staging, 64-bit places.

That its bytes are the oracle's is held by test_rows.py, under the same tests as the host's converters.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.convert import launch_rows, row_kernels, row_tables
from kvxfer.convert.launch_rows import DeviceRowPlan
from kvxfer.convert.native_rows import RowMemory
from kvxfer.convert.row_tables import TILE
from kvxfer.rows import RowMapping
from tests.convert.common import assert_same
from tests.convert.device_plans import Counted, aligned, aligned_rows, both_ways, interpreted, widths
from tests.convert.row_plans import cell, group, int64, noise, run
from tests.oracle import POISON

pytestmark = interpreted
GiB = 1 << 30
MAP_NORESERVE = 0x4000  # Linux's; Python 3.11's mmap does not name it


# ---- tables


def test_the_kernel_reads_the_tables_columns() -> None:
    for dtype, size in (
        (row_tables.TILE_DTYPE, "TILE_WORDS"),
        (row_tables.GROUP_DTYPE, "GROUP_WORDS"),
        (row_tables.ENTRY_DTYPE, "ENTRY_WORDS"),
    ):
        assert dtype.names is not None
        for place, name in enumerate(dtype.names):
            assert getattr(row_kernels, name.upper()).value == place, name
        assert getattr(row_kernels, size).value == len(dtype.names) == dtype.itemsize // 8


def test_the_reciprocal_divides() -> None:
    """Every x and d that a tile can have, by integers without a limit; the products stay below 2**31."""
    for d in range(1, TILE + 1):
        reciprocal = -(-(1 << row_tables.SHIFT) // d)
        x = np.arange(2 * TILE, dtype=object)
        product = x * reciprocal
        assert product.max() < 2**31
        assert ((product >> row_tables.SHIFT) == x // d).all(), d


@pytest.mark.parametrize("fragment", [16, 48, 496 * 16, TILE * 16, TILE * 16 + 16, 3 * TILE * 16 - 32])
def test_tiles_say_where_each_vector_of_a_run_is(fragment: int) -> None:
    """As the kernel reads them, in numpy: from the run's own words, for runs of many tiles."""
    count = max(2, 5 * TILE * 16 // fragment)
    one = run(32, 64, fragment, count, fragment + 48, 2 * fragment)
    page, place = 32 + count * (fragment + 48), 64 + 2 * count * fragment
    placed = row_tables.place_cell(cell([one], page=page, place=place, at=16), 0, 4096, page, 1, place + 16)
    tables = row_tables.RowTables([[placed]], 1, 16)
    near, far = [], []
    for tile in tables.tiles:
        lane = np.arange(tile["count"])
        crossed = (tile["phase"] + lane) * tile["reciprocal"] >> row_tables.SHIFT
        near.append(tile["near"] + lane * 16 + crossed * tile["near_gap"])
        far.append(tile["far"] + lane * 16 + crossed * tile["far_gap"])
    number, within = np.divmod(np.arange(count * fragment // 16), fragment // 16)
    assert (np.concatenate(near) == 4096 + 32 + number * (fragment + 48) + within * 16).all()
    assert (np.concatenate(far) == 16 + 64 + number * 2 * fragment + within * 16).all()


def test_units_of_the_largest_job_are_counted_in_31_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, in 10: three pages of eight tiles take spans of four."""
    size = 8 * TILE * 16
    placed = row_tables.place_cell(cell([run(0, 0, size)], page=size, place=size), 0, 4096, 4 * size, 1, size)
    tables = row_tables.RowTables([[placed]], 1, 16)
    job = int64(0, 1, 2), int64(0, 1, 2), int64(3), int64(0, 0, 0), int64(0, 0, 0)
    assert tables.job(*job, span=1, elected=False).units == 24
    monkeypatch.setattr(row_tables, "_MAX_UNITS", 10)
    table = tables.job(*job, span=1, elected=False)
    assert (table.units, table.span) == (6, 4)


def test_writers_are_elected_by_the_page_and_not_by_its_place_in_the_chunk() -> None:
    placed = row_tables.place_cell(
        cell([run(0, 0, 16)], page=16, place=16, num_writers=3, writer_index=1), 0, 4096, 64, 2, 32
    )
    tables = row_tables.RowTables([[placed]], 2, 16)
    pages = int64(4, 10, 1, 2)
    job = int64(0, 1, 2, 3), pages, int64(4), int64(0, 0, 0, 0), pages % 2
    assert tables.job(*job, span=1, elected=True).nbytes == 3 * 16  # all but the last; by place it were one


def test_fragments_that_touch_are_one() -> None:
    touching = (run(0, 8, 4, 3, 4, 4), run(12, 20, 4), run(16, 32, 4), run(20, 36, 2, 2, 4, 4))
    assert row_tables.joined(touching) == (run(0, 8, 16), run(16, 32, 4), run(20, 36, 2, 2, 4, 4))


# ---- plans


def test_groups_that_share_tensors_are_one_job_and_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a hybrid model: two groups' pages in one tensor, of other sizes; a tensor of one group alone; a group that
    has no page in the job; and one whose rank has no tensor."""
    shared, own = noise(9 * 64, seed=1), noise(9 * 48, seed=2)
    small = cell([run(0, 0, 40)], page=40, place=64, stride=64)
    large = cell([run(0, 0, 16, 2, 32, 16), run(16, 32, 16, 2, 32, 16)], page=64, place=64)
    beside = cell([run(0, 0, 48)], page=48, place=48, at=128)
    none = RowMapping(cells=(), blocks_per_chunk=2, row_bytes=8, topology=None)
    groups = [group(small, per_chunk=2), group(beside, per_chunk=2), none, group(large, beside, per_chunk=2)]
    job = (int64(3, 0, 7, 8, 5, 1), int64(0, 5, 1, 2, 3, 9), int64(2, 0, 1, 3))
    launches: list[Any] = []
    monkeypatch.setattr(launch_rows, "move_rows", Counted(row_kernels.move_rows, launches))
    both_ways(groups, [[shared], [own], [], [shared, own]], np.full((5, 240), POISON, dtype=np.uint8), job)
    assert len(launches) == 2


@settings(max_examples=12, deadline=None, derandomize=True)  # some plans take the interpreter minutes: the slow one's
@given(st.data())
def test_any_plan_copies_what_is_copied_by_hand(data: st.DataObject) -> None:
    check_any_plan(data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_of_many_plans_copies_what_is_copied_by_hand(data: st.DataObject) -> None:
    check_any_plan(data)


def check_any_plan(data: st.DataObject) -> None:
    """Fragments of any size, stride and alignment; pages cut into runs at random, in any canonical order."""
    draw = data.draw
    grain = draw(st.sampled_from([1, 2, 4, 8, 16]))
    per_chunk, num_rows, num_blocks = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    groups, tensors = [], []
    for number in range(draw(st.integers(1, 2))):
        cells, mine, at = [], [], grain * draw(st.integers(0, 9))
        for _ in range(draw(st.integers(1, 2))):
            step = draw(st.sampled_from([grain, 16]))
            sizes = [step * n for n in draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))]
            order = draw(st.permutations(range(len(sizes))))
            counts = [draw(st.integers(1, 4)) for _ in sizes]
            starts = np.cumsum([0, *(s * c for s, c in zip(sizes, counts, strict=True))])
            far, placed = 0, {}
            for index in order:  # the canonical side has gaps
                gap = step * draw(st.integers(0, 70))
                placed[index] = run(int(starts[index]), far, sizes[index], counts[index], 0, sizes[index] + gap)
                far += (sizes[index] + gap) * counts[index]
            page = int(starts[-1])
            padding, offset = step * draw(st.integers(0, 9)), step * draw(st.integers(0, 9))
            writers = draw(st.integers(1, 3))
            cells.append(
                cell(
                    [placed[index] for index in range(len(sizes))], page=page, place=far, at=at,
                    stride=page + padding, offset=offset,
                    num_writers=writers, writer_index=draw(st.integers(0, writers - 1)),
                )
            )  # fmt: skip
            at += far * per_chunk + step * draw(st.integers(0, 9))
            mine.append(aligned(offset + num_blocks * (page + padding), seed=number))
        groups.append(group(*cells, per_chunk=per_chunk))
        tensors.append(mine)
    width = max(g.row_bytes for g in groups) + draw(st.integers(0, 9))
    rows = aligned_rows(num_rows, width + -width % grain)
    # A row is of one group, as in vLLM: of two that write one, the order of the programs would say whose bytes stay.
    owners = [draw(st.integers(0, len(groups) - 1)) for _ in range(num_rows)]
    theirs = [
        [row * per_chunk + place for row, owner in enumerate(owners) if owner == number for place in range(per_chunk)]
        for number in range(len(groups))
    ]
    counts = [draw(st.integers(0, min(num_blocks, len(mine), 3))) for mine in theirs]
    ids = [i for count in counts for i in draw(st.permutations(range(num_blocks)))[:count]]
    pages = [p for mine, count in zip(theirs, counts, strict=True) for p in draw(st.permutations(mine))[:count]]
    both_ways(groups, tensors, rows, (int64(*ids), int64(*pages), int64(*counts)), draw(st.sampled_from([None, 1, 2])))


@pytest.mark.parametrize(("programs", "grid"), [(None, 6), (1, 1), (4, 4), (1000, 6)])
def test_pages_of_many_tiles_under_any_number_of_programs(
    monkeypatch: pytest.MonkeyPatch, programs: int | None, grid: int
) -> None:
    """Eleven tiles a page, five of them a unit; fragments of less than a tile and of several, that end within one."""
    short, long = 16 * 96, 16 * (2 * TILE + 40)
    runs = [run(0, 0, short, 20, short, 2 * short), run(20 * short, 40 * short, long, 3, long + 32, long + 64)]
    page, place = 20 * short + 3 * (long + 32), 40 * short + 3 * (long + 64)
    tensor = aligned(4 * (page + 32), seed=3)
    grids: list[Any] = []
    monkeypatch.setattr(launch_rows, "_PROGRAMS_A_PROCESSOR", 4)
    monkeypatch.setattr(launch_rows, "move_rows", Counted(row_kernels.move_rows, grids))
    job = int64(3, 0), int64(1, 0), int64(2)
    mapping = group(cell(runs, page=page, place=place, stride=page + 32))
    plan = both_ways([mapping], [[tensor]], aligned_rows(2, place), job, programs)
    assert widths(plan) == (16, {True})
    assert grids == [(grid,), (grid,)]


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({}, 16),
        ({"size": 72}, 8),
        ({"far_step": 136}, 8),
        ({"near_step": 100}, 4),
        ({"stride": 1030}, 2),
        ({"offset": 1}, 1),
        ({"at": 4}, 4),
        ({"place": 1034}, 2),
        ({"tensor_at": 8}, 8),
        ({"rows_at": 4}, 4),
        ({"row_stride": 2 * 1048 + 6}, 2),
    ],
    ids=str,
)
def test_vectors_are_as_wide_as_everything_divides(change: dict[str, int], width: int) -> None:
    """The interpreter does not mind an address that a device would fault on, so the width itself is looked at."""
    d = {"size": 64, "near_step": 96, "far_step": 128, "stride": 1024, "offset": 0, "at": 0, "place": 1040}
    d |= {"tensor_at": 0, "rows_at": 0, "row_stride": 0} | change
    one = cell(
        [run(0, 0, d["size"], 7, d["near_step"], d["far_step"])],
        page=1008, place=d["place"], at=d["at"], stride=d["stride"], offset=d["offset"],
    )  # fmt: skip
    tensor = aligned(d["offset"] + 2 * d["stride"], at=d["tensor_at"], seed=5)
    stride = d["row_stride"] or -(-(d["at"] + 2 * d["place"]) // 16) * 16
    rows = aligned_rows(2, stride, at=d["rows_at"])
    plan = both_ways([group(one, per_chunk=2)], [[tensor]], rows, (int64(1, 0), int64(0, 3), int64(2)))
    assert widths(plan) == (width, {width == 16})
    for tables, _ in plan._tables.values():
        every = [tables.tiles[name] for name in ("near", "near_block", "far", "far_block")]
        assert not any((column % width).any() for column in every)


def test_a_cell_of_odd_sizes_does_not_narrow_the_others() -> None:
    """A latent of 1,152 bytes a token beside an indexer's keys of 132: the first is moved by 16, the other by 4."""
    latent, keys = 4 * 1152, 4 * 132
    cells = [
        cell([run(0, 0, latent)], page=latent, place=latent, num_writers=2, writer_index=1),
        cell([run(0, 0, keys)], page=keys, place=keys, at=latent, stride=keys + 4),
    ]
    tensors = [aligned(3 * latent, seed=1), aligned(3 * (keys + 4), seed=2)]
    job = int64(2, 0), int64(1, 0), int64(2)
    plan = both_ways([group(*cells)], [tensors], aligned_rows(2, latent + keys), job)
    assert widths(plan) == (4, {True, False})


def test_staging_is_laid_out_as_rows_but_the_pages_say_who_writes() -> None:
    """Rows 5 and 2 of the tier in staging rows 0 and 1, of other alignment: pages 5, 4 and 11 elect the writers."""
    tensor = aligned(4 * 64, seed=1)
    mapping = group(cell([run(0, 0, 64)], page=64, place=64, at=32, num_writers=2, writer_index=1), per_chunk=2)
    tier = aligned_rows(6, 192)
    plan = DeviceRowPlan([mapping], [[tensor]], RowMemory.of(tier))
    staging = aligned_rows(2, plan.row_bytes, at=8)
    ids, pages, places, counts = int64(3, 1, 2), int64(11, 4, 5), int64(1, 2, 3), int64(3)
    assert plan.gather(ids, pages, counts, rows=RowMemory.of(staging), places=places) == 2 * 64
    want = np.full_like(staging, POISON)
    want[0, 32 + 64 : 32 + 128] = tensor[3 * 64 :]
    want[1, 32 + 64 : 32 + 128] = tensor[2 * 64 : 3 * 64]
    assert_same(staging, want)
    assert (tier == POISON).all()
    # The interpreter does not mind, a device would: vectors are of what both the cell and the rows in hand divide.
    job = plan.prepare(ids, pages, counts, gather=True, rows=RowMemory.of(staging), places=places)
    assert (job.width, plan.prepare(ids, pages, counts, gather=True).width) == (8, 16)
    staging[1, 32:96] = 7
    tensor.fill(POISON)
    assert plan.scatter(ids, pages, counts, rows=RowMemory.of(staging), places=places) == 3 * 64
    assert_same(tensor[3 * 64 :], want[0, 96:160])
    assert (tensor[64:128] == 7).all()
    assert_same(tensor[128:192], want[1, 96:160])
    assert (tensor[:64] == POISON).all()


def test_a_prepared_job_can_be_launched_again() -> None:
    tensor, rows = aligned(3 * 32, seed=1), aligned_rows(2, 32)
    plan = DeviceRowPlan([group(cell([run(0, 0, 32)], page=32, place=32))], [[tensor]], RowMemory.of(rows))
    job = plan.prepare(int64(2), int64(1), int64(1), gather=True)
    assert (rows == POISON).all()
    for value in (1, 2):
        tensor.fill(value)
        assert plan.launch(job) == 32
        assert (rows[1] == value).all()
        assert (rows[0] == POISON).all()


def test_torch_tensors_of_any_dtype_are_moved_as_they_are() -> None:
    tensor = torch.from_numpy(noise(3, 2, 8)).view(torch.bfloat16)
    rows = np.full((2, 16), POISON, dtype=np.uint8)
    plan = DeviceRowPlan([group(cell([run(0, 0, 16)], page=16, place=16))], [[tensor]], RowMemory.of(rows))
    assert plan.gather(int64(2, 0), int64(0, 1), int64(2)) == 32
    assert_same(rows, tensor.view(torch.uint8).numpy().reshape(3, 16)[[2, 0]])


def test_blocks_and_rows_beyond_4_gib() -> None:
    """R14: 1.5 GiB between blocks and 2.5 GiB between rows, in memory that is reserved and hardly used."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    step, row = 3 * GiB // 2 + 64, 5 * GiB // 2
    tensor = np.frombuffer(mmap.mmap(-1, 5 * step, flags=flags), dtype=np.uint8)
    rows = np.frombuffer(mmap.mmap(-1, 3 * row, flags=flags), dtype=np.uint8).reshape(3, row)
    at = 2 * GiB + 5
    # Two fragments that are a GiB apart on both sides, and a second block of the chunk 1 GiB on.
    mapping = group(
        cell([run(0, 0, 24, 2, GiB, GiB // 8)], page=GiB + 24, place=GiB // 4, at=at, stride=step), per_chunk=1
    )
    source = noise(2, 48)
    for block, page in zip((3, 2), source, strict=True):
        tensor[block * step : block * step + 24] = page[:24]
        tensor[block * step + GiB : block * step + GiB + 24] = page[24:]
    plan = DeviceRowPlan([mapping], [[tensor]], RowMemory.of(rows))
    job = int64(3, 2), int64(2, 1), int64(2)
    assert plan.gather(*job) == 96
    for row_id, page in zip((2, 1), source, strict=True):
        assert_same(rows[row_id, at : at + 24], page[:24])
        assert_same(rows[row_id, at + GiB // 8 : at + GiB // 8 + 24], page[24:])
        assert not rows[row_id, at + 24 : at + 48].any()
    for block in (3, 2):
        tensor[block * step : block * step + 24] = 0
        tensor[block * step + GiB : block * step + GiB + 24] = 0
    assert plan.scatter(*job) == 96
    for block, page in zip((3, 2), source, strict=True):
        assert_same(tensor[block * step : block * step + 24], page[:24])
        assert_same(tensor[block * step + GiB : block * step + GiB + 24], page[24:])
