"""The converter's rows: gather and scatter of Llama-3.1-8B pages against memcpy and torch's indexing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.options import Options
from bench.peers import TorchIndexing, has_torch, memcpy
from bench.pools import POISON, Cache, RankPool, allocate, difference, shuffled, sums_of
from bench.table import Impl, Table, measure
from kvxfer.convert import native
from kvxfer.convert.pages import KVPages
from kvxfer.geometry import PRESETS, KVGeometry, ShardSpec
from kvxfer.layout import LAYOUTS, kvx1_mapping, local_heads
from kvxfer.mapping import CanonicalMapping

__all__ = ["run"]

BAR_COPY = 0.8  # of memcpy, with as many threads
BAR_SUMMED = 0.6  # with the checksum in the same pass
BAR_TORCH = 3.0  # times torch's advanced indexing, where the pieces are small
SMALL_FRAGMENT = 1024


@dataclass(frozen=True, slots=True)
class Setup:
    """Whose pages: one rank of `tp`, or all of them one after the other."""

    geometry: KVGeometry
    tp: int
    everyone: bool
    layout: str
    small_only: bool = False  # rows against torch alone: the bars beside memcpy are for the pages of the model

    @property
    def name(self) -> str:
        """For the table."""
        whose = "all ranks" if self.everyone else "one rank"
        whose = f" {whose}" if self.tp > 1 else ""
        return f"tp{self.tp} {self.layout}{whose}"

    @property
    def shards(self) -> list[ShardSpec]:
        """The ranks: all, or the last."""
        ranks = range(self.tp) if self.everyone else [self.tp - 1]
        return [ShardSpec(tp_size=self.tp, tp_rank=rank) for rank in ranks]


class Workload:
    """The pages of a setup, the canonical bytes they must become, and every implementation over them."""

    def __init__(self, setup: Setup, nbytes: int) -> None:
        geometry, shards = setup.geometry, setup.shards
        heads = [local_heads(geometry, shard) for shard in shards]
        held = range(heads[0].start, heads[-1].stop)
        block_bytes = geometry.block_bytes // geometry.num_kv_heads * len(held)
        num_blocks = max(1, nbytes // block_bytes)
        cache = Cache.random(geometry, held, num_blocks)
        ids = shuffled(num_blocks, seed=1)
        self.pools = [RankPool(cache, mine, setup.layout, ids, num_blocks + 3) for mine in heads]
        page = LAYOUTS[setup.layout](geometry, len(heads[0]))
        self.mappings: list[CanonicalMapping] = [kvx1_mapping(geometry, shard, page) for shard in shards]
        self.ranks = [
            KVPages(mapping, pool.tensors, pool.num_blocks)
            for mapping, pool in zip(self.mappings, self.pools, strict=True)
        ]
        self.fragment = int(self.mappings[0].runs["fragment_size"].max())
        self.ids = ids.reshape(-1, 1)
        self.nbytes = cache.full.nbytes
        slot = self.mappings[0].slot
        self.canonical = allocate(num_blocks * slot.payload_stride).reshape(num_blocks, slot.payload_stride)
        segments = self.canonical.reshape(num_blocks, slot.num_segments, -1)[..., : slot.segment_bytes]
        self.mine = segments[:, held.start : held.stop]
        self.want = cache.segments()
        self.want_sums = sums_of(self.want)
        self.sums: NDArray[np.uint64] = np.zeros((num_blocks, slot.num_segments), np.uint64)
        self.my_sums = self.sums[:, held.start : held.stop]
        self.copy = allocate(self.nbytes)
        self.small_only = setup.small_only
        self.torch = None
        if has_torch() and self.fragment <= SMALL_FRAGMENT:
            self.torch = TorchIndexing(self.pools, segments)

    # ---- checks ----------------------------------------------------------------------------------------------

    def poison_canonical(self) -> None:
        self.mine[...] = POISON
        self.sums.fill(0)

    def check_canonical(self) -> str | None:
        return difference(self.mine, self.want)

    def poison_pages(self) -> None:
        self.mine[...] = self.want
        self.sums.fill(0)
        for pool in self.pools:
            pool.poison()

    def check_pages(self) -> str | None:
        return next((why for pool in self.pools if (why := pool.check())), None)

    def check_sums(self) -> str | None:
        return None if np.array_equal(self.my_sums, self.want_sums) else "checksums differ"

    # ---- implementations -------------------------------------------------------------------------------------

    def memcpy(self, threads: int) -> Impl:
        """As many bytes, from one place to another."""
        flat = self.want.reshape(-1)
        return Impl(
            name="memcpy",
            run=lambda: memcpy(self.copy, flat, threads),
            poison=lambda: self.copy.fill(POISON),
            check=lambda: difference(self.copy, flat),
        )

    def kvxfer(self, direction: str, threads: int, *, summed: bool, bar: float | None) -> Impl:
        """The native converter, a call for each rank."""
        sums = self.sums if summed else None

        def gather() -> None:
            for pages, mapping in zip(self.ranks, self.mappings, strict=True):
                native.gather(pages, self.ids, mapping, self.canonical, sums, threads=threads)

        def scatter() -> None:
            for pages, mapping in zip(self.ranks, self.mappings, strict=True):
                native.scatter(self.canonical, self.ids, mapping, pages, sums, threads=threads)

        bytes_right = self._check(direction)
        return Impl(
            name="kvxfer+sum" if summed else "kvxfer",
            run=gather if direction == "gather" else scatter,
            poison=self._poison(direction),
            check=lambda: bytes_right() or (self.check_sums() if summed else None),
            bar=bar,
        )

    def indexing(self, direction: str, threads: int, *, selected: bool) -> Impl:
        """torch, which has no checksum."""
        torch = self.torch
        assert torch is not None
        if selected:
            name = "torch index_select" if direction == "gather" else "torch index_copy_"
            move = torch.gather_selected if direction == "gather" else torch.scatter_selected
        else:
            name, move = "torch kv[ids]", torch.gather if direction == "gather" else torch.scatter
        return Impl(name=name, run=lambda: move(threads), poison=self._poison(direction), check=self._check(direction))

    def _poison(self, direction: str) -> Callable[[], None]:
        return self.poison_canonical if direction == "gather" else self.poison_pages

    def _check(self, direction: str) -> Callable[[], str | None]:
        return self.check_canonical if direction == "gather" else self.check_pages


def setups(options: Options) -> Iterator[Setup]:
    """One rank of every TP, and all ranks together; NHD and HND."""
    geometry = options.geometry or PRESETS["llama-3.1-8b"]
    for layout in ("nhd", "hnd"):
        for tp in options.tp_sizes:
            yield Setup(geometry, tp, False, layout)
            if tp > 1 and not options.quick:
                yield Setup(geometry, tp, True, layout)
    if has_torch():
        for head_bytes in options.head_sizes:
            # As many bytes a token as the model's, in fewer heads.
            heads = max(1, geometry.num_kv_heads * geometry.head_bytes // head_bytes)
            larger = replace(geometry, head_dim=head_bytes // geometry.itemsize, num_kv_heads=heads)
            yield Setup(larger, 1, False, "nhd", small_only=True)


def cases(work: Workload, threads: int) -> Iterator[tuple[str, str, Sequence[Impl]]]:
    """(direction, suffix of the case's name, implementations)."""
    for direction in ("gather", "scatter"):
        if not work.small_only:
            yield (
                direction,
                "",
                [
                    work.memcpy(threads),
                    work.kvxfer(direction, threads, summed=False, bar=BAR_COPY),
                    work.kvxfer(direction, threads, summed=True, bar=BAR_SUMMED),
                ],
            )
        if work.torch is not None:
            yield (
                direction,
                f", {work.fragment} B pieces",
                [
                    work.indexing(direction, threads, selected=False),
                    work.indexing(direction, threads, selected=True),
                    work.kvxfer(direction, threads, summed=False, bar=BAR_TORCH),
                    work.kvxfer(direction, threads, summed=True, bar=None),
                ],
            )


def run(table: Table, options: Options) -> None:
    """Adds the converter's rows."""
    table.note(f"converter: Llama-3.1-8B pages, about {options.converter_bytes >> 20} MiB a run, a block a chunk")
    if not has_torch():
        table.note("torch is not installed: no rows against it")
    for setup in setups(options):
        # All ranks move twice as much, so that a rank's call is still work for several threads.
        work = Workload(setup, options.converter_bytes * (2 if setup.everyone else 1))
        for threads in options.threads:
            for direction, suffix, impls in cases(work, threads):
                name = f"{direction} {setup.name}{suffix}, {threads}t"
                table.add(measure(name, impls, nbytes=work.nbytes, runs=options.runs, budget_s=options.budget_s))
