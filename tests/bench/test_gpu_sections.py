"""What bench.gpu measures, on host memory and small sizes: that bytes are checked, and who notices wrong ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.report import Report, Section
from bench.gpu.sections import Plan, Work, run_all
from bench.gpu.settings import Settings
from kvxfer import probe
from kvxfer.engine import TransferEngine
from kvxfer.geometry import KVGeometry
from kvxfer.testing import FakeDevice, FaultyIO
from tests.device.converter_double import Converter, first_byte, last_byte

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from bench.gpu import beside, build, ceilings, convert, copies, engine, storage  # noqa: E402
from kvxfer.device import copy_bench  # noqa: E402

TINY = KVGeometry(num_layers=2, num_kv_heads=4, head_dim=16, dtype="bfloat16", tokens_per_block=4)
KIB = 1 << 10


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        root=Path(__file__).resolve().parents[2], directory=tmp_path, device="cpu", device_bytes=64 * KIB,
        link_bytes=16 * KIB, convert_bytes=8 * KIB, copy_bytes=64 * KIB, filled_bytes=32 * KIB, engine_bytes=64 * KIB,
        geometry=TINY, fragments=(256, 1024), counts=(16, 128), programs=(None, 4), matrix=32,
    )  # fmt: skip


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    double = Converter()
    monkeypatch.setattr(copy_bench, "launch", double)
    monkeypatch.setattr(convert, "launch", double)
    return double


def measured(run: Callable[[Work], None], settings: Settings, numbers: dict[str, float] | None = None) -> Section:
    """The section, run to its end."""

    def with_numbers(work: Work) -> None:
        work.numbers.update(numbers or {})
        run(work)

    report = Report({}, None, io.StringIO())
    run_all([Plan("x", 100.0, with_numbers)], report, total_s=100.0, settings=settings)
    return report.sections[0]


def wrong(section: Section) -> set[str]:
    """Cases with wrong bytes; none of them has a number."""
    rows = [row for row in section.rows if row.ok == "WRONG"]
    assert all(row.GBps is row.ms is row.percent is None and row.why for row in rows)
    assert all(row.why == "" for row in section.rows if row.ok == "ok")
    return {row.case for row in rows}


def test_ceilings(settings: Settings) -> None:
    section = measured(ceilings.run, settings)
    assert (section.status, section.why) == ("ok", "")
    assert [row.case for row in section.rows] == ["device copy", "H2D copy", "D2H copy"]
    assert all(row.GBps is not None and row.GBps > 0 for row in section.rows)
    assert [row.more["payload_bytes"] for row in section.rows] == [64 * KIB, 16 * KIB, 16 * KIB]


def test_conversions_are_compared_with_the_ceiling(settings: Settings, converter: Converter) -> None:
    section = measured(convert.run, settings, {"device copy": 1e-6})
    assert (section.status, section.why) == ("ok", "")
    names = ["gather + sum", "scatter + sum", "gather", "scatter", "sum alone"]
    assert [row.case for row in section.rows] == [
        f"{name} tp1 {layout}, {size} B fragments" for layout, size in (("nhd", 32), ("hnd", 128)) for name in names
    ]
    for row in section.rows:
        assert row.GBps is not None
        assert row.percent == pytest.approx(100 * row.GBps / 1e-6)


@pytest.mark.parametrize(
    ("what", "spoil", "cases"),
    [
        ("gather", first_byte, {"gather", "gather + sum"}),
        ("scatter", first_byte, {"scatter", "scatter + sum"}),
        ("scatter", last_byte, {"scatter", "scatter + sum"}),
        ("sums", first_byte, {"gather + sum", "scatter + sum"}),
        ("checksum", last_byte, {"sum alone"}),
    ],
)
def test_wrong_conversions_are_seen(
    settings: Settings, converter: Converter, what: str, spoil: Any, cases: set[str]
) -> None:
    converter.spoil[what] = spoil
    section = measured(convert.run, settings)
    assert section.status == "WRONG"
    assert {case.split(" tp1")[0] for case in wrong(section)} == cases
    assert len(wrong(section)) == 2 * len(cases)  # in both layouts


def test_bytes_that_turn_wrong_while_they_are_timed_get_no_number(settings: Settings, converter: Converter) -> None:
    calls = iter(range(10**6))
    converter.spoil["gather"] = lambda out: next(calls) >= 1 and first_byte(out)
    section = measured(copies.run, replace(settings, fragments=(256,), counts=(16,)))
    first = next(row for row in section.rows if row.impl == "pack" and row.case.startswith("store"))
    assert (first.ok, first.why.split(":")[0]) == ("WRONG", "after it was timed")


def test_a_conversion_that_does_nothing_is_wrong(
    settings: Settings, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gather", "scatter", "checksum"):
        monkeypatch.setattr(converter, name, lambda *_, **__: None)
    assert len(wrong(measured(convert.run, settings))) == 10


def test_copies(settings: Settings, converter: Converter) -> None:
    section = measured(copies.run, settings)
    assert (section.status, section.why) == ("ok", "")
    found = {(row.case, row.impl) for row in section.rows}
    for direction in ("store", "load"):
        for name in ("128 x 256 B", "32 x 1024 B"):
            assert {impl for case, impl in found if case == f"{direction} {name}"} == {"one copy", "pack", "zero"}
        assert (f"{direction} 16 x 256 B", "zero") in found
    barred = [row for row in section.rows if row.bar is not None]
    assert {(row.case, row.impl) for row in barred} == {
        (f"{direction} {name}", "pack") for direction in ("store", "load") for name in ("128 x 256 B", "32 x 1024 B")
    }
    assert all(row.percent is not None for row in barred)
    assert "128 x 1024 B: more than 0 MiB" in section.cut
    assert any("no batches" in what for what in section.cut)


@pytest.mark.parametrize(("what", "direction"), [("gather", "store"), ("scatter", "load")])
def test_wrong_copies_are_seen(settings: Settings, converter: Converter, what: str, direction: str) -> None:
    converter.spoil[what] = first_byte
    section = measured(copies.run, replace(settings, fragments=(256,), counts=(16,)))
    assert wrong(section) == {f"{direction} 128 x 256 B", f"{direction} 16 x 256 B"}
    assert {row.impl for row in section.rows if row.ok == "WRONG"} == {"pack", "zero"}


def test_a_product_beside_copies(settings: Settings, converter: Converter) -> None:
    section = measured(beside.run, settings)
    assert (section.status, section.why) == ("ok", "")
    rest = section.rows[1:]
    assert len(rest) == 4 * 2
    assert {row.case for row in rest} >= {"store, pack, all programs", "load, zero, 4 programs"}
    assert all(row.more["slowdown"] > 0 and row.GBps is not None for row in rest)
    assert {programs for name, programs in converter.calls if name != "prepare"} == {None, 4}


def test_wrong_bytes_beside_a_product_are_seen(
    settings: Settings, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter.spoil["gather"] = first_byte
    assert wrong(measured(beside.run, settings)) == {
        f"store, {name}, {cap} programs" for name in ("pack", "zero") for cap in ("all", 4)
    }
    converter.spoil.clear()
    monkeypatch.setattr(beside.Products, "check", lambda _: "the product differs")
    assert len(wrong(measured(beside.run, settings))) == 8


def test_the_engine_stores_and_loads(settings: Settings) -> None:
    section = measured(engine.run, settings, {"H2D copy": 1.0, "D2H copy": 2.0})
    assert (section.status, section.why) == ("ok", "")
    store, load = section.rows
    assert store.case.startswith("store kvx1 64 KiB on ")
    assert (store.of, load.of) == ("D2H copy", "H2D copy")
    assert store.GBps is not None
    assert store.percent == pytest.approx(50 * store.GBps)
    assert list(settings.directory.iterdir()) == []


def test_a_page_that_comes_back_wrong_is_seen(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine.Run.load_all

    def spoiled(run: engine.Run) -> str | None:
        why = load(run)
        first_byte(run.pool.tensors[0][int(run.pool.target[0, 0])])
        return why

    monkeypatch.setattr(engine.Run, "load_all", spoiled)
    section = measured(engine.run, settings)
    assert [row.ok for row in section.rows] == ["WRONG"]
    assert "the pages differ" in section.rows[0].why


def test_a_load_that_later_does_nothing_is_wrong(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier round left in the pages must not pass for its own."""
    load, times = engine.Run.load_all, iter(range(100))
    monkeypatch.setattr(engine.Run, "load_all", lambda run: load(run) if next(times) < 2 else None)
    section = measured(engine.run, settings)
    assert [row.ok for row in section.rows] == ["WRONG"]


