"""`kvxfer scrub`: what it prints and answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import typer

from kvxfer.cli import main
from kvxfer.cli.scrub import rate
from tests.cli.commands import json_of
from tests.store import damage
from tests.store.damage import ROW_KEY


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("200MB/s", 200_000_000), ("1GiB/s", 1 << 30), ("5K", 5000), ("7", 7), ("3KiB", 3072), ("2T/s", 2 * 10**12)],
)
def test_rates(text: str, bytes_per_s: int) -> None:
    assert rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5MB/s", "MB", "1 GB", "1e9", "9" * 30, "inf"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        rate(text)


def test_a_pass(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = damage.fill(tmp_root)
    code, said = json_of(capsys, "scrub", tmp_root, "--rate", "1TB/s")
    assert (code, said["verified"], said["removed"], said["unreadable"]) == (0, len(filled.keys), [], [])
    filled.flip(ROW_KEY, 0)
    code, said = json_of(capsys, "scrub", tmp_root)
    assert (code, said["verified"]) == (1, len(filled.keys) - 1)
    assert [(finding["what"], finding["key"]) for finding in said["removed"]] == [("bad_sum", ROW_KEY.hex())]
    assert main(["scrub", str(tmp_root)]) == 0
    assert f"{len(filled.keys) - 1} chunks verified" in capsys.readouterr().out
    filled.intact({ROW_KEY})


def test_for_ever(tmp_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    damage.fill(tmp_root)
    waits: list[float | None] = []
    real = threading.Event.wait

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout == 86400:
            waits.append(timeout)
            if len(waits) == 3:
                raise KeyboardInterrupt
            return False
        return real(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", wait)
    assert main(["scrub", str(tmp_root), "--rate", "1TB/s", "--every", "1d"]) == 0
    assert capsys.readouterr().out.count("chunks verified") == 3


def test_no_root_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = json_of(capsys, "scrub", tmp_path / "nothing")
    assert (code, said["error"]["type"]) == (2, "ConfigError")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", damage.NEWER)
def test_a_newer_format(tmp_root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    damage.NEWER[name](damage.fill(tmp_root))
    assert json_of(capsys, "scrub", tmp_root)[0] == 1
