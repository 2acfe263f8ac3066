"""The rows of io_uring: both ways on checked bytes, and fio's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import uring
from bench.table import Table
from kvxfer.testing import FaultyIO
from tests.bench.test_bench import tiny
from tests.native.uring import needs_uring


@pytest.fixture(autouse=True)
def _works(tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_uring(tmp_path_factory.getbasetemp())


def put_fio(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    fio = folder / "fio"
    fio.write_text(f"#!{sys.executable}\n{script}\n")
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_both_ways_and_fio_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools := tmp_path / "tools").mkdir()
    answer = json.dumps({"jobs": [{"write": {"bw_bytes": 2e9}, "read": {"bw_bytes": 3e9}}]})
    log = tmp_path / "asked"
    put_fio(
        monkeypatch, tools, f"import sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv) + '\\n')\nprint({answer!r})"
    )
    before = FaultyIO.calls("uring_submit")
    table = command.run(tiny(tmp_path, only="uring", row_sizes=()), None)
    assert FaultyIO.calls("uring_submit") > before
    ways = [(row.impl, row.ok) for row in table.rows if row.impl in ("posix", "uring")]
    assert ways[:2] == [("posix", "ok"), ("uring", "ok")] and len(ways) >= 4
    assert [row.figure for row in table.rows if row.impl == "fio io_uring"][:2] == [2.0, 3.0]
    assert "--ioengine=io_uring" in log.read_text() and "--rw=read" in log.read_text()


@pytest.mark.parametrize("script, says", [(None, "it is not installed"), ("print('no json')", "no answer: ValueError")])
def test_what_fio_does_not_give_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, says: str
) -> None:
    (tools := tmp_path / "tools").mkdir()
    if script is None:
        monkeypatch.setenv("PATH", str(tools))
    else:
        put_fio(monkeypatch, tools, script)
    options = tiny(tmp_path, only="uring", row_sizes=())
    table = Table({}, None)
    assert uring.fio_rows(table, options, tmp_path, "here", False) == []
    assert says in table.notes[0]
