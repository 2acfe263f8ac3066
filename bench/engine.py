"""The engine's rows: whole stores and loads, checksums on, against plain reads and writes of the same files."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.options import Options
from bench.peers import Place, PlainFiles
from bench.pools import POISON, SPARE_BLOCKS, Bytes, allocate, difference, random_bytes
from bench.table import Impl, Table, measure
from kvxfer.config import EngineConfig, StoreConfig, slab_cost
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine, TransferResult
from kvxfer.errors import StoreError
from kvxfer.geometry import PRESETS, KVGeometry, ShardSpec
from kvxfer.io.modes import MEMORY_FILESYSTEMS, filesystem_type
from kvxfer.keys import Namespace, make_offload_key
from kvxfer.layout import PageLayout, kvx1_mapping, row_mapping
from kvxfer.mapping import CanonicalMapping
from kvxfer.slot import SlotLayout
from kvxfer.store import Store

__all__ = ["room_needed", "row_store_keys", "run", "size_text", "temporary_folder"]

BAR = 0.95  # of plain direct I/O; a floor, and only on a disk: what memory costs is a report
JOB_CHUNKS = 256  # of one job, at most; a run's jobs are submitted together
GENERATIONS = 2  # runs whose chunks the store holds: each run evicts what the one before last stored
TIMEOUT_S = 60.0
INDEX_BYTES = 16 << 20
SMALL_BYTES = 4 << 20  # of what a store keeps beside slabs and index
ROW_SIZES = (64 << 10, 512 << 10, 2 << 20)


@dataclass(frozen=True, slots=True)
class Shape:
    """What is moved."""

    name: str
    mapping: CanonicalMapping
    live: bool
    namespace: Namespace

    @property
    def slot(self) -> SlotLayout:
        """Of its chunks."""
        return self.mapping.slot


def shapes(options: Options) -> Iterator[Shape]:
    """kvx1 chunks of Llama-3.1-8B at TP1, and host rows."""
    geometry = options.geometry or PRESETS["llama-3.1-8b"]
    for blocks in (1,) if options.quick else (1, 4):
        yield _kvx1(geometry, blocks)
    sizes = ROW_SIZES if options.row_sizes is None else options.row_sizes
    for row_bytes in sizes[::2] if options.quick else sizes:
        yield _row(row_bytes)


def _kvx1(geometry: KVGeometry, blocks: int) -> Shape:
    page = PageLayout.nhd(geometry, geometry.num_kv_heads)
    mapping = kvx1_mapping(geometry, ShardSpec(), page, blocks_per_chunk=blocks)
    tokens = blocks * geometry.tokens_per_block
    return Shape(
        name=f"kvx1 {size_text(mapping.slot.payload_bytes)} ({blocks} block{'s' * (blocks > 1)})",
        mapping=mapping,
        live=True,
        namespace=_namespace("kvx1", asdict(geometry), geometry.dtype, blocks, tokens),
    )


def _row(row_bytes: int) -> Shape:
    return Shape(
        name=f"row {size_text(row_bytes)}",
        mapping=row_mapping(row_bytes),
        live=False,
        namespace=_namespace("row", {"row_bytes": row_bytes}, "uint8", 1, 16),
    )


def _namespace(form: str, geometry: dict[str, Any], dtype: str, blocks: int, tokens: int) -> Namespace:
    return Namespace(
        model="bench",
        weights_fingerprint="random bytes",
        dtype=dtype,
        canonical_form=form,
        geometry=[geometry],
        blocks_per_chunk=blocks,
        tokens_per_chunk=tokens,
        topology=None if form == "kvx1" else "one host",
    )


def size_text(nbytes: int) -> str:
    """Such as "2 MiB"."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 and nbytes % (1 << 20) == 0 else f"{nbytes >> 10} KiB"


