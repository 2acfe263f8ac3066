"""Several drives behind one face: chunks are spread over the roots of several engines.

Every root is a whole store of its own, with its own index, threads and circuit breaker. So a drive that fails, fills or
vanishes costs the chunks that lie on it, and nothing else: they become misses, and stores go to the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.bitmap import CompletionBitmap
from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError, KvxferError, LayoutError
from kvxfer.jobs import ChunkError, Status
from kvxfer.metrics import add_up
from kvxfer.observe import Metrics
from kvxfer.report import engine_reporter
from kvxfer.results import TransferResult, refuse_repeated

__all__ = ["SpreadEngine"]


@dataclass(slots=True)
class _Job:
    """A job whose parts are under way: one at most on each engine, under the job's own id."""

    waits_for: dict[int, NDArray[np.int64]]  # engine -> where its part's keys are in the job
    arrived: NDArray[np.bool_]  # [keys]
    nbytes: int = 0
    seconds: float = 0.0
    errors: list[ChunkError] = field(default_factory=list)


class SpreadEngine:
    """Engines of one namespace over the same pages, each with a root on a drive of its own. They stay the caller's.

    A store's chunk goes to the root that has it, or else to the one that is emptiest for its capacity among those that
    take stores; a load's to the one that has it. Calls, errors and results are a TransferEngine's.

    Args:
        engines: at least one; shut down by `shutdown`.
        weights: how much each is to get beside the others, such as its capacity in bytes.

    Raises:
        ConfigError: no engine, or not as many positive weights.
    """

    def __init__(self, engines: Sequence[TransferEngine], weights: Sequence[float]) -> None:
        if not engines or len(weights) != len(engines) or min(weights) <= 0:
            raise ConfigError(f"{len(engines)} engines need as many positive weights, not {list(weights)}")
        self._engines, self._weights = tuple(engines), tuple(weights)
        self._placed = [0] * len(engines)  # chunks that were sent there to be stored
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._ready: list[TransferResult] = []

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The namespace's digest in each root: they have weight epochs of their own."""
        return tuple(engine.digest for engine in self._engines)

    @property
    def io_mode(self) -> str:
        """The I/O path of the first; a metric knows one path only."""
        return self._engines[0].io_mode

    def contains(self, key: bytes) -> bool:
        """Whether any root has it."""
        return any(engine.contains(key) for engine in self._engines)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are in a root that answers: a claim, which a load proves."""
        for number, key in enumerate(keys):
            if not self.holds(key):
                return number
        return len(keys)

    def holds(self, key: bytes) -> bool:
        """`lookup` of one key."""
        return self._engines[self._home(key, store=False)].holds(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Counts as a use."""
        keys = tuple(keys)
        for engine in self._engines:
            engine.touch(keys)

    # ---- jobs --------------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, keys: Sequence[bytes], block_ids: ArrayLike, *, begin: bool = True) -> None:
        """As TransferEngine.submit_store."""
        ids = self._engines[0].block_table(len(keys), block_ids)
        with self._lock:
            homes = [self._home(key, store=True) for key in keys]
        self._submit(job_id, keys, ids, homes, partial(TransferEngine.submit_store, begin=begin))

    def submit_load(
        self,
        job_id: int,
        keys: Sequence[bytes],
        block_ids: ArrayLike,
        *,
        deadline: float | None = None,
        begin: bool = True,
    ) -> None:
        """As TransferEngine.submit_load."""
        ids = self._engines[0].block_table(len(keys), block_ids)
        refuse_repeated(ids)  # which its parts would not see
        homes = [self._home(key, store=False) for key in keys]
        self._submit(job_id, keys, ids, homes, partial(TransferEngine.submit_load, deadline=deadline, begin=begin))

    def begin(self) -> None:
        """As TransferEngine.begin."""
        for engine in self._engines:
            engine.begin()

    def _home(self, key: bytes, *, store: bool) -> int:
        """Which engine has the key; where none has, the one that should store it, or the first, which will miss it."""
        for number, engine in enumerate(self._engines):
            if engine.contains(key):
                return number
        if not store:
            return 0
        willing = [number for number, engine in enumerate(self._engines) if engine.takes_stores]
        number = min(willing or range(len(self._engines)), key=lambda n: (self._placed[n] + 1) / self._weights[n])
        self._placed[number] += 1
        return number

    def _submit(
        self, job_id: int, keys: Sequence[bytes], ids: NDArray[np.int64], homes: list[int], submit: Callable[..., None]
    ) -> None:
        """Hands each engine its part. What raises for the first of them raises; for others it is their part's end."""
        where = np.asarray(homes, np.int64)
        numbers = list(dict.fromkeys(homes)) or [0]
        parts = {number: np.flatnonzero(where == number) for number in numbers}
        job = _Job(dict(parts), np.zeros(len(keys), np.bool_))
        with self._lock:
            if job_id in self._jobs:
                raise LayoutError(f"job {job_id} is still open")
            self._jobs[job_id] = job
        for number, index in parts.items():
            try:
                submit(self._engines[number], job_id, [keys[i] for i in index], ids[index])
            except Exception as exc:
                if number == numbers[0]:
                    with self._lock:
                        del self._jobs[job_id]
                    raise
                engine_reporter.warn("spread", f"a part of job {job_id} was refused: {exc}", job=job_id)
                errors = tuple(ChunkError(chunk, Status.CANCELLED) for chunk in range(len(index)))
                self._take(number, TransferResult(job_id, CompletionBitmap.empty(len(index)), 0, 0.0, errors))

    def poll(self) -> list[TransferResult]:
        """Results of jobs all of whose parts have ended, each once. Never blocks."""
        for number, engine in enumerate(self._engines):
            for result in engine.poll():
                self._take(number, result)
        with self._lock:
            ready, self._ready = self._ready, []
        return ready

    def _take(self, number: int, result: TransferResult) -> None:
        """A part has ended."""
        with self._lock:
            job = self._jobs[result.job_id]
            index = job.waits_for.pop(number)
            job.arrived[index] = list(result.bitmap)
            job.nbytes += result.nbytes
            job.seconds = max(job.seconds, result.seconds)
            job.errors += [replace(error, chunk=int(index[error.chunk])) for error in result.errors]
            if not job.waits_for:
                del self._jobs[result.job_id]
                bitmap = CompletionBitmap.from_bools(job.arrived)
                errors = tuple(sorted(job.errors, key=lambda error: error.chunk))
                self._ready.append(TransferResult(result.job_id, bitmap, job.nbytes, job.seconds, errors))

    def cancel(self, job_id: int) -> None:
        """As TransferEngine.cancel."""
        for engine in self._engines:
            engine.cancel(job_id)

    def drain(self, timeout: float | None = None) -> bool:
        """As TransferEngine.drain."""
        end = None if timeout is None else time.monotonic() + timeout
        drained = [engine.drain(None if end is None else max(0.0, end - time.monotonic())) for engine in self._engines]
        return all(drained)

    # ---- the rest ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """As TransferEngine.reset, in every root; raises what the first raised that could not."""
        failed: list[Exception] = []
        for engine in self._engines:
            try:
                engine.reset()
            except KvxferError as exc:
                failed.append(exc)
        if failed:
            raise failed[0]

    def metrics(self) -> Metrics:
        """The sums: gauges too, so that `kvxfer_breaker_state` says how many drives are in a state."""
        each = [engine.metrics() for engine in self._engines]
        return Metrics(add_up(one.engine for one in each), add_up(one.store for one in each), id(self))

    def shutdown(self, timeout: float | None = None) -> int:
        """As TransferEngine.shutdown, of all at once."""
        with ThreadPoolExecutor(len(self._engines)) as pool:
            return sum(pool.map(lambda engine: engine.shutdown(timeout), self._engines))
