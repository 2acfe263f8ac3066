"""docs/cli.md names every command, option, finding and JSON key that there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvxfer.cli import COMMANDS, app
from kvxfer.cli.late import Late
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
    late: Any = typer.main.get_group(app).commands
    assert {name.split()[0] for name in QUOTED} >= set(late)
    commands = {name: late[name].load() for name in NAMES}
    for name, command in (commands | {"bench gds": late["bench"].load().commands["gds"]}).items():
        options = {option for parameter in command.params for option in parameter.opts}
        missing = [o for o in options if o.startswith("--") and o != "--json" and f"`{o}" not in section(name)]
        assert missing == [], name


def test_the_list_of_commands_says_what_they_say_of_themselves() -> None:
    for name, late in typer.main.get_group(app).commands.items():
        assert isinstance(late, Late)
        command = late.load()
        assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name].help, name


def test_the_list_of_commands_imports_none_of_them() -> None:
    """All of them take a second: typer, and what the help is printed with, are all that it needs."""
    script = (
        "import sys; from kvxfer.cli import main; code = main(['--help'])\n"
        "assert not {'numpy', 'lmdb', 'kvxfer.store', 'kvxfer.cli.demo'} & sys.modules.keys(); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=True, stdout=subprocess.DEVNULL, timeout=60)


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
