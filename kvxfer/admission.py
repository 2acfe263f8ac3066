"""What is worth a write: a filter that waits for the second offer, a budget of bytes, and how long a queue is in time.

Many chunks are never asked for again, and every one that is written wears the drive. `SecondTouch` admits a chunk when
it is offered for the second time; `WriteBudget` bounds what is written in any stretch of time; `Backlog` says how long
what is queued will take. Then the arithmetic of a drive's life. Pure logic: the clock is given.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable

from kvxfer.errors import ConfigError

DAY_S = 86400
YEAR_S = 365.25 * DAY_S
BURST_S = 60.0  # of a budget's rate: what may be written at once, unless somebody says otherwise
LEAST_BURST = 256 << 20  # a slot is larger only where somebody meant it to be
SPEED_WINDOW_S = 10.0  # busy time after which a measured speed counts for a third (1/e) of what it did


class SecondTouch:
    """Which names were offered before: two sets of 64-bit fingerprints, of up to `names` each, which take turns.

    The young one fills; when it is full it becomes the old one, and an empty one is the young. So a name is remembered
    until at least `names`, at most twice as many, others were offered: within that time its second offer is always
    admitted, whatever came between. One that was never offered is taken for known with a probability of at most
    2 * names / 2**61: fewer than one in 10**9 for any that fits into memory. Thread-safe.

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
        self._lock = threading.Lock()

    def knows(self, name: Hashable) -> bool:
        """Whether it was offered before; takes note of nothing."""
        mark = hash(name)
        with self._lock:  # or the sets might change places in between
            return mark in self._young or mark in self._old

    def offer(self, name: Hashable) -> bool:
        """Whether it was offered before; from now on it was. Names that are equal are one."""
        mark = hash(name)
        if mark in self._young:  # without the lock: it takes as long as all the rest
            return True
        with self._lock:
            known = mark in self._old or mark in self._young
            if len(self._young) >= self._names:
                self._old, self._young = self._young, set()
            self._young.add(mark)
            return known


class WriteBudget:
    """A token bucket of bytes: over any stretch of `t` seconds at most `bytes_per_s * t + burst_bytes` are taken.

    Starts full. However far the clock jumps, it never holds more than the burst; a clock that goes back gives nothing
    until it has caught up. Thread-safe.
    """

    def __init__(
        self,
        bytes_per_s: float,
        burst_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        sharers: Callable[[], int] = lambda: 1,
    ) -> None:
        """
        Args:
            clock: seconds.
            sharers: how many such buckets share the rate just now, this one included; each has a burst of its own.

        Raises:
            ConfigError: a rate or a burst that is not positive and finite.
        """
        if not 0 < bytes_per_s < math.inf:
            raise ConfigError(f"bytes_per_s={bytes_per_s!r} must be positive and finite")
        if not 0 < burst_bytes < math.inf:
            raise ConfigError(f"burst_bytes={burst_bytes!r} must be positive and finite")
        self.bytes_per_s, self.burst_bytes = float(bytes_per_s), burst_bytes
        self._clock, self._sharers, self._lock = clock, sharers, threading.Lock()
        self._tokens, self._at = float(burst_bytes), clock()

    def take(self, nbytes: int) -> bool:
        """Take all of `nbytes`, or nothing: False."""
        return self.take_some(nbytes, 1) == 1

    def take_some(self, nbytes: int, most: int) -> int:
        """Take `nbytes` as often as there is enough, at most `most` times; how often."""
        with self._lock:
            taken = max(0, min(most, int(self._fill() // nbytes)))
            self._tokens -= taken * nbytes
            return taken

    def give_back(self, nbytes: int) -> None:
        """Of what was taken, bytes that are not going to be written after all."""
        with self._lock:
            self._tokens = min(float(self.burst_bytes), self._fill() + nbytes)

    def available(self) -> float:
        """Bytes that could be taken now."""
        with self._lock:
            return self._fill()

    def _fill(self) -> float:
        now = self._clock()
        if now > self._at:
            earned = (now - self._at) * self.bytes_per_s / max(1, self._sharers())
            self._tokens = min(float(self.burst_bytes), self._tokens + earned)
            self._at = now
        return self._tokens


class Backlog:
    """How long what is queued will take: its bytes, over the speed at which the device took bytes lately.

    The speed is bytes over busy seconds, both of them fading with SPEED_WINDOW_S. Time counts while something is
    queued, the time since the last write that ended included: a device that hangs gets slow. Before the first write has
    ended there is no speed, and the queue is as long as it has been waiting. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds.
        """
        self._clock, self._lock = clock, threading.Lock()
        self._queued = 0
        self._bytes = self._busy_s = 0.0
        self._since = 0.0  # when the last write ended, or the queue began if that was later

    def add(self, nbytes: int) -> None:
        """So many bytes are queued; negative: are not any more."""
        with self._lock:
            if not self._queued:
                self._since = self._clock()
            self._queued += nbytes

    def wrote(self, nbytes: int) -> None:
        """So many bytes were written. Call it before `add` takes them off the queue. 0: a write failed, and says no
        more than that the device answers."""
        with self._lock:
            now = self._clock()
            busy = max(0.0, now - self._since)
            if nbytes > 0:
                fade = math.exp(-busy / SPEED_WINDOW_S)
                self._bytes = self._bytes * fade + nbytes
                self._busy_s = self._busy_s * fade + busy
            self._since = now

    @property
    def bytes_per_s(self) -> float | None:
        """The measured speed; None before there is one."""
        with self._lock:
            return self._bytes / self._busy_s if self._busy_s > 0 else None

    def seconds(self) -> float:
        """How long what is queued will take, at the speed of late."""
        with self._lock:
            if self._queued <= 0:
                return 0.0
            waited = max(0.0, self._clock() - self._since)
            return self._queued * (self._busy_s + waited) / self._bytes if self._bytes else waited


def usual_burst(bytes_per_s: float) -> int:
    """What a budget of that rate lets be written at once after a pause."""
    return max(LEAST_BURST, int(BURST_S * bytes_per_s))


def dwpd_to_bytes_per_s(dwpd: float, drive_bytes: int) -> float:
    """The rate of so many drive-writes-per-day of a drive of that size."""
    return dwpd * drive_bytes / DAY_S


def life_years(bytes_per_s: float, endurance_bytes: float) -> float:
    """How long a drive lives that is written at a steady rate; infinity where nothing is written.

    Args:
        bytes_per_s: what reaches the device, write amplification included.
        endurance_bytes: what its maker warrants: TBW * 1e12, or `dwpd_to_endurance_bytes`.
    """
    return endurance_bytes / bytes_per_s / YEAR_S if bytes_per_s > 0 else math.inf


def dwpd_to_endurance_bytes(dwpd: float, drive_bytes: int, warranty_years: float) -> float:
    """All bytes that a rating of drive-writes-per-day lets be written within the warranty."""
    return dwpd_to_bytes_per_s(dwpd, drive_bytes) * YEAR_S * warranty_years
