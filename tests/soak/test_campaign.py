"""A sample of the campaign that meets every operation there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer import _native
from tests.soak.child import run, table


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
