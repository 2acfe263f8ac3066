"""KvxferTieringSpec's jobs on a device's streams: the bytes that one after the other would leave, whatever the order in
which streams go on; what waits for what; one result for each job. Over a device whose work happens late.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.device.calibration import Calibration, Point
from kvxfer.errors import ConfigError, DeviceError, EngineClosed, ForkError, LayoutError
from kvxfer.integrations import vllm_engines
from kvxfer.integrations.vllm_copier import MOST_PASSED, RowJob
from kvxfer.integrations.vllm_device_copier import DeviceRowCopier, copier_over
from kvxfer.integrations.vllm_rows import job_pages, plan_parts
from kvxfer.report import engine_reporter
from tests.convert.common import assert_same
from tests.integrations.lazy_device import LazyDevice, LazyPlan
from tests.integrations.test_tiering_rows import (
    Blocks,
    Caches,
    Ranks,
    Ref,
    Region,
    Rows,
    Tensor,
    pages,
    random_job,
    unrolled,
)  # fmt: skip

BLOCKS, ROWS = 8, 9
LONG = 60.0


def row_job(number: int, store: bool, job: Any, per_chunk: int, urgent: bool = False) -> RowJob:
    blocks, rows = job
    return RowJob(number, store, *job_pages(blocks, rows, per_chunk), urgent)


class World:
    """A rank's pages and rows twice: those that a copier works on, and those that are as they should be."""

    def __init__(
        self, make: Callable[[], Caches], width: int, per_chunk: int, *, canonical: bool = False, start: int = 0,
        seed: int = 0, how: str = "auto", device: LazyDevice | None = None, programs: int | None = None,
        known: Calibration | None = None,
    ) -> None:  # fmt: skip
        self.caches, self.want = make(), make()
        self.per_chunk, self.canonical = per_chunk, canonical
        noise = np.random.default_rng(1).integers(0, 256, size=(ROWS, width), dtype=np.uint8)
        self.region, self.want_region = Region(noise.copy(), start), Region(noise.copy(), start)
        self.device = device or LazyDevice(seed)
        self.parts = parts = plan_parts(self.caches, self.region, per_chunk, canonical=canonical)
        plan_parts(self.want, self.want_region, per_chunk, canonical=canonical)  # takes the views
        self.plan = LazyPlan(parts)
        self.copier = copier_over(self.plan, parts, self.device, how=how, programs=programs, known=known)
        self.warm = len(self.plan.launches)
        self.numbers = itertools.count()
        self.moved: dict[int, int] = {}  # bytes of each job, by the oracle

    def submit(self, job: Any, *, store: bool, urgent: bool = False) -> RowJob:
        number = next(self.numbers)
        made = row_job(number, store, job, self.per_chunk, urgent)
        self.copier.submit(made)
        self.moved[number] = unrolled(
            self.want, self.want_region, job[0], job[1], self.per_chunk, self.canonical, store
        )
        return made

    def bytes_of(self, caches: Caches, block: int) -> list[Any]:
        return [each.tensor[block].clone() for each in caches.tensors]

    def computes(self, block: int, value: int) -> None:
        """The model writes a block."""
        self.device.compute(lambda: [each.tensor[block].fill_(value) for each in self.caches.tensors])
        for each in self.want.tensors:
            each.tensor[block].fill_(value)

    def reads(self, block: int) -> None:
        """The model reads a block, which must be as it is now."""
        want = self.bytes_of(self.want, block)

        def check() -> None:
            for mine, theirs in zip(self.bytes_of(self.caches, block), want, strict=True):
                assert torch.equal(mine, theirs), f"the model read other bytes of block {block}"

        self.device.compute(check)

    def settle(self) -> dict[int, Any]:
        """All jobs have ended: by number, what became of them. Their bytes are right."""
        self.copier.wait(self.moved)
        done = {each.job_id: each for each in self.copier.finished()}
        self.device.run()
        self.same()
        return done

    def same(self) -> None:
        for number, (mine, theirs) in enumerate(zip(self.caches.tensors, self.want.tensors, strict=True)):
            assert_same(mine.tensor.numpy().view(np.uint8), theirs.tensor.numpy().view(np.uint8), f"tensor {number}")
        assert_same(self.region.rows, self.want_region.rows, "rows")


