"""docs/cli.md names every command, option, finding and JSON key that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from kvxfer.cli import app
from kvxfer.store import FINDINGS
from tests.cli.commands import PROJECT, json_of
from tests.store import damage
from tests.store.damage import ROW_KEY

TEXT = (PROJECT / "docs" / "cli.md").read_text()
QUOTED = set(re.findall(r"`([^`\n]+)`", TEXT))


def section(command: str) -> str:
    return TEXT.split(f"\n## {command}\n")[1].split("\n## ")[0]


def test_every_command_and_option_is_there() -> None:
    group = typer.main.get_group(app)
    assert {name.split()[0] for name in QUOTED} >= set(group.commands)
    for name in ("doctor", "inspect", "verify"):
        options = {option for parameter in group.commands[name].params for option in parameter.opts}
        missing = [o for o in options if o.startswith("--") and o != "--json" and f"`{o}" not in section(name)]
        assert missing == [], name


def test_every_finding_is_there() -> None:
    rows = [line for line in section("verify").splitlines() if line.startswith("|")]
    assert set(FINDINGS) <= set(re.findall(r"`(\w+)`", "\n".join(rows)))


def test_every_key_is_there(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage.fill(tmp_root).flip(ROW_KEY, 0)
    for command, arguments in (
        ("doctor", ["doctor", tmp_root]),
        ("verify", ["verify", tmp_root]),
        ("inspect", ["inspect", tmp_root]),
        ("epoch bump", ["epoch", "bump", tmp_root, "--yes"]),
    ):
        _, report = json_of(capsys, *arguments)
        keys = set(report)
        for nested in ("directories", "layouts", "namespaces", "findings"):
            keys |= set().union(*report.get(nested, []))
        missing = sorted(key for key in keys if f"`{key}`" not in section(command))
        assert missing == [], command
