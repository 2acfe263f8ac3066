"""Coordinators and ranks over several roots: a drive costs its own chunks alone, and each ticket ends once.

test_ranks.py and test_ranks_attacks.py are run over two roots too; here is what there is only with several. Chunks of a
server that has none go to its roots in turn: even numbers to the first, odd ones to the second.
"""

from __future__ import annotations

import errno
import time
from functools import partial
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError, EngineClosed, LayoutError
from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.layout import kvx1_slot
from kvxfer.ranks import Rank
from kvxfer.spread_coordinator import SpreadCoordinator
from kvxfer.store import Access
from kvxfer.store.root import RootInfo, make_directories, write_root
from kvxfer.testing import FaultyIO
from kvxfer.tickets import Failure, Report, SpreadTicket
from tests.engine.ranks_rig import MODEL, Server, keys_of, two_as_one, two_roots
from tests.jobs.test_faults import until
from tests.oracle import Model

__all__ = ["two_as_one"]

pytestmark = two_roots

OK = Status.OK
N = 12
EVEN, ODD = list(range(0, N, 2)), list(range(1, N, 2))


def begun(server: Server, numbers: list[int], owner: str = "a") -> SpreadTicket:
    """A load that all ranks are about."""
    ticket = server.coordinator.load(keys_of(numbers), owner)
    assert isinstance(ticket, SpreadTicket)
    server.group.submit(ticket, numbers)
    return ticket


def idle(rank: Rank) -> bool:
    """Whether it has nothing under way."""
    rank._settle()
    return not rank._jobs


def vanish(server: Server, root: int) -> None:
    """As a drive that is taken out: nothing is under its path any more."""
    where = server.stores[root].config.root
    where.rename(where.with_name("gone"))


@pytest.mark.parametrize(("weights", "shares"), [((1, 1), [6, 6]), ((3e12, 1e12), [9, 3])])
def test_chunks_spread_by_weight_and_come_back(tmp_root: Path, weights: list[float], shares: list[int]) -> None:
    with Server(tmp_root, 2, weights=weights) as source:
        source.put(range(N))
        homes = [source.home(number) for number in range(N)]
        assert [homes.count(0), homes.count(1)] == shares
        assert source.put([3, 1, N]) == keys_of([N])  # what is there is stored nowhere else
    with Server(tmp_root, 4, "hnd", filled=False, weights=weights) as target:
        backwards = list(reversed(range(N)))
        assert target.get(backwards) == [OK] * N
        target.expect(range(N))


def test_damage_on_one_root_is_a_hole_in_the_middle(tmp_root: Path) -> None:
    """What lies on the other arrives, into its own blocks; the hole is a miss for everybody until it is stored anew."""
    with Server(tmp_root, 2) as source:
        source.put(range(N))
        path, offset, _ = source.locate(5)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(4096))
    with Server(tmp_root, 2, "hnd", filled=False) as target:
        target.coordinator.begin("a")
        found = target.get(range(N), "a")
        assert [n for n in range(N) if found[n] is not OK] == [5] and found[5].is_damage
        target.expect_parts(range(N))
        assert target.hits(range(N), "a") == target.hits(range(N), "b") == [n for n in range(N) if n != 5]
    with Server(tmp_root, 1) as again:
        assert again.put(range(N)) == keys_of([5])


