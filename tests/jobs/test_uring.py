"""What only io_uring has: requests that are refused, several under way at once, what is registered with a ring."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import NativeError
from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.testing import FaultyIO
from tests.jobs.rig import BACKEND, EACH, MODEL, Rig, expect, key_of, ranks
from tests.jobs.test_faults import slot_range, until
from tests.jobs.test_straight import CHUNKS, MODES, PIECE, ROWS, Table, rig_of
from tests.native.uring import needs_uring
from tests.oracle import POISON


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


# ---- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.ENOMEM])
@pytest.mark.parametrize("after", [0, 1])
def test_a_runner_without_rings_is_refused_and_leaves_nothing(
    tmp_path: Path, io: FaultyIO, source, code: int, after: int
) -> None:
    before = rings()
    io.fail("uring_setup", code, after=after)
    with pytest.raises(NativeError, match=f"Errno {code}"):
        Rig(tmp_path / "slots", source, threads=2)
    assert rings() == before


@pytest.mark.parametrize("depth", [0, _native.MAX_DEPTH + 1])
def test_a_depth_that_is_none_is_refused(tmp_path: Path, source, depth: int) -> None:
    with pytest.raises(NativeError, match="Errno 22"):
        Rig(tmp_path / "slots", source, depth=depth)


def test_rings_are_closed_with_their_threads(tmp_path: Path, source) -> None:
    before = rings()
    with Rig(tmp_path / "slots", source, threads=3) as rig:
        assert rings() == before + 3 and rig.runner.stats()["rings"] == 3
    until(lambda: rings() == before, "the kernel closes them")
    assert rig.runner.stats()["rings"] == 0


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
def test_a_submission_that_is_put_off_is_made_again(tmp_path: Path, io: FaultyIO, source, target, code: int) -> None:
    with Rig(tmp_path / "slots", source) as rig:
        rule = io.fail("uring_submit", code, times=20)
        assert not rig.store(source, EACH).status.any()
        assert not rig.load(target, EACH).status.any()
        assert rule.hits == 20 and rig.runner.stats()["rings"] == 2
    expect(MODEL, "hnd", target, range(8))


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOMEM, errno.EBADF, errno.EAGAIN])
def test_a_ring_that_refuses_is_left_for_plain_calls(tmp_path: Path, io: FaultyIO, source, target, code: int) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rig.store(source, EACH)
        io.fail("uring_submit", code, offset=slot_range(rig, 3))
        assert not rig.load(target, EACH).status.any()
        expect(MODEL, "hnd", target, range(8))
        assert rig.runner.stats()["rings"] == 0
        before = counts("uring_submit", "uring_complete")
        assert not rig.store(source, EACH).status.any()
        assert counts("uring_submit", "uring_complete") == before, "it is not tried again"


def test_what_a_broken_ring_has_taken_is_still_answered(tmp_path: Path, io: FaultyIO, table: Table) -> None:
    """The first call hands over one of three pieces, the next is refused."""
    target = Table()
    with rig_of(tmp_path, table, MODES["pieces"], threads=1) as rig:
        rig.store([table.pages], CHUNKS)
        first, then = io.short("uring_submit", 1, times=1), io.fail("uring_submit", errno.EPERM)
        assert not rig.load([target.pages], CHUNKS).status.any()
        assert (first.hits, then.hits) == (1, 1) and rig.runner.stats()["rings"] == 0
    assert np.array_equal(target.rows, table.rows)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_requests_that_are_taken_a_few_at_a_time(tmp_path: Path, io: FaultyIO, table: Table, most: int) -> None:
    target = Table()
    with rig_of(tmp_path, table, MODES["pieces"]) as rig:
        rule = io.short("uring_submit", most, times=30)
        assert not rig.store([table.pages], CHUNKS).status.any()
        assert not rig.load([target.pages], CHUNKS).status.any()
        assert rule.hits == 30 or most == 2
        assert rig.runner.stats()["rings"] == 2
    assert np.array_equal(target.rows, table.rows)


# ---- several under way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "pieces"])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_pieces_are_read_ahead(tmp_path: Path, table: Table, mode: str, depth: int) -> None:
    target = Table()
    how = MODES[mode] | {"read_piece_bytes": PIECE}
    with rig_of(tmp_path, table, how, threads=1, depth=depth) as rig:
        rig.store([table.pages], CHUNKS)
        before = counts("uring_submit", "uring_complete", "pread")
        assert not rig.load([target.pages], CHUNKS).status.any()
        calls = [
            now - then for now, then in zip(counts("uring_submit", "uring_complete", "pread"), before, strict=True)
        ]
        assert calls == [ROWS * {1: 3, 2: 2, 8: 1}[depth], 3 * ROWS, 3 * ROWS]
    assert np.array_equal(target.rows, table.rows)


def test_extents_are_written_at_once(tmp_path: Path) -> None:
    """One rank's part of a slot lies in several places, and goes by one call."""
    source = ranks(MODEL, "nhd", 4, filled=True)
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        before = counts("uring_submit", "uring_complete")
        assert not rig.store(source[2:3], EACH).status.any()
        calls = [now - then for now, then in zip(counts("uring_submit", "uring_complete"), before, strict=True)]
        assert calls == [len(EACH), 2 * len(EACH)], "a segment and its trailer page"


