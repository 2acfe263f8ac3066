"""Stores and loads of pages in the device's memory, to a directory and back, through the whole engine."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.engine import JOB_CHUNKS, size_text, temporary_folder
from bench.gpu.ceilings import FROM_HOST, TO_HOST
from bench.gpu.lane import add
from bench.gpu.sections import Work
from bench.gpu.settings import Settings
from bench.pools import POISON, shuffled
from kvxfer.config import EngineConfig, StoreConfig, slab_cost
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.geometry import ShardSpec
from kvxfer.io.modes import filesystem_type
from kvxfer.keys import Namespace, make_offload_key
from kvxfer.layout import PageLayout, kvx1_mapping
from kvxfer.mapping import CanonicalMapping
from kvxfer.store import Store

__all__ = ["run"]

ROUNDS = 5
TIMEOUT_S = 30.0
SLABS = 8


class Pool:
    """Random blocks on the device, and as many places for them to come back to."""

    def __init__(self, mapping: CanonicalMapping, chunks: int, device: str) -> None:
        per_chunk, stride = mapping.blocks_per_chunk, mapping.tensors[0].block_stride
        order = shuffled(2 * chunks * per_chunk, seed=4)
        self.source, self.target = (half.reshape(chunks, per_chunk) for half in np.split(order, 2))
        blocks = len(order) + 3
        generator = torch.Generator(device).manual_seed(3)
        self.tensors = [
            torch.randint(256, (blocks, stride), dtype=torch.uint8, device=device, generator=generator)
            for _ in range(mapping.num_tensors)
        ]
        self.truth = [tensor.clone() for tensor in self.tensors]
        self.pages = KVPages(mapping, [tensor.view(-1) for tensor in self.tensors], blocks)
        self.from_ids, self.to_ids = (
            torch.from_numpy(ids.reshape(-1)).to(device) for ids in (self.source, self.target)
        )  # fmt: skip

    def poison(self) -> None:
        """Overwrites the places to come back to."""
        for tensor in self.tensors:
            tensor.index_fill_(0, self.to_ids, POISON)

    def check(self) -> str | None:
        """Compares them with the source, and every other block with what it was."""
        for tensor, truth in zip(self.tensors, self.truth, strict=True):
            want = truth.clone()
            want[self.to_ids] = truth[self.from_ids]
            if not torch.equal(tensor, want):
                return "the pages differ"
        return None


class Run:
    """A store in a folder, an engine over the pool, and whole stores and loads."""

    def __init__(self, stack: ExitStack, folder: Any, settings: Settings) -> None:
        geometry = settings.geometry
        mapping = kvx1_mapping(geometry, ShardSpec(), PageLayout.nhd(geometry, geometry.num_kv_heads))
        self.chunks = max(2, settings.engine_bytes // mapping.slot.payload_bytes)
        self.nbytes = self.chunks * mapping.slot.payload_bytes
        self.pool = Pool(mapping, self.chunks, settings.device)
        slab = mapping.slot.alignment + -(-2 * self.chunks // SLABS) * mapping.slot.slot_bytes
        self.store = stack.enter_context(
            Store.open(
                StoreConfig(
                    root=folder / "root", slab_bytes=slab, index_map_bytes=16 << 20,
                    capacity_bytes=SLABS * slab_cost(slab) + (24 << 20),
                ),
                writers=SLABS,
            )
        )  # fmt: skip
        namespace = Namespace(
            model="bench", weights_fingerprint="random bytes", dtype=geometry.dtype, canonical_form="kvx1",
            geometry=[{"layers": geometry.num_layers}], blocks_per_chunk=1, tokens_per_chunk=geometry.tokens_per_block,
            topology=None,
        )  # fmt: skip
        self.engine = stack.enter_context(
            TransferEngine(self.store, namespace, [self.pool.pages], config=EngineConfig(io_threads=SLABS))
        )
        self._jobs, self._runs = itertools.count(1), itertools.count(1)
        self.keys: list[bytes] = []

    def store_all(self) -> str | None:
        """Under keys that were never used."""
        run = next(self._runs)
        self.keys = [make_offload_key(f"{run:016}{chunk:016}".encode(), 0) for chunk in range(self.chunks)]
        return self._moved(self.engine.submit_store, self.pool.source)

    def load_all(self) -> str | None:
        """What the latest store left."""
        return self._moved(self.engine.submit_load, self.pool.target)

    @property
    def way(self) -> dict[str, int]:
        """The way to the drive, and the copy engines, that were taken; none of pages in host memory."""
        return {
            name: count
            for name, count in self.engine.stats().items()
            if count and name.startswith(("rung_", "copies_"))
        }

    def _moved(self, submit: Any, ids: NDArray[np.int64]) -> str | None:
        jobs: list[int] = []
        for start in range(0, self.chunks, JOB_CHUNKS):
            jobs.append(next(self._jobs))
            submit(jobs[-1], self.keys[start : start + JOB_CHUNKS], ids[start : start + JOB_CHUNKS])
        results = self.engine.wait(jobs, TIMEOUT_S)
        return _complete(list(results.values()), len(jobs), self.nbytes)


def _complete(results: Sequence[Any], jobs: int, nbytes: int) -> str | None:
    if len(results) != jobs:
        return f"{jobs - len(results)} of {jobs} jobs did not end within {TIMEOUT_S:.0f} s"
    for result in results:
        if not result.bitmap.all():
            return f"{result.bitmap.count()} of {len(result.bitmap)} chunks; {(*result.errors, '')[0]}"
    moved = sum(result.nbytes for result in results)
    return None if moved == nbytes else f"{moved} of {nbytes} bytes were moved"


def run(work: Work) -> None:
    """A store and a load of every chunk in turns: each load is of what the store before it left, and is compared."""
    settings: Settings = work.common.settings
    kind = filesystem_type(settings.directory)
    with temporary_folder(settings.directory) as folder, ExitStack() as stack:
        trip = Run(stack, folder, settings)
        name = f"kvx1 {size_text(trip.nbytes)} on {kind}, {trip.store.io_mode}"
        times: dict[str, list[float]] = {"store": [], "load": []}
        for number in range(ROUNDS + 1):
            if number > 1 and work.over(f"round {number} of {ROUNDS}"):
                break
            trip.pool.poison()
            if settings.device != "cpu":
                torch.cuda.synchronize()
            for what, step in (("store", trip.store_all), ("load", trip.load_all)):
                start = time.perf_counter()
                why = step()
                took = time.perf_counter() - start
                why = why or (trip.pool.check() if what == "load" else None)
                if why:
                    work.wrong(f"{what} {name}", "engine", why)
                    return
                if number:  # the first is the warm-up
                    times[what].append(took)
        for what, of in (("store", TO_HOST), ("load", FROM_HOST)):
            took = statistics.median(times[what])
            add(work, f"{what} {name}", "engine", trip.nbytes, took, of=of, more=trip.way)
