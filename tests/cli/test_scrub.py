"""`kvxfer scrub`: what it prints and answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import typer

from kvxfer.cli import main
from kvxfer.cli.scrub import rate
from kvxfer.store.reading import SlotReader
from kvxfer.store.records import IndexRecord
from kvxfer.store.scrub_pass import Pass, begin, note
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


def test_a_pass_that_was_cut_short_is_gone_on_with_and_told(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = damage.fill(tmp_root)
    chunks = len(filled.keys)
    looked, real = 0, SlotReader.check

    def check(reader: SlotReader, record: IndexRecord) -> tuple[str, str] | None:
        nonlocal looked
        looked += 1
        if looked == 8:
            raise KeyboardInterrupt
        return real(reader, record)

    assert (json_of(capsys, "inspect", tmp_root)[1]["scrub"]) == {"ended": 0, "started": None, "behind": None}
    with monkeypatch.context() as interrupted:
        interrupted.setattr(SlotReader, "check", check)
        assert main(["scrub", str(tmp_root)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_root}: the next scrub goes on with the pass that was begun 20")
    assert said.endswith(f" UTC; 7 of {chunks} chunks are behind it\n")
    seen = json_of(capsys, "inspect", tmp_root)[1]["scrub"]
    assert (seen["ended"], seen["behind"]) == (0, 7) and seen["started"] > 0
    main(["inspect", str(tmp_root)])
    shown = capsys.readouterr().out
    assert "last whole pass ended: never; one is under way, begun 20" in shown and "7 chunks are behind it" in shown
    assert main(["scrub", str(tmp_root)]) == 0
    said = capsys.readouterr().out
    assert "going on with the pass that was begun 20" in said and f"{chunks - 7} chunks verified" in said
    assert "the rest of a pass that was begun 20" in said
    seen = json_of(capsys, "inspect", tmp_root)[1]["scrub"]
    assert seen["ended"] > 0 and seen["started"] is None


def test_from_the_start(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = damage.fill(tmp_root)
    known = begin(tmp_root)
    note(tmp_root, Pass(known.name, known.started, 1 << 40, 0))
    code, said = json_of(capsys, "scrub", tmp_root, "--from-start")
    assert (code, said["verified"], said["went_on"], said["complete"]) == (0, len(filled.keys), False, True)
    known = begin(tmp_root)
    note(tmp_root, Pass(known.name, known.started, 1 << 40, 0))
    code, said = json_of(capsys, "scrub", tmp_root)
    assert (code, said["verified"], said["went_on"], said["complete"]) == (0, 0, True, True)
    assert said["started"] == known.started


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
