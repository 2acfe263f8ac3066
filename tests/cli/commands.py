"""Running commands: in this process, in another, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvxfer.cli import main
from tests import forks

PROJECT = Path(__file__).resolve().parents[2]
Json = Callable[..., tuple[int, dict[str, Any]]]


def run(*arguments: object, stdin: Any = subprocess.DEVNULL, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", *map(str, arguments)], stdin=stdin, stdout=subprocess.PIPE,
        stderr=options.pop("stderr", subprocess.PIPE), text=True, timeout=100,
        env=environment | options.pop("env", {}), **options,
    )  # fmt: skip


def forked(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `run`, in milliseconds: in a process of its own that is a fork (tests/forks.py)."""
    return forks.run("kvxfer.cli", *arguments, **options)


def run_on_terminal(answer: str, *arguments: object) -> tuple[int, str, str]:
    """With standard input and error on a terminal, where somebody types `answer`: (exit code, output, terminal)."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        done = forked(*arguments, stdin=theirs, stderr=theirs, env={"TERM": "xterm", "COLUMNS": "100"})
        os.set_blocking(ours, False)
        try:
            shown = os.read(ours, 1 << 20).decode()
        except BlockingIOError:
            shown = ""
        return done.returncode, done.stdout, shown
    finally:
        os.close(ours)
        os.close(theirs)


def json_of(capsys: Any, *arguments: object) -> tuple[int, dict[str, Any]]:
    """The command in this process with --json: its exit code, and the one object that it prints."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)
