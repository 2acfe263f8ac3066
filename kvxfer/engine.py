"""TransferEngine: stores and loads chunks between this process's pages and a store.

The caller's thread looks up and queues, no more. A thread for loads pins, submits, settles and publishes them; it
touches memory only (reader.py). Another drops what is present of stores, reserves slots, submits, commits and publishes
(writer.py). So no caller ever waits for the disk or the index, and no load for a store. Every accepted job ends in
exactly one TransferResult.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.admission import SecondTouch
from kvxfer.config import EngineConfig
from kvxfer.convert.pages import KVPages, slot_of
from kvxfer.device.base import Device
from kvxfer.device.choice import runner_over
from kvxfer.errors import EngineClosed, LayoutError
from kvxfer.intake import Intake
from kvxfer.jobs import LOAD, STORE, Runner, Status, check_process
from kvxfer.keys import Namespace, check_key
from kvxfer.observe import Metrics, Observer, engine_values, report_errors, store_values
from kvxfer.placement import Outlook
from kvxfer.reader import LoadReader
from kvxfer.registration import Registration
from kvxfer.report import engine_reporter
from kvxfer.results import PendingJob, TransferResult, block_table, check_blocks, deadline_ns
from kvxfer.store import Access, Store
from kvxfer.writer import StoreWriter

__all__ = ["TransferEngine", "TransferResult"]

Keys = Sequence[bytes]
TOUCHES = 1 << 12  # calls that wait
WATCH_S = 0.1  # how long a thread sleeps at most when nothing wakes it
# Pages of engines that left threads behind in calls: their memory must stay.
_KEPT: list[tuple[KVPages, ...]] = []


class TransferEngine:
    """Moves chunks of one namespace between a store and the pages of the ranks of this process.

    Args:
        store: open; stays the caller's, and must outlive the engine.
        namespace: what the bytes mean; registered with the store here.
        pages: one KVPages for each rank whose pages take part. A chunk's ranks succeed or fail together. A store needs
            ranks that together hold every segment; a load may be of fewer.
        live: True where others may read the pages during a load (GPU blocks): they are then written only after the
            whole chunk was verified. False for memory that a result makes live (host rows): it is filled while it is
            checked.
        device: that has the pages; None: host memory, or where the pages say they are. What the calling thread's
            current stream had queued at a submit comes before the job touches its blocks.
        clock: seconds, for the circuit breakers and the measured speed; tests give one of their own.
        second_touch: shared with other engines that may be offered the same chunks; None: one of its own, if any.

    It starts turned off where KVXFER_DISABLE=1. Thread-safe. Use it as a context manager, or call `shutdown`.

    Raises:
        LayoutError: the ranks' mappings are of different slots.
        ConfigError: staging_bytes holds no buffer for such a slot, or KVXFER_DISABLE is neither 0 nor 1.
        DeviceError: the device has no memory for a bay, or fails.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        pages: Sequence[KVPages],
        *,
        config: EngineConfig | None = None,
        live: bool = True,
        device: Device | None = None,
        clock: Callable[[], float] = time.monotonic,
        second_touch: SecondTouch | None = None,
    ) -> None:
        slot = slot_of(namespace, pages)
        config = self.config = config or EngineConfig()
        self._store, self._root = store, str(store.config.root)
        self._runner: Runner
        stats, refusal = (lambda: self._runner.stats()), (lambda: self._runner.refusal)
        self._intake = Intake(self.config, stats, clock, refusal, store.write_budget, second_touch)
        held = set(itertools.chain.from_iterable(p.mapping.segments for p in pages))
        self._holds_all = len(held) == slot.num_segments
        self._pages = tuple(pages)  # keeps the memory under the handles
        self._blocks = min(p.num_blocks for p in pages)
        self._blocks_per_chunk = slot.blocks_per_chunk
        self._tokens_per_chunk = namespace.tokens_per_chunk
        self._slot, self._registration = slot, Registration(store, namespace, slot)
        self.digest = self._registration.digest
        self._pid = os.getpid()
        self._runner, self._staging_limit = runner_over(config, slot, pages, device, store.config.root, store.backend)
        parts = [self._runner.part(p, live) for p in pages]
        self._native_ids = itertools.count(1)
        self._observer = Observer(namespace.tokens_per_chunk / namespace.blocks_per_chunk, store.io_mode)
        self._reader = LoadReader(store, self._runner, parts, self._native_ids, self._intake, self._publish)
        self._writer = StoreWriter(
            store, self.digest, slot, self._runner, parts, self._native_ids, self._intake, self._publish
        )
        # Guards what follows; never held across a call that can block. Reentrant, so that only its owner releases it:
        # an exception from a signal can leave a wait without the lock that it should have taken again.
        self._lock = threading.RLock()
        self._published = threading.Condition(self._lock)
        self._open: dict[int, PendingJob] = {}  # accepted, no result yet
        self._results: dict[int, TransferResult] = {}  # not taken yet, oldest first
        self._arrivals: deque[tuple[PendingJob, int]] = deque()  # loads that their thread has not seen, and deadlines
        self._queue: deque[PendingJob] = deque()  # stores that theirs has not seen
        self._touched: deque[tuple[bytes, tuple[bytes, ...], Access]] = deque(maxlen=TOUCHES)  # the same; needs no lock
        self._queued_chunks = {STORE: 0, LOAD: 0}
        self._closing = False
        self._stopped = threading.Event()
        serving = (("kvxfer-loads", self._serve_loads), ("kvxfer-stores", self._serve_stores))
        self._threads = [threading.Thread(target=serve, name=name, daemon=True) for name, serve in serving]
        for thread in self._threads:
            thread.start()

    # ---- the caller's side -------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are in the store: a claim, which a load proves. Chunks.

        0 while the engine is turned off or the loads' breaker is open; few while it probes.
        """
        room = self._intake.room(len(keys))
        claimed = min(room, self._store.lookup_prefix(self.digest, keys)) if room else 0
        self._observer.looked_up(len(keys), claimed)
        return claimed

    def holds(self, key: bytes) -> bool:
        """`lookup` of one key."""
        claimed = self._intake.room(1) > 0 and self._store.contains(self.digest, key)
        self._observer.looked_up(1, claimed)
        return claimed

    def contains(self, key: bytes) -> bool:
        """Whether the store has a key, whatever the switch and the breakers say. Not counted as a lookup."""
        return self._store.contains(self.digest, key)

    @property
    def takes_stores(self) -> bool:
        """Whether a store would be queued: it is turned on, its breaker not open, the queue neither full nor slow."""
        return self._queued_chunks[STORE] < self.config.max_queued_store_chunks and self._intake.refusal(STORE) is None

    @property
    def answers_loads(self) -> bool:
        """Whether a chunk of a load would be tried now: it is turned on, and its breaker lets one pass."""
        return self._intake.room(1) > 0

    def knows(self, key: bytes) -> bool:
        """Whether second touch, if it is asked for, would let the chunk be stored."""
        return self._intake.knows(key)

    @property
    def outlook(self) -> Outlook:
        """What one more store would meet."""
        intake, slot = self._intake, self._slot
        return Outlook(intake.affords(slot.slot_bytes), self._store.has_room(slot), intake.backlog.seconds())

    def submit_store(
        self, job_id: int, keys: Keys, block_ids: ArrayLike, *, access: Access | None = None, begin: bool = True
    ) -> None:
        """Queue a store. Returns at once; `wait_gathered` says when the blocks may be reused.

        Args:
            job_id: the caller's; not that of another job whose result was not taken yet.
            keys: OffloadKeys in prefix order.
            block_ids: [len(keys)] or [len(keys), blocks_per_chunk]; -1 for a block that the chunk lacks.
            access: of the request; what it did to a chunk before is the same use, and what lies behind a chunk that an
                earlier store of it left out, or lost, is left out too. None: the job is one by itself.
            begin: False: it may wait for `begin` (WATCH_S at most), so that no other submit is held up by its work.

        A store that finds the queue full or slow, the engine off or the breaker open is dropped: its result says so.

        Raises:
            LayoutError: ids out of range or of another shape, or the ranks here do not hold every segment.
            EngineClosed, ForkError
        """
        if not self._holds_all:
            raise LayoutError(
                "the ranks of this engine do not hold every segment of a slot, so that it cannot complete a chunk"
            )
        if self._accept(job_id, keys, block_ids, STORE, access, 0) and begin:
            self._runner.wake(STORE)

    def begin(self) -> None:
        """Begin with the jobs that were submitted with begin=False."""
        for direction, waiting in ((LOAD, self._arrivals), (STORE, self._queue)):
            if waiting:
                self._runner.wake(direction)

    def touch(self, keys: Iterable[bytes], access: Access | None = None) -> None:
        """Counts as a use of those that are stored, before the next store is planned. Of a flood the latest count."""
        check_process(self._pid, "engine")
        keys = tuple(keys)
        self._touched.append((self.digest, keys, (access or Access()).place(keys)))

    def submit_load(
        self,
        job_id: int,
        keys: Sequence[bytes],
        block_ids: ArrayLike,
        *,
        deadline: float | None = None,
        recompute_tokens_per_s: float | None = None,
        access: Access | None = None,
        begin: bool = True,
    ) -> None:
        """Start a load. Every key is attempted, in this order; keys that the store lacks are misses.

        Args:
            job_id: the caller's; not that of another job whose result was not taken yet.
            keys: OffloadKeys in prefix order.
            block_ids: [len(keys)] or [len(keys), blocks_per_chunk], distinct; -1 for a block that isn't wanted.
            deadline: time.monotonic() in seconds at which the result comes with what has arrived by then.
            recompute_tokens_per_s: also a deadline: no longer than recomputing all tokens of the job would take.
            access, begin: as for `submit_store`.

        Raises:
            LayoutError: ids out of range, repeated or of another shape.
            EngineClosed, ForkError
        """
        closes_ns = deadline_ns(deadline, recompute_tokens_per_s, len(keys) * self._tokens_per_chunk)
        if self._accept(job_id, keys, block_ids, LOAD, access, closes_ns) and begin:
            self._runner.wake(LOAD)

    @property
    def is_quiet(self) -> bool:
        """Whether `begin` and `poll` would find nothing to do. For servers that ask all the time."""
        return not (self._results or self._arrivals or self._queue)

    def poll(self) -> list[TransferResult]:
        """Results published since the last call, each once. Never blocks."""
        check_process(self._pid, "engine")
        if not self._results:  # without the lock: servers ask with every step, and mostly in vain
            return []
        with self._lock:
            results, self._results = self._results, {}
        return list(results.values())

    def wait(self, job_ids: Iterable[int], timeout: float | None = None) -> dict[int, TransferResult]:
        """Take the results of these jobs, waiting up to `timeout` seconds. Those not finished by then are left out."""
        check_process(self._pid, "engine")
        wanted = set(job_ids)
        with self._lock:
            self._published.wait_for(lambda: not wanted & self._open.keys(), timeout)
            taken = {job_id: self._results[job_id] for job_id in wanted & self._results.keys()}
            for job_id in taken:
                del self._results[job_id]
        return taken

    def wait_gathered(self, job_id: int, timeout: float) -> bool:
        """Wait until a store's blocks may be reused, at most `timeout` seconds. True also for jobs that have ended."""
        check_process(self._pid, "engine")
        end = time.monotonic() + timeout
        while True:
            with self._lock:
                job = self._open.get(job_id)
            if job is None:
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            if not job.planned.is_set():
                job.planned.wait(left)
            elif all(self._runner.wait_gathered(n, end - time.monotonic()) is not False for n in job.native_ids):
                return True

    def cancel(self, job_id: int) -> None:
        """End a job now with what has arrived; nothing is written to its pages after its result.

        Chunks of a store that another job is writing are waited for all the same.
        """
        check_process(self._pid, "engine")
        with self._lock:
            job = self._open.get(job_id)
            waiting = [each for each in self._arrivals if each[0] is job]
            queued = job in self._queue or bool(waiting)
            if waiting:
                self._arrivals.remove(waiting[0])
            elif job is not None and queued:
                self._queue.remove(job)
        if job is None:
            return
        if queued:
            job.fail_rest(Status.CANCELLED)
            self._publish(job)
            return
        job.cancelled = True  # for what is being planned: a batch is on the list before that is looked at last
        for native in list(job.native_ids):
            self._runner.cancel(native)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every accepted job has a result. False if `timeout` seconds did not suffice.

        A load that was cancelled has its result once nothing can write its pages any more: with rows="straight" and a
        read that does not return, that is when it returns, or at the engine's shutdown.
        """
        check_process(self._pid, "engine")
        self.begin()
        with self._lock:
            return self._published.wait_for(lambda: not self._open, timeout)

    def shutdown(self, timeout: float | None = None) -> int:
        """Stop. What is queued is cancelled; calls under way get `timeout` seconds (default: shutdown_timeout_s).

        The thread that serves stores gets as long again if it is in a call of its own. Every accepted job has its
        result after this; `poll` still gives them. A slot under a write that has not returned comes back when it does.

        Returns:
            Threads left behind in calls that never returned, each with its staging.
        """
        check_process(self._pid, "engine")
        timeout = self.config.shutdown_timeout_s if timeout is None else timeout
        with self._lock:
            first, self._closing = not self._closing, True
        if not first:
            self._stopped.wait(2 * max(0.0, timeout) + WATCH_S)
            return 0
        left = self._runner.shutdown(timeout)
        for direction in (STORE, LOAD):
            self._runner.wake(direction)
        if not self.drain(max(0.0, timeout) + WATCH_S):  # the thread is in a call of its own, such as making a slab
            left += 1
            with self._lock:
                abandoned = list(self._open.values())
            for job in abandoned:
                job.fail_rest(Status.LOST)
                self._publish(job)
        if left:
            _KEPT.append(self._pages)  # a read straight into them may still be under way
            message = f"shutdown left {left} threads in calls that have not returned"
            engine_reporter.warn("shutdown", message, count=left)
        else:
            for thread in self._threads:
                thread.join()
        self._stopped.set()
        engine_reporter.flush(everything=True)
        return left

    def turn_off(self) -> None:
        """From now on lookups answer 0, loads are misses, stores are dropped (Status.OFF); accepted jobs end."""
        self._intake.turn(False)

    def turn_on(self) -> None:
        """Ends `turn_off` at once."""
        self._intake.turn(True)

    @property
    def enabled(self) -> bool:
        """Whether the engine is turned on. (Its breakers may hold things back all the same: see `metrics`.)"""
        return self._intake.enabled

    def reset(self) -> int:
        """Makes everything that was stored so far a miss, for all processes: the weights have changed.

        Jobs under way end with the old bytes: drain first. Returns the weight epoch; may wait for the disk.

        Raises:
            IOFault, StoreError: it could not be written down, or another process keeps the root locked.
        """
        check_process(self._pid, "engine")
        return self._store.bump_epoch()

    def metrics(self) -> Metrics:
        """Every series (kvxfer/observe.py) as it is now; `render_metrics` makes text of it. Never blocks."""
        stats, store = self.stats(), store_values(self._store.stats())
        with self._lock:
            counted, queued = self._observer.counted(), dict(self._queued_chunks)
        read = engine_values(stats, queued, self._staging_limit, self._intake)
        return Metrics(counted | read, store, id(self._store), self._store.drives.values())

    def stats(self) -> dict[str, int]:
        """Counters of the runner (kvx_stats; of a device, too) and of the engine, by name."""
        check_process(self._pid, "engine")
        with self._lock:
            mine = {
                "stores_dropped": self._intake.dropped[STORE],
                "loads_dropped": self._intake.dropped[LOAD],
                "jobs_open": len(self._open),
            }
        return self._runner.stats() | mine

    @property
    def io_mode(self) -> str:
        """The I/O path in use, such as "posix direct"."""
        return self._store.io_mode

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def block_table(self, num_keys: int, block_ids: ArrayLike) -> NDArray[np.int64]:
        """A job's block ids as [num_keys, blocks_per_chunk], checked as `submit_store` and `submit_load` do."""
        return block_table(block_ids, num_keys, self._blocks_per_chunk, self._blocks)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _accept(
        self, job_id: int, keys: Sequence[bytes], blocks: ArrayLike, direction: int, access: Access | None, end_ns: int
    ) -> bool:
        """Check a job and queue it for its thread. False where nothing of it may pass: it has ended already."""
        check_process(self._pid, "engine")
        ids = self.block_table(len(keys), blocks)
        check_blocks(direction, ids, all(pages.writable for pages in self._pages))
        names = tuple(map(check_key, keys))
        job = PendingJob(job_id, direction, names, ids, (access or Access()).place(names), self._runner.mark())
        spared = direction == STORE and self._writer.spare(job)
        with self._lock:
            if self._closing:
                raise EngineClosed("the engine was shut down")
            if job_id in self._open or job_id in self._results:
                raise LayoutError(f"job {job_id} is still open or its result was not taken")
            self._open[job_id] = job
            refused = None if spared else self._intake.verdict(direction, self._queued_chunks[direction], len(keys))
            self._queued_chunks[direction] += len(keys)
            if keys and not refused and not spared:
                if direction == LOAD:
                    self._arrivals.append((job, end_ns))
                else:
                    self._intake.weigh(job, len(keys) * self._slot.slot_bytes)
                    self._queue.append(job)
                return True
        if refused is Status.BACKLOG:
            self._writer.answer_present(job)
        job.fail_rest(refused or Status.DROPPED)
        self._publish(job)
        return False

    def _publish(self, job: PendingJob) -> None:
        result = job.result()
        job.planned.set()
        with self._lock:
            if self._open.get(job.job_id) is not job:
                return  # a shutdown did not wait for it
            self._queued_chunks[job.direction] -= len(job.keys)
            self._intake.weigh(job, 0)
            del self._open[job.job_id]
            self._observer.settle(job, result)
            self._results[job.job_id] = result
            self._published.notify_all()
        if result.errors:
            report_errors(job, result.errors, self._root)

    def _serve_loads(self) -> None:
        """The loads' thread: starts what has arrived, settles what the runner has finished. Memory only."""
        watched = 0.0
        while True:
            self._runner.wait((LOAD,), WATCH_S)
            try:
                if (now := time.monotonic()) - watched >= WATCH_S:
                    watched = now
                    self._intake.watch()
                    engine_reporter.flush()
                self._reader.settle()
            except Exception as exc:  # a defect: the thread must go on, or no load would ever end again
                engine_reporter.warn("load defect", "a load could not be settled", exc_info=exc)
            while (arrived := self._next_arrival()) is not None:
                self._reader.start(arrived[0], self.digest, arrived[1])
            with self._lock:
                if self._closing and not self._arrivals and not self._reader.is_busy:
                    return

    def _next_arrival(self) -> tuple[PendingJob, int] | None:
        with self._lock:
            return self._arrivals.popleft() if self._arrivals else None

    def _serve_stores(self) -> None:
        """The stores' thread: everything that may touch the disk or the index on behalf of a caller."""
        while True:
            self._runner.wait((STORE,), WATCH_S)
            with self._lock:
                queued, closing = list(self._queue), self._closing
                self._queue.clear()
            try:
                self._writer.settle()
                if self._registration.renew():
                    self.digest = self._writer.digest = self._registration.digest
                while self._touched:
                    self._store.touch(*self._touched.popleft())
            except Exception as exc:  # a defect: the thread must go on, or no store would ever end again
                engine_reporter.warn("store defect", "stores could not be settled", exc_info=exc)
            for job in queued:
                if closing:
                    job.fail_rest(Status.CANCELLED)
                    self._publish(job)
                else:
                    self._writer.start(job)
            with self._lock:
                if closing and not self._queue and not self._open and not self._writer.waits_for_writes:
                    return
