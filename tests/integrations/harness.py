"""Drives vLLM's SecondaryTierManager interface as its TieringOffloadingManager does, without an engine.

Imports the real vLLM, so whoever imports this is skipped where there is none.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import mmap
import os
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():  # torch's and vLLM's own, while they are imported
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload import config as vllm_config
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvxfer.integrations.vllm_tier import KvxferTier
from tests.oracle import POISON

__all__ = [
    "CONFIG_HAS_LAYOUT",
    "HAS_BACKPRESSURE",
    "HIT",
    "MISS",
    "KvxferTier",
    "LookupResult",
    "ReqContext",
    "ROWS",
    "Rig",
    "ScheduleEndContext",
    "TieringOffloadingSpec",
    "KEYS",
    "TIER",
    "key_of",
    "keys_of",
    "says_bytes",
]

HIT, MISS = LookupResult.HIT, LookupResult.MISS
TOKENS = 16
TIER = {"type": "KvxferTier", "module_path": "kvxfer.integrations.vllm_tier"}
KEYS = {"capacity_bytes": 64 << 20, "weights_fingerprint": "seed 0", "io_threads": 2, "shutdown_timeout_s": 1.0}
KEYS |= {"equal_pipeline_stages": True}  # those of the tests that have stages are


CONFIG_HAS_LAYOUT = "kv_cache_layout" in {field.name for field in dataclasses.fields(vllm_config.OffloadingConfig)}
TELLS_BYTES = "transfer_bytes" in {field.name for field in dataclasses.fields(JobResult)}
HAS_BACKPRESSURE = "backpressure_detector" in inspect.signature(SecondaryTierManager.__init__).parameters
ROWS = next(field.name for field in dataclasses.fields(TransferJob) if field.name in ("chunk_ids", "block_ids"))


def says_bytes(result: Any, nbytes: int) -> bool:
    """Whether a result tells this number of bytes, where this vLLM can be told."""
    return not TELLS_BYTES or result.transfer_bytes == nbytes


def key_of(number: int, group: int = 0) -> bytes:
    """The key of a chunk, as long as those of sha256."""
    return f"chunk {number}".encode().ljust(32, b".") + group.to_bytes(4, "big")


def keys_of(numbers: Iterable[int], group: int = 0) -> list[bytes]:
    return [key_of(number, group) for number in numbers]


def build(cls: Any, **fields: Any) -> Any:
    """One of vLLM's dataclasses, with those of the fields that this vLLM's has."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in fields.items() if name in names})


def offloading_config(
    row_bytes: int,
    *,
    model: str = "org/tiny",
    dtype: str = "float16",
    tp: int = 1,
    pp: int = 1,
    groups: int = 1,
    layers: Sequence[str] = ("layers.0", "layers.1"),
    tokens: int = TOKENS,
    tokens_per_hash: int = TOKENS,
    blocks_per_chunk: int = 1,
    agnostic: bool = True,
    canonical: bool = False,
    layout: str | None = "LBHNC",
    replicated: bool = False,
    events: bool = False,
    extra: dict[str, Any] | None = None,
) -> Any:
    """What vLLM tells a tier of itself."""
    if not CONFIG_HAS_LAYOUT and layout is not None:  # there the process has it
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        os.environ["VLLM_KV_CACHE_LAYOUT"] = {"LBHNC": "HND", "LBNHC": "NHD"}[layout]
        get_kv_cache_layout.cache_clear()
    return build(
        vllm_config.OffloadingConfig,
        groups=tuple(
            build(
                vllm_config.OffloadingGroupConfig,
                tokens_per_block=tokens,
                layer_names=tuple(f"{layer}.{group}" for layer in layers),
                group_id=group,
            )
            for group in range(groups)
        ),
        worker_kv_bytes_per_block=row_bytes // (tp * pp * blocks_per_chunk),
        enable_kv_cache_events=events,
        extra_config=extra or {},
        engine_id=f"test-{os.getpid()}",
        model=build(vllm_config.OffloadingModelConfig, name=model, dtype=dtype, max_model_len=4096),
        cache=build(
            vllm_config.OffloadingCacheConfig, tokens_per_hash=tokens_per_hash, blocks_per_chunk=blocks_per_chunk
        ),
        parallel=build(
            vllm_config.OffloadingParallelConfig,
            rank=0,
            world_size=tp * pp,
            tp_size=tp,
            pp_size=pp,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=agnostic,
        ),
        replicated_layout=replicated,
        canonical_layout=canonical,
        kv_cache_layout=layout,
    )