def layers(*sizes: int, padding: int = 0) -> list[Tensor]:
    return [Tensor(pages(BLOCKS, size + padding, size + n), size + padding) for n, size in enumerate(sizes)]


def direct() -> Caches:
    """Two layers without padding: a rank's part of a row is one piece."""
    return Caches(layers(64, 48), [[Ref(0, 64), Ref(1, 48)]])


def padded() -> Caches:
    return Caches(layers(64, 64, padding=8), [[Ref(0, 64), Ref(1, 64)]])


def hybrid() -> Caches:
    """Three groups over the same tensors: the second's part of a row is in pieces, the third's is one tensor."""
    return Caches(layers(64, 64, 32), [[Ref(0, 64), Ref(1, 64), Ref(2, 32)], [Ref(0, 64), Ref(2, 32)], [Ref(1, 64)]])


def interleaved() -> Caches:
    """Packed: layers interleaved within a block."""
    memory = pages(BLOCKS, 3 * 32, 1)
    tensors = [Tensor(memory[:, n * 32 : (n + 1) * 32], 32) for n in range(3)]
    return Caches(tensors, [[Ref(0, 32), Ref(1, 32)], [Ref(2, 32)]])


def canonical() -> Caches:
    """The second of two tensor-parallel ranks."""
    return shrunk(Ranks("nhd", 4, 2, 1, 2).caches[1])


def replicated() -> Caches:
    """The second of four ranks that have one head and take turns to write it."""
    return shrunk(Ranks("hnd", 1, 4, 1, 2).caches[1])


def shrunk(caches: Caches) -> Caches:
    return Caches([Tensor(each.tensor[:BLOCKS].clone(), each.page_size_bytes) for each in caches.tensors],
                  caches.group_data_refs)  # fmt: skip


CASES: dict[str, tuple[Callable[[], Caches], int, dict[str, Any]]] = {
    "direct": (direct, 2 * 224 + 24, {"start": 224 + 8}),
    "padded": (padded, 288, {}),
    "hybrid": (hybrid, 320, {}),
    "interleaved": (interleaved, 192, {}),
    "canonical": (canonical, 4000, {"canonical": True}),
    "replicated": (replicated, 2000, {"canonical": True}),
}
PACKS = {"direct": [True], "padded": [False], "hybrid": [True, False, True], "interleaved": [True, True],
         "canonical": [False], "replicated": [False]}  # fmt: skip


def world(case: str, **how: Any) -> World:
    make, width, fixed = CASES[case]
    return World(make, width, 2, **fixed, **how)


@pytest.fixture(autouse=True)
def every_warning() -> None:
    """None is kept back because of another test's."""
    engine_reporter._kinds.clear()


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


# ---- what goes which way


def job_of(blocks: list[int], rows: list[int], first: int = 0) -> Any:
    return Blocks(blocks, [len(blocks)], [first]), Rows(rows)


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


# ---- order, results, ends


@pytest.fixture
def plain() -> Iterable[World]:
    both = world("direct")
    yield both
    both.device.frozen = both.device.lost = False
    both.device.failing.clear()
    assert both.copier.close(LONG)


def waits(both: World) -> list[list[str]]:
    """Of each job so far, the streams whose events its own waits for."""
    found: list[list[str]] = []
    for call, stream, *what in both.device.calls:
        if call == "wait":
            found[-1].append(f"{stream} for {what[0].partition('.')[0]}")
        elif call == "record" and stream == "model":
            found.append([])
    return found


STORES, LOADS, URGENT = "123"


