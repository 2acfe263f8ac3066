"""`kvxfer verify`: every damage is found, and after a repair nothing is damaged and nothing intact is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvxfer.cli import main
from kvxfer.cli.verify import mend
from kvxfer.store import Store, verify_root
from tests.cli.commands import forked, json_of, run_on_terminal
from tests.engine.rig import Node
from tests.jobs.rig import GEOMETRY
from tests.oracle import Model
from tests.store import damage, rig
from tests.store.damage import DAMAGES, NEWER, ROW_KEY, ROWS, SHARED


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_then_removed_and_the_rest_stays(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    filled = damage.fill(tmp_root)
    act, expected = DAMAGES[name]
    lost = act(filled)
    before = rig.snapshot(tmp_root)

    assert main(["verify", str(tmp_root), "--threads", "2"]) == 1
    out = capsys.readouterr().out
    assert all(f"  {what}: " in out for what in expected)
    code, report = json_of(capsys, "verify", tmp_root)
    assert (code, report["entries_failed"], report["removed"]) == (1, len(lost), 0)
    assert {finding["what"] for finding in report["findings"]} == expected
    assert {finding["key"] for finding in report["findings"] if finding["key"]} == {key.hex() for key in lost}
    assert report["left"] == report["findings"]
    assert rig.snapshot(tmp_root) == before

    code, report = json_of(capsys, "verify", tmp_root, "--repair", "--yes")
    assert (code, report["removed"], report["left"]) == (0, len(lost), [])
    code, report = json_of(capsys, "verify", tmp_root)
    assert (code, report["findings"], report["entries_verified"]) == (0, [], ROWS + SHARED - len(lost))
    filled.intact(lost)


def test_a_whole_root(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage.fill(tmp_root)
    done = forked("verify", tmp_root)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"entries verified: {ROWS + SHARED}" in done.stdout
    assert "nothing failed" in done.stdout
    before = rig.snapshot(tmp_root)
    code, report = json_of(capsys, "verify", tmp_root, "--repair", "--yes")
    assert (code, report["removed"], report["index"]) == (0, 0, {"state": "usable", "why": ""})
    assert rig.snapshot(tmp_root) == before  # there was nothing to do


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_format_is_neither_read_nor_repaired(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    named = NEWER[name](damage.fill(tmp_root))
    before = rig.snapshot(tmp_root)
    code, report = json_of(capsys, "verify", tmp_root, "--repair", "--yes")
    assert (code, report["error"]["type"]) == (1, "FormatError")
    assert named in report["error"]["message"]
    assert rig.snapshot(tmp_root) == before


def test_a_repair_says_what_it_will_do_and_asks(tmp_root: Path) -> None:
    filled = damage.fill(tmp_root)
    filled.flip(ROW_KEY, 0)
    before = rig.snapshot(tmp_root)
    code, out, terminal = run_on_terminal("n\n", "verify", tmp_root, "--repair")
    assert code == 1
    assert "entries to be removed: 1. Go on? [y/N]" in terminal
    assert "bad_sum" in out
    assert rig.snapshot(tmp_root) == before
    code, out, terminal = run_on_terminal("y\n", "verify", tmp_root, "--repair", "--json")
    assert (code, json.loads(out)["removed"]) == (0, 1)
    assert "Go on?" in terminal
    filled.intact({ROW_KEY})


def test_without_a_terminal_a_repair_needs_yes_before_it_reads(tmp_root: Path) -> None:
    filled = damage.fill(tmp_root)
    filled.flip(ROW_KEY, 0)
    before = rig.snapshot(tmp_root)
    done = forked("verify", tmp_root, "--repair")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--yes" in done.stderr
    assert rig.snapshot(tmp_root) == before


def test_progress_is_shown_on_a_terminal_only(tmp_root: Path) -> None:
    damage.fill(tmp_root)
    code, out, terminal = run_on_terminal("", "verify", tmp_root)
    assert code == 0
    assert "verifying" in terminal
    assert "slots" in terminal
    assert "verifying" not in out
    code, out, terminal = run_on_terminal("", "verify", tmp_root, "--json")
    assert (code, terminal) == (0, "")
    assert json.loads(out)["entries_failed"] == 0


def test_an_entry_that_was_stored_again_meanwhile_is_left_alone(tmp_root: Path) -> None:
    """What failed is removed only if it is the same still: slab, slot and generation."""
    filled = damage.fill(tmp_root)
    filled.flip(ROW_KEY, 0)
    findings = verify_root(tmp_root).findings
    with Store.open(rig.config(tmp_root)) as store:
        digest = store.register(*damage.NAMESPACES[0])
        (entry,) = store.pin(digest, [ROW_KEY])
        assert entry is not None
        store.invalidate(entry, "bad_sum")
        store.unpin([entry])
        assert rig.put(store, digest, [ROW_KEY]) == [True]
    assert mend(tmp_root, findings, 1) == []
    filled.intact(set())


def test_many_findings_are_cut_short_for_people_only(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = damage.fill(tmp_root)
    for number in range(30):
        filled.flip(rig.key(number), 0)
    assert main(["verify", str(tmp_root)]) == 1
    out = capsys.readouterr().out
    assert out.count("bad_sum") == 20
    assert "and 10 more" in out
    _, report = json_of(capsys, "verify", tmp_root)
    assert len(report["findings"]) == 30


@pytest.mark.parametrize("threads", ["0", "257", "many"])
def test_threads_are_bounded(tmp_root: Path, capsys: pytest.CaptureFixture[str], threads: str) -> None:
    damage.fill(tmp_root)
    assert main(["verify", str(tmp_root), "--threads", threads]) == 2
    assert threads in capsys.readouterr().err


def test_what_a_repair_cannot_mend_is_left_and_said(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = damage.fill(tmp_root)
    (tmp_root / "slabs" / "slab-00000042.kvx").mkdir()
    filled.flip(ROW_KEY, 0)
    code, report = json_of(capsys, "verify", tmp_root, "--repair", "--yes")
    assert (code, report["removed"]) == (1, 1)
    assert [finding["what"] for finding in report["left"]] == ["slab_unreadable"]
    assert main(["verify", str(tmp_root), "--repair", "--yes"]) == 1
    assert "left: 1" in capsys.readouterr().out
    filled.intact({ROW_KEY})


def test_what_an_engine_stored_is_verified_and_what_it_lost_is_removed(
    tmp_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks wrote each slot; a load afterwards misses what was removed, and gets the rest."""
    model = Model.random(GEOMETRY, 12)
    with Node(tmp_root, model) as node:
        assert node.put(range(10)).bitmap.all()
        node.flip(6, 100)
        code, report = json_of(capsys, "verify", tmp_root)  # while it is open
        assert (code, report["entries_verified"], report["entries_failed"]) == (1, 9, 1)
        assert report["open_in"] == [os.getpid()]
    code, report = json_of(capsys, "verify", tmp_root, "--repair", "--yes")
    assert (code, report["removed"]) == (0, 1)
    with Node(tmp_root, model) as node:
        result = node.get(range(10))
        assert [bool(result.bitmap[i]) for i in range(10)] == [i != 6 for i in range(10)]
        node.check([i for i in range(10) if i != 6])
        assert node.reader.stats()["bad_sum"] == 0
