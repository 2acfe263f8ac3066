"""What only the native rows have: plans of several groups, threads, streaming, 64-bit places, instruction sets.

That its bytes are the oracle's is held by test_rows.py, under the same tests as the reference.
"""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.convert.native_rows import RowMemory, RowPlan, gather_rows, scatter_rows
from kvxfer.errors import LayoutError
from kvxfer.rows import RowCell, RowMapping
from tests.convert.common import assert_same
from tests.convert.row_plans import Bytes, cell, check_both_ways, group, int64, noise, run
from tests.oracle import POISON

GiB = 1 << 30
MAP_NORESERVE = 0x4000  # Linux's; Python 3.11's mmap does not name it


def both_ways(groups: list[RowMapping], tensors: list[list[Bytes]], rows: Bytes, job: Any, threads: int = 1) -> None:
    """Gather and scatter are what is done by hand, bytes that are counted and bytes that nobody named included."""
    plan = RowPlan(groups, tensors, RowMemory.of(rows))
    check_both_ways(plan, groups, tensors, rows, job, threads=threads)


def test_groups_that_share_tensors_are_one_job() -> None:
    """As in a hybrid model: two groups' pages in one tensor, of other sizes; a tensor of one group alone."""
    shared, own = noise(9 * 64, seed=1), noise(9 * 48, seed=2)
    small = cell([run(0, 0, 40)], page=40, place=64, stride=64)
    large = cell([run(0, 0, 16, 2, 32, 16), run(16, 32, 16, 2, 32, 16)], page=64, place=64)
    beside = cell([run(0, 0, 48)], page=48, place=48, at=128)
    groups = [group(small, per_chunk=2), group(large, beside, per_chunk=2)]
    job = (int64(3, 0, 8, 5, 1), int64(0, 5, 2, 3, 9), int64(2, 3))
    rows = np.full((5, 240), POISON, dtype=np.uint8)
    both_ways(groups, [[shared], [shared, own]], rows, job)


def test_a_group_without_blocks_in_a_job_and_a_job_without_any() -> None:
    tensor = noise(4 * 8)
    groups = [group(cell([run(0, 0, 8)], page=8, place=8)), group(cell([run(0, 0, 8)], page=8, place=8, at=8))]
    rows = np.full((3, 16), POISON, dtype=np.uint8)
    both_ways(groups, [[tensor], [tensor]], rows, (int64(2), int64(1), int64(0, 1)))
    plan = RowPlan(groups, [[tensor], [tensor]], RowMemory.of(rows))
    assert plan.gather(int64(), int64(), int64(0, 0)) == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_plan_copies_what_is_copied_by_hand(data: st.DataObject) -> None:
    check_any_plan(data)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(st.data())
def test_any_of_many_plans_copies_what_is_copied_by_hand(data: st.DataObject) -> None:
    check_any_plan(data)


