"""A sample of calls that hang, of every operation; and that one which nobody gives up would be noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.child import CAMPAIGN, run, table


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
