"""Chunks straight between a device and the drive: the native engine's bytes and verdicts, whatever goes wrong."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device import gds_carrier
from kvxfer.device.base import Buffer
from kvxfer.device.carrier import Batch
from kvxfer.device.form import form_of
from kvxfer.device.gds_carrier import DeviceTrial, GdsCarrier
from kvxfer.device.gds_slots import SlotPlan, Span
from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError, DeviceError
from kvxfer.io import gds, kvikio_door, ladder
from kvxfer.io.gds import COMPAT, DIRECT
from kvxfer.jobs import LOAD, STORE, ChunkError, JobOutcome, Status
from kvxfer.layout import row_mapping
from kvxfer.report import Reporter
from kvxfer.store import Store
from kvxfer.testing import FakeDevice, FaultyIO, ManualClock, assert_bytes_equal
from tests.device.gds_rig import Cuda, GdsRig, TrackedDevice
from tests.engine.rig import keys_of, namespace_of
from tests.jobs.rig import DIGEST, EACH, MODEL, Rig, expect, generation_of, key_of, poisoned, ranks
from tests.kvikio_double import Kvikio, kvikio
from tests.oracle import POISON

__all__ = ["kvikio"]

Make = Callable[..., GdsRig]


@pytest.fixture
def make(kvikio: Kvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Rigs, over one file unless another is named. What kvikio and the machine answer is tested elsewhere."""
    from kvxfer import probe

    monkeypatch.setattr(kvikio_door, "_asked", [probe.Probe(True, "kvikio", {"compat_mode": "AUTO"})])
    monkeypatch.setattr(gds_carrier, "engine_reporter", Reporter("kvxfer.engine"))
    made: list[GdsRig] = []

    def rig(pages: list[KVPages], name: str = "slots", **options: Any) -> GdsRig:
        made.append(GdsRig(kvikio, tmp_path / name, pages, **options))
        return made[-1]

    yield rig
    for each in made:
        each.__exit__()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.002)


def ok(outcome: JobOutcome) -> None:
    assert (outcome.status.tolist(), outcome.errors) == ([0] * len(outcome.status), ())


def found(outcome: JobOutcome) -> list[ChunkError]:
    assert [error.chunk for error in outcome.errors] == np.flatnonzero(outcome.status).tolist()
    assert [error.status for error in outcome.errors] == [Status(s) for s in outcome.status if s]
    return list(outcome.errors)


# ---- the same bytes


@pytest.mark.parametrize("mode", [DIRECT, COMPAT])
@pytest.mark.parametrize(("tp", "blocks", "seed"), [(1, 1, 1), (2, 1, 2), (4, 2, 3), (8, 1, 4)])
def test_slots_are_the_native_engines_bit_for_bit(make: Make, mode: str, tp: int, blocks: int, seed: int) -> None:
    """All ranks' parts: what a slot holds, padding and trailers included, does not say who wrote it."""
    ids = [list(range(c, c + blocks)) for c in range(0, 8, blocks)]
    if blocks > 1:
        ids[0][1] = -1  # a chunk that is not full
        ids[-1][0] = -1
    source = ranks(MODEL, "nhd", tp, blocks, filled=True)
    rig, other = make(source, mode=mode, seed=seed), make(source, "other", mode=mode)
    ok(rig.put(source, ids))
    ok(other.store(source, ids))
    assert_bytes_equal(np.fromfile(rig.path, np.uint8), np.fromfile(other.path, np.uint8))


@pytest.mark.parametrize("mode", [DIRECT, COMPAT])
@pytest.mark.parametrize(("store_tp", "load_tp", "blocks"), [(1, 1, 1), (2, 4, 1), (4, 1, 2), (1, 8, 2)])
def test_each_reads_what_the_other_wrote(make: Make, mode: str, store_tp: int, load_tp: int, blocks: int) -> None:
    ids = [list(range(c, c + blocks)) for c in range(0, 8, blocks)]
    source = ranks(MODEL, "nhd", store_tp, blocks, filled=True)
    rig = make(source, mode=mode)
    for put, get in ((rig.put, rig.load), (rig.store, rig.get)):
        target = ranks(MODEL, "packed", load_tp, blocks, filled=False)
        rig.path.write_bytes(b"")
        ok(put(source, ids))
        ok(get(target, ids))
        expect(MODEL, "packed", target, range(8))
    assert rig.carrier.stats()["segments_verified"] == len(ids) * rig.slot.num_segments


