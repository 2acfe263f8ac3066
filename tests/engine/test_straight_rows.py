"""Host rows through a whole engine, in every mode of EngineConfig.rows: the same answers, and what each promises."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.config import ROW_MODES, EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError
from kvxfer.io.modes import in_memory
from kvxfer.jobs import Status
from kvxfer.layout import row_mapping
from kvxfer.results import TransferResult
from kvxfer.staging import AlignedBuffer
from kvxfer.store import Store
from kvxfer.testing import FaultyIO
from tests.engine.rig import keys_of, namespace_of
from tests.jobs.test_faults import until
from tests.oracle import POISON

ROW = 320 << 10  # two segments
ROWS = 24
ALL = list(range(ROWS))
CHECKOUT = Path(__file__).resolve().parents[2]


def contents(row: int) -> Any:
    """The bytes of a row."""
    return np.random.default_rng(row).integers(0, 256, ROW, np.uint8)


class Host:
    """A store, an engine over rows of host memory, and the places that they come back to."""

    def __init__(self, root: Path, rows: str, *, shift: int = 0, direct: str = "auto", **config: Any) -> None:
        self._buffer = AlignedBuffer(2 * ROWS * ROW + 4096, 4096)
        self.rows = self._buffer.array[shift : shift + 2 * ROWS * ROW].reshape(2 * ROWS, ROW)
        for row in ALL:
            self.rows[row] = contents(row)
        self.poison()
        pages = KVPages(row_mapping(ROW), [self.rows], 2 * ROWS)
        self.store = Store.open(
            StoreConfig(root=root, capacity_bytes=64 << 20, slab_bytes=32 << 20, direct=direct), writers=1
        )
        self.engine = TransferEngine(
            self.store,
            namespace_of(canonical_form="row", topology="one host"),
            [pages],
            config=EngineConfig(**({"io_threads": 2, "shutdown_timeout_s": 0.5, "rows": rows} | config)),
            live=False,
        )
        self._job = 0

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()
        self.store.close()

    def poison(self) -> None:
        self.rows[ROWS:] = POISON

    def submit(self, call: str, numbers: list[int], **how: Any) -> int:
        self._job += 1
        ids = [n + (ROWS if call == "submit_load" else 0) for n in numbers]
        getattr(self.engine, call)(self._job, keys_of(numbers), ids, **how)
        return self._job

    def take(self, job: int, timeout: float = 30.0) -> TransferResult:
        return self.engine.wait([job], timeout)[job]

    def put(self, numbers: list[int]) -> TransferResult:
        return self.take(self.submit("submit_store", numbers))

    def get(self, numbers: list[int], **how: Any) -> TransferResult:
        return self.take(self.submit("submit_load", numbers, **how))

    def check(self, arrived: list[int]) -> None:
        """These rows came back right."""
        for row in arrived:
            assert np.array_equal(self.rows[ROWS + row], contents(row)), row

    def where(self, number: int) -> tuple[int, int]:
        """File offsets of a chunk's slot."""
        found = self.store.locate(self.engine.digest, keys_of([number])[0])
        assert found is not None
        return found[1], found[1] + found[2].slot_bytes


