"""What of a store is written: second touch, the write budget, the queue's length, in engine and coordinator alike."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvxfer.admission import SecondTouch
from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.errors import ConfigError
from kvxfer.intake import Intake
from kvxfer.jobs import LOAD, STORE, Status
from kvxfer.keys import make_offload_key
from kvxfer.observe import render_metrics
from kvxfer.results import TransferResult
from kvxfer.spread import SpreadEngine
from kvxfer.store import Access, Store
from kvxfer.testing import FaultyIO, ManualClock
from tests.engine.ranks_rig import Server
from tests.engine.rig import GEOMETRY, Node, keys_of
from tests.engine.test_observed import outcomes
from tests.jobs.rig import ranks
from tests.jobs.test_faults import until
from tests.oracle import Model

MODEL = Model.random(GEOMETRY, 40)
SLOT = ranks(MODEL, "nhd", 2, 1, filled=False)[0].mapping.slot.slot_bytes
LEFT_OUT = ("not_admitted", "budget", "backlog")


def reasons(result: TransferResult) -> dict[int, str]:
    """Of each chunk without a bit, why."""
    assert {e.chunk for e in result.errors} == {n for n in range(result.bitmap.n) if not result.bitmap[n]}
    return {error.chunk: error.status.name.lower() for error in result.errors}


def budget(chunks: float, per_s: float = 1.0) -> dict[str, Any]:
    """So many chunks at once, and so many a second."""
    return {"write_bytes_per_s": per_s * SLOT, "write_burst_bytes": int(chunks * SLOT)}


def takes(node: Node) -> bool:
    return node.writer.takes_stores


def queue_s(node: Node) -> float:
    return node.writer.metrics().value("kvxfer_store_queue_seconds")


def left(store: Store) -> float:
    """Chunks that the budget holds."""
    assert store.write_budget is not None
    return store.write_budget.available() / SLOT


# ---- second touch ------------------------------------------------------------------------------------------------


def test_a_chunk_is_written_when_it_is_offered_again(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, second_touch_names=100) as node, FaultyIO() as io:
        writes = io.calls("pwrite")
        assert reasons(node.put(range(4))) == dict.fromkeys(range(4), "not_admitted")
        assert io.calls("pwrite") == writes and node.store.stats().entries == 0
        assert node.put(range(6)).bitmap.bits == 0b001111, "the known head, not the new tail"
        assert node.put(range(6)).bitmap.all()
        assert node.get(range(6)).bitmap.all()
        node.check(range(6))
        assert outcomes(node.writer, "store") == {"not_admitted": 4 + 2, "stored": 6, "present": 4}


def test_what_is_there_needs_no_second_offer(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put(range(3))
    with Node(tmp_root, MODEL, second_touch_names=2) as node:
        for _ in range(3):
            assert node.put(range(3)).bitmap.all()


def test_nothing_is_written_behind_a_gap_and_the_next_offer_closes_it(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, second_touch_names=100) as node:
        node.put([3, 4])  # their offer is remembered, that of what comes before them is not
        assert reasons(node.put(range(5))) == dict.fromkeys(range(5), "not_admitted")
        assert node.put(range(5)).bitmap.all()


def test_groups_are_chains_of_their_own(tmp_root: Path) -> None:
    def key(number: int, group: int) -> bytes:
        return make_offload_key(f"{number}".encode().ljust(32, b"."), group)

    with Node(tmp_root, MODEL, second_touch_names=100) as node:
        node.put([0, 1], keys=[key(0, 1), key(1, 1)])
        mixed = [key(0, 0), key(0, 1), key(1, 0), key(1, 1)]
        assert reasons(node.put(range(4), keys=mixed)) == {0: "not_admitted", 2: "not_admitted"}
        assert node.put(range(4), keys=mixed).bitmap.all()


def test_twice_in_one_job_is_one_offer(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, second_touch_names=100) as node:
        twice = node.put([0, 1, 1], keys=keys_of([0, 1, 1]))
        assert reasons(twice) == dict.fromkeys(range(3), "not_admitted")


# ---- the budget --------------------------------------------------------------------------------------------------


def test_a_short_budget_keeps_the_head(tmp_root: Path) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, clock=clock, writes=budget(5, 2)) as node:
        assert reasons(node.put(range(8))) == {5: "budget", 6: "budget", 7: "budget"}
        metrics = node.writer.metrics()
        assert metrics.value("kvxfer_write_budget_left_bytes") == 0
        assert metrics.value("kvxfer_write_budget_bytes_per_s") == 2 * SLOT
        assert metrics.value("kvxfer_device_written_bytes_total") == 5 * SLOT
        clock.advance(1)
        assert reasons(node.put(range(8))) == {7: "budget"}, "what is there costs nothing"
        clock.advance(1e9)  # suspended for years
        assert node.put(range(8, 20)).bitmap.bits == 0b11111
        assert outcomes(node.writer, "store") == {"stored": 5 + 2 + 5, "present": 5, "budget": 3 + 1 + 7}


def test_over_any_time_no_more_is_written_than_the_budget_allows(tmp_root: Path) -> None:
    clock = ManualClock()
    written: list[tuple[float, int]] = []
    with Node(tmp_root, MODEL, clock=clock, writes=budget(3, 1.5)) as node, FaultyIO() as io:
        for step in range(30):
            before = io.calls("pwrite")
            result = node.put([step], keys=keys_of([step], prompt=step))
            assert (io.calls("pwrite") > before) == bool(result.bitmap.all())
            written.append((clock.now, SLOT * result.bitmap.count()))
            clock.advance((0, 0.25, 1.0, 0)[step % 4])
        assert node.writer.metrics().value("kvxfer_device_written_bytes_total") == sum(n for _, n in written)
    for first, (since, _) in enumerate(written):
        for last in range(first, len(written)):
            until_ = written[last][0]
            assert sum(n for _, n in written[first : last + 1]) <= 1.5 * SLOT * (until_ - since) + 3 * SLOT
    assert sum(n for _, n in written) >= 1.5 * SLOT * (clock.now - 1), "and it is used"


def test_what_is_not_written_after_all_comes_back(tmp_root: Path) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, clock=clock, writes=budget(40, 1e-9), breaker_failures=2) as node, FaultyIO() as io:
        others = node.store.reserve(node.digest, node.source[0].mapping.slot, 10_000)
        assert set(reasons(node.put(range(10))).values()) == {"no_space"} and round(left(node.store)) == 40
        node.store.release(others)
        io.fail("pwrite", errno.EIO, offset=(4096, 1 << 40))
        assert set(reasons(node.put(range(4))).values()) == {"io"}
        assert round(left(node.store)) == 36, "nobody knows how much of these reached the drive"
        assert set(reasons(node.put(range(10))).values()) == {"breaker"} and round(left(node.store)) == 36
        assert node.store.stats().reserved_slots == 0


def test_a_burst_that_holds_no_slot_is_refused(tmp_root: Path) -> None:
    with pytest.raises(ConfigError, match=r"write_burst_bytes=100 is less than a slot of \d+ bytes"):
        Node(tmp_root, MODEL, writes={"write_bytes_per_s": 1e6, "write_burst_bytes": 100})


def test_a_chain_that_was_cut_is_not_stored_behind_the_gap(tmp_root: Path) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, clock=clock, writes=budget(2, 1)) as node:
        one = Access()
        assert reasons(node.put(range(4), access=one)) == {2: "budget", 3: "budget"}
        clock.advance(10)
        assert reasons(node.put([4, 5], access=one)) == {0: "budget", 1: "budget"}
        assert node.put([1, 6], access=one).bitmap.bits == 0b01, "what is there is there"
        assert node.put([2, 3], access=Access()).bitmap.all()


def test_what_was_queued_before_the_cut_is_not_stored_behind_the_gap_either(tmp_root: Path) -> None:
    clock, one = ManualClock(), Access()
    with Node(tmp_root, MODEL, clock=clock, writes=budget(2, 1)) as node, FaultyIO() as io:
        rule = io.hang("fallocate", times=1)  # of the first slab: the budget has been asked by then
        for job, numbers in enumerate(([0, 1, 2], [3, 4])):
            node.writer.submit_store(job, keys_of(numbers), numbers, access=one, begin=False)
        node.writer.begin()
        until(lambda: rule.hits == 1, "the first is under way")
        clock.advance(10)
        io.release()
        found = node.writer.wait([0, 1], 20)
        assert reasons(found[0]) == {2: "budget"}
        assert reasons(found[1]) == {0: "budget", 1: "budget"}
        assert left(node.store) == 2


def test_drive_writes_per_day_of_a_given_drive(tmp_root: Path) -> None:
    with Store.open(StoreConfig(root=tmp_root, write_dwpd=0.5, drive_bytes=86400 * 1000)) as store:
        assert store.stats().write_budget_bytes_per_s == 500
        assert store.stats().write_budget_left_bytes == 256 << 20


# ---- the queue's length ------------------------------------------------------------------------------------------


def test_a_queue_that_takes_too_long_takes_no_more(tmp_root: Path) -> None:
    clock = ManualClock()
    with (
        Node(tmp_root, MODEL, clock=clock, io_threads=1, max_queue_s=8.0, io_timeout_s=600.0) as node,
        FaultyIO() as io,
    ):
        node.put([0])  # no time passes: a speed beyond measure
        assert queue_s(node) == 0
        rule = io.hang("pwrite", offset=(4096, 1 << 40))
        node.writer.submit_store(100, keys_of(range(1, 5)), [1, 2, 3, 4])
        until(lambda: rule.hits > 0, "a write hangs")
        assert takes(node)
        clock.advance(1)
        assert queue_s(node) == 4, "four chunks, and one took a second at least"
        node.writer.submit_store(101, keys_of(range(1, 6)), [1, 2, 3, 4, 5])
        until(lambda: queue_s(node) == 5, "what is under way is not queued twice")
        assert takes(node)
        clock.advance(1)
        assert queue_s(node) == 10 and not takes(node)
        request = Access()
        late = node.put([0, 6, 7], access=request)
        assert (late.bitmap.bits, reasons(late)) == (0b001, {1: "backlog", 2: "backlog"})
        io.release()
        assert all(result.bitmap.all() for result in node.writer.wait([100, 101], 20).values())
        assert queue_s(node) == 0 and takes(node)
        assert reasons(node.put([8], access=request)) == {0: "backlog"}, "its chain has a gap"
        assert node.put([8]).bitmap.all()
        assert outcomes(node.writer, "store")["backlog"] == 3
        assert node.writer._intake.backlog._queued == 0


def test_a_long_queue_of_stores_holds_up_no_load() -> None:
    clock = ManualClock()
    intake = Intake(EngineConfig(max_queue_s=5.0), lambda: {"lost_writes": 0, "lost_calls": 0}, clock)
    intake.backlog.add(100)
    clock.advance(6)
    assert intake.verdict(STORE, 0, 1) is Status.BACKLOG and intake.verdict(LOAD, 0, 1) is None
    assert intake.room(3) == 3


@pytest.mark.parametrize("fault", ["none", "io", "cancel", "no_space"])
def test_nothing_stays_in_the_queue(tmp_root: Path, fault: str) -> None:
    with Node(tmp_root, MODEL, writes=budget(9), second_touch_names=50) as node, FaultyIO() as io:
        if fault == "io":
            io.fail("pwrite", errno.EIO, after=2)
        others = node.store.reserve(node.digest, node.source[0].mapping.slot, 10_000) if fault == "no_space" else []
        for numbers in (range(6), range(12), range(12), [0, 0, 20, 20]):
            job = node.next_job()
            node.writer.submit_store(job, keys_of(numbers), list(numbers))
            if fault == "cancel":
                node.writer.cancel(job)
            assert node.writer.wait([job], 20)
        assert node.writer.drain(20)
        until(lambda: node.writer._intake.backlog._queued == 0, "the queue is empty")
        node.store.release(others)


# ---- nothing is tried every step ---------------------------------------------------------------------------------


def test_what_is_left_out_is_not_tried_again(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    with Node(tmp_root, MODEL, clock=clock, writes=budget(1)) as node, FaultyIO() as io:
        request = Access()
        assert reasons(node.put(range(4), access=request)) == dict.fromkeys((1, 2, 3), "budget")
        calls = {op: io.calls(op) for op in ("pwrite", "open", "fallocate")}
        clock.advance(3600)
        for _ in range(50):  # steps of a server that offers nothing
            node.writer.begin()
            assert node.writer.poll() == [] and node.writer.is_quiet
        planned: list[Any] = []
        monkeypatch.setattr(node.writer._writer, "start", planned.append)
        for _ in range(50):  # and of one that offers it again
            assert reasons(node.put(range(4), access=request)) == dict.fromkeys((1, 2, 3), "budget")
        assert not planned and calls == {op: io.calls(op) for op in calls}
        assert outcomes(node.writer, "store") == {"stored": 1, "budget": 51 * 3, "present": 50}


def test_every_reason_is_there_at_zero(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        metrics = node.writer.metrics()
        assert [metrics.value("kvxfer_store_chunks_total", outcome=name) for name in LEFT_OUT] == [0, 0, 0]
        assert metrics.value("kvxfer_write_budget_left_bytes") == float("inf")
        assert "kvxfer_write_budget_bytes_per_s +Inf\n" in render_metrics(metrics)


# ---- several roots, and several ranks ----------------------------------------------------------------------------


def test_several_roots_have_budgets_of_their_own_and_one_memory(tmp_root: Path) -> None:
    touch = SecondTouch(100)
    with (
        Node(tmp_root / "a", MODEL, clock=(clock := ManualClock()), writes=budget(2)) as first,
        Node(tmp_root / "b", MODEL, clock=clock, writes=budget(5)) as second,
    ):
        for node in (first, second):
            node.writer.shutdown()
            node.writer = type(node.writer)(
                node.store, node.namespace, node.source, config=node.config, clock=clock, second_touch=touch
            )
        spread = SpreadEngine([first.writer, second.writer], [1, 1])

        def put(job: int, numbers: Sequence[int]) -> TransferResult:
            spread.submit_store(job, keys_of(numbers), list(numbers))
            found: list[TransferResult] = []
            until(lambda: bool(found.extend(spread.poll()) or found), "a result")
            return found[0]

        assert set(reasons(put(1, range(10))).values()) == {"not_admitted"}
        assert reasons(put(2, range(10))) == dict.fromkeys((7, 8, 9), "budget"), "the head of the chain, from both"
        assert (first.store.stats().entries, second.store.stats().entries) == (2, 5)


def test_a_chain_over_several_roots_is_cut_in_all_of_them(tmp_root: Path) -> None:
    clock = ManualClock()
    with (
        Node(tmp_root / "a", MODEL, clock=clock, writes=budget(1, 0.001)) as first,
        Node(tmp_root / "b", MODEL, clock=clock, writes=budget(4, 1)) as second,
    ):
        spread, one = SpreadEngine([first.writer, second.writer], [1, 1]), Access()

        def put(job: int, numbers: Sequence[int], access: Access) -> TransferResult:
            spread.submit_store(job, keys_of(numbers), list(numbers), access=access)
            found: list[TransferResult] = []
            until(lambda: bool(found.extend(spread.poll()) or found), "a result")
            return found[0]

        assert reasons(put(1, range(6), one)) == {5: "budget"}
        clock.advance(10)
        assert reasons(put(2, [6, 7], one)) == {0: "budget", 1: "budget"}, "behind the gap"
        assert put(3, [5, 6], Access()).bitmap.all(), "of another request"


def of(server: Server) -> Counter[str]:
    metrics = server.coordinator.metrics()
    named = (*LEFT_OUT, "stored", "present", "no_space", "breaker", "dropped", "off")
    counts = {name: int(metrics.value("kvxfer_store_chunks_total", outcome=name)) for name in named}
    return Counter({name: count for name, count in counts.items() if count})


def test_ranks_obey_the_same(tmp_root: Path) -> None:
    clock = ManualClock()
    with Server(tmp_root, clock=clock, writes=budget(3, 1), second_touch_names=50) as server:
        for owner in "abc":
            server.coordinator.begin(owner)
        assert server.put(range(4), "a") == []
        assert server.put(range(6), "b") == keys_of(range(3))
        assert of(server) == {"not_admitted": 4 + 2, "stored": 3, "budget": 1}
        clock.advance(100)
        assert server.put([4, 5], "b") == [], "behind a gap"
        assert server.put(range(6), "c") == keys_of([3, 4, 5])
        assert of(server) == {"not_admitted": 6, "stored": 6, "budget": 1 + 2, "present": 3}
        assert server.coordinator._intake.backlog._queued == 0
        assert server.get(range(6)) == [Status.OK] * 6


def test_ranks_that_lag_behind_get_no_more(tmp_root: Path) -> None:
    clock = ManualClock()
    with Server(tmp_root, clock=clock, max_queue_s=5.0) as server:
        server.coordinator.begin("b")
        _, ticket = server.coordinator.store(keys_of(range(2)), "a")
        assert ticket is not None
        clock.advance(6)
        assert server.coordinator.store(keys_of(range(4)), "b") == ([], None)
        assert of(server)["backlog"] == 2
        server.group.submit(ticket, [0, 1])
        server.settle()
        assert server.coordinator._intake.backlog.bytes_per_s == 2 * SLOT / 6
        assert server.coordinator.store(keys_of([2]), "b") == ([], None), "its chain was cut"
        assert server.put(range(4), "c") == keys_of([2, 3])
        assert server.coordinator.metrics().value("kvxfer_store_queue_seconds") == 0


def test_slots_that_ranks_do_not_get_cost_no_budget(tmp_root: Path) -> None:
    clock = ManualClock()
    with Server(tmp_root, clock=clock, capacity_bytes=8 << 20, writes=budget(10, 1e-9)) as server:
        server.coordinator._supply.take(1 << 20)
        assert server.coordinator.store(keys_of(range(4))) == ([], None)
        assert of(server) == {"no_space": 4} and left(server.store) == 10
