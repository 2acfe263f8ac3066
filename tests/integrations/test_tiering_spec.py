"""KvxferTieringSpec at its start: which worker, and what is refused. Over the real vLLM, without an engine."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integrations import harness
from tests.integrations.harness import TieringOffloadingSpec, offloading_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PAGE, ROWS, BLOCKS = 4096, 8, 6


def make(**how: Any) -> Any:
    """A spec with 8 rows of a chunk of one page."""
    from kvxfer.integrations.vllm_tiering import KvxferTieringSpec

    extra = {"cpu_bytes_to_use": ROWS * PAGE, "secondary_tiers": []} | how.pop("extra", {})
    return KvxferTieringSpec(offloading_config(PAGE, extra=extra, **how))


def caches(device: str = "cpu", *, mapping: Any = None, page: int = PAGE) -> Any:
    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    where = SimpleNamespace(type=device)

    class Elsewhere(torch.Tensor):
        device = where

    tensor: Any = torch.arange(BLOCKS * page, dtype=torch.int64).to(torch.int8).view(BLOCKS, page)
    if device != "cpu":
        tensor = tensor.as_subclass(Elsewhere)
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, page, mapping)]])


@pytest.fixture(autouse=True)
def every_warning() -> None:
    """None is kept back because of another test's."""
    from kvxfer.report import engine_reporter

    engine_reporter._kinds.clear()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """vLLM on a device, whose stock spec writes down whose worker it was asked for."""
    from kvxfer.integrations import vllm_compat as compat

    asked: list[Any] = []

    def get_worker(self: Any, kv_caches: Any) -> str:
        asked.append(kv_caches)
        self._worker = "vLLM's own"
        return self._worker

    monkeypatch.setattr(compat, "is_cpu_platform", lambda: False)
    monkeypatch.setattr(TieringOffloadingSpec, "get_worker", get_worker)
    return asked


def region_file() -> Path:
    return Path(f"/dev/shm/vllm_offload_test-{os.getpid()}.mmap")


def test_on_the_cpu_the_worker_is_kvxfers_and_moves_rows() -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    spec, pages = make(extra={"kvxfer_copy_threads": 2}), caches()
    worker = spec.get_worker(pages)
    assert type(worker).__module__ == "kvxfer.integrations.vllm_tiering_worker"
    assert spec.get_worker(pages) is worker
    assert worker.submit_store(5, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([2]))
    worker.wait({5})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (5, True, PAGE) and result.transfer_time > 0
    row = np.fromfile(region_file(), dtype=np.int8).reshape(ROWS, -1)[2, :PAGE]
    assert np.array_equal(row, pages.tensors[0].tensor[3].numpy())
    worker.shutdown()
    worker.shutdown()
    assert not region_file().exists()


