"""What takes stores: engines and ranks, of one root and two, behind one face; and what may go wrong with them."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvxfer.admission import SecondTouch
from kvxfer.breaker import BreakerState
from kvxfer.intake import Intake
from kvxfer.jobs import STORE
from kvxfer.keys import make_offload_key
from kvxfer.observe import Metrics
from kvxfer.results import TransferResult
from kvxfer.spread import SpreadEngine
from kvxfer.store import Access, Store
from kvxfer.testing import FaultyIO, ManualClock
from tests.engine.ranks_rig import Server
from tests.engine.rig import GEOMETRY, Node
from tests.jobs.rig import ranks
from tests.jobs.test_faults import until
from tests.oracle import Model

BLOCKS = 40
MODEL = Model.random(GEOMETRY, BLOCKS)
SLOT = ranks(MODEL, "nhd", 2, 1, filled=False)[0].mapping.slot
SETTINGS: dict[str, Any] = {"breaker_failures": 8, "max_queue_s": 5.0}
BUDGET = {"write_bytes_per_s": 1e6 * SLOT.slot_bytes, "write_burst_bytes": 1000 * SLOT.slot_bytes}
OUTCOMES = ("stored", "present", "not_admitted", "budget", "backlog", "dropped", "no_space", "off", "breaker", "index")
TRIED_AGAIN = ("dropped", "breaker", "io", "index", "off")  # as soon as the request offers the gap again
SPARED = ("budget", "backlog", "no_space")  # not for this request


def key_of(number: int, group: int = 0) -> bytes:
    return make_offload_key(f"{number}".encode().ljust(32, b"."), group)


class Face:
    """What takes stores: the same calls over one engine, several, or a coordinator and its ranks."""

    clock: ManualClock
    intakes: list[Intake]
    stores: list[Store]

    def begin(self, keys: list[bytes], blocks: list[int], access: Access) -> Callable[[], object]:
        """Begin a store; what waits for its end."""
        raise NotImplementedError

    def touch(self, keys: list[bytes], access: Access) -> None:
        """A request uses these, in its order."""
        raise NotImplementedError

    def metrics(self) -> Metrics:
        raise NotImplementedError

    def queue(self, chunks: int) -> None:
        """So many chunks more are queued, as far as anybody knows."""
        raise NotImplementedError

    def ready(self) -> None:
        """Wait until slots can be had again."""

    def put(self, numbers: Sequence[int], access: Access | None = None, group: int = 0) -> dict[str, int]:
        """How many of them ended how."""
        before = self._counts()
        self.begin([key_of(n, group) for n in numbers], list(numbers), access or Access())()
        return dict(self._counts() - before)

    def there(self, numbers: Sequence[int]) -> list[int]:
        return [n for n in numbers if any(store.contains(self.digest(store), key_of(n)) for store in self.stores)]

    def digest(self, store: Store) -> bytes:
        raise NotImplementedError

    def drop(self, number: int) -> None:
        """Take a chunk out, as if it had been evicted."""
        for store in self.stores:
            for entry in store.pin(self.digest(store), [key_of(number)]):
                if entry is not None:
                    store.unpin([entry])
                    store.invalidate(entry, "bad_sum")

    def _counts(self) -> Counter[str]:
        value = self.metrics().value
        return Counter(
            {name: int(value("kvxfer_store_chunks_total", outcome=name)) for name in (*OUTCOMES, "io", "gap")}
        )


class OneEngine(Face):
    def __init__(self, root: Path, stack: ExitStack, **config: Any) -> None:
        self.clock = ManualClock()
        self.node = stack.enter_context(Node(root, MODEL, clock=self.clock, writes=BUDGET, **SETTINGS, **config))
        self.engines = [self.node.writer]
        self.intakes, self.stores = [self.node.writer._intake], [self.node.store]
        self.metrics = self.node.writer.metrics  # type: ignore[method-assign]

    def begin(self, keys: list[bytes], blocks: list[int], access: Access) -> Callable[[], object]:
        job = self.node.next_job()
        self.node.writer.submit_store(job, keys, blocks, access=access)
        return lambda: self.node.writer.wait([job], 20)[job]

    def touch(self, keys: list[bytes], access: Access) -> None:
        self.node.writer.touch(keys, access)

    def queue(self, chunks: int) -> None:
        for engine in self.engines:
            engine._queued_chunks[STORE] += chunks

    def digest(self, store: Store) -> bytes:
        return next(engine.digest for engine in self.engines if engine._store is store)


class SeveralEngines(OneEngine):
    def __init__(self, root: Path, stack: ExitStack, **config: Any) -> None:
        super().__init__(root / "a", stack, **config)
        other = stack.enter_context(Node(root / "b", MODEL, clock=self.clock, writes=BUDGET, **SETTINGS, **config))
        self.nodes = [self.node, other]
        self.engines.append(other.writer)
        self.intakes.append(other.writer._intake)
        self.stores.append(other.store)
        if (names := self.node.config.second_touch_names) > 0:
            second_touch = SecondTouch(names)
            for intake in self.intakes:
                intake._second_touch = second_touch
        self.spread = SpreadEngine(self.engines, [1, 1])
        self.metrics = self.spread.metrics  # type: ignore[method-assign]
        self._job, self._results = 0, dict[int, TransferResult]()

    def begin(self, keys: list[bytes], blocks: list[int], access: Access) -> Callable[[], object]:
        self._job = job = self._job + 1
        self.spread.submit_store(job, keys, blocks, access=access)
        return lambda: self.results(job)

    def touch(self, keys: list[bytes], access: Access) -> None:
        self.spread.touch(keys, access)

    def results(self, *jobs: int) -> list[TransferResult]:
        """Of these jobs, once they have ended."""

        def ended() -> bool:
            self._results.update({result.job_id: result for result in self.spread.poll()})
            return self._results.keys() >= set(jobs)

        until(ended, "results")
        return [self._results.pop(job) for job in jobs]


class Ranks(Face):
    server_class = Server

    def __init__(self, root: Path, stack: ExitStack, **config: Any) -> None:
        self.clock = ManualClock()
        self.server = stack.enter_context(
            self.server_class(root, model=MODEL, clock=self.clock, writes=BUDGET, **SETTINGS, **config)
        )
        self.coordinator, self.coordinators = self.server.coordinator, self.server.coordinators
        self.intakes, self.stores = [each._intake for each in self.coordinators], self.server.stores
        self.accesses: list[Access] = []
        self.metrics = self.coordinator.metrics  # type: ignore[method-assign]

    def begin(self, keys: list[bytes], blocks: list[int], access: Access) -> Callable[[], object]:
        owner = self._owner(access)
        chosen, ticket = self.coordinator.store(keys, owner)
        if ticket is not None:
            self.server.group.submit(ticket, [blocks[keys.index(key)] for key in chosen])
        return self.server.settle

    def touch(self, keys: list[bytes], access: Access) -> None:
        self.coordinator.touch(keys, self._owner(access))

    def _owner(self, access: Access) -> str:
        """Has begun with it."""
        self.accesses.append(access)  # so that no other has its id
        self.coordinator.begin(str(id(access)), access)
        return str(id(access))

    def queue(self, chunks: int) -> None:
        for each in self.coordinators:
            each._queued[STORE] += chunks

    def ready(self) -> None:
        until(lambda: all(len(each._supply._free) >= 16 for each in self.coordinators), "slots are at hand")

    def digest(self, store: Store) -> bytes:
        return next(each.digest for each in self.coordinators if each._store is store)


class TwoRoots(Server):
    roots = 2


class SpreadRanks(Ranks):
    server_class = TwoRoots


FACES = {"engine": OneEngine, "spread": SeveralEngines, "ranks": Ranks, "spread ranks": SpreadRanks}


@contextmanager
def trouble(face: Face, why: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it lasts no store gets through, for this reason; afterwards all is well."""
    with ExitStack() as stack, monkeypatch.context() as patch:
        if why == "dropped":
            face.queue(1 << 20)
            stack.callback(face.queue, -(1 << 20))
        elif why == "off":
            for intake in face.intakes:
                intake.turn(False)
                stack.callback(intake.turn, True)
        elif why == "io":
            stack.enter_context(FaultyIO()).fail("pwrite", errno.EIO, offset=(4096, 1 << 40))
        elif why == "index":
            for store in face.stores:
                patch.setattr(store, "commit", refuse(store))
        elif why == "budget":
            for store in face.stores:
                assert store.write_budget is not None
                store.write_budget.take_some(SLOT.slot_bytes, 1 << 20)
            stack.callback(face.clock.advance, 3600)
        elif why == "backlog":
            for intake in face.intakes:
                patch.setattr(intake.backlog, "seconds", lambda: 9.0)
        elif why == "no_space":
            _fill(face, stack)
        else:
            assert why == "breaker"
            for intake in face.intakes:
                intake._breakers[STORE].fail(8)
            stack.callback(_close_breakers, face)
        yield