@pytest.fixture(params=ROW_MODES)
def rows(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def io() -> Iterator[FaultyIO]:
    with FaultyIO() as faults:
        yield faults


@pytest.mark.parametrize("shift", [0, 512])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_rows_come_back(tmp_root: Path, rows: str, shift: int, direct: str) -> None:
    with Host(tmp_root, rows, shift=shift, direct=direct) as host:
        assert host.put(ALL).bitmap.all() and host.get(ALL).bitmap.all()
        host.check(ALL)
        host.poison()
        assert host.get(ALL, deadline=time.monotonic() + 30).bitmap.all()
        host.check(ALL)


def test_damage_is_a_miss_and_then_gone(tmp_root: Path, io: FaultyIO, rows: str) -> None:
    with Host(tmp_root, rows) as host:
        host.put(ALL)
        io.flip(7, times=1, offset=host.where(5))
        result = host.get(ALL)
        assert [(e.chunk, e.status) for e in result.errors] == [(5, Status.BAD_SUM)]
        host.check([n for n in ALL if n != 5])
        assert host.engine.lookup(keys_of(ALL)) == 5
        assert host.put([5]).bitmap.all() and host.get(ALL).bitmap.all()
        host.check(ALL)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_is_not_stored(tmp_root: Path, io: FaultyIO, rows: str, code: int) -> None:
    with Host(tmp_root, rows) as host:
        io.fail("pwrite", code, after=6, times=1)
        result = host.put(ALL)
        ((chunk, status),) = [(e.chunk, e.status) for e in result.errors]
        assert status is Status.IO
        arrived = [n for n in ALL if host.get([n]).bitmap.all()]
        assert arrived == [n for n in ALL if n != chunk]
        host.check(arrived)


def test_a_lost_write_is_never_believed(tmp_root: Path, io: FaultyIO, rows: str) -> None:
    with Host(tmp_root, rows, io_timeout_s=0.5, breaker_failures=0) as host:
        host.put(ALL[-1:])  # makes the slab
        io.hang("pwrite", times=1)
        result = host.put(ALL)
        ((chunk, status),) = [(e.chunk, e.status) for e in result.errors]
        assert status is Status.LOST
        assert host.store.stats().quarantined_slots == 1
        host.rows[chunk] = 0x77  # its next owner
        assert not host.get([chunk]).bitmap.all(), "nobody has heard of it"
        io.release()
        until(lambda: host.store.stats().quarantined_slots == 0, "the slot comes back")
        assert not host.get([chunk]).bitmap.all()
        host.rows[chunk] = contents(chunk)
        assert host.put([chunk]).bitmap.all() and host.get(ALL).bitmap.all()
        host.check(ALL)


def test_gathered_says_when_a_row_may_be_reused(tmp_root: Path, io: FaultyIO, rows: str) -> None:
    with Host(tmp_root, rows) as host:
        host.put(ALL[-1:])  # makes the slab
        hanging = io.hang("pwrite", times=1)
        job = host.submit("submit_store", [0])
        until(lambda: hanging.hits == 1, "the write hangs")
        if host.engine.wait_gathered(job, 0.2):
            assert rows == "staged" or (rows == "auto" and not in_memory(tmp_root))
            host.rows[0] = 0x55
            io.release()
        else:
            assert rows == "straight" or (rows == "auto" and in_memory(tmp_root))
            io.release()
            assert host.engine.wait_gathered(job, 20)
        assert host.take(job).bitmap.all()
        assert host.get([0]).bitmap.all()
        host.check([0])


def test_a_lost_read_and_its_row(tmp_root: Path, io: FaultyIO, rows: str) -> None:
    with Host(tmp_root, rows, io_timeout_s=0.5, breaker_failures=0) as host:
        host.put(ALL)
        hanging = io.hang("pread", times=1, offset=host.where(3))
        job = host.submit("submit_load", [3])
        until(lambda: host.engine.stats()["lost_calls"] == 1, "it is given up")
        assert hanging.hits == 1
        assert host.get([n for n in ALL if n != 3]).bitmap.all(), "the others go on"
        early = host.engine.wait([job], 0.3)
        if rows == "straight":
            assert not early, "it may still write the row"
            host.engine.cancel(job)
            assert not host.engine.drain(0.2)
            io.release()
            early = host.engine.wait([job], 20)
        assert [e.status for e in early[job].errors] == [Status.LOST]
        row = host.rows[ROWS + 3].copy()
        io.release()
        until(lambda: host.engine.stats()["lost_threads"] == 0, "the thread comes back")
        assert np.array_equal(host.rows[ROWS + 3], row), "nothing is written after the result"


def test_a_shutdown_ends_what_waits_for_a_read(tmp_root: Path, io: FaultyIO, rows: str) -> None:
    with Host(tmp_root, rows) as host:
        host.put(ALL)
        hanging = io.hang("pread")
        job = host.submit("submit_load", ALL)
        until(lambda: hanging.hits == 2, "both threads hang")
        start = time.monotonic()
        assert host.engine.shutdown() == 2
        assert time.monotonic() - start < 20
        (result,) = host.engine.poll()
        assert result.job_id == job and result.bitmap.none()
        lost = 2 if rows == "straight" else 0
        assert sum(e.status is Status.LOST for e in result.errors) == lost
        io.release()


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows='direct' must be one of auto, straight, staged"):
        EngineConfig(rows="direct")


SCRIPT = """
import sys
from pathlib import Path
from kvxfer.testing import FaultyIO
from tests.engine.test_straight_rows import ALL, Host
host = Host(Path(sys.argv[1]), sys.argv[2])
assert host.put(ALL[:8]).bitmap.all()
print("stored", 8, flush=True)
FaultyIO().kill("pwrite", nbytes=int(sys.argv[3]), after=9)
for first in range(8, 24, 4):
    assert host.put(ALL[first:first + 4]).bitmap.all()
    print("stored", first + 4, flush=True)
"""


@pytest.mark.parametrize("nbytes", [4096, 200_000])
@pytest.mark.parametrize("lose_index", [False, True])
def test_killed_in_a_write(tmp_root: Path, rows: str, nbytes: int, lose_index: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_root), rows, str(nbytes)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    said = int(done.stdout.split()[-1])
    if lose_index:
        (tmp_root / "index" / "data.mdb").unlink()
    with Host(tmp_root, rows) as host:
        result = host.get(ALL)
        arrived = [n for n, bit in enumerate(result.bitmap) if bit]
        assert arrived[:said] == ALL[:said]
        host.check(arrived)
        assert host.put(ALL).bitmap.all() and host.get(ALL).bitmap.all()
        host.check(ALL)
