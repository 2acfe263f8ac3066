"""Host rows that travel without staging, and the same rows with it: one suite, and what each promises beyond it."""

from __future__ import annotations

import ctypes as C
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.convert.pages import KVPages
from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.layout import row_mapping
from kvxfer.staging import AlignedBuffer
from kvxfer.testing import FaultyIO
from tests.jobs.rig import Rig
from tests.jobs.test_faults import slot_range, until
from tests.oracle import POISON

ROW = 600 << 10  # three segments, the last one shorter
PIECE = 256 << 10
ROWS = 8
# By name: the runner's options. "whole" writes a row by one call, "pieces" segment by segment.
MODES: dict[str, dict[str, Any]] = {
    "staged": {},
    "whole": {"straight": (STORE, LOAD), "read_piece_bytes": 1 << 30},
    "pieces": {"straight": (STORE, LOAD), "read_piece_bytes": PIECE, "write_piece_bytes": PIECE},
}
STRAIGHT = ["whole", "pieces"]
CHUNKS = [[i] for i in range(ROWS)]


class Table:
    """Rows of host memory at an address of any alignment."""

    def __init__(self, row_bytes: int = ROW, shift: int = 0, seed: int | None = None) -> None:
        self._buffer = AlignedBuffer(ROWS * row_bytes + 4096, 4096)
        self.rows = self._buffer.array[shift : shift + ROWS * row_bytes].reshape(ROWS, row_bytes)
        self.rows[:] = POISON
        if seed is not None:
            self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape, np.uint8)
        self.pages = KVPages(row_mapping(row_bytes), [self.rows], ROWS)


@pytest.fixture
def source() -> Table:
    return Table(seed=1)


@pytest.fixture
def target() -> Table:
    return Table()


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


