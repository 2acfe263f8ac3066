"""Where vLLM's host rows have which byte of a worker's pages, as a RowPlan. Imports nothing of vLLM: it is handed over.

A row's cells are where vLLM's region puts them (`create_next_worker_view`, `create_next_canonical_view`), and what is
in a cell is what vLLM's own worker would copy there: whole pages without their padding (direct rows), or the runs of
vLLM's mappings (canonical rows). kvxfer derives none of it here; it checks that the runs cover each page once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.convert.native_rows import RowMemory, RowPlan
from kvxfer.errors import LayoutError
from kvxfer.mapping import CopyRun, LocalTensor, unroll, verify_cover
from kvxfer.rows import PageMapping, RowCell, RowMapping

__all__ = ["Parts", "job_pages", "make_plan", "plan_parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a plan is made of: see RowPlan."""

    groups: list[RowMapping]
    tensors: list[list[Any]]
    memory: RowMemory
    rows: Any  # the same memory, as vLLM's tensor [rows, bytes of the mappings' rows]


def make_plan(kv_caches: Any, region: Any, per_chunk: int, *, canonical: bool, lone_writer: bool = False) -> RowPlan:
    """The plan of one worker whose pages are in host memory. See `plan_parts`."""
    parts = plan_parts(kv_caches, region, per_chunk, canonical=canonical, lone_writer=lone_writer)
    return RowPlan(parts.groups, parts.tensors, parts.memory)


def plan_parts(kv_caches: Any, region: Any, per_chunk: int, *, canonical: bool, lone_writer: bool = False) -> Parts:
    """Where the rows have which byte of a worker's pages.

    Args:
        kv_caches: vLLM's CanonicalKVCaches.
        region: vLLM's SharedOffloadRegion, of which no view was taken yet. It must outlive the plan.
        per_chunk: blocks of a chunk.
        canonical: rows are canonical: every ref has its mapping.
        lone_writer: this rank stores alone what others have, too.

    Raises:
        LayoutError: what cannot be certified, and why.
    """
    tensors = [each.tensor for each in kv_caches.tensors]
    if not tensors:
        raise LayoutError("vLLM has registered no KV cache")
    sizes = [int(each.page_size_bytes) for each in kv_caches.tensors]
    locals_ = [_local(number, tensor, size) for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True))]
    pages = [[_page(ref, canonical, lone_writer) for ref in refs] for refs in kv_caches.group_data_refs]
    if canonical:
        sizes = _canonical_sizes(kv_caches.group_data_refs, len(tensors))
    take = region.create_next_canonical_view if canonical else region.create_next_worker_view
    views = [take(size * per_chunk) for size in sizes]
    begin = min(view.data_ptr() for view in views)
    row_bytes = max(view.data_ptr() - begin + view.shape[1] for view in views)
    groups: list[RowMapping] = []
    used: list[list[Any]] = []
    for refs, mine in zip(kv_caches.group_data_refs, pages, strict=True):
        cells: dict[tuple[int, PageMapping], RowCell] = {}  # layers that share their pages are moved once
        for ref, page in zip(refs, mine, strict=True):
            index = int(ref.tensor_idx)
            local = replace(locals_[index], page_bytes=page.local_bytes)
            if page.local_bytes > locals_[index].page_bytes:
                raise LayoutError(f"tensor {index}: a page of {page.local_bytes} bytes exceeds its place")
            offset = views[index].data_ptr() - begin
            cells[index, page] = RowCell(tensor=local, offset=offset, block_stride=sizes[index], page=page)
        groups.append(
            RowMapping(cells=tuple(cells.values()), blocks_per_chunk=per_chunk, row_bytes=row_bytes, topology=None)
        )
        used.append([tensors[index] for index, _ in cells])
    first = min(views, key=lambda view: int(view.data_ptr()))
    num_rows, stride = int(first.shape[0]), int(first.stride(0))
    rows = first.as_strided((num_rows, row_bytes), (stride, 1), first.storage_offset())
    return Parts(groups, used, RowMemory(address=begin, row_stride=stride, num_rows=num_rows), rows)


