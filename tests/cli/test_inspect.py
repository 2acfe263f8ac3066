"""`kvxfer inspect`: what is in a root, while it is open too, and that nothing from a disk reaches the terminal raw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import main
from kvxfer.store import Store
from tests.cli.commands import PROJECT, forked, json_of, run
from tests.engine.rig import Node, keys_of
from tests.jobs.rig import GEOMETRY
from tests.oracle import Model
from tests.store import damage, rig
from tests.store.damage import DAMAGES, NEWER, ROWS, SHARED

NASTY = "[red]evil[/red]\x1b[31m\n\u202e\x07é"
SERVER = """
import sys
from tests.store import rig
from kvxfer.store import Store
with Store.open(rig.config(sys.argv[1])) as store:
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(i) for i in range(30)]))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_root_in_numbers(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = damage.fill(tmp_root)
    before = rig.snapshot(tmp_root)
    code, report = json_of(capsys, "inspect", tmp_root)
    assert code == 0
    assert rig.snapshot(tmp_root) == before
    assert (report["format"], report["alignment"], report["weight_epoch"], report["open_in"]) == (1, 4096, 0, [])
    assert report["index"] == {
        "state": "usable", "why": "", "entries": ROWS + SHARED,
        "file_bytes": (tmp_root / "index" / "data.mdb").stat().st_size,
    }  # fmt: skip
    files = list((tmp_root / "slabs").iterdir())
    assert (report["slabs"], report["slab_bytes"]) == (len(files), sum(file.stat().st_size for file in files))
    used = {layout["slot_bytes"]: (layout["used"], layout["free"] + layout["used"]) for layout in report["layouts"]}
    assert {size: pair[0] for size, pair in used.items()} == {
        rig.ROW.slot_bytes: ROWS, rig.SHARED.slot_bytes: SHARED
    }  # fmt: skip
    assert [layout["slots"] for layout in report["layouts"]] == [used[x["slot_bytes"]][1] for x in report["layouts"]]
    assert [(view["digest"], view["entries"], view["fields"]["model"]) for view in report["namespaces"]] == [
        (filled.digests[rig.key(0)].hex(), ROWS, "org/model"),
        (filled.digests[rig.key(ROWS)].hex(), SHARED, "shared"),
    ]
    assert report["findings"] == []
    assert (report["other_files"], report["leftover_files"]) == (0, 0)


def test_what_an_engine_stored_is_counted(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model.random(GEOMETRY, 12)
    with Node(tmp_root, model) as node:
        assert node.put(range(10)).bitmap.all()
        code, live = json_of(capsys, "inspect", tmp_root)
        assert (code, live["open_in"], live["index"]["entries"]) == (0, [os.getpid()], 10)
        digest = node.digest
    _, report = json_of(capsys, "inspect", tmp_root)
    assert report["open_in"] == []
    assert [(view["digest"], view["entries"]) for view in report["namespaces"]] == [(digest.hex(), 10)]
    assert len(keys_of(range(10))) == report["layouts"][0]["used"]


def test_a_server_that_has_it_open_is_named_and_not_disturbed(tmp_root: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, tmp_root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        done = forked("inspect", tmp_root)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"process {server.pid}" in done.stdout
        assert "30 entries" in done.stdout
        server.communicate("")
    assert server.returncode == 0
    assert "open in      none" in forked("inspect", tmp_root).stdout


def test_the_human_view(tmp_root: Path) -> None:
    damage.fill(tmp_root)
    done = forked("inspect", tmp_root)
    assert (done.returncode, done.stderr) == (0, "")
    assert "format 1, alignment 4096, weight epoch 0" in done.stdout
    assert f"{ROWS + SHARED} entries" in done.stdout
    assert f"{ROWS} used" in done.stdout
    assert f"{SHARED} used" in done.stdout
    assert '"model": "org/model"' in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_from_the_disk_are_shown_as_they_are_and_obeyed_by_nobody(tmp_path: Path, encoding: str) -> None:
    with Store.open(rig.config(tmp_path / "root")) as store:
        digest = store.register(rig.namespace(model=NASTY), rig.ROW)
        assert all(rig.put(store, digest, [rig.key(0)]))
    root = (tmp_path / "root").rename(tmp_path / os.fsdecode(b"root\x1b[2J\xff"))
    done = run("inspect", root, env={"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, "")
    assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout)
    assert "[red]evil[/red]" in done.stdout
    assert "root\\x1b[2J" in done.stdout
    assert ("é" in done.stdout) == (encoding == "utf-8")


@pytest.mark.parametrize("name", ["slab deleted", "random header", "slab too long", "index overwritten"])
def test_damage_is_named(tmp_root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    act, expected = DAMAGES[name]
    act(damage.fill(tmp_root))
    code, report = json_of(capsys, "inspect", tmp_root)
    assert (code, {finding["what"] for finding in report["findings"]}) == (1, expected)
    assert main(["inspect", str(tmp_root)]) == 1
    out = capsys.readouterr().out
    assert all(f"  {what}: " in out for what in expected)
    if "index" in expected:
        assert report["index"]["state"] == "lost"
        assert {layout["used"] for layout in report["layouts"]} == {None}
        assert {view["entries"] for view in report["namespaces"]} == {None}


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_format_is_one_line_and_exit_code_1(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    named = NEWER[name](damage.fill(tmp_root))
    assert main(["inspect", str(tmp_root)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err
    code, report = json_of(capsys, "inspect", tmp_root)
    assert (code, report["error"]["type"]) == (1, "FormatError")
    assert named in report["error"]["message"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_where_there_is_no_root(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        code, report = json_of(capsys, command, place)
        assert (code, list(report), report["error"]["type"]) == (2, ["error"], "ConfigError")
    assert main([command]) == 2


def test_a_damaged_json_is_damage(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage.fill(tmp_root)
    values: list[Any] = ["", "[]", '{"format": 1, "alignment": 5, "weight_epoch": 0}', "[" * 60_000]
    for text in values:
        (tmp_root / "kvxfer.json").write_text(text)
        code, report = json_of(capsys, "inspect", tmp_root)
        assert (code, report["error"]["type"]) == (1, "FormatError")
