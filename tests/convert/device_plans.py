"""Plans of the row converter of devices, in the interpreter, and what is looked at in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.convert.launch import INTERPRETED
from kvxfer.convert.launch_rows import DeviceRowPlan
from kvxfer.convert.native_rows import RowMemory
from kvxfer.rows import RowMapping
from tests.convert.row_plans import Bytes, cell, check_both_ways, noise, run
from tests.oracle import POISON

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="kernels are compiled in this run; -m 'not gpu' interprets them"
)


def aligned(size: int, *, at: int = 0, seed: int | None = None) -> Bytes:
    """Bytes that begin `at` bytes after a multiple of 64: noise, or POISON."""
    memory = np.full(size + 128, POISON, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + at
    found = memory[start : start + size]
    if seed is not None:
        found[:] = noise(size, seed=seed)
    return found


def aligned_rows(count: int, stride: int, *, at: int = 0) -> Bytes:
    return aligned(count * stride, at=at).reshape(count, stride)


def both_ways(
    groups: list[RowMapping], tensors: list[list[Bytes]], rows: Bytes, job: Any, programs: int | None = None
) -> DeviceRowPlan:
    """Gather and scatter are what is done by hand, bytes that are counted and bytes that nobody named included."""
    plan = DeviceRowPlan(groups, tensors, RowMemory.of(rows))
    check_both_ways(plan, groups, tensors, rows, job, programs=programs)
    return plan


def widths(plan: DeviceRowPlan) -> tuple[int, set[bool]]:
    """Of the plan's own rows: of vectors that are not of 16 bytes, and which kinds of tiles there are."""
    (tables, _), *_ = plan._tables.values()
    return tables.width, set((tables.tiles["kind"] < 0).tolist())


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches.append(grid)
        return self.kernel[grid]


PAGE = cell([run(0, 0, 8)], page=8, place=8)


def plan_of(mapping: RowMapping, tensor: Any = None, rows: Bytes | None = None) -> DeviceRowPlan:
    tensor = noise(4 * 8) if tensor is None else tensor
    rows = np.zeros((3, 16), dtype=np.uint8) if rows is None else rows
    return DeviceRowPlan([mapping], [[tensor]], RowMemory.of(rows))
