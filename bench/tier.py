"""The tier's rows: `KvxferTier` beside vLLM's own `fs` tier, both driven as vLLM's scheduler drives them.

Needs vLLM, which has an environment of its own: `make bench-vllm`. kvxfer's checksums are on; `fs` has none.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import itertools
import mmap
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.engine import ROW_SIZES, room_needed, row_store_keys, size_text, temporary_folder
from bench.options import Options
from bench.pools import POISON, difference, random_bytes
from bench.table import Impl, Row, Table, figure, measure
from kvxfer.io.modes import MEMORY_FILESYSTEMS, filesystem_type
from kvxfer.keys import make_offload_key

__all__ = ["run", "whats_missing"]

JOBS = 8  # of a store or load, submitted together: fs has a thread for each
JOB_CHUNKS = 16  # of one, at least
FS, MINE = "vLLM fs", "KvxferTier"
OTHERS = ("straight", "staged")  # the tier with EngineConfig.rows set
TIMEOUT_S = 60.0
STEP_S = 0.0002  # from one poll to the next
TOKENS = 16
CALLER_SHARE = 0.5  # of fs's time of the scheduler's thread: the bar
# Speed beside fs: by what the directory is on, then by row size; (store, load).
ON_DISK = (1.0, 1.0)
ON_MEMORY = {64 << 10: (2.0, 1.5), 2 << 20: (1.0, 1.0)}


def whats_missing() -> str | None:
    """Why there can be no rows here; None where there can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed in this environment: make bench-vllm"
    return None


