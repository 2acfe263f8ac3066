"""docs/operations.md names nothing that is not there: series, commands, options, keys, reasons."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from kvxfer.cli import app
from kvxfer.cli.late import Late
from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.drive_writes import DRIVE_WRITTEN
from kvxfer.jobs import Status
from kvxfer.observe import SERIES
from kvxfer.policy import POLICIES

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "operations.md").read_text()
GROUP = typer.main.get_group(app)


def test_every_series_is_one() -> None:
    named = set(re.findall(r"\bkvxfer_[a-z_]+[a-z]\b", TEXT))
    assert len(named) > 10
    assert named - {series.name for series in (*SERIES, DRIVE_WRITTEN)} == set()


def test_every_outcome_is_one() -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| stores are dropped"))
    named = {*re.findall(r'outcome="(\w+)"', TEXT), *re.findall(r"`(\w+)`", row)} - {"outcome", "hit"}
    named -= {name for name in named if name.startswith("kvxfer_")}
    assert {"budget", "backlog", "no_space"} <= named <= {status.name.lower() for status in Status}


@pytest.mark.parametrize(
    "line", sorted(set(re.findall(r"kvxfer ((?:bench gds|epoch bump|[a-z][a-z-]+)\b[^`\n]*)", TEXT)))
)
def test_every_command_and_option_is_one(line: str) -> None:
    words = line.split()
    command: Any = GROUP.commands.get(words[0])
    if command is None:
        assert words[0] in {"with", "and"}, line  # a sentence about kvxfer
        return
    if isinstance(command, Late):
        command = command.load()
    if words[0] in {"bench", "epoch"}:
        command = command.commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_key_is_one() -> None:
    known = {field.name for cls in (StoreConfig, EngineConfig) for field in fields(cls)} | {"root_dir"}
    named = {
        "capacity_bytes", "policy", "write_dwpd", "write_bytes_per_s", "second_touch_names", "max_queue_s",
        "durability", "scrub_bytes_per_s", "ttl_s",
    }  # fmt: skip
    assert named <= known and all(f"`{name}`" in TEXT for name in named)
    assert all(f"| `{name}`" in TEXT for name in POLICIES)
    assert all(f"| `{name}`" in TEXT for name in ("none", "process", "power"))
