"""A queue of jobs between pages and host rows, and the thread that does them. Knows no vLLM."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvxfer.convert.native_rows import RowPlan
from kvxfer.errors import EngineClosed, ForkError
from kvxfer.report import engine_reporter

__all__ = ["Done", "RowCopier", "RowJob"]

MOST_PASSED = 64  # jobs that one may be put before: looking for what it must not pass takes time
EXIT_S = 5.0  # that a copy under way gets when the process ends
CHECK_S = 1.0  # a wait looks so often whether the thread is still there


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a job: its bytes, and the seconds that its copies took."""

    job_id: int
    is_store: bool
    success: bool
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class RowJob:
    """Blocks that go to rows, or come from there: see RowPlan.gather."""

    job_id: int
    is_store: bool
    block_ids: NDArray[np.int64]
    pages: NDArray[np.int64]
    group_pages: NDArray[np.int64]
    urgent: bool = False  # someone waits for it already

    @cached_property
    def blocks_touched(self) -> frozenset[int]:
        """Its block ids."""
        return frozenset(self.block_ids.tolist())

    @cached_property
    def pages_touched(self) -> frozenset[int]:
        """Its pages of rows."""
        return frozenset(self.pages.tolist())

    def meets(self, other: RowJob) -> bool:
        """Whether the order of the two matters: one writes what the other touches."""
        if not self.blocks_touched.isdisjoint(other.blocks_touched):
            return True  # two stores only read a block, but nothing is gained by telling them apart
        return (self.is_store or other.is_store) and not self.pages_touched.isdisjoint(other.pages_touched)

    def may_pass(self, earlier: RowJob) -> bool:
        """Whether this load may be done before a job that was submitted before it: none sees another's bytes then."""
        if not earlier.is_store and (earlier.urgent or not self.urgent):
            return False
        return not self.meets(earlier)


class RowCopier:
    """Does jobs one after the other, on a thread of its own: in the order they came, but that loads pass stores, and
    urgent loads others, where they touch nothing of theirs. Every accepted job ends in exactly one Done.

    Args:
        plan: the copier's own from now on: `close` closes it.
        threads: that share a job's copies.
    """

    def __init__(self, plan: RowPlan, *, threads: int = 1) -> None:
        self._plan, self._threads, self._process = plan, threads, os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[RowJob] = deque()
        self._unfinished: set[int] = set()
        self._done: list[Done] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-rows", daemon=True)
        self._thread.start()
        atexit.register(self.close, EXIT_S)  # who forgets `close` must not have rows unmapped under a copy

    def submit(self, job: RowJob) -> None:
        """Queues a job; never waits for another.

        Raises:
            LayoutError: it names a block or row that there is not, or has the id of an unfinished job.
            EngineClosed: after `close`.
            ForkError: in a child of the process that made this.
        """
        if os.getpid() != self._process:
            raise ForkError("this copier is another process's: its thread does not exist here")
        self._plan.check(job.block_ids, job.pages, job.group_pages)
        with self._changed:
            if self._closing or not self._thread.is_alive():
                raise EngineClosed("the copier is closed")
            if job.job_id in self._unfinished:
                raise ValueError(f"job {job.job_id} is not finished yet")
            self._unfinished.add(job.job_id)
            self._queue.insert(self._place(job), job)
            self._changed.notify_all()

    def finished(self) -> list[Done]:
        """What has ended since the last call. Never waits."""
        with self._changed:
            done, self._done = self._done, []
        return done

    def wait(self, job_ids: Iterable[int]) -> None:
        """Blocks until these jobs have ended; those that nobody submitted have. Their results stay to be taken."""
        wanted = set(job_ids)
        with self._changed:
            while wanted & self._unfinished and self._thread.is_alive():
                self._changed.wait(CHECK_S)

    def close(self, timeout_s: float) -> bool:
        """Ends the job under way, and fails those not begun.

        Returns:
            Whether the thread has ended: else it may still write to rows and blocks, and the plan stays.
        """
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            while self._queue:
                self._end(self._queue.popleft(), False, 0, 0.0)
            self._changed.notify_all()
        if os.getpid() == self._process:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        self._plan.close()
        return True

    def _place(self, job: RowJob) -> int:
        """Where in the queue a job goes."""
        place = len(self._queue)
        if not job.is_store:
            least = max(0, place - MOST_PASSED)
            while place > least and job.may_pass(self._queue[place - 1]):
                place -= 1
        return place

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
            started = time.perf_counter()
            copy = self._plan.gather if job.is_store else self._plan.scatter
            nbytes, success = 0, False
            try:
                nbytes = copy(job.block_ids, job.pages, job.group_pages, threads=self._threads)
                success = True
            except Exception as exc:  # a defect, or no memory: whoever waits for the job must hear of it
                engine_reporter.warn("rows", f"job {job.job_id} failed: {exc}", exc_info=exc, job=job.job_id)
            with self._changed:
                self._end(job, success, nbytes, time.perf_counter() - started)
                self._changed.notify_all()

    def _end(self, job: RowJob, success: bool, nbytes: int, seconds: float) -> None:
        """Called with the lock held."""
        self._unfinished.discard(job.job_id)
        self._done.append(Done(job.job_id, job.is_store, success, nbytes, seconds))
