"""What is worth a write: a filter that waits for the second offer, and a budget of bytes. Pure logic; no own clock.

Most chunks of most servers are never asked for again, and every one that is written wears the drive. `SecondTouch`
admits a chunk when it is offered for the second time; `WriteBudget` bounds what is written in any stretch of time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

from kvxfer.errors import ConfigError

DAY_S = 86400


class SecondTouch:
    """Which names were offered before: two sets of 64-bit fingerprints, of up to `names` each, which take turns.

    The young one fills; when it is full it becomes the old one, and an empty one is the young. So a name is remembered
    until at least `names`, at most twice as many, others were offered: within that time its second offer is always
    admitted, whatever came between. One that was never offered is taken for known with a probability of at most
    2 * names / 2**61: fewer than one in 10**12. Not thread-safe.

    Memory: up to 170 bytes for each of `names`, both sets full.
    """

    def __init__(self, names: int) -> None:
        """
        Raises:
            ConfigError: `names` is no positive integer.
        """
        if type(names) is not int or names < 1:
            raise ConfigError(f"names={names!r} must be a positive integer")
        self._names = names
        self._young: set[int] = set()
        self._old: set[int] = set()

    def offer(self, name: Hashable) -> bool:
        """Whether it was offered before; from now on it was. Names that are equal are one."""
        mark = hash(name)
        if mark in self._young:
            return True
        known = mark in self._old
        if len(self._young) == self._names:
            self._old, self._young = self._young, set()
        self._young.add(mark)
        return known


class WriteBudget:
    """A token bucket of bytes: over any stretch of `t` seconds at most `bytes_per_s * t + burst_bytes` are taken.

    Starts full. However far the clock jumps, it never holds more than the burst; a clock that goes back gives nothing
    until it has caught up. Thread-safe.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds.

        Raises:
            ConfigError: a rate or a burst that is not positive and finite.
        """
        if not 0 < bytes_per_s < float("inf"):
            raise ConfigError(f"bytes_per_s={bytes_per_s!r} must be positive and finite")
        if not 0 < burst_bytes < 1 << 62:
            raise ConfigError(f"burst_bytes={burst_bytes!r} must be positive")
        self.bytes_per_s, self.burst_bytes = float(bytes_per_s), burst_bytes
        self._clock, self._lock = clock, threading.Lock()
        self._tokens, self._at = float(burst_bytes), clock()

    def take(self, nbytes: int) -> bool:
        """Take all of `nbytes`, or nothing: False."""
        with self._lock:
            if nbytes > self._fill():
                return False
            self._tokens -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Of what was taken, bytes that were not written after all."""
        with self._lock:
            self._tokens = min(float(self.burst_bytes), self._fill() + nbytes)

    def available(self) -> float:
        """Bytes that could be taken now."""
        with self._lock:
            return self._fill()

    def _fill(self) -> float:
        now = self._clock()
        if now > self._at:
            self._tokens = min(float(self.burst_bytes), self._tokens + (now - self._at) * self.bytes_per_s)
            self._at = now
        return self._tokens


def dwpd_to_bytes_per_s(dwpd: float, drive_bytes: int) -> float:
    """The rate of so many drive-writes-per-day of a drive of that size."""
    return dwpd * drive_bytes / DAY_S


def life_years(bytes_per_s: float, endurance_bytes: float) -> float:
    """How long a drive lives that is written at a steady rate; infinity where nothing is written.

    Args:
        bytes_per_s: what reaches the device, write amplification included.
        endurance_bytes: what its maker warrants: TBW * 1e12, or `dwpd_to_endurance_bytes`.
    """
    return endurance_bytes / bytes_per_s / (365.25 * DAY_S) if bytes_per_s > 0 else float("inf")


def dwpd_to_endurance_bytes(dwpd: float, drive_bytes: int, warranty_years: float) -> float:
    """All bytes that a rating of drive-writes-per-day lets be written within the warranty."""
    return dwpd * drive_bytes * 365.25 * warranty_years
