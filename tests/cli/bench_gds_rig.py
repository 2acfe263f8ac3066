"""`kvxfer bench gds` over little: a run that ends soon, and nothing left behind after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import bench_lanes
from kvxfer.cli.bench_files import PREFIX
from tests.cli.commands import json_of

Capsys = pytest.CaptureFixture[str]
K, M = 1 << 10, 1 << 20
# No machine is too slow for the requests that a result needs: what ends a run is the limit.
QUICK = "--memory host --span 8M --sizes 64K --depth 4 --duration 600 --limit 12M".split()
WHOLE = "--limit 8M --repetitions 1 --duration 60".split()  # every place of the files once, beside the warm-up
INSIDE = (M, M + 1)  # bytes that a probe's own file does not reach


def bench(capsys: Capsys, *arguments: object) -> tuple[int, dict[str, Any]]:
    return json_of(capsys, "bench", "gds", *QUICK, *arguments)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bench_lanes, "EMPTY_S", 0.01)
    yield
    assert [path.name for path in tmp_path.rglob(f"{PREFIX}*")] == []
