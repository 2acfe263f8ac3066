"""KvxferTieringSpec's worker beside vLLM's own, which is run here as it is: rows and pages are byte for byte the same.

vLLM's worker asserts CUDA tensors and copies on streams. Tensors here say that they are, streams and events do nothing,
and its batch copy moves each descriptor's bytes at once: all that decides which byte goes where is vLLM's.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.report import engine_reporter
from tests.convert.common import assert_same
from tests.integrations.test_tiering_rows import random_job

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NUM_BLOCKS, NUM_ROWS = 24, 9
TOKENS, HEADS, DIM = 6, 4, 10
_names = itertools.count()


@pytest.fixture(params=["host", "device"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether kvxfer's pages are on a (simulated) device; however small, what is in one piece is packed there."""
    from kvxfer.integrations import vllm_engines

    monkeypatch.setattr(vllm_engines, "LEAST_COPY", 0)
    return bool(request.param == "device")


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with its worker, where a stream is nothing."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    platform = SimpleNamespace(
        Stream=Stream,
        current_stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
        is_xpu=lambda: False,
        is_rocm=lambda: False,
    )
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(gpu_worker, "is_pin_memory_available", lambda: False, raising=False)
    monkeypatch.setattr(gpu_worker, "HAS_TRITON", False)
    monkeypatch.setattr(gpu_worker, "ops", SimpleNamespace(swap_blocks_batch=move))
    monkeypatch.setattr(gpu_worker, "torch", Torch(gpu_worker.torch))
    return gpu_worker


