"""The row converter of devices, in triton's interpreter, under the face of `convert.rows`: one plan a call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.convert.launch import INTERPRETED
from kvxfer.convert.launch_rows import DeviceRowPlan
from kvxfer.convert.native_rows import RowMemory
from kvxfer.convert.rows import check_rows, refuse_repeated
from kvxfer.rows import RowMapping


def gather_rows(
    tensors: Sequence[NDArray[np.uint8]],
    block_ids: NDArray[np.int64],
    mapping: RowMapping,
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.int64],
) -> None:
    check_rows(tensors, block_ids, mapping, rows, row_ids)
    refuse_repeated("row", row_ids)
    DeviceRowPlan([mapping], [tensors], RowMemory.of(rows)).gather(*_job(block_ids, row_ids))


def scatter_rows(
    rows: NDArray[np.uint8],
    row_ids: NDArray[np.int64],
    mapping: RowMapping,
    tensors: Sequence[NDArray[np.uint8]],
    block_ids: NDArray[np.int64],
) -> None:
    check_rows(tensors, block_ids, mapping, rows, row_ids)
    refuse_repeated("block", block_ids[block_ids >= 0])
    DeviceRowPlan([mapping], [tensors], RowMemory.of(rows)).scatter(*_job(block_ids, row_ids))


def _job(
    block_ids: NDArray[np.int64], row_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Absent blocks are no pages of a plan."""
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this run; -m 'not gpu' interprets them")
    there = block_ids >= 0
    pages = row_ids[:, None] * block_ids.shape[1] + np.arange(block_ids.shape[1])
    return block_ids[there], pages[there], np.array([there.sum()])
