"""The bench on tiny sizes: its rows, what a wrong answer does, and that bytes are checked. No speed is asserted."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import __main__ as command
from bench import converter, engine
from bench.options import Options
from bench.peers import Place, PlainFiles, memcpy
from bench.pools import Cache, RankPool, allocate, random_bytes, shuffled
from bench.table import OK, WRONG, Impl, Row, Table, exit_status, machine_facts, measure
from kvxfer.convert import native
from kvxfer.errors import IOFault
from kvxfer.geometry import KVGeometry
from kvxfer.testing import FaultyIO
from tests.oracle import Model
from tests.simulate.prompts import write

TINY = KVGeometry(num_layers=2, num_kv_heads=4, head_dim=16, dtype="bfloat16", tokens_per_block=4)
NUMBERS = ("p50_ms", "p90_ms", "GBps", "ratio")


def tiny(path: Path, **other: Any) -> Options:
    settings: dict[str, Any] = {
        "dirs": (path,),
        "runs": 2,
        "threads": (2,),
        "io_threads": 2,
        "tp_sizes": (1, 2),
        "geometry": TINY,
        "converter_bytes": 64 << 10,
        "engine_bytes": 256 << 10,
        "row_sizes": (64 << 10, 300 << 10),
        "engine": {"read_piece_bytes": 256 << 10},
        "head_sizes": (64,),
        "entries": (300, 900),
        "keys": 2000,
        "jobs": 20,
        "trace": write(path.parent / f"{path.name}.jsonl", [(0, 600, [0, 1]), (5, 1500, [0, 1, 2]), (9, 512, [3])]),
    }
    return Options(**settings | other)


def expect_numbers(row: Row) -> None:
    if row.unit:
        assert (row.figure is not None) == (row.ok == OK), row
        assert [getattr(row, name) for name in NUMBERS] == [None] * 4
        return
    numbers = [getattr(row, name) for name in NUMBERS]
    assert all((number is not None and number > 0) == (row.ok == OK) for number in numbers), row
    assert row.ok == OK or (row.why and row.met is None)


def test_every_case_has_its_rows_and_all_answers_are_right(tmp_path: Path) -> None:
    out = io.StringIO()
    table = command.run(tiny(tmp_path), out)
    for row in table.rows:
        assert row.ok == OK, row
        expect_numbers(row)
        assert row.unit or (row.nbytes > 0 and row.runs == 2)
    impls: dict[str, list[str]] = {}
    for row in table.rows:
        impls.setdefault(row.case, []).append(row.impl)
    rows = [impls.pop(case) for case in list(impls) if case.startswith("rows ")]
    assert rows == [["memcpy", "kvxfer", "torch copy_"]] * 2 * 2 * 2  # directions, NHD and HND, TP1 and TP2
    memory = [names for names in impls.values() if names[0] == "memcpy"]
    # Two directions, NHD and HND, TP1 and TP2; TP2 once for one rank and once for all.
    assert memory == [["memcpy", "kvxfer", "kvxfer+sum"]] * 2 * 2 * 3
    # All pieces are small; and one more size of heads, of which nothing is compared with memcpy.
    assert sum(names[0].startswith("torch") for names in impls.values()) == 2 * 2 * 3 + 2
    assert {"gather tp1 nhd, 32 B pieces, 2t", "scatter tp1 nhd, 64 B pieces, 2t"} <= impls.keys()
    trips = {case.split()[0] for case, names in impls.items() if names[:2] == ["plain", "kvxfer"]}
    assert trips == {"store", "load"}
    assert sum(case.startswith("load") for case in impls) == 4
    assert any(names[:4] == ["plain", "kvxfer", "plain + copy", "plain 256 KiB"] for names in impls.values())
    assert exit_status(table.rows) == 0
    text = out.getvalue()
    assert "vs first" in text
    assert "bars met, 0 wrong answers" in text
    assert not list(tmp_path.iterdir())


def test_the_json_says_what_the_table_says_and_where_it_ran(tmp_path: Path) -> None:
    table = command.run(tiny(tmp_path, only="engine", row_sizes=()), None)
    table.write_json(tmp_path / "rows.json")
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["rows"] == [dataclasses.asdict(row) for row in table.rows]
    assert {"kvxfer", "date", "cpu", "features", "kernel", "python", "settings", f"io {tmp_path}"} <= found[
        "facts"
    ].keys()
    assert found["notes"]


def flip_one(array: Any) -> None:
    array.reshape(-1)[array.size // 2] ^= 1


def test_a_converter_that_is_wrong_gets_no_speed_and_exit_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = native.gather

    def wrong(pages: Any, ids: Any, mapping: Any, out: Any, sums: Any = None, *, threads: int = 1) -> None:
        right(pages, ids, mapping, out, sums, threads=threads)
        if sums is None:
            flip_one(out)

    monkeypatch.setattr(native, "gather", wrong)
    monkeypatch.setattr(command, "options_of", lambda _: tiny(tmp_path, only="converter", tp_sizes=(1,)))
    target = tmp_path / "rows.json"
    assert command.main(["--json", str(target)]) == 1
    rows = json.loads(target.read_text())["rows"]
    gathers = [row for row in rows if row["case"].startswith("gather") and row["impl"] == "kvxfer"]
    assert gathers
    for row in rows:
        assert row["ok"] == (WRONG if row in gathers else OK)
        if row in gathers:
            assert [row[name] for name in (*NUMBERS, "met")] == [None] * 5
            assert "1 of " in row["why"]


def test_wrong_sums_are_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = native.scatter

    def wrong(src: Any, ids: Any, mapping: Any, pages: Any, sums: Any = None, *, threads: int = 1) -> None:
        right(src, ids, mapping, pages, sums, threads=threads)
        if sums is not None:
            sums[0, 0] = 1

    monkeypatch.setattr(native, "scatter", wrong)
    work = converter.Workload(converter.Setup(TINY, 2, True, "hnd"), 64 << 10)
    impls = [work.memcpy(1), *(work.kvxfer("scatter", 1, summed=summed, bar=0.5) for summed in (False, True))]
    rows = measure("scatter", impls, nbytes=work.nbytes, runs=1)
    assert [row.ok for row in rows] == [OK, OK, WRONG]
    assert rows[2].why == "checksums differ"


@pytest.mark.parametrize(
    "break_it", [lambda io: io.flip(7, offset=(4096, 5000)), lambda io: io.fail("pwrite", 5, after=3, times=1)]
)
def test_an_engine_that_loses_a_chunk_gets_no_speed(tmp_path: Path, break_it: Callable[[FaultyIO], object]) -> None:
    table = Table({}, None)
    shape = engine._row(64 << 10)
    with FaultyIO() as faults:
        original = engine.EngineRun.places

        def places(self: engine.EngineRun) -> Any:
            found = original(self)
            break_it(faults)  # the store is full, the measurement begins
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.EngineRun, "places", places)
            engine.measure_shape(table, tiny(tmp_path), shape, tmp_path, "here", 0.95)
    rows = [row for row in table.rows if row.ok == WRONG]
    assert rows
    assert {row.impl for row in rows} == {"kvxfer"}
    assert all("chunks" in row.why for row in rows)
    for row in table.rows:
        expect_numbers(row)
    assert exit_status(table.rows) == 1


def impl(name: str, answers: list[str | None], **other: Any) -> Impl:
    """An implementation whose checks answer so in turn."""
    return Impl(name=name, run=lambda: None, check=lambda: answers.pop(0), **other)


def test_an_answer_that_turns_wrong_after_the_rounds_counts_too() -> None:
    rows = measure("case", [impl("a", [None, None]), impl("b", [None, "late"], bar=0.5)], nbytes=10, runs=3)
    assert [(row.ok, row.why, row.runs) for row in rows] == [(OK, "", 3), (WRONG, "late", 0)]
    rows = measure("case", [impl("a", ["first"]), impl("b", [None, None], bar=0.5)], nbytes=10, runs=3)
    assert [row.ok for row in rows] == [WRONG, OK]
    assert rows[1].ratio is None
    assert rows[1].met is None
    assert rows[1].verdict() == "? >= 0.50"


def test_an_implementation_that_fails_is_wrong_and_the_others_go_on() -> None:
    def fail() -> None:
        raise IOFault(28, "no room", "slab")

    rows = measure("case", [impl("a", [None, None]), Impl(name="b", run=fail, check=lambda: None)], nbytes=1, runs=2)
    assert [row.ok for row in rows] == [OK, WRONG]
    assert "no room" in rows[1].why


def test_checks_surround_every_timed_run_where_asked() -> None:
    calls: list[str] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: calls.append(what)

    always = Impl(name="a", run=note("run"), check=note("check"), poison=note("poison"), always_check=True)
    measure("case", [always], nbytes=1, runs=2)
    assert calls == ["poison", "run", "check"] * 4
    calls.clear()
    measure("case", [dataclasses.replace(always, always_check=False)], nbytes=1, runs=2)
    assert calls == ["poison", "run", "check", "run", "run", "poison", "run", "check"]


def test_a_case_that_takes_too_long_has_three_rounds() -> None:
    assert measure("case", [impl("a", [None, None])], nbytes=1, runs=9, budget_s=0)[0].runs == 3


def test_a_bar_is_met_or_short_and_neither_is_a_failure() -> None:
    out = io.StringIO()
    table = Table({"cpu": "some"}, out)
    row = Row(case="c", impl="i", ok=OK, p50_ms=1.0, p90_ms=2.0, GBps=3.0, ratio=0.7, bar=0.8, met=False)
    table.add([row, dataclasses.replace(row, case="d", ratio=0.9, met=True)])
    table.close()
    text = out.getvalue()
    assert "0.70x  short >= 0.80" in text
    assert "0.90x  met >= 0.80" in text
    assert "1 of 2 bars met" in text
    assert "  short: c, i: 0.70 of 0.80" in text
    assert exit_status(table.rows) == 0


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_the_benchs_truth_is_the_tests_oracle(layout: str) -> None:
    cache = Cache.random(TINY, range(2, 4), 3)
    pool = RankPool(cache, range(2, 4), layout, np.array([0, 1, 2]), 3)
    model = Model.random(TINY, 3)
    model.full[..., 2:4, :] = cache.full.transpose(0, 2, 1, 3, 4, 5)
    for got, want in zip(pool.tensors, model.pages(layout, tp_size=2, tp_rank=1), strict=True):
        assert np.array_equal(got, want)
    segments = model.payloads([[0], [1], [2]], alignment=1).reshape(3, TINY.num_kv_heads, -1)
    assert np.array_equal(cache.segments(), segments[:, 2:4])


def test_a_pool_knows_what_must_not_be_touched() -> None:
    pool = RankPool(Cache.random(TINY, range(4), 2), range(4), "nhd", shuffled(2, 0), 5)
    assert pool.check() is None
    other = next(block for block in range(5) if block not in pool.ids)
    pool.pages[0, other, 0, 0, 0, 0] = 0
    assert pool.check() == "a block was touched that was not asked for"


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [8, 4096, 12_296, 1 << 20])
def test_memcpy_copies_every_byte(nbytes: int, threads: int) -> None:
    source, target = random_bytes(nbytes, 1), allocate(nbytes)
    memcpy(target, source, threads)
    assert np.array_equal(target, source)


def test_plain_files_move_every_byte_and_name_what_fails(tmp_path: Path) -> None:
    places = [Place(1, 0), Place(0, 8192), Place(0, 0)]
    files = PlainFiles(tmp_path, [20_000, 10_000], places, 5000, direct=False)
    source, target = random_bytes(15_000, 2).reshape(3, -1), allocate(15_000).reshape(3, -1)
    assert files.move(files.calls(source, 5000), 2, write=True) is None
    assert files.move(files.calls(target, 1024), 2, write=False) is None
    assert np.array_equal(target, source)
    staging = allocate(2 * 5000).reshape(2, -1)
    source[:], target[:] = source[::-1].copy(), 0
    assert files.move(files.calls(source, 5000), 2, write=True, staging=staging) is None
    assert files.move(files.calls(target, 1024), 2, write=False, staging=staging) is None
    assert np.array_equal(target, source)
    beyond = files.calls(target, 5000)
    beyond["offset"] += 1 << 20
    assert files.move(beyond, 2, write=False) == "Input/output error"
    files.close()
    assert not list(tmp_path.iterdir())


def test_the_command_line(tmp_path: Path) -> None:
    quick = command.options_of(command.parser().parse_args(["--quick", "--dir", str(tmp_path), "--threads", "3"]))
    full = command.options_of(command.parser().parse_args(["--only", "engine", "--runs", "4"]))
    assert (quick.quick, quick.dirs[0], quick.threads, quick.io_threads) == (True, tmp_path, (3,), 3)
    assert (full.quick, full.only, full.runs, full.io_threads) == (False, "engine", 4, 8)
    assert full.dirs[0] == Path.cwd()
    memory = command.MEMORY_DIRECTORY
    assert full.dirs[1:] == quick.dirs[1:] == ((memory,) if memory.is_dir() else ())
    assert command.options_of(command.parser().parse_args(["--dir", str(memory)])).dirs == (memory,)
    assert quick.runs < full.runs or quick.engine_bytes < full.engine_bytes
    for bad in (["--threads", "0"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            command.parser().parse_args(bad)
    assert command.main(["--only", "engine", "--dir", str(tmp_path / "nowhere")]) == 2


def test_a_directory_without_room_is_left_out_and_said(tmp_path: Path) -> None:
    table = command.run(tiny(tmp_path, only="engine", engine_bytes=1 << 50), None)
    assert not table.rows
    assert "left out" in table.notes[0]


def test_facts_name_the_machine() -> None:
    facts = machine_facts()
    assert "cores" in facts["cpu"]
    assert facts["features"]
