"""What only io_uring has: requests that are refused, and several under way at once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import NativeError
from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.testing import FaultyIO
from tests.jobs.rig import EACH, MODEL, Rig, expect, ranks
from tests.jobs.test_faults import slot_range, until
from tests.jobs.test_straight import CHUNKS, MODES, PIECE, ROWS, Table, rig_of
from tests.jobs.uring_rig import Pipe, backend, counts, io, rings, table
from tests.oracle import POISON

__all__ = ["backend", "io", "table"]


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