@pytest.mark.parametrize("mode", ["staged", "pieces"])
@pytest.mark.parametrize("piece", range(3))
def test_one_bad_piece_of_several_costs_its_chunk_alone(
    tmp_path: Path, io: FaultyIO, table: Table, mode: str, piece: int
) -> None:
    target = Table()
    with rig_of(tmp_path, table, MODES[mode] | {"read_piece_bytes": PIECE}) as rig:
        rig.store([table.pages], CHUNKS)
        start = slot_range(rig, 3)[0] + piece * PIECE
        rule = io.fail("uring_complete", errno.EIO, offset=(start, start + 1))
        (error,) = rig.load([target.pages], CHUNKS).errors
        assert (error.chunk, error.status, error.errno, error.offset) == (3, Status.IO, errno.EIO, start)
        assert rule.hits == 1
    others = [i for i in range(ROWS) if i != 3]
    assert np.array_equal(target.rows[others], table.rows[others])


# ---- ended early ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("mode", ["staged", "pieces"])
def test_a_load_that_fails_waits_for_its_other_reads(tmp_path: Path, io: FaultyIO, table: Table, mode: str) -> None:
    """Their memory is not given up under them: no byte comes to a row after the result, nor to a buffer in use."""
    target = Table()
    with rig_of(tmp_path, table, MODES[mode] | {"read_piece_bytes": PIECE}, threads=1, io_timeout_s=0.1) as rig:
        rig.store([table.pages], CHUNKS)
        pipe = Pipe(rig, tmp_path / "pipe")
        rule = io.fail("uring_complete", errno.EIO, offset=(0, 1), times=1)
        pipe.write(PIECE)  # what the first of three reads gets, which fails; the others stay under way
        rig.submit(LOAD, [target.pages], CHUNKS[:1], records=pipe.records)
        until(lambda: rig.runner.stats()["lost_calls"] == 1, "the thread waits, until it is given up")
        assert rule.hits == 1 and rig.runner.stats()["lost_threads"] == 1
        if mode == "staged":
            assert rig.runner.stats()["leaked_bytes"] > 0, "its buffer stays under them"
            assert rig.finish(LOAD).status.tolist() == [Status.LOST]
            assert (target.rows == POISON).all()
        else:
            assert rig.runner.poll(LOAD) is None, "the row is theirs"
        rig.load([target.pages], CHUNKS[1:], chunks=range(1, ROWS))  # by another thread
        pipe.write(2 * PIECE)
        until(lambda: rig.runner.stats()["late_returns"] == 1, "they end")
        if mode == "pieces":
            assert rig.finish(LOAD).status.tolist() == [Status.LOST]
        assert rig.runner.stats()["leaked_bytes"] == 0
        assert np.array_equal(target.rows[1:], table.rows[1:])
        pipe.close()


def test_a_store_that_fails_waits_for_its_other_writes(tmp_path: Path, io: FaultyIO, table: Table) -> None:
    """Neither its slot nor its source is anybody else's under them."""
    with rig_of(tmp_path, table, MODES["pieces"], threads=1, io_timeout_s=0.1) as rig:
        pipe = Pipe(rig, tmp_path / "pipe")
        pipe.write(3 * PIECE)  # room for the first of three writes
        rule = io.fail("uring_complete", errno.ENOSPC, offset=(0, 1), times=1)
        job = rig.submit(STORE, [table.pages], CHUNKS[:1], records=pipe.records)
        until(lambda: rig.runner.stats()["lost_writes"] == 1, "the thread waits, until it is given up")
        assert rule.hits == 1 and rig.finish(STORE).status.tolist() == [Status.LOST]
        assert list(rig.runner.late()) == []
        while rig.runner.stats()["late_returns"] == 0:
            with suppress(BlockingIOError):
                os.read(pipe.other_end, PIECE)
        assert list(rig.runner.late()) == [(job, 0)]
        pipe.close()