def _spec(row_bytes: int) -> Any:
    """As much of an OffloadingSpec as tiers look at: one group of full attention, one block a row."""
    from vllm.v1.kv_offload import config as of
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig

    def build(cls: Any, **values: Any) -> Any:
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    config = build(
        of.OffloadingConfig,
        groups=(build(of.OffloadingGroupConfig, tokens_per_block=TOKENS, layer_names=("layers.0",), group_id=0),),
        worker_kv_bytes_per_block=row_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=build(of.OffloadingModelConfig, name="bench/rows", dtype="float16", max_model_len=4096),
        cache=build(of.OffloadingCacheConfig, tokens_per_hash=TOKENS, blocks_per_chunk=1),
        parallel=build(
            of.OffloadingParallelConfig,
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
    )
    return SimpleNamespace(
        config=config,
        extra_config={},
        blocks_per_chunk=1,
        tokens_per_block=(TOKENS,),
        tokens_per_hash=TOKENS,
        replicated_layout=False,
        num_chunks=0,
        kv_events_config=OffloadingKVEventsConfig(enable_kv_cache_events=False, self_describing_kv_events=False),
    )


class Side:
    """One tier over a primary view of its own: rows to store, and as many for them to come back to.

    Args:
        tier: its entry in vLLM's `secondary_tiers`.
        chunks: of a store or load.
        forget: takes a finished round's chunks off the disk, where the tier does not do so itself.
    """

    def __init__(self, tier: dict[str, Any], chunks: int, row_bytes: int, forget: Callable[[], None] | None) -> None:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        self.chunks, self._forget = chunks, forget
        self._memory = mmap.mmap(-1, 2 * chunks * row_bytes)
        self.rows = np.frombuffer(self._memory, dtype=np.int8).reshape(2 * chunks, row_bytes)
        self.rows[:chunks] = random_bytes(chunks * row_bytes, seed=6).view(np.int8).reshape(chunks, row_bytes)
        self.rows[chunks:] = 0
        self.manager = SecondaryTierFactory.create_secondary_tier(tier, memoryview(self.rows.data), _spec(row_bytes))
        self._jobs, self._rounds = itertools.count(1), itertools.count(1)
        self.keys: list[bytes] = []
        self.spent_s = 0.0  # of the caller's thread, in the trip under way
        self.store_us: list[float] = []  # of the caller's thread, a chunk, by store
        self.load_us: list[float] = []

    def store_all(self) -> str | None:
        """Stores every row under keys that were never used."""
        number = next(self._rounds)
        start = number.to_bytes(16, "big")
        self.keys = [make_offload_key(start + n.to_bytes(16, "big"), 0) for n in range(self.chunks)]
        self.spent_s = 0.0
        why = self._move(range(self.chunks), self._context(f"store {number}"), promotion=False)
        self.store_us.append(self.spent_s / self.chunks * 1e6)
        return why

    def load_all(self) -> str | None:
        """Looks the latest store's keys up, touches them, and loads them into the other rows."""
        context = self._context(f"load {next(self._jobs)}")
        self.spent_s = 0.0
        hits = self._look_up(context)
        self._timed(self.manager.touch, self.keys, context)
        why = self._move(range(self.chunks, 2 * self.chunks), context, promotion=True)
        self.load_us.append(self.spent_s / self.chunks * 1e6)
        self.manager.on_request_finished(context)
        return why if hits == self.chunks else f"{hits} of {self.chunks} keys were found"

    def before_store(self) -> None:
        """Room for the next round."""
        if self._forget is not None:
            self._forget()

    def poison(self) -> None:
        """Overwrites the rows that loads write."""
        self.rows[self.chunks :] = np.int8(POISON - 256 if POISON > 127 else POISON)

    def check(self) -> str | None:
        """Compares them with the source."""
        return difference(self.rows[self.chunks :].view(np.uint8), self.rows[: self.chunks].view(np.uint8))

    def check_store(self) -> str | None:
        """A store is right when a load brings its bytes back."""
        self.poison()
        return self.load_all() or self.check()

    def close(self) -> None:
        """Ends the tier."""
        self.manager.shutdown()

    # ---- as vLLM's TieringOffloadingManager ----------------------------------------------------------------

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        answer = call(*arguments)
        self.spent_s += time.perf_counter() - start
        return answer

    def _context(self, name: str) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def _look_up(self, context: Any) -> int:
        """How many keys are hits; a tier that has no answer yet is asked again with the next step."""
        from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

        open_keys, hits, end = self.keys, 0, time.monotonic() + TIMEOUT_S
        while open_keys and time.monotonic() < end:
            later = []
            for key in open_keys:
                answer = self._timed(self.manager.lookup, key, context)
                hits += answer is LookupResult.HIT
                if answer is LookupResult.RETRY:
                    later.append(key)
            self._timed(self.manager.on_schedule_end, ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
            if open_keys := later:
                time.sleep(STEP_S)
        return hits

    def _move(self, rows: range, context: Any, *, promotion: bool) -> str | None:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        submit = self.manager.submit_load if promotion else self.manager.submit_store
        waiting = {}
        per_job = -(-self.chunks // JOBS)
        for start in range(0, self.chunks, per_job):
            part = slice(start, start + per_job)
            values: dict[str, Any] = {"job_id": next(self._jobs), "keys": self.keys[part], "is_promotion": promotion}
            values |= {"req_context": context, _rows_field(TransferJob): np.asarray(rows[part])}
            waiting[values["job_id"]] = len(values["keys"])
            self._timed(submit, TransferJob(**values))
        end = time.monotonic() + TIMEOUT_S
        while waiting and time.monotonic() < end:
            for result in self._timed(self._finished):
                waiting.pop(result.job_id)
                if not result.success:
                    return f"job {result.job_id} failed"
            time.sleep(STEP_S)
        return f"{len(waiting)} jobs did not end within {TIMEOUT_S:.0f} s" if waiting else None

    def _finished(self) -> list[Any]:
        return list(self.manager.get_finished_jobs())


def _rows_field(job: Any) -> str:
    return next(field.name for field in dataclasses.fields(job) if field.name in ("chunk_ids", "block_ids"))


def _remove_files(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".bin"):
                os.unlink(os.path.join(folder, name))


def _chunks(options: Options, row_bytes: int) -> int:
    """Of a store or load."""
    return max(JOBS * (1 if options.quick else JOB_CHUNKS), options.engine_bytes // row_bytes)


def measure_rows(table: Table, options: Options, row_bytes: int, folder: Path, kind: str) -> None:
    """Adds the rows of one row size in one directory."""
    chunks = _chunks(options, row_bytes)
    timing: dict[str, Any] = {"nbytes": chunks * row_bytes, "runs": options.runs, "budget_s": options.budget_s}
    bars: tuple[float | None, float | None] = ON_DISK
    if kind in MEMORY_FILESYSTEMS:
        bars = ON_MEMORY.get(row_bytes, (None, None))
    with ExitStack() as stack:
        sides = {FS: _fs_side(folder, chunks, row_bytes), MINE: _side(options, folder / "auto", chunks, row_bytes)}
        for rows in () if options.quick else OTHERS:
            sides[f"rows {rows}"] = _side(options, folder / rows, chunks, row_bytes, rows=rows)
        for side in sides.values():
            stack.callback(side.close)
        gc.collect()
        where = f"{size_text(row_bytes)}, {kind}"
        table.add(measure(f"tier store {where}", [_store(*named, bars[0]) for named in sides.items()], **timing))
        table.add(measure(f"tier load {where}", [_load(*named, bars[1]) for named in sides.items()], **timing))
        table.add(_caller_rows(where, sides))


def _fs_side(folder: Path, chunks: int, row_bytes: int) -> Side:
    root = folder / "fs"
    return Side({"type": "fs", "root_dir": str(root)}, chunks, row_bytes, lambda: _remove_files(root))


def _side(options: Options, root: Path, chunks: int, row_bytes: int, **keys: Any) -> Side:
    tier = {
        "type": "KvxferTier",
        "module_path": "kvxfer.integrations.vllm_tier",
        "root_dir": str(root),
        "weights_fingerprint": "bench",
        "io_threads": options.io_threads,
        **row_store_keys(row_bytes, chunks, options.io_threads),
        **options.engine,
        **keys,
    }
    return Side(tier, chunks, row_bytes, None)


def _store(name: str, side: Side, bar: float | None) -> Impl:
    mine = name == MINE
    return Impl(
        name=name, run=side.store_all, check=side.check_store, poison=side.before_store, bar=bar if mine else None,
        always_check=True,
    )  # fmt: skip


def _load(name: str, side: Side, bar: float | None) -> Impl:
    mine = name == MINE
    return Impl(
        name=name, run=side.load_all, check=side.check, poison=side.poison, bar=bar if mine else None, always_check=True
    )


def _caller_rows(where: str, sides: Mapping[str, Side]) -> list[Row]:
    """What a chunk takes of the scheduler's thread, to the store and back: the medians of both trips, added up."""
    found = {
        name: (statistics.median(side.store_us) + statistics.median(side.load_us), len(side.load_us))
        for name, side in sides.items()
        if name in (FS, MINE)
    }
    most = {FS: None, MINE: CALLER_SHARE * found[FS][0]}
    return [
        figure(f"caller's thread, {where}", name, us, "us a chunk", most=most[name], runs=runs)
        for name, (us, runs) in found.items()
    ]


def run(table: Table, options: Options) -> None:
    """Adds the tier's rows: for every directory, every row size."""
    if (why := whats_missing()) is not None:
        table.note(f"tier: left out: {why}")
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():  # torch's and vLLM's own, while they are imported
        warnings.simplefilter("ignore")
        import vllm
    sizes = ROW_SIZES if options.row_sizes is None else options.row_sizes
    for place in options.dirs:
        kind = filesystem_type(place)
        largest = max(_chunks(options, row_bytes) * row_bytes for row_bytes in sizes)
        need = room_needed(replace(options, engine_bytes=largest))
        if (free := shutil.disk_usage(place).free) < need:
            table.note(f"tier on {kind}: left out, {free >> 20} MiB are free and {need >> 20} are needed")
            continue
        table.note(
            f"tier on {kind} at {place}: vLLM {vllm.__version__}, {options.engine_bytes >> 20} MiB or more in {JOBS} "
            "jobs; fs without checksums, its files removed before each store; KvxferTier with them, evicting from the "
            "third on"
        )
        for row_bytes in sizes[::2] if options.quick else sizes:
            with temporary_folder(place) as folder:
                measure_rows(table, options, row_bytes, folder, kind)
