"""What runs jobs: `Runner`, and the native one over `kvx_engine` (section 6 of csrc/kvx.h), for pages in host memory.

Knows the C structs and nothing of stores: whoever submits says where each chunk's slot is and who it must be.
"""

from __future__ import annotations

import atexit
import ctypes as C
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.config import CACHED_BYTES, EngineConfig, staging_buffer, staging_plan
from kvxfer.convert.native import mapping_handle
from kvxfer.convert.pages import KVPages
from kvxfer.errors import ConfigError, ForkError, NativeError
from kvxfer.report import engine_reporter
from kvxfer.slot import SlotLayout

STORE, LOAD = _native.STORE, _native.LOAD
NS = 1_000_000_000


MOST_NS = 1 << 62


def nanoseconds(seconds: float) -> int:
    """For csrc: 0 for what has passed already, some 146 years for infinity.

    Raises:
        ConfigError: not a number.
    """
    if seconds != seconds:
        raise ConfigError("a time of nan seconds")
    return 0 if seconds <= 0 else int(min(seconds, MOST_NS / NS) * NS)


class Status(IntEnum):
    """What became of a chunk. Up to 11 as in kvx.h; the rest are given by the engine."""

    OK = 0
    PENDING = 1
    CUT = 2
    CANCELLED = 3
    IO = 4
    TRUNCATED = 5
    BAD_TRAILER = 6
    FOREIGN = 7
    BAD_SUM = 8
    ABSENT = 9
    LOST = 10
    STALLED = 11
    MISS = 64  # the key is not in the store
    DROPPED = 65  # a queue was full
    NO_SPACE = 66  # no slot could be had
    INDEX = 67  # the index refused the commit
    OFF = 68  # the engine was turned off
    BREAKER = 69  # the circuit breaker is open
    BUSY = 70  # another store is writing the chunk with fewer blocks
    DEVICE = 71  # the device that has the pages was lost
    NOT_ADMITTED = 72  # the key was not offered before
    BUDGET = 73  # the write budget is used up
    BACKLOG = 74  # what is queued would take too long already
    GAP = 75  # a chunk that comes before it in its request is not there

    @property
    def is_policy(self) -> bool:
        """Left out without being tried, because that is what was asked for, or for being of no use: nothing failed."""
        return self in (Status.NOT_ADMITTED, Status.BUDGET, Status.GAP)

    @property
    def is_shed(self) -> bool:
        """Left out to spare the storage: for this request it is not tried again."""
        return self in (Status.BUDGET, Status.BACKLOG, Status.NO_SPACE)

    @property
    def behind(self) -> Status:
        """Why what comes behind a chunk that was left out so, or failed so, is left out in its turn."""
        return self if self.is_shed or self is Status.NOT_ADMITTED else Status.GAP

    @property
    def is_damage(self) -> bool:
        """Verification failed: the chunk must not be believed again until it is stored again."""
        return Status.TRUNCATED <= self <= Status.BAD_SUM


_MEANING = {
    Status.CUT: "the deadline came first",
    Status.CANCELLED: "cancelled",
    Status.TRUNCATED: "the file ends inside the slot",
    Status.BAD_TRAILER: "no valid trailer",
    Status.FOREIGN: "the trailer names another namespace, key, generation or segment",
    Status.BAD_SUM: "the bytes do not match their checksum",
    Status.ABSENT: "a requested block is not in the chunk",
    Status.LOST: "the call outlived io_timeout_s",
    Status.STALLED: "no thread left: too many calls never returned",
    Status.MISS: "not in the store",
    Status.DROPPED: "the queue is full",
    Status.NO_SPACE: "no slot can be had within capacity_bytes",
    Status.INDEX: "the index could not be written",
    Status.OFF: "kvxfer is turned off",
    Status.BREAKER: "the storage kept failing and is left alone for a while",
    Status.BUSY: "another store is writing fewer of the chunk's blocks",
    Status.DEVICE: "the device failed",
    Status.NOT_ADMITTED: "offered for the first time",
    Status.BUDGET: "the write budget is used up",
    Status.BACKLOG: "the queue would take longer than max_queue_s",
    Status.GAP: "a chunk before it is not there",
}


