"""What comes before what on the device: from the recording, not from the bytes. (The bytes: test_transfers.)"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.jobs import LOAD, STORE
from kvxfer.testing import FakeDevice, FaultyIO
from tests.device.rig import MODEL, Card, card, chunks_of
from tests.jobs.rig import expect, ranks
from tests.jobs.test_faults import until

Call = tuple[Any, ...]


def befores(calls: list[Call]) -> list[set[int]]:
    """For each call the calls whose work must be done when its own begins."""
    on_stream: dict[str, set[int]] = {}
    of_event: dict[int, set[int]] = {}
    found: list[set[int]] = []
    for index, (name, *about) in enumerate(calls):
        if name == "mark":
            of_event[about[0]] = {index}
            found.append(set())
            continue
        stream = about[0] if about and isinstance(about[0], str) else None
        before = on_stream.get(stream, set()) if stream else set()
        if name == "wait":
            before = before | of_event[about[1]]
        elif name == "record":
            of_event[about[1]] = before | {index}
        if stream:
            on_stream[stream] = before | {index}
        found.append(set(before))
    return found


def copies(calls: list[Call], among: set[int], *, target: int | None = None, source: int | None = None) -> list[int]:
    """Those of `among` that are copies into, or out of, a buffer."""
    return [
        index
        for index in among
        if calls[index][0] == "copy" and target in (None, calls[index][2]) and source in (None, calls[index][3])
    ]


@pytest.fixture
def recording(tmp_path: Path) -> list[Call]:
    """Two stores and two loads of several batches each."""
    pages, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
    with card(tmp_path, pages, seed=5) as both:
        both.store(pages, chunks_of(1, 12))
        both.load(target, chunks_of(1, 12))
        both.store(pages, [[b] for b in range(12, 24)], chunks=range(12, 24))
        both.load(target, [[b] for b in range(12, 24)], chunks=range(12, 24))
        expect(MODEL, "nhd", target, range(24))
        return both.calls


def test_gathers_and_scatters_share_one_stream(recording: list[Call]) -> None:
    streams = {call[1] for call in recording if call[0] in ("gather", "scatter")}
    assert len(streams) == 1 and [call[0] for call in recording].count("gather") == 16
    assert not streams & {call[1] for call in recording if call[0] == "copy" and call[-1] > 1000}


def test_both_wait_for_what_the_caller_had_queued_and_for_their_block_ids(recording: list[Call]) -> None:
    before = befores(recording)
    jobs = [index for index, call in enumerate(recording) if call[0] == "mark"]
    for index, call in enumerate(recording):
        if call[0] not in ("gather", "scatter"):
            continue
        mark = max(mark for mark in jobs if mark < index)
        assert mark in before[index], f"call {index} {call} does not wait for its job's mark"
        ids = max(copies(recording, set(range(index)))) if call[0] == "gather" else None
        assert ids is None or ids in before[index] or recording[ids][1] != call[1]
        assert any(recording[i][-1] == call[3] * 8 for i in copies(recording, before[index]) if i > mark)


def test_what_was_gathered_is_copied_after_the_gather_and_written_after_the_copy(recording: list[Call]) -> None:
    before = befores(recording)
    down = [index for index, call in enumerate(recording) if call[0] == "copy" and _is_down(recording, index)]
    assert len(down) == 8
    for index in down:
        bay = recording[index][3]
        last = [i for i in range(index) if recording[i][0] in ("gather", "scatter") and recording[i][2] == bay][-2:]
        assert [recording[i][0] for i in last] == ["gather"] * 2 and set(last) <= before[index]
        after = recording[index + 1]
        assert after[:2] == ("record", recording[index][1]), "nobody would know when it is done"


def test_what_is_scattered_was_copied_into_the_bay_before(recording: list[Call]) -> None:
    before = befores(recording)
    scatters = [index for index, call in enumerate(recording) if call[0] == "scatter"]
    assert len(scatters) == 16
    for index in scatters:
        bay = recording[index][2]
        brought = [i for i in range(index) if recording[i][0] == "copy" and recording[i][2] == bay]
        assert brought and brought[-1] in before[index]


def _is_down(calls: list[Call], index: int) -> bool:
    """Whether a copy takes a bay's bytes out of it."""
    return any(call[0] == "gather" and call[2] == calls[index][3] for call in calls[:index])


# ---- in time: what the host does, and when -----------------------------------------------------------------------


