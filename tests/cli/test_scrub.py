"""`kvxfer scrub`: what it prints and answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kvxfer.cli import main
from kvxfer.cli.output import size
from kvxfer.cli.scrub import rate, spell
from kvxfer.store import Store
from kvxfer.store.entry import Entry
from kvxfer.store.reading import SlotReader
from kvxfer.store.records import IndexRecord
from kvxfer.store.scrub_pass import Pass, begin, note
from tests.cli.commands import json_of
from tests.store import damage
from tests.store.damage import ROW_KEY


def interrupt_at(monkeypatch: pytest.MonkeyPatch, when: Callable[[IndexRecord, int], bool]) -> None:
    """Ctrl-C before a slot is read: `when` says before which, and at the how manyth."""
    looked, real = 0, SlotReader.check

    def check(reader: SlotReader, record: IndexRecord) -> tuple[str, str] | None:
        nonlocal looked
        looked += 1
        if when(record, looked):
            raise KeyboardInterrupt
        return real(reader, record)

    monkeypatch.setattr(SlotReader, "check", check)


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
    assert (json_of(capsys, "inspect", tmp_root)[1]["scrub"]) == {"ended": 0, "started": None, "behind": None}
    with monkeypatch.context() as interrupted:
        interrupt_at(interrupted, lambda record, looked: looked == 8)
        assert main(["scrub", str(tmp_root)]) == 130
    said = capsys.readouterr().out
    assert f"{tmp_root}: 7 chunks verified" in said and "; interrupted\n" in said
    assert f"{tmp_root}: the next scrub goes on with the pass that was begun 20" in said
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


@pytest.mark.parametrize("as_json", [True, False])
def test_what_an_interrupted_pass_has_found_is_told(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    filled = damage.fill(tmp_root)
    filled.flip(ROW_KEY, 0)
    seen: list[bytes] = []

    def behind_it(record: IndexRecord, looked: int) -> bool:
        seen.append(record.key)
        return ROW_KEY in seen and record.key != ROW_KEY

    interrupt_at(monkeypatch, behind_it)
    assert main(["scrub", str(tmp_root), *["--json"] * as_json]) == 1
    out = capsys.readouterr().out
    if as_json:
        said = json.loads(out)
        assert (said["verified"], said["complete"]) == (len(set(seen)) - 2, False)
        assert [(finding["what"], finding["key"]) for finding in said["removed"]] == [("bad_sum", ROW_KEY.hex())]
    else:
        assert "damaged and removed: 1" in out and "; interrupted\n" in out and "bad_sum" in out


def test_a_pass_that_is_interrupted_with_nothing_found(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage.fill(tmp_root)
    interrupt_at(monkeypatch, lambda record, looked: looked == 3)
    code, said = json_of(capsys, "scrub", tmp_root)
    assert (code, said["verified"], said["complete"], said["removed"]) == (130, 2, False, [])


def test_a_chunk_that_is_taken_out_as_the_interrupt_comes_is_told(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = damage.fill(tmp_root)
    filled.flip(ROW_KEY, 0)
    real = Store.invalidate

    def invalidate(store: Store, entry: Entry, reason: str) -> bool:
        real(store, entry, reason)
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "invalidate", invalidate)
    code, said = json_of(capsys, "scrub", tmp_root)
    assert (code, [finding["key"] for finding in said["removed"]]) == (1, [ROW_KEY.hex()])


def test_a_pass_says_first_what_it_has_before_it(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = damage.fill(tmp_root)
    with Store.open_existing(tmp_root) as store, store.cleaning() as cleaner:
        sizes = [entry.slab.slot_bytes for slab in cleaner.slabs() for entry in cleaner.in_slab(slab)]
    assert len(sizes) == len(filled.keys)

    def words(left: list[int]) -> str:
        return f"{tmp_root}: {len(left)} chunks to read, {size(sum(left))} with their trailers"

    with monkeypatch.context() as interrupted:
        interrupt_at(interrupted, lambda record, looked: looked == 1)
        main(["scrub", str(tmp_root), "--rate", "2"])  # a pass that waits would never end
        assert capsys.readouterr().out.startswith(
            f"{words(sizes)}: {spell(sum(sizes) / 2)} at 2 bytes a second (--rate)\n"
        )
    with monkeypatch.context() as interrupted:
        interrupt_at(interrupted, lambda record, looked: looked == 4)
        main(["scrub", str(tmp_root), "--rate", "1TB/s"])
        assert f"{words(sizes)}: 0.0 s at 1,000,000,000,000 bytes a second (--rate)\n" in capsys.readouterr().out
        main(["scrub", str(tmp_root), "--rate", "1TB/s"])
        assert f"{words(sizes[3:])}: " in capsys.readouterr().out, "of the rest"
        main(["scrub", str(tmp_root), "--from-start"])
        assert f"{words(sizes)}: 0.0 s at 200,000,000 bytes a second (--rate)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0.0 s"), (59.9, "59.9 s"), (60, "1.0 minutes"), (5400, "1.5 hours"), (86400 * 5787, "5,787.0 days")],
)
def test_times_are_spelled(seconds: float, words: str) -> None:
    assert spell(seconds) == words


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