def test_what_waits_for_what(plain: World) -> None:
    plain.device.frozen = True
    plain.submit(job_of([1, 2], [1]), store=True)
    plain.submit(job_of([3, 4], [2]), store=False)  # meets nothing
    plain.submit(job_of([5, 6], [1]), store=False)  # the row that is being stored
    plain.submit(job_of([3, 7], [3]), store=True)  # a block that is being loaded
    plain.submit(job_of([5, 0], [4]), store=False, urgent=True)  # a block that another load fills
    plain.submit(job_of([1, 2], [5]), store=False, urgent=True)  # blocks that are being stored
    plain.submit(job_of([1, 2], [1]), store=True)  # after the first: on the same stream; and after the last load
    model = [f"{lane} for model" for lane in (STORES, LOADS, LOADS, STORES, URGENT, URGENT, STORES)]
    want: list[list[str]] = [[], [], ["2 for 1"], ["1 for 2"], ["3 for 2"], ["3 for 1"], ["1 for 2", "1 for 3"]]
    assert waits(plain) == [[first, *more] for first, more in zip(model, want, strict=True)]
    plain.device.frozen = False
    assert len(plain.settle()) == 7


def test_loads_have_more_urgent_streams_than_stores(plain: World) -> None:
    assert [stream.urgent for stream in plain.device.streams] == [False, False, True, True]


def test_looking_back_is_bounded_and_then_waits_for_all_that_is_older(plain: World) -> None:
    plain.device.frozen = True
    for _ in range(MOST_PASSED + 1):
        plain.submit(job_of([1, 2], [1]), store=True)
    plain.submit(job_of([3, 4], [2]), store=False)
    assert waits(plain)[-1] == ["2 for model", "2 for 1"]
    plain.device.frozen = False
    plain.settle()
    plain.submit(job_of([3, 4], [2]), store=False)
    assert waits(plain)[-1] == ["2 for model"]  # what has ended is not looked at
    plain.settle()


def test_submit_and_finished_wait_for_nothing(plain: World) -> None:
    plain.device.frozen = True
    for number in range(5):
        plain.submit(job_of([1, 2], [number]), store=True)
    assert plain.copier.finished() == []
    plain.device.frozen = False
    done = plain.settle()
    assert [each.job_id for each in done.values()] == list(range(5)) and plain.copier.finished() == []
    assert all(each.is_store and each.seconds > 0 for each in done.values())


def test_wait_is_for_the_jobs_named_and_leaves_their_results(plain: World) -> None:
    plain.copier.wait({7, 8})  # nobody submitted those
    plain.submit(job_of([1, 2], [1]), store=True)
    plain.submit(job_of([3, 4], [2]), store=True)
    plain.copier.wait({0})
    assert np.array_equal(plain.region.rows[1], plain.want_region.rows[1])
    assert 0 in {each.job_id for each in plain.copier.finished()}
    plain.settle()


def test_while_one_waits_others_submit(plain: World) -> None:
    plain.submit(job_of([1, 2], [1]), store=True)
    waiting, go = threading.Event(), threading.Event()
    event = plain.copier._unfinished[0].end

    def wait() -> None:
        waiting.set()
        assert go.wait(LONG)

    event.wait = wait  # type: ignore[method-assign]
    thread = threading.Thread(target=plain.copier.wait, args=({0},))
    thread.start()
    assert waiting.wait(LONG)
    plain.submit(job_of([3, 4], [2]), store=False)
    go.set()
    thread.join(LONG)
    plain.moved.pop(0)
    plain.settle()


def test_jobs_that_cannot_be_are_refused_and_put_nothing_on_a_stream(plain: World) -> None:
    calls = len(plain.device.calls)
    with pytest.raises(LayoutError, match=f"block id {BLOCKS} must be"):
        plain.submit(job_of([BLOCKS, 1], [1]), store=True)
    with pytest.raises(LayoutError, match=f"row id {ROWS} must be"):
        plain.submit(job_of([1, 2], [ROWS]), store=True)
    assert len(plain.device.calls) == calls
    made = plain.submit(job_of([1, 2], [1]), store=True)
    with pytest.raises(ValueError, match=f"job {made.job_id} is not finished yet"):
        plain.copier.submit(made)
    assert len(plain.settle()) == 1


