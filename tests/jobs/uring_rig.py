"""Jobs by a ring, and nothing else."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer import _native
from kvxfer.testing import FaultyIO
from tests.jobs.rig import BACKEND, Rig
from tests.jobs.test_straight import PIECE, Table
from tests.native.uring import needs_uring


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The ring alone."""
    needs_uring(tmp_path_factory.getbasetemp())
    monkeypatch.setenv(BACKEND, "uring")
    return "uring"


@pytest.fixture
def io() -> Iterator[FaultyIO]:
    with FaultyIO() as faults:
        yield faults


@pytest.fixture
def table() -> Table:
    return Table(seed=7)


def rings() -> int:
    """How many this process has."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("io_uring" in os.readlink(link) for link in links if link.is_symlink())


def counts(*ops: str) -> list[int]:
    return [FaultyIO.calls(op) for op in ops]


class Pipe:
    """A file of a chunk whose transfers stay under way until the other end is used."""

    def __init__(self, rig: Rig, path: Path) -> None:
        os.mkfifo(path)
        self.other_end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        assert fcntl.fcntl(self.other_end, fcntl.F_SETPIPE_SZ, 4 * PIECE) == 4 * PIECE
        self._rig = rig
        self._file = rig.lib.kvx_file_adopt(os.open(path, os.O_RDWR), b"pipe", 0)
        record = _native.Chunk.from_buffer_copy(rig.record(0))
        record.file = self._file
        self.records = [bytes(record)]

    def write(self, nbytes: int) -> None:
        assert os.write(self.other_end, b"\x17" * nbytes) == nbytes

    def release(self) -> None:
        self._rig.lib.kvx_file_release(self._file)

    def close(self) -> None:
        self.release()
        os.close(self.other_end)
