"""What an engine lets through to the storage: its switch, a breaker each for loads and stores, what is worth a write.

Two breakers, because a disk that is full, or that went read-only, still answers loads. A failure is a chunk whose call
gave an errno (ENOSPC from a write included), that no thread was left for, or whose call never returned. Damage, misses,
deadlines, cancellations and a store that has no slot to give are none: the device answered, or was not asked.

Of a store, what is there already drops out first and costs nothing. Of the rest, in prefix order: what is behind a gap,
then what was not offered before (`second_touch_names`), then what the write budget does not hold. Stores that come
while the queue is full or too long (`max_queue_s`) are refused at submit, as a whole.

A gap is a chunk of the request that was left out or failed, for whatever reason (store/gaps.py): chunks behind it are
of no use. Nothing is kept to be tried again. A gap that failed is tried when its request offers it again, as anything
else is; one that was left out to spare the storage (budget, backlog, no slot) when another request does.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache

import numpy as np

from kvxfer.admission import Backlog, SecondTouch, WriteBudget
from kvxfer.breaker import Breaker, BreakerState, Permit
from kvxfer.config import EngineConfig
from kvxfer.errors import ConfigError
from kvxfer.jobs import LOAD, STORE, JobOutcome, Status
from kvxfer.observe import DIRECTIONS
from kvxfer.report import engine_reporter
from kvxfer.results import PendingJob
from kvxfer.store import Access, Gaps

Present = Callable[[bytes], bool]  # whether a key is in the store

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

    def verdict(self, direction: int, queued: int, chunks: int) -> Status | None:
        """Why a job of `chunks` chunks is refused as a whole, beside `queued` others; None: it is queued. One thread's
        at a time."""
        if queued + chunks > self._most[direction]:
            self.dropped[direction] += chunks
            return Status.DROPPED
        return self.refusal(direction)

    def sift(
        self, keys: Sequence[bytes], slot_bytes: int, access: Access, present: Present
    ) -> tuple[list[int], dict[int, Status]]:
        """Which chunks of a store to write, by their place in it, and why the others not. Takes their bytes of the
        budget; what is not written after all must come back to `unspent`.

        Args:
            keys: of those that are not there, in prefix order (of each group).
            slot_bytes: what each of them takes.
            access: of the request; knows what stores before this one left out, those that came when this was queued.
            present: whether a chunk that was left out is there by now.
        """
        gaps = access.gaps
        if self._second_touch is None and not gaps:
            wanted, refused = list(range(len(keys))), dict[int, Status]()
        else:
            wanted, refused, clear = [], {}, set[bytes]()
            present = cache(present)
            for place, key in enumerate(keys):
                known = self._second_touch is None or self._second_touch.offer(key)  # also behind a gap
                why = _held_back(gaps, key, present, clear) or (None if known else Status.NOT_ADMITTED)
                if why is None:
                    gaps.close(key)
                    clear.add(key)
                    wanted.append(place)
                else:
                    gaps.open(key, why)
                    refused[place] = why
        if self._budget is None or not wanted:
            return wanted, refused
        paid = self._budget.take_some(slot_bytes, len(wanted))
        return wanted[:paid], refused | dict.fromkeys(wanted[paid:], Status.BUDGET)

    def spared(self, keys: Sequence[bytes], access: Access, present: Present) -> dict[int, Status]:
        """Why not, by their places, where all of a store that is not there was left out to spare the storage.

        So a server that offers them with every step has its answer at once. Empty: there is more to it.
        """
        if not (gaps := access.gaps):
            return {}
        found: dict[int, Status] = {}
        present = cache(present)
        for place, key in enumerate(keys):
            why = _held_back(gaps, key, present)
            if why is None or not why.is_shed:
                return {}
            found[place] = why
        return found

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


def place_over_roots(keys: Sequence[bytes], access: Access, present: Present) -> None:
    """Notes the keys of a store whose chunks several roots get: their parts share the request's gaps, which are places
    in its whole chain. Gaps that any root has filled, or that may be tried again, are closed here, since who has one
    root asks its own store, and knows its own part, alone.

    Args:
        present: whether a key is in any root.
    """
    access.place(keys).gaps.close_some(keys, cache(present), lambda why: not Status(why).is_shed)


def _held_back(gaps: Gaps, key: bytes, present: Present, clear: Container[bytes] = ()) -> Status | None:
    """Why a request's chunk is not tried: it is behind a gap, or one that is not tried again. None: it may be."""
    if (why := gaps.ahead(key, present, clear)) is not None:
        return Status(why).behind
    own = gaps.at(key)
    return Status(own) if own is not None and Status(own).is_shed else None


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
