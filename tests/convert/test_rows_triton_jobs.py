"""The row converter of devices: jobs that are refused, and, by doubles, what a stream is given."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import triton

from kvxfer.convert import launch_rows, row_kernels
from kvxfer.convert.launch_rows import DeviceRowPlan, Uploads
from kvxfer.convert.native_rows import RowMemory
from kvxfer.errors import DeviceError, DeviceMemoryError, LayoutError
from kvxfer.rows import RowMapping
from tests.convert.common import assert_same
from tests.convert.device_plans import PAGE, Counted, interpreted, plan_of
from tests.convert.row_plans import cell, group, int64, noise, run

pytestmark = interpreted


# ---- what is refused


@pytest.mark.parametrize(
    "wrong",
    [
        cell([run(1, 0, 8)], page=8, place=8),  # beyond the page
        cell([run(0, 1, 8)], page=8, place=8),  # beyond the place
        cell([run(0, 0, 4, 2, 5, 4)], page=8, place=8),
        cell([run(0, 0, 4, 2, 4, 5)], page=8, place=8),
        cell([run(0, 0, 4, 2**62, 8, 4)], page=8, place=8),  # what would wrap round
        cell([run(0, 0, 2, 2**63 + 1, 2**63, 2**63)], page=8, place=8),
        cell([run(0, 0, 0, 1)], page=8, place=8),
        cell([run(0, 0, 8, 0)], page=8, place=8),
        cell([run(-8, 0, 8)], page=8, place=8),
        cell([run(0, 0, 8, 1)], page=8, place=8, num_writers=2, writer_index=2),
        cell([], page=8, place=8),
        cell([run(0, 0, 8)], page=8, place=8, at=9),
        cell([run(0, 0, 8)], page=8, place=8, at=-1),
    ],
)
def test_runs_that_leave_their_place_are_refused(wrong: Any) -> None:
    with pytest.raises(LayoutError, match="tensor 0: "):
        plan_of(RowMapping(cells=(wrong,), blocks_per_chunk=1, row_bytes=16, topology=None))


def test_shapes_that_do_not_fit_are_refused() -> None:
    plan_of(group(PAGE))
    rows = RowMemory.of(noise(2, 32))
    with pytest.raises(LayoutError, match="3 rows that are 4 bytes apart do not hold the mappings'"):
        plan_of(group(PAGE), rows=np.zeros((3, 4), dtype=np.uint8))
    with pytest.raises(LayoutError, match="0 rows that are 16 bytes apart"):
        DeviceRowPlan([group(PAGE)], [[noise(8)]], RowMemory(address=4096, row_stride=16, num_rows=0))
    with pytest.raises(LayoutError, match="tensor 0 has 7 bytes, which hold no block of 8"):
        plan_of(group(PAGE), noise(7))
    with pytest.raises(LayoutError, match="all with as many blocks a chunk"):
        DeviceRowPlan([group(PAGE), group(PAGE, per_chunk=2)], [[noise(8)]] * 2, rows)
    with pytest.raises(LayoutError, match="needs groups"):
        DeviceRowPlan([], [], rows)
    with pytest.raises(LayoutError, match="0 tensors were given, the mapping has 1"):
        DeviceRowPlan([group(PAGE)], [[]], rows)
    with pytest.raises(LayoutError, match="on several devices"):
        DeviceRowPlan([group(PAGE, PAGE)], [[noise(8), torch.empty(8, device="meta")]], rows)
    many = [cell([run(0, 0, 8)], page=8, place=8, num_writers=64, writer_index=i) for i in range(64)]
    with pytest.raises(LayoutError, match="64 kinds of writers"):
        DeviceRowPlan([group(*many)], [[noise(8)] * 64], rows)


def test_host_tensors_are_refused_where_nothing_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "JITFunction", type(row_kernels.move_rows))
    with pytest.raises(DeviceError, match="the tensors are on cpu: want CUDA"):
        plan_of(group(PAGE))


def test_a_job_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    tensor, rows = noise(4 * 8), np.zeros((3, 16), dtype=np.uint8)
    plan = DeviceRowPlan([group(PAGE, per_chunk=2)], [[tensor]], RowMemory.of(rows))
    before = tensor.copy()
    good = int64(0, 1)
    two = RowMemory.of(np.zeros((2, 16), dtype=np.uint8))
    for ids, pages, counts, more, message in [
        (int64(0, 4), good, int64(2), {}, r"block id 4 must be in 0\.\.3"),
        (int64(0, -1), good, int64(2), {}, "block id -1"),
        (int64(0, 2**62), good, int64(2), {}, "block id"),
        (good, int64(0, 6), int64(2), {}, r"row id 3 must be in 0\.\.2"),
        (good, int64(0, -1), int64(2), {}, "row id -1"),
        (good, int64(0, 4), int64(2), {"rows": two}, r"row id 2 must be in 0\.\.1"),
        (good, int64(0, 6), int64(2), {"rows": two, "places": good}, r"row id 3 must be in 0\.\.2"),
        (good, good, int64(2), {"rows": two, "places": int64(0, 4)}, r"row id 2 must be in 0\.\.1"),
        (good, good, int64(2), {"rows": two, "places": int64(0)}, "2 blocks, 1 pages"),
        (good, good, int64(2), {"rows": RowMemory.of(noise(2, 15))}, "do not hold the mappings'"),
        (good, int64(0), int64(2), {}, "2 blocks, 1 pages, and 2 in all groups"),
        (good, good, int64(1), {}, "2 blocks, 2 pages, and 1 in all groups"),
        (good, good, int64(1, 1), {}, "must be a count for each of 1 groups"),
        (good.astype(np.int32), good, int64(2), {}, "block_ids of int32"),
        (good, good, int64(2), {"programs": 0}, "programs=0 must be at least 1"),
    ]:
        for copy in (plan.gather, plan.scatter):
            with pytest.raises(LayoutError, match=message):
                copy(ids, pages, counts, **more)
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
    with pytest.raises(LayoutError, match="the rows are read-only"):
        plan_of(group(PAGE), tensor, rows).gather(*job, rows=RowMemory.of(fixed_rows))
    assert plan_of(group(PAGE), fixed_tensor, rows).gather(*job) == 8
    assert plan_of(group(PAGE), tensor, fixed_rows).scatter(*job) == 8


def test_a_closed_plan_lets_go_of_its_memory_and_takes_no_job() -> None:
    class Held(np.ndarray):
        """An array that can be referred to weakly."""

    tensor: Any = noise(4 * 8).view(Held)
    plan = DeviceRowPlan([group(PAGE)], [[tensor]], RowMemory.of(noise(3, 16)))
    prepared = plan.prepare(int64(0), int64(0), int64(1), gather=True)
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
    with pytest.raises(LayoutError, match="the plan is closed"):
        plan.launch(prepared)


# ---- on a stream, by doubles


class _Event:
    """Recorded, and done when the test says so."""

    made: ClassVar[list[_Event]] = []

    def __init__(self) -> None:
        self.recorded = self.is_done = False
        self.made.append(self)

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.is_done


def test_what_is_on_its_way_up_is_held_until_its_copy_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory that were given back sooner would be filled anew under the copy."""
    empty, pinned = torch.empty, []

    def keep(size: int, *, dtype: Any, pin_memory: bool) -> Any:
        assert pin_memory
        memory = empty(size, dtype=dtype)
        pinned.append(weakref.ref(memory))
        return memory

    class Elsewhere:
        """The device as `Tensor.to` takes it: a copy, which is what a device's memory is."""

        type = "cuda"

    def to(self: Any, device: Any, *, non_blocking: bool) -> Any:
        assert isinstance(device, Elsewhere) and non_blocking
        assert not any(event.recorded for event in _Event.made[len(pinned) - 1 :])  # the record comes after the copy
        return self.clone()

    monkeypatch.setattr(_Event, "made", [])
    monkeypatch.setattr(torch, "empty", keep)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    uploads = Uploads(Elsewhere())
    for number in range(3):
        assert uploads.put(int64(number, 5)).tolist() == [number, 5]
    first, second, third = _Event.made
    assert first.recorded and second.recorded and third.recorded
    assert all(ref() is not None for ref in pinned)
    second.is_done = True
    uploads.put(int64(9))
    gc.collect()
    assert [ref() is not None for ref in pinned] == [True, False, True, True]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA", DeviceMemoryError),
        ("CUDA error: unspecified launch failure", DeviceError),
    ],
)
@pytest.mark.parametrize("call", ["empty", "record"])
def test_a_table_that_does_not_reach_the_device_is_a_device_error(
    monkeypatch: pytest.MonkeyPatch, text: str, kind: type[DeviceError], call: str
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(text)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, *, dtype, pin_memory: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self.clone())
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    where: Any = torch if call == "empty" else _Event
    monkeypatch.setattr(where, call, refuse)
    uploads = Uploads(torch.device("cuda", 3))
    with pytest.raises(DeviceError, match="table of 16 bytes did not reach cuda:3: CUDA error") as caught:
        uploads.put(int64(1, 2))
    assert type(caught.value) is kind
    assert uploads._held == []


def test_a_job_is_not_prepared_on_a_stream_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(group(PAGE))
    prepared = plan.prepare(int64(0), int64(0), int64(1), gather=True)
    launched: list[Any] = []
    monkeypatch.setattr(plan, "device", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", _Current)
    monkeypatch.setattr(launch_rows, "move_rows", Counted(row_kernels.move_rows, launched))
    with pytest.raises(DeviceError, match="prepare the job before"):
        plan.gather(int64(0), int64(0), int64(1))
    assert plan.launch(prepared) == 8
    assert launched == [(1,)] and _Current.entered == [torch.device("cuda", 1)]


class _Current:
    """torch.cuda.device: which device is the current one."""

    entered: ClassVar[list[Any]] = []

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.entered.append(self.device)

    def __exit__(self, *_: Any) -> None:
        pass
