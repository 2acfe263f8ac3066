"""`kvxfer epoch bump`: everything stored so far is a miss, once somebody said yes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cli import main
from kvxfer.store import Store
from tests.cli.commands import forked, json_of, run_on_terminal
from tests.store import damage, rig
from tests.store.damage import NEWER

HOUSEKEEPING = ("gc", "scrub", "export", "import", "reset", "rebuild-index", "quota")


def stored(root: Path) -> tuple[int, int]:
    """(weight epoch, rows that are found)."""
    names = [rig.key(i) for i in range(damage.ROWS)]
    with Store.open(rig.config(root)) as store:
        digest = store.register(*damage.NAMESPACES[0])
        return store.weight_epoch, len(rig.check_all(store, digest, names))


def test_a_bump_makes_everything_a_miss(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage.fill(tmp_root)
    assert stored(tmp_root) == (0, damage.ROWS)
    assert main(["epoch", "bump", str(tmp_root), "--yes"]) == 0
    assert capsys.readouterr().out == f"weight epoch of {tmp_root}: 0 -> 1\n"
    assert stored(tmp_root) == (1, 0)
    code, report = json_of(capsys, "epoch", "bump", tmp_root, "--yes")
    assert (code, report) == (0, {"root": str(tmp_root), "old": 1, "new": 2})
    _, seen = json_of(capsys, "inspect", tmp_root)
    assert seen["weight_epoch"] == 2
    assert {view["weight_epoch"] for view in seen["namespaces"]} == {0, 1}


def test_it_asks(tmp_root: Path) -> None:
    damage.fill(tmp_root)
    code, out, terminal = run_on_terminal("n\n", "epoch", "bump", tmp_root)
    assert (code, out) == (1, "")
    assert "will be a miss" in terminal
    assert stored(tmp_root) == (0, damage.ROWS)
    assert run_on_terminal("\n", "epoch", "bump", tmp_root)[0] == 1
    assert run_on_terminal("\x04", "epoch", "bump", tmp_root)[0] == 1  # the end of what is typed
    code, out, _ = run_on_terminal("y\n", "epoch", "bump", tmp_root)
    assert (code, out) == (0, f"weight epoch of {tmp_root}: 0 -> 1\n")
    assert stored(tmp_root) == (1, 0)


def test_without_a_terminal_it_needs_yes(tmp_root: Path) -> None:
    damage.fill(tmp_root)
    done = forked("epoch", "bump", tmp_root)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--yes" in done.stderr
    assert stored(tmp_root) == (0, damage.ROWS)


def test_no_root_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        code, report = json_of(capsys, "epoch", "bump", place, "--yes")
        assert (code, report["error"]["type"]) == (2, "ConfigError")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_format_is_left_as_it_is(tmp_root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    named = NEWER[name](damage.fill(tmp_root))
    before = rig.snapshot(tmp_root)
    code, report = json_of(capsys, "epoch", "bump", tmp_root, "--yes")
    assert (code, report["error"]["type"]) == (1, "FormatError")
    assert named in report["error"]["message"]
    assert rig.snapshot(tmp_root) == before


def test_help_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["demo"],
        ["doctor"],
        ["inspect"],
        ["verify"],
        *([name] for name in HOUSEKEEPING),
        ["epoch"],
        ["epoch", "bump"],
        [],
    ):
        assert main([*command, "--help"]) == 0
        assert "Exit codes: 0" in capsys.readouterr().out, command