@pytest.mark.parametrize("mine", [(0,), (1,), (3,), (0, 2), (1, 2, 3)])
def test_a_rank_moves_its_own_part_and_no_more(make: Make, mine: tuple[int, ...]) -> None:
    """In the middle of a slot, or in pieces: other ranks' segments and trailers are not touched."""
    source = ranks(MODEL, "nhd", 4, filled=True)
    part = [source[rank] for rank in mine]
    rig, whole = make(part), make(source, "whole")
    filler = np.random.default_rng(5).integers(256, size=8 * rig.slot.slot_bytes, dtype=np.uint8)
    rig.path.write_bytes(filler.tobytes())
    ok(rig.put(part, EACH))
    ok(whole.store(source, EACH))
    want, full = filler.reshape(8, -1).copy(), np.fromfile(whole.path, np.uint8).reshape(8, -1)
    slot = rig.slot
    for rank in mine:
        for start, n in (
            (rank * slot.segment_stride, slot.segment_stride),
            (slot.payload_stride + rank * slot.alignment, slot.alignment),
        ):
            want[:, start : start + n] = full[:, start : start + n]
    assert_bytes_equal(np.fromfile(rig.path, np.uint8).reshape(8, -1), want)
    target = ranks(MODEL, "hnd", 4, filled=False)
    ok(rig.get([target[rank] for rank in mine], EACH))
    assert rig.carrier.stats()["bytes_read"] == 8 * len(mine) * (slot.segment_stride + slot.alignment)
    assert poisoned([pages for rank, pages in enumerate(target) if rank not in mine])
    for rank in mine:
        want_pages = MODEL.pages("hnd", tp_size=4, tp_rank=rank, padding=24, offset=8)
        for got, right in zip(target[rank].tensors, want_pages, strict=True):
            assert_bytes_equal(got, right)


@pytest.mark.parametrize("nbytes", [5000, 262144, 600_000])
def test_rows_have_one_writer_and_trailers_of_many_segments(make: Make, nbytes: int) -> None:
    mapping = row_mapping(nbytes)
    rows = np.random.default_rng(nbytes).integers(256, size=(4, nbytes), dtype=np.uint8)
    source = [KVPages(mapping, [rows.reshape(-1)], 4)]
    rig, other = make(source), make(source, "other")
    ids = [[3], [1], [0]]
    ok(rig.put(source, ids))
    ok(other.store(source, ids))
    assert_bytes_equal(np.fromfile(rig.path, np.uint8), np.fromfile(other.path, np.uint8))
    back = np.full_like(rows, POISON)
    ok(other.get([KVPages(mapping, [back.reshape(-1)], 4)], ids))
    assert_bytes_equal(back[[3, 1, 0]], rows[[3, 1, 0]])
    assert (back[2] == POISON).all()
    at, each = rig.slot.payload_stride, 1 if nbytes < 262145 else 3
    assert SlotPlan(form_of([mapping])).payload == (Span(0, 0, at),)
    assert len(SlotPlan(form_of([mapping])).places[0]) == each


def test_a_chunks_payload_is_one_request_from_registered_memory(make: Make) -> None:
    source = ranks(MODEL, "nhd", 2, filled=True)
    rig = make(source, bay_chunks=3)
    ok(rig.put(source, EACH))
    writes = rig.calls("raw_write")
    assert sorted((size, offset, straight) for _, size, offset, _, straight in writes) == [
        (rig.slot.payload_stride, c * rig.slot.slot_bytes, True) for c in range(8)
    ]
    assert {dev_offset for _, _, _, dev_offset, _ in writes} <= {c * rig.slot.payload_stride for c in range(3)}
    ok(rig.get(ranks(MODEL, "nhd", 2, filled=False), EACH))
    assert all(straight for *_, straight in rig.calls("raw_read"))
    assert len(rig.calls("raw_read")) == 8
    assert len(rig.calls("CuFile")) == 1