def test_a_chunk_that_is_on_one_root_only(tmp_root: Path) -> None:
    with Server(tmp_root, 2, weights=(1e9, 1.0)) as server:
        server.put(range(4))
        assert [server.home(number) for number in range(4)] == [0, 1, 0, 0]
        ticket = begun(server, [3, 0])
        assert [part.root for part in ticket.parts] == [0]
        assert server.wait(ticket) == [OK, OK]
        ticket = begun(server, [3, 9, 0])  # one that no root has is a miss, counted once
        assert server.wait(ticket) == [OK, Status.MISS, OK]
        assert server.coordinator.metrics().value("kvxfer_load_chunks_total", outcome="miss") == 1
        assert server.get([7, 8]) == [Status.MISS] * 2
        assert server.get([]) == []


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_root_that_fails_or_hangs_costs_its_chunks(tmp_root: Path, fault: str) -> None:
    with Server(tmp_root, 2) as source:
        source.put(range(N))
    with Server(tmp_root, 2, "hnd", filled=False, io_timeout_s=600) as target:
        assert target.get(EVEN) == [OK] * len(EVEN)  # the first root's files are open now
        with FaultyIO() as io:
            if fault == "fails":
                vanish(target, 1)
            else:
                io.hang("open")
            ticket = begun(target, list(range(N)))
            for first, _ in target.group.parts:
                until(partial(idle, first), "the first root's part has ended")
            if fault == "hangs":
                for rank in target.group.ranks:
                    rank.free([ticket.number])
        found = target.wait(ticket)
        assert [n for n in range(N) if found[n] is OK] == EVEN
        assert {found[n] for n in ODD} == {Status.IO if fault == "fails" else Status.CANCELLED}
        target.expect_parts(range(N))
        assert target.total("pinned_entries") == 0


def test_a_root_that_vanishes_under_load(tmp_root: Path) -> None:
    """Its chunks become misses, those of the other stay, and stores go there; every ticket ends, no slot is lost."""
    with Server(tmp_root, 2, breaker_failures=3, breaker_cooldown_s=600.0, breaker_max_cooldown_s=600.0) as server:
        server.put(range(N))
        under_way = server.coordinator.store(keys_of([12, 13]))[1]
        before = begun(server, list(range(N)))
        vanish(server, 1)
        server.group.submit(under_way, [12, 13])
        server.wait(before)
        for _ in range(3):  # until the breakers know
            found = server.get(range(N), "b")
            assert [found[n] for n in EVEN] == [OK] * len(EVEN)
            server.put([13, 15])
        assert server.hits(range(N)) == EVEN
        for number in (1, 3):  # of no use where they were: stored on the other
            assert server.put([number]) == keys_of([number])
        assert server.hits([1, 3, 12]) == [1, 3, 12] and server.coordinators[0].contains(keys_of([1])[0])
        assert server.get([0, 1, 2, 3, 12]) == [OK] * 5
        assert server.total("pinned_entries") == 0 and server.stores[0].stats().quarantined_slots == 0


def test_what_no_load_can_reach_is_stored_on_the_other_and_each_request_has_the_one_that_did_not_fail_it(
    tmp_root: Path,
) -> None:
    with Server(tmp_root, 1) as server:
        server.put([0])
        server.coordinators[0]._intake.turn(False)
        assert server.hits([0]) == [] and server.put([0]) == keys_of([0]) and server.hits([0]) == [0]
        server.coordinators[0]._intake.turn(True)
        assert [each.contains(keys_of([0])[0]) for each in server.coordinators] == [True, True]
        server.coordinator.begin("a")
        with FaultyIO() as io:
            io.fail("pread", errno.EIO, offset=(4096, 1 << 40))
            assert server.get([0], "a") == [Status.IO]  # on the first
        assert server.hits([0], "a") == [0]
        ticket = begun(server, [0])
        assert [part.root for part in ticket.parts] == [1] and server.wait(ticket) == [OK]


def test_a_ticket_is_settled_once_and_when_all_its_parts_have_ended(tmp_root: Path) -> None:
    """A failure that vLLM has not heard of is none to the coordinator either: both hear in one pass."""
    with Server(tmp_root, 1) as source:
        source.put(range(4))
    with Server(tmp_root, 1, filled=False, io_timeout_s=600) as target, FaultyIO() as io:
        (rank,) = target.group.ranks
        first, second = target.group.parts[0]
        target.coordinator.begin("a")
        assert target.get([0, 2]) == [OK] * 2  # the first root's files are open now
        io.fail("pread", errno.EIO)
        io.hang("open")
        ticket = begun(target, [0, 1, 2, 3])
        until(partial(idle, first), "the first root's part has ended")
        assert rank.collect() == [] and not any(part.settled for part in rank.report().roots.values())
        assert target.hits([0, 2], "a") == [0, 2]
        io.release()
        until(partial(idle, second), "the second's too")
        (ended,) = rank.collect()
        assert ended.ticket is ticket and ended.settled.ranks == 1
        report = rank.report()
        assert [len(report.roots[root].settled) for root in (0, 1)] == [1, 1]
        assert target.coordinator.settle(report) == {"a"}
        assert target.hits([0, 2], "a") == []
        assert rank.collect() == [] and not rank.report().roots.get(0, Report()).settled
        assert not rank._open and not rank._parts