def refuse(store: Store) -> Callable[..., list[bool]]:
    def commit(digest: bytes, items: Sequence[Any], access: Access | None = None) -> list[bool]:
        store.release([slot for _, slot, _ in items])
        return [False] * len(items)

    return commit


def _fill(face: Face, stack: ExitStack) -> None:
    """Others hold all that is there, and have all the slots that are left."""
    stack.callback(face.ready)
    for store in face.stores:
        digest = face.digest(store)
        stack.callback(store.unpin, store.pin(digest, list(store.keys(digest))))
        stack.callback(store.release, store.reserve(digest, SLOT, 100_000))
    if isinstance(face, Ranks):
        for each in face.coordinators:
            stack.callback(each._store.release, each._supply.take(100_000))


def _close_breakers(face: Face) -> None:
    face.clock.advance(3600)
    for number in range(30, BLOCKS):  # other requests' stores are the probes
        face.put([number])
    assert all(intake._breakers[STORE].state() is BreakerState.CLOSED for intake in face.intakes)


def reserves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call that asks a store for slots, but for the coordinator's supply."""
    calls: list[int] = []
    reserve = Store.reserve

    def counting(store: Store, digest: bytes, slot: Any, n: int, access: Access | None = None) -> Any:
        calls.append(n)
        return reserve(store, digest, slot, n, access)

    monkeypatch.setattr(Store, "reserve", counting)
    return calls
