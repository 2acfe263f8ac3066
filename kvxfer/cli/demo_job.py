"""The demo's job: a cache goes to disk from one sharding, a block of it is lost, it comes back under another."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvxfer.cli.source import Bytes, RankPages, random_cache, rank_heads
from kvxfer.config import StoreConfig
from kvxfer.convert import native
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine, TransferResult
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.geometry import PRESETS, KVGeometry
from kvxfer.keys import kvx1_namespace, make_offload_key
from kvxfer.layout import LAYOUTS, kvx1_mappings, kvx1_slot
from kvxfer.prefix import full_attention
from kvxfer.store import Store

MAX_BLOCKS = 1024
MAX_TP = 128
SPARE_BLOCKS = 3  # of each pool: nothing may touch them
ROUNDS = 3  # of the converter alone; the median counts
TIMEOUT_S = 120.0
ROOM = 4  # capacity, in times of what is stored
LEAST_CAPACITY = 64 << 20
SEED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, checked. Block numbers count from 0.

    Raises:
        ConfigError: a value that cannot work; names the option and what is allowed.
    """

    model: str
    blocks: int
    lose: tuple[int, ...]  # blocks whose bytes are damaged on disk
    store_tp: int
    load_tp: int
    store_layout: str
    load_layout: str
    blocks_per_chunk: int

    def __post_init__(self) -> None:
        _one_of("--model", self.model, PRESETS)
        _within("--blocks", self.blocks, 1, MAX_BLOCKS)
        _within("--blocks-per-chunk", self.blocks_per_chunk, 1, 256)
        for number in self.lose:
            _within("--lose", number, 0, self.blocks - 1)
        for option, tp in (("--store-tp", self.store_tp), ("--load-tp", self.load_tp)):
            _check_tp(option, tp, self.model, self.geometry)
        for option, layout in (("--store-layout", self.store_layout), ("--load-layout", self.load_layout)):
            _one_of(option, layout, LAYOUTS)

    @property
    def geometry(self) -> KVGeometry:
        """The model's."""
        return PRESETS[self.model]

    @property
    def chunks(self) -> int:
        """Chunks that hold the blocks; the last may be partial."""
        return -(-self.blocks // self.blocks_per_chunk)

    def chunk_ids(self, block_ids: Sequence[int]) -> NDArray[np.int64]:
        """Blocks as the engine takes them: int64 [chunks, blocks_per_chunk], -1 where the last chunk has none."""
        ids = np.full(self.chunks * self.blocks_per_chunk, -1, np.int64)
        ids[: self.blocks] = block_ids
        return ids.reshape(self.chunks, self.blocks_per_chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of it; `--json` prints these fields. GB/s are 1e9 payload bytes a second."""

    model: str
    store_shards: int
    load_shards: int
    store_layout: str
    load_layout: str
    blocks_per_chunk: int
    lost_blocks: tuple[int, ...]
    io_mode: str
    requested_blocks: int
    arrived_blocks: int
    prefix_blocks: int
    usable_tokens: int
    recompute_tokens: int
    kept_beyond_gap: int  # blocks
    all_or_nothing_recompute_tokens: int
    chunks_verified: int  # during the load, to whatever answer
    chunks_refused: int  # of those, the ones it refused
    bytes_checked: int  # of the loaded blocks, against slices of the source
    bytes_wrong: int  # of those, in what must not have been touched, and in the converter's own round trip
    gather_GBps: float  # the converter alone, checksum in the same pass
    store_GBps: float  # the engine, from submit to result
    load_GBps: float
    scatter_GBps: float
    arrived: tuple[bool, ...]  # for each block


class Side:
    """The ranks of one sharding: their pools, the pages handed to kvxfer, and where the cache's blocks are in them."""

    def __init__(self, plan: Plan, tp_size: int, layout: str, seed: int, alignment: int) -> None:
        geometry = plan.geometry
        shares = [rank_heads(geometry, tp_size, rank) for rank in range(tp_size)]
        page = LAYOUTS[layout](geometry, shares[0].stop - shares[0].start)
        size = plan.blocks + SPARE_BLOCKS
        self.mappings = kvx1_mappings(
            geometry, tp_size, page, blocks_per_chunk=plan.blocks_per_chunk, alignment=alignment
        )
        self.pools = [RankPages(geometry, page, heads, size) for heads in shares]
        self.pages = [
            KVPages(mapping, pool.tensors, size) for mapping, pool in zip(self.mappings, self.pools, strict=True)
        ]
        order = np.random.default_rng(seed).permutation(size)[: plan.blocks]
        self.block_ids = [int(number) for number in order]
        self.chunk_ids = plan.chunk_ids(self.block_ids)

    @property
    def part_bytes(self) -> int:
        """Payload of a chunk over all ranks: heads that several ranks hold count for each."""
        return sum(mapping.part_bytes for mapping in self.mappings)

    def compare(self, cache: Bytes, arrived: Sequence[bool]) -> tuple[int, int]:
        """Bytes compared, and bytes wrong, over all ranks: see RankPages.compare."""
        results = [pool.compare(cache, self.block_ids, arrived) for pool in self.pools]
        return sum(checked for checked, _ in results), sum(wrong for _, wrong in results)

    def poison(self) -> None:
        """Makes every pool unreadable again."""
        for pool in self.pools:
            pool.poison()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trips:
    """What the engines said of the two trips."""

    stored: TransferResult
    loaded: TransferResult
    stats: dict[str, int]  # of the load
    io_mode: str


def run(plan: Plan, root: Path) -> Report:
    """The whole job in a store at `root`.

    Raises:
        KvxferError: something did not work that nobody broke on purpose.
    """
    slot_bytes = kvx1_slot(plan.geometry, blocks_per_chunk=plan.blocks_per_chunk).slot_bytes
    capacity = max(LEAST_CAPACITY, ROOM * plan.chunks * slot_bytes)
    with Store.open(StoreConfig(root=root, capacity_bytes=capacity)) as store:
        return _run(plan, store)


def _run(plan: Plan, store: Store) -> Report:
    geometry = plan.geometry
    cache = random_cache(geometry, plan.blocks, SEED)
    source = Side(plan, plan.store_tp, plan.store_layout, SEED, store.alignment)
    target = Side(plan, plan.load_tp, plan.load_layout, SEED + 1, store.alignment)
    for pool in source.pools:
        pool.fill(cache, source.block_ids)

    gather_seconds, scatter_seconds = _converter_alone(source, target)
    _, converter_wrong = target.compare(cache, [True] * plan.blocks)
    target.poison()
    trips = _there_and_back(plan, store, source, target)

    loaded, stats = trips.loaded, trips.stats
    arrived = [loaded.bitmap[block // plan.blocks_per_chunk] for block in range(plan.blocks)]
    checked, wrong = target.compare(cache, arrived)
    tokens = plan.blocks * geometry.tokens_per_block
    prefix = full_attention(
        loaded.bitmap,
        prompt_tokens=tokens,
        tokens_per_block=geometry.tokens_per_block,
        blocks_per_chunk=plan.blocks_per_chunk,
    )
    prefix_blocks = [*arrived, False].index(False)
    return Report(
        model=plan.model,
        store_shards=plan.store_tp,
        load_shards=plan.load_tp,
        store_layout=plan.store_layout,
        load_layout=plan.load_layout,
        blocks_per_chunk=plan.blocks_per_chunk,
        lost_blocks=plan.lose,
        io_mode=trips.io_mode,
        requested_blocks=plan.blocks,
        arrived_blocks=sum(arrived),
        prefix_blocks=prefix_blocks,
        usable_tokens=prefix.usable_tokens,
        recompute_tokens=prefix.recompute_tokens,
        kept_beyond_gap=sum(arrived) - prefix_blocks,
        all_or_nothing_recompute_tokens=prefix.recompute_tokens if all(arrived) else tokens,
        chunks_verified=stats["chunks_verified"],
        chunks_refused=sum(stats[name] for name in ("truncated", "bad_trailer", "foreign", "bad_sum")),
        bytes_checked=checked,
        bytes_wrong=wrong + converter_wrong,
        gather_GBps=_gbps(source.part_bytes * plan.chunks, gather_seconds),
        store_GBps=_gbps(cache.nbytes, trips.stored.seconds),
        load_GBps=_gbps(sum(arrived) * geometry.block_bytes, loaded.seconds),
        scatter_GBps=_gbps(target.part_bytes * plan.chunks, scatter_seconds),
        arrived=tuple(arrived),
    )


def _there_and_back(plan: Plan, store: Store, source: Side, target: Side) -> Trips:
    """Stores from `source`, damages what is to be lost, loads into `target`."""
    run_id = secrets.token_bytes(16)  # a kept root may hold an earlier run's chunks: never under the same keys
    keys = [make_offload_key(run_id + chunk.to_bytes(16, "big"), 0) for chunk in range(plan.chunks)]
    namespace = kvx1_namespace(
        plan.geometry, model=plan.model, weights_fingerprint="random bytes", blocks_per_chunk=plan.blocks_per_chunk
    )
    with TransferEngine(store, namespace, source.pages) as engine:
        engine.submit_store(1, keys, source.chunk_ids)
        stored = _result(engine, 1)
        digest, io_mode = engine.digest, engine.io_mode
    if not stored.bitmap.all():
        raise KvxferError(f"the store job did not finish: {'; '.join(map(str, stored.errors[:3]))}")
    for block in plan.lose:
        if (place := store.locate(digest, keys[block // plan.blocks_per_chunk])) is None:
            raise KvxferError(f"block {block} was stored but cannot be found")
        _damage(*place[:2], plan, block)
    with TransferEngine(store, namespace, target.pages) as engine:
        engine.submit_load(2, keys, target.chunk_ids)
        loaded = _result(engine, 2)
        return Trips(stored=stored, loaded=loaded, stats=engine.stats(), io_mode=io_mode)


def _result(engine: TransferEngine, job_id: int) -> TransferResult:
    results = engine.wait([job_id], timeout=TIMEOUT_S)
    if job_id not in results:
        raise KvxferError(f"job {job_id} did not end within {TIMEOUT_S:.0f} s")
    return results[job_id]


def _converter_alone(source: Side, target: Side) -> tuple[float, float]:
    """Seconds that gathering `source` and scattering into `target` take, with checksums, by the native converter."""
    slot = source.mappings[0].slot
    chunks = len(source.chunk_ids)
    canonical = np.empty((chunks, slot.payload_stride), np.uint8)
    sums = np.zeros((chunks, slot.num_segments), np.uint64)
    threads = len(os.sched_getaffinity(0))

    def gather() -> None:
        for pages, mapping in zip(source.pages, source.mappings, strict=True):
            native.gather(pages, source.chunk_ids, mapping, canonical, sums, threads=threads)

    def scatter() -> None:
        for pages, mapping in zip(target.pages, target.mappings, strict=True):
            native.scatter(canonical, target.chunk_ids, mapping, pages, sums, threads=threads)

    return _median_seconds(gather), _median_seconds(scatter)


def _gbps(num_bytes: int, seconds: float) -> float:
    return num_bytes / max(seconds, 1e-9) / 1e9


def _median_seconds(action: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _damage(path: Path, slot_offset: int, plan: Plan, block: int) -> None:
    """Flips one byte of a block on disk: in a key of its middle layer, for the first head's first token."""
    geometry = plan.geometry
    tokens = plan.blocks_per_chunk * geometry.tokens_per_block
    token = block % plan.blocks_per_chunk * geometry.tokens_per_block
    layer = geometry.num_layers // 2
    # docs/format.md, "Canonical bytes": segment 0, plane 0.
    offset = slot_offset + (layer * geometry.planes * tokens + token) * geometry.head_bytes
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 0xFF]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _one_of(option: str, value: str, allowed: Mapping[str, object]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} {value!r}: allowed are {', '.join(allowed)}")


def _within(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{option} {value}: allowed are {low} to {high}")


def _check_tp(option: str, tp: int, model: str, geometry: KVGeometry) -> None:
    """Whole heads on every rank, or whole ranks on every head."""
    _within(option, tp, 1, MAX_TP)
    heads = geometry.num_kv_heads
    if heads % tp and tp % heads:
        below = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"{option} {tp}: {model} has {heads} KV heads, so allowed are {below} and multiples of {heads}"
        )