@dataclass(frozen=True, slots=True)
class ChunkError:
    """Why one chunk of a job did not make it. Offsets and sizes in bytes."""

    chunk: int  # index within the job
    status: Status
    errno: int = 0
    segment: int | None = None  # of the slot
    offset: int = 0  # in the file
    wanted: int = 0
    moved: int = 0
    where: str = ""  # the file

    def __str__(self) -> str:
        if self.status is Status.IO:
            text = f"[Errno {self.errno}] {os.strerror(self.errno)}: {self.moved} of {self.wanted} bytes"
        else:
            text = _MEANING.get(self.status, self.status.name)
            if self.status is Status.TRUNCATED:
                text += f": {self.moved} of {self.wanted} bytes"
        if self.segment is not None:
            text += f", segment {self.segment}"
        if self.wanted:
            text += f" at offset {self.offset:#x}"
        return f"chunk {self.chunk}: {text}" + (f": {self.where!r}" if self.where else "")


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """A finished native job."""

    job_id: int
    direction: int
    nbytes: int  # payload of the chunks that are OK
    seconds: float
    status: NDArray[np.uint8]  # [num_chunks], Status
    errors: tuple[ChunkError, ...]  # one for each chunk that isn't OK


class Runner(ABC):
    """Runs loads and stores between pages and slots, each to its one outcome.

    In a forked child, which has none of its threads, every call that could wait raises ForkError.

    Thread-safe. No call waits, but `wait`, `wait_gathered` and `shutdown`, all bounded by their timeouts.
    """

    @abstractmethod
    def part(self, pages: KVPages, live: bool = True) -> Any:
        """What `submit` takes for one rank's pages, which must be kept as long as it is used.

        Args:
            live: False where a load's result makes the pages live (host rows).

        Raises:
            LayoutError: the pages are not where this runner can move them.
        """

    @abstractmethod
    def mark(self) -> Any:
        """Taken where a job is accepted, in the caller's thread, for `submit`'s `after`: all that this thread has
        queued on a device so far comes before the job touches its blocks. None where there is no device."""

    @property
    @abstractmethod
    def refusal(self) -> Status | None:
        """Why nothing would be tried any more; None where it would."""

    @abstractmethod
    def submit(
        self,
        job_id: int,
        direction: int,
        parts: Sequence[Any],
        records: bytes,
        block_ids: NDArray[np.int64],
        digest: bytes,
        *,
        deadline_ns: int = 0,
        after: Any = None,
    ) -> None:
        """Queue a job. Everything is copied before this returns.

        Args:
            job_id: not in use by another job of this runner that was not polled yet.
            parts: what `part` gave, all of one slot layout. A chunk's parts succeed or fail together.
            records: packed kvx_chunk structs, one a chunk, in prefix order.
            block_ids: [num_chunks, blocks_per_chunk], -1 for an absent block; C-contiguous.
            digest: 32 bytes.
            deadline_ns: loads: time.monotonic_ns() at which the gate closes; 0 for none.
            after: what `mark` gave.

        Raises:
            NativeError: a block id out of range, or the runner was shut down.
        """

    @abstractmethod
    def poll(self, direction: int) -> JobOutcome | None:
        """One finished job, or None. Never blocks."""

    @abstractmethod
    def late(self) -> Iterator[tuple[int, int]]:
        """(job id, chunk) of stores once reported LOST whose write has returned since: their slots are free again."""

    @abstractmethod
    def wait(self, directions: Sequence[int], timeout_s: float) -> bool:
        """Block until a job of one of the directions can be polled, or `wake()` was called for one."""

    @abstractmethod
    def wake(self, direction: int = STORE) -> None:
        """End the `wait` of whoever waits for this direction, or the next one."""

    @abstractmethod
    def wait_gathered(self, job_id: int, timeout_s: float) -> bool | None:
        """Block until a store's source blocks may be reused. None where the job isn't known (any more)."""

    @abstractmethod
    def cancel(self, job_id: int) -> None:
        """Close the job's gate now; its result follows at once. Unknown ids are ignored."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """The kvx_stats counters by name; a runner over a device has more."""

    @abstractmethod
    def shutdown(self, timeout_s: float) -> int:
        """Cancel what is queued, wait for calls under way, give the rest up. Results can still be polled.

        Returns:
            Threads left behind in calls that have not returned.
        """

    @abstractmethod
    def abandon(self) -> None:
        """`shutdown` without waiting, for a process that ends; nothing in a forked child."""


class JobRunner(Runner):
    """Threads that run loads and stores of pages in host memory without Python.

    `shutdown()` is bounded by its timeout, also where a call never returns.

    Args:
        threads, io_timeout_s, max_lost_threads: as EngineConfig's.
        read_piece_bytes: a read is no longer than about this.
        write_piece_bytes: nor is a write without staging.
        straight: STORE, LOAD: directions in which chunks of host rows go without staging, where they can.
        backend: posix | uring, where it works (io.modes.probe_uring).
        depth: uring: transfers of a thread under way at most, 1.._native.MAX_DEPTH.

    Raises:
        NativeError: a thread, or its ring, is not to be had.
    """

    def __init__(
        self,
        *,
        threads: int,
        io_timeout_s: float,
        max_lost_threads: int,
        read_piece_bytes: int = 256 << 10,
        write_piece_bytes: int = _native.UINT64_MAX,
        straight: Sequence[int] = (),
        backend: str = "posix",
        depth: int = _native.MAX_DEPTH,
    ) -> None:
        self._lib, self._quick = _native.lib(), _native.quick()
        self._pid = os.getpid()
        config = _native.EngineConfigStruct(
            threads=threads,
            max_lost_threads=max_lost_threads,
            io_timeout_ns=nanoseconds(io_timeout_s),
            read_piece_bytes=read_piece_bytes,
            write_piece_bytes=write_piece_bytes,
            straight=sum(1 << direction for direction in straight),
            backend=_native.BACKENDS[backend],
            depth=depth,
        )
        handle = C.c_void_p()
        _check(self._lib.kvx_engine_new(C.byref(config), C.byref(handle)), "kvx_engine_new")
        self._handle = handle
        weakref.finalize(self, _dispose, self._lib, handle, self._pid).atexit = False
        _running.add(self)

    def part(self, pages: KVPages, live: bool = True) -> int:
        """The kvx_mapping handle of the pages' own mapping."""
        return mapping_handle(pages, pages.mapping, live)

    def mark(self) -> None:
        """None: no device has anything queued."""

    @property
    def refusal(self) -> Status | None:
        """None."""
        return None

    def submit(
        self,
        job_id: int,
        direction: int,
        parts: Sequence[int],
        records: bytes,
        block_ids: NDArray[np.int64],
        digest: bytes,
        *,
        deadline_ns: int = 0,
        after: None = None,
        part_writes: NDArray[np.uint8] | None = None,
    ) -> None:
        """As `Runner.submit`.

        Args:
            part_writes: stores: [num_chunks, num_parts], 1 where the part is the elected writer.
        """
        check_process(self._pid, "engine")
        if len(records) != len(block_ids) * C.sizeof(_native.Chunk) or len(digest) != 32:
            raise NativeError(
                f"{len(records)} bytes of records and {len(digest)} of digest for {len(block_ids)} chunks"
            )
        if block_ids.dtype != np.int64 or not block_ids.flags.c_contiguous:
            raise NativeError("block_ids must be contiguous int64")
        handles = (C.c_void_p * len(parts))(*parts)
        job = _native.Job(
            job_id=job_id,
            direction=direction,
            num_chunks=len(block_ids),
            num_parts=len(parts),
            parts=C.cast(handles, C.c_void_p),
            part_writes=None if part_writes is None else part_writes.ctypes.data,
            chunks=C.cast(C.c_char_p(records), C.c_void_p),
            block_ids=block_ids.ctypes.data,
            namespace_digest=C.cast(C.c_char_p(digest), C.c_void_p),
            deadline_ns=deadline_ns,
        )
        _check(self._lib.kvx_engine_submit(self._handle, C.byref(job)), "kvx_engine_submit")

    def poll(self, direction: int) -> JobOutcome | None:
        """One finished job, or None. Never blocks."""
        check_process(self._pid, "engine")
        result = _native.Result()
        if self._lib.kvx_engine_poll(self._handle, direction, C.byref(result)) != 1:
            return None
        status = np.empty(result.num_chunks, np.uint8)
        errors: tuple[ChunkError, ...] = ()
        if result.num_ok == result.num_chunks:
            status[:] = Status.OK
        else:
            raw = (_native.ChunkErrorStruct * result.num_chunks)()
            self._lib.kvx_engine_details(self._handle, result.job_id, status.ctypes.data, raw)
            errors = tuple(_error(int(c), raw[c]) for c in np.flatnonzero(status))
        self._lib.kvx_engine_forget(self._handle, result.job_id)
        return JobOutcome(result.job_id, result.direction, result.nbytes, result.elapsed_ns / NS, status, errors)

    def late(self) -> Iterator[tuple[int, int]]:
        """(job id, chunk) of stores once reported LOST whose write has returned since: their slots are free again."""
        check_process(self._pid, "engine")
        job_id, chunk = C.c_uint64(), C.c_uint32()
        while self._lib.kvx_engine_late(self._handle, C.byref(job_id), C.byref(chunk)) == 1:
            yield job_id.value, chunk.value

    def wait(self, directions: Sequence[int], timeout_s: float) -> bool:
        """Block until a job of one of the directions can be polled, or `wake()` was called for one."""
        check_process(self._pid, "engine")
        mask = sum(1 << d for d in directions)
        return bool(self._lib.kvx_engine_wait(self._handle, mask, nanoseconds(timeout_s)))

    def wake(self, direction: int = STORE) -> None:
        """End the `wait` of whoever waits for this direction, or the next one."""
        check_process(self._pid, "engine")
        self._quick.kvx_engine_wake(self._handle, 1 << direction)

    def wait_gathered(self, job_id: int, timeout_s: float) -> bool | None:
        """Block until a store's source blocks may be reused. None where the job isn't known (any more)."""
        check_process(self._pid, "engine")
        answer = self._lib.kvx_engine_wait_gathered(self._handle, job_id, nanoseconds(timeout_s))
        return None if answer < 0 else bool(answer)

    def cancel(self, job_id: int) -> None:
        """Close the job's gate now; its result follows at once. Unknown ids are ignored."""
        check_process(self._pid, "engine")
        self._lib.kvx_engine_cancel(self._handle, job_id)

    def stats(self) -> dict[str, int]:
        """The kvx_stats counters by name."""
        check_process(self._pid, "engine")
        raw = _native.Stats()
        self._lib.kvx_engine_stats(self._handle, C.byref(raw))
        return {name: getattr(raw, name) for name, *_ in _native.Stats._fields_}

    def shutdown(self, timeout_s: float) -> int:
        """Cancel what is queued, wait for calls under way, give the rest up. Results can still be polled.

        Returns:
            Threads left behind in calls that have not returned.
        """
        check_process(self._pid, "engine")
        return int(self._lib.kvx_engine_shutdown(self._handle, nanoseconds(timeout_s)))

    def abandon(self) -> None:
        """`shutdown` without waiting, for a process that ends; nothing in a forked child."""
        if os.getpid() == self._pid:
            self.shutdown(0)


