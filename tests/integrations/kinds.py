"""The tiers that the contract is asked of: how each is configured, what somebody behind its back does to it, and what
is known of it.

`Kind` is what test_contract.py asks for; a tier of one's own is put through it by one more of them in KINDS.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from vllm.v1.kv_offload.tiering.fs import manager as fs_manager

from kvxfer.testing import FaultyIO
from tests.integrations.harness import KEYS, TIER, Rig, key_of

ROW = 64 << 10


@dataclass
class Fault:
    """One that is on."""

    hits: Callable[[], int]
    release: Callable[[], None] = field(default=lambda: None)


class Kind:
    """A tier and its storage. `read` and `write` are the two things that storage does."""

    name = ""
    bounded: ClassVar[dict[str, Any]] = {}  # keys with which no wait is longer than about a second, if it has such
    apart: ClassVar[dict[str, Any]] = {}  # keys with which each chunk has a file of its own

    def base(self, root: Path) -> dict[str, Any]:
        """The configuration that works."""
        raise NotImplementedError

    def rig(self, root: Path, **how: Any) -> Rig:
        """A tier over `root`."""
        return Rig(root, base=self.base(root), row_bytes=ROW, **how)

    def place(self, rig: Rig, key: bytes) -> tuple[Path, int, int]:
        """(file, offset, bytes) of what is stored under a key."""
        raise NotImplementedError

    def fails(self, op: str, number: int = errno.EIO) -> AbstractContextManager[Fault]:
        """Every `op` ends with this errno."""
        raise NotImplementedError

    def hangs(self, op: str) -> AbstractContextManager[Fault]:
        """No `op` returns before `release()`, or the end of the block."""
        raise NotImplementedError

    def slow(self, op: str, seconds: float) -> AbstractContextManager[Fault]:
        """Every `op` takes so long."""
        raise NotImplementedError


class Kvxfer(Kind):
    """One root with slabs; faults are in the table of system calls."""

    name = "kvxfer"
    bounded: ClassVar = {"drain_timeout_s": 0.3, "shutdown_timeout_s": 0.5}
    apart: ClassVar = {"slab_bytes": 4096 + ROW + 4096}  # header, row, trailer

    def base(self, root: Path) -> dict[str, Any]:
        return TIER | KEYS | {"root_dir": str(root), "breaker_failures": 0}

    def place(self, rig: Rig, key: bytes) -> tuple[Path, int, int]:
        path, offset, layout = rig.tier._store.locate(rig.tier._engine.digest, key)
        return path, offset, layout.slot_bytes

    @contextmanager
    def _on(self, how: str, op: str, *arguments: Any) -> Iterator[Fault]:
        with FaultyIO() as io:
            rule = getattr(io, how)({"read": "pread", "write": "pwrite"}[op], *arguments)
            yield Fault(lambda: rule.hits, io.release)

    def fails(self, op: str, number: int = errno.EIO) -> AbstractContextManager[Fault]:
        return self._on("fail", op, number)

    def hangs(self, op: str) -> AbstractContextManager[Fault]:
        return self._on("hang", op)

    def slow(self, op: str, seconds: float) -> AbstractContextManager[Fault]:
        return self._on("delay", op, seconds)


class Fs(Kind):
    """vLLM's own, a file for each chunk; faults are in front of the two functions that its threads call."""

    name = "fs"

    def base(self, root: Path) -> dict[str, Any]:
        return {"type": "fs", "root_dir": str(root), "n_read_threads": 2, "n_write_threads": 2}

    def place(self, rig: Rig, key: bytes) -> tuple[Path, int, int]:
        path = Path(rig.tier.file_mapper.get_file_name(key))
        return path, 0, path.stat().st_size

    @contextmanager
    def _on(self, op: str, before: Callable[[], None], release: Callable[[], None]) -> Iterator[Fault]:
        name = {"read": "batch_load_block", "write": "batch_store_block"}[op]
        real = getattr(fs_manager, name)
        calls: list[None] = []

        def through(*arguments: Any) -> Any:
            calls.append(None)
            before()
            return real(*arguments)

        with mock.patch.object(fs_manager, name, through):
            try:
                yield Fault(lambda: len(calls), release)
            finally:
                release()

    def fails(self, op: str, number: int = errno.EIO) -> AbstractContextManager[Fault]:
        def fail() -> None:
            raise OSError(number, os.strerror(number))

        return self._on(op, fail, lambda: None)

    def hangs(self, op: str) -> AbstractContextManager[Fault]:
        go = threading.Event()
        return self._on(op, lambda: (go.wait(), None)[1], go.set)

    def slow(self, op: str, seconds: float) -> AbstractContextManager[Fault]:
        return self._on(op, lambda: time.sleep(seconds), lambda: None)


class Example(Kind):
    """vLLM's own for those who write one: remembers keys, and nothing of what they are for. It has no storage."""

    name = "example"

    def base(self, root: Path) -> dict[str, Any]:
        return {"type": "example"}


