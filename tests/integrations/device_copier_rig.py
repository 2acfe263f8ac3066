"""A rank's pages and rows under a copier of `KvxferTieringSpec`'s, and beside them as they should be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.device.calibration import Calibration
from kvxfer.integrations.vllm_copier import RowJob
from kvxfer.integrations.vllm_device_copier import copier_over
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


def job_of(blocks: list[int], rows: list[int], first: int = 0) -> Any:
    return Blocks(blocks, [len(blocks)], [first]), Rows(rows)