class Pages:
    """A pool with random blocks, and as many places for them to come back to."""

    def __init__(self, shape: Shape, num_chunks: int) -> None:
        mapping, per_chunk = shape.mapping, shape.slot.blocks_per_chunk
        local = mapping.tensors[0]
        blocks = num_chunks * per_chunk
        self.num_blocks = 2 * blocks + SPARE_BLOCKS
        memory = random_bytes(mapping.num_tensors * self.num_blocks * local.block_stride, seed=3)
        tensors = memory.reshape(mapping.num_tensors, self.num_blocks, local.block_stride)
        self.tensors: list[Bytes] = list(tensors)
        self.pages = KVPages(mapping, [tensor.reshape(-1) for tensor in self.tensors], self.num_blocks)
        order: NDArray[np.int64] = np.arange(2 * blocks, dtype=np.int64)
        if mapping.num_tensors > 1:  # blocks of a paged cache lie anywhere; host rows are taken as they come
            order = np.random.default_rng(4).permutation(self.num_blocks)[: 2 * blocks].astype(np.int64)
        self.source, self.target = (half.reshape(num_chunks, per_chunk) for half in np.split(order, 2))

    def rows(self, ids: NDArray[np.int64]) -> Bytes:
        """Adjacent host rows as they lie in memory."""
        return self.tensors[0][int(ids[0, 0]) : int(ids[-1, -1]) + 1]

    def poison(self) -> None:
        """Overwrites the places to come back to."""
        for tensor in self.tensors:
            tensor[self.target.reshape(-1)] = POISON

    def check(self) -> str | None:
        """Compares them with the source."""
        source, target = self.source.reshape(-1), self.target.reshape(-1)
        return next((why for t in self.tensors if (why := difference(t[target], t[source]))), None)


class EngineRun:
    """A store that is full, an engine over it, and whole stores and loads."""

    def __init__(
        self, stack: ExitStack, root: Path, shape: Shape, num_chunks: int, config: EngineConfig, io: str = "auto"
    ) -> None:
        self.shape, self.num_chunks = shape, num_chunks
        self.pool = Pages(shape, num_chunks)
        self.files = config.io_threads
        keys = _store_keys(shape.slot, num_chunks, self.files)
        store_config = StoreConfig.from_mapping({"root": root, "io": io} | keys)
        self.store = stack.enter_context(Store.open(store_config, writers=self.files))
        self.engine = stack.enter_context(
            TransferEngine(self.store, shape.namespace, [self.pool.pages], config=config, live=shape.live)
        )
        self._jobs = itertools.count(1)
        self._runs = itertools.count(1)
        self.keys: list[bytes] = []  # of the latest store
        for _ in range(GENERATIONS):  # from here on every slot was written once, and stores evict
            if why := self.store_all():
                raise StoreError(f"a store did not complete: {why}")

    def store_all(self) -> str | None:
        """Stores every chunk under keys that were never used."""
        run = next(self._runs)
        self.keys = [
            make_offload_key(run.to_bytes(16, "big") + chunk.to_bytes(16, "big"), 0) for chunk in range(self.num_chunks)
        ]
        return self._jobs_of(self.engine.submit_store, self.pool.source)

    def load_all(self) -> str | None:
        """Loads what the latest store left."""
        return self._jobs_of(self.engine.submit_load, self.pool.target)

    def _jobs_of(
        self, submit: Callable[[int, Sequence[bytes], NDArray[np.int64]], None], ids: NDArray[np.int64]
    ) -> str | None:
        jobs = []
        for start in range(0, self.num_chunks, JOB_CHUNKS):
            jobs.append(next(self._jobs))
            submit(jobs[-1], self.keys[start : start + JOB_CHUNKS], ids[start : start + JOB_CHUNKS])
        return _complete(self.engine.wait(jobs, TIMEOUT_S), jobs, self.num_chunks * self.shape.slot.payload_bytes)

    def check_store(self) -> str | None:
        """A store is right when a load brings its bytes back."""
        self.pool.poison()
        return self.load_all() or self.pool.check()

    def places(self) -> tuple[list[int], list[Place]]:
        """The sizes of the slab files, and where the latest store put each chunk."""
        found = [self.store.locate(self.engine.digest, key) for key in self.keys]
        spots = [spot for spot in found if spot is not None]
        if len(spots) != len(found):
            raise StoreError(f"{len(found) - len(spots)} of {len(found)} chunks that were just stored are not there")
        paths = sorted({path for path, _, _ in spots})
        sizes = [path.stat().st_size for path in paths]
        return sizes, [Place(paths.index(path), offset) for path, offset, _ in spots]


