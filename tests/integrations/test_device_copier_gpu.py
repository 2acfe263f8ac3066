"""KvxferTieringSpec's jobs on a CUDA device: its own streams, events and pinned memory, and the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from kvxfer.convert.launch import INTERPRETED
from kvxfer.integrations import vllm_engines
from kvxfer.integrations.vllm_device_copier import open_device_copier
from kvxfer.integrations.vllm_rows import plan_parts
from tests.convert.common import assert_same
from tests.integrations.device_copier_rig import BLOCKS, CASES, LONG, ROWS, row_job
from tests.integrations.test_tiering_rows import Caches, Region, Tensor, random_job, unrolled

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_a_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("compiled kernels need a CUDA device, and torch sees none")
    if INTERPRETED:
        pytest.skip("kernels are interpreted in this run (TRITON_INTERPRET=1)")


def on_device(caches: Caches) -> Caches:
    """The same pages there, packed ones still in one piece of memory."""
    moved: dict[int, Any] = {}
    tensors = []
    for each in caches.tensors:
        storage = each.tensor.untyped_storage()
        flat = moved.setdefault(storage.data_ptr(), torch.tensor([], dtype=torch.int8).set_(storage).to("cuda"))
        there = flat.as_strided(each.tensor.shape, each.tensor.stride(), each.tensor.storage_offset())
        tensors.append(Tensor(there, each.page_size_bytes))
    return Caches(tensors, caches.group_data_refs)


@pytest.mark.parametrize("programs", [None, 1])
@pytest.mark.parametrize("how", ["auto", "zero"])
@pytest.mark.parametrize("case", CASES)
def test_jobs_beside_a_model_leave_the_bytes_that_one_after_the_other_would(
    case: str, how: str, programs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's stream is kept busy, so that whoever does not wait for it comes too early."""
    monkeypatch.setattr(vllm_engines, "LEAST_COPY", 0)
    make, width, fixed = CASES[case]
    canonical, start = fixed.get("canonical", False), fixed.get("start", 0)
    pinned = torch.randint(256, (ROWS, width), dtype=torch.uint8, pin_memory=True)
    want, there = make(), on_device(make())
    mine, theirs = Region(pinned.numpy(), start), Region(pinned.numpy().copy(), start)
    parts = plan_parts(there, mine, 2, canonical=canonical)
    plan_parts(want, theirs, 2, canonical=canonical)  # takes the views
    copier = open_device_copier(parts, how=how, programs=programs)
    rng = np.random.default_rng(5)
    busy = torch.randn(2048, 2048, device="cuda")
    moved: dict[int, int] = {}
    jobs: dict[int, Any] = {}
    for number in range(60):
        block = int(rng.integers(BLOCKS))
        copier.wait({other for other, job in jobs.items() if block in job.blocks_touched})
        busy = busy @ busy / 2048
        for caches in (there, want):
            for each in caches.tensors:
                each.tensor[block].fill_(number)
        groups = len(want.group_data_refs)
        blocks, rows = random_job(number, groups, 2, BLOCKS, int(rng.integers(groups, ROWS + 1)))
        store = bool(rng.integers(2))
        jobs[number] = row_job(number, store, (blocks, rows), 2, urgent=not store and bool(rng.integers(2)))
        copier.submit(jobs[number])
        moved[number] = unrolled(want, theirs, blocks, rows, 2, canonical, store)
    copier.wait(jobs)
    done = {each.job_id: each for each in copier.finished()}
    assert {number: each.nbytes for number, each in done.items()} == moved
    assert all(each.success and each.seconds >= 0 for each in done.values())
    torch.cuda.synchronize()
    for number, (here, other) in enumerate(zip(there.tensors, want.tensors, strict=True)):
        assert_same(here.tensor.cpu().numpy().view(np.uint8), other.tensor.numpy().view(np.uint8), f"tensor {number}")
    assert_same(mine.rows, theirs.rows, "rows")
    assert copier.close(LONG)
