"""What an engine lets through to the storage: its switch, a breaker each for loads and stores, what is worth a write.

Two breakers, because a disk that is full, or that went read-only, still answers loads. A failure is a chunk whose call
gave an errno (ENOSPC from a write included), that no thread was left for, or whose call never returned. Damage, misses,
deadlines, cancellations and a store that has no slot to give are none: the device answered, or was not asked.

Of a store, what is there already drops out first and costs nothing. Of the rest, in prefix order: what was not offered
before (`second_touch_names`), then what the write budget does not hold; each cuts a chain, since chunks behind one that
is not there are of no use. Nothing is kept to be tried again: what was left out is written when a server offers it
again. Stores that come while the queue is too long (`max_queue_s`) are refused at submit, as a whole.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvxfer.admission import Backlog, SecondTouch, WriteBudget
from kvxfer.breaker import Breaker, BreakerState, Permit
from kvxfer.config import EngineConfig
from kvxfer.errors import ConfigError
from kvxfer.jobs import LOAD, STORE, JobOutcome, Status
from kvxfer.keys import group_of
from kvxfer.observe import DIRECTIONS
from kvxfer.report import engine_reporter
from kvxfer.results import PendingJob
from kvxfer.store import Access

DISABLE = "KVXFER_DISABLE"  # 1: engines start turned off


class Intake:
    """Thread-safe; memory only, so that asking never blocks."""

    def __init__(
        self,
        config: EngineConfig,
        stats: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
        refusal: Callable[[], Status | None] = lambda: None,
        budget: WriteBudget | None = None,
        second_touch: SecondTouch | None = None,
    ) -> None:
        """
        Args:
            stats: of the runner, for calls that never return.
            clock: seconds.
            refusal: why the runner would try nothing.
            budget: of the store.
            second_touch: shared with others that may store the same chunks; None: one of its own, if it is to have one.

        Raises:
            ConfigError: KVXFER_DISABLE is neither 0 nor 1.
        """
        self._stats, self._refusal = stats, refusal
        self._lock = threading.Lock()
        self._enabled = not _disabled()
        self._breakers = {
            direction: Breaker(
                failures=config.breaker_failures,
                cooldown_s=config.breaker_cooldown_s,
                max_cooldown_s=config.breaker_max_cooldown_s,
                probes=config.breaker_probe_chunks,
                clock=clock,
            )
            for direction in DIRECTIONS
        }
        self._lost = {LOAD: 0, STORE: 0}  # calls, as far as the breakers know
        self.backlog, self._max_queue_s = Backlog(clock), config.max_queue_s
        self.dropped = {LOAD: 0, STORE: 0}  # chunks that found the queue full
        self._most = {LOAD: config.max_queued_load_chunks, STORE: config.max_queued_store_chunks}
        self._budget = budget
        if second_touch is None and config.second_touch_names:
            second_touch = SecondTouch(config.second_touch_names)
        self._second_touch = second_touch
        if not self._enabled:
            engine_reporter.warn("switch", f"{DISABLE} is set: this engine starts turned off")

    @property
    def enabled(self) -> bool:
        """Whether the switch is on."""
        return self._enabled

    def turn(self, on: bool) -> None:
        """Set the switch."""
        self._enabled = on

    def refusal(self, direction: int) -> Status | None:
        """Why nothing at all of a job would pass now; None where something may."""
        if not self._enabled:
            return Status.OFF
        if (refused := self._refusal()) is not None:
            return refused
        with self._lock:
            if self._breakers[direction].state() is BreakerState.OPEN:
                return Status.BREAKER
        behind = direction == STORE and self._max_queue_s is not None and self.backlog.seconds() > self._max_queue_s
        return Status.BACKLOG if behind else None

    def verdict(self, direction: int, queued: int, chunks: int, access: Access | None = None) -> Status | None:
        """Why a job of `chunks` chunks is refused as a whole, beside `queued` others; None: it is queued. One thread's
        at a time.

        Args:
            access: of the request. Where the budget or the backlog has cut one, its stores are refused from then on:
                they would be of no use, and cost no more than this.
        """
        if direction == STORE and access is not None and access.cut is not None:
            return Status(access.cut)
        if queued + chunks > self._most[direction]:
            self.dropped[direction] += chunks
            return Status.DROPPED
        if (refused := self.refusal(direction)) is Status.BACKLOG and access is not None:
            access.cut = refused
        return refused

    def sift(
        self, keys: Sequence[bytes], slot_bytes: int, access: Access | None = None
    ) -> tuple[list[int], dict[int, Status]]:
        """Which chunks of a store to write, by their place in it, and why the others not. Takes their bytes of the
        budget; what is not written after all must come back to `unspent`.

        Args:
            keys: of those that are not there, in prefix order (of each group).
            slot_bytes: what each of them takes.
            access: as for `verdict`.
        """
        if (
            access is not None and access.cut == Status.BUDGET
        ):  # by a store before this one, when this was queued already
            return [], dict.fromkeys(range(len(keys)), Status.BUDGET)
        wanted, refused = list(range(len(keys))), dict[int, Status]()
        if self._second_touch is not None:
            wanted, cut = [], set[bytes]()
            for place, key in enumerate(keys):
                if not self._second_touch.offer(key):  # all are offered, also behind the cut
                    cut.add(group_of(key))
                if group_of(key) in cut:
                    refused[place] = Status.NOT_ADMITTED
                else:
                    wanted.append(place)
        if self._budget is None or not wanted:
            return wanted, refused
        paid = self._budget.take_some(slot_bytes, len(wanted))
        if paid < len(wanted):
            refused |= dict.fromkeys(wanted[paid:], Status.BUDGET)
            if access is not None:
                access.cut = Status.BUDGET
        return wanted[:paid], refused

    def weigh(self, job: PendingJob, nbytes: int) -> None:
        """A queued store may write so many bytes, instead of what it was before."""
        if nbytes != job.queued_bytes:
            self.backlog.add(nbytes - job.queued_bytes)
            job.queued_bytes = nbytes

    def unspent(self, nbytes: int) -> None:
        """Of what `sift` took of the budget, bytes that nobody is going to write."""
        if self._budget is not None and nbytes:
            self._budget.give_back(nbytes)

    def affords(self, slot_bytes: int) -> float:
        """How many slots the budget holds now; infinity where there is none."""
        return math.inf if self._budget is None else self._budget.available() // slot_bytes

    def room(self, chunks: int) -> int:
        """How many of the first `chunks` chunks a load would be let try."""
        if not self._enabled or self._refusal() is not None:
            return 0
        if self._breakers[LOAD].closed:  # without the lock: lookups are many, and a moment's delay does no harm
            return chunks
        with self._lock:
            return self._breakers[LOAD].room(chunks)

    def admit(self, direction: int, chunks: int) -> Permit:
        """Let the first of `chunks` chunks pass: as many as the permit says, which must come back to `settle`."""
        with self._lock:
            return self._breakers[direction].admit(chunks)

    def settle(self, direction: int, permit: Permit, outcome: JobOutcome | None) -> None:
        """What became of what passed; None: it was not tried."""
        if outcome is not None and outcome.errors and (outcome.status == Status.LOST).any():
            self.watch()  # first: what was lost would look like nothing otherwise
        answered, failed, last = _evidence(outcome)
        with self._lock:
            breaker = self._breakers[direction]
            was, opened = breaker.state(), breaker.opened
            breaker.settle(permit, answered, failed, last)
            self._say(direction, was, opened)

    def watch(self) -> None:
        """Looks for calls that never returned: a load whose deadline came first does not tell of them."""
        stats = self._stats()
        stores = stats["lost_writes"]
        lost = {STORE: stores, LOAD: stats["lost_calls"] - stores}
        with self._lock:
            for direction, breaker in self._breakers.items():
                was, opened = breaker.state(), breaker.opened
                breaker.fail(max(0, lost[direction] - self._lost[direction]))
                self._lost[direction] = max(lost[direction], self._lost[direction])
                self._say(direction, was, opened)

    def states(self) -> dict[int, tuple[BreakerState, int]]:
        """By direction the state of the breaker, and how often it has opened."""
        with self._lock:
            return {direction: (breaker.state(), breaker.opened) for direction, breaker in self._breakers.items()}

    def _say(self, direction: int, was: BreakerState, opened: int) -> None:
        breaker, what = self._breakers[direction], DIRECTIONS[direction]
        if breaker.opened > opened:
            engine_reporter.warn(
                f"breaker {what} open",
                f"the storage keeps failing: {what}s are turned off for {breaker.again_in_s:.1f} s",
                seconds=breaker.again_in_s,
            )
        elif was is not BreakerState.CLOSED and breaker.state() is BreakerState.CLOSED:
            engine_reporter.warn(f"breaker {what} closed", f"the storage answers again: {what}s are on")


def _evidence(outcome: JobOutcome | None) -> tuple[int, int, int]:
    """What a finished native job says about the device: chunks answered, failed, and failed after the last answer."""
    if outcome is None:
        return 0, 0, 0
    codes = outcome.status
    if not outcome.errors:
        return len(codes), 0, 0
    failed = np.flatnonzero((codes == Status.IO) | (codes == Status.STALLED))
    damaged = (codes >= Status.TRUNCATED) & (codes <= Status.BAD_SUM)
    answered = np.flatnonzero((codes == Status.OK) | damaged | (codes == Status.ABSENT))
    last = int(answered[-1]) if len(answered) else -1
    return len(answered), len(failed), int((failed > last).sum())


def _disabled() -> bool:
    value = os.environ.get(DISABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{DISABLE}={value!r} must be 1 (start turned off), 0 or unset")
    return value == "1"
