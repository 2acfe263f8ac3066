"""Chunks straight between a device and the drive: what is damaged, and what fails, is that chunk's alone."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.device import gds_carrier
from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.testing import FaultyIO
from tests.device.gds_rig import Make, found, make, ok
from tests.jobs.rig import EACH, MODEL, Rig, expect, generation_of, key_of, poisoned, ranks
from tests.kvikio_double import kvikio

__all__ = ["kvikio", "make"]


# ---- the same verdicts


def damaged(rig: Rig, what: str) -> dict[str, Any]:
    """Damages slot 3; what a load is then asked with."""
    slot, size = rig.slot, rig.slot.slot_bytes
    records = [rig.record(i) for i in range(8)]
    if what == "a flipped bit of payload":
        rig.flip(3, slot.segment_stride + 5)
    elif what == "a flipped bit of the last segment":
        rig.flip(3, (slot.num_segments - 1) * slot.segment_stride + slot.segment_bytes - 1)
    elif what == "a flipped bit of a trailer":
        rig.flip(3, slot.payload_stride + slot.alignment + 300)
    elif what == "a zeroed trailer":
        rig.overwrite(3, slot.payload_stride + 2 * slot.alignment, bytes(slot.alignment))
    elif what == "a zeroed slot":
        rig.overwrite(3, 0, bytes(size))
    elif what == "another slot's bytes":
        rig.overwrite(3, 0, rig.bytes_of(5).tobytes())
    elif what == "another segment's trailer":
        rig.overwrite(3, slot.payload_stride, rig.bytes_of(3)[slot.payload_stride + slot.alignment :][:4096].tobytes())
    elif what == "two segments swapped":
        bytes_, n = rig.bytes_of(3), slot.segment_stride
        rig.overwrite(3, 0, bytes_[n : 2 * n].tobytes() + bytes_[:n].tobytes())
    elif what == "another generation":
        records[3] = rig.record(3, generation=generation_of(4))
    elif what == "another key":
        chunk = _native.Chunk.from_buffer_copy(records[3])
        chunk.key[: len(key_of(9))] = key_of(9)
        records[3] = bytes(chunk)
    elif what == "a shorter key":
        chunk = _native.Chunk.from_buffer_copy(records[3])
        chunk.key_bytes, chunk.key[35] = 35, 0
        records[3] = bytes(chunk)
    elif what == "another namespace":
        return {"digest": bytes(32)}
    elif what in ("a file that ends in the payload", "a file that ends in the trailers", "a file that ends before"):
        end = {"payload": 3 * size + slot.segment_stride + 100, "trailers": 4 * size - 100, "before": 3 * size}
        os.truncate(rig.path, end[what.rpartition(" ")[2]])
    else:
        raise AssertionError(what)
    return {"records": records}


DAMAGE = {
    "a flipped bit of payload": Status.BAD_SUM,
    "a flipped bit of the last segment": Status.BAD_SUM,
    "a flipped bit of a trailer": Status.BAD_TRAILER,
    "a zeroed trailer": Status.BAD_TRAILER,
    "a zeroed slot": Status.BAD_TRAILER,
    "another slot's bytes": Status.FOREIGN,
    "another segment's trailer": Status.FOREIGN,
    "two segments swapped": Status.BAD_SUM,
    "another generation": Status.FOREIGN,
    "another key": Status.FOREIGN,
    "a shorter key": Status.FOREIGN,
    "another namespace": Status.FOREIGN,
    "a file that ends in the payload": Status.TRUNCATED,
    "a file that ends in the trailers": Status.TRUNCATED,
    "a file that ends before": Status.TRUNCATED,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_as_the_native_engine_finds_it(make: Make, what: str) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source)
    ok(rig.store(source, EACH))
    how = damaged(rig, what)
    by_native, by_device = (ranks(MODEL, "hnd", 2, filled=False) for _ in range(2))
    native, device = found(rig.load(by_native, EACH, **how)), found(rig.get(by_device, EACH, **how))
    assert [(error.chunk, error.status) for error in device] == [(error.chunk, error.status) for error in native]
    assert {error.status for error in device if error.chunk == 3} == {DAMAGE[what]}
    failed = {error.chunk for error in device}
    expect(MODEL, "hnd", by_device, [b for b in range(8) if b not in failed])
    three, same = next(error for error in device if error.chunk == 3), next(e for e in native if e.chunk == 3)
    assert three.segment == same.segment
    if DAMAGE[what] is not Status.TRUNCATED:  # which names the transfer, and these are others
        assert (three.offset, three.wanted, three.moved) == (same.offset, same.wanted, same.moved)
    name = {"FOREIGN": "foreign", "BAD_SUM": "bad_sum", "BAD_TRAILER": "bad_trailer", "TRUNCATED": "truncated"}
    assert rig.carrier.stats()[name[DAMAGE[what].name]] >= 1


def test_a_slot_of_another_geometry_is_no_trailer(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source)
    ok(rig.store(source, EACH))
    slot = rig.slot
    page = rig.bytes_of(3)[slot.payload_stride :][: slot.alignment].copy()
    fields, sums = _native.Trailer(), np.zeros(464, np.uint64)
    lib = _native.lib()
    import ctypes

    for name, value in (("blocks_per_chunk", 7), ("payload_bytes", slot.payload_bytes - 1), ("num_segments", 5)):
        assert lib.kvx_trailer_parse(page.ctypes.data, len(page), ctypes.byref(fields), sums.ctypes.data) == 0
        setattr(fields, name, value)
        if name == "num_segments":
            fields.payload_bytes += slot.segment_bytes
        other = page.copy()
        assert lib.kvx_trailer_seal(ctypes.byref(fields), sums.ctypes.data, other.ctypes.data, len(other)) == 0
        rig.overwrite(3, slot.payload_stride, other.tobytes())
        for get in (rig.load, rig.get):
            (error,) = found(get(ranks(MODEL, "nhd", 1, filled=False), EACH))
            assert (error.chunk, error.status, error.segment) == (3, Status.BAD_TRAILER, 0), name


def test_blocks_that_are_not_in_the_chunk_are_absent(make: Make) -> None:
    source = ranks(MODEL, "nhd", 2, 2, filled=True)
    rig = make(source)
    ok(rig.put(source, [[0, 1], [2, -1], [-1, 5], [6, 7]]))
    target = ranks(MODEL, "hnd", 1, 2, filled=False)
    errors = found(rig.get(target, [[-1, 1], [2, 3], [4, -1], [6, 7]]))
    assert [(error.chunk, error.status) for error in errors] == [(1, Status.ABSENT), (2, Status.ABSENT)]
    expect(MODEL, "hnd", target, [1, 6, 7])
    ok(rig.get(ranks(MODEL, "hnd", 1, 2, filled=False), [[0, 1], [2, -1], [-1, 5], [6, -1]]))
    assert rig.carrier.stats()["absent"] == 2


# ---- failures


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("where", ["kvikio", "the trailers"])
def test_a_transfer_that_fails_is_that_chunks_alone(make: Make, direction: int, where: str) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "hnd", 1, filled=False)
    rig = make(source, bay_chunks=8, depth=1)
    if direction == LOAD:
        ok(rig.store(source, EACH))
    with FaultyIO() as io:
        if where == "kvikio":
            name = "raw_write" if direction == STORE else "raw_read"
            rig.kvikio.double.faults["fail"] = {name: "POSIX error: Input/output error"}
        else:
            slot = rig.slot
            low = 3 * slot.slot_bytes + slot.payload_stride
            io.fail("pwrite" if direction == STORE else "pread", errno.EIO, offset=(low, low + 4096))
        outcome = rig.put(source, EACH) if direction == STORE else rig.get(target, EACH)
    errors = found(outcome)
    assert {(error.status, error.errno) for error in errors} == {(Status.IO, errno.EIO)}
    assert [error.chunk for error in errors] == (list(range(8)) if where == "kvikio" else [3])
    assert rig.carrier.stats()["io_errors"] == len(errors)
    if direction == LOAD:
        expect(MODEL, "hnd", target, [] if where == "kvikio" else [b for b in range(8) if b != 3])
    rig.kvikio.double.faults.clear()
    ok(rig.put(source, EACH) if direction == STORE else rig.get(target, EACH))


def test_a_file_that_cannot_be_opened_again_is_an_errno(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source)

    def full(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "dup", full)
    errors = found(rig.put(source, EACH[:2]))
    monkeypatch.undo()
    assert [(error.status, error.errno) for error in errors] == [(Status.IO, errno.EMFILE)] * 2


# ---- what a process runs out of, and what else is odd


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("threads", [0, 1])
def test_where_no_more_threads_can_be_had_chunks_fail_or_wait(
    make: Make, threads: int, direction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "hnd", 1, filled=False)
    rig = make(source, bay_chunks=8, depth=3)
    ok(rig.store(source, EACH))
    start, had = threading.Thread.start, [threads + 1]  # one watches

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("kvx-gds"):
            if not had[0]:
                raise RuntimeError("can't start new thread")
            had[0] -= 1
        start(thread)

    pages = source if direction == STORE else target
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", limited)
        rig.start(direction, pages, EACH)
        outcome = rig.end(direction)
    if threads:
        ok(outcome)
    else:
        assert {(error.status, error.errno) for error in found(outcome)} == {(Status.IO, errno.EAGAIN)}
        assert len(outcome.errors) == 8 and poisoned(target)
    assert not rig.gds.reason
    rig.start(direction, pages, EACH)
    ok(rig.end(direction))
    assert rig.backend.stats()["threads"] <= 3


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("what", [SystemExit(3), KeyboardInterrupt(), StopIteration(), MemoryError()])
@pytest.mark.parametrize("where", ["CuFile", "request"])
def test_whatever_kvikio_raises_is_that_chunks_alone(
    make: Make, where: str, what: BaseException, direction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "hnd", 1, filled=False)
    rig = make(source)
    ok(rig.store(source, EACH))
    module: Any = rig.backend._kvikio

    def odd(*_: object, **__: object) -> int:
        raise what

    pages = source if direction == STORE else target
    with monkeypatch.context() as patched:
        if where == "CuFile":
            patched.setattr(module, "CuFile", odd)
        else:
            patched.setattr(module.CuFile, "raw_read", odd)
            patched.setattr(module.CuFile, "raw_write", odd)
        rig.start(direction, pages, EACH)
        assert {error.status for error in found(rig.end(direction))} == {Status.IO}
    rig.start(direction, pages, EACH)
    ok(rig.end(direction))


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_no_memory_for_trailers_is_that_batch_alone(
    make: Make, direction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "hnd", 1, filled=False)
    rig = make(source)
    ok(rig.store(source, EACH))
    pages = source if direction == STORE else target

    def none(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(gds_carrier, "AlignedBuffer", none)
        rig.start(direction, pages, EACH)
        assert {error.status for error in found(rig.end(direction))} == {Status.CANCELLED}
    assert not rig.gds.reason
    rig.start(direction, pages, EACH)
    ok(rig.end(direction))