def check_any_plan(data: st.DataObject) -> None:
    """Fragments of any size, stride and alignment; pages cut into runs at random, in any canonical order."""
    draw = data.draw
    per_chunk, num_rows, num_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    groups, tensors = [], []
    for number in range(draw(st.integers(1, 3))):
        cells, mine, at = [], [], draw(st.integers(0, 9))
        for _ in range(draw(st.integers(1, 3))):
            sizes = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
            order = draw(st.permutations(range(len(sizes))))
            counts = [draw(st.integers(1, 4)) for _ in sizes]
            starts = np.cumsum([0, *(s * c for s, c in zip(sizes, counts, strict=True))])
            far, placed = 0, {}
            for index in order:  # the canonical side has gaps
                gap = draw(st.integers(0, 70))
                placed[index] = run(int(starts[index]), far, sizes[index], counts[index], 0, sizes[index] + gap)
                far += (sizes[index] + gap) * counts[index]
            runs = [placed[index] for index in range(len(sizes))]
            page, padding, offset = int(starts[-1]), draw(st.integers(0, 9)), draw(st.integers(0, 9))
            writers = draw(st.integers(1, 3))
            cells.append(
                cell(
                    runs, page=page, place=far, at=at, stride=page + padding, offset=offset,
                    num_writers=writers, writer_index=draw(st.integers(0, writers - 1)),
                )
            )  # fmt: skip
            at += far * per_chunk + draw(st.integers(0, 9))
            mine.append(noise(offset + num_blocks * (page + padding), seed=number))
        groups.append(group(*cells, per_chunk=per_chunk))
        tensors.append(mine)
    width = max(g.row_bytes for g in groups) + draw(st.integers(0, 9))
    rows = np.full((num_rows, width), POISON, dtype=np.uint8)
    most = min(num_blocks, num_rows * per_chunk)
    counts = [draw(st.integers(0, most)) for _ in groups]
    ids = [i for count in counts for i in draw(st.permutations(range(num_blocks)))[:count]]
    # Rows of groups are apart in vLLM; where they meet here, the last one stays, by hand and in one thread's plan.
    pages = [p for count in counts for p in draw(st.permutations(range(num_rows * per_chunk)))[:count]]
    both_ways(groups, tensors, rows, (int64(*ids), int64(*pages), int64(*counts)))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fragment", [8, 52, 256, 320, 1000, 4096, 65536 + 4])
