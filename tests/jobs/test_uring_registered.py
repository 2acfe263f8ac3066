"""What is registered with a ring: staging memory and files, and what becomes of them after a close and a fork."""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.jobs import LOAD, Status
from kvxfer.testing import FaultyIO
from tests.jobs.rig import EACH, MODEL, Rig, expect, key_of
from tests.jobs.test_faults import until
from tests.jobs.test_straight import CHUNKS, PIECE, Table, rig_of
from tests.jobs.uring_rig import Pipe, backend, io, rings, table

__all__ = ["backend", "io", "table"]


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


# A file is closed by a thread, which is started anew in a fork's child; ThreadSanitizer ends such a child.
in_a_child = pytest.mark.skipif("tsan" in os.environ.get("LD_PRELOAD", ""), reason="threads in a fork's child")


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


@in_a_child
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


@in_a_child
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
