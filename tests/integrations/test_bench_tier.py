"""The bench's rows of the tier, on tiny sizes, over the real vLLM. No speed is asserted."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.options import Options
from bench.table import OK, WRONG
from tests.integrations.harness import KvxferTier

pytestmark = pytest.mark.vllm


def tiny(path: Path) -> Options:
    return Options(
        only="tier", dirs=(path,), quick=True, runs=2, io_threads=2, engine_bytes=1 << 20, row_sizes=(64 << 10,)
    )


def test_both_tiers_have_their_rows_on_checked_bytes(tmp_path: Path) -> None:
    table = command.run(tiny(tmp_path), io.StringIO())
    assert [(row.case.split()[1], row.impl) for row in table.rows[:4]] == [
        ("store", "vLLM fs"), ("store", "KvxferTier"), ("load", "vLLM fs"), ("load", "KvxferTier"),
    ]  # fmt: skip
    assert [row.ok for row in table.rows] == [OK] * 6
    fs, mine = table.rows[4:]
    assert fs.figure is not None and mine.figure is not None and mine.most == fs.figure / 2
    assert not list(tmp_path.iterdir())


def test_a_wrong_byte_gets_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = KvxferTier.submit_load

    def wrong(self: KvxferTier, job: object) -> None:
        rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # type: ignore[attr-defined]
        rows[:] = rows[::-1].copy()
        right(self, job)

    monkeypatch.setattr(KvxferTier, "submit_load", wrong)
    table = command.run(tiny(tmp_path), None)
    verdicts = {(row.case.split()[1], row.impl): row.ok for row in table.rows[:4]}
    assert verdicts["load", "KvxferTier"] == verdicts["store", "KvxferTier"] == WRONG
    assert verdicts["load", "vLLM fs"] == OK