def test_blocks_are_reusable_after_the_last_gather_and_before_the_write_is_done(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages, bays=8) as writer, FaultyIO() as io:
        rule = io.hang("pwrite")
        writer.device.frozen = True
        job = writer.submit(STORE, pages, chunks_of(1, 12))
        assert writer.runner.wait_gathered(job, 0.1) is False, "nothing was gathered"
        writer.device.frozen = False
        assert writer.runner.wait_gathered(job, 10) is True
        until(lambda: rule.hits > 0, "it is written")
        assert writer.runner.poll(STORE) is None
        io.release()
        assert not writer.finish(STORE).errors
        assert writer.runner.wait_gathered(99, 0.1) is None


def test_a_store_of_more_batches_than_bays_is_gathered_when_its_last_is(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 2, filled=True)
    with card(tmp_path, pages, bays=3) as writer, FaultyIO() as io:
        io.hang("pwrite")
        job = writer.submit(STORE, pages, chunks_of(1))  # eight batches, two at a time
        gathers = lambda: [call[0] for call in writer.calls].count("gather")  # noqa: E731  # asked anew each time
        until(lambda: gathers() == 4, "two bays are filled")
        assert writer.runner.wait_gathered(job, 0.3) is False
        assert gathers() == 4, "one bay is left to loads"
        io.release()
        assert writer.runner.wait_gathered(job, 10) is True
        assert not writer.finish(STORE).errors


def test_a_load_goes_ahead_of_stores_that_hang_or_wait(tmp_path: Path) -> None:
    pages, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "nhd", 2, filled=False)
    with card(tmp_path, pages, io_threads=4) as both, FaultyIO() as io:
        both.store(pages, chunks_of(1, 4))
        io.hang("pwrite")
        both.submit(STORE, pages, [[b] for b in range(4, 24)], chunks=range(4, 24))
        assert not both.load(target, chunks_of(1, 4)).errors
        expect(MODEL, "nhd", target, range(4))
        io.release()
        assert not both.finish(STORE).errors


def test_a_result_comes_when_the_scatter_is_done_and_not_before(tmp_path: Path) -> None:
    source, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "hnd", 2, filled=False)
    with card(tmp_path, source) as writer:
        writer.store(source, chunks_of(1, 3))
    with card(tmp_path, target) as reader:
        reader.device.frozen = True
        job = reader.submit(LOAD, target, chunks_of(1, 3))
        until(lambda: "scatter" in [call[0] for call in reader.calls], "it is queued")
        reader.runner.cancel(job)
        assert not reader.runner.wait([LOAD], 0.2) and reader.runner.poll(LOAD) is None
        reader.device.frozen = False
        outcome = reader.finish(LOAD)
        assert not outcome.errors, "what was inside the gate counts"
        expect(MODEL, "hnd", target, range(3))


def test_several_bays_are_in_the_air_at_once(tmp_path: Path) -> None:
    """While the drive hangs with one batch, others are converted and copied."""
    pages = ranks(MODEL, "nhd", 1, filled=True)
    with card(tmp_path, pages, bays=4, io_threads=1) as writer, FaultyIO() as io:
        rule = io.hang("pwrite", times=1)
        writer.submit(STORE, pages, chunks_of(1))
        until(lambda: rule.hits == 1, "a write hangs")
        until(lambda: [call[0] for call in writer.calls].count("gather") == 3, "three of four bays are filled")
        until(lambda: writer.runner.stats()["queued_chunks"] >= 6, "and copied, and queued for the drive")
        assert writer.runner.stats()["device_bays_in_use"] == 3
        io.release()
        assert not writer.finish(STORE).errors
        until(lambda: writer.runner.stats()["device_bays_in_use"] == 0, "all bays are back")


def test_idle_runners_sleep(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 1, filled=True)
    with Card(tmp_path / "slots", pages) as both:
        both.store(pages, chunks_of(1))
        counts: list[int] = []

        def sleeps() -> bool:
            counts.append(both.device.faults.counts["done"])
            time.sleep(0.3)
            return both.device.faults.counts["done"] == counts[-1]

        until(sleeps, "it is asked all the time")  # a busy machine may be late with the last turns


def test_any_two_seeds_differ_and_one_repeats() -> None:
    def order(seed: int) -> list[str]:
        device, done = FakeDevice(seed=seed), list[str]()
        for name in "abc":
            stream = device.stream()
            for piece in range(4):
                device._queue(stream, functools.partial(done.append, f"{name}{piece}"))
        device.run()
        return done

    assert order(1) == order(1) != order(2)
    assert [what for what in order(3) if what[0] == "b"] == ["b0", "b1", "b2", "b3"]
