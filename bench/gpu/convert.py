"""Gather and scatter of a model's pages into kvx1 chunks, with and without the checksum, beside one large copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.gpu.ceilings import DEVICE
from bench.gpu.lane import Case, measure
from bench.gpu.sections import Work
from bench.gpu.settings import Settings
from bench.pools import POISON, Cache, RankPool, shuffled
from kvxfer import _native
from kvxfer.convert import launch
from kvxfer.convert.pages import KVPages
from kvxfer.device.copy_bench import Lane
from kvxfer.geometry import ShardSpec
from kvxfer.layout import LAYOUTS, kvx1_mapping

__all__ = ["run"]


class Pool:
    """One rank's pages on the device, and what they must become there: every comparison is the device's own."""

    def __init__(self, cache: Cache, layout: str, settings: Settings, want: Any, want_sums: Any) -> None:
        geometry, device = settings.geometry, settings.device
        ids = shuffled(cache.num_blocks, seed=1)
        host = RankPool(cache, cache.heads, layout, ids, cache.num_blocks + 3)
        self.mapping = kvx1_mapping(geometry, ShardSpec(), LAYOUTS[layout](geometry, geometry.num_kv_heads))
        self.filled = [torch.from_numpy(tensor).to(device, copy=True) for tensor in host.tensors]
        self.tensors = [tensor.clone() for tensor in self.filled]
        self.pages = KVPages(self.mapping, self.tensors, host.num_blocks)
        self.ids = torch.from_numpy(ids.reshape(-1, 1)).to(device)
        slot = self.mapping.slot
        self.chunks = torch.empty((len(ids), slot.payload_stride), dtype=torch.uint8, device=device)
        self.segments = self.chunks.view(len(ids), slot.num_segments, -1)[..., : slot.segment_bytes]
        self.sums = torch.zeros((len(ids), slot.num_segments), dtype=torch.int64, device=device)
        self.want, self.want_sums = want, want_sums
        self.fragment = int(self.mapping.runs["fragment_size"].max())

    def poison_chunks(self) -> None:
        """And the sums; the pages are as they were."""
        self.chunks.fill_(POISON)
        self.sums.fill_(-1)
        for tensor, filled in zip(self.tensors, self.filled, strict=True):
            tensor.copy_(filled)

    def poison_pages(self) -> None:
        """And the sums; the chunks are as they must be."""
        self.chunks.fill_(0)
        self.segments.copy_(self.want)
        self.sums.fill_(-1)
        for tensor in self.tensors:
            tensor.fill_(POISON)

    def check_chunks(self) -> str | None:
        """Compares the segments."""
        return None if torch.equal(self.segments, self.want) else "the chunks differ"

    def check_pages(self) -> str | None:
        """Compares every byte of the pool, also of blocks that nobody asked for."""
        same = all(torch.equal(a, b) for a, b in zip(self.tensors, self.filled, strict=True))
        return None if same else "the pages differ"

    def check_sums(self) -> str | None:
        """Compares them with the native library's."""
        return None if torch.equal(self.sums, self.want_sums) else "the checksums differ"


def run(work: Work) -> None:
    """For NHD and HND: gather, scatter, each with the checksum, and the checksum alone."""
    settings: Settings = work.common.settings
    geometry, lane = settings.geometry, Lane(settings.device)
    blocks = max(1, settings.convert_bytes // geometry.block_bytes)
    cache = Cache.random(geometry, range(geometry.num_kv_heads), blocks)
    segments = cache.segments()
    want = torch.from_numpy(segments).to(settings.device)
    want_sums = torch.from_numpy(_sums(segments)).to(settings.device)
    for layout in ("nhd", "hnd"):
        pool = Pool(cache, layout, settings, want, want_sums)
        launch.prepare(pool.pages, pool.mapping)
        for case in _cases(pool, f"tp1 {layout}, {pool.fragment} B fragments", segments.nbytes):
            if not work.over(f"{case.case}, {case.impl}"):
                measure(work, lane, case, of=DEVICE)
        del pool


def _cases(pool: Pool, name: str, nbytes: int) -> list[Case]:
    def case(
        what: str, step: Callable[[], None], poison: Callable[[], None], *checks: Callable[[], str | None]
    ) -> Case:
        def check() -> str | None:
            return next((why for one in checks if (why := one())), None)

        return Case(case=f"{what} {name}", impl="triton", step=step, poison=poison, check=check, nbytes=nbytes)

    pages, ids, mapping, chunks, sums = pool.pages, pool.ids, pool.mapping, pool.chunks, pool.sums
    to_chunks = (pool.poison_chunks, pool.check_chunks)
    to_pages = (pool.poison_pages, pool.check_pages)
    return [
        case("gather + sum", lambda: launch.gather(pages, ids, mapping, chunks, sums), *to_chunks, pool.check_sums),
        case("scatter + sum", lambda: launch.scatter(chunks, ids, mapping, pages, sums), *to_pages, pool.check_sums),
        case("gather", lambda: launch.gather(pages, ids, mapping, chunks), *to_chunks),
        case("scatter", lambda: launch.scatter(chunks, ids, mapping, pages), *to_pages),
        case("sum alone", lambda: launch.checksum(chunks, mapping, sums), pool.poison_pages, pool.check_sums),
    ]


def _sums(segments: Any) -> Any:
    """int64 [blocks, heads], by the native library: it shares nothing with the kernels."""
    lib = _native.lib()
    rows = segments.reshape(-1, segments.shape[-1])
    sums = [lib.kvx_checksum(_native.address(row), row.nbytes, 0) for row in rows]
    return np.array(sums, np.uint64).view(np.int64).reshape(segments.shape[:2])
