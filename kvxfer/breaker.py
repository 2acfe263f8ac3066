"""When a tier that keeps failing is turned off, and how it comes back.

Closed: everything passes. After `failures` failures in a row, without one answer from the device between them, it
opens: nothing passes, for a cool-down. Then it is half open: up to `probes` chunks at once may try. One that fails
opens it again, for twice as long; one that the device answers closes it. In a row, rather than a share of a window:
a device that still answers some of the time is worth asking, since what fails of a load is merely recomputed.

Pure logic: no thread, no lock, no clock of its own. Whoever uses it from several threads holds a lock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

JITTER = 0.25  # a cool-down is longer by up to this share, so that servers on one device do not probe in step


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"  # everything
    HALF_OPEN = "half_open"  # a few probes
    OPEN = "open"  # nothing


@dataclass(frozen=True, slots=True)
class Permit:
    """That `chunks` chunks may pass. Goes back to `settle`, once, with what became of them."""

    chunks: int
    period: int  # of the breaker; one of an earlier period decides nothing any more


class Breaker:
    """Counts failures of one direction of one tier."""

    def __init__(
        self,
        *,
        failures: int,
        cooldown_s: float,
        max_cooldown_s: float,
        probes: int,
        clock: Callable[[], float],
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            failures: in a row that open it; 0: it never opens.
            cooldown_s, max_cooldown_s: the first, and the longest, time that it stays open.
            probes: chunks that may try at once while it is half open.
            clock: seconds.
            uniform: a number in [0, 1), for the jitter.
        """
        self._most, self._cooldown_s, self._max_cooldown_s, self._probes = failures, cooldown_s, max_cooldown_s, probes
        self._clock, self._uniform = clock, uniform
        self._open = self._half = False
        self._in_a_row = 0
        self._again_at = 0.0
        self._round = 0  # times that it was opened since it was closed
        self._period = 0  # grows with every change
        self._probing = 0  # chunks under way while half open
        self.opened = 0  # times, since the start

    @property
    def closed(self) -> bool:
        """Everything passes. Cheaper than `state`, and true of what another thread just did or is about to undo."""
        return not (self._open or self._half)

    def state(self) -> BreakerState:
        """As it is now; becomes half open by itself when the cool-down is over."""
        # Half open, the same again once all probes have been away for the longest cool-down: nobody tells of them.
        spent = self._half and self._probing >= self._probes
        if (self._open or spent) and (now := self._clock()) >= self._again_at:
            self._open, self._half, self._probing = False, True, 0
            self._again_at = now + self._max_cooldown_s
            self._period += 1
        if self._open:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN if self._half else BreakerState.CLOSED

    def room(self, chunks: int) -> int:
        """How many of `chunks` chunks would pass now; takes nothing."""
        state = self.state()
        if state is BreakerState.CLOSED:
            return chunks
        return min(chunks, self._probes - self._probing) if state is BreakerState.HALF_OPEN else 0

    def admit(self, chunks: int) -> Permit:
        """Let the first of `chunks` chunks pass: as many as the permit says."""
        passing = self.room(chunks)
        if self._half:
            self._probing += passing
            self._again_at = self._clock() + self._max_cooldown_s
        return Permit(passing, self._period)

    def settle(self, permit: Permit, answered: int, failed: int, failed_last: int) -> None:
        """Say what became of what was let through.

        Args:
            answered: chunks that the device answered, whether or not the answer was any good.
            failed: chunks whose storage calls failed. The rest says nothing about the device.
            failed_last: of `failed`, those after the last that was answered.
        """
        if permit.period != self._period or self._open:
            return
        if self._half:
            self._probing = max(0, self._probing - permit.chunks)
            if failed:
                self._trip()
            elif answered:
                self._half, self._in_a_row, self._round = False, 0, 0
                self._period += 1
            return
        self._in_a_row = failed_last if answered else self._in_a_row + failed
        self._check()

    def fail(self, calls: int) -> None:
        """Calls failed that no permit tells about: those that never returned."""
        if not calls or self.state() is BreakerState.OPEN:
            return
        if self._half:
            self._trip()
        else:
            self._in_a_row += calls
            self._check()

    def _check(self) -> None:
        if self._most and self._in_a_row >= self._most:
            self._trip()

    def _trip(self) -> None:
        cooldown = min(self._cooldown_s * 2 ** min(self._round, 30), self._max_cooldown_s)
        self._again_at = self._clock() + cooldown * (1 + JITTER * self._uniform())
        self._open, self._half, self._in_a_row, self._probing = True, False, 0, 0
        self._round += 1
        self._period += 1
        self.opened += 1

    @property
    def again_in_s(self) -> float:
        """Seconds until probes may pass; 0 where it is not open."""
        return max(0.0, self._again_at - self._clock()) if self.state() is BreakerState.OPEN else 0.0
