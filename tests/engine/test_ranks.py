"""Several ranks, each with its own part of every chunk, and the coordinator that they report to. In one process."""

from __future__ import annotations

import copy
import errno
import time
from pathlib import Path

import numpy as np
import pytest

from kvxfer.errors import EngineClosed, LayoutError
from kvxfer.jobs import LOAD, Status
from kvxfer.testing import FaultyIO
from kvxfer.tickets import NOWHERE, Failure, Place, Report, Settled, Ticket
from tests.engine.ranks_rig import MODEL, Server, keys_of, one_root, two_as_one
from tests.jobs.test_faults import until
from tests.oracle import Model

OK = Status.OK
N = 12

__all__ = ["two_as_one"]  # every test here is run over one root and over two


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("tp_load", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_store", [1, 2, 4, 8])  # 4 heads: at 8 each is held, and stored, by one of two
def test_what_any_number_of_ranks_stored_any_other_loads(tmp_root: Path, tp_store: int, tp_load: int) -> None:
    with Server(tmp_root, tp_store, "packed") as source:
        assert source.put(range(N)) == keys_of(range(N))
        assert source.hits(range(N + 1)) == list(range(N))
        assert sorted(source.published) == sorted(keys_of(range(N)))
        # Replicated heads are written once: what went to the disk does not grow with the ranks.
        layout = source.group.pages[0].mapping.slot
        written = sum(one._runner.stats()["bytes_written"] for parts in source.group.parts for one in parts)
        assert written == N * layout.slot_bytes
    with Server(tmp_root, tp_load, "nhd", filled=False) as target:
        assert target.get(range(N)) == [OK] * N
        target.expect(range(N))


def test_chunks_of_several_blocks_and_part_of_one(tmp_root: Path) -> None:
    with Server(tmp_root, 2, blocks_per_chunk=4) as source:
        _, ticket = source.coordinator.store(keys_of(range(3)))
        assert ticket is not None
        source.group.submit(ticket, list(range(12)))
        source.settle()
    with Server(tmp_root, 4, "hnd", filled=False, blocks_per_chunk=4) as target:
        ticket = target.coordinator.load(keys_of(range(3)))
        target.group.submit(ticket, [-1, -1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1])
        assert target.wait(ticket) == [OK] * 3
        target.expect([2, 3, 4, 5, 6, 7, 8])


def test_a_chunk_counts_when_all_ranks_have_sealed_it(tmp_root: Path) -> None:
    with Server(tmp_root, 4) as server:
        _, ticket = server.coordinator.store(keys_of(range(N)))
        assert ticket is not None
        for number in (2, 0, 3):
            server.group.ranks[number].submit(ticket, list(range(N)))
        end = time.monotonic() + 20
        while not all(server.group.ended[number] for number in (0, 2, 3)):
            assert time.monotonic() < end
            server.coordinator.settle(server.group.report())
        server.coordinator.drain(5)
        assert server.hits(range(N)) == [] and server.total("entries") == 0
        assert server.coordinator.is_busy
        server.group.ranks[1].submit(ticket, list(range(N)))
        server.settle()
        assert server.hits(range(N)) == list(range(N))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_whose_disk_is_full_takes_its_chunks_away_from_all(tmp_root: Path, rank: int) -> None:
    with Server(tmp_root, 2) as server:
        _, ticket = server.coordinator.store(keys_of(range(N)))
        assert ticket is not None
        slot = server.group.pages[0].mapping.slot
        places = server.places(ticket)
        numbers = {places[3].slot, places[7].slot}
        bad = [n for n in range(N) if places[n].slot in numbers]  # a fault knows offsets, in whichever slab
        with FaultyIO() as io:
            for number in numbers:  # only where this rank writes: the first of its two heads
                start = slot.alignment + number * slot.slot_bytes + 2 * rank * slot.segment_stride
                io.fail("pwrite", errno.ENOSPC, offset=(start, start + 1))
            server.group.submit(ticket, list(range(N)))
            server.settle()
        good = [n for n in range(N) if n not in bad]
        assert server.hits(range(N)) == good
        assert server.total("quarantined_slots") == 0
        values = server.coordinator.metrics()
        assert values.value("kvxfer_store_chunks_total", outcome="stored") == len(good)
        assert values.value("kvxfer_store_chunks_total", outcome="io") == len(bad)
        assert server.put(range(N)) == keys_of(bad)  # tried again when it is offered again
        assert server.hits(range(N)) == list(range(N))


DAMAGE = {
    "zeroed": lambda old, other: bytes(len(old)),
    "one bit": lambda old, other: bytes([old[0] ^ 1]) + old[1:],
    "another chunk's": lambda old, other: other,
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("segment", [0, 3])
def test_damage_that_one_rank_sees(tmp_root: Path, how: str, segment: int) -> None:
    """It is a miss of that chunk for everybody, until it is stored again; every other chunk arrives."""
    with Server(tmp_root, 4) as source:
        source.put(range(N))
        path, offset, stride = source.locate(5)
        other, elsewhere, _ = source.locate(6)
        old = path.read_bytes()[offset + segment * stride :][:stride]
        swap = other.read_bytes()[elsewhere + segment * stride :][:stride]
        overwrite(path, offset + segment * stride, DAMAGE[how](old, swap))
    with Server(tmp_root, 2, "hnd", filled=False) as target:
        target.coordinator.begin("a")
        found = target.get(range(N), "a")
        assert [n for n in range(N) if found[n] is not OK] == [5] and found[5].is_damage
        target.expect_parts(range(N))
        assert [5 in part.failed for part in target.parts] == [segment < 2, segment >= 2]
        assert target.hits(range(N), "a") == target.hits(range(N), "b") == [n for n in range(N) if n != 5]
        values = target.coordinator.metrics()
        assert values.value("kvxfer_load_chunks_total", outcome=found[5].name.lower()) == 1
        assert values.value("kvxfer_load_chunks_total", outcome="hit") == N - 1
        assert values.value("kvxfer_invalidated_chunks_total", reason=found[5].name.lower()) == 1
        salvaged = [number for number in range(5) if target.roots == 1 or number % 2]  # of the part that is not whole
        assert values.value("kvxfer_salvaged_chunks_total") == len(salvaged)
    with Server(tmp_root, 1) as again:
        assert again.put(range(N)) == keys_of([5])
        assert again.hits(range(N)) == list(range(N))


def test_a_late_write_of_a_rank_that_nobody_waits_for_is_found(tmp_root: Path) -> None:
    """As of a rank that outlived its coordinator: its whole part, trailers too, in a slot that was given away."""
    with Server(tmp_root, 2) as source:
        source.put([5])
        path, offset, _ = source.locate(5)
        layout = source.group.pages[1].mapping.slot
        late = path.read_bytes()[offset:][: layout.slot_bytes]
        source.forget(5)
        source.put(range(N))
        path, offset, _ = source.locate(5)
        for segment in source.group.pages[1].mapping.segments:
            for at, size in (
                (segment * layout.segment_stride, layout.segment_stride),
                (layout.payload_stride + segment * layout.alignment, layout.alignment),  # a trailer for each
            ):
                overwrite(path, offset + at, late[at : at + size])
    with Server(tmp_root, 4, "hnd", filled=False) as target:
        found = target.get(range(N))
        assert [n for n in range(N) if found[n] is not OK] == [5] and found[5] is Status.FOREIGN
        assert [5 in part.failed for part in target.parts] == [False, False, True, True]
        target.expect_parts(range(N))
        assert target.put(range(N)) == keys_of([5])


def test_the_chunk_that_failed_is_a_miss_at_once_and_a_hit_when_it_was_stored_since(tmp_root: Path) -> None:
    with Server(tmp_root, 2) as server:
        server.put(range(3))
        server.coordinator.begin("a")
        with FaultyIO() as io:
            io.fail("pread", errno.EIO, times=1)
            found = server.get(range(3), "a")
        assert Status.IO in found
        bad = [n for n in range(3) if found[n] is not OK]
        assert server.hits(range(3), "a") == [n for n in range(3) if n not in bad]
        assert server.hits(range(3), "b") == [0, 1, 2]  # an errno says nothing of the bytes
        (number,) = bad
        server.forget(number)
        assert server.put(bad) == keys_of(bad)
        assert server.hits(range(3), "a") == [0, 1, 2]
        server.coordinator.end("a")


def test_a_read_that_never_returns_and_a_deadline(tmp_root: Path) -> None:
    with Server(tmp_root, 2) as source:
        source.put(range(N))
    with Server(tmp_root, 2, "hnd", filled=False, io_timeout_s=60) as target, FaultyIO() as io:
        io.hang("pread", after=4, times=1, offset=(4096, 1 << 40))  # not a slab's header
        start = time.monotonic()
        found = target.get(range(N), "a", seconds=2.0)
        assert time.monotonic() - start < 15
        assert set(found) == {OK, Status.CUT}
        target.expect_parts(range(N))
        assert target.coordinator.metrics().value("kvxfer_load_chunks_total", outcome="cut") == found.count(Status.CUT)
        assert target.total("pinned_entries") == 0


def test_a_write_that_never_returns_keeps_its_slot_until_it_has(tmp_root: Path) -> None:
    with Server(tmp_root, 2, io_timeout_s=0.5) as server, FaultyIO() as io:
        io.hang("pwrite", times=1)
        server.put(range(4))
        assert len(server.hits(range(4))) == 3
        assert server.total("quarantined_slots") == 1
        time.sleep(0.6)
        server.coordinator.settle(server.group.report())
        assert server.total("quarantined_slots") == 1
        io.release()
        end = time.monotonic() + 10
        while server.total("quarantined_slots"):
            assert time.monotonic() < end
            server.coordinator.settle(server.group.report())
        assert server.coordinator.metrics().value("kvxfer_late_returns_total") <= 1


@one_root
def test_a_slot_that_two_ranks_have_lost_waits_for_both(tmp_root: Path) -> None:
    """By the reports alone: the order in which they come does not matter."""
    with Server(tmp_root, 2) as server:
        _, ticket = server.coordinator.store(keys_of([0]))
        assert ticket is not None
        generation = ticket.places[0].generation
        part = Settled(1, {0: Failure(Status.LOST)})
        server.coordinator.settle(Report(settled={ticket.number: part}, lost={generation: 1}))
        server.coordinator.settle(Report(returned={generation: 1}))  # the first's is back before the other settles
        part = Settled(1, {0: Failure(Status.LOST)})
        server.coordinator.settle(Report(settled={ticket.number: part}, lost={generation: 1}))
        assert server.total("quarantined_slots") == 1
        server.coordinator.settle(Report(returned={generation: 1}))
        assert server.total("quarantined_slots") == 0
        assert not server.coordinator._outstanding


def test_loads_that_are_freed_touch_no_block_any_more(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as source:
        source.put(range(N))
    with Server(tmp_root, 1, filled=False, io_timeout_s=60) as target, FaultyIO() as io:
        rule = io.hang("pread", after=6)
        ticket = target.coordinator.load(keys_of(range(N)))
        target.group.submit(ticket, list(range(N)))
        until(lambda: rule.hits >= 1, "a read hangs")
        (rank,) = target.group.ranks
        rank.free([ticket.number])
        before = [tensor.copy() for tensor in target.group.pages[0].tensors]
        io.release()
        found = target.wait(ticket)
        assert Status.CANCELLED in found
        time.sleep(0.1)
        for was, now in zip(before, target.group.pages[0].tensors, strict=True):
            assert np.array_equal(was, now)
        target.expect([n for n in range(N) if found[n] is OK])


def test_stores_that_are_freed_have_gathered_what_they_write(tmp_root: Path) -> None:
    with Server(tmp_root, 1, io_threads=1) as server, FaultyIO() as io:
        io.delay("pwrite", 0.05)
        _, ticket = server.coordinator.store(keys_of(range(4)))
        assert ticket is not None
        server.group.submit(ticket, list(range(4)))
        (rank,) = server.group.ranks
        rank.free([ticket.number], timeout=20)
        for tensor in server.group.pages[0].tensors:  # the blocks are another request's now
            tensor[:] = 0
        server.settle()
        stored = server.hits(range(4))
        assert stored == [0, 1, 2, 3]
    with Server(tmp_root, 2, filled=False) as target:
        assert target.get(range(4)) == [OK] * 4
        target.expect(range(4))


def test_stores_that_do_not_gather_in_time_are_cancelled(tmp_root: Path) -> None:
    with Server(tmp_root, 1, io_threads=1, io_timeout_s=60) as server, FaultyIO() as io:
        io.hang("pwrite")
        _, ticket = server.coordinator.store(keys_of(range(8)))
        assert ticket is not None
        server.group.submit(ticket, list(range(8)))
        (rank,) = server.group.ranks
        start = time.monotonic()
        rank.free([ticket.number], timeout=0.2)
        assert time.monotonic() - start < 15
        io.release()
        found = server.wait(ticket)
        assert Status.CANCELLED in found
        assert server.hits(range(8)) == [n for n in range(8) if found[n] is OK]


def test_a_slab_that_does_not_open_holds_up_nobody(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as source:
        source.put(range(4))
    with Server(tmp_root, 1, filled=False, io_timeout_s=1.2) as target, FaultyIO() as io:
        target.coordinator.drain(5)
        io.hang("open")
        start = time.monotonic()
        assert target.get(range(4), seconds=0.2) == [Status.CUT] * 4
        assert target.get(range(4)) == [Status.STALLED] * 4
        assert target.get(range(4)) == [Status.STALLED] * 4  # at once
        assert time.monotonic() - start < 15
        io.release()
        end = time.monotonic() + 10
        while target.get(range(4)) != [OK] * 4:
            assert time.monotonic() < end
        target.expect(range(4))


def test_a_slab_that_cannot_be_opened_costs_its_chunks(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as source:
        source.put(range(4))
    with Server(tmp_root, 1, filled=False) as target, FaultyIO() as io:
        io.fail("open", errno.EMFILE)
        assert target.get(range(4)) == [Status.IO] * 4
        io.release()
    assert not any(tensor.any() and (tensor != 0xA5).any() for tensor in target.group.pages[0].tensors)


def test_a_root_that_was_made_anew_is_not_written_through_old_files(tmp_root: Path, tmp_path: Path) -> None:
    """The rank's open file is another than the one under the slab's name: it takes the one that is named."""
    with Server(tmp_root, 1) as server:
        server.put([0])
        slab = server.group.parts[0][server.home(0)]._files._open
        (number,) = slab
        old = slab[number]
        copy = tmp_path / "copy"
        copy.write_bytes(old.path.read_bytes())
        copy.rename(old.path)
        assert server.get([0]) == [OK]
        assert slab[number] is not old


def test_what_the_store_has_not_is_a_miss_and_nothing_is_written(tmp_root: Path) -> None:
    with Server(tmp_root, 2, filled=False) as server:
        assert server.get(range(3)) == [Status.MISS] * 3
        server.expect([])
        assert server.coordinator.metrics().value("kvxfer_load_chunks_total", outcome="miss") == 3


def test_a_prompt_of_more_chunks_than_there_is_room_for(tmp_root: Path) -> None:
    """The leading ones are stored, the rest is dropped and counted; nothing is ever above the cap."""
    big = Model.random(MODEL.geometry, 400)
    with Server(tmp_root, 2, model=big, capacity_bytes=4 << 20) as server:
        kept = server.put(range(400))
        assert 0 < len(kept) < 400 and kept == keys_of(range(len(kept)))
        assert server.hits(range(400)) == list(range(len(kept)))
        assert all(each.stats().disk_bytes <= each.stats().capacity_bytes for each in server.stores)
        values = server.coordinator.metrics()
        assert values.value("kvxfer_store_chunks_total", outcome="no_space") == 400 - len(kept)


def test_a_rush_is_taken_up_the_next_time(tmp_root: Path) -> None:
    big = Model.random(MODEL.geometry, 400)
    with Server(tmp_root, 1, model=big) as server:
        first = server.put(range(200))
        assert len(first) == 64 * server.roots
        end = time.monotonic() + 20
        while sum(each._supply.at_hand for each in server.coordinators) < 150:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert len(server.put(range(200))) == 200 - len(first)


@one_root
def test_who_raises_at_the_news_of_a_commit_costs_no_other(tmp_root: Path) -> None:
    answers: list[bool] = []

    def raises(_: list[bool]) -> None:
        raise RuntimeError("a listener")

    with Server(tmp_root, 1) as server:
        supply = server.coordinator._supply
        first, second = supply.take(2)
        supply.commit(supply.digest, [(keys_of([0])[0], first, 1)], raises)
        supply.commit(supply.digest, [(keys_of([1])[0], second, 1)], answers.extend)
        assert supply.flush(20) and answers == [True]
        assert server.hits([0, 1]) == [0, 1]


@one_root
def test_stores_are_bounded(tmp_root: Path) -> None:
    with Server(tmp_root, 1, max_queued_store_chunks=5) as server:
        _, ticket = server.coordinator.store(keys_of(range(8)))
        assert ticket is not None and len(ticket.places) == 5
        assert server.coordinator.store(keys_of([9])) == ([], None)
        server.group.submit(ticket, list(range(5)))
        server.settle()
        values = server.coordinator.metrics()
        assert values.value("kvxfer_store_chunks_total", outcome="dropped") == 3 + 1
        assert server.put([9]) == keys_of([9])


def test_what_is_on_its_way_is_not_stored_twice(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as server:
        keys, ticket = server.coordinator.store(keys_of([0, 1, 0]))
        assert keys == keys_of([0, 1]) and ticket is not None
        assert server.coordinator.store(keys_of([1, 0])) == ([], None)
        server.group.submit(ticket, [0, 1])
        server.settle()
        assert server.coordinator.store(keys_of([1, 0])) == ([], None)


def test_a_raised_weight_epoch_makes_all_a_miss_and_what_was_on_its_way_is_dropped(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as server:
        server.put(range(3))
        _, ticket = server.coordinator.store(keys_of([5]))
        assert ticket is not None
        old = server.coordinator.digests
        server.coordinator.reset()
        server.group.submit(ticket, [5])
        server.settle()
        assert server.hits([0, 1, 2, 5]) == []
        end = time.monotonic() + 10
        while server.coordinator.digests & old:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert server.put([0]) == keys_of([0])
        assert server.hits([0, 1, 2, 5]) == [0]


def test_shutdown_with_tickets_open_keeps_their_slots_from_others(tmp_root: Path) -> None:
    with Server(tmp_root, 2) as server:
        _, ticket = server.coordinator.store(keys_of(range(3)))
        assert ticket is not None
        server.group.ranks[0].submit(ticket, [0, 1, 2])
        server.group.shutdown()
        assert server.coordinator.shutdown(1.0)
        assert server.total("quarantined_slots") == 3
        assert server.total("reserved_slots") == 0
        with pytest.raises(EngineClosed):
            server.group.ranks[1].submit(ticket, [0, 1, 2])


def test_a_breaker_that_is_open_answers_misses_and_a_chunk_held_back_is_not_asked_for_again(tmp_root: Path) -> None:
    now = [0.0]
    with Server(tmp_root, 1, breaker_failures=3, clock=lambda: now[0]) as server:
        server.put(range(N))
        with FaultyIO() as io:
            io.fail("pread", errno.EIO)
            server.coordinator.begin("a")
            server.get(range(N), "a")
        assert server.hits(range(N), "b") == []
        now[0] += 100.0
        server.coordinator.begin("c")
        assert server.hits(range(N), "c") == list(range(N))  # half open: probes may pass
        found = server.get(range(N), "c")
        probes = 2 * server.roots
        assert found[:probes] == [OK] * probes and found[probes:] == [Status.MISS] * (N - probes)
        assert server.hits(range(N), "c") == list(range(probes))
        assert server.hits(range(N), "d") == list(range(N))


@one_root
def test_tickets_that_cannot_be(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as server:
        (rank,) = server.group.ranks
        ticket = Ticket(
            number=7, direction=LOAD, digest=bytes(32), alignment=4096, direct=False,
            places=(Place(b"k", NOWHERE, 0, 0), Place(b"l", NOWHERE, 0, 0)),
        )  # fmt: skip
        for ids in ([0], [0, 99], [3, 3], [[0, 1], [2, 3]]):
            with pytest.raises(LayoutError):
                rank.submit(ticket, ids)
        rank.submit(ticket, [0, 1])
        (ended,) = rank.collect()
        assert ended.settled.failed == {0: Failure(Status.MISS), 1: Failure(Status.MISS)}
        assert rank.report().settled == {7: ended.settled}
        assert not rank.report().settled


@one_root
def test_merging_is_the_same_in_any_order() -> None:
    io, lost, damage = Failure(Status.IO, 5), Failure(Status.LOST), Failure(Status.BAD_SUM)
    parts = [
        Report({1: Settled(1, {0: io}, 10, 0.5)}, {7: 1}, {}, {0: {"a": 1}}, {1: Report(lost={7: 1})}),
        Report({1: Settled(1, {0: damage, 2: lost}, 20, 0.1)}, {7: 1, 8: 1}, {9: 1}, {1: {"a": 2}}),
        Report({1: Settled(1, {2: io}, 1, 0.2), 2: Settled(1)}, {}, {9: 1}, {2: {"a": 3}}, {1: Report(lost={7: 1})}),
    ]
    want = Report(
        {1: Settled(3, {0: damage, 2: lost}, 31, 0.5), 2: Settled(1)},
        {7: 2, 8: 1},
        {9: 2},
        {0: {"a": 1}, 1: {"a": 2}, 2: {"a": 3}},
        {1: Report(lost={7: 2})},
    )
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        merged = Report()
        for part in order:
            given = parts[part]
            merged.merge(copy.deepcopy(given))
        assert merged == want
    assert not Report() and Report(lost={1: 1}) and Report(roots={0: Report(lost={1: 1})})
