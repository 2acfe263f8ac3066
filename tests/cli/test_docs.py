"""docs/cli.md names every command, option, finding and JSON key that there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvxfer.cli import app
from kvxfer.store import FINDINGS
from tests.cli.commands import PROJECT, json_of
from tests.store import damage
from tests.store.damage import NAMESPACES, ROW_KEY

TEXT = (PROJECT / "docs" / "cli.md").read_text()
QUOTED = set(re.findall(r"`([^`\n]+)`", TEXT))


NAMES = (
    "doctor",
    "inspect",
    "verify",
    "gc",
    "scrub",
    "export",
    "import",
    "reset",
    "rebuild-index",
    "quota",
    "simulate",
)


def section(command: str) -> str:
    return TEXT.split(f"\n## {command}\n")[1].split("\n## ")[0]


def test_every_command_and_option_is_there() -> None:
    group = typer.main.get_group(app)
    assert {name.split()[0] for name in QUOTED} >= set(group.commands)
    bench: Any = group.commands["bench"]
    commands = {name: group.commands[name] for name in NAMES}
    for name, command in (commands | {"bench gds": bench.commands["gds"]}).items():
        options = {option for parameter in command.params for option in parameter.opts}
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
        ("gc", ["gc", tmp_root, "--dry-run", "--namespaces-unused-for", "0s"]),
        ("export", ["export", tmp_root, tmp_root.parent / "file", "--namespace", NAMESPACES[0][0].digest(0).hex()]),
        ("import", ["import", tmp_root, tmp_root.parent / "file", "--yes"]),
        ("rebuild-index", ["rebuild-index", tmp_root, "--yes"]),
        ("scrub", ["scrub", tmp_root]),
        ("quota", ["quota", tmp_root]),
        ("reset", ["reset", tmp_root, "--yes"]),
        ("epoch bump", ["epoch", "bump", tmp_root, "--yes"]),
    ):
        _, report = json_of(capsys, *arguments)
        keys = set(report)
        for nested in ("directories", "unreadable", "layouts", "namespaces", "findings"):
            keys |= set().union(*report.get(nested, []))
        missing = sorted(key for key in keys if f"`{key}`" not in section(command))
        assert missing == [], command


def test_every_key_of_the_bench_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--memory host --span 4M --sizes 64K --depth 2 --limit 2M --duration 60 --operation mixed".split()
    _, report = json_of(capsys, "bench", "gds", tmp_path, *options)
    assert report["rows"][0]["parts"]
    del report["options"], report["drive"]  # the plan's; and the doctor's, with two more
    keys = {"gbps_why"}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            keys.update(value)
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(each)

    collect(report)
    assert sorted(key for key in keys if f"`{key}`" not in section("bench gds")) == []


def test_every_key_of_the_simulation_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = json_of(
        capsys, "simulate", PROJECT / "tests" / "data" / "conversation-500.jsonl", "--policy", "lru", "--capacity", "1%"
    )
    keys = {*report, *report["unbounded"], *report["rows"][0], *report["rows"][0]["dropped_blocks"]}
    assert sorted(key for key in keys if f"`{key}`" not in section("simulate")) == []