@pytest.mark.parametrize(
    ("kind", "triton", "why"),
    [
        ("xpu", True, "kvxfer has no converter for cpu pages"),
        ("cuda", True, "kvxfer has no converter for cpu pages"),  # AMD's GPUs: torch calls them so too
        ("nvidia", False, "there is no triton to compile kvxfer's kernels"),
    ],
)
def test_without_a_converter_the_worker_is_vllms_and_that_is_said_once(
    kind: str, triton: bool, why: str, on_device: list[Any], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from kvxfer.integrations import vllm_compat as compat

    monkeypatch.setattr(compat, "is_cuda_platform", lambda: kind == "nvidia")
    monkeypatch.setattr(compat, "has_triton", lambda: triton)
    spec, pages = make(), caches("cuda" if kind == "nvidia" else kind)
    with caplog.at_level(logging.WARNING, "kvxfer.vllm"):
        assert spec.get_worker(pages) == spec.get_worker(pages) == "vLLM's own"
    assert on_device == [pages]
    assert [record.message for record in caplog.records] == [
        f"KvxferTieringSpec: {why}: vLLM's own worker moves the pages, as under TieringOffloadingSpec"
    ]
    assert not region_file().exists()


class Cuda:
    """What stands in for CUDA: rows are registered, or not, and a device's work happens late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch
        from vllm.v1.kv_offload.cpu import gpu_worker

        from kvxfer.integrations import vllm_compat as compat
        from kvxfer.integrations import vllm_tiering
        from kvxfer.integrations.vllm_device_copier import copier_over
        from tests.integrations.lazy_device import LazyDevice, LazyPlan

        self.pins, self.regions, self.asked = True, [], []  # type: ignore[var-annotated]
        self.device = LazyDevice()

        self.pins_slots = "worker_slot_only" in inspect.signature(gpu_worker.pin_mmap_region).parameters

        def pin(region: Any, **how: Any) -> None:
            self.regions.append((region, how))
            region.is_pinned = self.pins

        def pin_slots(region: Any, worker_slot_only: bool = False) -> None:
            pin(region, worker_slot_only=worker_slot_only)

        def open_device_copier(parts: Any, **how: Any) -> Any:
            self.asked.append(how)
            assert all(region.is_pinned for region, _ in self.regions)
            for tensors in parts.tensors:
                tensors[:] = [tensor.as_subclass(torch.Tensor) for tensor in tensors]
            return copier_over(LazyPlan(parts), parts, self.device, **how)

        monkeypatch.setattr(gpu_worker, "pin_mmap_region", pin_slots if self.pins_slots else pin)
        monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", True, raising=False)
        monkeypatch.setattr(compat, "is_cpu_platform", lambda: False)
        monkeypatch.setattr(compat, "is_cuda_platform", lambda: True)
        monkeypatch.setattr(compat, "has_triton", lambda: True)
        monkeypatch.setattr(vllm_tiering, "open_device_copier", open_device_copier)

    def unpin(self) -> None:
        """What a region's cleanup would ask of CUDA."""
        for region, _ in self.regions:
            region.is_pinned = False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_on_cuda_the_worker_is_kvxfers_over_registered_rows(cuda: Cuda) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    extra = {"kvxfer_copy_engine": "pack", "kvxfer_programs": 7}
    spec, pages = make(extra=extra), caches("cuda")
    worker = spec.get_worker(pages)
    assert type(worker).__module__ == "kvxfer.integrations.vllm_tiering_worker"
    assert spec.get_worker(pages) is worker and cuda.asked == [{"how": "pack", "programs": 7}]
    ((_, how),) = cuda.regions
    assert how == ({"worker_slot_only": True} if cuda.pins_slots else {})  # direct rows
    assert worker.submit_store(5, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([2]))
    worker.wait({5})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (5, True, PAGE) and result.transfer_time > 0
    row = np.fromfile(region_file(), dtype=np.int8).reshape(ROWS, -1)[2, :PAGE]
    assert np.array_equal(row, pages.tensors[0].tensor[3].numpy())
    cuda.unpin()
    worker.shutdown()
    assert not region_file().exists()


def test_the_rows_stay_until_the_last_copy_has_ended(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from kvxfer.integrations import vllm_tiering_worker

    order: list[str] = []
    worker = make().get_worker(caches("cuda"))
    ((region, _),) = cuda.regions
    real = region.cleanup
    monkeypatch.setattr(region, "cleanup", lambda: (order.append("cleanup"), cuda.unpin(), real()))
    assert worker.submit_store(1, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([2]))
    cuda.device.streams[1].pieces.append((None, lambda: order.append("copied")))
    assert worker.submit_load(2, CPULoadStoreSpec([2]), GPULoadStoreSpec([1], [1], [0]))
    worker.shutdown()
    assert order == ["copied", "cleanup"]
    assert sorted((each.job_id, each.success) for each in worker.get_finished()) == [(1, True), (2, True)]

    monkeypatch.setattr(vllm_tiering_worker, "SHUTDOWN_S", 0.05)
    cuda.regions.clear()
    worker = make().get_worker(caches("cuda"))
    ((region, _),) = cuda.regions
    real = region.cleanup
    monkeypatch.setattr(region, "cleanup", lambda: order.append("cleanup"))
    cuda.device.frozen = True
    assert worker.submit_store(1, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([2]))
    order.clear()
    worker.shutdown()
    assert order == [] and region_file().exists()
    cuda.device.frozen = False
    assert worker._copier.close(10)
    cuda.unpin()
    real()


@pytest.mark.parametrize("canonical", [False, True])
def test_rows_that_cuda_does_not_take_are_moved_by_vllms_worker(
    canonical: bool, cuda: Cuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the region that all ranks have opened: its file is gone for who would open it again."""
    from vllm.v1.kv_offload.base import CanonicalPageMapping, CopyRun
    from vllm.v1.kv_offload.cpu import gpu_worker

    made: list[Any] = []
    monkeypatch.setattr(gpu_worker, "CPUOffloadingWorker", lambda *given: made.append(given) or "vLLM's own")
    cuda.pins = False
    mapping = CanonicalPageMapping(PAGE, PAGE, (CopyRun(0, 0, PAGE, 1, PAGE, PAGE),), 1, 0, True)
    spec, pages = make(canonical=canonical), caches("cuda", mapping=mapping if canonical else None)
    assert spec.get_worker(pages) == spec.get_worker(pages) == "vLLM's own"
    ((region, how),) = cuda.regions
    assert made == [(pages, 1, ROWS, region, canonical)] and not region._views
    assert how == ({"worker_slot_only": not canonical} if cuda.pins_slots else {})
    assert caplog.text.count("could not be registered with CUDA") == 1
    region.cleanup()


def test_what_cannot_be_packed_ends_the_start_and_leaves_nothing(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import CanonicalPageMapping, CopyRun
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    real = SharedOffloadRegion.cleanup
    monkeypatch.setattr(SharedOffloadRegion, "cleanup", lambda region: (cuda.unpin(), real(region)))
    mapping = CanonicalPageMapping(PAGE, PAGE, (CopyRun(0, 0, PAGE, 1, PAGE, PAGE),), 2, 0, True)
    spec = make(canonical=True, extra={"kvxfer_copy_engine": "pack"})
    with pytest.raises(ValueError, match="use 'auto' or 'zero'"):
        spec.get_worker(caches("cuda", mapping=mapping))
    assert not region_file().exists()


def test_pages_in_host_memory_under_a_device_are_refused(on_device: list[Any]) -> None:
    with pytest.raises(ValueError, match="some KV caches are in host memory on a device's platform"):
        make().get_worker(caches())
    assert on_device == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hisparse_is_refused(device: str, on_device: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer.integrations import vllm_compat as compat

    config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=object()))
    monkeypatch.setattr(compat, "served_vllm_config", lambda: config)
    monkeypatch.setattr(compat, "is_cpu_platform", lambda: device == "cpu")
    with pytest.raises(ValueError, match="hisparse's pages: use spec_name TieringOffloadingSpec"):
        make().get_worker(caches(device))
    assert on_device == [] and not region_file().exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pipeline_stages_of_unequal_layers_are_refused(
    device: str, on_device: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvxfer.integrations import vllm_compat as compat

    said: list[Any] = []

    def told_by_rank0(mine: Any) -> Any:
        said.append(mine)
        return (mine[0] * 3, mine[1])

    monkeypatch.setattr(compat, "told_by_rank0", told_by_rank0)
    monkeypatch.setattr(compat, "is_cpu_platform", lambda: device == "cpu")
    with pytest.raises(ValueError, match="unequal layers: a block is 6144 bytes on rank 0 and 2048 on rank 0"):
        make(pp=2).get_worker(caches(device, page=PAGE // 2))
    assert said == [(PAGE // 2, ROWS)]
    assert on_device == [] and not region_file().exists()


def test_equal_pipeline_stages_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer.integrations import vllm_compat as compat

    monkeypatch.setattr(compat, "told_by_rank0", lambda mine: mine)
    make(pp=2).get_worker(caches(page=PAGE // 2)).shutdown()
    assert not region_file().exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kvxfer_threads": 2, "kvxfer_x": 1}, r"unknown keys \['kvxfer_threads', 'kvxfer_x'\]; .*kvxfer_copy_threads"),
        ({"kvxfer_copy_threads": 0}, "kvxfer_copy_threads=0 must be a number from 1 to 64"),
        ({"kvxfer_copy_threads": 65}, "kvxfer_copy_threads=65"),
        ({"kvxfer_copy_threads": True}, "kvxfer_copy_threads=True"),
        ({"kvxfer_copy_threads": "2"}, "kvxfer_copy_threads='2'"),
        ({"kvxfer_copy_threads": None}, "kvxfer_copy_threads=None"),
        ({"kvxfer_programs": 0}, "kvxfer_programs=0 must be a number from 1 to 65535"),
        ({"kvxfer_programs": 1.5}, "kvxfer_programs=1.5"),
        ({"kvxfer_copy_engine": "dma"}, "kvxfer_copy_engine='dma' must be one of auto, pack, zero"),
        ({"kvxfer_copy_engine": None}, "kvxfer_copy_engine=None"),
    ],
)
def test_keys_that_cannot_be_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(extra=extra)


def test_a_host_tier_without_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cpu_bytes_to_use=4095 holds no row of 4096 bytes"):
        make(extra={"cpu_bytes_to_use": PAGE - 1}).get_worker(caches())


def test_canonical_rows_without_vllms_mapping_are_refused_and_nothing_is_left() -> None:
    with pytest.raises(RuntimeError, match="could not be certified for canonical offload"):
        make(canonical=True).get_worker(caches())
    assert not region_file().exists()


def test_pages_that_are_none_are_refused_and_nothing_is_left() -> None:
    wrong = caches()
    wrong.tensors[0].page_size_bytes = PAGE - 8
    with pytest.raises(ValueError, match="its blocks are no pages of 4088 bytes"):
        make().get_worker(wrong)
    assert not region_file().exists()


def test_rank_0_writes_what_others_are_not_told_to_store() -> None:
    """0.28 tells rank 0 alone to store what all ranks have: it must not leave out the pages of another's turn."""
    from vllm.v1.kv_offload.base import CanonicalPageMapping, CopyRun, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from kvxfer.integrations import vllm_compat as compat

    mapping = CanonicalPageMapping(PAGE, PAGE, (CopyRun(0, 0, PAGE, 1, PAGE, PAGE),), 2, 0, True)
    spec = make(canonical=True, replicated=True, extra={"cpu_bytes_to_use": ROWS * 2 * PAGE})
    worker = spec.get_worker(caches(mapping=mapping))
    assert worker.submit_store(1, GPULoadStoreSpec([4, 5], [2], [0]), CPULoadStoreSpec([2, 3]))
    worker.wait({1})
    (result,) = worker.get_finished()
    old = harness.ROWS == "block_ids"
    assert compat.rank0_stores_alone(spec) == old
    assert result.transfer_size == (2 if old else 1) * PAGE  # row 3 is the other rank's turn
    worker.shutdown()
