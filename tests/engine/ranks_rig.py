"""A store, its coordinator and the ranks of one or more servers, in this process: no vLLM. Chunk i is block i."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.coordinator import Coordinator
from kvxfer.device.base import Device
from kvxfer.jobs import Status
from kvxfer.ranks import Ended, Rank
from kvxfer.store import Store
from kvxfer.tickets import Report, Settled, Ticket
from tests.engine.rig import keys_of, namespace_of
from tests.jobs.rig import GEOMETRY, expect, ranks
from tests.oracle import Model

__all__ = ["GEOMETRY", "Group", "MODEL", "Server", "expect", "keys_of"]

MODEL = Model.random(GEOMETRY, 16)


def _always(pages: KVPages) -> Callable[[int], KVPages]:
    return lambda alignment: pages


class Group:
    """The ranks of one server."""

    @staticmethod
    def make_device() -> Device | None:
        """Tests of devices put one here."""
        return None

    def __init__(self, root: Path, pages: Sequence[KVPages], config: EngineConfig, io: str = "auto") -> None:
        self.pages = list(pages)
        self.ranks = [
            Rank(root, _always(mine), config=config, number=number, device=self.make_device(), io=io)
            for number, mine in enumerate(self.pages)
        ]
        self.ended: list[list[Ended]] = [[] for _ in self.ranks]

    def submit(self, ticket: Ticket, block_ids: Any) -> None:
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
    """A store with its coordinator, and one group of ranks."""

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
        **config: Any,
    ) -> None:
        """`writes`: of the store's configuration, what bounds them."""
        self.layout, self.model = layout, model
        self.config = EngineConfig(**({"io_threads": 2, "shutdown_timeout_s": 1.0, "bay_bytes": 1 << 20} | config))
        limits = StoreConfig(root=root, capacity_bytes=capacity_bytes, io=io, **(writes or {}))
        self.store = Store.open(limits, writers=2, clock=clock)
        pages = ranks(model, layout, tp_size, blocks_per_chunk, filled=filled)
        self.published: list[bytes] = []
        self.parts: list[Settled] = []  # of the last ticket, by rank
        self.coordinator = Coordinator(
            self.store,
            namespace_of(model.geometry, blocks_per_chunk),
            pages[0].mapping.slot,
            ranks=tp_size,
            config=self.config,
            stored=self.published.extend,
            clock=clock,
        )
        self.group = Group(root, pages, self.config, io)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.shutdown()
        self.coordinator.shutdown(1.0)
        self.store.close()

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

    def wait(self, ticket: Ticket) -> list[Status]:
        self.settle()
        parts = [one.settled for ended in self.group.ended for one in ended if one.ticket is ticket]
        assert len(parts) == len(self.group.ranks) and all(part.ranks == 1 for part in parts)
        self.parts = parts
        found = [Status.OK] * len(ticket.places)
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
