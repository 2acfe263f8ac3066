"""A drive that fails, hangs or is late, under pages of a device: as for pages in host memory."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.testing import FaultyIO
from tests.device.rig import MODEL, Card, card, chunks_of, device_threads, expect_but
from tests.jobs.rig import expect, poisoned, ranks
from tests.jobs.test_faults import slot_range, until


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A file with all chunks of one block."""
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages) as writer:
        assert not writer.store(pages, chunks_of(1)).errors
    return tmp_path


@pytest.mark.parametrize("rows", ["auto", "staged"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_errno_of_a_write_is_its_chunks_alone(tmp_path: Path, code: int, rows: str) -> None:
    pages, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "hnd", 2, filled=False)
    with card(tmp_path, pages, io_threads=1, rows=rows) as writer, FaultyIO() as io:
        io.fail("pwrite", code, after=7, times=2)
        outcome = writer.store(pages, chunks_of(1))
        assert [(e.chunk, e.status, e.errno) for e in outcome.errors] == [(c, Status.IO, code) for c in (7, 8)]
        assert outcome.nbytes == 22 * pages[0].mapping.slot.payload_bytes
        assert "chunk 7" in str(outcome.errors[0]) and writer.runner.stats()["io_errors"] == 2
    with card(tmp_path, target) as reader, FaultyIO() as io:
        io.fail("pread", errno.EIO, after=2, times=1)
        outcome = reader.load_trapped(target, chunks_of(1))
        read = {e.chunk for e in outcome.errors if e.status is Status.IO}
        assert len(read) == 1 and {7, 8} <= {e.chunk for e in outcome.errors}
        failed = sorted(e.chunk for e in outcome.errors)
        expect_but(MODEL, "hnd", target, [c for c in range(24) if c not in failed], failed)


def test_a_bit_that_a_read_flips_is_found(stored: Path) -> None:
    target = ranks(MODEL, "hnd", 2, filled=False)
    with card(stored, target) as reader, FaultyIO() as io:
        rule = io.flip(5000, after=10, times=1)
        outcome = reader.load_trapped(target, chunks_of(1))
        assert rule.hits == 1 and [e.status for e in outcome.errors] == [Status.BAD_SUM]
        bad = outcome.errors[0].chunk
        expect_but(MODEL, "hnd", target, [c for c in range(24) if c != bad], [bad])


def test_a_deadline_gives_the_prefix_that_made_it(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.device.flights.LANDING_NS", 700_000_000)  # a busy machine's time to scatter
    for seed, arrived in enumerate((8, 7)):  # whole batches, and a half
        target = ranks(MODEL, "hnd", 2, filled=False)
        with Card(stored / "slots", target, seed=seed, chunks_per_bay=2) as reader, FaultyIO() as io:
            rule = io.hang("pread", offset=(slot_range(reader, arrived)[0], 1 << 40))
            start = time.monotonic()
            outcome = reader.load(target, chunks_of(1), deadline_s=1.6)
            assert time.monotonic() - start < 15
            assert rule.hits == 2, "both threads hang, so neither is in another chunk"
            assert outcome.status.tolist() == [Status.OK] * arrived + [Status.CUT] * (24 - arrived)
            good = range(arrived)
            expect(MODEL, "hnd", target, good)
            io.release()
            until(lambda: reader.runner.stats()["device_bays_in_use"] == 0, "all bays are back")
            expect(MODEL, "hnd", target, good)


def test_a_deadline_is_kept_though_a_read_hangs_and_nothing_is_written_late(stored: Path) -> None:
    target = ranks(MODEL, "hnd", 2, filled=False)
    with card(stored, target) as reader, FaultyIO() as io:
        rule = io.hang("pread")
        start = time.monotonic()
        reader.submit(LOAD, target, chunks_of(1), deadline_s=1.0)
        outcome = reader.finish(LOAD)
        assert 0.9 < time.monotonic() - start < 15 and rule.hits == 2
        assert {e.status for e in outcome.errors} == {Status.CUT} and poisoned(target)
        io.release()
        until(lambda: reader.runner.stats()["busy_threads"] == 0, "the reads come back")
        time.sleep(0.05)
        reader.device.run()
        assert poisoned(target)
        assert not reader.load(target, chunks_of(1)).errors
    expect(MODEL, "hnd", target, range(24))


def test_a_deadline_that_has_passed_reads_nothing(stored: Path) -> None:
    target = ranks(MODEL, "hnd", 2, filled=False)
    with card(stored, target) as reader:
        before = FaultyIO.calls("pread")
        outcome = reader.load(target, chunks_of(1, 3), deadline_s=-1.0)
        assert [e.status for e in outcome.errors] == [Status.CUT] * 3 and FaultyIO.calls("pread") == before


def test_the_gate_is_looked_at_right_before_the_scatter(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that were read and verified in time are not scattered once the deadline has passed."""
    target = ranks(MODEL, "hnd", 2, filled=False)
    with card(stored, target) as reader:
        carrier = reader.runner._carrier
        poll = carrier.poll

        def slow_poll() -> list:
            landed = poll()
            if landed:
                time.sleep(0.4)
            return landed

        monkeypatch.setattr(carrier, "poll", slow_poll)
        reader.submit(LOAD, target, chunks_of(1, 3), deadline_s=0.3)
        time.sleep(0.6)  # nobody asks the runner meanwhile: that would close the gate, too
        assert [e.status for e in reader.finish(LOAD).errors] == [Status.CUT] * 3
        assert "scatter" not in [call[0] for call in reader.calls]
    assert poisoned(target)


def test_a_cancelled_load_ends_at_once_with_what_has_arrived(stored: Path) -> None:
    target = ranks(MODEL, "hnd", 2, filled=False)
    with card(stored, target, io_threads=1) as reader, FaultyIO() as io:
        rule = io.hang("pread", after=6, times=1)
        job = reader.submit(LOAD, target, chunks_of(1))
        until(lambda: rule.hits == 1, "a read hangs")
        until(lambda: [call[0] for call in reader.calls].count("scatter") == 4, "two batches are scattered")
        start = time.monotonic()
        reader.runner.cancel(job)
        reader.runner.cancel(12345)
        outcome = reader.finish(LOAD)
        assert time.monotonic() - start < 10
        assert {e.status for e in outcome.errors} == {Status.CANCELLED}
        good = [c for c in range(24) if outcome.status[c] == Status.OK]
        assert good == list(range(6))
        io.release()
        until(lambda: reader.runner.stats()["device_bays_in_use"] == 0, "all bays are back")
        expect(MODEL, "hnd", target, good)


def test_a_cancelled_store_says_which_slots_may_still_be_written(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages, io_threads=3) as writer, FaultyIO() as io:
        rule = io.hang("pwrite")
        job = writer.submit(STORE, pages, chunks_of(1))
        until(lambda: rule.hits == 2, "two writes hang")
        start = time.monotonic()
        writer.runner.cancel(job)
        outcome = writer.finish(STORE)
        assert time.monotonic() - start < 10
        lost = [e.chunk for e in outcome.errors if e.status is Status.LOST]
        assert len(lost) == 2 and {e.status for e in outcome.errors} == {Status.LOST, Status.CANCELLED}
        assert list(writer.runner.late()) == []
        io.release()
        late: list[tuple[int, int]] = []
        until(lambda: late.extend(writer.runner.late()) or len(late) == 2, "both return")
        assert sorted(late) == [(job, chunk) for chunk in lost]


@pytest.mark.parametrize("rows", ["auto", "staged"])
def test_a_lost_write_keeps_its_slot_and_where_it_reads_it_its_bay(tmp_path: Path, rows: str) -> None:
    """Rows of 4096 bytes a head go straight from the bay."""
    pages, target = aligned(filled=True), aligned(filled=False)
    with card(tmp_path, pages, io_timeout_s=0.5, rows=rows, chunks_per_bay=2) as writer, FaultyIO() as io:
        rule = io.hang("pwrite", times=1)
        job = writer.submit(STORE, pages, chunks_of(1, 4))
        outcome = writer.finish(STORE)
        assert rule.hits == 1 and [e.status for e in outcome.errors] == [Status.LOST]
        stats = writer.runner.stats()
        assert stats["device_held_bays"] == (rows == "auto") and stats["lost_writes"] == 1
        # Others go on, and do not meet the bay that the write still reads.
        assert not writer.store(pages, [[b] for b in range(4, 12)], chunks=range(4, 12)).errors
        held = writer.runner.stats()["device_held_bays"]
        io.release()
        until(lambda: writer.runner.wait([STORE], 1), "the write returns")
        assert list(writer.runner.late()) == [(job, outcome.errors[0].chunk)]
        until(lambda: writer.runner.stats()["device_bays_in_use"] == 0, "its bay is back")
        assert held == (rows == "auto") and writer.runner.stats()["device_held_bays"] == 0
    with card(tmp_path, target) as reader:
        loaded = reader.load(target, chunks_of(1, 12))
        assert not loaded.errors, "the write that came back late wrote what it should have"
    expect(BIG, "nhd", target, range(12))


def test_stores_end_where_every_bay_is_under_a_lost_write(tmp_path: Path) -> None:
    pages = aligned(filled=True)
    with Card(tmp_path / "slots", pages, io_timeout_s=0.5, max_lost_threads=8, chunks_per_bay=1) as both:
        with FaultyIO() as io:
            io.hang("pwrite")
            outcome = both.store(pages, chunks_of(1, 8))
            assert {e.status for e in outcome.errors} == {Status.LOST, Status.STALLED}
            assert both.runner.stats()["device_held_bays"] == 2
            outcome = both.load(pages, chunks_of(1, 1))
            assert {e.status for e in outcome.errors} == {Status.TRUNCATED}, "loads have a bay"
        until(lambda: both.runner.stats()["device_held_bays"] == 0, "all are back")
        assert not both.store(pages, chunks_of(1, 8)).errors
    until(lambda: not device_threads(), "no thread is left")


def test_a_shutdown_leaves_writes_that_hang_behind_with_their_bays(tmp_path: Path) -> None:
    pages = aligned(filled=True)
    with Card(tmp_path / "slots", pages, io_threads=3, chunks_per_bay=2) as both, FaultyIO() as io:
        rule = io.hang("pwrite")
        job = both.submit(STORE, pages, chunks_of(1, 4))
        until(lambda: rule.hits == 2, "two writes hang")
        start = time.monotonic()
        assert both.runner.shutdown(0.2) == 2
        assert time.monotonic() - start < 15
        outcome = both.finish(STORE)
        lost = [e.chunk for e in outcome.errors if e.status is Status.LOST]
        assert len(lost) == 2
        held = [bay for bay in both.runner._flights.ring.bays if not any(b.freed for b in bay.buffers)]
        assert len(held) == both.runner.stats()["device_held_bays"] > 0
        io.release()
        late: list[tuple[int, int]] = []
        until(lambda: (both.runner.wait([STORE], 0.1) and late.extend(both.runner.late())) or len(late) == 2, "back")
        assert sorted(late) == [(job, chunk) for chunk in lost]


BIG = MODEL.__class__.random(
    MODEL.geometry.__class__(num_layers=2, num_kv_heads=2, head_dim=256, dtype="float16", tokens_per_block=2), 12
)


def aligned(*, filled: bool) -> list:
    """Pages whose segments are 4096 bytes."""
    pages = ranks(BIG, "nhd", 2, filled=filled)
    assert pages[0].mapping.slot.segment_bytes == 4096
    return pages
