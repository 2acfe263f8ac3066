"""Threads for calls into libraries that may never return.

The threads are daemons: a call that hangs holds up neither its caller nor the interpreter's exit. One that outlives its
time is given up, and its thread replaced, as often as `max_lost` allows; then what is queued fails at once.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvxfer.errors import ConfigError, ForkError, IOFault, StoreError
from kvxfer.io.base import IOFuture

_RETRY_S = 0.1  # until a thread that could not be started is tried again


class Call(IOFuture):
    """A call on one of the threads. What it works with must live until `returned`."""

    def __init__(self, work: Callable[[], int], label: str) -> None:
        self.label = label
        self.started: float | None = None  # seconds, of the threads' clock
        self.stalled = False  # no thread was left to run it
        self._work: Callable[[], int] | None = work
        self._settled, self._back = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._answer: int | BaseException = 0

    def get(self, timeout_s: float | None = None) -> int:
        """What the call answered.

        Raises:
            IOFault: it failed; ETIMEDOUT: it was given up, or `timeout_s` passed and it may yet end.
        """
        if not self._settled.wait(timeout_s):
            raise IOFault(errno.ETIMEDOUT, f"no answer within {timeout_s:g} s", self.label)
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def done(self) -> bool:
        """Whether it has ended, or was given up."""
        return self._settled.is_set()

    def returned(self) -> bool:
        """Whether nothing works with its memory any more. A call that was given up may still."""
        return self._back.is_set()

    @property
    def lost(self) -> bool:
        """Whether it was given up and has not returned since."""
        return self._settled.is_set() and not self._back.is_set()

    def then(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once it is done: at once, or on the thread that ends it. It must be short."""
        with self._lock:
            if not self._settled.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _settle(self, answer: int | BaseException, back: bool) -> bool:
        """Its end; False where it was given up before."""
        with self._lock:
            if back:
                self._work = None
                self._back.set()
            if self._settled.is_set():
                return False
            self._answer = answer
            self._settled.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        return True

    def _run(self) -> int | BaseException:
        assert self._work is not None
        try:
            return self._work()
        except BaseException as exc:  # it belongs to whoever asks for the answer
            return exc


class Workers:
    """`threads` daemon threads. Thread-safe; not usable in a forked child.

    Args:
        threads: calls under way at once.
        io_timeout_s: a call that runs longer is given up; infinity: never.
        max_lost: threads in such calls that are replaced.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        *,
        io_timeout_s: float = float("inf"),
        max_lost: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(threads) is not int or threads < 1:
            raise ConfigError(f"threads={threads!r} must be an integer of at least 1")
        if not io_timeout_s > 0 or max_lost < 0:
            raise ConfigError(f"io_timeout_s={io_timeout_s} must be positive, max_lost={max_lost} not negative")
        self._name, self._clock, self._pid = name, clock, os.getpid()
        self._wanted, self._timeout_s, self._max_lost = threads, io_timeout_s, max_lost
        self._changed = threading.Condition()
        self._queue: deque[Call] = deque()
        self._running: set[Call] = set()
        self._in_service = self._idle = self._lost = 0
        self._lost_calls = self._late_returns = 0
        self._watched = self._closed = False

    def submit(self, work: Callable[[], int], label: str) -> Call:
        """Queues a call; `label` names it in errors.

        Raises:
            StoreError: closed.
            IOFault: EAGAIN: the system gives no thread, and there is none.
            ForkError: in a fork of the process that made the threads.
        """
        self.check_process()
        call = Call(work, label)
        with self._changed:
            if self._closed:
                raise StoreError(f"the {self._name} backend is closed")
            stalled = self._stalled
            if not stalled:
                self._queue.append(call)
                more = self._idle < len(self._queue) and self._in_service + self._beyond < self._wanted
                if more and not self._start() and not self._in_service:
                    self._queue.remove(call)
                    raise IOFault(errno.EAGAIN, "no thread can be started", label)
                self._changed.notify_all()
        if stalled:
            call._settle(self._no_thread(call), back=True)
        return call

    def check_process(self) -> None:
        """Raises ForkError in a fork of the process that made this."""
        if os.getpid() != self._pid:
            raise ForkError(
                f"this {self._name} backend belongs to process {self._pid}; process {os.getpid()} is a fork of it: "
                "open a store and an engine after the fork"
            )

    def stats(self) -> dict[str, int]:
        """threads, busy_threads, queued, lost_threads (in calls that were given up), lost_calls, late_returns."""
        with self._changed:
            return {
                "threads": self._in_service,
                "busy_threads": len(self._running),
                "queued": len(self._queue),
                "lost_threads": self._lost,
                "lost_calls": self._lost_calls,
                "late_returns": self._late_returns,
            }

    def close(self) -> None:
        """No further calls. Waits for nothing: what was queued runs to its end. Twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _beyond(self) -> int:
        """Lost threads that may not be replaced: so many fewer are in service."""
        return max(0, self._lost - self._max_lost)

    @property
    def _stalled(self) -> bool:
        return self._beyond >= self._wanted

    def _start(self) -> bool:
        """One more thread; False where the system has none to give."""
        try:
            if not self._watched and self._timeout_s != float("inf"):
                threading.Thread(target=self._watch, name=f"kvx-{self._name}-watch", daemon=True).start()
                self._watched = True
            threading.Thread(target=self._serve, name=f"kvx-{self._name}", daemon=True).start()
        except RuntimeError:
            return False
        self._in_service += 1
        return True

    def _serve(self) -> None:
        while (call := self._take()) is not None:
            answer = call._run()
            with self._changed:
                given_up = call not in self._running
                self._running.discard(call)
                if given_up:
                    self._lost -= 1
                    self._late_returns += 1
            call._settle(answer, back=True)
            if given_up:
                return  # another took its place, or will with the next call

    def _take(self) -> Call | None:
        with self._changed:
            self._idle += 1
            while not self._queue and not self._closed:
                self._changed.wait()
            self._idle -= 1
            if not self._queue:
                self._in_service -= 1
                return None
            call = self._queue.popleft()
            call.started = self._clock()
            self._running.add(call)
            self._changed.notify_all()
            return call

    def _watch(self) -> None:
        while True:
            with self._changed:
                now = self._clock()
                overdue = [call for call in self._running if now - (call.started or now) >= self._timeout_s]
                for call in overdue:
                    self._give_up(call)
                stalled = list(self._queue) if self._stalled else []
                if stalled:
                    self._queue.clear()
                if not overdue and not stalled:
                    if self._closed and not self._queue and not self._running:
                        return
                    firsts = [call.started for call in self._running if call.started is not None]
                    left = min(firsts) + self._timeout_s - now if firsts else None
                    if self._queue and not self._in_service and not self._start():
                        left = _RETRY_S if left is None else min(left, _RETRY_S)
                    self._changed.wait(left)
                    continue
            for call in overdue:
                what = f"{call.label}: no answer within {self._timeout_s:g} s: given up"
                call._settle(IOFault(errno.ETIMEDOUT, what, call.label), back=False)
            for call in stalled:
                call._settle(self._no_thread(call), back=True)

    def _give_up(self, call: Call) -> None:
        self._running.discard(call)
        self._lost += 1
        self._lost_calls += 1
        self._in_service -= 1
        if self._in_service + self._beyond < self._wanted and self._queue:
            self._start()

    def _no_thread(self, call: Call) -> IOFault:
        call.stalled = True
        return IOFault(errno.ENOBUFS, f"no thread left: {self._lost} calls never returned", call.label)
