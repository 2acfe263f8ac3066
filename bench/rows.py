"""Host rows: a rank's pages of Llama-3.1-8B into vLLM's canonical rows and back, beside memcpy and copies by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.options import Options
from bench.peers import has_torch, memcpy
from bench.pools import POISON, Cache, RankPool, allocate, difference, shuffled
from bench.table import Impl, Table, measure
from kvxfer.convert.native_rows import RowMemory, RowPlan
from kvxfer.geometry import PRESETS, KVGeometry, ShardSpec
from kvxfer.layout import LAYOUTS, local_heads
from kvxfer.rows import row_pages, vllm_v1_mapping

__all__ = ["run"]

BAR_COPY = 0.8  # of memcpy, with as many threads


class Workload:
    """The last rank's pages, the rows they belong in, and every implementation over them."""

    def __init__(self, geometry: KVGeometry, tp: int, layout: str, nbytes: int) -> None:
        shard = ShardSpec(tp_size=tp, tp_rank=tp - 1)
        heads = local_heads(geometry, shard)
        blocks = max(1, nbytes // (geometry.block_bytes // geometry.num_kv_heads * len(heads)))
        self.cache = Cache.random(geometry, heads, blocks)
        self.ids = shuffled(blocks, seed=1)
        self.pool = RankPool(self.cache, heads, layout, self.ids, blocks + 3)
        mapping = vllm_v1_mapping(row_pages(geometry, LAYOUTS[layout](geometry, len(heads))), shard)
        self.row_ids = np.random.default_rng(2).permutation(blocks).astype(np.int64)
        self.rows = allocate(blocks * mapping.row_bytes).reshape(blocks, mapping.row_bytes)
        inner = (geometry.tokens_per_block, geometry.num_kv_heads)
        shape = (blocks, geometry.num_layers, geometry.planes, *(inner if layout == "nhd" else inner[::-1]), -1)
        ordered = self.rows.reshape(shape) if layout == "nhd" else self.rows.reshape(shape).swapaxes(3, 4)
        self.mine = ordered[..., heads.start : heads.stop, :]  # [row, layer, plane, token, head, byte]
        self.want = self.cache.full.transpose(1, 0, 2, 3, 4, 5)
        self.plan = RowPlan([mapping], [self.pool.tensors], RowMemory.of(self.rows))
        self.job = self.ids, self.row_ids, np.array([blocks])
        self.nbytes = self.cache.full.nbytes
        self.copy, self.source = allocate(self.nbytes), self.cache.full.reshape(-1)
        # What vLLM makes a descriptor of: the page, its half, or the heads of a token.
        self.fragment_axes = 0 if tp == 1 else 2 if layout == "nhd" else 1
        self.fragments = [cell.page.runs[0].fragment_size for cell in mapping.cells]

    def poison_rows(self) -> None:
        self.mine[...] = POISON

    def check_rows(self) -> str | None:
        return difference(self.mine[self.row_ids], self.want)

    def poison_pages(self) -> None:
        self.mine[self.row_ids] = self.want
        self.pool.poison()

    def memcpy(self, threads: int) -> Impl:
        """As many bytes, from one place to another."""
        return Impl(
            name="memcpy",
            run=lambda: memcpy(self.copy, self.source, threads),
            poison=lambda: self.copy.fill(POISON),
            check=lambda: difference(self.copy, self.source),
        )

    def kvxfer(self, direction: str, threads: int) -> Impl:
        """A job."""
        move = self.plan.gather if direction == "store" else self.plan.scatter

        def job() -> None:
            assert move(*self.job, threads=threads) == self.nbytes

        return self._impl("kvxfer", direction, job, BAR_COPY)

    def torch(self, direction: str, threads: int) -> Impl:
        """A copy for each fragment, of tensors that were made beforehand."""
        import torch

        pairs = self._pairs(torch, direction)

        def copies() -> None:
            torch.set_num_threads(threads)
            for to, source in pairs:
                to.copy_(source)

        return self._impl("torch copy_", direction, copies, None)

    def _pairs(self, torch: Any, direction: str) -> list[tuple[Any, Any]]:
        near, far = torch.from_numpy(self.pool.pages), torch.from_numpy(self.mine)
        axes = self.pool.pages.shape[2 : 2 + self.fragment_axes]
        out = []
        for block, row in zip(self.ids.tolist(), self.row_ids.tolist(), strict=True):
            for layer in range(self.pool.pages.shape[0]):
                for rest in np.ndindex(*axes):
                    pair = far[(row, layer, *rest)], near[(layer, block, *rest)]
                    out.append(pair if direction == "store" else pair[::-1])
        return out

    def _impl(self, name: str, direction: str, run: Callable[[], None], bar: float | None) -> Impl:
        store = direction == "store"
        return Impl(
            name=name,
            run=run,
            poison=self.poison_rows if store else self.poison_pages,
            check=self.check_rows if store else self.pool.check,
            bar=bar,
        )


def run(table: Table, options: Options) -> None:
    """All rows of this room."""
    geometry = options.geometry or PRESETS["llama-3.1-8b"]
    for layout in ("nhd", "hnd"):
        for tp in options.tp_sizes:
            work = Workload(geometry, tp, layout, options.converter_bytes)
            for threads in options.threads:
                for direction in ("store", "load"):
                    impls = [work.memcpy(threads), work.kvxfer(direction, threads)]
                    if has_torch() and threads == options.threads[0]:
                        impls.append(work.torch(direction, threads))
                    case = f"rows {direction} tp{tp} {layout}, {max(work.fragments)} B pieces, {threads}t"
                    table.add(measure(case, impls, nbytes=work.nbytes, runs=options.runs, budget_s=options.budget_s))
