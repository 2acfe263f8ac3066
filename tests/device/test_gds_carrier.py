"""Chunks straight between a device and the drive: the native engine's bytes, registration, and rungs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device.form import form_of
from kvxfer.device.gds_carrier import DeviceTrial
from kvxfer.device.gds_slots import SlotPlan, Span
from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError
from kvxfer.io import gds, ladder
from kvxfer.io.gds import COMPAT, DIRECT
from kvxfer.jobs import LOAD, STORE
from kvxfer.layout import row_mapping
from kvxfer.store import Store
from kvxfer.testing import FakeDevice, FaultyIO, assert_bytes_equal
from tests.device.gds_rig import Cuda, Make, TrackedDevice, make, ok
from tests.engine.rig import keys_of, namespace_of
from tests.jobs.rig import EACH, MODEL, expect, poisoned, ranks
from tests.kvikio_double import Kvikio, kvikio
from tests.oracle import POISON

__all__ = ["kvikio", "make"]


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