def test_many_batches_of_many_jobs_in_any_order_of_the_device(make: Make) -> None:
    source = ranks(MODEL, "nhd", 2, filled=True)
    for seed in range(6):
        rig = make(source, f"slots-{seed}", seed=seed, bay_chunks=1 + seed % 3, bays=1 + seed % 4)
        targets = [ranks(MODEL, "hnd", 1, filled=False) for _ in range(3)]
        half = [rig.start(STORE, source, EACH[:4]), rig.start(STORE, source, EACH[4:], chunks=range(4, 8))]
        assert sorted(rig.end(STORE).job_id for _ in half) == half
        jobs = [rig.start(LOAD, target, EACH) for target in targets]
        outcomes = [rig.end(LOAD) for _ in jobs]
        assert sorted(outcome.job_id for outcome in outcomes) == jobs
        for outcome, target in zip(outcomes, targets, strict=True):
            ok(outcome)
            expect(MODEL, "hnd", target, range(8))


@pytest.mark.parametrize("short", [5000, 4096])
def test_short_transfers_are_looped(make: Make, short: int) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig, other = make(source, request_bytes=8192), make(source, "other")
    rig.kvikio.double.faults["short"] = short
    with FaultyIO() as io:
        io.short("pwrite", 1024, times=3)
        io.short("pread", 1024, times=3)
        ok(rig.put(source, EACH))
        rig.kvikio.double.faults.clear()
        ok(other.store(source, EACH))
        assert_bytes_equal(np.fromfile(rig.path, np.uint8), np.fromfile(other.path, np.uint8))
        rig.kvikio.double.faults["short"] = short
        target = ranks(MODEL, "hnd", 1, filled=False)
        ok(rig.get(target, EACH))
    expect(MODEL, "hnd", target, range(8))
    assert max(size for _, size, *_ in rig.calls("raw_read")) <= 8192


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


def test_a_write_that_never_returns_is_lost_and_its_bay_kept_until_it_does(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=3, bay_chunks=2, depth=2, io_timeout_s=0.6)
    rig.kvikio.double.faults.update(hang=["raw_write"])
    job = rig.start(STORE, source, EACH[:2])
    outcome = rig.end(STORE)
    assert outcome.status.tolist() == [Status.LOST, Status.LOST]
    assert rig.gds.wait_gathered(job, 0) is not False
    assert list(rig.gds.late()) == []
    stats = rig.gds.stats()
    assert (stats["device_held_bays"], stats["lost_writes"], stats["lost_threads"]) == (1, 2, 2)
    rig.kvikio.double.faults.clear()
    ok(rig.put(source, EACH[4:], chunks=range(4, 8)))  # by the other bay, and other threads
    late: list[tuple[int, int]] = []
    rig.kvikio.double.release.set()
    until(lambda: late.extend(rig.gds.late()) or len(late) == 2)
    assert sorted(late) == [(job, 0), (job, 1)]
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    ok(rig.put(source, EACH))
    ok(rig.load(target := ranks(MODEL, "hnd", 1, filled=False), EACH))
    expect(MODEL, "hnd", target, range(8))


def test_a_read_that_never_returns_is_lost_and_writes_into_no_bay_of_others(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=1, io_timeout_s=0.6)
    ok(rig.store(source, EACH))
    rig.kvikio.double.faults.update(hang=["raw_read"], hang_from=2 * rig.slot.slot_bytes)
    target = ranks(MODEL, "hnd", 1, filled=False)
    rig.start(LOAD, target, EACH)
    until(lambda: len(rig.calls("raw_read")) == 3)
    rig.kvikio.double.faults.clear()
    errors = found(rig.end(LOAD))
    assert [(error.chunk, error.status) for error in errors] == [(2, Status.LOST)]
    expect(MODEL, "hnd", target, [b for b in range(8) if b != 2])
    assert rig.gds.stats()["device_held_bays"] == 1
    other = ranks(MODEL, "hnd", 1, filled=False)
    ok(rig.get(other, EACH))
    expect(MODEL, "hnd", other, range(8))
    rig.kvikio.double.release.set()
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    expect(MODEL, "hnd", target, [b for b in range(8) if b != 2])