# ---- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 513, 4096])
def test_short_answers_are_looped(tmp_path: Path, io: FaultyIO, source, target, most: int) -> None:
    with Rig(tmp_path / "slots", source) as rig:
        rule = io.short("uring_complete", most, times=800)
        assert not rig.store(source, EACH).status.any()
        assert not rig.load(target, EACH).status.any()
        assert rule.hits > 16
    expect(MODEL, "hnd", target, range(8))


def test_a_read_that_the_kernel_cannot_do_by_a_ring_is_done_without(
    tmp_path: Path, io: FaultyIO, source, target
) -> None:
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        rule = io.fail("uring_complete", errno.EAGAIN)
        assert not rig.load(target, EACH).status.any()
        assert rule.hits == 8 and rig.runner.stats()["rings"] == 2
    expect(MODEL, "hnd", target, range(8))


def test_damage_on_the_way_is_found(tmp_path: Path, io: FaultyIO, source, target) -> None:
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        rule = io.flip(99, op="uring_complete", times=1, offset=slot_range(rig, 6))
        assert rig.load(target, EACH).status[6] == Status.BAD_SUM and rule.hits == 1
    expect(MODEL, "hnd", target, [b for b in range(8) if b != 6])


@pytest.mark.parametrize("op", ["uring_submit", "uring_complete"])
@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_a_request_that_never_ends_is_given_up(
    tmp_path: Path, io: FaultyIO, source, target, op: str, direction: int
) -> None:
    with Rig(tmp_path / "slots", source, threads=2, io_timeout_s=0.1) as rig:
        rig.store(source, EACH)
        io.hang(op, times=1, offset=slot_range(rig, 3))
        rig.submit(direction, target if direction == LOAD else source, EACH)
        outcome = rig.finish(direction)
        assert [(e.chunk, e.status) for e in outcome.errors] == [(3, Status.LOST)]
        stats = rig.runner.stats()
        assert (stats["lost_calls"], stats["lost_threads"]) == (1, 1)
        assert stats["leaked_bytes"] >= rig.slot.slot_bytes and list(rig.runner.late()) == []
        io.release()
        until(lambda: rig.runner.stats()["late_returns"] == 1, "it ends")
        assert list(rig.runner.late()) == ([(outcome.job_id, 3)] if direction == STORE else [])
        stats = rig.runner.stats()
        assert (stats["lost_threads"], stats["leaked_bytes"]) == (0, 0)
        assert not rig.load(target, EACH).status.any()
    expect(MODEL, "hnd", target, range(8))


@pytest.mark.parametrize("op", ["uring_submit", "uring_complete"])
def test_a_shutdown_does_not_wait_for_a_request(tmp_path: Path, io: FaultyIO, source, target, op: str) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rig.store(source, EACH)
        rule = io.hang(op)
        rig.submit(LOAD, target, EACH)
        until(lambda: rule.hits == 1, "it hangs")
        assert rig.runner.shutdown(0.05) == 1
        assert set(rig.finish(LOAD).status.tolist()) == {Status.CANCELLED}
        io.release()
        until(lambda: rig.runner.stats()["lost_threads"] == 0, "the thread leaves")


def test_a_replacement_without_a_ring_makes_plain_calls(tmp_path: Path, io: FaultyIO, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1, io_timeout_s=0.1) as rig:
        rig.store(source, EACH)
        io.hang("uring_complete", times=1, offset=slot_range(rig, 0))
        io.fail("uring_setup", errno.ENOMEM)
        outcome = rig.load(target, EACH)
        assert [(e.chunk, e.status) for e in outcome.errors] == [(0, Status.LOST)]
        assert rig.runner.stats()["rings"] == 1, "the lost one's"
        io.release()
        until(lambda: rig.runner.stats()["rings"] == 0, "which leaves, for its place is taken")
    expect(MODEL, "hnd", target, range(1, 8))