def test_a_store_that_fails_gets_no_number(settings: Settings) -> None:
    with FaultyIO() as faults:
        faults.fail("pwrite", 5, after=30)
        section = measured(engine.run, settings)
    assert section.status in ("WRONG", "failed")
    assert not [row for row in section.rows if row.GBps is not None]


@pytest.mark.parametrize("copies", ["pack", "zero"])
def test_the_engine_over_a_device(settings: Settings, monkeypatch: pytest.MonkeyPatch, copies: str) -> None:
    """A simulated one: the calls are those that are made where the pages are a GPU's."""
    monkeypatch.setenv("KVXFER_COPY_ENGINE", copies)
    made: list[FakeDevice] = []

    def over_a_device(*args: Any, **how: Any) -> TransferEngine:
        made.append(FakeDevice(most_steps=16))
        return TransferEngine(*args, device=made[-1], **how)

    monkeypatch.setattr(engine, "TransferEngine", over_a_device)
    section = measured(engine.run, settings, {"H2D copy": 1.0, "D2H copy": 2.0})
    assert (section.status, section.why) == ("ok", "")
    assert [row.GBps is not None and row.GBps > 0 for row in section.rows] == [True, True]
    for row in section.rows:
        taken = {name for name in row.more if name.startswith("copies_")}
        assert taken == {f"copies_store_{copies}", f"copies_load_{copies}"}
    assert [device.defects for device in made] == [[]]


def test_the_ladder_is_kept_as_it_was_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here kvikio has no device to be asked for."""
    monkeypatch.setattr(
        "kvxfer.io.kvikio_door.available", lambda *_: probe.Probe(False, "no CUDA device: none", {"kind": "no_device"})
    )
    (row,) = measured(storage.run, settings).rows
    assert row.impl == "host" and row.more["rung"] == "host"
    assert [step["why"] for step in row.more["steps"]] == ["direct and compat off: no CUDA device: none"]


@pytest.mark.parametrize(("code", "status"), [(0, "ok"), (1, "failed")])
def test_tests_that_fail_fail_the_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, code: int, status: str
) -> None:
    asked: list[tuple[str, ...]] = []

    def call(work: Work, root: Path, *arguments: str) -> tuple[int, str]:
        asked.append(arguments)
        return code, "....\n1 failed, 3 passed in 2 s\n"

    monkeypatch.setattr(build, "call", call)
    section = measured(build.tests, settings)
    assert section.status == status
    assert section.rows[0].more["result"] == "1 failed, 3 passed in 2 s"
    assert ("1 failed" in section.why) == bool(code)
    assert asked[0][:2] == ("-m", "pytest")
    assert "gpu or gds" in asked[0]
    assert "tests/gpu/test_cuda_on_gpu.py" in asked[0]
    section = measured(build.build, settings)
    assert section.status == status
    assert section.rows[0].more["libkvx"] == "True"
