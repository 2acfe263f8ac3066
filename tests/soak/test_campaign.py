"""A sample of the campaign that meets every operation there is, and the campaign itself on what it must notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import _native

CHECKOUT = Path(__file__).parents[2]


def run(*words: object, code: str = "from tests.soak.campaign import main") -> tuple[int, str]:
    """A campaign in a process without threads; its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nsys.exit(main({[*map(str, words)]!r}))"], capture_output=True,
        text=True, check=False, cwd=CHECKOUT, timeout=3000,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def table(text: str, title: str) -> dict[str, int]:
    """A line of `op n, op n`."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(title + " ")]
    return {op: int(n) for op, n in (pair.split() for pair in line.strip().removeprefix(title).split(","))}


def test_a_call_of_every_operation_fails_and_nothing_is_wrong_or_left(tmp_path: Path) -> None:
    status, text = run("--each", 1, "--seed", 7, "--dir", tmp_path)
    assert status == 0, text
    calls, plays = table(text, "calls"), table(text, "plays")
    assert set(calls) == set(_native.OPS)
    never = {op for op, n in calls.items() if not n}
    assert all(op.startswith("uring") for op in never), never  # a kernel may refuse those
    assert plays == {op: 1 for op in calls if op not in never}
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_twelve_of_each(tmp_path: Path) -> None:
    status, text = run("--each", 12, "--dir", tmp_path)
    assert status == 0, text
