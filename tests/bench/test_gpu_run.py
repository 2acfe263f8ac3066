"""bench.gpu's frame, over sections that are doubles: its JSON, its time, and what a section that goes wrong costs."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as command
from bench.gpu.build import call, gpu_test_files, portable_ini
from bench.gpu.report import Report, Row, file_name
from bench.gpu.sections import Plan, Skip, Work, run_all
from bench.gpu.settings import Settings
from kvxfer import probe
from kvxfer.testing import ManualClock

ROOT = Path(__file__).resolve().parents[2]
ROW_FIELDS = {"case", "impl", "ok", "why", "GBps", "ms", "percent", "of", "bar", "met", "more"}


@pytest.fixture(autouse=True)
def nothing_under_way() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("bench-"):
            thread.join(10)


class Rig:
    """A run of doubles, on a clock that they move."""

    def __init__(self, path: Path) -> None:
        self.out, self.clock, self.path = io.StringIO(), ManualClock(), path / "out" / "fake.json"
        self.report = Report({"device": "Fake H200"}, self.path, self.out)

    def run(self, *plans: Plan, total_s: float = 100.0, grace_s: float = 10.0) -> dict[str, Any]:
        run_all(plans, self.report, total_s=total_s, clock=self.clock, grace_s=grace_s)
        found: dict[str, Any] = json.loads(self.path.read_text())
        assert found == json.loads(json.dumps(self.report.as_json()))
        assert list(self.path.parent.iterdir()) == [self.path]
        return found

    def takes(self, seconds: float, *rows: tuple[str, float]) -> Callable[[Work], None]:
        def run(work: Work) -> None:
            for name, speed in rows:
                work.add(name, "double", GBps=speed, ms=1.0)
            self.clock.advance(seconds)

        return run


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_json_has_all_that_was_found(rig: Rig) -> None:
    def run(work: Work) -> None:
        work.numbers["limit"] = 50.0
        work.add("gather", "triton", GBps=40.0, ms=2.0, percent=80.0, of="limit", bar=75.0, more={"note": "x"})
        work.cut("scatter")
        rig.clock.advance(3.5)

    found = rig.run(Plan("convert", 10.0, run), Plan("copies", 20.0, rig.takes(1.0, ("store", 12.0))))
    assert set(found) == {"format", "complete", "exit", "facts", "sections"}
    assert (found["format"], found["complete"], found["exit"], found["facts"]) == (1, True, 0, {"device": "Fake H200"})
    convert, copies = found["sections"]
    assert set(convert) == {"name", "status", "why", "seconds", "limit_s", "rows", "cut"}
    assert (convert["name"], convert["status"], convert["seconds"], convert["limit_s"]) == ("convert", "ok", 3.5, 10.0)
    assert convert["cut"] == ["scatter"]
    (row,) = convert["rows"]
    assert set(row) == ROW_FIELDS
    assert (row["GBps"], row["percent"], row["of"], row["met"]) == (40.0, 80.0, "limit", True)
    assert [one["GBps"] for one in copies["rows"]] == [12.0]
    said = rig.out.getvalue()
    assert "40.0 GB/s" in said
    assert "80.0 % of limit  met >= 75 %" in said
    assert "cut: scatter" in said
    assert "2 rows, 1 of 1 bars met, 0 WRONG" in said
    assert rig.report.exit_status == 0


def test_a_wrong_answer_gets_no_number_and_fails_the_run(rig: Rig) -> None:
    def run(work: Work) -> None:
        work.wrong("gather", "triton", "3 bytes differ")
        work.add("scatter", "triton", GBps=1.0)

    found = rig.run(Plan("convert", 10.0, run), Plan("copies", 10.0, rig.takes(1.0, ("store", 12.0))))
    wrong = found["sections"][0]["rows"][0]
    assert (wrong["ok"], wrong["why"], wrong["GBps"], wrong["ms"], wrong["met"]) == (
        "WRONG", "3 bytes differ", None, None, None,
    )  # fmt: skip
    assert (found["exit"], rig.report.exit_status) == (1, 1)
    assert [section["status"] for section in found["sections"]] == ["WRONG", "ok"]
    assert "WRONG  3 bytes differ" in rig.out.getvalue()
    assert "1 WRONG" in rig.out.getvalue()


def test_a_section_that_raises_loses_nothing(rig: Rig) -> None:
    def run(work: Work) -> None:
        work.add("gather", "triton", GBps=1.0)
        raise RuntimeError("CUDA error: out of memory")

    found = rig.run(Plan("convert", 10.0, run), Plan("copies", 10.0, rig.takes(1.0, ("store", 12.0))))
    convert, copies = found["sections"]
    assert (convert["status"], len(convert["rows"])) == ("failed", 1)
    assert "RuntimeError: CUDA error: out of memory (test_gpu_run.py:" in convert["why"]
    assert (copies["status"], found["exit"]) == ("ok", 1)


@pytest.mark.parametrize("ending", [RuntimeError("x"), Skip("y")])
def test_wrong_bytes_stay_wrong_whatever_comes_after(rig: Rig, ending: Exception) -> None:
    def run(work: Work) -> None:
        work.wrong("gather", "triton", "3 bytes differ")
        raise ending

    assert rig.run(Plan("convert", 10.0, run))["sections"][0]["status"] == "WRONG"
    assert rig.report.exit_status == 1


def test_a_section_that_cannot_run_here_is_no_failure(rig: Rig) -> None:
    def run(work: Work) -> None:
        raise Skip("no kvikio")

    (section,) = rig.run(Plan("storage", 10.0, run))["sections"]
    assert (section["status"], section["why"], rig.report.exit_status) == ("skipped", "no kvikio", 0)


def test_cases_that_would_begin_too_late_are_named(rig: Rig) -> None:
    def run(work: Work) -> None:
        for name in ("a", "b", "c"):
            if not work.over(name):
                work.add(name, "double", GBps=1.0)
                rig.clock.advance(6.0)

    (section,) = rig.run(Plan("copies", 10.0, run))["sections"]
    assert [row["case"] for row in section["rows"]] == ["a", "b"]
    assert (section["cut"], section["status"]) == (["c"], "ok")


def test_the_whole_run_has_an_end(rig: Rig) -> None:
    """The third section gets what is left, the fourth nothing."""
    left: list[float] = []

    def run(work: Work) -> None:
        left.append(work.left)
        rig.clock.advance(45.0)

    found = rig.run(*(Plan(name, 50.0, run) for name in "abcd"), total_s=100.0)
    assert left == [50.0, 50.0, 10.0]
    assert [section["status"] for section in found["sections"]] == ["ok", "ok", "ok", "skipped"]
    assert "the 100 s of the whole run are over" in found["sections"][3]["why"]
    assert rig.report.exit_status == 0


def test_a_section_that_hangs_is_left_behind_with_what_it_had(rig: Rig) -> None:
    release = threading.Event()

    def run(work: Work) -> None:
        work.add("gather", "triton", GBps=1.0)
        release.wait(30)
        work.wrong("gather", "late", "must not count")
        work.cut("late")
        work.fail("late")

    found = rig.run(Plan("convert", 0.5, run), Plan("copies", 10.0, rig.takes(1.0)), grace_s=0.1)
    convert, copies = found["sections"]
    assert (convert["status"], len(convert["rows"])) == ("hung", 1)
    assert (copies["status"], copies["why"]) == ("skipped", "convert hung")
    release.set()
    nothing = [thread for thread in threading.enumerate() if thread.name == "bench-convert"]
    for thread in nothing:
        thread.join(10)
    assert (found["exit"], rig.report.exit_status) == (1, 1)
    assert [row.impl for row in rig.report.sections[0].rows] == ["triton"]
    assert (rig.report.sections[0].status, rig.report.sections[0].cut) == ("hung", [])


def test_the_file_is_there_after_every_section(rig: Rig) -> None:
    seen: list[dict[str, Any]] = []
    look = Plan("look", 10.0, lambda _: seen.append(json.loads(rig.path.read_text())))
    found = rig.run(Plan("copies", 10.0, rig.takes(1.0, ("store", 12.0))), look)
    assert [section["name"] for section in seen[0]["sections"]] == ["copies"]
    assert (seen[0]["complete"], found["complete"]) == (False, True)


@pytest.mark.parametrize(("percent", "met"), [(95.0, True), (94.9, False), (None, None)])
def test_bars_are_told_and_fail_nothing(rig: Rig, percent: float | None, met: bool | None) -> None:
    assert Row(case="a", impl="b", percent=percent, bar=95.0).met is met
    rig.run(Plan("copies", 1.0, lambda work: work.add("a", "b", GBps=1.0, percent=percent, bar=95.0)))
    assert rig.report.exit_status == 0


def test_names_of_files() -> None:
    assert file_name("NVIDIA H200", "2026-01-31") == "nvidia-h200-2026-01-31.json"
    assert file_name("../../x", "2026-01-31") == "x-2026-01-31.json"
    taken = {"nvidia-h200-2026-01-31.json", "nvidia-h200-2026-01-31-2.json"}
    assert file_name("NVIDIA H200", "2026-01-31", taken.__contains__) == "nvidia-h200-2026-01-31-3.json"


# ---- the command


def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "cuda", lambda *_: probe.Probe(False, "no libcuda.so.1: no driver"))
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "bench.gpu: no CUDA device: no libcuda.so.1: no driver\n"
    assert not (tmp_path / "out").exists()


def test_with_a_device_sections_run_in_order_and_the_status_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"devices": ["Fake H200"], "driver": "13.0"}
    monkeypatch.setattr(probe, "cuda", lambda *_: probe.Probe(True, "1 x Fake H200, CUDA 13.0", found))
    begun: list[str] = []

    def plan(name: str, limit_s: float, module: str, function: str) -> Plan:
        def run(work: Work) -> None:
            begun.append(name)
            assert isinstance(work.common.settings, Settings)
            if name == "convert":
                work.wrong("gather", "triton", "3 bytes differ")

        return Plan(name, limit_s, run)

    monkeypatch.setattr(command, "plan_of", plan)
    assert command.main(["--out", str(tmp_path), "--only", "engine", "ceilings"]) == 0
    assert begun == ["ceilings", "engine"]
    assert command.main(["--out", str(tmp_path)]) == 1
    assert begun[2:] == [name for name, *_ in command.PLANS]
    first, second = sorted(tmp_path.iterdir(), key=lambda path: len(path.name))
    assert first.name.startswith("fake-h200-20")
    assert json.loads(second.read_text())["sections"][2]["status"] == "WRONG"


def test_sections_are_imported_when_their_turn_comes_and_are_all_there() -> None:
    code = (
        "import sys, bench.gpu.__main__ as command\n"
        "print(*(name for name in ('torch', 'triton', 'lmdb', 'numpy') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    for _, _, module, function in command.PLANS:
        source = (ROOT / "bench" / "gpu" / f"{module}.py").read_text()
        assert f"\ndef {function}(work: Work) -> None:" in source
    assert command.TOTAL_S <= 225
    assert command.TOTAL_S + 10 + 5 <= 240  # the grace of a section that hangs, and the start


def test_wheels_are_installed_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "kept")
    assert command.install(tmp_path, tmp_path / "to") == f"no wheels in {tmp_path}"
    with zipfile.ZipFile(tmp_path / "kvx_vendored-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kvx_vendored.py", "answer = 42\n")
        wheel.writestr(
            "kvx_vendored-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kvx-vendored\nVersion: 1.0\n"
        )
        wheel.writestr(
            "kvx_vendored-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("kvx_vendored-1.0.dist-info/RECORD", "")
    assert command.install(tmp_path, tmp_path / "to") == ""
    assert importlib.import_module("kvx_vendored").answer == 42
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'to'}{os.pathsep}kept"
    refused = subprocess.CompletedProcess([], 1, "", "no wheel for this platform\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    assert command.install(tmp_path, tmp_path / "to") == "pip: no wheel for this platform"


# ---- building and testing


def work_for(rig: Rig, seconds: float = 60.0) -> Work:
    plans: list[Work] = []
    run_all([Plan("x", seconds, plans.append)], rig.report, total_s=seconds, clock=rig.clock)
    return plans[0]


def test_a_child_is_ended_with_the_sections_time(rig: Rig) -> None:
    work = work_for(rig)
    assert call(work, ROOT, "-c", "print('hello'); raise SystemExit(3)") == (3, "hello\n")
    code = "import os, kvxfer; print(os.environ['TRITON_INTERPRET'], kvxfer.__file__)"
    assert call(work, ROOT, "-c", code) == (0, f"0 {ROOT / 'kvxfer' / '__init__.py'}\n")
    work = work_for(rig, 3.0)  # time to begin, on a busy machine too
    answer = call(work, ROOT, "-c", "import time; print('begun', flush=True); time.sleep(100)")
    assert answer == (-9, "begun\n\nended after the section's time")


def test_pytest_takes_the_options_that_it_has_plugins_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr("bench.gpu.build.find_spec", lambda _: None)
    ini = portable_ini(text, ROOT)
    assert "timeout" not in ini.split()
    assert "minversion" not in ini
    (tmp_path / "pytest.ini").write_text(ini)
    (tmp_path / "test_it.py").write_text(
        "import warnings, pytest, kvxfer\n"
        "@pytest.mark.gpu\ndef test_it(): warnings.warn('an error here')\n"
        f"@pytest.mark.gpu\ndef test_other(): assert kvxfer.__file__.startswith({str(ROOT)!r})\n"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:timeout", "-c", "pytest.ini", "-q",
            "-m", "gpu or gds", "test_it.py",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "UserWarning: an error here" in done.stdout


def test_files_with_tests_for_a_gpu_are_found() -> None:
    found = gpu_test_files(ROOT)
    assert "tests/gpu/test_cuda_on_gpu.py" in found
    assert "tests/test_keys.py" not in found
    assert len(found) == len(set(found))
