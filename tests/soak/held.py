"""A call that does not return, and what must end without it."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from kvxfer.config import EngineConfig
from kvxfer.engine import TransferEngine
from kvxfer.results import TransferResult
from tests.soak.scene import WAIT_S, Scene, Session

IO_TIMEOUT_S = 0.3  # calls that take longer are given up: an honest one, too, on a machine that stands still
SHORT_S = 0.1  # for an end that leaves a hanging call behind
LOOK_S = 0.02


class Held:
    """Decides when the one call that hangs goes on, and looks at what ends meanwhile.

    `stuck`: only after everything was shut down around it; else as soon as what it held up has ended. Whose call it was
    is counted in `where`: "own", the caller's (an open waits for its calls; nothing else can be asked of it), "job" (a
    thread of the engine's, or one that it needs no more), "stores" (the stores' thread), "close".
    """

    def __init__(self, hits: Callable[[], int], release: Callable[[], None], stuck: bool) -> None:
        """hits: how many calls hang or hung; release: they go on."""
        self._hits, self._release, self.stuck = hits, release, stuck
        self.where: Counter[str] = Counter()
        self._own, self._over = threading.Event(), threading.Event()
        self._released = False
        self._lock = threading.Lock()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Held:
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go("never")
        self._over.set()
        self._keeper.join()

    @property
    def hangs(self) -> bool:
        """Whether it does at this moment."""
        return not self._released and self._hits() > 0

    def let_go(self, where: str) -> None:
        """It goes on, if it hangs."""
        with self._lock:
            if self.hangs:
                self._released = True
                self.where[where] += 1
                self._release()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Calls of the caller's own thread: none of them hangs for long in here."""
        self._own.set()
        try:
            yield
        finally:
            self._own.clear()

    def _keep(self) -> None:
        while not self._over.wait(0.001):
            if self._own.is_set():
                self.let_go("own")


class Cut(Exception):
    """The session ends here: its stores' thread is in a call that does not return."""


class HeldSession(Session):
    """One in which a call may hang: everything that promises to end does, with that call as it is."""

    def __init__(self, held: Held, *args: Any, **named: Any) -> None:
        self.held = held
        super().__init__(*args, **named)

    def how(self) -> EngineConfig:
        """Gives calls up soon."""
        return replace(super().how(), io_timeout_s=IO_TIMEOUT_S)

    def own(self) -> AbstractContextManager[None]:
        """Calls in here go on at once."""
        return self.held.own()

    def load(self, numbers: Sequence[int], deadline: float | None = None) -> list[int]:
        """With a deadline: its result comes then, and no byte is written after it."""
        came = super().load(numbers, time.monotonic() + IO_TIMEOUT_S if deadline is None else deadline)
        self._go_on()
        return came

    def save(self, numbers: Sequence[int]) -> list[int]:
        """Ends when its calls were given up, or their thread goes on."""
        stored = super().save(numbers)
        self._go_on()
        return stored

    def keep(self, numbers: Sequence[int]) -> None:
        """What came too late may come again."""
        until(lambda: self.load(numbers) == numbers, f"{numbers} are loaded")

    def _go_on(self) -> None:
        if self.held.hangs and not self.held.stuck:
            self.held.let_go("job")
            self._settle()

    def _settle(self) -> None:
        """Whatever was given up returns; it changes no page."""
        until(lambda: not any(self._under_way(engine) for engine in self.engines), "calls that were given up return")
        self.check_pages()

    @staticmethod
    def _under_way(engine: TransferEngine) -> int:
        stats = engine.stats()
        return stats["lost_threads"] + stats["busy_threads"]

    def result(self, engine: TransferEngine, job: int) -> TransferResult:
        """Comes although a call hangs. Where it is the stores' thread's, loads come all the same, and then its end."""
        end, before = time.monotonic() + WAIT_S, None
        while not (results := engine.wait([job], LOOK_S)):
            at = stores_at(engine)
            if self.held.hangs and at is not None and at == before:
                super().load([*range(10)], time.monotonic() + IO_TIMEOUT_S)
                if self.held.stuck:
                    raise Cut
                self.held.let_go("stores")
                return super().result(engine, job)
            before = at
            assert time.monotonic() < end, "a job without a result, although its engine's thread is in no call"
        return results[job]

    def check_gauges(self) -> None:
        """Nothing is held, once the call has returned."""
        if not self.held.hangs:
            until(lambda: not self.store.stats().quarantined_slots, "slots under lost writes come back")
            super().check_gauges()

    def close(self) -> None:
        """Everything ends around the call; then it returns, and everything is given back."""
        hung = self.held.hangs
        for engine in self.engines:
            engine.shutdown(SHORT_S)
            assert not engine.stats()["jobs_open"], "a shutdown that leaves a job without a result"
        end = time.monotonic() + WAIT_S
        while not self.store.close(SHORT_S):
            self.held.let_go("stuck" if hung else "close")
            assert time.monotonic() < end, "a close that does not end"
        self.held.let_go("stuck" if hung else "close")
        self._settle()
        serving = [thread for engine in self.engines for thread in engine._threads]
        until(lambda: not any(thread.is_alive() for thread in serving), "the engines' threads end")
        self.check_gauges()


class HeldScene(Scene):
    """A play in which one call is held up."""

    def __init__(self, held: Held, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.held = held

    def open(self, bump: bool) -> Session:
        """Raises KvxferError, with nothing left open."""
        return HeldSession(self.held, self.root, self.pages, durability="power", io=self.io, bump=bump)

    def _session(self, work: Callable[[Session], None], bump: bool = False) -> None:
        try:
            super()._session(work, bump)
        except Cut:
            assert not self.held.hangs
            self.told([])  # what was acknowledged before may have been evicted for what was not


def stores_at(engine: TransferEngine) -> Any:
    """Where in the code the thread is that serves an engine's stores; None: it waits for work, or has ended."""
    frame = sys._current_frames().get(engine._threads[1].ident or 0)
    if frame is None or frame.f_code.co_filename.endswith("kvxfer/jobs.py"):
        return None
    return frame.f_code.co_filename, frame.f_lasti


def until(look: Callable[[], bool], what: str) -> None:
    """Waits for what must come to be."""
    end = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.001)
