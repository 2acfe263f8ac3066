"""Mappings of rows made by hand, and their copies a byte range at a time: what a plan must do."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.mapping import CopyRun, LocalTensor
from kvxfer.rows import PageMapping, RowCell, RowMapping
from tests.convert.common import assert_same
from tests.oracle import POISON

Bytes = NDArray[np.uint8]


def run(near: int, far: int, size: int, count: int = 1, near_step: int = 0, far_step: int = 0) -> CopyRun:
    return CopyRun(
        local_offset=near,
        canonical_offset=far,
        fragment_size=size,
        num_fragments=count,
        local_stride=near_step or size,
        canonical_stride=far_step or size,
    )


def cell(
    runs: list[CopyRun], *, page: int, place: int, at: int = 0, stride: int = 0, offset: int = 0, **writers: int
) -> RowCell:
    """`page`: bytes of a local page; `place`: of a canonical one's place; `at`: of the cell in the row."""
    return RowCell(
        tensor=LocalTensor(block_stride=stride or page, page_bytes=page, offset=offset),
        offset=at,
        block_stride=place,
        page=PageMapping(canonical_bytes=place, local_bytes=page, runs=tuple(runs), **writers),
    )


def group(*cells: RowCell, per_chunk: int = 1) -> RowMapping:
    end = max(c.offset + c.block_stride * per_chunk for c in cells)
    return RowMapping(cells=cells, blocks_per_chunk=per_chunk, row_bytes=end, topology=None)


def noise(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)


def int64(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def by_hand(
    groups: list[RowMapping], tensors: list[list[Bytes]], rows: Bytes, job: tuple[Any, Any, Any], *, store: bool
) -> int:
    """The same copies, a byte range at a time. Returns their bytes."""
    ids, pages, counts = job
    total, first = 0, 0
    for mapping, mine, count in zip(groups, tensors, counts, strict=True):
        for block, page in zip(ids[first : first + count], pages[first : first + count], strict=True):
            row, position = divmod(int(page), mapping.blocks_per_chunk)
            for place, tensor in zip(mapping.cells, mine, strict=True):
                if store and page % place.page.num_writers != place.page.writer_index:
                    continue
                for r in place.page.runs:
                    for f in range(r.num_fragments):
                        near = place.tensor.offset + int(block) * place.tensor.block_stride
                        near += r.local_offset + f * r.local_stride
                        far = place.offset + position * place.block_stride
                        far += r.canonical_offset + f * r.canonical_stride
                        here, there = tensor[near : near + r.fragment_size], rows[row, far : far + r.fragment_size]
                        there[:], here[:] = (here, here) if store else (there, there)
                        total += r.fragment_size
        first += count
    return total


def check_both_ways(
    plan: Any, groups: list[RowMapping], tensors: list[list[Bytes]], rows: Bytes, job: Any, **how: Any
) -> None:
    """A plan's gather and scatter are `by_hand`'s, bytes that are counted and bytes that nobody named included."""
    want = rows.copy()
    nbytes = by_hand(groups, tensors, want, job, store=True)
    assert plan.gather(*job, **how) == nbytes
    assert_same(rows, want, "rows")
    distinct = {id(tensor): tensor for mine in tensors for tensor in mine}
    for tensor in distinct.values():
        tensor.fill(POISON)
    expected = {key: tensor.copy() for key, tensor in distinct.items()}
    nbytes = by_hand(groups, [[expected[id(t)] for t in mine] for mine in tensors], rows, job, store=False)
    assert plan.scatter(*job, **how) == nbytes
    for number, (key, tensor) in enumerate(distinct.items()):
        assert_same(tensor, expected[key], f"tensor {number}")
    assert_same(rows, want, "rows after the scatter")