def test_a_job_that_fails_on_its_way_ends_once_and_only_when_its_part_has(
    plain: World, caplog: pytest.LogCaptureFixture
) -> None:
    plain.device.frozen = True
    plain.device.failing["queue"] = MemoryError("no room for tables")
    job = job_of([1, 2], [1])
    plain.copier.submit(row_job(900, True, job, 2))
    del plain.device.failing["queue"]
    assert "job 900 failed: no room for tables" in caplog.text
    assert plain.copier.finished() == []  # what came before on the stream might be a part of it
    plain.device.frozen = False
    plain.submit(job_of([3, 4], [2]), store=True)
    plain.copier.wait({900, 0})
    assert [(each.job_id, each.success, each.nbytes) for each in plain.copier.finished()] == [
        (900, False, 0), (0, True, 224),
    ]  # fmt: skip


@pytest.mark.parametrize("seen_by", ["finished", "wait", "close"])
def test_a_lost_device_fails_every_job_once_and_takes_no_more(seen_by: str, caplog: pytest.LogCaptureFixture) -> None:
    both = world("direct")
    both.device.frozen = True
    both.submit(job_of([1, 2], [1]), store=True)
    both.submit(job_of([3, 4], [2]), store=False)
    both.device.lost = True
    with caplog.at_level(logging.WARNING, "kvxfer.engine"):
        if seen_by == "wait":
            both.copier.wait({0, 1})
        closed = both.copier.close(LONG) if seen_by == "close" else False
        done = both.copier.finished()
    assert sorted((each.job_id, each.success, each.nbytes) for each in done) == [(0, False, 0), (1, False, 0)]
    assert "the device was lost" in caplog.text and both.copier.finished() == []
    with pytest.raises(EngineClosed if closed else DeviceError):
        both.submit(job_of([1, 2], [1]), store=True)
    both.copier.wait({0, 1})
    assert both.copier.close(0.0) and both.plan.closed >= 1  # nothing runs there any more


def test_a_device_that_takes_nothing_refuses_the_job(plain: World) -> None:
    plain.device.failing["record"] = DeviceError("no")
    with pytest.raises(DeviceError, match="no"):
        plain.submit(job_of([1, 2], [1]), store=True)
    del plain.device.failing["record"]
    plain.submit(job_of([1, 2], [1]), store=True)
    assert list(plain.settle()) == [1]


def test_where_an_end_is_not_known_close_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is on its stream, and no event says when it is done."""
    both = world("direct")
    real = both.device.queue
    calls: list[None] = []

    def queue(stream: Any, work: Any) -> None:
        calls.append(real(stream, work))
        both.device.failing["record"] = DeviceError("no")

    monkeypatch.setattr(both.device, "queue", queue)
    with pytest.raises(DeviceError):
        both.submit(job_of([1, 2], [1]), store=True)
    assert calls and not both.copier.close(0.05) and not both.plan.closed


def test_close_is_bounded_and_waits_for_the_last_copy() -> None:
    both = world("direct")
    both.device.frozen = True
    both.submit(job_of([1, 2], [1]), store=True)
    started = time.monotonic()
    assert not both.copier.close(0.05) and both.plan.closed == 0
    assert time.monotonic() - started < LONG / 2
    with pytest.raises(EngineClosed):
        both.submit(job_of([1, 2], [1]), store=True)
    both.device.frozen = False
    assert both.copier.close(LONG)
    both.same()
    assert [each.job_id for each in both.copier.finished()] == [0]
    assert both.copier._engine.parts is None  # nothing here refers to vLLM's memory any more


def test_a_forks_child_is_told_and_closes_nothing(plain: World) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            plain.copier.submit(row_job(1, True, job_of([1, 2], [1]), 2))
            answer = b"accepted"
        except ForkError:
            answer = b"closed" if plain.copier.close(0.0) or plain.plan.closed else b"told"
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"told"
    os.waitpid(child, 0)
    os.close(reading)


def test_who_forgets_close_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *what: kept.append(what))
    both = world("direct")
    ((close, patience),) = kept
    both.submit(job_of([1, 2], [1]), store=True)
    assert close(patience) and both.plan.closed == 1
    both.same()


def test_it_has_the_native_copiers_face() -> None:
    from kvxfer.integrations.vllm_copier import RowCopier

    for name in ("submit", "finished", "wait", "close"):
        assert callable(getattr(RowCopier, name)) and callable(getattr(DeviceRowCopier, name))
