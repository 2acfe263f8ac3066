"""KvxferTieringSpec's jobs on a device's streams: the bytes that one after the other would leave, whatever the order in
which streams go on, and which way they go. Over a device whose work happens late.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.device.calibration import Calibration, Point
from kvxfer.errors import ConfigError
from kvxfer.integrations import vllm_engines
from kvxfer.integrations.vllm_copier import RowJob
from kvxfer.integrations.vllm_device_copier import copier_over
from tests.convert.common import assert_same
from tests.integrations.device_copier_rig import BLOCKS, CASES, LONG, PACKS, ROWS, every_warning, job_of, world
from tests.integrations.lazy_device import LazyDevice
from tests.integrations.test_tiering_rows import (
    random_job,
)  # fmt: skip

__all__ = ["every_warning"]


@pytest.fixture
def anything_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small: "auto" packs what is in one piece."""
    monkeypatch.setattr(vllm_engines, "LEAST_COPY", 0)


@pytest.mark.parametrize("staging_rows", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_any_order_leaves_the_bytes_that_one_after_the_other_would(
    case: str, staging_rows: int, anything_packs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random jobs over few blocks and rows, in between what the model does. As vLLM does, it waits for a job before the
    model touches that job's blocks; for all else the copier has to wait."""
    for seed in range(8):
        monkeypatch.setattr(vllm_engines, "STAGING_BYTES", staging_rows * 400)
        both = world(case, seed=seed)
        for packed in both.copier._engine.packed:
            assert [span is not None for span in packed] == PACKS[case]
        rng = np.random.default_rng(seed)
        flying: dict[int, RowJob] = {}
        ended: list[Any] = []
        for step in range(25):
            kind = rng.choice(["store", "load", "urgent", "write", "read", "poll"], p=[0.3, 0.2, 0.1, 0.2, 0.1, 0.1])
            if kind in ("write", "read"):
                block = int(rng.integers(BLOCKS))
                both.copier.wait({number for number, job in flying.items() if block in job.blocks_touched})
                both.computes(block, step) if kind == "write" else both.reads(block)
            elif kind == "poll":
                ended += both.copier.finished()
            else:
                groups = len(both.caches.group_data_refs)
                # Few of the rows, so that jobs meet now and then, and not always.
                job = random_job(int(rng.integers(1 << 30)), groups, 2, BLOCKS, int(rng.integers(groups, ROWS + 1)))
                made = both.submit(job, store=kind == "store", urgent=kind == "urgent")
                flying[made.job_id] = made
        ended += both.settle().values()
        assert sorted(each.job_id for each in ended) == sorted(both.moved)
        assert {each.job_id: each.nbytes for each in ended} == both.moved
        assert all(each.success and each.seconds >= 0 for each in ended)
        assert both.copier.close(LONG) and both.plan.closed == 1
        assert both.copier.finished() == []


def test_triton_does_the_same(anything_packs: None) -> None:
    """The kernels themselves, in the interpreter, in staging and in rows; a few jobs."""
    pytest.importorskip("triton")
    from kvxfer.convert.launch_rows import DeviceRowPlan

    for case in ("hybrid", "canonical"):
        both = world(case)
        parts = both.parts
        plan = DeviceRowPlan(parts.groups, parts.tensors, parts.memory)
        both.copier = copier_over(plan, parts, both.device, how="auto", programs=2)
        groups = len(both.caches.group_data_refs)
        for seed in range(2):
            both.submit(random_job(seed, groups, 2, BLOCKS, ROWS), store=True)
            both.submit(random_job(seed + 9, groups, 2, BLOCKS, ROWS), store=False)
        done = both.settle()
        assert {number: each.nbytes for number, each in done.items()} == both.moved
        assert both.copier.close(LONG)


def test_whole_chunks_are_packed_and_what_is_left_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engines, "STAGING_BYTES", 2 * 232)  # two rows
    both = world("direct", how="pack", programs=5)
    assert both.plan.launches == [("gather", 1, True, 1), ("scatter", 1, True, 1)]  # compiled before they are needed
    both.submit(job_of([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3], first=1), store=True)  # the first chunk in part only
    both.settle()
    assert both.plan.launches[2:] == [("gather", 1, False, 5), ("gather", 4, True, 5), ("gather", 2, True, 5)]
    both.submit(job_of([1, 2, 3], [0, 4]), store=False)
    both.submit(job_of([4, 5], [3]), store=False, urgent=True)  # has no staging of its own
    both.settle()
    assert sorted(both.plan.launches[5:]) == [
        ("scatter", 1, False, 5), ("scatter", 2, False, 5), ("scatter", 2, True, 5),
    ]  # fmt: skip


def test_a_page_that_is_named_twice_makes_no_whole_chunk() -> None:
    """As many pages as a chunk has, and not all of them: the row's other page is nobody's to write."""
    both = world("direct", how="pack")
    job = RowJob(0, True, np.array([1, 1]), np.array([2, 2]), np.array([2]))
    before = both.region.rows.copy()
    both.copier.submit(job)
    both.copier.wait({0})
    start = both.region.start
    for at, layer in ((start, both.caches.tensors[0]), (start + 2 * 64, both.caches.tensors[1])):
        before[1, at : at + layer.page_size_bytes] = layer.tensor[1].numpy().view(np.uint8)
    assert_same(both.region.rows, before, "rows")


@pytest.mark.parametrize(
    ("case", "how", "least", "packed"),
    [
        ("direct", "auto", 224, [True]),
        ("direct", "auto", 225, [False]),
        ("direct", "pack", 1 << 30, [True]),
        ("direct", "zero", 0, [False]),
        ("hybrid", "auto", 0, [True, False, True]),
        ("canonical", "auto", 0, [False]),
    ],
)
def test_the_engine_is_chosen_by_what_a_row_has(
    case: str, how: str, least: int, packed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engines, "LEAST_COPY", least)
    both = world(case, how=how)
    for spans in both.copier._engine.packed:
        assert [span is not None for span in spans] == packed
    groups = len(packed)
    both.submit(random_job(3, groups, 2, BLOCKS, ROWS, whole=True), store=True)
    both.settle()
    launches = both.plan.launches[both.warm :]
    assert {in_staging for _, _, in_staging, _ in launches} == set(packed)
    # A launch over the bus leaves room for the model; what stays in the device's memory is short.
    assert {(in_staging, most) for _, _, in_staging, most in launches} == {
        (each, None if each else vllm_engines.ZERO_PROGRAMS) for each in packed
    }


def measured(**fastest: str) -> Calibration:
    """As if the same engine were the fastest for all fragments, by direction; of the others nothing is known."""
    seconds = {
        Point(direction, size, count): {engine: 1.0 if engine == best else 2.0 for engine in ("pack", "zero")}
        for direction, best in fastest.items()
        for size, count in ((64, 16), (4096, 4096))
    }
    return Calibration(engines=("pack", "zero"), seconds=seconds)


@pytest.mark.parametrize(
    ("known", "packs"),
    [
        (measured(store="zero", load="zero"), ([False], [False])),
        (measured(store="pack", load="pack"), ([True], [True])),
        (measured(store="zero", load="pack"), ([True], [False])),
        (measured(load="pack"), ([True], [False])),  # stores: by the rule for what was not measured, these are small
        (measured(), ([False], [False])),
    ],
)
def test_what_was_measured_decides_for_each_direction(known: Calibration, packs: tuple[list[bool], list[bool]]) -> None:
    both = world("direct", known=known)
    assert tuple([span is not None for span in spans] for spans in both.copier._engine.packed) == packs
    for store in (True, False):
        first = len(both.plan.launches)
        both.submit(random_job(3, 1, 2, BLOCKS, ROWS, whole=True), store=store)
        both.settle()
        assert {in_staging for _, _, in_staging, _ in both.plan.launches[first:]} == set(packs[store])
    assert [
        span is not None
        for span in world("canonical", known=measured(store="pack", load="pack")).copier._engine.packed[1]
    ] == [False]


@pytest.mark.parametrize("case", ["padded", "canonical", "replicated"])
def test_packing_what_is_in_pieces_is_refused(case: str) -> None:
    with pytest.raises(ConfigError, match="kvxfer_copy_engine='pack': of group 0 .* use 'auto' or 'zero'"):
        world(case, how="pack")


def test_staging_is_as_large_as_the_device_allows(caplog: pytest.LogCaptureFixture) -> None:
    """And aligned as the rows are."""
    both = world("direct", how="pack", device=LazyDevice(memory=7 * 240))
    sizes = [lane.staging and lane.staging.memory.num_rows for lane in both.copier._lanes]
    assert sizes == [4, 2, None] and "bytes of staging are not to be had" in caplog.text
    rows = both.parts.memory
    for lane in both.copier._lanes[:2]:
        assert lane.staging is not None
        staging = lane.staging.memory
        assert (staging.address - rows.address) % 16 == 0 == (staging.row_stride - rows.row_stride) % 16
    none = world("direct", how="pack", device=LazyDevice(memory=100))
    assert [lane.staging for lane in none.copier._lanes] == [None, None, None]
    for one in (both, none):
        one.submit(job_of([1, 2, 3, 4, 5, 6], [5, 1, 3]), store=True)
        one.settle()
