"""Requests in flight: bursts of them, timed, each with its answer. What is checked is checked between bursts."""

from __future__ import annotations

import errno
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.errors import IOFault, KvxferError

READ, WRITE = 0, 1
STALL_S = 60.0  # beyond the end of a burst, for requests that do not come back
PATIENCE_S = 600.0  # for a burst without an end, one that reads back
CLOSE_S = 5.0  # for requests under way at the end
EMPTY_S = 0.2
_NS = 1e9


class Mover(Protocol):
    """How a lane moves bytes: one request, waited for."""

    def __call__(self, op: int, file: int, offset: int, slot: int, nbytes: int) -> int:
        """Bytes moved between `offset` of the file and the memory of `slot`. KvxferError or OSError where it failed."""


@dataclass(slots=True)
class Burst:
    """Requests that go out together: request i uses the memory of slot i. One array entry each."""

    op: NDArray[np.uint8]  # READ | WRITE
    file: NDArray[np.int64]
    offset: NDArray[np.int64]
    thread: NDArray[np.int64]  # whose it is; -1: nobody's, it is not made
    nbytes: int  # of each
    requests: list[tuple[int, int, int]] = field(init=False)
    latency_ns: NDArray[np.int64] = field(init=False)  # 0: not made, the time was up
    failed: dict[int, str] = field(default_factory=dict)  # request -> what went wrong
    wall_s: float = 0.0  # from the first request's start to the last one's end
    cpu_s: float = 0.0  # of the process meanwhile, in it and in the kernel for it
    calls: int = 0  # preads and pwrites that the made requests took

    def __post_init__(self) -> None:
        self.requests = list(zip(self.op.tolist(), self.file.tolist(), self.offset.tolist(), strict=True))
        self.latency_ns = np.zeros(len(self.op), dtype=np.int64)

    @property
    def made(self) -> NDArray[np.bool_]:
        """Requests that were begun."""
        return self.latency_ns > 0

    @property
    def done(self) -> NDArray[np.bool_]:
        """Requests that moved all of their bytes."""
        done = self.made
        done[list(self.failed)] = False
        return done


class Lanes:
    """One Python thread for each request in flight: `depth` of them draw from the same thread's requests, in order."""

    def __init__(self, threads: int, depth: int, move: Mover) -> None:
        self._move = move
        self._threads, self._lanes = threads, threads * depth
        self._turn = threading.Condition()
        self._round = 0
        self._left = 0
        self._burst: Burst | None = None
        self._queues: list[Iterator[int]] = []
        self._until_ns = 0
        self._span_ns: list[tuple[int, int]] = []
        self._defect: BaseException | None = None
        self._closed = False
        self._own = [
            threading.Thread(target=self._run, args=(lane % threads,), name=f"kvx-bench-{lane}", daemon=True)
            for lane in range(self._lanes)
        ]
        for each in self._own:
            each.start()

    def run(self, burst: Burst, seconds: float = float("inf")) -> Burst:
        """Makes the burst's requests, as many as begin within `seconds`; fills in what came of them.

        Raises:
            IOFault: a request does not come back.
        """
        queues = [iter(np.flatnonzero(burst.thread == each).tolist()) for each in range(self._threads)]
        calls, cpu = _calls(), _cpu_s()
        with self._turn:
            self._burst, self._queues, self._span_ns = burst, queues, []
            end = time.perf_counter_ns() + int(min(seconds, 1e6) * _NS)
            self._until_ns, self._left, self._round = end, self._lanes, self._round + 1
            self._turn.notify_all()
            patience = (seconds if seconds < 1e6 else PATIENCE_S) + STALL_S
            if not self._turn.wait_for(lambda: self._left == 0, patience):
                self._closed = True  # whoever comes back goes
                raise IOFault(errno.ETIMEDOUT, f"requests have not come back within {patience:.0f} s")
        if self._defect is not None:
            raise self._defect
        burst.cpu_s = _cpu_s() - cpu
        burst.calls = _calls() - calls
        if self._span_ns:
            starts, ends = zip(*self._span_ns, strict=True)
            burst.wall_s = (max(ends) - min(starts)) / _NS
        return burst

    def close(self) -> bool:
        """No further requests. Waits a little for those under way, and leaves behind those that hang.

        Returns:
            Whether there are none of these: they may still move memory.
        """
        with self._turn:
            self._closed = True
            self._queues = []
            self._until_ns = 0
            self._turn.notify_all()
        end = time.monotonic() + CLOSE_S
        for each in self._own:
            each.join(max(0.0, end - time.monotonic()))
        return not any(each.is_alive() for each in self._own)

    def _run(self, thread: int) -> None:
        seen = 0
        while True:
            with self._turn:
                self._turn.wait_for(lambda seen=seen: self._closed or self._round > seen)  # type: ignore[misc]
                if self._closed:
                    return
                seen, burst = self._round, self._burst
                queue = self._queues[thread]
            assert burst is not None
            span, defect = None, None
            try:
                span = self._draw(burst, queue)
            except BaseException as exc:  # a defect of the bench's own: the caller's to see
                defect = exc
            with self._turn:
                self._defect = self._defect or defect
                if span is not None:
                    self._span_ns.append(span)
                self._left -= 1
                if self._left == 0:
                    self._turn.notify_all()

    def _draw(self, burst: Burst, queue: Iterator[int]) -> tuple[int, int] | None:
        """Makes requests until the queue or the time is at its end; when the first began, and the last one ended."""
        clock, move, nbytes = time.perf_counter_ns, self._move, burst.nbytes
        requests, latency = burst.requests, burst.latency_ns
        first, end = 0, 0
        for index in queue:
            start = clock()
            if start > self._until_ns:
                break
            first = first or start
            try:
                op, file, offset = requests[index]
                moved = move(op, file, offset, index, nbytes)
                if moved != nbytes:
                    burst.failed[index] = "short"
            except (KvxferError, OSError) as exc:
                burst.failed[index] = _name(exc)
            end = clock()
            latency[index] = max(1, end - start)
        return (first, end) if first else None


def _name(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.errno:
        return errno.errorcode.get(exc.errno, str(exc.errno))
    return type(exc).__name__


def _calls() -> int:
    return sum(int(_native.lib().kvx_op_calls(_native.OPS.index(op))) for op in ("pread", "pwrite"))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def empty_calls(threads: int, depth: int, move: Mover) -> float:
    """Requests a second that the bench itself can make: the same way, of no bytes, which ask the system for nothing."""
    count = int(1e6 * EMPTY_S)  # more than there is time for
    zeros = np.zeros(count, dtype=np.int64)
    lanes = Lanes(threads, depth, move)
    try:
        while True:
            burst = Burst(zeros.astype(np.uint8), zeros, zeros, np.arange(count) % threads, 0)
            lanes.run(burst, EMPTY_S)
            if burst.wall_s:  # else the machine was so busy that none began in time
                return int(burst.made.sum()) / burst.wall_s
    finally:
        lanes.close()


def percentiles(latency_ns: Sequence[int] | NDArray[np.int64]) -> dict[str, float | None]:
    """p50, p90, p99, p99_9 and max in microseconds; None where there are too few for it to mean anything."""
    values = np.asarray(latency_ns, dtype=np.float64) / 1e3
    if not len(values):
        return dict.fromkeys(("p50", "p90", "p99", "p99_9", "max"))
    found: dict[str, float | None] = {
        name: float(np.percentile(values, at)) if len(values) >= least else None
        for name, at, least in (("p50", 50, 1), ("p90", 90, 10), ("p99", 99, 100), ("p99_9", 99.9, 1000))
    }
    return found | {"max": float(values.max())}