@pytest.fixture(params=STRAIGHT)
def straight(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


@pytest.fixture
def io() -> Iterator[FaultyIO]:
    with FaultyIO() as faults:
        yield faults


def rig_of(path: Path, table: Table, mode: dict[str, Any], **more: Any) -> Rig:
    return Rig(path / "slots", [table.pages], live=False, **(mode | more))


# ---- the same answers with staging and without ----------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [4096, 64 << 10, PIECE, ROW, 2 << 20, (64 << 10) + 512, 100])
@pytest.mark.parametrize("shift", [0, 512, 3])
def test_every_row_comes_back(tmp_path: Path, mode: dict[str, Any], row_bytes: int, shift: int) -> None:
    source, target = Table(row_bytes, shift, seed=2), Table(row_bytes, shift)
    with rig_of(tmp_path, source, mode) as rig:
        stored = rig.store([source.pages], [[3], [0], [6]])
        assert not stored.status.any() and stored.nbytes == 3 * row_bytes
        assert np.array_equal(rig.bytes_of(1)[:row_bytes], source.rows[0])
        loaded = rig.load([target.pages], [[1], [-1], [5]])
        assert not loaded.status.any()
        assert rig.runner.stats()["bytes_written"] == 3 * rig.slot.slot_bytes
    assert np.array_equal(target.rows[[1, 5]], source.rows[[3, 6]])
    assert (target.rows[[0, 2, 3, 4, 6, 7]] == POISON).all()


def test_slots_are_the_same_to_the_byte(tmp_path: Path, source: Table) -> None:
    found = []
    for name, mode in MODES.items():
        with Rig(tmp_path / name, [source.pages], live=False, **mode) as rig:
            rig.store([source.pages], CHUNKS)
            found.append((tmp_path / name).read_bytes())
    assert len(found[0]) == ROWS * rig.slot.slot_bytes and found[0] == found[1] == found[2]


@pytest.mark.parametrize("most", [1, 513, 4096, ROW])
def test_short_transfers_are_looped(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, mode: dict[str, Any], most: int
) -> None:
    with rig_of(tmp_path, source, mode) as rig:
        times = 500 if most == 1 else None
        writes, reads = io.short("pwrite", most, times=times), io.short("pread", most, times=times)
        assert not rig.store([source.pages], CHUNKS).status.any()
        assert not rig.load([target.pages], CHUNKS).status.any()
        assert writes.hits >= ROWS and reads.hits >= ROWS
    assert np.array_equal(target.rows, source.rows)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("at", [0, ROW - 4096, ROW])  # the row's beginning and end, the trailer
def test_a_failing_call_costs_its_chunk(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, mode: dict[str, Any], code: int, at: int
) -> None:
    with rig_of(tmp_path, source, mode) as rig:
        rig.store([source.pages], CHUNKS)
        where = (slot_range(rig, 3)[0] + at, slot_range(rig, 3)[0] + at + 1)
        for op, call, pages in (("pwrite", rig.store, source.pages), ("pread", rig.load, target.pages)):
            rule = io.fail(op, code, offset=where)
            (error,) = call([pages], CHUNKS).errors
            assert rule.hits == 1 and (error.chunk, error.status, error.errno) == (3, Status.IO, code)
    others = [i for i in range(ROWS) if i != 3]
    assert np.array_equal(target.rows[others], source.rows[others])


@pytest.mark.parametrize("at", [0, 99, PIECE - 1])
def test_damage_on_the_way_is_found(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, mode: dict[str, Any], at: int
) -> None:
    with rig_of(tmp_path, source, mode) as rig:
        rig.store([source.pages], CHUNKS)
        rule = io.flip(at, times=1, offset=slot_range(rig, 6))
        outcome = rig.load([target.pages], CHUNKS)
        assert rule.hits == 1
        assert [(e.chunk, e.status, e.segment) for e in outcome.errors] == [(6, Status.BAD_SUM, 0)]
        assert not rig.load([target.pages], [[6]], chunks=[6]).status.any(), "the disk has the right bytes"
    assert np.array_equal(target.rows, source.rows)


@pytest.mark.parametrize("segment", range(3))
def test_damage_on_the_disk_names_its_segment(
    tmp_path: Path, source: Table, target: Table, mode: dict[str, Any], segment: int
) -> None:
    with rig_of(tmp_path, source, mode) as rig:
        rig.store([source.pages], CHUNKS)
        rig.flip(2, segment * PIECE + 5)
        (error,) = rig.load([target.pages], CHUNKS).errors
        assert (error.chunk, error.status, error.segment) == (2, Status.BAD_SUM, segment)


@pytest.mark.parametrize("at, status", [(8, Status.BAD_TRAILER), (None, Status.FOREIGN)])
def test_the_trailer_is_asked(
    tmp_path: Path, source: Table, target: Table, mode: dict[str, Any], at: int | None, status: Status
) -> None:
    with rig_of(tmp_path, source, mode) as rig:
        rig.store([source.pages], CHUNKS)
        if at is None:
            rig.overwrite(4, 0, rig.bytes_of(5).tobytes())  # a whole slot under another key
        else:
            rig.flip(4, ROW + at)
        (error,) = rig.load([target.pages], CHUNKS).errors
        assert (error.chunk, error.status) == (4, status)


def test_a_file_that_ends_early(tmp_path: Path, source: Table, target: Table, mode: dict[str, Any]) -> None:
    with rig_of(tmp_path, source, mode) as rig:
        rig.store([source.pages], CHUNKS)
        with rig.path.open("r+b") as file:
            file.truncate(slot_range(rig, 7)[0] + 5000)
        (error,) = rig.load([target.pages], CHUNKS).errors
        assert (error.chunk, error.status, error.moved) == (7, Status.TRUNCATED, 5000)
    assert np.array_equal(target.rows[:7], source.rows[:7])


# ---- stores without staging -----------------------------------------------------------------------------------


def test_the_source_is_in_use_until_its_write_has_returned(
    tmp_path: Path, io: FaultyIO, source: Table, straight: dict[str, Any]
) -> None:
    with rig_of(tmp_path, source, straight) as rig:
        rule = io.hang("pwrite", times=1)
        job = rig.submit(STORE, [source.pages], [[0]])
        until(lambda: rule.hits == 1, "the write hangs")
        assert rig.runner.wait_gathered(job, 0.05) is False
        io.release()
        assert rig.runner.wait_gathered(job, 10.0) is True
        assert not rig.finish(STORE).status.any()


@pytest.mark.parametrize("row_bytes, shift", [(ROW, 512), (ROW + 512, 0), (5000, 0)])
def test_rows_that_no_transfer_can_use_are_copied_first(
    tmp_path: Path, io: FaultyIO, straight: dict[str, Any], row_bytes: int, shift: int
) -> None:
    source = Table(row_bytes, shift, seed=3)
    with rig_of(tmp_path, source, straight) as rig:
        rule = io.hang("pwrite", times=1)
        job = rig.submit(STORE, [source.pages], [[1]])
        until(lambda: rule.hits == 1, "the write hangs")
        assert rig.runner.wait_gathered(job, 10.0) is True, "the row was copied: it may be reused"
        source.rows[1] = POISON
        io.release()
        assert not rig.finish(STORE).status.any()
        source.rows[2] = POISON
        assert not rig.load([source.pages], [[2]]).status.any()
        assert not (source.rows[2] == POISON).all()


def test_a_row_that_changes_under_a_lost_write_is_never_believed(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, straight: dict[str, Any]
) -> None:
    with rig_of(tmp_path, source, straight, io_timeout_s=0.5) as rig:
        io.hang("pwrite", times=1, offset=slot_range(rig, 3))
        job = rig.submit(STORE, [source.pages], CHUNKS)
        outcome = rig.finish(STORE)
        assert [(e.chunk, e.status) for e in outcome.errors] == [(3, Status.LOST)]
        assert rig.runner.wait_gathered(job, 0.0) is not False, "given up: nobody waits for it"
        assert list(rig.runner.late()) == []
        source.rows[3, 1000] ^= 1  # the row's next owner
        io.release()
        late: list[tuple[int, int]] = []
        until(lambda: bool(late.extend(rig.runner.late()) or late), "the write returns")
        assert late == [(outcome.job_id, 3)]
        outcome = rig.load([target.pages], CHUNKS)
        assert outcome.status[3] in (Status.BAD_SUM, Status.BAD_TRAILER, Status.FOREIGN, Status.TRUNCATED)
        assert outcome.status.astype(bool).sum() == 1


def test_a_cancelled_store_does_not_wait_for_its_write(
    tmp_path: Path, io: FaultyIO, source: Table, straight: dict[str, Any]
) -> None:
    with rig_of(tmp_path, source, straight) as rig:
        rule = io.hang("pwrite", times=1)
        job = rig.submit(STORE, [source.pages], [[0]])
        until(lambda: rule.hits == 1, "the write hangs")
        rig.runner.cancel(job)
        assert rig.finish(STORE).status.tolist() == [Status.LOST]
        io.release()
        late: list[tuple[int, int]] = []
        until(lambda: bool(late.extend(rig.runner.late()) or late), "the write returns")
        assert late == [(job, 0)]


# ---- loads without staging ------------------------------------------------------------------------------------


def test_a_lost_read_has_no_result_before_it_returns(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, straight: dict[str, Any]
) -> None:
    with rig_of(tmp_path, source, straight, threads=1, io_timeout_s=0.5) as rig:
        rig.store([source.pages], CHUNKS)
        rule = io.hang("pread", times=1, offset=slot_range(rig, 2))
        stuck = rig.submit(LOAD, [target.pages], [[2]], chunks=[2])
        until(lambda: rig.runner.stats()["lost_threads"] == 1, "the call is given up")
        assert rule.hits == 1
        assert not rig.load([target.pages], [[0], [1]]).status.any(), "another thread has its place"
        assert rig.runner.poll(LOAD) is None
        rig.runner.cancel(stuck)
        time.sleep(0.05)
        assert rig.runner.poll(LOAD) is None, "it may still write the row"
        io.release()
        outcome = rig.finish(LOAD)
        assert (outcome.job_id, outcome.status.tolist()) == (stuck, [Status.LOST])
        after = target.rows.copy()
        until(lambda: rig.runner.stats()["lost_threads"] == 0, "the thread comes back")
        assert rig.runner.stats()["late_returns"] == 1
        assert np.array_equal(target.rows, after)
        assert not rig.load([target.pages], CHUNKS).status.any()
    assert np.array_equal(target.rows, source.rows)


def test_a_cancelled_load_ends_when_its_reads_have_returned(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, straight: dict[str, Any]
) -> None:
    with rig_of(tmp_path, source, straight, threads=2) as rig:
        rig.store([source.pages], CHUNKS)
        rules = [io.hang("pread", offset=(start, start + 1)) for start, _ in (slot_range(rig, 0), slot_range(rig, 1))]
        job = rig.submit(LOAD, [target.pages], CHUNKS)
        until(lambda: [rule.hits for rule in rules] == [1, 1], "both threads hang")
        rig.runner.cancel(job)
        time.sleep(0.05)
        assert rig.runner.poll(LOAD) is None
        io.release()
        assert set(rig.finish(LOAD).status.tolist()) == {Status.CANCELLED}
        after = target.rows.copy()
        until(lambda: rig.runner.stats()["busy_threads"] == 0, "the threads come back")
        assert np.array_equal(target.rows, after) and (after[2:] == POISON).all()


def test_a_shutdown_gives_up_reads_and_says_so(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, straight: dict[str, Any]
) -> None:
    with rig_of(tmp_path, source, straight, threads=2) as rig:
        rig.store([source.pages], CHUNKS)
        rules = [io.hang("pread", offset=(start, start + 1)) for start, _ in (slot_range(rig, 0), slot_range(rig, 1))]
        rig.submit(LOAD, [target.pages], CHUNKS)
        until(lambda: [rule.hits for rule in rules] == [1, 1], "both threads hang")
        start = time.monotonic()
        assert rig.runner.shutdown(0.2) == 2
        assert 0.15 < time.monotonic() - start < 20
        status = rig.finish(LOAD).status.tolist()
        assert sorted(status) == [Status.CANCELLED] * 6 + [Status.LOST] * 2
        io.release()
        until(lambda: rig.runner.stats()["lost_threads"] == 0, "the threads leave")
        assert rig.runner.poll(LOAD) is None, "one result"


def test_a_load_with_a_deadline_ends_at_it(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, straight: dict[str, Any]
) -> None:
    with rig_of(tmp_path, source, straight) as rig:
        rig.store([source.pages], CHUNKS)
        io.hang("pread", times=1, offset=slot_range(rig, 4))
        outcome = rig.load([target.pages], CHUNKS, deadline_s=1.5)  # time for the others, on a busy machine too
        assert [(e.chunk, e.status) for e in outcome.errors] == [(4, Status.CUT)]
        row = target.rows[4].copy()
        target.rows[4] = 0x11  # its next owner's
        io.release()
        until(lambda: rig.runner.stats()["busy_threads"] == 0, "the thread comes back")
        assert (target.rows[4] == 0x11).all() and (row == POISON).all()


def test_nothing_is_written_after_a_result(
    tmp_path: Path, io: FaultyIO, source: Table, target: Table, mode: dict[str, Any]
) -> None:
    """Cancelled at instants all over the time that a load takes."""
    with rig_of(tmp_path, source, mode) as rig:
        rig.store([source.pages], CHUNKS)
        io.delay("pread", 0.002)
        seen: set[int] = set()
        step = 0
        while step < 25 or (len(seen) < 3 and step < 250):  # more of them on a machine that is that slow
            target.rows[:] = POISON
            job = rig.submit(LOAD, [target.pages], CHUNKS)
            time.sleep(0.001 * step)
            step += 1
            rig.runner.cancel(job)
            outcome = rig.finish(LOAD)
            after = target.rows.copy()
            arrived = [c for c, status in enumerate(outcome.status) if status == Status.OK]
            seen.add(len(arrived))
            assert np.array_equal(after[arrived], source.rows[arrived])
            until(lambda: rig.runner.stats()["busy_threads"] == 0, "threads come back")
            assert np.array_equal(target.rows, after)
        assert len(seen) > 2, f"every instant gave the same answer: {seen}"


def test_a_piece_of_no_size_is_refused() -> None:
    config = _native.EngineConfigStruct(threads=1, read_piece_bytes=4096)
    assert _native.lib().kvx_engine_new(C.byref(config), C.byref(C.c_void_p())) == -errno.EINVAL
