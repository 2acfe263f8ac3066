"""A sample of the campaign that meets every operation there is, and the campaign itself on what it must notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import _native
from tests.native.shims import compiled, preloaded

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What makes LMDB's own calls fail."""
    return compiled("lmdb", tmp_path_factory.mktemp("shim"))


def run(shim: Path, *words: object, code: str = "from tests.soak.campaign import main") -> tuple[int, str]:
    """A campaign in a process without threads; its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nsys.exit(main({[*map(str, words)]!r}))"], capture_output=True,
        text=True, check=False, cwd=CHECKOUT, timeout=3000, env=os.environ | preloaded(shim),
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def table(text: str, title: str) -> dict[str, int]:
    """A line of `op n, op n`."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(title + " ")]
    pairs = (pair.strip().rpartition(" ") for pair in line.strip().removeprefix(title).split(","))
    return {op: int(n) for op, _, n in pairs}


def test_a_call_of_every_operation_fails_and_nothing_is_wrong_or_left(shim: Path, tmp_path: Path) -> None:
    status, text = run(shim, "--each", 1, "--seed", 7, "--dir", tmp_path)
    assert status == 0, text
    calls, plays = table(text, "calls"), table(text, "plays")
    assert set(calls) == {*_native.OPS, "lmdb write", "lmdb sync"}
    never = {op for op, n in calls.items() if not n}
    assert all(op.startswith("uring") for op in never), never  # which a kernel may refuse
    assert plays == {op: 1 for op in calls if op not in never}
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_twelve_of_each(shim: Path, tmp_path: Path) -> None:
    status, text = run(shim, "--each", 12, "--dir", tmp_path)
    assert status == 0, text