class Rig:
    """A tier over a primary view of its own. Row i holds what `fill` gave it; chunk i is stored from row i.

    `base` is the tier's configuration without `keys`; left out, that of KvxferTier over `root`. `spec`: in the place
    of vLLM's own.
    """

    def __init__(
        self,
        root: Path,
        *,
        chunks: int = 64,
        row_bytes: int = 64 << 10,
        backpressure: dict[str, Any] | None = None,
        vllm: dict[str, Any] | None = None,
        base: dict[str, Any] | None = None,
        spec: Any = None,
        **keys: Any,
    ) -> None:
        self.chunks, self.row_bytes = chunks, row_bytes
        self.memory = mmap.mmap(-1, chunks * row_bytes)
        self.rows: NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8).reshape(chunks, row_bytes)
        self.view = memoryview(self.rows.view(np.int8))
        config = (TIER | {"root_dir": str(root)} | KEYS if base is None else base) | keys
        config = {name: value for name, value in config.items() if value is not None}
        if backpressure is not None:
            config["backpressure"] = backpressure
        extra = {"cpu_bytes_to_use": chunks * row_bytes, "secondary_tiers": [config]}
        self.spec = spec or TieringOffloadingSpec(offloading_config(row_bytes, extra=extra, **(vllm or {})))
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(config, self.view, self.spec)
        self.open: dict[int, TransferJob] = {}
        self.results: dict[int, JobResult] = {}
        self.stores = 0
        self._next = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tier.shutdown()

    # ---- rows --------------------------------------------------------------------------------------------------

    def fill(self, seed: int = 1) -> NDArray[np.uint8]:
        """Random bytes for every row; returns a copy."""
        self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape, np.uint8)
        return self.rows.copy()

    def poison(self) -> None:
        self.rows[:] = POISON

    def check(self, want: NDArray[np.uint8], arrived: Iterable[int], asked: Iterable[int] | None = None) -> None:
        """Rows `arrived` are those of `want`; what nobody asked for is untouched."""
        arrived = list(arrived)
        for number in arrived:
            assert (self.rows[number] == want[number]).all(), f"row {number} has other bytes"
        for number in set(range(self.chunks)) - set(arrived if asked is None else asked):
            assert (self.rows[number] == POISON).all(), f"row {number} was touched"

    # ---- what the manager does -----------------------------------------------------------------------------------

    def request(self, name: str) -> ReqContext:
        context = ReqContext(req_id=name)
        self.tier.on_new_request(context)
        return context

    def step(self, preempted: Sequence[str] = ()) -> None:
        self.tier.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=tuple(preempted)))

    def submit(
        self,
        numbers: Sequence[int],
        context: ReqContext,
        *,
        load: bool,
        keys: Sequence[bytes] | None = None,
        rows: Sequence[int] | None = None,
    ) -> int:
        """Hand a job over."""
        job: Any = TransferJob(
            job_id=self._next,
            keys=list(keys or keys_of(numbers)),
            is_promotion=load,
            req_context=context,
            **{ROWS: np.asarray(numbers if rows is None else rows, np.int32)},
        )
        self._next += 1
        self.open[job.job_id] = job
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return int(job.job_id)

    def poll(self) -> None:
        """Take results as the manager does, and hold them to its assertions."""
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.results, "a second result"
            job = self.open.pop(result.job_id)  # KeyError: of an unknown job
            assert set(result.successful_keys or ()) <= set(job.keys)
            assert not (result.success and result.successful_keys)
            self.results[result.job_id] = result

    def wait(self, job: int, timeout: float = 20.0) -> JobResult:
        """The result of a job."""
        end = time.monotonic() + timeout
        while job not in self.results:
            assert time.monotonic() < end, f"job {job} has no result"
            self.poll()
            self.step()
            time.sleep(0.001)
        return self.results[job]

    def store(self, numbers: Sequence[int], context: ReqContext | None = None, **how: Any) -> JobResult:
        """Unless told, of a request of its own: one request's chunks make no room for each other."""
        self.stores += 1
        return self.wait(self.submit(numbers, context or self.request(f"store {self.stores}"), load=False, **how))

    def load(self, numbers: Sequence[int], context: ReqContext, **how: Any) -> JobResult:
        return self.wait(self.submit(numbers, context, load=True, **how))

    def lookups(self, numbers: Iterable[int], context: ReqContext) -> list[LookupResult]:
        """Each must answer at once: there is no second round."""
        return [self.tier.lookup(key, context) for key in keys_of(numbers)]

    def settled(self, keys: Sequence[bytes], context: ReqContext, timeout: float = 20.0) -> list[LookupResult]:
        """Of any tier: asked again with every step, as long as the answer is RETRY."""
        end = time.monotonic() + timeout
        while True:
            answers = [self.tier.lookup(key, context) for key in keys]
            if LookupResult.RETRY not in answers:
                return answers
            assert time.monotonic() < end, "lookups that never answer"
            self.step()
            time.sleep(0.001)

    # ---- behind everybody's back ---------------------------------------------------------------------------------

    def where(self, number: int) -> tuple[Path, int, int]:
        """(file, offset, bytes) of the slot of a chunk."""
        found = self.tier._store.locate(self.tier._engine.digest, key_of(number))
        assert found is not None, f"chunk {number} is not stored"
        path, offset, layout = found
        return path, offset, layout.slot_bytes

    def extent(self, number: int) -> tuple[int, int]:
        """File offsets of a slot, for FaultyIO."""
        _, offset, nbytes = self.where(number)
        return offset, offset + nbytes

    def slot(self, number: int) -> bytes:
        path, offset, nbytes = self.where(number)
        with path.open("rb") as file:
            return os.pread(file.fileno(), nbytes, offset)

    def overwrite(self, number: int, data: bytes, at: int = 0) -> None:
        path, offset, _ = self.where(number)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), data, offset + at)
            os.fsync(file.fileno())

    def metric(self, name: str, **labels: str) -> float:
        """Of the tier's engine, as it is now."""
        return float(self.tier._engine.metrics().value(name, **labels))
