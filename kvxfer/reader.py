"""The load side of the engine: what its one thread for loads does with those that arrive, and with their outcomes.

Memory only: nothing here waits for the disk or the index. Nothing here is called by any other thread, so nothing here
is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.breaker import Permit
from kvxfer.intake import Intake
from kvxfer.jobs import LOAD, JobOutcome, Runner, Status
from kvxfer.report import engine_reporter
from kvxfer.results import PendingJob
from kvxfer.store import Entry, Store


@dataclass(slots=True)
class _Flight:
    """A load that the runner has: the key of each of its chunks, and what is pinned."""

    job: PendingJob
    index: Sequence[int]
    entries: list[Entry]
    permit: Permit


class LoadReader:
    """Pins, submits, settles, and calls `finished` once for every load that was started."""

    def __init__(
        self,
        store: Store,
        runner: Runner,
        parts: Sequence[Any],
        native_ids: Iterator[int],
        intake: Intake,
        finished: Callable[[PendingJob], None],
    ) -> None:
        self._store, self._runner, self._parts, self._native_ids = store, runner, parts, native_ids
        self._intake, self._finished = intake, finished
        self._flights: dict[int, _Flight] = {}  # by native id

    @property
    def is_busy(self) -> bool:
        """The runner has loads that were not settled."""
        return bool(self._flights)

    def start(self, job: PendingJob, digest: bytes, closes_ns: int) -> None:
        """Start a load: what is there of it is handed to the runner, the rest are misses."""
        entries: list[Entry | None] = []
        try:
            entries = self._store.pin(digest, job.keys, job.access)
            self._submit(job, digest, entries, closes_ns)
        except Exception as exc:  # a store that was closed, a runner that was shut down, no memory: the job must end
            engine_reporter.failed("load", f"load {job.job_id} could not be started", exc, job=job.job_id)
            for native in job.native_ids:
                if (flight := self._flights.pop(native, None)) is not None:
                    self._intake.settle(LOAD, flight.permit, None)
            self._store.unpin(entries)
            job.fail_rest(Status.CANCELLED)
            self._finished(job)

    def _submit(self, job: PendingJob, digest: bytes, entries: list[Entry | None], closes_ns: int) -> None:
        found = [entry for entry in entries if entry is not None]
        index: Sequence[int] = range(len(entries))
        if len(found) < len(entries):
            index = [i for i, entry in enumerate(entries) if entry is not None]
            for _ in range(len(entries) - len(found)):
                job.miss()
        permit = self._intake.admit(LOAD, len(found))
        for i in index[permit.chunks :]:
            job.fail(i, Status.BREAKER)
        if not permit.chunks:
            self._store.unpin(found)
            self._finished(job)
            return
        index = index[: permit.chunks]
        native = next(self._native_ids)
        job.native_ids.append(native)
        self._flights[native] = _Flight(job, index, found, permit)
        records = b"".join([entry.record for entry in found[: permit.chunks]])
        ids = job.block_ids if len(index) == len(entries) else job.block_ids[list(index)]
        self._runner.submit(native, LOAD, self._parts, records, ids, digest, deadline_ns=closes_ns, after=job.after)
        if job.cancelled:  # meanwhile
            self._runner.cancel(native)

    def settle(self) -> None:
        """Unpins and publishes what the runner has finished."""
        while (outcome := self._runner.poll(LOAD)) is not None:
            self._land(self._flights.pop(outcome.job_id), outcome)

    def _land(self, flight: _Flight, outcome: JobOutcome) -> None:
        job, entries = flight.job, flight.entries
        try:
            self._intake.settle(LOAD, flight.permit, outcome)
            for error in outcome.errors:
                if error.status.is_damage:
                    self._store.invalidate(entries[error.chunk], error.status.name.lower())
            job.take(outcome, flight.index, [entry.slab.name for entry in entries] if outcome.errors else ())
        finally:
            self._store.unpin(entries)
            job.fail_rest(Status.CANCELLED)
            self._finished(job)
