"""A job from the moment it is accepted to its one result."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.bitmap import CompletionBitmap
from kvxfer.errors import ConfigError, LayoutError
from kvxfer.jobs import LOAD, STORE, ChunkError, JobOutcome, Status, nanoseconds
from kvxfer.store.access import Access

_FEW = 4096  # block ids


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How far a job got. Published once for each accepted job.

    A load's bit says that the chunk's bytes were verified and are in the pages; a store's, that the chunk is in the
    store and can be looked up.
    """

    job_id: int
    bitmap: CompletionBitmap  # one bit a key, in the order given
    nbytes: int  # payload moved; chunks that a store found present moved nothing
    seconds: float  # from submit to the end
    errors: tuple[ChunkError, ...] = ()  # why bits are not set; plain misses are not listed


@dataclass(slots=True, eq=False)
class PendingJob:
    """An accepted job. One thread at a time works on it; it ends when every key has an answer."""

    job_id: int
    direction: int  # jobs.STORE or jobs.LOAD
    keys: Sequence[bytes]
    block_ids: NDArray[np.int64]  # [num_keys, blocks_per_chunk]
    access: Access = field(default_factory=Access)  # of the request that it is part of, or its own; keys are placed
    after: Any = None  # what its runner's `mark` gave when it was accepted
    queued_bytes: int = 0  # of a store: what it may still write
    started: float = field(default_factory=time.monotonic)
    native_ids: list[int] = field(default_factory=list)  # what was handed to the runner for it
    planned: threading.Event = field(default_factory=threading.Event)  # `native_ids` is complete
    cancelled: bool = False  # what is not handed over yet will not be
    unanswered: int = -1  # keys; counted down by arrive() and fail()
    moved: int = 0  # chunks that the runner moved for this job, and that count
    _arrived: bytearray = field(default_factory=bytearray)  # [num_keys]
    _nbytes: int = 0
    _errors: list[ChunkError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unanswered = len(self.keys)
        self._arrived = bytearray(len(self.keys))

    def masks(self) -> list[int]:
        """For each key the set of its blocks that are present: bit b is block b of the chunk."""
        packed = np.packbits(self.block_ids >= 0, axis=1, bitorder="little")
        return [int.from_bytes(row.tobytes(), "little") for row in packed]

    def arrive(self, key: int) -> None:
        """Set the bit of a key."""
        self._arrived[key] = 1
        self.unanswered -= 1

    def fail(self, key: int, status: Status) -> None:
        """Say why a key's bit is not set."""
        self._errors.append(ChunkError(key, status))
        self.unanswered -= 1
        self.open_gap(key, status)

    def open_gap(self, key: int, status: Status) -> None:
        """Of a store: this chunk was left out or failed, so that what follows it in the request is behind a gap."""
        if self.direction == STORE:
            self.access.gaps.open(self.keys[key], status)

    def miss(self) -> None:
        """The store does not have a key: its bit stays unset, and that is all there is to say."""
        self.unanswered -= 1

    def take(self, outcome: JobOutcome, index: Sequence[int], where: Sequence[str]) -> None:
        """Copy what the runner says. `index`: the key of each native chunk; `where`: its file."""
        self._nbytes += outcome.nbytes
        for native in np.flatnonzero(outcome.status == 0).tolist():
            self.arrive(index[native])
            self.moved += 1
        for error in outcome.errors:
            self._errors.append(replace(error, chunk=index[error.chunk], where=where[error.chunk]))
            self.unanswered -= 1
            self.open_gap(index[error.chunk], error.status)

    def withdraw(self, key: int, status: Status) -> None:
        """Take back a bit that was set."""
        self._arrived[key] = 0
        self.moved -= 1
        self._errors.append(ChunkError(key, status))
        self.open_gap(key, status)

    def fail_rest(self, status: Status) -> None:
        """Answer every key that has no answer yet. (Keys that were missed are named with the rest.)"""
        if self.unanswered <= 0:
            return
        failed = {error.chunk for error in self._errors}
        for key, arrived in enumerate(self._arrived):
            if not arrived and key not in failed:
                self.fail(key, status)

    def result(self) -> TransferResult:
        """The result as things stand."""
        errors = tuple(sorted(self._errors, key=lambda error: error.chunk))
        bitmap = CompletionBitmap.from_status(np.frombuffer(self._arrived, np.uint8) ^ 1)
        return TransferResult(self.job_id, bitmap, self._nbytes, time.monotonic() - self.started, errors)


def block_table(block_ids: ArrayLike, num_keys: int, blocks_per_chunk: int, num_blocks: int) -> NDArray[np.int64]:
    """The block ids of a job as [num_keys, blocks_per_chunk] int64, checked and copied.

    Raises:
        LayoutError: another shape or type, or an id that is neither -1 nor in 0..num_blocks - 1.
    """
    try:
        raw = np.asarray(block_ids)
    except ValueError as exc:  # rows of several lengths
        raise LayoutError(f"block_ids are no table: {exc}") from None
    if raw.size and raw.dtype.kind not in "iu":
        raise LayoutError(f"block_ids are {raw.dtype}, want integers")
    if raw.shape not in ((num_keys, blocks_per_chunk), (num_keys * blocks_per_chunk,)):
        raise LayoutError(f"block_ids have shape {raw.shape}, want ({num_keys}, {blocks_per_chunk})")
    if raw.dtype.kind == "u" and raw.size and (most := int(raw.max())) >= num_blocks:  # it may not fit into int64
        raise LayoutError(f"block id {most} must be in 0..{num_blocks - 1}, or -1 for an absent block")
    ids = np.array(raw, dtype=np.int64, order="C").reshape(num_keys, blocks_per_chunk)
    if ids.size and (ids.min() < -1 or ids.max() >= num_blocks):
        wrong = ids[(ids < -1) | (ids >= num_blocks)].tolist()
        raise LayoutError(f"block id {wrong[0]} must be in 0..{num_blocks - 1}, or -1 for an absent block")
    return ids


def check_blocks(direction: int, block_ids: NDArray[np.int64], writable: bool) -> None:
    """Raises LayoutError for a load of one block twice, or into pages that are not writable, and for a store of a chunk
    without any block."""
    if direction == LOAD:
        refuse_repeated(block_ids)
        if not writable:
            raise LayoutError("a tensor of these pages is read-only: nothing can be loaded into it")
    elif block_ids.size and block_ids.min() < 0 and (empty := (block_ids < 0).all(axis=1)).any():
        raise LayoutError(f"chunk {int(empty.argmax())} of the store has no block at all")


def refuse_repeated(block_ids: NDArray[np.int64]) -> None:
    """Raises LayoutError where a load would write one block twice."""
    if block_ids.size <= _FEW:  # as a set: a sort gives the GIL away, and it may be long in coming back
        ids = block_ids.reshape(-1).tolist()
        if len(set(ids)) == len(ids):
            return
    present = np.sort(block_ids[block_ids >= 0])
    if len(twice := present[1:][present[1:] == present[:-1]]):
        raise LayoutError(f"block {twice[0]} is named twice: which bytes it ends with would be left to chance")


def deadline_ns(deadline: float | None, tokens_per_s: float | None, num_tokens: int) -> int:
    """When a load's gate closes, for csrc: at `deadline` (time.monotonic()), or where recomputing is done sooner, then.

    Raises:
        ConfigError: a rate that is not positive, or a deadline that is no number.
    """
    if tokens_per_s is not None:
        if not tokens_per_s > 0:
            raise ConfigError(f"recompute_tokens_per_s={tokens_per_s} must be positive")
        worth = time.monotonic() + num_tokens / tokens_per_s
        deadline = worth if deadline is None else min(deadline, worth)
    return 0 if deadline is None else max(1, nanoseconds(deadline))
