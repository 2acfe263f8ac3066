"""Pack and zero: the same bytes by either, what waits for what, and who decides."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import EngineConfig
from kvxfer.device import choice
from kvxfer.device.calibration import Calibration, Point, WrongBytes
from kvxfer.device.engines import calibrated
from kvxfer.errors import ConfigError, DeviceError
from kvxfer.jobs import LOAD, STORE
from kvxfer.observe import render_metrics
from kvxfer.testing import FakeDevice, FaultyIO
from tests.device.rig import MODEL, Card, card, chunks_of, device_threads
from tests.engine.rig import Node
from tests.jobs.rig import expect, ranks
from tests.jobs.test_faults import until

Choose = Callable[[str, int, int], str]


def always(engine: str) -> Choose:
    return lambda *_: engine


def in_turns() -> Choose:
    """Every other batch by the other engine: a bay is used by one after the other."""
    asked = iter(range(10**6))
    return lambda *_: ("zero", "pack")[next(asked) % 2]


def large_copies(both: Card) -> int:
    """Copies that are not of block ids."""
    return sum(call[0] == "copy" and call[-1] > 1000 for call in both.calls)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
@pytest.mark.parametrize("engine", ["pack", "zero", "both"])
def test_either_engine_moves_the_same_bytes(tmp_path: Path, engine: str, blocks_per_chunk: int) -> None:
    """In any order of the streams; the blocks are filled just before, and spoiled just after."""
    ids = chunks_of(blocks_per_chunk, 22)
    for seed in range(4):
        choose = in_turns() if engine == "both" else always(engine)
        source = ranks(MODEL, "nhd", 2, blocks_per_chunk, filled=False)
        with Card(tmp_path / f"slots {seed}", source, seed=seed, bays=2, choose=choose) as writer:
            assert not writer.store_trapped(MODEL, "nhd", source, ids).errors
            payload = source[0].mapping.slot.payload_stride
            for chunk, want in enumerate(MODEL.payloads(ids)):
                assert (writer.bytes_of(chunk)[:payload] == want).all(), f"slot {chunk}"
            assert (large_copies(writer) == 0) == (engine == "zero")
        target = ranks(MODEL, "hnd", 4, blocks_per_chunk, filled=False)
        with Card(tmp_path / f"slots {seed}", target, seed=seed + 50, bays=2, choose=choose) as reader:
            assert not reader.load_trapped(target, ids).errors
            expect(MODEL, "hnd", target, range(22))
            assert (large_copies(reader) == 0) == (engine == "zero")
    until(lambda: not device_threads(), "no thread is left")


def test_one_rank_of_several_by_the_kernel_alone(tmp_path: Path) -> None:
    ids, source = chunks_of(2), ranks(MODEL, "nhd", 4, 2, filled=True)
    for mine in source:
        with card(tmp_path, [mine], seed=1, choose=always("zero")) as writer:
            assert not writer.store([mine], ids).errors
    target = ranks(MODEL, "hnd", 2, 2, filled=False)
    for mine in target:
        with card(tmp_path, [mine], seed=2, choose=always("zero")) as reader:
            assert not reader.load_trapped([mine], ids).errors
    expect(MODEL, "hnd", target, range(MODEL.num_blocks))


def test_who_chooses_is_asked_for_each_batch_with_its_fragments(tmp_path: Path) -> None:
    asked: list[tuple[str, int, int]] = []

    def choose(direction: str, fragment_bytes: int, fragments: int) -> str:
        asked.append((direction, fragment_bytes, fragments))
        return "zero" if direction == "load" else "pack"

    pages = ranks(MODEL, "nhd", 2, 2, filled=True)
    runs = [run for mine in pages for run in mine.mapping.runs]
    (size,) = {int(run["fragment_size"]) for run in runs}
    per_block = sum(int(run["num_fragments"]) for run in runs)
    with card(tmp_path, pages, choose=choose) as both:
        assert not both.store(pages, [[0, 1], [2, 3], [4, -1]]).errors
        assert not both.load(pages, [[0, -1]]).errors
        assert asked == [("store", size, 5 * per_block), ("load", size, per_block)]
        copied = {name: count for name, count in both.runner.stats().items() if name.startswith("copies")}
        assert copied == {"copies_store_pack": 1, "copies_store_zero": 0, "copies_load_pack": 0, "copies_load_zero": 1}


def test_memory_that_is_not_pinned_is_packed_whatever_is_chosen(tmp_path: Path) -> None:
    """(A kernel that is given such memory is a defect, which the device notes.)"""
    pages, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
    with card(tmp_path, pages, device=FakeDevice(pins=False), choose=always("zero")) as both:
        assert not both.store(pages, chunks_of(1)).errors and not both.load(target, chunks_of(1)).errors
        assert both.runner.stats()["copies_store_zero"] == both.runner.stats()["copies_load_zero"] == 0
    expect(MODEL, "nhd", target, range(24))


# ---- what zero waits for ---------------------------------------------------------------------------------------------


def test_a_write_waits_for_the_gather(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages, bays=4, choose=always("zero")) as writer, FaultyIO() as io:
        rule = io.delay("pwrite", 0.0)
        writer.device.frozen = True
        job = writer.submit(STORE, pages, chunks_of(1, 3))
        until(lambda: "gather" in [call[0] for call in writer.calls], "it is queued")
        assert writer.runner.wait_gathered(job, 0.3) is False and rule.hits == 0
        writer.device.frozen = False
        assert not writer.finish(STORE).errors and rule.hits > 0


def test_a_scatter_follows_the_landing(tmp_path: Path) -> None:
    pages, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
    with card(tmp_path, pages, choose=always("zero")) as both, FaultyIO() as io:
        assert not both.store(pages, chunks_of(1, 3)).errors
        rule = io.hang("pread", times=1)
        both.submit(LOAD, target, chunks_of(1, 3))
        until(lambda: rule.hits == 1, "it is read")
        assert not both.runner.wait([LOAD], 0.2) and "scatter" not in [call[0] for call in both.calls]
        io.release()
        assert not both.finish(LOAD).errors
    expect(MODEL, "nhd", target, range(3))


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_bay_is_not_used_again_under_a_kernel(tmp_path: Path, direction: int) -> None:
    """Of one bay: the second batch begins when the kernel of the first is done, also where nobody waits for that."""
    pages, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
    kernel = "gather" if direction == STORE else "scatter"
    with card(tmp_path, pages, bays=1, choose=always("zero")) as both, FaultyIO() as io:
        assert not both.store(pages, chunks_of(1, 6)).errors
        read = io.delay("pread", 0.0)
        both.device.frozen, before = True, [call[0] for call in both.calls].count(kernel)
        job = both.submit(direction, pages if direction == STORE else target, chunks_of(1, 3))
        until(lambda: [call[0] for call in both.calls].count(kernel) == before + 2, "its kernels are queued")
        reads = read.hits
        both.runner.cancel(job)
        both.submit(LOAD, target, [[3], [4], [5]], chunks=[3, 4, 5])
        assert not both.runner.wait([STORE, LOAD], 0.3), "it is still inside"
        assert read.hits == reads and [call[0] for call in both.calls].count(kernel) == before + 2
        both.device.frozen = False
        both.finish(direction)
        assert direction == LOAD or not both.finish(LOAD).errors
        until(lambda: both.runner.stats()["device_bays_in_use"] == 0, "the bay is back")


def test_a_kernel_that_writes_pinned_memory_for_too_long_loses_the_device_and_keeps_the_bay(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages, io_timeout_s=0.2, choose=always("zero")) as writer:
        writer.device.frozen = True
        writer.submit(STORE, pages, chunks_of(1, 3))
        assert len(writer.finish(STORE).errors) == 3
        assert writer.runner.stats()["device_leaked_bays"] == 1 and writer.runner.stats()["device_lost"] == 1


# ---- who chooses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["pack", "zero", "auto"])
def test_an_engine_takes_what_it_is_told_and_tells_it(
    tmp_root: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is not torch's is not measured: auto is pack."""
    monkeypatch.setattr(Node, "make_device", staticmethod(FakeDevice))
    with Node(tmp_root, MODEL, copy_engine=engine) as node:
        assert node.put(range(10)).bitmap.all() and node.get(range(10)).bitmap.all()
        node.check(range(10))
        text, name = render_metrics(node.reader.metrics(), node.writer.metrics()), engine.replace("auto", "pack")
        counts = {
            line.split()[0]: float(line.split()[1]) for line in text.splitlines() if "kvxfer_copies_total{" in line
        }
        assert len(counts) == 4
        for key, count in counts.items():
            assert (count > 0) == (f'engine="{name}"' in key), key


