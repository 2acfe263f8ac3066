"""How a job's bytes travel between pages on a device and rows in pinned host memory. Knows no vLLM.

- "zero": the kernel reads or writes the rows where they are, over the bus. Takes any job.
- "pack": the kernel moves the pages to or from staging in the device's memory that is laid out like rows, and each
  row's part is one copy, which the device's copy engines do. Takes whole chunks of groups whose part of a row is in one
  piece; what else there is of a job goes the other way.

Both move exactly the bytes that are the rank's: what lies between is nobody's to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.convert.native_rows import RowMemory
from kvxfer.device.calibration import Calibration
from kvxfer.errors import ConfigError, DeviceMemoryError
from kvxfer.integrations.vllm_copier import RowJob
from kvxfer.integrations.vllm_rows import Parts
from kvxfer.mapping import unroll
from kvxfer.report import engine_reporter
from kvxfer.rows import RowMapping

__all__ = ["AUTO", "ENGINES", "PACK", "ZERO", "RowEngine", "Staging", "Work", "choose", "whole_span"]

AUTO, PACK, ZERO = ENGINES = ("auto", "pack", "zero")
LEAST_COPY = 128 << 10  # bytes of a row's part below which starting a copy costs more than it saves; not measured
STAGING_BYTES = 32 << 20  # of each direction: about a millisecond of a bus
ZERO_PROGRAMS = 32  # of 8 KiB under way each: more than a bus holds, and most processors stay the model's; not measured

Ids = NDArray[np.int64]
Span = tuple[int, int] | None  # bytes of a row, from and to
Work = Callable[[], int]  # puts something onto the current stream; returns the bytes of pages that it moves


class DevicePlan(Protocol):
    """DeviceRowPlan, as far as it is used here."""

    blocks_per_chunk: int

    def check(self, block_ids: Ids, pages: Ids, group_pages: Ids) -> None:
        """See DeviceRowPlan."""

    def gather(
        self, block_ids: Ids, pages: Ids, group_pages: Ids, *, rows: RowMemory | None = None, places: Ids | None = None,
        programs: int | None = None,
    ) -> int:  # fmt: skip
        """See DeviceRowPlan."""

    def scatter(
        self, block_ids: Ids, pages: Ids, group_pages: Ids, *, rows: RowMemory | None = None, places: Ids | None = None,
        programs: int | None = None,
    ) -> int:  # fmt: skip
        """See DeviceRowPlan."""

    def close(self) -> None:
        """See DeviceRowPlan."""


@dataclass(frozen=True, slots=True)
class Staging:
    """Rows in the device's memory, aligned as the host's are, so that one variant of the kernel does for both."""

    memory: RowMemory
    rows: Any  # a tensor [num_rows, bytes]

    @classmethod
    def make(cls, allocate: Callable[[int], Any], host: RowMemory, row_bytes: int, most: int) -> Staging | None:
        """As many rows as STAGING_BYTES hold, and at most `most`, or fewer where memory is short; None: not even one.

        Args:
            allocate: gives an int8 tensor [nbytes] whose address is a multiple of 16, or raises DeviceMemoryError.
        """
        stride = -(-row_bytes // 16) * 16 + host.row_stride % 16
        start = host.address % 16
        count = max(1, min(STAGING_BYTES // stride, most))
        while count:
            try:
                flat = allocate(start + count * stride)
            except DeviceMemoryError as exc:
                engine_reporter.warn("staging", f"{count * stride} bytes of staging are not to be had: {exc}")
                count //= 2
                continue
            rows = flat[start:].view(count, stride)
            memory = RowMemory(address=int(rows.data_ptr()), row_stride=stride, num_rows=count, owner=rows)
            return cls(memory, rows)
        return None


def whole_span(group: RowMapping) -> tuple[int, int] | None:
    """Where a row has what a rank writes of a whole chunk, if that is one piece, and the rank always writes it."""
    starts: list[Ids] = []
    ends: list[Ids] = []
    for cell in group.cells:
        runs = cell.page.runs
        index, fragment = unroll(np.array([run.num_fragments for run in runs], dtype=np.uint64))
        first = np.array([cell.offset + run.canonical_offset for run in runs])[index]
        step = np.array([run.canonical_stride for run in runs])[index]
        size = np.array([run.fragment_size for run in runs])[index]
        block = np.arange(group.blocks_per_chunk)[:, None] * cell.block_stride
        at = (first + fragment.astype(np.int64) * step + block).ravel()
        starts.append(at)
        ends.append(at + np.tile(size, group.blocks_per_chunk))
    if not starts or any(cell.page.num_writers != 1 for cell in group.cells):
        return None
    start, end = np.concatenate(starts), np.concatenate(ends)
    order = np.argsort(start)
    start, end = start[order], end[order]
    return (int(start[0]), int(end[-1])) if np.array_equal(start[1:], end[:-1]) else None


def choose(
    how: str, groups: Sequence[RowMapping], spans: Sequence[Span], direction: str, known: Calibration | None = None
) -> list[Span]:
    """Which groups are packed in a direction ("store", "load"), and where these lie in a row.

    Args:
        how: one of ENGINES. AUTO: as `known` has it for the fragments of a chunk, or where nothing was measured by a
            guess: what is large.
        spans: of each group `whole_span`.

    Raises:
        ConfigError: "pack" where a group's part of a row is in pieces.
    """
    if how == PACK and (pieces := [number for number, span in enumerate(spans) if span is None]):
        raise ConfigError(
            f"kvxfer_copy_engine={how!r}: of group {pieces[0]} a rank's part of a row is in several pieces, or another "
            "rank's turn to write (as canonical rows are with tensor parallelism): use 'auto' or 'zero'"
        )
    if how == ZERO:
        return [None] * len(spans)
    if how == PACK:
        return list(spans)
    if known is None or not known.knows(direction):
        return [span if span is not None and span[1] - span[0] >= LEAST_COPY else None for span in spans]
    return [
        span if known.choose(direction, *_fragments(group)) == PACK else None
        for group, span in zip(groups, spans, strict=True)
    ]


def _fragments(group: RowMapping) -> tuple[int, int]:
    """Of one chunk on this rank: bytes of a fragment, on average, and how many there are."""
    runs = [run for cell in group.cells for run in cell.page.runs]
    count = sum(run.num_fragments for run in runs)
    nbytes = sum(run.num_fragments * run.fragment_size for run in runs)
    return max(1, nbytes // max(1, count)), count * group.blocks_per_chunk


@dataclass(slots=True)
class RowEngine:
    """Makes of a job what is to be put onto a stream.

    Args:
        plan: the engine's own from now on.
        packed: of each group, where a whole chunk of it lies in a row, if it is to be packed: (in loads, in stores).
        programs: of every launch, at most; None: as many as suit.
    """

    plan: DevicePlan
    parts: Parts | None
    packed: tuple[list[Span], list[Span]]
    programs: int | None = None
    per_chunk: int = field(init=False)

    def __post_init__(self) -> None:
        self.per_chunk = self.plan.blocks_per_chunk

    def work(self, job: RowJob, staging: Staging | None) -> Iterator[Work]:
        """What moves a checked job's bytes, in this order on one stream."""
        move = self.plan.gather if job.is_store else self.plan.scatter
        groups = len(job.group_pages)
        group = np.repeat(np.arange(groups), job.group_pages)
        row = job.pages // self.per_chunk
        slot, chunks = self._whole(job, group, row) if staging else (np.full(len(row), -1), [])
        alone = slot < 0
        if alone.any():
            ids = _chosen(job, group, alone, groups)
            yield partial(move, *ids, programs=self.programs or ZERO_PROGRAMS)
        if staging is None:
            return
        room = staging.memory.num_rows
        for first in range(0, len(chunks), room):
            mine = (slot >= first) & (slot < first + room)
            ids = _chosen(job, group, mine, groups)
            places = (slot[mine] - first) * self.per_chunk + job.pages[mine] % self.per_chunk
            kernel = partial(move, *ids, rows=staging.memory, places=places, programs=self.programs)
            copies = partial(self._copy, chunks[first : first + room], staging, job.is_store)
            yield from (kernel, copies) if job.is_store else (copies, kernel)

    def close(self) -> None:
        """Lets go of the pages and rows: not while anything runs."""
        self.plan.close()
        self.parts = None

    def _whole(self, job: RowJob, group: Ids, row: Ids) -> tuple[Ids, list[tuple[int, int]]]:
        """Of each page the number of its chunk among those that are packed, else -1; and those as (group, row)."""
        packed = np.array([span is not None for span in self.packed[job.is_store]])
        table = np.stack([group, row, job.pages % self.per_chunk], axis=1)
        if len(np.unique(table, axis=0)) < len(table):  # a page named twice: then counts say nothing
            return np.full(len(row), -1), []
        chunks, index, counts = np.unique(table[:, :2], axis=0, return_inverse=True, return_counts=True)
        whole = (counts == self.per_chunk) & packed[chunks[:, 0]]
        number = np.where(whole, np.cumsum(whole) - 1, -1)
        return number[index.reshape(-1)], [(int(g), int(r)) for g, r in chunks[whole]]

    def _copy(self, chunks: Sequence[tuple[int, int]], staging: Staging, is_store: bool) -> int:
        assert self.parts is not None
        for slot, (group, row) in enumerate(chunks):
            span = self.packed[is_store][group]
            assert span is not None
            host, device = self.parts.rows[row, slice(*span)], staging.rows[slot, slice(*span)]
            (host if is_store else device).copy_(device if is_store else host, non_blocking=True)
        return 0


def _chosen(job: RowJob, group: Ids, which: NDArray[np.bool_], groups: int) -> tuple[Ids, Ids, Ids]:
    """A job's blocks and pages that are chosen, and how many are of each group."""
    return job.block_ids[which], job.pages[which], np.bincount(group[which], minlength=groups).astype(np.int64)