def _complete(results: dict[int, TransferResult], jobs: Sequence[int], nbytes: int) -> str | None:
    """None where every chunk arrived."""
    if missing := len(jobs) - len(results):
        return f"{missing} of {len(jobs)} jobs did not end within {TIMEOUT_S:.0f} s"
    for result in results.values():
        if not result.bitmap.all():
            why = f": {result.errors[0]}" if result.errors else ""
            return f"job {result.job_id}: {result.bitmap.count()} of {len(result.bitmap)} chunks{why}"
    moved = sum(result.nbytes for result in results.values())
    return None if moved == nbytes else f"{moved} of {nbytes} bytes were moved"


def _store_keys(slot: SlotLayout, num_chunks: int, files: int) -> dict[str, int]:
    """Room for GENERATIONS runs in so many slabs, and for no slab more: fields of StoreConfig."""
    slab_bytes = slot.alignment + -(-GENERATIONS * num_chunks // files) * slot.slot_bytes
    return {
        "capacity_bytes": files * slab_cost(slab_bytes) + INDEX_BYTES + SMALL_BYTES,
        "slab_bytes": slab_bytes,
        "index_map_bytes": INDEX_BYTES,
    }


def row_store_keys(row_bytes: int, num_chunks: int, files: int) -> dict[str, int]:
    """The same for host rows."""
    return _store_keys(row_mapping(row_bytes).slot, num_chunks, files)


class PlainRun:
    """The same bytes in as many files at the same offsets, without trailers, by as many threads."""

    def __init__(self, stack: ExitStack, folder: Path, run: EngineRun, threads: int, piece_bytes: int) -> None:
        payload, n = run.shape.slot.payload_stride, run.num_chunks
        sizes, places = run.places()
        files = PlainFiles(folder, sizes, places, payload, direct=run.store.direct)
        stack.callback(files.close)
        self.threads = threads
        if run.shape.live:
            self.source, self.target = (
                random_bytes(n * payload, seed=5).reshape(n, -1),
                allocate(n * payload).reshape(n, -1),
            )
        else:  # host rows move without a copy
            self.source, self.target = run.pool.rows(run.pool.source), run.pool.rows(run.pool.target)
        self.piece_bytes = min(piece_bytes, payload)
        self._write = files.calls(self.source, payload)
        self._read = files.calls(self.target, payload)
        self._read_pieces = files.calls(self.target, self.piece_bytes)
        self._staging = allocate(threads * payload).reshape(threads, -1)

    def store_all(self) -> str | None:
        """Writes every chunk, a call each."""
        return PlainFiles.move(self._write, self.threads, write=True)

    def load_all(self) -> str | None:
        """Reads every chunk, a call each."""
        return PlainFiles.move(self._read, self.threads, write=False)

    def load_pieces(self) -> str | None:
        """Reads every chunk in pieces as large as the engine's."""
        return PlainFiles.move(self._read_pieces, self.threads, write=False)

    def store_staged(self) -> str | None:
        """As `store_all`, by way of a buffer of each thread."""
        return PlainFiles.move(self._write, self.threads, write=True, staging=self._staging)

    def load_staged(self) -> str | None:
        """As `load_pieces`, by way of a buffer of each thread."""
        return PlainFiles.move(self._read_pieces, self.threads, write=False, staging=self._staging)

    def poison(self) -> None:
        """Overwrites where reads go."""
        self.target.fill(POISON)

    def check(self) -> str | None:
        """Compares what was read with what was written."""
        return difference(self.target, self.source)

    def check_store(self) -> str | None:
        """Reads it back."""
        self.poison()
        return self.load_all() or self.check()


def measure_shape(table: Table, options: Options, shape: Shape, folder: Path, where: str, bar: float | None) -> None:
    """Adds the rows of one shape in one directory."""
    config = EngineConfig(io_threads=options.io_threads, **options.engine)
    num_chunks = max(2, options.engine_bytes // shape.slot.payload_bytes)
    nbytes = num_chunks * shape.slot.payload_bytes
    timing = {"nbytes": nbytes, "runs": options.runs}
    with ExitStack() as stack:
        run = EngineRun(stack, folder / "root", shape, num_chunks, config)
        plain = PlainRun(stack, folder, run, options.io_threads, config.read_piece_bytes)
        for trip, impls in (("store", _stores(run, plain, bar)), ("load", _loads(run, plain, bar))):
            name = f"{trip} {shape.name}, {where}"
            table.add(measure(name, impls, **timing, budget_s=options.budget_s))


def _stores(run: EngineRun, plain: PlainRun, bar: float | None) -> list[Impl]:
    def peer(name: str, store: Callable[[], str | None]) -> Impl:
        return Impl(name=name, run=store, check=plain.check_store)

    mine = Impl(name="kvxfer", run=run.store_all, check=run.check_store, bar=bar)
    return [peer("plain", plain.store_all), mine, peer("plain + copy", plain.store_staged)]


def _loads(run: EngineRun, plain: PlainRun, bar: float | None) -> list[Impl]:
    def peer(name: str, load: Callable[[], str | None]) -> Impl:
        return Impl(name=name, run=load, poison=plain.poison, check=plain.check, always_check=True)

    pool = run.pool
    mine = Impl(name="kvxfer", run=run.load_all, poison=pool.poison, check=pool.check, bar=bar, always_check=True)
    impls = [peer("plain", plain.load_all), mine, peer("plain + copy", plain.load_staged)]
    if plain.piece_bytes < run.shape.slot.payload_stride:
        impls.append(peer(f"plain {size_text(plain.piece_bytes)}", plain.load_pieces))
    return impls


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """A folder in `place` that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-bench-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def room_needed(options: Options) -> int:
    """Bytes that a directory must have free: what the store holds, the peer's files, and room to spare."""
    return (2 * GENERATIONS + 1) * options.engine_bytes + (64 << 20)


def run(table: Table, options: Options) -> None:
    """Adds the engine's rows: for every directory, every shape."""
    for place in options.dirs:
        kind = filesystem_type(place)
        where = kind
        if (free := shutil.disk_usage(place).free) < (need := room_needed(options)):
            table.note(f"engine on {kind}: left out, {free >> 20} MiB are free and {need >> 20} are needed")
            continue
        with temporary_folder(place) as folder:
            direct, why = _io_mode(folder)
            bar = BAR if direct and kind not in MEMORY_FILESYSTEMS else None
            table.facts[f"io {place}"] = f"{kind}, {why}"
            table.note(
                f"engine on {kind} at {place}: {why}; {options.engine_bytes >> 20} MiB a run, "
                f"{options.io_threads} I/O threads and files"
                + ("" if bar else "; no bar, for that is measured by direct I/O on a disk")
            )
            for number, shape in enumerate(shapes(options)):
                case = folder / str(number)
                case.mkdir()
                measure_shape(table, options, shape, case, where, bar)
                shutil.rmtree(case)


def _io_mode(folder: Path) -> tuple[bool, str]:
    """Whether a store here uses direct I/O, and its words for it."""
    with Store.open(StoreConfig(root=folder / "probe", capacity_bytes=32 << 20)) as store:
        return store.direct, store.stats().mode