@pytest.mark.parametrize("op, before", [("uring_submit", True), ("uring_submit", False), ("uring_complete", True)])
def test_sigkill_around_a_request_leaves_no_believable_chunk(tmp_path: Path, target, op: str, before: bool) -> None:
    script = textwrap.dedent(
        f"""
        import pathlib
        from tests.jobs import rig as r
        from kvxfer.testing import FaultyIO
        pages = r.ranks(r.Model.random(r.GEOMETRY, 8), "nhd", 2, filled=True)
        rig = r.Rig(pathlib.Path({str(tmp_path / "slots")!r}), pages, threads=1)
        FaultyIO().kill({op!r}, before={before}, after=3)
        rig.store(pages, [[b] for b in range(8)])
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Rig(tmp_path / "slots", target) as rig:
        status = rig.load(target, EACH).status.tolist()
    assert status[:3] == [0, 0, 0] and set(status[4:]) == {Status.TRUNCATED}
    assert status[3] in (0, Status.TRUNCATED)  # its write was handed over, or made, unless the kill came before
    if op == "uring_submit" and before:
        assert status[3] == Status.TRUNCATED
    expect(MODEL, "hnd", target, [c for c in range(8) if status[c] == 0])


# ---- what is registered -----------------------------------------------------------------------------------------


def test_staging_is_registered_where_the_kernel_lets_it_be(tmp_path: Path, io: FaultyIO, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rig.store(source, EACH)
        stats = rig.runner.stats()
        assert stats["registered_bytes"] in (0, stats["staging_bytes"])  # 0: RLIMIT_MEMLOCK
    assert rig.runner.stats()["registered_bytes"] == 0
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        io.fail("uring_register", errno.ENOMEM)
        assert not rig.load(target, EACH).status.any()
        assert rig.runner.stats()["registered_bytes"] == 0
    expect(MODEL, "hnd", target, range(8))


def test_a_buffer_that_grows_is_registered_anew(tmp_path: Path) -> None:
    small, large = Table(4096, seed=1), Table(5 << 20, seed=2)
    with rig_of(tmp_path, large, {}, threads=1) as rig:
        for table in (small, large, small):
            back = Table(table.rows.shape[1])
            records = []
            for i in range(2):
                chunk = _native.Chunk.from_buffer_copy(rig.record(i))
                records.append(bytes(chunk))
            assert not rig.store([table.pages], [[0], [1]], records=records).status.any()
            assert not rig.load([back.pages], [[4], [5]], records=records).status.any()
            assert np.array_equal(back.rows[4:6], table.rows[:2])
            stats = rig.runner.stats()
            assert stats["registered_bytes"] in (0, stats["staging_bytes"])


def second_file(rig: Rig, path: Path) -> tuple[Any, bytes]:
    """A copy of the rig's file, locked by its own descriptor, and a record of chunk 0 there."""
    path.write_bytes(rig.path.read_bytes())
    descriptor = os.open(path, os.O_RDWR)
    assert rig.lib.kvx_sys_lock(descriptor, 0, _native.LOCK_TRY) == 0
    file = rig.lib.kvx_file_adopt(descriptor, b"second", 0)
    record = _native.Chunk.from_buffer_copy(rig.record(0))
    record.file = file
    assert bytes(record.key[: len(key_of(0))]) == key_of(0)
    return file, bytes(record)


def test_a_closed_file_is_let_go(tmp_path: Path, source, target) -> None:
    """Its lock is gone exactly when nothing has it open any more, a ring's table included."""
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rig.store(source, EACH)
        for step in range(3):
            path = tmp_path / f"copy{step}"
            file, record = second_file(rig, path)
            assert not rig.load(target, EACH[:1], records=[record]).status.any()
            until(lambda: rig.runner.stats()["busy_threads"] == 0, "the thread is done with it")
            other = os.open(path, os.O_RDWR)
            assert rig.lib.kvx_sys_lock(other, 0, _native.LOCK_TRY) == -errno.EWOULDBLOCK
            rig.lib.kvx_file_release(file)
            lock = partial(rig.lib.kvx_sys_lock, other, 0, _native.LOCK_TRY)
            until(lambda try_lock=lock: try_lock() == 0, "the kernel lets it go")  # type: ignore[misc]
            os.close(other)
        assert not rig.load(target, EACH).status.any()


def test_more_files_than_a_table_holds(tmp_path: Path, io: FaultyIO, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rig.store(source, EACH)
        io.fail("uring_register", errno.ENOMEM)  # as if there were no place left
        file, record = second_file(rig, tmp_path / "copy")
        assert not rig.load(target, EACH[:1], records=[record]).status.any()
        rig.lib.kvx_file_release(file)
    expect(MODEL, "hnd", target, [0])


def test_a_forks_child_closes_files_and_the_parents_ring_still_has_them(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rig.store(source, EACH)
        if (child := os.fork()) == 0:
            rig.lib.kvx_file_release(rig.file)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not rig.load(target, EACH).status.any()
        assert rig.runner.stats()["rings"] == 1
    expect(MODEL, "hnd", target, range(8))


def test_a_registration_that_never_ends_is_given_up(tmp_path: Path, io: FaultyIO, source, target) -> None:
    """Of a file at its first use; neither its job nor a shutdown waits for it."""
    with Rig(tmp_path / "slots", source, threads=1, io_timeout_s=0.1) as rig:
        rig.store(source, EACH)
        file, record = second_file(rig, tmp_path / "copy")
        rule = io.hang("uring_register", times=1)
        assert rig.load(target, EACH[:1], records=[record]).status.tolist() == [Status.LOST]
        assert rule.hits == 1 and not rig.load(target, EACH).status.any()
        io.release()
        until(lambda: rig.runner.stats()["late_returns"] == 1, "it ends")
        rig.lib.kvx_file_release(file)
    expect(MODEL, "hnd", target, range(8))


def test_a_shutdown_does_not_wait_for_a_registration(tmp_path: Path, io: FaultyIO, source, target) -> None:
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rule = io.hang("uring_register")
        rig.submit(LOAD, target, EACH)
        until(lambda: rule.hits == 1, "it hangs")
        stopped = threading.Thread(target=rig.runner.shutdown, args=(0.05,), daemon=True)
        stopped.start()
        stopped.join(20)
        assert not stopped.is_alive()
        assert set(rig.finish(LOAD).status.tolist()) == {Status.CANCELLED}
        io.release()
        until(lambda: rig.runner.stats()["lost_threads"] == 0, "the thread leaves")


def test_a_forks_child_closes_files_while_a_ring_takes_one_in(tmp_path: Path, io: FaultyIO, source, target) -> None:
    """Whoever holds the lock of a table is not in the child."""
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rig.store(source, EACH)
        file, record = second_file(rig, tmp_path / "copy")
        rule = io.hang("uring_register", times=1)
        rig.submit(LOAD, target, EACH[:1], records=[record])
        until(lambda: rule.hits == 1, "it is being registered")
        if (child := os.fork()) == 0:
            signal.alarm(20)
            rig.lib.kvx_file_release(rig.file)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        io.release()
        assert not rig.finish(LOAD).status.any()
        rig.lib.kvx_file_release(file)


def test_a_forks_child_that_lives_changes_nothing(tmp_path: Path, source, target) -> None:
    """What is registered stays this process's memory, whoever has a copy of it."""
    with Rig(tmp_path / "slots", source, threads=1) as rig:
        rig.store(source, EACH)
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        assert not rig.store(source, EACH[::-1]).status.any()
        assert not rig.load(target, EACH[::-1]).status.any()
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
    expect(MODEL, "hnd", target, range(8))


def test_a_shutdown_does_not_wait_for_a_close(tmp_path: Path, io: FaultyIO, table: Table) -> None:
    """Of a file that a job was the last to have open."""
    target, before = Table(), rings()
    with rig_of(tmp_path, table, {"read_piece_bytes": PIECE}, threads=1) as rig:
        pipe = Pipe(rig, tmp_path / "pipe")
        rig.submit(LOAD, [target.pages], CHUNKS[:1], records=pipe.records)
        until(lambda: rig.runner.stats()["busy_threads"] == 1, "it is being read")
        rig.runner.cancel(rig.next_id)
        assert rig.finish(LOAD).status.tolist() == [Status.CANCELLED]
        pipe.release()
        rule = io.hang("close", times=1)
        while rule.hits == 0:
            with suppress(BlockingIOError):
                os.write(pipe.other_end, b"\x17" * PIECE)
        stopped = threading.Thread(target=rig.runner.shutdown, args=(0.05,), daemon=True)
        stopped.start()
        stopped.join(20)
        assert not stopped.is_alive()
        io.release()
        until(lambda: rings() == before, "the thread leaves")
        os.close(pipe.other_end)