def test_a_part_that_its_rank_refuses_fails_alone(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as server:
        server.put(range(4))
        server.group.parts[0][1].shutdown(1.0)
        assert server.get(range(4)) == [OK, Status.STALLED, OK, Status.STALLED]
        assert server.put([4, 5]) == keys_of([4, 5])
        assert server.hits([4, 5]) == [4]
        server.group.ranks[0].shutdown(1.0)
        with pytest.raises(EngineClosed):
            begun(server, [0])


def test_a_ticket_that_could_not_be_submitted_ends_with_nothing(tmp_root: Path) -> None:
    with Server(tmp_root, 2) as server:
        server.put(range(2))
        server.coordinator.begin("a")
        ticket = server.coordinator.load(keys_of([0, 1]), "a")
        for ids in ([0], [0, 99], [3, 3], [[0, 1], [2, 3]]):
            with pytest.raises(LayoutError):
                server.group.ranks[0].submit(ticket, ids)
        for rank in server.group.ranks:
            rank.fail(ticket, rank._ranks[0].block_table(ticket, [0, 1]))
        assert server.wait(ticket) == [Status.STALLED] * 2
        assert server.hits([0, 1], "a") == [] and server.hits([0, 1], "b") == [0, 1]
        twice = begun(server, [0, 1], "b")
        with pytest.raises(LayoutError, match="submitted already"):
            server.group.ranks[0].submit(twice, [0, 1])
        assert server.wait(twice) == [OK] * 2


def test_loads_that_cannot_begin_are_misses_that_no_root_hears_of(tmp_root: Path) -> None:
    with Server(tmp_root, 2) as server:
        for _ in range(2):  # both before either is collected
            server.group.submit(server.coordinator.nowhere(keys_of([0, 1])), [0, 1])
        report = server.group.report()
        assert not any(part.settled for part in report.roots.values())
        for ended in server.group.ended:
            assert [one.settled.failed for one in ended] == [dict.fromkeys((0, 1), Failure(Status.MISS))] * 2


@pytest.mark.parametrize("call", ["load", "store"])
def test_what_raises_in_one_root_leaves_nothing_open_in_another(
    tmp_root: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    with Server(tmp_root, 2) as server:
        server.put(range(4))
        with monkeypatch.context() as patch:
            patch.setattr(server.coordinators[1], call, raises)
            with pytest.raises(RuntimeError, match="a defect"):
                getattr(server.coordinator, call)(keys_of([0, 1] if call == "load" else [6, 7]), "a")
        assert not server.coordinator.is_busy
        assert server.total("pinned_entries") == 0 and not server.coordinators[0]._writing
        assert server.put([6, 7]) == keys_of([6, 7]) and server.get([0, 1, 6, 7]) == [OK] * 4


def test_what_is_taken_back_has_cost_nothing_of_the_write_budget(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("a defect")

    slot = kvx1_slot(MODEL.geometry, blocks_per_chunk=1).slot_bytes
    with Server(tmp_root, 1, writes={"write_bytes_per_s": 1e-9, "write_burst_bytes": 3 * slot}) as server:
        monkeypatch.setattr(server.coordinators[1], "store", raises)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="a defect"):
                server.coordinator.store(keys_of([0, 1]))
        assert server.coordinators[0].outlook.affords == 3


def test_a_report_that_one_root_chokes_on_is_heard_by_the_other(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(report: Report) -> set[str]:
        raise RuntimeError("a defect")

    with Server(tmp_root, 1) as server:
        ticket = server.coordinator.store(keys_of([0, 1]))[1]
        server.group.submit(ticket, [0, 1])
        until(lambda: len(server.group.ranks[0]._ended or server.group.ranks[0].collect()) > 0, "written")
        monkeypatch.setattr(server.coordinators[0], "settle", raises)
        with pytest.raises(RuntimeError, match="a defect"):
            server.coordinator.settle(server.group.ranks[0].report())
        assert server.coordinators[1].drain(20) and not server.coordinators[1].is_busy
        assert server.hits([0, 1]) == [1]


def test_roots_of_other_alignments_have_slots_of_their_own(tmp_root: Path) -> None:
    """A drive that asks for larger transfers beside one that does not: sizes and offsets are each root's."""
    from kvxfer.config import EngineConfig, StoreConfig
    from kvxfer.convert.pages import KVPages
    from kvxfer.coordinator import Coordinator
    from kvxfer.geometry import ShardSpec
    from kvxfer.layout import LAYOUTS, kvx1_mapping
    from kvxfer.spread_ranks import SpreadRank
    from kvxfer.store import Store
    from tests.engine.rig import namespace_of
    from tests.jobs.rig import expect

    page = LAYOUTS["nhd"](MODEL.geometry, MODEL.geometry.num_kv_heads, padding=24, offset=8)
    roots = [tmp_root / "small", tmp_root / "large"]
    config = EngineConfig(io_threads=1, shutdown_timeout_s=1.0)
    for filled in (True, False):
        tensors = MODEL.pages("nhd", padding=24, offset=8, only=None if filled else [])

        def pages(alignment: int, tensors: object = tensors) -> KVPages:
            mapping = kvx1_mapping(MODEL.geometry, ShardSpec(), page, blocks_per_chunk=1, alignment=alignment)
            return KVPages(mapping, tensors, MODEL.num_blocks)

        if filled:
            make_directories(roots[1], False)
            write_root(roots[1], RootInfo(8192, 0))
        stores = [Store.open(StoreConfig(root=root, capacity_bytes=64 << 20), writers=1) for root in roots]
        assert [store.alignment for store in stores] == [4096, 8192]
        coordinator = SpreadCoordinator(
            [
                Coordinator(store, namespace_of(MODEL.geometry), kvx1_slot(MODEL.geometry, blocks_per_chunk=1,
                            alignment=store.alignment), ranks=1, config=config)
                for store in stores
            ],
            [1.0, 1.0],
        )  # fmt: skip
        rank = SpreadRank([Rank(root, pages, config=config) for root in roots])
        if filled:
            _, ticket = coordinator.store(keys_of(range(N)))
        else:
            assert all(coordinator.lookup(key) for key in keys_of(range(N)))
            ticket = coordinator.load(keys_of(range(N)))
        assert ticket is not None
        assert [part.ticket.alignment for part in ticket.parts] == [4096, 8192]
        rank.submit(ticket, list(range(N)))
        end = time.monotonic() + 20
        while not rank.collect():
            assert time.monotonic() < end
        coordinator.settle(rank.report())
        assert coordinator.drain(20) and not coordinator.is_busy
        rank.shutdown(1.0)
        coordinator.shutdown(1.0)
        for store in stores:
            store.close()
        if not filled:
            expect(MODEL, "nhd", [pages(4096)], range(N))


def test_a_rush_keeps_the_head_of_the_prompt_whatever_the_weights(tmp_root: Path) -> None:
    """A root with no more slots at hand gives way to one that has some: what is stored has no gap."""
    big = Model.random(MODEL.geometry, 160)
    with Server(tmp_root, 1, model=big, weights=(5.0, 1.0)) as server:
        assert server.put(range(160)) == keys_of(range(128))
        assert server.total("entries") == 128 and {store.stats().entries for store in server.stores} == {64}


@pytest.mark.parametrize("fault", ["fail", "hang"])
def test_a_reset_reaches_every_root_also_where_one_does_not_take_it(tmp_root: Path, fault: str) -> None:
    with Server(tmp_root, 1) as server:
        server.put(range(4))
        with FaultyIO() as io:
            rule = io.fail("rename", errno.EIO, times=1) if fault == "fail" else io.hang("rename", times=1)
            done = server.coordinator.reset(0.5)
            assert rule.hits == 1 and server.hits(range(4)) == []  # at once, in both
            if fault == "hang":
                until(lambda: sum(each._supply.outdated for each in server.coordinators) == 1, "the other has it")
                assert not done and len(server.put([8, 9])) == 2 and server.hits([8, 9]) == [8, 9]
        until(lambda: [store.weight_epoch for store in server.stores] == [1, 1], "both are written down")
        until(lambda: not any(each._supply.outdated for each in server.coordinators), "and known")
        assert server.hits(range(4)) == []


def test_what_a_budget_cut_on_one_root_is_cut_on_the_other(tmp_root: Path) -> None:
    """What a budget keeps is the head of a chain, wherever it lies; what comes later is of no use to its request."""
    slot = kvx1_slot(MODEL.geometry, blocks_per_chunk=1).slot_bytes
    with Server(tmp_root, 1, writes={"write_bytes_per_s": 1e-9, "write_burst_bytes": 3 * slot}) as server:
        for owner in ("a", "b", "c"):
            server.coordinator.begin(owner, Access())
        server.coordinators[1]._intake.turn(False)
        assert server.put(range(5), "a") == keys_of(range(3))  # all of it to the first, which holds three
        server.coordinators[1]._intake.turn(True)
        assert server.put([5], "a") == []  # although the second holds as many
        assert server.put(range(10, 15), "b") == keys_of([10, 11, 12])  # no gap in another's
        values = server.coordinator.metrics()
        assert values.value("kvxfer_store_chunks_total", outcome="budget") == 2 + 1 + 2


def test_metrics_add_up_over_the_roots(tmp_root: Path) -> None:
    with Server(tmp_root, 2) as server:
        server.put(range(N))
        server.get(range(N))
        values = server.coordinator.metrics()
        assert values.value("kvxfer_store_chunks_total", outcome="stored") == N
        assert values.value("kvxfer_load_chunks_total", outcome="hit") == N
        assert values.value("kvxfer_entries") == N and values.value("kvxfer_threads") == 2 * 2 * 2
        seconds = server.coordinator.take_seconds()
        assert sorted(direction for direction, _, _ in seconds) == sorted([LOAD, LOAD, STORE, STORE])
        assert {path for _, path, _ in seconds} == {server.store.io_mode}
        assert server.coordinator.take_seconds() == []
        assert len(server.coordinator.digests) >= 1
        assert server.coordinator.lookup(keys_of([0])[0])
        assert server.coordinator.metrics().value("kvxfer_lookup_keys_total") == 1


def test_a_deadline_is_each_parts_own(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as server:
        server.put(range(4))
        ticket = server.coordinator.load(keys_of(range(4)), seconds=7.5)
        assert [part.ticket.seconds for part in ticket.parts] == [7.5, 7.5]
        server.group.submit(ticket, range(4))
        assert server.wait(ticket) == [OK] * 4


@pytest.mark.parametrize("weights", [(), (1.0,), (1.0, 0.0)], ids=str)
def test_weights_are_one_a_root_and_positive(tmp_root: Path, weights: tuple[float, ...]) -> None:
    with Server(tmp_root, 1) as server, pytest.raises(ConfigError, match="positive weights"):
        SpreadCoordinator(server.coordinators, weights)


def test_shutting_down_is_bounded_over_all_roots(tmp_root: Path) -> None:
    with Server(tmp_root, 2, io_timeout_s=600) as server, FaultyIO() as io:
        io.hang("pwrite")
        _, ticket = server.coordinator.store(keys_of(range(4)))
        server.group.submit(ticket, range(4))
        assert server.group.shutdown() > 0  # threads that were left behind
        assert server.coordinator.shutdown(0.5) and not server.coordinator.is_busy
