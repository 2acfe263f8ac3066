"""Stores, their coordinator and the ranks of one or more servers, in this process: no vLLM. Chunk i is block i.

`two_as_one` runs a module's tests over one root, and over two behind one face.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.admission import SecondTouch
from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.coordinator import Coordinator
from kvxfer.device.base import Device
from kvxfer.jobs import Status
from kvxfer.ranks import Ended, Rank
from kvxfer.spread_coordinator import SpreadCoordinator
from kvxfer.spread_ranks import SpreadRank
from kvxfer.store import Store
from kvxfer.tickets import Place, Report, Settled, SpreadTicket, Ticket
from tests.engine.rig import keys_of, namespace_of
from tests.jobs.rig import GEOMETRY, expect, ranks
from tests.oracle import Model

__all__ = ["GEOMETRY", "Group", "MODEL", "Server", "expect", "keys_of", "one_root", "two_as_one", "two_roots"]

MODEL = Model.random(GEOMETRY, 16)


def _always(pages: KVPages) -> Callable[[int], KVPages]:
    return lambda alignment: pages


class Group:
    """The ranks of one server."""

    @staticmethod
    def make_device() -> Device | None:
        """Tests of devices put one here."""
        return None

    def __init__(self, roots: Sequence[Path], pages: Sequence[KVPages], config: EngineConfig, io: str) -> None:
        self.pages = list(pages)
        self.parts = [  # by rank and root
            [
                Rank(root, _always(mine), config=config, number=number, device=self.make_device(), io=io)
                for root in roots
            ]
            for number, mine in enumerate(self.pages)
        ]
        self.ranks: list[Any] = [parts[0] if len(parts) == 1 else SpreadRank(parts) for parts in self.parts]
        self.ended: list[list[Ended]] = [[] for _ in self.ranks]

    def submit(self, ticket: Ticket | SpreadTicket, block_ids: Any) -> None:
        for rank in self.ranks:
            rank.submit(ticket, block_ids)

    def report(self, only: Sequence[int] | None = None) -> Report:
        """What all ranks (or some) say, merged as their server does."""
        merged = Report()
        for number in range(len(self.ranks)) if only is None else only:
            self.ended[number] += self.ranks[number].collect()
            merged.merge(self.ranks[number].report())
        return merged

    def shutdown(self) -> int:
        return sum(rank.shutdown(0.5) for rank in self.ranks)


class Server:
    """Stores with their coordinator, and one group of ranks."""

    roots = 1

    def __init__(
        self,
        root: Path,
        tp_size: int = 2,
        layout: str = "nhd",
        *,
        filled: bool = True,
        model: Model = MODEL,
        blocks_per_chunk: int = 1,
        capacity_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
        writes: dict[str, Any] | None = None,
        io: str = "auto",
        weights: Sequence[float] = (),
        **config: Any,
    ) -> None:
        """`writes`: of the store's configuration, what bounds them."""
        self.layout, self.model = layout, model
        self.config = EngineConfig(**({"io_threads": 2, "shutdown_timeout_s": 1.0, "bay_bytes": 1 << 20} | config))
        drives = [root] if self.roots == 1 else [root / f"drive {number}" for number in range(self.roots)]
        limits = [StoreConfig(root=each, capacity_bytes=capacity_bytes, io=io, **(writes or {})) for each in drives]
        self.stores = [Store.open(each, writers=2, clock=clock) for each in limits]
        self.store = self.stores[0]
        pages = ranks(model, layout, tp_size, blocks_per_chunk, filled=filled)
        self.published: list[bytes] = []
        self.parts: list[Settled] = []  # of the last ticket, by rank
        names = self.config.second_touch_names
        second_touch = SecondTouch(names) if names else None  # which all roots share
        self.coordinators = [
            Coordinator(
                store,
                namespace_of(model.geometry, blocks_per_chunk),
                pages[0].mapping.slot,
                ranks=tp_size,
                config=self.config,
                stored=self.published.extend,
                clock=clock,
                second_touch=second_touch,
            )
            for store in self.stores
        ]
        self.coordinator: Any = self.coordinators[0]
        if self.roots > 1:
            self.coordinator = SpreadCoordinator(self.coordinators, weights or [1.0] * self.roots)
        self.group = Group(drives, pages, self.config, io)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.shutdown()
        self.coordinator.shutdown(1.0)
        for store in self.stores:
            store.close()

    def total(self, name: str) -> int:
        """A field of StoreStats, over the roots."""
        return sum(getattr(store.stats(), name) for store in self.stores)

    def home(self, number: int) -> int:
        """Which root has a chunk."""
        (home,) = [root for root, each in enumerate(self.coordinators) if each.contains(keys_of([number])[0])]
        return home

    def locate(self, number: int) -> tuple[Path, int, int]:
        """A chunk's file, its offset there, and the bytes from one segment to the next."""
        home = self.home(number)
        found = self.stores[home].locate(self.coordinators[home].digest, keys_of([number])[0])
        assert found is not None
        path, offset, layout = found
        return path, offset, layout.segment_stride

    def forget(self, number: int) -> None:
        """Takes a chunk out of the root that has it, as damage would."""
        home = self.home(number)
        (entry,) = self.stores[home].pin(self.coordinators[home].digest, keys_of([number]))
        self.stores[home].unpin([entry])
        assert entry is not None and self.stores[home].invalidate(entry, "other")

    @staticmethod
    def places(ticket: Ticket | SpreadTicket) -> list[Place]:
        """Of all its chunks."""
        if isinstance(ticket, Ticket):
            return list(ticket.places)
        found = {
            at: place for part in ticket.parts for at, place in zip(part.positions, part.ticket.places, strict=True)
        }
        return [found[position] for position in range(ticket.chunks)]

    def settle(self, timeout: float = 20.0) -> None:
        """Until all ranks have settled everything, and what they sealed is published."""
        end = time.monotonic() + timeout
        while self.coordinator.is_busy:
            assert time.monotonic() < end, "tickets stay open"
            self.coordinator.settle(self.group.report())
            time.sleep(0.001)
        self.coordinator.settle(self.group.report())

    def put(self, numbers: Sequence[int], owner: str = "") -> list[bytes]:
        """Store these chunks and wait; the keys that were to be written."""
        keys, ticket = self.coordinator.store(keys_of(numbers), owner)
        if ticket is not None:
            chosen = [n for n in numbers if keys_of([n])[0] in keys]
            self.group.submit(ticket, chosen)
            self.settle()
        return keys

    def get(self, numbers: Sequence[int], owner: str = "", *, seconds: float | None = None) -> list[Status]:
        """Load these chunks and wait; what became of each on all ranks together."""
        ticket = self.coordinator.load(keys_of(numbers), owner, seconds=seconds)
        self.group.submit(ticket, list(numbers))
        return self.wait(ticket)

    def wait(self, ticket: Ticket | SpreadTicket) -> list[Status]:
        self.settle()
        parts = [one.settled for ended in self.group.ended for one in ended if one.ticket is ticket]
        assert len(parts) == len(self.group.ranks) and all(part.ranks == 1 for part in parts)
        self.parts = parts
        found = [Status.OK] * ticket.chunks
        for part in parts:
            for position, failure in part.failed.items():
                found[position] = max(found[position], failure.status)
        return found

    def hits(self, numbers: Sequence[int], owner: str = "") -> list[int]:
        return [n for n in numbers if self.coordinator.lookup(keys_of([n])[0], owner)]

    def expect(self, blocks: Sequence[int]) -> None:
        expect(self.model, self.layout, self.group.pages, blocks)

    def expect_parts(self, blocks: Sequence[int]) -> None:
        """Asserts that every rank has of these blocks what it says has arrived, and that nothing else was written."""
        for number, (part, mine) in enumerate(zip(self.parts, self.group.pages, strict=True)):
            arrived = [block for position, block in enumerate(blocks) if position not in part.failed]
            want = self.model.pages(
                self.layout, tp_size=len(self.parts), tp_rank=number, padding=24, offset=8, only=arrived
            )
            for got, right in zip(mine.tensors, want, strict=True):
                assert np.array_equal(got, right), f"rank {number}"


@pytest.fixture(params=[1, 2], ids=["one root", "two roots"], autouse=True)
def two_as_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many roots servers of this test have."""
    monkeypatch.setattr(Server, "roots", request.param)
    return int(request.param)


two_roots = pytest.mark.parametrize("two_as_one", [2], indirect=True, ids=["two roots"])
one_root = pytest.mark.parametrize("two_as_one", [1], indirect=True, ids=["one root"])  # about the inside of one
