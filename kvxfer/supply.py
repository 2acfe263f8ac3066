"""Slots at hand for a caller who may not wait, and commits that it does not wait for.

Reserving and committing may block on the disk, the index and other processes. So a thread keeps some slots reserved
ahead of what is asked for, publishes what was written, and goes on in the namespace of a weight epoch that was raised.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvxfer.errors import IOFault, StoreError
from kvxfer.keys import Namespace
from kvxfer.registration import Registration
from kvxfer.report import engine_reporter
from kvxfer.slot import SlotLayout
from kvxfer.store import Access, Reservation, Store

BATCH = 64  # slots reserved at once: a take meanwhile waits for no more than the caller's own lock
WATCH_S = 0.1  # how long the thread sleeps at most, and how long it leaves a store alone that gave nothing
IDLE_S = 10.0  # after so long without a take, half of what is above the least is given back

Item = tuple[bytes, Reservation, int]
Committed = Callable[[list[bool]], None]


class SlotSupply:
    """A store's slots of one layout, some of them reserved ahead. All methods but `close` return at once.

    Args:
        store: open; stays the caller's.
        namespace: registered here, and anew when the weight epoch is raised.
        least, most: slots to have at hand: at rest, and after more than that was asked for at once.
    """

    def __init__(self, store: Store, namespace: Namespace, slot: SlotLayout, *, least: int, most: int) -> None:
        self._store, self._slot = store, slot
        self._registration = Registration(store, namespace, slot)
        self._least, self._most = min(least, most), most
        self._target = self._least
        self._work = threading.Condition()
        self._free: deque[Reservation] = deque()
        self._commits: deque[tuple[bytes, Sequence[Item], Committed, Access | None]] = deque()
        self._committing = False
        self._taken_at = self._retry_at = time.monotonic()
        self._stop = self._outdated = False
        self._raise_at = self._taken_at
        self._refill()  # while starting, a caller may wait: the first store finds slots
        self._thread = threading.Thread(target=self._serve, name="kvxfer-supply", daemon=True)
        self._thread.start()

    @property
    def digest(self) -> bytes:
        """Of the namespace that tickets which start now are about."""
        return self._registration.digest

    @property
    def at_hand(self) -> int:
        """How many slots `take` would find."""
        return len(self._free)

    def take(self, n: int) -> list[Reservation]:
        """Up to n slots; fewer where there are no more at hand, and then more will be another time."""
        with self._work:
            taken = [self._free.popleft() for _ in range(min(n, len(self._free)))]
            self._taken_at = time.monotonic()
            if len(taken) < n:
                self._target = min(self._most, max(2 * self._target, self._target + n))
            self._work.notify_all()
        return taken

    def commit(self, digest: bytes, items: Sequence[Item], done: Committed, access: Access | None = None) -> None:
        """Publish what was written, in `digest`; the thread then calls `done` with an answer for each item."""
        with self._work:
            if not self._stop:
                self._commits.append((digest, items, done, access))
                self._work.notify_all()
                return
        self._store.release([slot for _, slot, _ in items])
        done([False] * len(items))

    @property
    def outdated(self) -> bool:
        """Whether what is stored is of weights that are no more, and it is not on the drive yet that it is a miss."""
        return self._outdated

    def raise_epoch(self, timeout: float) -> bool:
        """Makes all that is stored a miss. False: not within `timeout` seconds; it is tried until it succeeds."""
        with self._work:
            self._outdated = True
            self._work.notify_all()
            return self._work.wait_for(lambda: not self._outdated, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until everything is committed. False if `timeout` seconds did not suffice."""
        with self._work:
            return self._work.wait_for(lambda: not self._commits and not self._committing, timeout)

    def close(self, timeout: float) -> bool:
        """Commit what is queued, give the slots at hand back and end. False: the thread is in a call of its own."""
        with self._work:
            self._stop = True
            self._work.notify_all()
        self._thread.join(max(0.0, timeout))
        with self._work:
            free, self._free = list(self._free), deque()
            left, self._commits = list(self._commits), deque()
        self._store.release(free)
        for _, items, done, _ in left:
            self._store.release([slot for _, slot, _ in items])
            done([False] * len(items))
        return not self._thread.is_alive()

    # ---- the thread's side -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(self._has_work, WATCH_S)
                commits, self._commits = list(self._commits), deque()
                self._committing = bool(commits)
                stop = self._stop
            for digest, items, done, access in commits:
                self._tell(done, self._publish(digest, items, access))
            with self._work:
                self._committing = False
                self._work.notify_all()
            if stop and not self._outdated:
                return
            try:
                self._raise_epoch()
                if stop:
                    return
                self._registration.renew()
                self._refill()
                self._shrink()
            except Exception as exc:  # a defect, or a store that was closed: the thread must go on, or nothing commits
                engine_reporter.failed("supply", "slots cannot be had", exc)
                self._retry_at = time.monotonic() + WATCH_S
                if stop:
                    return

    def _has_work(self) -> bool:
        lacking = len(self._free) < self._target and time.monotonic() >= self._retry_at
        outdated = self._outdated and time.monotonic() >= self._raise_at
        return bool(self._commits) or self._stop or lacking or outdated

    def _publish(self, digest: bytes, items: Sequence[Item], access: Access | None) -> list[bool]:
        try:
            return self._store.commit(digest, items, access)
        except Exception as exc:  # a store that was closed, no memory: whoever waits for it must hear of it
            engine_reporter.failed("commit", f"{len(items)} written chunks could not be committed", exc)
            self._store.release([slot for _, slot, _ in items])
            return [False] * len(items)

    def _tell(self, done: Committed, answers: list[bool]) -> None:
        try:
            done(answers)
        except Exception as exc:  # a defect of whoever waited: the thread must go on, or nothing commits
            engine_reporter.warn("commit defect", "a commit could not be told", exc_info=exc)

    def _raise_epoch(self) -> None:
        """Writes it down that all that is stored is of no use, where that is so."""
        if not self._outdated or (time.monotonic() < self._raise_at and not self._stop):
            return
        before = self._store.weight_epoch
        try:
            self._store.bump_epoch()
        except (StoreError, IOFault) as exc:
            engine_reporter.warn("epoch", f"the weight epoch cannot be raised; all is a miss here until it is: {exc}")
            if self._store.weight_epoch == before:
                self._raise_at = time.monotonic() + WATCH_S
                return
        self._registration.renew()
        with self._work:
            self._outdated = False
            self._work.notify_all()

    def _refill(self) -> None:
        """Reserves what is lacking."""
        while not self._stop and not self._commits and time.monotonic() >= self._retry_at:
            lacking = min(BATCH, self._target - len(self._free))
            if lacking < 1:
                return
            got = self._store.reserve(self.digest, self._slot, lacking)
            with self._work:
                self._free.extend(got)
            if len(got) < lacking:  # full of what is in use, or the disk gives no more: not asked at every step
                self._retry_at = time.monotonic() + WATCH_S

    def _shrink(self) -> None:
        """Gives back what a rush needed, once nobody asks for it any more."""
        with self._work:
            if self._target == self._least or time.monotonic() - self._taken_at < IDLE_S:
                return
            self._taken_at = time.monotonic()
            self._target = max(self._least, self._target // 2)
            surplus = [self._free.pop() for _ in range(max(0, len(self._free) - self._target))]
        self._store.release(surplus)
