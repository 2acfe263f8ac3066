"""The copy engines as they are measured: on host memory, with the native converter and a double of the CUDA runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import probe
from kvxfer.device import calibration
from kvxfer.device.calibration import DIRECTIONS, ENGINES, Point, WrongBytes, calibrate
from kvxfer.errors import DeviceError
from tests.device.converter_double import Converter, first_byte, last_byte
from tests.native.cuda_libraries import FakeRuntime, fake_runtime

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from kvxfer.convert import launch  # noqa: E402
from kvxfer.device import copy_bench  # noqa: E402
from kvxfer.device.copy_bench import CopyBench, Workload, driver_version  # noqa: E402


@pytest.fixture
def fake_cuda() -> FakeRuntime:
    runtime = fake_runtime()
    runtime.reset()
    return runtime


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    double = Converter()
    monkeypatch.setattr(copy_bench, "launch", double)
    return double


@pytest.fixture
def bench(converter: Converter, fake_cuda: FakeRuntime) -> CopyBench:
    return CopyBench("cpu", fake_cuda.cuda)


@pytest.mark.parametrize("fragments", [16, 48, 16 * 65])
@pytest.mark.parametrize("fragment", [256, 24, 4096])
def test_every_engine_moves_the_bytes(bench: CopyBench, fragment: int, fragments: int) -> None:
    for direction in DIRECTIONS:
        for engine in ENGINES:
            assert bench.timed(engine, direction, fragment, fragments) > 0


def test_a_batch_has_as_many_fragments_as_were_asked_for(bench: CopyBench, fake_cuda: FakeRuntime) -> None:
    bench.timed("batch", "store", 256, 48)
    assert {note for note in fake_cuda.notes if note[0] != "cudaSetDevice"} == {("cudaMemcpyBatchAsync", 48, 1)}


def test_one_conversion_a_step_and_tables_made_before(bench: CopyBench, converter: Converter) -> None:
    bench.prepare(256, 16)
    bench.prepare(256, 16)
    bench.step("pack", "load", programs=3)()
    bench.step("zero", "store")()
    assert converter.calls == [("prepare", None), ("scatter", 3), ("gather", None)]


@pytest.mark.parametrize(
    ("direction", "call", "spoil"),
    [("store", "gather", first_byte), ("load", "scatter", first_byte), ("load", "scatter", last_byte)],
)
def test_a_wrong_byte_is_seen(bench: CopyBench, converter: Converter, direction: str, call: str, spoil: Any) -> None:
    converter.spoil[call] = spoil
    for engine in ("pack", "zero"):
        with pytest.raises(WrongBytes, match="1 of .* bytes differ"):
            bench.timed(engine, direction, 256, 48)
    assert bench.timed("batch", direction, 256, 48) > 0
    found = calibrate(lambda: bench, [Point(direction, 256, 48)], ENGINES, 100)
    assert set(found.wrong) == {"pack", "zero"}
    assert set(found.seconds[Point(direction, 256, 48)]) == {"batch"}


def test_bytes_that_turn_wrong_while_they_are_timed_are_seen(bench: CopyBench, converter: Converter) -> None:
    times = iter(range(100))
    converter.spoil["gather"] = lambda out: next(times) >= 1 and first_byte(out)
    with pytest.raises(WrongBytes):
        bench.timed("pack", "store", 256, 48)


def test_an_engine_that_does_nothing_is_wrong(bench: CopyBench, converter: Converter, monkeypatch: Any) -> None:
    """What an engine before it wrote must not pass for its own."""
    bench.timed("batch", "store", 256, 48)
    monkeypatch.setattr(converter, "gather", lambda *_, **__: None)
    with pytest.raises(WrongBytes):
        bench.timed("zero", "store", 256, 48)
    bench.timed("batch", "load", 256, 48)
    monkeypatch.setattr(converter, "scatter", lambda *_, **__: None)
    with pytest.raises(WrongBytes):
        bench.timed("zero", "load", 256, 48)


def test_a_loop_is_not_reported_as_a_batch(bench: CopyBench, fake_cuda: FakeRuntime) -> None:
    fake_cuda.fail("cudaMemcpyBatchAsync", 801)
    with pytest.raises(DeviceError, match="no cudaMemcpyBatchAsync: it was a loop"):
        bench.timed("batch", "store", 256, 16)
    with pytest.raises(DeviceError, match="libkvx_cuda cannot be used"):
        CopyBench("cpu").timed("batch", "store", 256, 16)


def test_a_workload_has_other_bytes_in_every_place_and_poison_between() -> None:
    work = Workload("cpu", 256, 48)
    assert (work.nbytes, work.pool.shape) == (48 * 256, (6, 2, 4, 2, 256))
    assert int(work.moved.sum()) * len(work.payload) == work.nbytes
    poison = [block for block in work.pool if (block == copy_bench.POISON).all()]
    assert len(poison) == copy_bench.SPARE_BLOCKS
    for count in (0, 8, 17):
        with pytest.raises(ValueError, match="multiple of 16"):
            Workload("cpu", 256, count)


def test_every_point_of_the_calibration_is_a_workload() -> None:
    for point in calibration.points():
        assert point.fragments % copy_bench.BLOCK_FRAGMENTS == 0


def test_memory_is_given_back(bench: CopyBench) -> None:
    bench.timed("pack", "store", 256, 16)
    bench.close()
    assert bench.work is bench.host is bench.stage is None


def test_the_drivers_own_version_is_told_where_it_can_be_read(tmp_path: Path) -> None:
    proc = tmp_path / "version"
    assert driver_version("13.0", proc) == "CUDA 13.0"
    proc.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x)\nGCC version: 12\n"
    )
    assert driver_version("13.0", proc) == "CUDA 13.0, 580.65.06"
    proc.write_text("nothing of use")
    assert driver_version("13.0", proc) == "CUDA 13.0"


def test_without_a_device_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "cuda", lambda *_: probe.Probe(False, "no libcuda.so.1: no driver"))
    with pytest.raises(DeviceError, match="no CUDA device: no libcuda.so.1: no driver"):
        copy_bench.measure_here()


def test_without_the_library_there_are_no_batches(monkeypatch: pytest.MonkeyPatch, fake_cuda: FakeRuntime) -> None:
    device = probe.Probe(True, "1 x Fake H200")
    monkeypatch.setenv("KVXFER_CUDA", "0")
    assert copy_bench.engines_of(device) == (("pack", "zero"), None, "no batches: turned off: KVXFER_CUDA=0")
    monkeypatch.delenv("KVXFER_CUDA")
    monkeypatch.setenv("KVXFER_CUDA_LIBRARY", str(fake_cuda.path))
    fake_cuda.reset()
    engines, cuda, why = copy_bench.engines_of(device)
    assert (engines, why) == (ENGINES, "")
    assert cuda is not None


def test_places_are_those_of_the_slices() -> None:
    """Fragment by fragment in plain Python."""
    work = Workload("cpu", 16, 16 * 6)
    pool, chunks = work.pool.reshape(-1), work.payload.reshape(-1)
    local, canonical = work.fragment_places
    assert len({*local.tolist()}) == len({*canonical.tolist()}) == 96
    for at, to in zip(local.tolist(), canonical.tolist(), strict=True):
        assert np.array_equal(pool[at : at + 16], chunks[to : to + 16])


def test_the_kernels_themselves_move_the_bytes(fake_cuda: FakeRuntime) -> None:
    """Interpreted: a small job."""
    if not launch.INTERPRETED:
        pytest.skip("the kernels were compiled for a GPU, where tests/gpu does this")
    bench = CopyBench("cpu")
    for engine, direction in (("pack", "store"), ("zero", "load")):
        assert bench.timed(engine, direction, 64, 16) > 0
