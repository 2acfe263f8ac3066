"""`kvxfer doctor --calibrate`: it asks for a device, shows what was chosen, and cannot be held up."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kvxfer import probe
from kvxfer.cli import doctor_calibration, main
from kvxfer.probe import Answer
from tests.cli.commands import json_of, run
from tests.doubles import Doubles

Capsys = pytest.CaptureFixture[str]
FOUND = {
    "device": "Fake H200", "engines": ["pack", "zero"], "wrong": {}, "asked": {"store": "auto", "load": "auto"},
    "source": "measured", "notes": ["no batches: \x1b[31mnone\x1b[0m"], "file": "/cache/copy-engines-1.json",
    "points": [
        {"direction": "load", "fragment_bytes": 256, "fragments": 16, "seconds": {"pack": 2e-5}, "engine": "pack"},
        {"direction": "load", "fragment_bytes": 256, "fragments": 4096, "seconds": {"zero": 9e-5}, "engine": "zero"},
        {"direction": "store", "fragment_bytes": 65536, "fragments": 256, "seconds": {"pack": 4e-4}, "engine": "pack"},
    ],
}  # fmt: skip


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """A device that answers, and what the calibration's process says next."""
    doubles = Doubles(tmp_path, monkeypatch)
    doubles.cuda("works")
    doubles.module("kvikio", "raise ImportError('not asked for here')")  # the real one looks for a device for ever
    said: list[Answer] = []
    real = probe.ask
    monkeypatch.setattr(
        probe, "ask",
        lambda code, timeout_s: said.pop() if code == doctor_calibration._CALIBRATE else real(code, timeout_s),
    )  # fmt: skip
    return said


def test_without_a_device_it_is_a_failure_with_the_reason(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    Doubles(tmp_path, monkeypatch).cuda("no device")
    why = "not measured without a CUDA device: cuInit answers CUDA_ERROR_NO_DEVICE (100)"
    code, report = json_of(capsys, "doctor", tmp_path, "--calibrate")
    assert (code, report["calibration"]) == (1, {"ok": False, "why": why})
    assert report["problems"] == [f"copy engines: {why}"]
    assert main(["doctor", str(tmp_path), "--calibrate"]) == 1
    assert f"  NO  calibration              {why}" in capsys.readouterr().out


def test_without_the_option_no_device_is_needed(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    Doubles(tmp_path, monkeypatch).cuda("no device")
    code, report = json_of(capsys, "doctor", tmp_path)
    assert (code, report["calibration"]) == (0, None)


def test_what_was_measured_is_shown(tmp_path: Path, capsys: Capsys, answers: list[Answer]) -> None:
    answers += [Answer(json.loads(json.dumps(FOUND)))] * 2
    code, report = json_of(capsys, "doctor", tmp_path, "--calibrate")
    assert (code, report["problems"]) == (0, [])
    assert report["calibration"] == {"ok": True, "why": "measured, 3 points on Fake H200", **FOUND}
    assert main(["doctor", str(tmp_path), "--calibrate"]) == 0
    out = capsys.readouterr().out
    assert "  ok  load, 256 B              16: pack, 4,096: zero\n" in out
    assert "  ok  store, 64.0 KiB          256: pack\n" in out
    assert "  ok  kept in                  /cache/copy-engines-1.json\n" in out
    assert "no batches: \\x1b[31mnone" in out


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer(None, "ModuleNotFoundError: No module named 'torch'"), "No module named 'torch'"),
        (Answer({**FOUND, "points": [], "source": "nothing was measured"}), "nothing was measured; no batches"),
    ],
)
def test_what_could_not_be_measured_is_a_failure(
    tmp_path: Path, capsys: Capsys, answers: list[Answer], answer: Answer, why: str
) -> None:
    answers.append(answer)
    code, report = json_of(capsys, "doctor", tmp_path, "--calibrate")
    assert code == 1
    assert why in report["calibration"]["why"]
    assert why in report["problems"][0]


def test_it_cannot_be_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device answers; torch never comes back."""
    doubles = Doubles(tmp_path, monkeypatch)
    doubles.cuda("works")
    doubles.module("kvikio", "raise ImportError('not asked for here')")
    imported = doubles.module("torch", "import time\ntime.sleep(1000)")
    start = time.monotonic()
    done = run("doctor", tmp_path, "--calibrate", "--timeout", "3")
    assert time.monotonic() - start < 60
    assert (done.returncode, done.stderr) == (1, "")
    assert imported.exists()
    assert "copy engines: no answer within 3 s" in done.stdout
