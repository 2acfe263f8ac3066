"""vLLM's own policies, called as its manager of the host tier calls them. Needs vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import vllm
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.policies import base
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from bench.policy import Chunk

__all__ = ["Vllm", "release"]

_STATUS: Any = getattr(base, "ChunkStatus", None) or base.BlockStatus  # as it was called in 0.28


def release() -> str:
    """Which vLLM."""
    return str(vllm.__version__)


class Vllm:
    """One policy of vLLM, by its name there."""

    def __init__(self, name: str, capacity: int) -> None:
        self._policy: Any = {"lru": LRUCachePolicy, "arc": ARCCachePolicy}[name](cache_capacity=capacity)
        self._with_context = "req_context" in inspect.signature(self._policy.insert).parameters
        self._chunks: dict[bytes, Chunk] = {}
        self._requests = self._pinned = 0

    def _request(self) -> Any:
        self._requests += 1
        return ReqContext(req_id=str(self._requests))

    def insert(self, chunks: Sequence[Chunk]) -> None:
        """A store of one request, begun and complete."""
        policy, request = self._policy, self._request()
        for number, chunk in enumerate(chunks):
            status = _STATUS(number)
            if self._with_context:
                policy.insert(chunk.key, status, request)
            else:
                policy.insert(chunk.key, status)
            status.ref_cnt = 0
            policy.mark_evictable(chunk.key)
            self._chunks[chunk.key] = chunk

    def pin(self, chunks: Sequence[Chunk]) -> None:
        """The beginning of a load."""
        for chunk in chunks:
            self._policy.get(chunk.key).ref_cnt += 1
            self._policy.mark_non_evictable(chunk.key)
        self._pinned += len(chunks)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        """A use, by one request."""
        self._policy.touch([chunk.key for chunk in chunks], self._request())

    def link(self, chunks: Sequence[Chunk]) -> None:
        """It knows no chains."""

    def evict(self, n: int) -> list[Chunk]:
        """n of them."""
        return [self._chunks.pop(key) for key, _ in self._policy.evict(n, set()) or ()]

    def __len__(self) -> int:
        return len(self._chunks) - self._pinned
