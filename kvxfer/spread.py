"""Several drives behind one face: chunks are spread over the roots of several engines.

Every root is a whole store of its own, with its own index, threads and circuit breaker. So a drive that fails, fills or
vanishes costs the chunks that lie on it, and nothing else: they become misses, and stores go to the others, of these
chunks too.
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
from kvxfer.errors import KvxferError, LayoutError
from kvxfer.intake import place_over_roots
from kvxfer.jobs import ChunkError, Status
from kvxfer.observe import Metrics, together
from kvxfer.placement import Placement, Round
from kvxfer.report import engine_reporter
from kvxfer.results import TransferResult, refuse_repeated
from kvxfer.store import Access

__all__ = ["SpreadEngine"]


@dataclass(slots=True)
class _Job:
    """A job whose parts are under way: one at most on each engine, under the job's own id."""

    job_id: int
    waits_for: dict[int, NDArray[np.int64]]  # engine -> where its part's keys are in the job
    arrived: NDArray[np.bool_]  # [keys]
    nbytes: int = 0
    seconds: float = 0.0
    errors: list[ChunkError] = field(default_factory=list)
    placed: list[bytes] = field(default_factory=list)  # keys of a store that it has under way


class SpreadEngine:
    """Engines of one namespace over the same pages, each with a root on a drive of its own.

    Where a chunk is, and goes, placement.py says. What there is of TransferEngine's calls has its arguments, errors and
    results.

    Args:
        engines: at least one; `shutdown` ends them, their stores stay the caller's. With `second_touch_names` they
            share one `second_touch`: a chunk is not always offered to the same one.
        weights: how much each is to get beside the others, such as its capacity in bytes.

    Raises:
        ConfigError: no engine, or not as many positive weights.
    """

    def __init__(self, engines: Sequence[TransferEngine], weights: Sequence[float]) -> None:
        self._engines = tuple(engines)
        self._placement = Placement(self._engines, weights)
        self._under_way: dict[bytes, dict[int, int]] = {}  # key that is being stored: by job, on which engine
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
        return self._engines[self._placement.home(key)].holds(key)

    def touch(self, keys: Iterable[bytes], access: Access | None = None) -> None:
        """As TransferEngine.touch. A root hears of the keys that it has: the others' are no gaps in its chains."""
        keys = tuple(keys)
        if access is not None:
            access.place(keys)
        for number, engine in enumerate(self._engines):
            part = None if access is None else access.part(number)
            engine.touch([key for key in keys if engine.contains(key)], part)

    # ---- jobs --------------------------------------------------------------------------------------------------

    def submit_store(
        self,
        job_id: int,
        keys: Sequence[bytes],
        block_ids: ArrayLike,
        *,
        access: Access | None = None,
        begin: bool = True,
    ) -> None:
        """As TransferEngine.submit_store."""
        ids = self._engines[0].block_table(len(keys), block_ids)
        self._submit(job_id, keys, ids, access, partial(TransferEngine.submit_store, begin=begin), store=True)

    def submit_load(
        self,
        job_id: int,
        keys: Sequence[bytes],
        block_ids: ArrayLike,
        *,
        deadline: float | None = None,
        access: Access | None = None,
        begin: bool = True,
    ) -> None:
        """As TransferEngine.submit_load."""
        ids = self._engines[0].block_table(len(keys), block_ids)
        refuse_repeated(ids)  # which its parts would not see
        self._submit(job_id, keys, ids, access, partial(TransferEngine.submit_load, deadline=deadline, begin=begin))

    def begin(self) -> None:
        """As TransferEngine.begin."""
        for engine in self._engines:
            engine.begin()

    def _place(self, key: bytes, job: _Job, found: Round) -> int:
        """Which engine is to store the key. A job has it under way until it ends, whatever others end with."""
        under_way = self._under_way.get(key, {}).values()
        joined = next((number for number in under_way if self._engines[number].takes_stores), None)
        number, is_stored = self._placement.place(key, found, joined)
        if is_stored:
            self._under_way.setdefault(key, {})[job.job_id] = number
            job.placed.append(key)
        return number

    def _submit(
        self,
        job_id: int,
        keys: Sequence[bytes],
        ids: NDArray[np.int64],
        access: Access | None,
        submit: Callable[..., None],
        *,
        store: bool = False,
    ) -> None:
        """Hands each engine its part. What raises for the first of them raises; for others it is their part's end."""
        job = _Job(job_id, {}, np.zeros(len(keys), np.bool_))
        if store:
            access = access or Access()
            place_over_roots(keys, access, self.contains)
        with self._lock:
            if job_id in self._jobs:
                raise LayoutError(f"job {job_id} is still open")
            found = self._placement.look() if store else None
            homes = [self._placement.home(key) if found is None else self._place(key, job, found) for key in keys]
            where = np.asarray(homes, np.int64)
            numbers = list(dict.fromkeys(homes)) or [0]
            parts = {number: np.flatnonzero(where == number) for number in numbers}
            job.waits_for = dict(parts)
            self._jobs[job_id] = job
        for number, index in parts.items():
            part = None if access is None else access.part(number)
            try:
                submit(self._engines[number], job_id, [keys[i] for i in index], ids[index], access=part)
            except Exception as exc:  # other parts are under way by then: this one ends as a failed one, and says why
                if number == numbers[0]:
                    with self._lock:
                        self._end(job_id)
                    raise
                engine_reporter.failed("spread", f"a part of job {job_id} was refused", exc, job=job_id)
                if store and part is not None:
                    for i in index:
                        part.gaps.open(keys[i], Status.CANCELLED)
                errors = tuple(ChunkError(chunk, Status.CANCELLED) for chunk in range(len(index)))
                self._take(number, TransferResult(job_id, CompletionBitmap.empty(len(index)), 0, 0.0, errors))

    @property
    def is_quiet(self) -> bool:
        """As TransferEngine.is_quiet."""
        return not self._ready and all(engine.is_quiet for engine in self._engines)

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
                self._end(result.job_id)
                bitmap = CompletionBitmap.from_bools(job.arrived)
                errors = tuple(sorted(job.errors, key=lambda error: error.chunk))
                self._ready.append(TransferResult(result.job_id, bitmap, job.nbytes, job.seconds, errors))

    def _end(self, job_id: int) -> None:
        """Called with the lock held."""
        for key in self._jobs.pop(job_id).placed:
            on = self._under_way.get(key, {})
            on.pop(job_id, None)  # a key that it names twice is there once
            if not on:
                self._under_way.pop(key, None)

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
        return together([engine.metrics() for engine in self._engines], id(self))

    def shutdown(self, timeout: float | None = None) -> int:
        """As TransferEngine.shutdown, of all at once."""
        with ThreadPoolExecutor(len(self._engines)) as pool:
            return sum(pool.map(lambda engine: engine.shutdown(timeout), self._engines))
