"""The store side of the engine: what its one thread for stores does with those that are queued.

Nothing here is called by any other thread, so nothing here is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvxfer.breaker import Permit
from kvxfer.errors import StoreError
from kvxfer.intake import Intake
from kvxfer.jobs import STORE, JobOutcome, Runner, Status
from kvxfer.report import engine_reporter
from kvxfer.results import PendingJob
from kvxfer.slot import SlotLayout
from kvxfer.store import Entry, Reservation, Store

# While one batch is written the next is planned and the one before committed. What is done once for a batch (the root's
# lock, three transactions) costs as much as some 100 chunks, which count where chunks are small.
BATCH_BYTES = 32 << 20
BATCH_LEAST, BATCH_MOST = 16, 256  # chunks
_STATUS = {int(status): status for status in Status}  # faster than Status(code), which counts for thousands of chunks


@dataclass(slots=True)
class _Write:
    """A key under way to the store, and which other chunks wait for it."""

    job: PendingJob
    mask: int
    waiters: list[tuple[PendingJob, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Flight:
    """A batch of a store that the runner has: a key and a slot for each of its chunks."""

    job: PendingJob
    index: list[int]
    slots: list[Reservation]
    masks: list[int]  # of the job's keys
    digest: bytes  # of the namespace in which it began
    permit: Permit


class StoreWriter:
    """Drops what is present or not let in, reserves, submits, commits, calls `finished` once for every planned job."""

    def __init__(
        self,
        store: Store,
        digest: bytes,
        slot: SlotLayout,
        runner: Runner,
        parts: Sequence[Any],
        native_ids: Iterator[int],
        intake: Intake,
        finished: Callable[[PendingJob], None],
    ) -> None:
        self._store, self._slot = store, slot
        self._batch = max(BATCH_LEAST, min(BATCH_MOST, BATCH_BYTES // slot.slot_bytes))
        self.digest = digest  # of the namespace that stores which start now go to
        self._runner, self._parts, self._native_ids, self._finished = runner, parts, native_ids, finished
        self._intake = intake
        self._flights: dict[int, _Flight] = {}  # by native id
        self._writes: dict[bytes, _Write] = {}
        self._held: dict[PendingJob, list[Entry | None]] = {}  # pinned until the job ends
        self._lost: dict[tuple[int, int], Reservation] = {}  # slots under writes that have not returned
        self._late: set[tuple[int, int]] = set()  # such writes that have returned before their job ended

    def start(self, job: PendingJob) -> None:
        """Start a job: whatever of it has to be written is handed to the runner."""
        try:
            self._plan(job)
        except Exception as exc:  # whatever it is, the job was accepted, so it must end, and the thread must go on
            engine_reporter.failed("store", "a store could not be planned", exc)
            mine = [key for key, write in self._writes.items() if write.job is job]
            job.fail_rest(Status.INDEX)
            self._resolve(job, dict.fromkeys(mine, Status.INDEX))
        job.planned.set()

    @property
    def waits_for_writes(self) -> bool:
        """There are slots under writes that were given up and have not returned."""
        return bool(self._lost)

    def _plan(self, job: PendingJob) -> None:
        masks = job.masks()
        todo: list[int] = []
        held = self._held[job] = self._store.pin(self.digest, job.keys, job.access)
        for i, key in enumerate(job.keys):
            if (entry := held[i]) is not None and masks[i] & ~entry.mask == 0:
                job.arrive(i)  # and stays pinned: the job's own chunks must not push it out
            elif (write := self._writes.get(key)) is None:
                self._writes[key] = _Write(job, masks[i])
                todo.append(i)
            elif masks[i] & ~write.mask:
                job.fail(i, Status.BUSY)  # fewer of its blocks are on their way just now
            else:
                write.waiters.append((job, i))
                job.access.gaps.close(key)  # if it fails, this one hears of it
        keys = [job.keys[i] for i in todo]
        places, refused = self._intake.sift(keys, self._slot.slot_bytes, job.access, self._present)
        wanted = [todo[place] for place in places]
        self._intake.weigh(job, len(wanted) * self._slot.slot_bytes)
        while wanted:
            batch, wanted = wanted[: self._batch], wanted[self._batch :]
            if (short := self._submit(job, batch, masks)) is not None:  # nor is the rest tried, being behind that
                self._give_up(job, dict.fromkeys(wanted, short))
                break
        self._refuse(job, {todo[place]: why for place, why in refused.items()})
        if not todo and not job.unanswered:
            self._end(job)

    def answer_present(self, job: PendingJob) -> None:
        """Of a store that is refused: sets the bits of what is there already. For any thread."""
        masks = job.masks()
        with suppress(StoreError):  # that was closed
            for i, key in enumerate(job.keys):
                if self._store.contains(self.digest, key, masks[i]):
                    job.arrive(i)

    def spare(self, job: PendingJob) -> bool:
        """Answers a store all of whose chunks are there, or were left out to spare the storage. For any thread.

        Returns:
            False: there is more to it, and nothing was answered.
        """
        if not job.access.gaps:
            return False
        masks, why = job.masks(), dict[int, Status]()
        with suppress(StoreError):
            absent = [i for i, key in enumerate(job.keys) if not self._store.contains(self.digest, key, masks[i])]
            why = self._intake.spared([job.keys[i] for i in absent], job.access, self._present)
        if not why:
            return False
        failed = {absent[place]: status for place, status in why.items()}
        for i in range(len(job.keys)):
            if i in failed:
                job.fail(i, failed[i])
            else:
                job.arrive(i)
        return True

    def _present(self, key: bytes) -> bool:
        return self._store.contains(self.digest, key)

    def _end(self, job: PendingJob) -> None:
        self._store.unpin(self._held.pop(job, ()))
        self._finished(job)

    def settle(self) -> None:
        """Commit what the runner has finished, and take back slots whose lost writes have returned."""
        self._late.update(self._runner.late())
        while (outcome := self._runner.poll(STORE)) is not None:
            self._land(self._flights.pop(outcome.job_id), outcome)
        back = self._late & self._lost.keys()  # the rest are of jobs that still have chunks under way
        self._late -= back
        self._store.release([self._lost.pop(which) for which in back])

    def _submit(self, job: PendingJob, todo: list[int], masks: list[int]) -> Status | None:
        """Hands a batch to the runner; why not its last chunk, if not that."""
        slots: list[Reservation] = []
        status = Status.NO_SPACE
        permit = self._intake.admit(STORE, len(todo))
        todo, held_back = todo[: permit.chunks], todo[permit.chunks :]
        try:
            if todo and not job.cancelled:
                slots = self._store.reserve(self.digest, self._slot, len(todo), job.access)
            if job.cancelled:  # before, or while a slab was made
                self._store.release(slots)
                slots, status = [], Status.CANCELLED
            if slots:
                self._fly(_Flight(job, todo[: len(slots)], slots, masks, self.digest, permit))
        except Exception as exc:  # a runner that was shut down, no memory: slots and waiting keys must not stay behind
            engine_reporter.failed("store", f"a store of {len(todo)} chunks could not be started", exc)
            self._store.release(slots)
            slots, status = [], Status.INDEX
        if not slots:
            self._intake.settle(STORE, permit, None)
        failed = dict.fromkeys(todo[len(slots) :], status) | dict.fromkeys(held_back, Status.BREAKER)
        self._give_up(job, failed)
        return next(reversed(failed.values()), None)

    def _give_up(self, job: PendingJob, failed: dict[int, Status]) -> None:
        """Chunks that were to be written and are not going to be, and why."""
        self._intake.unspent(len(failed) * self._slot.slot_bytes)
        self._intake.weigh(job, max(0, job.queued_bytes - len(failed) * self._slot.slot_bytes))
        self._refuse(job, failed)

    def _refuse(self, job: PendingJob, failed: dict[int, Status]) -> None:
        """Chunks of a job that nobody is going to write, and why."""
        if not failed:
            return
        for i, why in failed.items():
            job.fail(i, why)
        self._resolve(job, {job.keys[i]: why for i, why in failed.items()})

    def _fly(self, flight: _Flight) -> None:
        job, native = flight.job, next(self._native_ids)
        records = [s.chunk_record(job.keys[i]) for s, i in zip(flight.slots, flight.index, strict=True)]
        ids = job.block_ids[flight.index]
        self._runner.submit(native, STORE, self._parts, b"".join(records), ids, flight.digest, after=job.after)
        self._flights[native] = flight
        job.native_ids.append(native)
        if job.cancelled:  # meanwhile
            self._runner.cancel(native)

    def _land(self, flight: _Flight, outcome: JobOutcome) -> None:
        job, slots, index = flight.job, flight.slots, flight.index
        self._intake.settle(STORE, flight.permit, outcome)
        job.take(outcome, index, [slot.slab.name for slot in slots])
        codes = outcome.status.tolist()
        written = [n for n, code in enumerate(codes) if not code]
        self._intake.backlog.wrote(len(written) * self._slot.slot_bytes)
        self._intake.weigh(job, max(0, job.queued_bytes - len(index) * self._slot.slot_bytes))
        items = [(job.keys[index[n]], slots[n], flight.masks[index[n]]) for n in written]
        unused: list[Reservation] = []
        try:
            committed = dict(zip(written, self._store.commit(flight.digest, items, job.access), strict=True))
        except Exception as exc:  # a store that was closed, no memory: the job must end all the same
            engine_reporter.failed("store", f"{len(items)} written chunks could not be committed", exc)
            committed = dict.fromkeys(written, False)
            unused = [slots[n] for n in written]
        answers: dict[bytes, Status] = {}
        for n, i in enumerate(index):
            status = _STATUS[codes[n]]
            if status is Status.LOST:
                self._lost[outcome.job_id, n] = slots[n]
                self._store.quarantine(slots[n])
            elif status is not Status.OK:
                unused.append(slots[n])
            elif not committed[n]:
                status = Status.INDEX
                job.withdraw(i, status)
            answers[job.keys[i]] = status
        self._store.release(unused)
        self._resolve(job, answers)

    def _resolve(self, job: PendingJob, answers: dict[bytes, Status]) -> None:
        """Tell whoever waits for these keys of `job` what became of them; jobs without open questions end here."""
        asked = {job: None}  # an ordered set
        for key, status in answers.items():
            for waiter, i in self._writes.pop(key).waiters:
                asked[waiter] = None
                if status is Status.OK:
                    waiter.arrive(i)
                else:
                    waiter.fail(i, status)
        for each in asked:
            if each.unanswered <= 0:
                self._end(each)
