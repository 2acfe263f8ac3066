"""vLLM's TieringOffloadingSpec for machines without a GPU: the stock one, but for the worker, which it refuses there.

Test-only, and chosen from the configuration as any spec is. Direct rows, copied at once by the calling thread.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """Moves blocks between a rank's pages and the primary tier's rows."""

    def __init__(self, caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._groups = caches.group_data_refs
        self._page_bytes = [each.page_size_bytes for each in caches.tensors]
        self._pages = [
            each.tensor.view(torch.int8).view(-1, size)
            for each, size in zip(caches.tensors, self._page_bytes, strict=True)
        ]
        self._rows = [region.create_next_worker_view(size * blocks_per_chunk) for size in self._page_bytes]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, blocks: Any, rows: Any, *, store: bool) -> bool:
        ids, chunks = list(blocks.block_ids), list(getattr(rows, "chunk_ids", getattr(rows, "block_ids", ())))
        for refs, size, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            skipped = first % self._per_chunk if size else 0
            for place, block in enumerate(ids[:size], skipped):
                chunk, part = chunks[place // self._per_chunk], place % self._per_chunk
                for ref in refs:
                    start = part * self._page_bytes[ref.tensor_idx]
                    page = self._pages[ref.tensor_idx][block, : ref.page_size_bytes]
                    row = self._rows[ref.tensor_idx][chunk, start : start + ref.page_size_bytes]
                    (row if store else page).copy_(page if store else row)
            ids, chunks = ids[size:], chunks[-(-(size + skipped) // self._per_chunk) :]
        assert not ids and not chunks
        self._done.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """As the stock one."""

    _worker: Any = None

    def get_worker(self, kv_caches: Any) -> Any:
        if self.config.canonical_layout:
            raise NotImplementedError("this worker copies direct rows only")
        if not self._worker:
            chunks = getattr(self, "num_chunks", None) or self.num_blocks
            place = self.config.engine_id, chunks, self.config.parallel.rank
            region = SharedOffloadRegion(*place, self.kv_bytes_per_chunk, self.cpu_page_size_per_worker)
            self._worker = CpuWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