def runner_of(
    config: EngineConfig,
    slot: SlotLayout,
    *,
    memory: bool,
    straight: Sequence[int] | None = None,
    backend: str = "posix",
) -> tuple[JobRunner, int]:
    """The runner that a configuration asks for, and the most bytes that its buffers take together.

    Where files are memory, transfers are copies of the processor, and what is summed should still be in its cache.
    docs/adr/0005 says what was measured.

    Args:
        slot: of the chunks that it will move.
        memory: whether files are pages of memory.
        straight: as JobRunner's, instead of what `config.rows` says.
        backend: as JobRunner's: the store's.

    Raises:
        ConfigError: staging_bytes holds no buffer for such a slot.
        NativeError: as JobRunner.
    """
    threads, limit = staging_plan(config, slot)
    if threads < config.io_threads:
        what = f"{threads} of {config.io_threads} I/O threads: more buffers than staging_bytes holds"
        engine_reporter.warn("staging", what)
    if straight is None:
        straight = {"auto": (STORE,) if memory else (), "straight": (STORE, LOAD), "staged": ()}[config.rows]
    runner = JobRunner(
        threads=threads,
        io_timeout_s=config.io_timeout_s,
        max_lost_threads=limit // staging_buffer(slot) - threads,
        straight=straight,
        backend=backend,
        read_piece_bytes=min(config.read_piece_bytes, CACHED_BYTES) if memory else config.read_piece_bytes,
        # A read of memory is over when it was begun: none ahead, or it would be out of the cache when it is summed.
        **({"write_piece_bytes": CACHED_BYTES, "depth": 1} if memory else {}),
    )
    return runner, limit


def check_process(pid: int, what: str) -> None:
    """Raises ForkError in a fork of the process `pid`, which opened `what`."""
    if os.getpid() != pid:
        raise ForkError(
            f"this {what} belongs to process {pid}; process {os.getpid()} is a fork of it and has none of its threads: "
            "open a store and an engine after the fork"
        )


# At exit threads are stopped but handles stay: another thread may be inside a call.
_running: weakref.WeakSet[JobRunner] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for runner in list(_running):
        runner.abandon()


def _dispose(lib: Any, handle: C.c_void_p, pid: int) -> None:
    if os.getpid() == pid:
        lib.kvx_engine_shutdown(handle, 0)
        lib.kvx_engine_free(handle)


def _error(chunk: int, raw: _native.ChunkErrorStruct) -> ChunkError:
    segment = None if raw.segment == 2**32 - 1 else raw.segment
    return ChunkError(chunk, Status(raw.status), raw.error, segment, raw.offset, raw.wanted, raw.moved)


def _check(answer: int, call: str) -> None:
    if answer < 0:
        raise NativeError(f"{call}: [Errno {-answer}] {os.strerror(-answer)}")
