"""The row converter on a CUDA device: rows in pinned memory and in staging, other streams, captured launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.convert.launch import INTERPRETED
from kvxfer.convert.launch_rows import DeviceRowPlan
from kvxfer.convert.native_rows import RowMemory
from tests.convert.common import assert_same
from tests.convert.row_plans import Bytes, by_hand, cell, group, int64, noise, run
from tests.oracle import POISON

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_a_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("compiled kernels need a CUDA device, and torch sees none")
    if INTERPRETED:
        pytest.skip("kernels are interpreted in this run (TRITON_INTERPRET=1)")


def memory_of(rows: Any) -> RowMemory:
    """Of a torch tensor [rows, bytes]: the device reaches pinned memory under its own address."""
    return RowMemory(address=rows.data_ptr(), row_stride=rows.stride(0), num_rows=len(rows), owner=rows)


def case(width: int) -> tuple[Any, list[list[Bytes]], Any]:
    """Two groups over shared tensors, rows of several tiles, vectors of `width` bytes beside some of 16."""
    fragment = 256 + width % 16
    far = cell([run(0, fragment, fragment, 64, fragment, 2 * fragment)], page=64 * fragment, place=128 * fragment)
    whole = cell([run(0, 0, 36864)], page=36864, place=36864, at=256 * fragment + -256 * fragment % 16)
    writers = cell([run(0, 0, 4096)], page=4096, place=4096, at=whole.offset + 2 * 36864, num_writers=3, writer_index=1)
    groups = [group(far, whole, per_chunk=2), group(writers, per_chunk=2)]
    tensors = [[noise(40 * 64 * fragment, seed=1), noise(40 * 36864, seed=2)], [noise(90 * 4096, seed=3)]]
    random = np.random.default_rng(width)
    ids = np.concatenate([random.permutation(40)[:30], random.permutation(90)[:38]])
    pages = np.concatenate([random.permutation(40)[:30], random.permutation(40)[:38]])
    return groups, tensors, (ids, pages, int64(30, 38))


@pytest.mark.parametrize("programs", [None, 3])
@pytest.mark.parametrize("width", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("where", ["pinned", "staging"])
def test_both_ways_are_what_is_done_by_hand(where: str, width: int, programs: int | None) -> None:
    groups, tensors, job = case(width)
    stride = max(mapping.row_bytes for mapping in groups)
    stride += -stride % 16
    rows = torch.full((20, stride), POISON, dtype=torch.uint8, pin_memory=True)
    target = rows if where == "pinned" else rows.to("cuda")
    there = [[torch.from_numpy(tensor).to("cuda") for tensor in mine] for mine in tensors]
    plan = DeviceRowPlan(groups, there, memory_of(rows))
    want = rows.numpy().copy()
    nbytes = by_hand(groups, tensors, want, job, store=True)
    other = None if where == "pinned" else memory_of(target)
    assert plan.gather(*job, rows=other, programs=programs) == nbytes
    torch.cuda.synchronize()
    assert_same(target.cpu().numpy(), want)
    expected = [[np.full_like(tensor, POISON) for tensor in mine] for mine in tensors]
    by_hand(groups, expected, want, job, store=False)
    for tensor in (tensor for mine in there for tensor in mine):
        tensor.fill_(POISON)
    plan.scatter(*job, rows=other, programs=programs)
    torch.cuda.synchronize()
    for number, mine in enumerate(there):
        for index, tensor in enumerate(mine):
            assert_same(tensor.cpu().numpy(), expected[number][index], f"group {number} tensor {index}")


def test_jobs_on_a_stream_that_is_behind_keep_their_own_ids() -> None:
    """Many jobs are handed over while the device is kept busy: each finds the ids that it was given."""
    page = 64
    tensor = torch.arange(1000, dtype=torch.int64, device="cuda").repeat_interleave(page // 8)
    rows = torch.zeros((200, page), dtype=torch.uint8, pin_memory=True)
    mapping = group(cell([run(0, 0, page)], page=page, place=page))
    plan = DeviceRowPlan([mapping], [[tensor]], memory_of(rows))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        plan.gather(int64(0), int64(0), int64(1))  # compiled
        torch.cuda._sleep(200_000_000)
        for number in range(200):
            plan.gather(int64(999 - number), int64(number), int64(1))
    stream.synchronize()
    assert rows.view(torch.int64)[:, 0].tolist() == [999 - number for number in range(200)]


def test_a_prepared_launch_is_captured_and_replayed() -> None:
    tensor = torch.zeros(4 * 64, dtype=torch.uint8, device="cuda")
    rows = torch.zeros((2, 64), dtype=torch.uint8, pin_memory=True)
    plan = DeviceRowPlan([group(cell([run(0, 0, 64)], page=64, place=64))], [[tensor]], memory_of(rows))
    job = plan.prepare(int64(3), int64(1), int64(1), gather=True)
    plan.launch(job)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch(job)
    for value in (5, 6):
        tensor.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (rows[1] == value).all() and not rows[0].any()
