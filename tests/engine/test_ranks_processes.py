"""Ranks in processes of their own, as a server has them: what crosses is tickets and reports."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.coordinator import Coordinator
from kvxfer.jobs import Status
from kvxfer.ranks import Rank
from kvxfer.spread_coordinator import SpreadCoordinator
from kvxfer.spread_ranks import SpreadRank
from kvxfer.store import Store
from kvxfer.testing import FaultyIO
from kvxfer.tickets import Report
from tests.engine.ranks_rig import MODEL, keys_of
from tests.engine.rig import namespace_of
from tests.jobs.rig import ranks

N = 12
CONFIG = EngineConfig(io_threads=2, io_timeout_s=0.5, shutdown_timeout_s=1.0)
PROCESSES = multiprocessing.get_context("forkserver")  # which has imported this, and nothing else happens there
PROCESSES.set_forkserver_preload([__name__])


def serve(pipe: Connection, roots: list[Path], tp_size: int, number: int, layout: str, filled: bool) -> None:
    """A rank's process: answers what it is asked, until it is told to end."""
    pages = ranks(MODEL, layout, tp_size, filled=filled)[number]
    each = [Rank(root, lambda alignment: pages, config=CONFIG, number=number) for root in roots]
    rank: Any = each[0] if len(each) == 1 else SpreadRank(each)
    while (asked := pipe.recv())[0] != "end":
        match asked:
            case ["submit", ticket, ids]:
                rank.submit(ticket, ids)
            case ["report"]:
                rank.collect()
                pipe.send(rank.report())
            case ["hang" | "kill" as fault, call]:
                getattr(FaultyIO(), fault)(call, offset=(4096, 1 << 40))
            case ["release"]:
                FaultyIO().release()
            case ["blocks", blocks]:
                want = MODEL.pages(layout, tp_size=tp_size, tp_rank=number, padding=24, offset=8, only=blocks)
                pipe.send(all((a == b).all() for a, b in zip(pages.tensors, want, strict=True)))
    rank.shutdown()