def test_where_no_thread_is_left_chunks_are_stalled(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=3, bay_chunks=8, depth=1, max_lost=0, io_timeout_s=0.6)
    rig.kvikio.double.faults["hang"] = ["raw_write"]
    outcome = rig.put(source, EACH)
    assert outcome.status.tolist() == [Status.LOST] + [Status.STALLED] * 7
    assert rig.put(source, EACH[:1]).status.tolist() == [Status.STALLED]
    rig.kvikio.double.faults.clear()
    rig.kvikio.double.release.set()
    until(lambda: rig.carrier.stats()["lost_threads"] == 0)
    ok(rig.put(source, EACH))


def test_at_the_deadline_what_has_arrived_is_kept_and_nothing_else_reaches_the_pages(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch: three chunks have come, two hang, and the others have not begun."""
    monkeypatch.setattr("kvxfer.device.flights.LANDING_NS", 10**9)  # a busy machine's time to sum and to scatter
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    ok(rig.store(source, EACH))
    rig.flip(0, 100)  # and one of the three is damaged
    # Whichever thread comes first to which chunk.
    rig.kvikio.double.faults.update(hang=["raw_read"], hang_from=3 * rig.slot.slot_bytes)
    target = ranks(MODEL, "hnd", 1, filled=False)
    outcome = rig.get(target, EACH, deadline_s=4.0)
    assert outcome.status.tolist() == [Status.BAD_SUM] + [Status.OK] * 2 + [Status.CUT] * 5
    done = [1, 2]
    expect(MODEL, "hnd", target, done)
    until(lambda: rig.gds.stats()["device_held_bays"] == 1)
    rig.kvikio.double.faults.clear()
    rig.kvikio.double.release.set()
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    expect(MODEL, "hnd", target, done)
    assert len(rig.calls("raw_read")) == 5
    assert rig.carrier.stats()["deadline_cuts"] == 5


def test_a_cancelled_store_leaves_what_was_begun_lost_and_the_rest_untouched(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    rig.kvikio.double.faults["hang"] = ["raw_write"]
    job = rig.start(STORE, source, EACH)
    until(lambda: len(rig.calls("raw_write")) == 2)
    rig.gds.cancel(job)
    outcome = rig.end(STORE)
    assert sorted(outcome.status.tolist()) == [Status.CANCELLED] * 6 + [Status.LOST] * 2
    rig.kvikio.double.release.set()
    late: list[tuple[int, int]] = []
    until(lambda: late.extend(rig.gds.late()) or len(late) == 2)
    assert sorted(late) == [(job, chunk) for chunk in np.flatnonzero(outcome.status == Status.LOST).tolist()]
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    assert len(rig.calls("raw_write")) == 2


def test_a_cancelled_load_touches_no_page_any_more(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    ok(rig.store(source, EACH))
    rig.kvikio.double.faults["hang"] = ["raw_read"]
    target = ranks(MODEL, "hnd", 1, filled=False)
    job = rig.start(LOAD, target, EACH)
    until(lambda: len(rig.calls("raw_read")) == 2)
    rig.gds.cancel(job)
    assert rig.end(LOAD).status.tolist() == [Status.CANCELLED] * 8
    rig.kvikio.double.release.set()
    until(lambda: rig.gds.stats()["device_held_bays"] == 0)
    assert poisoned(target)


def test_a_device_that_is_lost_while_it_sums_ends_the_job(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    for op, after in (("checksum", 1), ("done", 3), ("copy", 3)):
        rig = make(source, f"slots {op}")
        ok(rig.store(source, EACH))
        rig.device.faults.lose(op, after=after)
        target = ranks(MODEL, "hnd", 1, filled=False)
        rig.start(LOAD, target, EACH)
        outcome = rig.end(LOAD)
        assert Status.DEVICE in outcome.status
        assert rig.get(target, EACH).status.tolist() == [Status.DEVICE] * 8
    rig = make(source, "slots of a store")
    rig.device.faults.lose("done", after=4)
    assert Status.DEVICE in rig.put(source, EACH).status


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_process_that_was_stopped_does_not_take_its_device_for_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch, direction: int
) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, io_timeout_s=8.0)
    ok(rig.store(source, EACH[:1]))
    form = form_of([source[0].mapping])
    with monkeypatch.context() as patch:
        patch.setattr("kvxfer.device.job.time.monotonic", clock := ManualClock(50.0))
        carrier = GdsCarrier(rig.device, rig.backend, rig.config)
        bay = carrier.make_bay(9, form.chunk_bytes, 8 * form.slot.blocks_per_chunk, 8 * len(form.segments))
        batch = Batch(direction, bay, form, rig.record(0), np.array(EACH[:1], dtype=np.int64), DIGEST)
        if direction == STORE:
            rig.device.frozen = True
            carrier.begin_store(batch, rig.device.mark())
        else:
            carrier.begin_load(batch)
            until(lambda: carrier.stats()["busy_threads"] == 0 and bool(carrier.stats()["bytes_read"]))
            rig.device.frozen = True
        assert carrier.poll() == [], "the device sums, or is asked for its sums"
        clock.advance(1000.0)
        assert carrier.poll() == [], "nothing was lived through meanwhile"
        for _ in range(8):
            assert carrier.poll() == []
            clock.advance(0.9)
        (landing,) = carrier.poll()
        assert landing.status.tolist() == [Status.DEVICE] and landing.fault is not None
    rig.device.frozen = False
    rig.device.run()


def test_a_shutdown_is_bounded_though_calls_hang(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    rig.kvikio.double.faults["hang"] = ["raw_write"]
    rig.start(STORE, source, EACH)
    until(lambda: len(rig.calls("raw_write")) == 2)
    start = time.monotonic()
    assert rig.gds.shutdown(0.3) == 2
    assert time.monotonic() - start < 10
    outcome = rig.end(STORE)
    assert sorted(outcome.status.tolist()) == [Status.CANCELLED] * 6 + [Status.LOST] * 2
    rig.kvikio.double.release.set()
    late: list[tuple[int, int]] = []
    until(lambda: late.extend(rig.gds.late()) or len(late) == 2)


def test_a_shutdown_waits_for_writes_under_way(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, bays=2, bay_chunks=8, depth=2)
    rig.kvikio.double.faults["hang"] = ["raw_write"]
    rig.start(STORE, source, EACH)
    until(lambda: len(rig.calls("raw_write")) == 2)

    def release() -> None:
        until(lambda: rig.carrier._closing)
        rig.kvikio.double.release.set()

    threading.Thread(target=release).start()
    assert rig.carrier.shutdown(20.0) == 0
    outcome = rig.end(STORE)
    assert sorted(outcome.status.tolist()) == [Status.OK] * 2 + [Status.CANCELLED] * 6


def test_after_a_shutdown_all_memory_is_given_back(make: Make) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source)
    ok(rig.put(source, EACH))
    assert len(rig.kvikio.double.registered) == 3
    assert rig.gds.shutdown(5.0) == 0
    assert rig.kvikio.double.registered == {}
    assert rig.device.allocated == {True: 0, False: 0}


# ---- registration


@pytest.mark.parametrize(
    ("faults", "registered", "says"),
    [
        ({"register": "cuFile error 5012: memory type not supported"}, 0, "memory type not supported"),
        ({"register_most": 2}, 2, "BAR1 is exhausted"),
    ],
)
def test_bays_that_cannot_be_registered_work_and_are_said(
    make: Make, kvikio: Kvikio, caplog: pytest.LogCaptureFixture, faults: dict[str, Any], registered: int, says: str
) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    if "register_most" in faults:
        probe = make(source, "probe", bays=1)
        (nbytes,) = kvikio.double.registered.values()
        probe.gds.shutdown(5)
        faults = {"register_most": faults["register_most"] * nbytes}
    kvikio.double.faults.update(faults)
    with caplog.at_level(logging.WARNING, "kvxfer.engine"):
        rig = make(source, bays=4)
    assert len(kvikio.double.registered) == registered
    (line,) = [record for record in caplog.records if record.event == "registration"]  # type: ignore[attr-defined]
    assert says in line.getMessage()
    assert "is not registered with the drive, its transfers are slower" in line.getMessage()
    assert rig.backend.describe()["unregistered_buffers"] == 4 - registered
    ok(rig.put(source, EACH))
    target = ranks(MODEL, "hnd", 1, filled=False)
    ok(rig.get(target, EACH))
    expect(MODEL, "hnd", target, range(8))
    assert {straight for *_, straight in rig.calls("raw_write")} <= ({False, True} if registered else {False})


def test_compat_mode_registers_nothing_and_says_nothing_of_it(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    rig = make(source, mode=COMPAT)
    ok(rig.put(source, EACH))
    assert rig.calls("memory_register") == []
    assert [record for record in caplog.records if record.event == "registration"] == []  # type: ignore[attr-defined]


# ---- from a rung


def test_the_ladder_is_tried_with_a_devices_own_memory(
    make: Make, kvikio: Kvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make  # noqa: B018 kvikio has answered
    monkeypatch.setattr(ladder, "_ask_driver", lambda *_: {"is_gds_available": 1, "max_direct_io_bytes": 1 << 20})
    cuda = Cuda(kvikio)
    device = TrackedDevice(cuda)
    rung = ladder.climb(tmp_path, DeviceTrial(device), cuda=cuda)
    assert (rung.name, rung.steps, rung.request_bytes) == ("direct", (), 1 << 20)
    assert device.allocated == {True: 0, False: 0}
    assert device.defects == []


@pytest.mark.parametrize(
    ("faults", "rung", "reasons"), [({}, "direct", {}), ({"driver_open": "no"}, "compat", {"driver": 1})]
)
def test_an_engine_takes_the_rung_that_its_root_has_and_tells_it(
    kvikio: Kvikio,
    tmp_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, str],
    rung: str,
    reasons: dict[str, int],
) -> None:
    cuda = Cuda(kvikio)
    monkeypatch.setattr(gds, "LibCuda", lambda: cuda)
    kvikio.in_children(**faults)
    config = EngineConfig(bays=2, bay_bytes=1 << 20)
    target = ranks(MODEL, "hnd", 1, filled=False)
    with Store.open(StoreConfig(root=tmp_root, capacity_bytes=8 << 20, slab_bytes=1 << 20)) as store:
        engines = []
        for pages in (ranks(MODEL, "nhd", 2, filled=True), target):
            device = TrackedDevice(cuda)
            device.label = "cuda:0"
            engines.append(TransferEngine(store, namespace_of(), pages, config=config, device=device))
        writer, reader = engines
        writer.submit_store(1, keys_of(range(8)), list(range(8)))
        assert writer.wait([1], 20)[1].bitmap.count() == 8
        reader.submit_load(2, keys_of(range(8)), list(range(8)))
        assert reader.wait([2], 20)[2].bitmap.count() == 8
        expect(MODEL, "hnd", target, range(8))
        metrics = reader.metrics()
        rungs = {each: metrics.value("kvxfer_io_rung", rung=each) for each in ladder.RUNGS}
        assert rungs == {each: float(each == rung) for each in ladder.RUNGS}
        told = {each: metrics.value("kvxfer_io_steps_down_total", reason=each) for each in ladder.REASONS}
        assert {reason: count for reason, count in told.items() if count} == reasons
        for engine in engines:
            engine.shutdown()
    own = [call for call in kvikio.double.calls if call[0] in ("raw_write", "raw_read") and call[1] < 1 << 20]
    assert len(own) == 16  # the larger ones were the test's
    assert {straight for *_, straight in own} == {rung == "direct"}


def test_what_is_wanted_and_does_not_work_keeps_an_engine_from_starting(
    kvikio: Kvikio, tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gds, "LibCuda", lambda: Cuda(kvikio))
    kvikio.in_children(is_gds_available=False)
    device = TrackedDevice(Cuda(kvikio))
    device.label = "cuda:0"
    pages = ranks(MODEL, "nhd", 1, filled=True)
    with Store.open(StoreConfig(root=tmp_root, capacity_bytes=8 << 20, slab_bytes=1 << 20)) as store:
        with pytest.raises(ConfigError, match="gds='gds' does not work in .*cuFile's own compat mode"):
            TransferEngine(store, namespace_of(), pages, config=EngineConfig(gds="gds"), device=device)
        with pytest.raises(ConfigError, match="gds='direct'"):
            EngineConfig(gds="direct")


def test_a_device_that_is_not_cudas_goes_by_the_host_and_nothing_is_asked(
    kvikio: Kvikio, tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvxfer.device import choice

    monkeypatch.setattr(choice, "climb", lambda *_, **__: pytest.fail("it was asked"))
    pages = ranks(MODEL, "nhd", 1, filled=True)
    with Store.open(StoreConfig(root=tmp_root, capacity_bytes=8 << 20, slab_bytes=1 << 20)) as store:
        engine = TransferEngine(store, namespace_of(), pages, device=FakeDevice())
        assert engine.metrics().value("kvxfer_io_rung", rung="host") == 0
        engine.shutdown()


# ---- calls of the device that do not return


@pytest.mark.parametrize(("op", "direction"), [("done", STORE), ("done", LOAD), ("copy", LOAD), ("checksum", LOAD)])
def test_a_device_call_that_hangs_holds_up_neither_figures_nor_results_nor_the_end(
    make: Make, op: str, direction: int
) -> None:
    """Wherever the thread is in it: in the carrier, too, whose state others ask for."""
    source = ranks(MODEL, "nhd", 1, filled=True)
    ok(make(source).put(source, EACH))
    for after in range(1 + (op == "done")):
        rig = make(source, io_timeout_s=0.2, bays=2, bay_chunks=8)
        rule = rig.device.faults.hang(op, after=after)
        asked: list[object] = []

        def answers(what: Callable[[], object], asked: list[object] = asked) -> bool:
            asking = threading.Thread(target=lambda: asked.append(what()), daemon=True)
            asking.start()
            asking.join(20)
            return not asking.is_alive()

        try:
            rig.start(direction, source, EACH)
            stop = time.monotonic() + 5
            while not rule.hits and rig.gds.poll(direction) is None and time.monotonic() < stop:
                time.sleep(0.002)
            if rule.hits:
                assert answers(rig.gds.stats), f"figures, call {after}"
                assert answers(lambda rig=rig: rig.end(direction, 15)), f"its result, call {after}"  # type: ignore[misc]
                assert answers(lambda rig=rig: rig.gds.shutdown(0.1)), f"the end, call {after}"  # type: ignore[misc]
                assert asked[-1] == 1, "the thread is left behind"
        finally:
            rig.device.faults.release()


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


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_calls_of_a_cancelled_job_that_return_soon_stall_nobody(make: Make, direction: int) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "hnd", 1, filled=False)
    rig = make(source, bay_chunks=1, bays=2)
    ok(rig.store(source, EACH))
    name = "raw_write" if direction == STORE else "raw_read"
    pages = source if direction == STORE else target
    rig.kvikio.double.faults["hang"] = [name]
    job = rig.start(direction, pages, EACH)
    until(lambda: len(rig.calls(name)) == (1 if direction == STORE else 2))
    rig.gds.cancel(job)
    assert rig.end(direction).job_id == job
    rig.start(direction, pages, EACH)
    time.sleep(0.05)
    rig.kvikio.double.faults.clear()
    rig.kvikio.double.release.set()
    ok(rig.end(direction))


def test_bays_of_a_lost_device_that_cannot_be_freed_do_not_keep_a_runner_from_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(ranks(MODEL, "nhd", 1, filled=True))

    def lost(_: Buffer) -> None:
        raise DeviceError("the device was lost")

    with monkeypatch.context() as patched:
        patched.setattr(type(rig.cuda.made[0]), "free", lost)
        assert rig.gds.shutdown(1.0) == 0
