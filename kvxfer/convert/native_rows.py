"""Pages and host rows by libkvx: `rows` for one group and call, and `RowPlan` for those who copy again and again."""

from __future__ import annotations

import ctypes as C
import errno
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.convert.pages import memory_of
from kvxfer.convert.rows import check_job, check_rows, refuse_repeated
from kvxfer.errors import LayoutError
from kvxfer.rows import RowMapping

__all__ = ["ROW_RUN_DTYPE", "RowMemory", "RowPlan", "gather_rows", "scatter_rows"]

ROW_RUN_DTYPE = np.dtype([(field[0], np.uint64) for field in _native.RowRun._fields_])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMemory:
    """Where host rows are. Sizes in bytes."""

    address: int  # of a mapping's byte 0 in row 0
    row_stride: int
    num_rows: int
    owner: Any = None  # what keeps the memory there, if anything
    writable: bool = True

    @classmethod
    def of(cls, rows: NDArray[np.uint8]) -> RowMemory:
        """The rows of an array [rows, bytes], whose bytes lie side by side."""
        if rows.ndim != 2 or rows.dtype != np.uint8 or (rows.shape[1] > 1 and rows.strides[1] != 1):
            raise LayoutError(
                f"rows of {rows.dtype} {rows.shape} with strides {rows.strides} must be rows of adjacent bytes"
            )
        stride = rows.strides[0] if len(rows) > 1 else rows.shape[1]
        if stride < rows.shape[1]:
            raise LayoutError(f"rows of {rows.shape[1]} bytes overlap: they are {stride} apart")
        writable = bool(rows.flags.writeable)
        return cls(address=int(rows.ctypes.data), row_stride=stride, num_rows=len(rows), owner=rows, writable=writable)


class RowPlan:
    """All KV-cache groups of a rank, over its live tensors and the host rows: resolved once, then a job is one call.

    Jobs may run side by side, as long as none writes what another touches.

    Args:
        groups: the rank's mapping of each group, all with as many blocks a chunk. A tensor may be in several.
        tensors: of each group, in its mapping's order: numpy arrays or CPU torch tensors, kept alive until `close`.
        rows: what the mappings' offsets count from.

    Raises:
        LayoutError: a tensor has no block, or is not in host memory; a run leaves its page, its cell or the row.
        NativeError: libkvx cannot be loaded.
    """

    def __init__(self, groups: Sequence[RowMapping], tensors: Sequence[Sequence[Any]], rows: RowMemory) -> None:
        if not groups or len({group.blocks_per_chunk for group in groups}) != 1:
            raise LayoutError("a plan needs groups, all with as many blocks a chunk")
        if rows.num_rows < 1 or any(group.row_bytes > rows.row_stride for group in groups):
            raise LayoutError(f"{rows.num_rows} rows that are {rows.row_stride} bytes apart do not hold the mappings'")
        self.blocks_per_chunk = groups[0].blocks_per_chunk
        self.num_pages = rows.num_rows * self.blocks_per_chunk
        cells: list[_native.RowCellStruct] = []
        runs: list[tuple[int, ...]] = []
        num_blocks: list[int] = []  # of the group's tensor that has the fewest; any, where it has no tensor
        self._writable = True
        for group, mine in zip(groups, tensors, strict=True):
            added = _cells(group, mine, rows, runs)
            num_blocks.append(min((cell.num_blocks for cell in added), default=2**62))
            self._writable &= all(memory_of(tensor, index)[2] for index, tensor in enumerate(mine))
            cells += added
        self._num_blocks = np.array(num_blocks, dtype=np.int64)
        self._rows_writable = rows.writable
        self._alive: Any = (tuple(tensors), rows)
        self._handle = _new_plan(cells, runs, [len(group.cells) for group in groups], rows, self.blocks_per_chunk)
        self._free = weakref.finalize(self, _native.lib().kvx_row_plan_free, self._handle)

    @property
    def num_groups(self) -> int:
        """KV-cache groups."""
        return len(self._num_blocks)

    def check(self, block_ids: NDArray[np.int64], pages: NDArray[np.int64], group_pages: NDArray[np.int64]) -> None:
        """Raises LayoutError unless `gather` and `scatter` would take these."""
        check_job(block_ids, pages, group_pages, self._num_blocks, self.num_pages, self.blocks_per_chunk)

    def gather(
        self,
        block_ids: NDArray[np.int64],
        pages: NDArray[np.int64],
        group_pages: NDArray[np.int64],
        *,
        threads: int = 1,
    ) -> int:
        """Copies blocks into rows, but for pages that another rank is elected to write. The GIL is released meanwhile.

        Args:
            block_ids: [n], those of the first group, then those of the next ...
            pages: [n], distinct within a group: where block i goes, counted through all rows: row number *
                blocks_per_chunk + block of the chunk. A row is of one group: where two write one, several
                threads leave it to chance whose bytes stay.
            group_pages: how many of the n are of each group.
            threads: at most so many.

        Returns:
            The bytes copied.

        Raises:
            LayoutError: an id does not fit, the rows are read-only, or the plan is closed; nothing was written.
        """
        if not self._rows_writable:
            raise LayoutError("the rows are read-only")
        return self._copy("kvx_row_gather", block_ids, pages, group_pages, threads)

    def scatter(
        self,
        block_ids: NDArray[np.int64],
        pages: NDArray[np.int64],
        group_pages: NDArray[np.int64],
        *,
        threads: int = 1,
    ) -> int:
        """Copies rows into blocks, distinct within a group, whoever wrote them. See `gather`."""
        if not self._writable:
            raise LayoutError("a tensor of these groups is read-only")
        return self._copy("kvx_row_scatter", block_ids, pages, group_pages, threads)

    def close(self) -> None:
        """Lets go of the tensors and rows: not while a job runs. A closed plan takes no job."""
        self._handle = 0
        self._alive = None
        self._free()

    def _copy(self, name: str, block_ids: Any, pages: Any, group_pages: Any, threads: int) -> int:
        if not self._handle:
            raise LayoutError("the plan is closed")
        self.check(block_ids, pages, group_pages)
        blocks, where, counts = (np.ascontiguousarray(array) for array in (block_ids, pages, group_pages))
        nbytes = C.c_uint64()
        call: Any = getattr(_native.lib(), name)
        at = (_native.address(array) for array in (blocks, where, counts))
        _check(name, call(self._handle, *at, threads, C.byref(nbytes)))
        return int(nbytes.value)