def test_jobs_so_large_that_they_stream(fragment: int, threads: int) -> None:
    """Over 16 MiB; a rank of two, whose fragments alternate with the other's in the row."""
    count = max(1, 65536 // fragment)
    page = fragment * count
    blocks = (17 << 20) // (2 * page) + 1
    first, second = noise(blocks * page, seed=3), noise(3 + blocks * (page + 7), seed=4)
    cells = [
        cell([run(0, fragment, fragment, count, fragment, 2 * fragment)], page=page, place=2 * page, at=1),
        cell([run(0, 0, page)], page=page, place=page, at=2 * page + 3, stride=page + 7, offset=3),
    ]
    ids = np.random.default_rng(5).permutation(blocks).astype(np.int64)
    rows = np.full((blocks, 3 * page + 9), POISON, dtype=np.uint8)
    want = rows.copy()
    pages = np.random.default_rng(6).permutation(blocks).astype(np.int64)
    mine = first.reshape(blocks, count, fragment)[ids]
    part = want[:, 1 : 1 + 2 * page].reshape(blocks, count, 2, fragment).copy()
    part[pages, :, 1] = mine
    want[:, 1 : 1 + 2 * page] = part.reshape(blocks, -1)
    tail = second[3:].reshape(blocks, page + 7)[:, :page][ids]
    want[pages, 2 * page + 3 : 3 * page + 3] = tail
    plan = RowPlan([group(*cells)], [[first, second]], RowMemory.of(rows))
    job = ids, pages, int64(blocks)
    assert plan.gather(*job, threads=threads) == blocks * 2 * page >= 16 << 20
    assert_same(rows, want)
    kept = first.copy(), second.copy()
    first.fill(POISON)
    second[3:].reshape(blocks, page + 7)[:, :page] = POISON
    assert plan.scatter(*job, threads=threads) == blocks * 2 * page
    assert_same(first, kept[0], "first")
    assert_same(second, kept[1], "second, what lies between its pages included")
    assert_same(rows, want, "rows after the scatter")


def test_blocks_and_rows_beyond_4_gib() -> None:
    """R14: 1.5 GiB between blocks and 2.5 GiB between rows, in memory that is reserved and hardly used."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    step, row = 3 * GiB // 2 + 64, 5 * GiB // 2
    tensor = np.frombuffer(mmap.mmap(-1, 5 * step, flags=flags), dtype=np.uint8)
    rows = np.frombuffer(mmap.mmap(-1, 3 * row, flags=flags), dtype=np.uint8).reshape(3, row)
    assert tensor.size > 2**32 and rows.size > 2**32
    at = 2 * GiB + 5
    mapping = group(cell([run(0, 0, 24, 2, 24, 40)], page=48, place=80, at=at, stride=step, offset=8))
    source = noise(2, 48)
    for block, page in zip((4, 3), source, strict=True):
        tensor[8 + block * step : 8 + block * step + 48] = page
    plan = RowPlan([mapping], [[tensor]], RowMemory.of(rows))
    job = int64(4, 3), int64(2, 1), int64(2)
    assert plan.gather(*job) == 96
    for row_id, page in zip((2, 1), source, strict=True):
        assert_same(rows[row_id, at : at + 24], page[:24])
        assert_same(rows[row_id, at + 40 : at + 64], page[24:])
        assert not rows[row_id, at + 24 : at + 40].any()
    for block in (4, 3):
        tensor[8 + block * step : 8 + block * step + 48] = 0
    assert plan.scatter(*job) == 96
    for block, page in zip((4, 3), source, strict=True):
        assert_same(tensor[8 + block * step : 8 + block * step + 48], page)


@pytest.mark.parametrize("plans", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("most", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bytes(most: str, plans: int) -> None:
    """KVXFER_ISA is read once, hence a process of its own, which runs some of the tests above."""
    code = (
        "from hypothesis import given, settings, strategies as st\n"
        "from tests.convert import test_rows_native as tests\n"
        f"settings(max_examples={plans}, deadline=None, database=None)(given(st.data())(tests.check_any_plan))()\n"
        "tests.test_groups_that_share_tensors_are_one_job()\n"
        "tests.test_jobs_so_large_that_they_stream(52, 1)\n"
        "tests.test_jobs_so_large_that_they_stream(320, 3)\n"
        "print('all of them')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"KVXFER_ISA": most}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "all of them\n"), done.stdout[-3000:] + done.stderr[-2000:]


# ---- what is refused

PAGE = cell([run(0, 0, 8)], page=8, place=8)


def plan_of(mapping: RowMapping, tensor: Bytes | None = None, rows: Bytes | None = None) -> RowPlan:
    tensor = noise(4 * 8) if tensor is None else tensor
    rows = np.zeros((3, 16), dtype=np.uint8) if rows is None else rows
    return RowPlan([mapping], [[tensor]] if mapping.cells else [[]], RowMemory.of(rows))


@pytest.mark.parametrize(
    "wrong",
    [
        cell([run(1, 0, 8)], page=8, place=8),  # beyond the page
        cell([run(0, 1, 8)], page=8, place=8),  # beyond the place
        cell([run(0, 0, 4, 2, 5, 4)], page=8, place=8),
        cell([run(0, 0, 4, 2, 4, 5)], page=8, place=8),
        cell([run(0, 0, 4, 2**62, 8, 4)], page=8, place=8),  # what would wrap round
        cell([run(0, 0, 2, 2**63 + 1, 2**63, 2**63)], page=8, place=8),
        cell([run(2**63, 0, 8, 3, 2**63 - 4, 8)], page=8, place=8),
        cell([run(0, 0, 8, 1)], page=8, place=8, num_writers=2, writer_index=2),
        cell([], page=8, place=8),
    ],
)
def test_runs_that_leave_their_place_are_refused(wrong: RowCell) -> None:
    with pytest.raises(LayoutError, match="kvx_row_plan_new refused its arguments"):
        plan_of(group(wrong))


def test_shapes_that_do_not_fit_are_refused() -> None:
    plan_of(group(PAGE))
    with pytest.raises(LayoutError, match="3 rows that are 4 bytes apart do not hold the mappings'"):
        plan_of(group(PAGE), rows=np.zeros((3, 4), dtype=np.uint8))
    with pytest.raises(LayoutError, match="tensor 0 has 7 bytes, which hold no block of 8"):
        plan_of(group(PAGE), noise(7))
    with pytest.raises(LayoutError, match="all with as many blocks a chunk"):
        RowPlan([group(PAGE), group(PAGE, per_chunk=2)], [[noise(8)]] * 2, RowMemory.of(noise(2, 32)))
    with pytest.raises(LayoutError, match="needs groups"):
        RowPlan([], [], RowMemory.of(noise(2, 32)))
    with pytest.raises(LayoutError, match="0 tensors were given, the mapping has 1"):
        RowPlan([group(PAGE)], [[]], RowMemory.of(noise(2, 32)))
    with pytest.raises(LayoutError, match="must be rows of adjacent bytes"):
        RowMemory.of(noise(3, 16)[:, ::2])
    with pytest.raises(LayoutError, match="must be rows of adjacent bytes"):
        RowMemory.of(noise(16))


def test_ids_that_there_are_not_are_refused_before_anything_is_written() -> None:
    tensor, rows = noise(4 * 8), np.zeros((3, 16), dtype=np.uint8)
    plan = RowPlan([group(PAGE, per_chunk=2)], [[tensor]], RowMemory.of(rows))
    before = tensor.copy()
    good = int64(0, 1)
    for ids, pages, counts, message in [
        (int64(0, 4), good, int64(2), r"block id 4 must be in 0\.\.3"),
        (int64(0, -1), good, int64(2), "block id -1"),
        (int64(0, 2**62), good, int64(2), "block id"),
        (good, int64(0, 6), int64(2), r"row id 3 must be in 0\.\.2"),
        (good, int64(0, -1), int64(2), "row id -1"),
        (good, int64(0), int64(2), "2 blocks, 1 pages, and 2 in all groups"),
        (good, good, int64(1), "2 blocks, 2 pages, and 1 in all groups"),
        (good, good, int64(3, -1), "must be a count for each of 1 groups"),
        (good, good, int64(1, 1), "must be a count for each of 1 groups"),
        (good.astype(np.int32), good, int64(2), "block_ids of int32"),
        (good.reshape(1, 2), good, int64(2), "must be int64 and 1-dimensional"),
    ]:
        for copy in (plan.gather, plan.scatter):
            with pytest.raises(LayoutError, match=message):
                copy(ids, pages, counts)
    assert not rows.any()
    assert_same(tensor, before)


def test_what_is_read_only_is_not_written() -> None:
    tensor, rows = noise(4 * 8), noise(3, 16)
    fixed_tensor, fixed_rows = tensor.copy(), rows.copy()
    fixed_tensor.flags.writeable = fixed_rows.flags.writeable = False
    job = int64(0), int64(0), int64(1)
    with pytest.raises(LayoutError, match="the rows are read-only"):
        plan_of(group(PAGE), tensor, fixed_rows).gather(*job)
    with pytest.raises(LayoutError, match="a tensor of these groups is read-only"):
        plan_of(group(PAGE), fixed_tensor, rows).scatter(*job)
    assert plan_of(group(PAGE), fixed_tensor, rows).gather(*job) == 8
    assert plan_of(group(PAGE), tensor, fixed_rows).scatter(*job) == 8


def test_tensors_whose_bytes_are_apart_are_refused() -> None:
    tensors, rows = [noise(64)[::2]], noise(3, 16)
    for call in (
        lambda: gather_rows(tensors, int64(0).reshape(1, 1), group(PAGE), rows, int64(0)),
        lambda: scatter_rows(rows, int64(0), group(PAGE), tensors, int64(0).reshape(1, 1)),
    ):
        with pytest.raises(LayoutError, match="its bytes are 2 apart, want side by side"):
            call()


def test_a_closed_plan_lets_go_of_its_memory_and_takes_no_job() -> None:
    class Held(np.ndarray):
        """An array that can be referred to weakly."""

    tensor: Any = noise(4 * 8).view(Held)
    plan = RowPlan([group(PAGE)], [[tensor]], RowMemory.of(noise(3, 16)))
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is not None  # the plan has its address
    plan.close()
    plan.close()
    gc.collect()
    assert gone() is None
    with pytest.raises(LayoutError, match="the plan is closed"):
        plan.gather(int64(0), int64(0), int64(1))
