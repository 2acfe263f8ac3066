"""One rank of several that store and load chunks together: moves its own part of slots that a coordinator named.

A rank knows its pages, a root's directory and nothing of what is stored there: tickets say where each chunk is, and its
report says what became of its part. Nothing that a caller waits on touches the disk, but `free` and `shutdown`, which
are bounded: a thread opens slab files and hands jobs to the native runner.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.config import EngineConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Device
from kvxfer.device.choice import runner_over
from kvxfer.errors import EngineClosed, FormatError, IOFault, KvxferError, LayoutError
from kvxfer.io.modes import nearest, probe_mode
from kvxfer.io.uring import choose_backend
from kvxfer.jobs import LOAD, STORE, JobOutcome, Status, check_process, nanoseconds
from kvxfer.report import engine_reporter
from kvxfer.results import block_table, refuse_repeated
from kvxfer.slabs import SlabFiles
from kvxfer.slot import ALIGNMENT
from kvxfer.store.entry import pack_chunk
from kvxfer.store.slab import SlabFile
from kvxfer.tickets import NOWHERE, Failure, Report, Settled, SpreadTicket, Ticket

__all__ = ["Ended", "Rank", "all_failed"]

WATCH_S = 0.1
FREE_S = 2.0  # how long stores may take to gather until `free` cancels what is left of them
TOTALS_S = 0.25  # how often a rank that settles nothing tells its counters at most


@dataclass(frozen=True, slots=True)
class Ended:
    """A ticket that this rank has settled."""

    ticket: Ticket | SpreadTicket
    block_ids: NDArray[np.int64]  # [chunks, blocks_per_chunk], as submitted
    settled: Settled


@dataclass(slots=True, eq=False)
class _Job:
    ticket: Ticket
    block_ids: NDArray[np.int64]
    index: list[int]  # positions that the runner gets
    settled: Settled
    files: set[SlabFile] = field(default_factory=set)  # that the runner's records name
    after: Any = None  # what the runner's `mark` gave when it was submitted
    born: float = 0.0  # the rank's `_lived` when it was submitted
    started: float = field(default_factory=time.monotonic)
    native: int | None = None
    ended: bool = False

    @property
    def closes(self) -> float | None:
        """When a load must end."""
        seconds = self.ticket.seconds
        return None if seconds is None else self.started + seconds

    def fail(self, positions: Iterable[int], failure: Failure) -> None:
        """These did not make it."""
        self.settled.failed |= dict.fromkeys(positions, failure)


class Rank:
    """Moves one rank's part of chunks. `submit`, `collect` and `report` return at once; one thread calls them.

    Args:
        root: the store's directory; need not exist before the first ticket.
        pages: this rank's pages, with a mapping for slots of the given alignment; called once for each alignment.
        config: of its runner: io_threads, io_timeout_s, max_lost_threads, read_piece_bytes, staging_bytes.
        number: which rank this is; under it its counters are told.
        device: that has the pages; None: host memory, or where the pages say they are.
        io, direct: as StoreConfig's. This process finds out for itself whether io_uring works here.

    Raises:
        ConfigError: staging_bytes holds no buffer for such a slot, or `io` is uring, which does not work here.
        DeviceError: the device has no memory for a bay, or fails.
    """

    def __init__(
        self,
        root: Path,
        pages: Callable[[int], KVPages],
        *,
        config: EngineConfig | None = None,
        number: int = 0,
        device: Device | None = None,
        io: str = "auto",
        direct: str = "auto",
    ) -> None:
        self.config = config or EngineConfig()
        self._make_pages, self._pages = pages, {ALIGNMENT: pages(ALIGNMENT)}
        self._number = number
        mine, place = self._pages[ALIGNMENT], nearest(root)
        backend = choose_backend(probe_mode(place, direct), place, io).backend if io == "uring" else "posix"
        self._runner, self._staging_limit = runner_over(self.config, mine.mapping.slot, [mine], device, place, backend)
        self._pid = os.getpid()
        self._files = SlabFiles(root)
        self._lock = threading.Condition()
        self._queue: deque[_Job] = deque()  # not handed to the runner; the first is being opened
        self._jobs: dict[int, _Job] = {}  # by ticket: not ended
        self._flights: dict[int, _Job] = {}  # by native id
        self._ended: list[Ended] = []
        self._report = Report()
        self._lost: dict[tuple[int, int], int] = {}  # (native id, chunk): the generation under the write
        self._late: set[tuple[int, int]] = set()
        self._next_native = 1
        self._told: dict[str, int] = {}
        self._told_at = -TOTALS_S
        self._closing = self._stuck = False
        self._lived, self._looked_at = 0.0, time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="kvxfer-rank", daemon=True)
        self._thread.start()

    # ---- the caller's side -----------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, block_ids: ArrayLike) -> None:
        """Start this rank's part of a ticket.

        Args:
            ticket: one that was not submitted before.
            block_ids: [places] or [places, blocks_per_chunk]; -1: absent, or not wanted.

        Raises:
            LayoutError: ids out of range or of another shape, or (loads) repeated.
            EngineClosed, ForkError
        """
        pages, ids = self._pages_for(ticket.alignment), self.block_table(ticket, block_ids)
        job = _Job(ticket, ids, [], Settled(ranks=1), after=self._runner.mark())
        for position, place in enumerate(ticket.places):
            if place.slab == NOWHERE:
                job.fail([position], Failure(Status.MISS))
            elif ticket.is_load or pages.mapping.is_writer(place.slot):
                job.index.append(position)
        with self._lock:
            if self._closing:
                raise EngineClosed("the rank was shut down")
            if ticket.number in self._jobs:
                raise LayoutError(f"ticket {ticket.number} was submitted already")
            self._live()
            job.born = self._lived
            self._jobs[ticket.number] = job
            if self._stuck or not job.index:  # a file that does not open holds up all that come behind it
                job.fail(job.index, Failure(Status.STALLED))
                self._end(job)
                return
            self._queue.append(job)
            self._lock.notify_all()

    def block_table(self, ticket: Ticket | SpreadTicket, block_ids: ArrayLike) -> NDArray[np.int64]:
        """A ticket's ids as [chunks, blocks_per_chunk], checked. For arguments and errors see `submit`."""
        check_process(self._pid, "rank")
        pages = self._pages[ALIGNMENT]
        ids = block_table(block_ids, ticket.chunks, pages.mapping.blocks_per_chunk, pages.num_blocks)
        if ticket.is_load:
            refuse_repeated(ids)
        return ids

    def fail(self, ticket: Ticket, block_ids: NDArray[np.int64]) -> None:
        """Ends a ticket that `submit` refused, where whoever called has accepted it: nothing of it arrives.

        Args:
            block_ids: [rows, any number], which may be more rows than there are chunks.

        Raises:
            ForkError
        """
        check_process(self._pid, "rank")
        with self._lock:
            told = ticket.number in self._jobs  # submitted twice: the coordinator hears of the first alone
            self._ended.append(Ended(ticket, block_ids, Settled(int(not told), all_failed(ticket, block_ids))))

    def collect(self) -> list[Ended]:
        """Tickets that have ended since the last call, each once. Never blocks."""
        check_process(self._pid, "rank")
        self._settle()
        with self._lock:
            ended, self._ended = self._ended, []
            self._report.settled |= {one.ticket.number: one.settled for one in ended if one.settled.ranks}
        return ended

    def report(self) -> Report:
        """What there is to say since the last call: of tickets that `collect` gave, and no others."""
        with self._lock:
            report, self._report = self._report, Report()
        if report.settled or time.monotonic() - self._told_at >= TOTALS_S:
            self._told_at = time.monotonic()
            totals = self._runner.stats() | {"staging_limit": self._staging_limit}
            if totals != self._told:
                self._told = report.totals[self._number] = totals
        return report

    def free(self, numbers: Iterable[int], timeout: float = FREE_S) -> None:
        """Wait until these tickets leave their blocks alone.

        Loads are cut at the gate, with what has arrived. Stores are waited for until they are gathered; what is not
        after `timeout` seconds is cancelled.
        """
        check_process(self._pid, "rank")
        with self._lock:
            jobs = [job for number in numbers if (job := self._jobs.get(number)) is not None]
        for job in jobs:
            if job.ticket.is_load:
                self._cancel(job)
        end = time.monotonic() + timeout
        for job in jobs:
            if not job.ticket.is_load and not self._wait_gathered(job, end):
                self._cancel(job)
                while not job.ended and self._runner.wait_gathered(job.native or 0, WATCH_S) is False:
                    self._settle()  # a copy under way: memory only
        for job in jobs:
            while job.ticket.is_load and not job.ended:  # the same
                self._runner.wait((LOAD,), WATCH_S)
                self._settle()

    def shutdown(self, timeout: float | None = None) -> int:
        """Stop: what is queued is cancelled, calls under way get `timeout` seconds (default: shutdown_timeout_s).

        `collect` and `report` still give what has ended.

        Returns:
            Threads left behind in calls that have not returned.
        """
        check_process(self._pid, "rank")
        timeout = self.config.shutdown_timeout_s if timeout is None else timeout
        with self._lock:
            self._closing = True
            for job in list(self._queue):
                self._give_up(job, Failure(Status.CANCELLED))
            self._lock.notify_all()
        left = self._runner.shutdown(timeout)
        self._thread.join(max(0.0, timeout))
        self._settle()
        if self._thread.is_alive():
            left += 1
        else:
            self._files.close()
        if left:
            engine_reporter.warn("shutdown", f"a rank left {left} threads in calls that have not returned", count=left)
        return left

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _pages_for(self, alignment: int) -> KVPages:
        if alignment not in self._pages:
            self._pages[alignment] = self._make_pages(alignment)
        return self._pages[alignment]

    def _settle(self) -> None:
        """Takes in what the runner has finished."""
        self._late.update(self._runner.late())
        for direction in (LOAD, STORE):
            while (outcome := self._runner.poll(direction)) is not None:
                self._land(outcome)
        with self._lock:
            for which in self._late & self._lost.keys():  # the rest are of jobs that still have chunks under way
                self._late.discard(which)
                _count(self._report.returned, self._lost.pop(which))
            self._expire()

    def _end(self, job: _Job) -> None:
        """With the lock: the ticket has its one answer."""
        if job.ended:
            return
        job.ended = True
        job.settled.seconds = time.monotonic() - job.started
        del self._jobs[job.ticket.number]
        self._ended.append(Ended(job.ticket, job.block_ids, job.settled))
        self._lock.notify_all()

    def _give_up(self, job: _Job, failure: Failure) -> None:
        """With the lock: ends a job that the runner does not have."""
        self._queue.remove(job)
        job.fail(job.index, failure)
        self._end(job)

    def _live(self) -> float:
        """With the lock: adds up how long this process has lived, as csrc's monitor does; the time.

        One that was stopped does not take its drive for one that hangs when it goes on.
        """
        now = time.monotonic()
        self._lived += min(now - self._looked_at, self.config.io_timeout_s / 8)
        self._looked_at = now
        return now

    def _expire(self) -> None:
        """With the lock: ends what has waited for files for too long."""
        now = self._live()
        for job in list(self._queue):
            if job.closes is not None and now >= job.closes:
                self._give_up(job, Failure(Status.CUT))
            elif self._lived >= job.born + self.config.io_timeout_s:
                self._stuck = True  # until the thread comes back
                self._give_up(job, Failure(Status.STALLED))

    def _cancel(self, job: _Job) -> None:
        with self._lock:
            if job in self._queue:
                self._give_up(job, Failure(Status.CANCELLED))
        if job.native is not None and not job.ended:
            self._runner.cancel(job.native)

    def _wait_gathered(self, job: _Job, end: float) -> bool:
        """Whether a store's blocks may be reused, by `end` at the latest."""
        with self._lock:
            self._lock.wait_for(lambda: job.ended or job not in self._queue, max(0.0, end - time.monotonic()))
            if job.ended:
                return True
            if job in self._queue:
                return False
        assert job.native is not None
        return self._runner.wait_gathered(job.native, max(0.0, end - time.monotonic())) is not False

    def _land(self, outcome: JobOutcome) -> None:
        """The runner has finished a job."""
        with self._lock:
            job = self._flights.pop(outcome.job_id)
            for error in outcome.errors:
                position = job.index[error.chunk]
                job.fail([position], Failure(error.status, error.errno))
                if outcome.direction == STORE and error.status is Status.LOST:
                    generation = job.ticket.places[position].generation
                    self._lost[outcome.job_id, error.chunk] = generation
                    _count(self._report.lost, generation)
            job.settled.nbytes = outcome.nbytes
            self._end(job)

    # ---- the thread's side -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Opens files and hands jobs to the runner, in order."""
        while True:
            with self._lock:
                self._stuck = False
                self._lock.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                job = self._queue[0]
            try:
                self._open_and_submit(job)
            except Exception as exc:  # whatever it is, the ticket was accepted, and the thread must go on
                known = isinstance(exc, KvxferError)
                engine_reporter.warn("rank", f"a ticket failed: {exc}", exc_info=None if known else exc)
                with self._lock:
                    if job in self._queue:
                        self._give_up(job, Failure(Status.STALLED))
            with self._lock:
                used = {slab for one in self._flights.values() for slab in one.files}
            self._files.trim(used)

    def _open_and_submit(self, job: _Job) -> None:
        ticket, slot = job.ticket, self._pages[job.ticket.alignment].mapping.slot
        records: list[bytes] = []
        index: list[int] = []
        failed: dict[int, Failure] = {}
        unopened: dict[int, Failure] = {}
        for position in job.index:
            place = ticket.places[position]
            if place.slab not in unopened:
                try:
                    slab = self._files.get(place.slab, slot, ticket.direct)
                    job.files.add(slab)
                    records.append(pack_chunk(slab, place.slot, place.generation, place.key))
                    index.append(position)
                    continue
                except (IOFault, FormatError) as exc:
                    number = exc.errno if isinstance(exc, IOFault) else errno.ESTALE
                    unopened[place.slab] = Failure(Status.IO, number or errno.EIO)
                    engine_reporter.warn("slab", f"slab {place.slab} cannot be used: {exc}", errno=number)
            failed[position] = unopened[place.slab]
        with self._lock:
            if job.ended:  # expired, or cancelled
                return
            job.index = index
            job.settled.failed |= failed
            self._queue.remove(job)
            if not index:
                self._end(job)
                return
            self._fly(job, b"".join(records))
            self._lock.notify_all()

    def _fly(self, job: _Job, records: bytes) -> None:
        """With the lock; the runner copies everything and blocks nobody."""
        pages = self._pages[job.ticket.alignment]
        native, self._next_native = self._next_native, self._next_native + 1
        job.native, self._flights[native] = native, job
        closes = job.closes
        try:
            self._runner.submit(
                native,
                job.ticket.direction,
                [self._runner.part(pages)],
                records,
                np.ascontiguousarray(job.block_ids[job.index]),
                job.ticket.digest,
                deadline_ns=0 if closes is None else max(1, nanoseconds(closes)),
                after=job.after,
            )
        except Exception:  # whatever it is, the ticket was accepted: it ends, and whoever called says why
            del self._flights[native]
            job.native = None
            job.fail(job.index, Failure(Status.STALLED))
            self._end(job)
            raise


def all_failed(ticket: Ticket | SpreadTicket, block_ids: NDArray[np.int64]) -> dict[int, Failure]:
    """For each chunk, and each row of blocks, that it did not make it."""
    return dict.fromkeys(range(max(ticket.chunks, len(block_ids))), Failure(Status.STALLED))


def _count(counts: dict[int, int], generation: int) -> None:
    counts[generation] = counts.get(generation, 0) + 1
