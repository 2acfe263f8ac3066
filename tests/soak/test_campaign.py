"""A sample of the campaign that meets every operation there is; what memory is kept; and that both would notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import _native
from tests.native.shims import compiled, preloaded
from tests.soak.memory import run as measured

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What makes LMDB's own calls fail."""
    return compiled("lmdb", tmp_path_factory.mktemp("shim"))


CAMPAIGN, MEMORY = ("from tests.soak.campaign import main", "from tests.soak.memory import main; main()")
FORGETS = """
from kvxfer.jobs import JobRunner
JobRunner.kept, JobRunner.real = [], JobRunner.submit
JobRunner.submit = lambda self, *args, **named: (self.kept.append(bytes(300)), self.real(*args, **named))[1]
"""  # 300 bytes a job


def run(shim: Path, *words: object, code: str = CAMPAIGN) -> tuple[int, str]:
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


@pytest.mark.timeout(600)
def test_calls_of_every_operation_hang_and_everything_else_ends(shim: Path, tmp_path: Path) -> None:
    """`stuck` is `late` up to the shutdown."""
    status, text = run(shim, "--each", 1, "--way", "stuck", "--seed", 7, "--dir", tmp_path)
    assert status == 0, text
    calls, hung = table(text, "calls"), table(text, "hung")
    assert sum(hung.values()) == sum(n > 0 for n in calls.values()), text


# Calls are given up in 1000 s, and waited for 5.
UNBOUNDED = "import tests.soak.held as held; held.IO_TIMEOUT_S = 1000.0; held.WAIT_S = 5.0\n" + CAMPAIGN


def test_a_call_that_nobody_gives_up_is_noticed(shim: Path, tmp_path: Path) -> None:
    words = ("--each", 1, "--op", "mmap", "--way", "stuck", "--seed", 7, "--dir", tmp_path)
    status, text = run(shim, *words, code=UNBOUNDED)
    assert status == 1
    assert "a job without a result" in text


@pytest.mark.slow
def test_nothing_is_kept_of_what_was_done(tmp_path: Path) -> None:
    good, text = measured(0.0, str(tmp_path))
    assert good, text


@pytest.mark.slow
def test_what_is_kept_is_noticed(tmp_path: Path) -> None:
    good, text = measured(0.0, str(tmp_path), FORGETS + MEMORY)
    assert not good
    assert "LOSS memory" in text, text


@pytest.mark.slow
def test_twelve_of_each(shim: Path, tmp_path: Path) -> None:
    status, text = run(shim, "--each", 12, "--dir", tmp_path)
    assert status == 0, text
