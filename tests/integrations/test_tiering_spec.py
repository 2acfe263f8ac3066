"""KvxferTieringSpec at its start: which worker, and what is refused. Over the real vLLM, without an engine."""

from __future__ import annotations

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

    tensor: Any = torch.arange(BLOCKS * page, dtype=torch.int64).to(torch.int8).view(BLOCKS, page)
    if device != "cpu":
        tensor = SimpleNamespace(device=SimpleNamespace(type=device))
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, page, mapping)]])


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


def test_on_a_device_the_worker_is_vllms_and_that_is_said_once(
    on_device: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    spec, pages = make(), caches("cuda")
    with caplog.at_level(logging.WARNING, "kvxfer.vllm"):
        assert spec.get_worker(pages) == spec.get_worker(pages) == "vLLM's own"
    assert on_device == [pages]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "KvxferTieringSpec has no converter for cpu pages yet"
    ]
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
