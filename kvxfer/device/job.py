"""A job of the device runner, from submit to its one outcome: the gate, as csrc/job.h has it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Event
from kvxfer.device.carrier import Batch
from kvxfer.device.form import Form
from kvxfer.jobs import LOAD, STORE, ChunkError, JobOutcome, Status

__all__ = ["DeviceJob", "Flight", "LivedTime"]


class LivedTime:
    """Seconds that a thread which asks all the time has lived through. A pause of the whole process counts as `most`.

    So a process that was stopped does not take its device for lost when it goes on.
    """

    def __init__(self, most: float) -> None:
        self._most, self._last, self._lived = most, time.monotonic(), 0.0

    def __call__(self) -> float:
        """Seconds since some moment."""
        now = time.monotonic()
        self._lived += min(now - self._last, self._most)
        self._last = now
        return self._lived


@dataclass(slots=True, eq=False)
class DeviceJob:
    """Guarded by the runner's lock.

    Its pages may be touched by a batch inside the gate, and only by such: the outcome comes after the last has left.
    """

    job_id: int
    direction: int
    parts: tuple[KVPages, ...]
    form: Form
    records: bytes
    block_ids: NDArray[np.int64]
    digest: bytes
    deadline_ns: int
    after: Any  # Event or None
    started: float = field(default_factory=time.monotonic)
    next: int = 0  # first chunk that no batch has
    inside: int = 0  # batches whose gather or scatter may be under way
    carried: int = 0  # batches of a store that may be on their way to the drive: their slots are in use
    ungathered: int = 0  # chunks of a store
    closed: Status | None = None  # chunks without an answer get this
    outcome: JobOutcome | None = None
    status: NDArray[np.uint8] = field(init=False)  # [chunks]
    errors: dict[int, ChunkError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.status = np.full(self.chunks, Status.PENDING, np.uint8)
        self.ungathered = self.chunks if self.direction == STORE else 0

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.block_ids)

    @property
    def untaken(self) -> int:
        """Chunks that a batch could still take."""
        return 0 if self.closed is not None else self.chunks - self.next

    def take(self, most: int) -> tuple[int, int]:
        """The next chunks, for a batch: the first, and how many."""
        first, count = self.next, min(most, self.chunks - self.next)
        self.next += count
        return first, count

    def lands_ns(self, most: int) -> int:
        """When a carrier should be done with a batch, so that `most` ns (or what there is) are left; 0: no deadline."""
        if not self.deadline_ns:
            return 0
        left = max(0, self.deadline_ns - time.monotonic_ns())
        return self.deadline_ns - min(most, left // 4)

    def expire(self, now_ns: int) -> None:
        """Closes the gate where the deadline has passed."""
        if self.deadline_ns and now_ns >= self.deadline_ns:
            self.close(Status.CUT)

    def close(self, status: Status) -> None:
        """No batch enters the gate any more."""
        if self.closed is None:
            self.closed = status

    def drop_untaken(self, status: Status) -> None:
        """Chunks that no batch has will not be tried; those under way go on."""
        self.settle(self.next, np.full(self.chunks - self.next, status, np.uint8), ())
        self.ungathered -= self.chunks - self.next if self.direction == STORE else 0
        self.next = self.chunks

    def settle(self, first: int, status: NDArray[np.uint8], errors: Iterable[ChunkError]) -> None:
        """What became of the chunks from `first` on; PENDING: not known yet. What is known already stays."""
        mine = self.status[first : first + len(status)]
        open_ = (mine == Status.PENDING) & (status != Status.PENDING)
        mine[open_] = status[open_]
        for error in errors:
            if open_[error.chunk]:
                self.errors[first + error.chunk] = replace(error, chunk=first + error.chunk)

    def finish(self) -> bool:
        """Whether nothing is left to wait for, so that it has its outcome now; once."""
        pending = self.status == Status.PENDING
        if self.outcome is not None or self.inside or self.carried or (self.closed is None and pending.any()):
            return False
        if self.closed is not None:
            self.status[pending] = self.closed
        failed = np.flatnonzero(self.status).tolist()
        errors = tuple(self.errors.get(chunk) or ChunkError(chunk, Status(self.status[chunk])) for chunk in failed)
        nbytes = (self.chunks - len(failed)) * self.form.payload_bytes
        seconds = time.monotonic() - self.started
        self.outcome = JobOutcome(self.job_id, self.direction, nbytes, seconds, self.status, errors)
        return True


@dataclass(slots=True, eq=False)
class Flight:
    """A batch and where it is. The runner's thread's, but what is counted in its job."""

    job: DeviceJob
    batch: Batch
    first: int  # its first chunk in the job
    event: Event | None = None  # after its gather, or its scatter
    since: float = 0.0  # when that was queued, in the runner's LivedTime
    inside: bool = False  # counted in job.inside
    carried: bool = False  # it is the carrier's
    good: NDArray[np.uint8] | None = None  # loads: [chunks], what they will be once the scatter is done
    soiled: bool = False  # something went wrong on the device: its bay may be in use for ever
    held: bool = False  # the carrier will give its bay back
    patience: float = 0.0  # seconds for that, before calls count as hung
    cancelled: bool = False  # the carrier was told
    given_up: bool = False  # its job has its outcome and does not count it any more
    lost: frozenset[int] = frozenset()  # chunks (by place in the batch) under writes that have not returned

    @property
    def is_load(self) -> bool:
        """Whether it is a load."""
        return self.batch.direction == LOAD