class Stream:
    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, other: Any) -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Torch:
    """torch with other events."""

    Event = Event

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = SimpleNamespace(Event=Event, Stream=Stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def move(source: Any, target: Any, sizes: Any, **how: Any) -> None:
    for here, there, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(there, here, size)


class Rank:
    """A worker's pages, registered as the connector does; the same bytes twice, for the two workers."""

    def __init__(self, layers: list[tuple[int, int]], groups: list[list[tuple[int, int, Any]]], seed: int) -> None:
        """`layers`: (page, padding) of each tensor; `groups`: refs as (tensor, bytes, mapping)."""
        import torch
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

        class OnDevice(torch.Tensor):
            is_cuda = True

        rng = np.random.default_rng(seed)
        noise = [rng.integers(-128, 128, size=(NUM_BLOCKS, sum(layer)), dtype=np.int8) for layer in layers]
        refs = [[CanonicalKVCacheRef(*ref) for ref in group] for group in groups]

        def register(kind: Any) -> Any:
            tensors = [torch.from_numpy(pages.copy()).as_subclass(kind) for pages in noise]
            return CanonicalKVCaches([CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors], refs)

        self.mine, self.theirs = register(torch.Tensor), register(OnDevice)

    def same_pages(self, what: str) -> None:
        for number, (mine, theirs) in enumerate(zip(self.mine.tensors, self.theirs.tensors, strict=True)):
            assert_same(np.asarray(mine.tensor.numpy()), np.asarray(theirs.tensor.numpy()), f"{what}: tensor {number}")


class Server:
    """Regions and workers of all ranks, kvxfer's and vLLM's."""

    def __init__(
        self, stock: Any, ranks: list[Rank], part: int, per_chunk: int, canonical: bool, device: bool = False
    ) -> None:
        from kvxfer.integrations.vllm_copier import RowCopier
        from kvxfer.integrations.vllm_device_copier import copier_over
        from kvxfer.integrations.vllm_rows import make_plan, plan_parts
        from kvxfer.integrations.vllm_tiering_worker import KvxferTieringWorker
        from tests.integrations.lazy_device import LazyDevice, LazyPlan

        self.ranks, self.regions, self.mapped, self.mine, self.theirs = ranks, [], [], [], []
        row = -(-part * len(ranks) // 4096) * 4096
        names = [f"kvxfer-test-{os.getpid()}-{next(_names)}" for _ in range(2)]
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        for number, rank in enumerate(ranks):
            mine, theirs = (SharedOffloadRegion(name, NUM_ROWS, number, row, part) for name in names)
            self.regions.append((mine, theirs))
            self.mapped.append(mine.mmap_obj)
            copier: Any
            if device:
                parts = plan_parts(rank.mine, mine, per_chunk, canonical=canonical)
                copier = copier_over(LazyPlan(parts), parts, LazyDevice(number), how="auto", programs=None)
                del parts
            else:
                copier = RowCopier(make_plan(rank.mine, mine, per_chunk, canonical=canonical))
            self.mine.append(KvxferTieringWorker(copier, mine, per_chunk))
            worker = stock.CPUOffloadingWorker(rank.theirs, per_chunk, NUM_ROWS, theirs, canonical)
            self.theirs.append(worker)

    def rows(self, which: int) -> Any:
        import torch

        region = self.regions[0][which]
        return np.asarray(region._base.view(torch.uint8).numpy())

    def submit(self, job_id: int, blocks: Any, rows: Any, *, store: bool) -> None:
        """To both workers of every rank; waits for them, and compares what they say."""
        from vllm.v1.kv_offload.base import GPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        pages = GPULoadStoreSpec(blocks.block_ids, blocks.group_sizes, blocks.block_indices)
        host = CPULoadStoreSpec(rows.block_ids)
        for mine, theirs in zip(self.mine, self.theirs, strict=True):
            results = []
            for worker in (mine, theirs):
                given = (pages, host) if store else (host, pages)
                assert (worker.submit_store if store else worker.submit_load)(job_id, *given)
                worker.wait({job_id})
                (result,) = worker.get_finished()
                assert result.success and result.job_id == job_id and result.transfer_time >= 0
                results.append(result.transfer_size)
            assert results[0] == results[1]

    def close(self) -> None:
        for worker in [*self.mine, *self.theirs]:
            worker.shutdown()
        assert all(each.closed for each in self.mapped)  # they could be unmapped: nobody refers to them
        for mine, theirs in self.regions:
            assert not any(os.path.exists(region.mmap_path) for region in (mine, theirs))


@contextlib.contextmanager
def server(
    stock: Any, ranks: list[Rank], part: int, per_chunk: int, canonical: bool, device: bool = False
) -> Iterator[Server]:
    made = Server(stock, ranks, part, per_chunk, canonical, device)
    try:
        yield made
    finally:
        made.close()


def compare(
    stock: Any, ranks: list[Rank], part: int, per_chunk: int, groups: int, *, canonical: bool, device: bool
) -> None:
    with server(stock, ranks, part, per_chunk, canonical, device) as both:
        for seed in range(4):
            job = random_job(seed, groups, per_chunk, NUM_BLOCKS, NUM_ROWS)
            both.submit(seed, *job, store=True)
            assert_same(both.rows(0), both.rows(1), f"rows, seed {seed}")
            for noise in (both.rows(0), both.rows(1)):
                noise[:] = np.random.default_rng(seed).integers(0, 256, size=noise.shape, dtype=np.uint8)
            both.submit(seed + 100, *random_job(seed + 50, groups, per_chunk, NUM_BLOCKS, NUM_ROWS), store=False)
            assert_same(both.rows(0), both.rows(1), "rows after the load")
            for rank in ranks:
                rank.same_pages(f"seed {seed}")


@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_direct_rows(stock: Any, tp: int, per_chunk: int, device: bool) -> None:
    layers = [(480, 0), (480, 32), (96, 0)]
    groups: list[list[tuple[int, int, Any]]] = [[(0, 480, None), (1, 480, None)], [(0, 480, None)], [(2, 96, None)]]
    ranks = [Rank(layers, groups, rank) for rank in range(tp)]
    compare(stock, ranks, sum(map(sum, layers)) * per_chunk, per_chunk, 3, canonical=False, device=device)


def mapping_of(layout: str, heads: int, tp: int, dcp: int, rank: int) -> Any:
    """vLLM's own mapping of a layer's pages at a rank."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    mine = max(1, heads // tp)
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=mine, head_size=DIM, dtype=torch.float16)
    shape = {
        "packed-nhd": (NUM_BLOCKS, TOKENS, mine, 2 * DIM),
        "packed-hnd": (NUM_BLOCKS, mine, TOKENS, 2 * DIM),
        "nhd": (NUM_BLOCKS, 2, TOKENS, mine, DIM),
        "hnd": (NUM_BLOCKS, 2, mine, TOKENS, DIM),
    }[layout]
    cache = torch.empty(shape, dtype=torch.float16)
    if layout == "packed-nhd":
        cache = cache.permute(0, 2, 1, 3)
    elif layout == "hnd":
        cache = cache.permute(0, 1, 3, 2, 4)
    context = canonical_mapping._RankContext(
        tp_size=tp, dcp_size=dcp, pcp_size=1, interleave=1, total_kv_heads=heads, rank=rank
    )
    return canonical_mapping._layer_mapping(spec, cache, NUM_BLOCKS, context)


@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize(("heads", "tp", "dcp"), [(4, 1, 1), (4, 2, 1), (4, 4, 1), (2, 4, 1), (1, 4, 1), (1, 4, 2)])
@pytest.mark.parametrize("layout", ["packed-nhd", "packed-hnd", "nhd", "hnd"])
def test_canonical_rows(stock: Any, layout: str, heads: int, tp: int, dcp: int, per_chunk: int, device: bool) -> None:
    ranks, part = [], 0
    for rank in range(tp):
        mapping = mapping_of(layout, heads, tp, dcp, rank)
        if mapping is None and layout.startswith("packed"):
            pytest.skip("this vLLM does not know such pages")
        assert mapping is not None
        size = mapping.local_page_size_bytes
        padding = 16 if per_chunk == 4 else 0
        groups = [[(0, size, mapping), (1, size, mapping)], [(1, size, mapping)]]
        ranks.append(Rank([(size, padding)] * 2, groups, rank))
        part = 2 * mapping.canonical_page_size_bytes * per_chunk
    compare(stock, ranks, part, per_chunk, 2, canonical=True, device=device)


def test_a_worker_refuses_a_job_that_names_what_is_not_there(
    stock: Any, caplog: pytest.LogCaptureFixture, device: bool
) -> None:
    """And goes on. vLLM asserts that jobs are accepted, and ends: rather that than other bytes."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    engine_reporter._kinds.clear()  # no warning is kept back because of another test's
    with server(stock, [Rank([(64, 0)], [[(0, 64, None)]], 1)], 64, 1, False, device) as both:
        (worker,) = both.mine
        good = GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([2])
        assert not worker.submit_store(1, GPULoadStoreSpec([NUM_BLOCKS], [1], [0]), good[1])
        assert not worker.submit_load(2, CPULoadStoreSpec([NUM_ROWS]), good[0])
        assert not worker.submit_store(3, good[0], CPULoadStoreSpec([1, 2]))
        assert "store job 1 is refused: block id 24 must be in 0..23" in caplog.text
        assert worker.submit_load(4, good[1], good[0], expedited=True)
        worker.wait({1, 2, 3, 4})
        assert [result.job_id for result in worker.get_finished()] == [4]
        worker.shutdown()
        assert not worker.submit_store(5, *good)
        assert worker.get_finished() == []