def job_pages(blocks: Any, rows: Any, per_chunk: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """What a plan takes for a job: block ids, the pages that go with them, and how many are of each group.

    A group's blocks are consecutive in their request from `block_indices` on, so that its first and last chunk may be
    had in part only.

    Args:
        blocks: vLLM's GPULoadStoreSpec.
        rows: vLLM's CPULoadStoreSpec: the rows of the first group's chunks, then those of the next ...

    Raises:
        LayoutError: they do not go together.
    """
    block_ids, chunks = (np.asarray(spec.block_ids, dtype=np.int64) for spec in (blocks, rows))
    sizes = np.asarray(blocks.group_sizes, dtype=np.int64)
    first = np.asarray(blocks.block_indices, dtype=np.int64)
    if sizes.shape != first.shape or sizes.ndim != 1 or min(sizes.min(initial=0), first.min(initial=0)) < 0:
        raise LayoutError(f"group_sizes={sizes.tolist()} and block_indices={first.tolist()} do not go together")
    skipped = np.where(sizes > 0, first % per_chunk, 0)
    taken = -(-(sizes + skipped) // per_chunk)
    if block_ids.shape != (sizes.sum(),) or chunks.shape != (taken.sum(),):
        raise LayoutError(
            f"{block_ids.size} blocks and {chunks.size} rows, where group_sizes={sizes.tolist()}, "
            f"block_indices={first.tolist()} and {per_chunk} blocks a chunk want {sizes.sum()} and {taken.sum()}"
        )
    group, number = unroll(sizes.astype(np.uint64))
    place = number.astype(np.int64) + skipped[group]
    row = chunks[(np.cumsum(taken) - taken)[group] + place // per_chunk]
    return block_ids, row * per_chunk + place % per_chunk, sizes


def _local(number: int, tensor: Any, page_bytes: int) -> LocalTensor:
    """A tensor [blocks, ...] whose blocks are `page_bytes` of adjacent bytes each."""
    itemsize = int(tensor.element_size())
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            raise LayoutError(f"tensor {number} of strides {tuple(tensor.stride())}: its pages are in several pieces")
        expected *= size
    stride = int(tensor.stride(0)) * itemsize
    if expected * itemsize != page_bytes or stride < page_bytes:
        raise LayoutError(
            f"tensor {number} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}: its blocks are no "
            f"pages of {page_bytes} bytes"
        )
    return LocalTensor(block_stride=stride, page_bytes=page_bytes)


def _page(ref: Any, canonical: bool, lone_writer: bool) -> PageMapping:
    size = int(ref.page_size_bytes)
    if not canonical:
        run = CopyRun(
            local_offset=0, canonical_offset=0, fragment_size=size, num_fragments=1, local_stride=size,
            canonical_stride=size,
        )  # fmt: skip
        return PageMapping(canonical_bytes=size, local_bytes=size, runs=(run,), portable=False)
    mapping = ref.mapping
    if mapping is None or mapping.local_page_size_bytes != size:
        raise LayoutError(
            f"tensor {ref.tensor_idx}: vLLM has no mapping of its pages of {size} bytes to canonical ones"
        )
    page = PageMapping(
        canonical_bytes=int(mapping.canonical_page_size_bytes),
        local_bytes=size,
        runs=tuple(
            CopyRun(
                local_offset=run.local_offset,
                canonical_offset=run.canonical_offset,
                fragment_size=run.fragment_size,
                num_fragments=run.num_fragments,
                local_stride=run.local_stride,
                canonical_stride=run.canonical_stride,
            )
            for run in mapping.runs
        ),
        num_writers=1 if lone_writer else int(mapping.num_writers),
        writer_index=0 if lone_writer else int(mapping.writer_index),
        portable=bool(mapping.parallelism_agnostic),
    )
    _verify_local(page, int(ref.tensor_idx))
    return page


def _verify_local(page: PageMapping, tensor: int) -> None:
    """Raises LayoutError unless the runs cover the page exactly once."""
    table = np.array([(run.local_offset, run.local_stride, run.fragment_size, run.num_fragments) for run in page.runs])
    table = table.reshape(-1, 4).astype(np.uint64)
    index, fragment = unroll(table[:, 3])
    start, size = table[index, 0] + fragment * table[index, 1], table[index, 2]
    owner = np.full(start.size, tensor)
    verify_cover("tensor", np.array([tensor]), np.array([0]), np.array([page.local_bytes]), owner, start, size)


def _canonical_sizes(groups: Sequence[Sequence[Any]], tensors: int) -> list[int]:
    """Of each tensor, the bytes of a canonical page's place: its largest, where groups differ."""
    sizes = [0] * tensors
    for ref in (ref for refs in groups for ref in refs):
        sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], int(ref.mapping.canonical_page_size_bytes))
    if 0 in sizes:
        raise LayoutError(f"tensor {sizes.index(0)} is of no group: it has no canonical page")
    return sizes