KINDS: dict[str, Kind] = {kind.name: kind for kind in (Kvxfer(), Fs(), Example())}


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE = ("deleted", "truncated", "zeroed", "flipped", "swapped")


def damage(places: dict[int, tuple[Path, int, int]], how: str, number: int, other: int) -> set[int]:
    """Does it to what is stored of chunk `number` (and of `other`, if they swap). Returns the chunks that are lost."""
    path, offset, nbytes = places[number]
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, offset + nbytes // 2)
    else:
        data = {n: _read(places[n]) for n in (number, other)}
        new = {"zeroed": bytes(nbytes), "flipped": _flip(data[number]), "swapped": data[other]}[how]
        _write(places[number], new)
        if how == "swapped":
            _write(places[other], data[number])
            return {number, other}
    return {number}


def _read(place: tuple[Path, int, int]) -> bytes:
    path, offset, nbytes = place
    with path.open("rb") as file:
        return os.pread(file.fileno(), nbytes, offset)


def _write(place: tuple[Path, int, int], data: bytes) -> None:
    with place[0].open("r+b") as file:
        os.pwrite(file.fileno(), data, place[1])
        os.fsync(file.fileno())


def stored(rig: Rig, kind: Kind, numbers: range) -> dict[int, tuple[Path, int, int]]:
    """Where chunks are."""
    return {number: kind.place(rig, key_of(number)) for number in numbers}


# ---- what is known of them --------------------------------------------------------------------------------------

NOTHING = "keeps no bytes"
BELIEVES = "believes any file of the right size"
STOPS = "stops at the first bad chunk: those beyond it are not tried"
NO_STORAGE = "has no storage that could fail"

# {tier: {test, or test[case]: why it does not hold there}}
KNOWN = {
    "kvxfer": {},
    "fs": {
        "test_a_lookup_answers_at_once": "a thread of its own asks the file system: RETRY first",
        "test_what_is_damaged_does_not_arrive_and_all_else_does[deleted]": STOPS,
        "test_what_is_damaged_does_not_arrive_and_all_else_does[truncated]": STOPS,
        "test_what_is_damaged_does_not_arrive_and_all_else_does[zeroed]": BELIEVES,
        "test_what_is_damaged_does_not_arrive_and_all_else_does[flipped]": BELIEVES,
        "test_what_is_damaged_does_not_arrive_and_all_else_does[swapped]": BELIEVES,
        "test_what_was_damaged_is_right_once_stored_again[zeroed]": "a file that is there is not written again",
        "test_what_was_damaged_is_right_once_stored_again[flipped]": "a file that is there is not written again",
        "test_what_was_damaged_is_right_once_stored_again[swapped]": "a file that is there is not written again",
        "test_a_hole_costs_what_is_missing_and_nothing_else": STOPS,
        "test_what_failed_for_a_request_is_a_hit_after_a_store": "a request's answers are never taken back",
        "test_a_load_goes_ahead_of_stores_that_hang": "stores that hang take the threads of loads too",
        "test_a_drain_ends_though_a_read_does_not": "waits for ever",
        "test_a_shutdown_ends_though_a_read_does_not": "waits for ever",
    },
    "example": {
        "test_a_load_brings_what_was_stored": NOTHING,
        "test_rows_are_the_callers_once_the_result_is_there": NOTHING,
        "test_another_process_finds_what_was_stored": NOTHING,
        "test_loads_beside_stores_of_the_same_keys": NOTHING,
        "test_a_hole_costs_what_is_missing_and_nothing_else": "one missing key fails all of them",
        "test_keys_of_two_groups_are_not_mixed_up": NOTHING,
    },
}
NOT_ASKED = {
    "example": {
        "test_what_is_damaged_does_not_arrive_and_all_else_does": NO_STORAGE,
        "test_what_was_damaged_is_right_once_stored_again": NO_STORAGE,
        "test_what_failed_for_a_request_is_a_hit_after_a_store": NO_STORAGE,
        "test_what_failed_for_a_request_is_a_miss_for_it": NO_STORAGE,
        "test_storage_errors_do_not_raise": NO_STORAGE,
        "test_nobody_waits_for_a_write_that_hangs": NO_STORAGE,
        "test_a_load_goes_ahead_of_stores_that_hang": NO_STORAGE,
        "test_a_drain_leaves_nothing_under_way": NO_STORAGE,
        "test_a_drain_ends_though_a_read_does_not": NO_STORAGE,
        "test_a_shutdown_ends_though_a_read_does_not": NO_STORAGE,
    }
}
CASES = {
    "test_what_is_damaged_does_not_arrive_and_all_else_does": DAMAGE,
    "test_what_was_damaged_is_right_once_stored_again": DAMAGE,
    "test_storage_errors_do_not_raise": ("read", "write"),
}