def gather_rows(
    tensors: Sequence[NDArray[np.uint8]],
    block_ids: NDArray[np.int64],
    mapping: RowMapping,
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.int64],
    *,
    threads: int = 1,
) -> None:
    """As `rows.gather_rows`, by up to `threads` threads.

    Raises:
        LayoutError: a shape or id does not fit; nothing was written.
        NativeError: libkvx cannot be loaded.
    """
    _check_call(tensors, block_ids, mapping, rows, row_ids)
    refuse_repeated("row", row_ids)
    if len(row_ids):
        plan = RowPlan([mapping], [tensors], RowMemory.of(rows))
        plan.gather(*_present(block_ids, row_ids), threads=threads)


def scatter_rows(
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.int64],
    mapping: RowMapping,
    tensors: Sequence[NDArray[np.uint8]],
    block_ids: NDArray[np.int64],
    *,
    threads: int = 1,
) -> None:
    """As `rows.scatter_rows`, by up to `threads` threads.

    Raises:
        LayoutError: a shape or id does not fit; nothing was written.
        NativeError: libkvx cannot be loaded.
    """
    _check_call(tensors, block_ids, mapping, rows, row_ids)
    refuse_repeated("block", block_ids[block_ids >= 0])
    if len(row_ids):
        plan = RowPlan([mapping], [tensors], RowMemory.of(rows))
        plan.scatter(*_present(block_ids, row_ids), threads=threads)


def _check_call(
    tensors: Sequence[NDArray[np.uint8]],
    block_ids: NDArray[np.int64],
    mapping: RowMapping,
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.int64],
) -> None:
    check_rows(tensors, block_ids, mapping, rows, row_ids)
    for index, tensor in enumerate(tensors):
        if tensor.size > 1 and tensor.strides != (1,):
            raise LayoutError(f"tensor {index}: its bytes are {tensor.strides[0]} apart, want side by side")


def _present(
    block_ids: NDArray[np.int64], row_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The blocks that there are, their pages, and how many: what a plan of one group takes."""
    per_chunk = block_ids.shape[1]
    there = block_ids >= 0
    pages = (row_ids[:, None] * per_chunk + np.arange(per_chunk))[there]
    return block_ids[there], pages, np.array([len(pages)])


def _cells(
    group: RowMapping, tensors: Sequence[Any], rows: RowMemory, runs: list[tuple[int, ...]]
) -> list[_native.RowCellStruct]:
    """The cells of a group; their runs are appended to `runs`."""
    if len(tensors) != len(group.cells):
        raise LayoutError(f"{len(tensors)} tensors were given, the mapping has {len(group.cells)}")
    cells: list[_native.RowCellStruct] = []
    for index, (cell, tensor) in enumerate(zip(group.cells, tensors, strict=True)):
        address, available, _ = memory_of(tensor, index)
        local = cell.tensor
        room = available - local.offset - local.page_bytes
        if room < 0:
            raise LayoutError(f"tensor {index} has {available} bytes, which hold no block of {local.page_bytes}")
        num_blocks = room // local.block_stride + 1 if local.block_stride > 0 else 1
        cells.append(
            _native.RowCellStruct(
                tensor_base=address + local.offset,
                block_stride=local.block_stride,
                num_blocks=num_blocks,
                local_bytes=local.page_bytes,
                cell_base=rows.address + cell.offset,
                page_stride=cell.block_stride,
                first_run=len(runs),
                num_runs=len(cell.page.runs),
                num_writers=cell.page.num_writers,
                writer_index=cell.page.writer_index,
            )
        )
        runs += [
            (r.local_offset, r.canonical_offset, r.fragment_size, r.num_fragments, r.local_stride, r.canonical_stride)
            for r in cell.page.runs
        ]
    return cells


def _new_plan(
    cells: list[_native.RowCellStruct],
    runs: list[tuple[int, ...]],
    group_cells: list[int],
    rows: RowMemory,
    blocks_per_chunk: int,
) -> int:
    table = np.array(runs, dtype=ROW_RUN_DTYPE)
    handle = C.c_void_p()
    result = _native.lib().kvx_row_plan_new(
        (_native.RowCellStruct * len(cells))(*cells),
        _native.address(table),
        len(table),
        (C.c_uint32 * len(group_cells))(*group_cells),
        len(group_cells),
        rows.row_stride,
        rows.num_rows,
        blocks_per_chunk,
        C.byref(handle),
    )
    _check("kvx_row_plan_new", result)
    assert handle.value is not None  # kvx_row_plan_new returned 0
    return handle.value


def _check(name: str, result: int) -> None:
    if result == -errno.ENOMEM:
        raise MemoryError(name)
    if result < 0:
        raise LayoutError(f"{name} refused its arguments: {os.strerror(-result)}")
