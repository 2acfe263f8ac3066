"""Pages in a device's memory and host rows, by one kernel launch a job: `native_rows.RowPlan`'s face on a stream.

The kernel reads and writes the rows where they are: pinned host memory, which it reaches over the bus (zero copy), or
staging in the device's memory that is laid out like rows, for one large copy. In triton's interpreter the tensors are
the CPU's, and it runs at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from kvxfer.convert.launch import Variant
from kvxfer.convert.native_rows import RowMemory
from kvxfer.convert.pages import device_memory_of
from kvxfer.convert.row_kernels import move_rows
from kvxfer.convert.row_tables import TILE, WIDEST, PlacedCell, RowTables, place_cell
from kvxfer.convert.rows import check_job
from kvxfer.errors import DeviceError, DeviceMemoryError, LayoutError
from kvxfer.rows import RowMapping

__all__ = ["DeviceRowPlan", "RowJob", "Uploads", "variants"]

_PROGRAMS_A_PROCESSOR = 16  # tiles of a page are moved one after another where there are more
_MOST_SPAN = 16
_WARPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class RowJob:
    """A job whose tables are on the device: launching it is all that is left, any number of times."""

    nbytes: int  # that a launch moves
    gather: bool
    table: Any
    tiles: Any
    width: int
    num_groups: int
    units: int
    span: int


class DeviceRowPlan:
    """All KV-cache groups of a rank, over its live tensors and rows: resolved once, then a job is one launch.

    Jobs are put on torch's current stream of the tensors' device: record an event before anything is reused. They may
    run side by side, as long as none writes what another touches. Nothing waits for the device, but for the first job
    over rows that are aligned otherwise than the plan's, which uploads their tables. Thread-safe.

    Args:
        groups: the rank's mapping of each group, all with as many blocks a chunk. A tensor may be in several.
        tensors: of each group, in its mapping's order: torch tensors of one CUDA device, kept alive until `close`. In
            the interpreter: what `RowPlan` takes.
        rows: what the mappings' offsets count from, where a job says nothing else; must be memory that the device
            reaches, under this address.

    Raises:
        LayoutError: a tensor has no block, or is on another device; a run leaves its page, its cell or the row.
        DeviceError: tensors in host memory, where kernels are not interpreted.
    """

    def __init__(self, groups: Sequence[RowMapping], tensors: Sequence[Sequence[Any]], rows: RowMemory) -> None:
        if not groups or len({group.blocks_per_chunk for group in groups}) != 1:
            raise LayoutError("a plan needs groups, all with as many blocks a chunk")
        self.blocks_per_chunk = groups[0].blocks_per_chunk
        self.row_bytes = max(group.row_bytes for group in groups)  # what staging needs for a row
        self._check_rows(rows)
        self._cells: list[list[PlacedCell]] = []
        self._writable = True
        self.device = _device_of(tensors)
        for group, mine in zip(groups, tensors, strict=True):
            if len(mine) != len(group.cells):
                raise LayoutError(f"{len(mine)} tensors were given, the mapping has {len(group.cells)}")
            cells: list[PlacedCell] = []
            for index, (cell, tensor) in enumerate(zip(group.cells, mine, strict=True)):
                _, address, available, writable = device_memory_of(tensor, index)
                cells.append(place_cell(cell, index, address, available, self.blocks_per_chunk, rows.row_stride))
                self._writable &= writable
            self._cells.append(cells)
        fewest = [min((cell.num_blocks for cell in cells), default=2**62) for cells in self._cells]
        self._num_blocks = np.array(fewest, dtype=np.int64)
        self._alive: Any = (tuple(tensors), rows)
        self._rows = rows
        self._lock = threading.Lock()
        self._tables: dict[int, tuple[RowTables, Any]] = {}  # by what the rows' addresses are multiples of
        self._uploads = Uploads(self.device)
        self._processors = _processors(self.device)
        self._tables_for(rows)

    @property
    def num_groups(self) -> int:
        """KV-cache groups."""
        return len(self._num_blocks)

    @property
    def num_pages(self) -> int:
        """Of the plan's own rows."""
        return self._rows.num_rows * self.blocks_per_chunk

    def check(self, block_ids: NDArray[np.int64], pages: NDArray[np.int64], group_pages: NDArray[np.int64]) -> None:
        """Raises LayoutError unless `gather` and `scatter` would take these."""
        check_job(block_ids, pages, group_pages, self._num_blocks, self.num_pages, self.blocks_per_chunk)

    def gather(
        self,
        block_ids: NDArray[np.int64],
        pages: NDArray[np.int64],
        group_pages: NDArray[np.int64],
        *,
        rows: RowMemory | None = None,
        places: NDArray[np.int64] | None = None,
        programs: int | None = None,
    ) -> int:
        """Copies blocks into rows, but for pages that another rank is elected to write. Asynchronous.

        Args:
            block_ids: [n], those of the first group, then those of the next ...
            pages: [n], distinct within a group: where block i goes, counted through all of the plan's rows: row number
                * blocks_per_chunk + block of the chunk. A row is of one group: where two write one, it is left
                to chance whose bytes stay.
            group_pages: how many of the n are of each group.
            rows: other rows to use, of the same layout: staging, say. They must stay until the job is done.
            places: [n], the pages of `rows` to use; `pages` then only say who writes. None: `pages`.
            programs: at most so many, each of a few warps, for a job that must leave room beside it.

        Returns:
            The bytes that are copied.

        Raises:
            LayoutError: an id does not fit, the rows are read-only, or the plan is closed; nothing is written.
            DeviceError: the stream is being captured: see `prepare`. Or the job's table did not reach the device;
                DeviceMemoryError where memory for it ran out.
        """
        job = self.prepare(block_ids, pages, group_pages, gather=True, rows=rows, places=places)
        return self.launch(job, programs=programs)

    def scatter(
        self,
        block_ids: NDArray[np.int64],
        pages: NDArray[np.int64],
        group_pages: NDArray[np.int64],
        *,
        rows: RowMemory | None = None,
        places: NDArray[np.int64] | None = None,
        programs: int | None = None,
    ) -> int:
        """Copies rows into blocks, distinct within a group, whoever wrote them. See `gather`."""
        job = self.prepare(block_ids, pages, group_pages, gather=False, rows=rows, places=places)
        return self.launch(job, programs=programs)

    def prepare(
        self,
        block_ids: NDArray[np.int64],
        pages: NDArray[np.int64],
        group_pages: NDArray[np.int64],
        *,
        gather: bool,
        rows: RowMemory | None = None,
        places: NDArray[np.int64] | None = None,
    ) -> RowJob:
        """Checks a job and puts the copy of its tables on the current stream. `launch` can then be captured in a graph.

        Raises:
            LayoutError, DeviceError: as `gather`.
        """
        target = self._rows if rows is None else rows
        if gather and not target.writable:
            raise LayoutError("the rows are read-only")
        if not gather and not self._writable:
            raise LayoutError("a tensor of these groups is read-only")
        if self._alive is None:
            raise LayoutError("the plan is closed")
        if rows is not None:
            self._check_rows(rows)
        if places is None:
            places = pages
        else:
            self.check(block_ids, pages, group_pages)
        num_pages = target.num_rows * self.blocks_per_chunk
        check_job(block_ids, places, group_pages, self._num_blocks, num_pages, self.blocks_per_chunk)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise DeviceError("the stream is being captured: prepare the job before, and capture its launch")
        with self._on_device():
            tables, tiles = self._tables_for(target)
            row, position = np.divmod(places, self.blocks_per_chunk)
            job = tables.job(
                block_ids, pages, group_pages, target.address + row * target.row_stride, position,
                span=self._span(tables.count(group_pages)), elected=gather,
            )  # fmt: skip
            table = self._uploads.put(job.words) if job.units else None
        return RowJob(job.nbytes, gather, table, tiles, tables.width, job.num_groups, job.units, job.span)

    def launch(self, job: RowJob, *, programs: int | None = None) -> int:
        """Puts a prepared job on the current stream, that of `prepare` or one that waits for it. Returns its bytes.

        Raises:
            LayoutError: `programs` is below 1, or the plan is closed.
        """
        if self._alive is None:
            raise LayoutError("the plan is closed")
        if programs is not None and programs < 1:
            raise LayoutError(f"programs={programs} must be at least 1")
        if job.units:
            grid = min(job.units, programs or job.units)
            with self._on_device():
                move_rows[(grid,)](
                    job.tiles, job.table, job.num_groups, job.units, job.span,
                    WIDTH=job.width, SCATTER=not job.gather, num_warps=_WARPS,
                )  # fmt: skip
        return job.nbytes

    def close(self) -> None:
        """Lets go of the tensors and rows: not while a job runs. A closed plan takes no job."""
        self._alive = None
        self._tables.clear()

    def _check_rows(self, rows: RowMemory) -> None:
        if rows.num_rows < 1 or self.row_bytes > rows.row_stride:
            raise LayoutError(f"{rows.num_rows} rows that are {rows.row_stride} bytes apart do not hold the mappings'")

    def _tables_for(self, rows: RowMemory) -> tuple[RowTables, Any]:
        """The tables for rows that are aligned as these are; they are made once."""
        alignment = gcd(WIDEST, rows.address, rows.row_stride if rows.num_rows > 1 else WIDEST)
        with self._lock:
            if alignment not in self._tables:
                tables = RowTables(self._cells, self.blocks_per_chunk, alignment)
                # Not asynchronous, so that jobs of all streams come after it.
                tiles = torch.from_numpy(tables.tiles.view(np.int64)).to(self.device)
                self._tables[alignment] = tables, tiles
            return self._tables[alignment]

    def _span(self, tiles: int) -> int:
        return max(1, min(_MOST_SPAN, tiles // (self._processors * _PROGRAMS_A_PROCESSOR)))

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class Uploads:
    """Host arrays on their way to a device: each in pinned memory that is held until its copy has run."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._held: list[tuple[Any, Any]] = []  # event, pinned memory

    def put(self, words: NDArray[np.int64]) -> Any:
        """A tensor with these words, for what comes on the current stream from now on. Waits for nothing.

        Raises:
            DeviceMemoryError: there is not as much memory, pinned or the device's.
            DeviceError: the device refused.
        """
        if self._device.type == "cpu":
            return torch.from_numpy(words)
        try:
            pinned = torch.empty(words.size, dtype=torch.int64, pin_memory=True)
            pinned.numpy()[:] = words
            there = pinned.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        except RuntimeError as exc:  # torch has one kind for nearly all; CUDA's text tells what it was
            kind = DeviceMemoryError if "out of memory" in str(exc).lower() else DeviceError
            raise kind(f"a job's table of {words.nbytes} bytes did not reach {self._device}: {exc}") from exc
        with self._lock:
            self._held = [pair for pair in self._held if not pair[0].query()]
            self._held.append((copied, pinned))
        return there


def _device_of(tensors: Sequence[Sequence[Any]]) -> Any:
    """The one device of these tensors.

    Raises:
        LayoutError: they are on several.
        DeviceError: they are the host's, and no interpreter is there.
    """
    devices = {getattr(tensor, "device", "cpu") for mine in tensors for tensor in mine} or {"cpu"}
    found = {torch.device(device) for device in devices}
    if len(found) > 1:
        raise LayoutError(f"the tensors are on several devices: {sorted(map(str, found))}")
    (device,) = found
    if device.type != "cuda" and isinstance(move_rows, triton.JITFunction):
        raise DeviceError(f"the tensors are on {device}: want CUDA, or TRITON_INTERPRET=1 from the start")
    return device


def _processors(device: Any) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


# ---- for the offline compiler


def variants() -> Iterator[Variant]:
    """The kernel as plans launch it: for each width of the vectors that are not of 16 bytes, and both ways."""
    for width in (16, 8, 4, 2, 1):
        for way, scatter in (("gather", False), ("scatter", True)):
            constexprs = {"WIDTH": width, "SCATTER": scatter}
            yield Variant(
                f"rows-{width}-{way}",
                move_rows,
                {"tiles": "*i64", "job": "*i64", "num_groups": "i32", "units": "i32", "span": "i32"}
                | dict.fromkeys(constexprs, "constexpr"),
                constexprs,
                {(index,): [["tt.divisibility", 16]] for index in (0, 1)},
                _WARPS,
                width,
                TILE * width,
            )