class Server:
    """A coordinator here, and its ranks there."""

    def __init__(self, roots: list[Path], tp_size: int, layout: str, filled: bool) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for number in range(tp_size):
            here, there = PROCESSES.Pipe()
            process = PROCESSES.Process(target=serve, args=(there, roots, tp_size, number, layout, filled), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.stores = [Store.open(StoreConfig(root=root, capacity_bytes=64 << 20), writers=2) for root in roots]
        self.store = self.stores[0]
        slot = ranks(MODEL, layout, tp_size, filled=False)[0].mapping.slot
        each = [
            Coordinator(store, namespace_of(MODEL.geometry), slot, ranks=tp_size, config=CONFIG)
            for store in self.stores
        ]
        self.coordinator: Any = each[0] if len(each) == 1 else SpreadCoordinator(each, [1.0] * len(each))

    def tell(self, *what: Any, only: Sequence[int] | None = None) -> None:
        for number, pipe in enumerate(self.pipes):
            if only is None or number in only:
                pipe.send(list(what))

    def ask(self, *what: Any) -> list[Any]:
        self.tell(*what)
        return [pipe.recv() for pipe in self.pipes]

    def step(self) -> None:
        merged = Report()
        for report in self.ask("report"):
            merged.merge(report)
        self.coordinator.settle(merged)

    def settle(self) -> None:
        end = time.monotonic() + 60
        while self.coordinator.is_busy:
            assert time.monotonic() < end
            self.step()
            time.sleep(0.005)

    def put(self, numbers: Sequence[int]) -> Any:
        keys, ticket = self.coordinator.store(keys_of(numbers))
        if ticket is not None:
            self.tell("submit", ticket, [n for n in numbers if keys_of([n])[0] in keys])
        return ticket

    def hits(self) -> list[int]:
        return [n for n in range(N) if self.coordinator.lookup(keys_of([n])[0])]


@contextmanager
def server(
    root: Path, tp_size: int, layout: str = "packed", *, filled: bool = True, roots: int = 1
) -> Iterator[Server]:
    where = [root] if roots == 1 else [root / f"drive {number}" for number in range(roots)]
    one = Server(where, tp_size, layout, filled)
    try:
        yield one
    finally:
        for pipe, process in zip(one.pipes, one.processes, strict=True):
            if process.is_alive():
                pipe.send(["end"])
        for process in one.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        one.coordinator.shutdown(1.0)
        for store in one.stores:
            store.close()


@pytest.mark.parametrize(
    ("tp_store", "tp_load", "roots"),
    [
        (2, 1, 1),
        (2, 1, 2),
        pytest.param(1, 2, 1, marks=pytest.mark.slow),
        pytest.param(2, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_a_trip(tmp_root: Path, tp_store: int, tp_load: int, roots: int) -> None:
    with server(tmp_root, tp_store, roots=roots) as source:
        source.put(range(N))
        source.settle()
        assert source.hits() == list(range(N))
    with server(tmp_root, tp_load, "hnd", filled=False, roots=roots) as target:
        ticket = target.coordinator.load(keys_of(range(N)))
        target.tell("submit", ticket, list(range(N)))
        target.settle()
        assert target.ask("blocks", list(range(N))) == [True] * tp_load
        values = target.coordinator.metrics()
        assert values.value("kvxfer_load_chunks_total", outcome="hit") == N
        assert values.value("kvxfer_verified_segments_total") == N * 4  # of all ranks, each its own


@pytest.mark.slow
def test_a_rank_that_dies_takes_what_it_had_not_sealed_and_nothing_else(tmp_root: Path) -> None:
    with server(tmp_root, 2) as source:
        source.put(range(4))
        source.settle()
        source.tell("kill", "pwrite", only=[1])
        source.put(range(N))
        source.processes[1].join(30)
        assert source.processes[1].exitcode == -9
        end = time.monotonic() + 30
        while not (settled := _report(source, 0)).settled:  # the other is done
            assert time.monotonic() < end
        source.coordinator.settle(settled)
        assert source.hits() == [0, 1, 2, 3]
    with server(tmp_root, 1) as again:
        assert again.hits() == [0, 1, 2, 3]
        ticket = again.put(range(N))
        assert ticket is not None and len(ticket.places) == N - 4
        again.settle()
        assert again.hits() == list(range(N))


def _report(source: Server, number: int) -> Report:
    source.tell("report", only=[number])
    report: Report = source.pipes[number].recv()
    return report


@pytest.mark.slow
def test_a_rank_whose_write_hangs_is_waited_for_io_timeout_s_and_its_slots_until_it_returns(tmp_root: Path) -> None:
    with server(tmp_root, 2) as source:
        source.tell("hang", "pwrite", only=[1])
        source.put([0])
        source.settle()
        assert source.hits() == [] and source.store.stats().quarantined_slots == 1
        source.tell("release", only=[1])
        end = time.monotonic() + 30
        while source.store.stats().quarantined_slots:
            assert time.monotonic() < end
            source.step()
        source.put([0])
        source.settle()
        assert source.hits() == [0]


@pytest.mark.slow
def test_a_rank_whose_read_hangs_takes_its_chunks_away_from_all(tmp_root: Path) -> None:
    with server(tmp_root, 2) as source:
        source.put(range(N))
        source.settle()
        source.tell("hang", "pread", only=[0])
        source.coordinator.begin("a")
        ticket = source.coordinator.load(keys_of(range(N)), "a", seconds=0.3)
        source.tell("submit", ticket, list(range(N)))
        source.settle()
        values = source.coordinator.metrics()
        assert values.value("kvxfer_load_chunks_total", outcome="hit") == 0
        assert values.value("kvxfer_load_chunks_total", outcome=Status.CUT.name.lower()) == N
        assert not any(source.coordinator.lookup(key, "a") for key in keys_of(range(N)))
        assert source.hits() == list(range(N))  # a cut is a miss for that request only
        source.tell("release", only=[0])