@pytest.mark.parametrize("said, raised", [("zero", None), ("batch", "pack, zero can"), ("fast", "KVXFER_COPY_ENGINE")])
def test_the_environment_goes_before_the_configuration(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch, said: str, raised: str | None
) -> None:
    monkeypatch.setenv("KVXFER_COPY_ENGINE", said)
    (pages,) = ranks(MODEL, "nhd", 1, filled=True)
    config, threads = EngineConfig(io_threads=1, bay_bytes=1 << 20, copy_engine="pack"), threading.active_count()
    if raised is not None:
        with pytest.raises(ConfigError, match=raised):
            choice.runner_over(config, pages.mapping.slot, [pages], FakeDevice(), tmp_root)
        assert threading.active_count() == threads
        return
    runner, _ = choice.runner_over(config, pages.mapping.slot, [pages], FakeDevice(), tmp_root)
    carrier: Any = vars(runner)["_carrier"]
    assert carrier._choose("store", 1, 1) == "zero"
    runner.shutdown(1)


class Bench:
    """`copy_bench`, as far as it is asked for a calibration."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, list[tuple[Any, ...]]()

    def obtain_here(self, index: int, engines: Any, asked: Any) -> Calibration:
        self.asked.append((index, engines, dict(asked)))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Bench]:
    def with_answer(answer: Any) -> Bench:
        mine = Bench(answer)
        module = types.ModuleType("kvxfer.device.copy_bench")
        module.obtain_here = mine.obtain_here  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kvxfer.device.copy_bench", module)
        return mine

    return with_answer


MEASURED = Calibration(
    engines=("pack", "zero"),
    seconds={
        Point("store", 256, 4096): {"pack": 2.0, "zero": 1.0},
        Point("store", 65536, 256): {"pack": 1.0, "zero": 2.0},
        Point("load", 256, 4096): {"pack": 1.0, "zero": 2.0},
    },
    source="kept",
)


def test_a_device_is_measured_once_in_a_process(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked = bench(MEASURED).asked
    for _ in range(2):
        known = calibrated("cuda:1")
        assert [known.choose(*point) for point in MEASURED.seconds] == ["zero", "pack", "pack"]
    assert asked == [(1, ("pack", "zero"), {"store": "auto", "load": "auto"})]
    calibrated("cuda:2")
    assert [index for index, *_ in asked] == [1, 2]
    assert caplog.records == []


def test_what_is_given_is_not_measured(bench: Any) -> None:
    asked = bench(RuntimeError("must not be asked")).asked
    assert calibrated("cuda:0", "zero").choose("load", 256, 16) == "zero"
    assert calibrated("fake:0").choose("load", 256, 16) == "pack" and not calibrated("fake:0").knows("load")
    assert asked == []


@pytest.mark.parametrize(
    "answer, said",
    [
        (RuntimeError("no kernel image"), "no kernel image"),
        (DeviceError("no CUDA device: none"), "no CUDA device: none"),
        (ImportError("no triton"), "no triton"),
        (Calibration(engines=("pack", "zero"), notes=("the budget of 2 s ended",)), "the budget of 2 s ended"),
    ],
)
def test_a_calibration_that_fails_or_hangs_means_pack_and_is_said_once(
    bench: Any, caplog: pytest.LogCaptureFixture, answer: Any, said: str
) -> None:
    mine = bench(answer)
    for _ in range(2):
        assert calibrated("cuda:0").choose("store", 256, 4096) == "pack"
    assert len(mine.asked) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and said in record.getMessage() and "pack" in record.getMessage()


def test_wrong_bytes_are_no_reason_to_go_on(bench: Any) -> None:
    bench(WrongBytes("no copy engine moves the right bytes here"))
    with pytest.raises(WrongBytes):
        calibrated("cuda:0")
