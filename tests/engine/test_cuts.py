"""A request's chain that was cut is not stored behind its gap, whatever cut it: one engine, several, and ranks."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

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

    def offer(self, keys: list[bytes], blocks: list[int], access: Access) -> None:
        """Store and wait."""
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
        self.offer([key_of(n, group) for n in numbers], list(numbers), access or Access())
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

    def offer(self, keys: list[bytes], blocks: list[int], access: Access) -> None:
        self.node.put(blocks, keys=keys, access=access)

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
        self.spread = SpreadEngine(self.engines, [1, 1])
        self.metrics = self.spread.metrics  # type: ignore[method-assign]
        self._job = 0

    def offer(self, keys: list[bytes], blocks: list[int], access: Access) -> None:
        self._job += 1
        self.spread.submit_store(self._job, keys, blocks, access=access)
        assert list(self.results(1)) == [self._job]

    def results(self, jobs: int) -> dict[int, TransferResult]:
        """Of so many jobs, once they have ended."""
        found: dict[int, TransferResult] = {}

        def ended() -> bool:
            found.update({result.job_id: result for result in self.spread.poll()})
            return len(found) >= jobs

        until(ended, "results")
        return found


class Ranks(Face):
    def __init__(self, root: Path, stack: ExitStack, **config: Any) -> None:
        self.clock = ManualClock()
        self.server = stack.enter_context(
            Server(root, model=MODEL, clock=self.clock, writes=BUDGET, **SETTINGS, **config)
        )
        self.coordinator = self.server.coordinator
        self.intakes, self.stores = [self.coordinator._intake], [self.server.store]
        self.metrics = self.coordinator.metrics  # type: ignore[method-assign]

    def offer(self, keys: list[bytes], blocks: list[int], access: Access) -> None:
        owner = str(id(access))
        self.coordinator.begin(owner, access)
        chosen, ticket = self.coordinator.store(keys, owner)
        if ticket is not None:
            self.server.group.submit(ticket, [blocks[keys.index(key)] for key in chosen])
            self.server.settle()

    def queue(self, chunks: int) -> None:
        self.coordinator._queued[STORE] += chunks

    def ready(self) -> None:
        until(lambda: len(self.coordinator._supply._free) >= 16, "slots are at hand")

    def digest(self, store: Store) -> bytes:
        return self.coordinator.digest


FACES = {"engine": OneEngine, "spread": SeveralEngines, "ranks": Ranks}


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Face]:
    with ExitStack() as stack:
        yield FACES[request.param](tmp_root, stack)


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
                patch.setattr(store, "commit", _refuse(store))
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


def _refuse(store: Store) -> Callable[..., list[bool]]:
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
        stack.callback(face.stores[0].release, face.coordinator._supply.take(100_000))


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


# ---- a gap and what comes behind it -----------------------------------------------------------------------------


@pytest.mark.parametrize("why", TRIED_AGAIN)
def test_nothing_is_stored_behind_a_gap_until_it_is_closed(
    face: Face, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Access()
    assert face.put([0, 1], one) == {"stored": 2}
    with trouble(face, why, monkeypatch):
        ended = face.put([2, 3], one)
        # Of several roots one may have failed before the other begins with its part.
        assert ended == {why: 2} or (ended == {why: 1, "gap": 1} and isinstance(face, SeveralEngines))
    assert face.put([4, 5], one) == {"gap": 2}
    assert face.put([0, 1, 5, 6], one) == {"present": 2, "gap": 2}, "what is there is there"
    assert face.there(range(9)) == [0, 1]
    assert face.put([2, 3, 4, 5], one) == {"stored": 4}, "offered again it is tried again"
    assert face.put([7], one) == {"gap": 1}, "6 was left out, being behind it"
    assert face.put([6, 7, 8], one) == {"stored": 3}


@pytest.mark.parametrize("why", SPARED)
def test_what_spares_the_storage_is_not_tried_again_for_the_request(
    face: Face, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Access(), Access()
    assert face.put([0, 1], one) == {"stored": 2}
    asked = reserves(monkeypatch)
    with trouble(face, why, monkeypatch):
        asked.clear()
        assert face.put(range(4), one) == {"present": 2, why: 2}
        for step in range(20):  # of a server that offers all of it with every step
            assert face.put(range(5 + step % 2), one) == {"present": 2, why: 3 + step % 2}
        if not isinstance(face, Ranks):  # whose supply asks for all, and as often as it likes
            each = len(face.stores) if why == "no_space" else 0
            assert bool(each) <= len(asked) <= each, "one look at each root at most"
    assert face.put(range(2, 6), one) == {why: 4}
    assert face.put(range(6), other) == {"present": 2, "stored": 4}, "another request's offer is another matter"
    assert face.put([6, 7], one) == {"stored": 2}, "now it is behind nothing"


@pytest.mark.parametrize("why", [*TRIED_AGAIN, *SPARED])
def test_a_gap_that_another_request_has_closed_is_none(face: Face, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Access()
    face.put([0], one)
    with trouble(face, why, monkeypatch):
        face.put([1, 2], one)
    assert face.put([1]) == {"stored": 1}
    assert face.put([3], one) != {"stored": 1}
    assert face.put([2, 3]) == {"stored": 2}
    assert face.put([4, 5], one) == {"stored": 2}


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("why", ["dropped", "io", "no_space"])
def test_what_comes_before_a_gap_is_stored(
    face: Face, why: str, positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Access(dict(zip(map(key_of, range(20)), range(20), strict=True)).get if positions else None)
    assert face.put(range(4), one) == {"stored": 4}
    with trouble(face, why, monkeypatch):
        face.put([4, 5], one)
    face.drop(1)
    assert face.put([1], one) == {"stored": 1}
    if positions:
        assert face.put([7, 6, 2], one) == {"present": 1, "gap" if why != "no_space" else why: 2}


def test_groups_have_gaps_of_their_own(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Access()
    with trouble(face, "dropped", monkeypatch):
        face.put([0, 1], one)
    assert face.put([2, 3], one) == {"gap": 2}
    assert face.put([4, 5], one, group=1) == {"stored": 2}


def test_what_was_not_admitted_is_a_gap_for_later_stores(tmp_root: Path) -> None:
    for name, make in FACES.items():
        with ExitStack() as stack:
            face, one = make(tmp_root / name, stack, second_touch_names=100), Access()
            face.put([0, 1])
            assert face.put([0, 1], one) == {"stored": 2}
            face.put([4, 5])
            if name == "spread":  # whose engines here remember apart
                continue
            assert face.put([2, 3], one) == {"not_admitted": 2}
            assert face.put([4, 5], one) == {"not_admitted": 2}, "known, and behind a gap"
            assert face.put([2, 3, 4, 5], one) == {"stored": 4}


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_nothing_new_lies_behind_a_gap(face: Face, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for prompts of one tree offer some of it again and go on, while anything may fail: what a store has
    written has nothing missing before it in its request, and one more request stores all."""
    rng = random.Random(seed)
    for _ in range(4):
        request, reached = Access(), 0
        for _ in range(6):
            first, last = rng.randint(0, reached), min(24, reached + rng.randint(1, 4))
            before = face.there(range(24))
            with ExitStack() as stack:
                if rng.random() < 0.4:
                    stack.enter_context(trouble(face, rng.choice((*TRIED_AGAIN, *SPARED)), monkeypatch))
                ended = face.put(range(first, last), request)
            assert sum(ended.values()) == last - first, "each is counted once"
            now = face.there(range(24))
            new = sorted(set(now) - set(before))
            assert not new or set(range(max(new))) <= set(now), (first, last, new, now)
            reached = last
    face.put(range(24))
    assert face.there(range(24)) == list(range(24))


# ---- within one store, and between roots ------------------------------------------------------------------------


def test_a_store_of_many_batches_asks_for_slots_once(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        face = OneEngine(tmp_root, stack)
        face.node.writer._writer._batch = 2
        asked = reserves(monkeypatch)
        with trouble(face, "no_space", monkeypatch):
            asked.clear()
            assert face.put(range(9)) == {"no_space": 9}
        assert asked == [2]
        assert face.put(range(9)) == {"stored": 9}


def test_what_another_root_has_queued_behind_a_gap_is_not_written(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        face, one = SeveralEngines(tmp_root, stack), Access()
        first, second = face.nodes
        io = stack.enter_context(FaultyIO())
        slab = io.hang("fallocate", times=1)
        second.writer.submit_store(100, [key_of(30)], [30])
        until(lambda: slab.hits == 1, "the second root's thread is held up")
        monkeypatch.setattr(first.store, "commit", _refuse(first.store))
        for job, numbers in enumerate(([0, 1, 2, 3, 4, 5], [6, 7])):
            face.spread.submit_store(job, [key_of(n) for n in numbers], numbers, access=one)
        until(lambda: len(first.writer._results) == 2, "the first root's parts have ended")
        io.release()
        second.writer.wait([100], 20)
        found = face.results(2)
        assert [error.status.name for error in found[0].errors] == ["INDEX", "GAP"] * 3
        assert face.there(range(8)) == [], "nor what was queued behind it on either"


def test_a_key_is_on_its_way_to_a_root_until_the_last_that_stores_it_there_has_ended(tmp_root: Path) -> None:
    with ExitStack() as stack:
        face = SeveralEngines(tmp_root, stack)
        io = stack.enter_context(FaultyIO())
        slab = io.hang("fallocate", times=1)
        face.nodes[0].writer.submit_store(100, [key_of(30)], [30])
        until(lambda: slab.hits == 1, "the first root's thread is held up")
        for job in (1, 2):
            face.spread.submit_store(job, [key_of(7)], [7])
        face.spread.cancel(1)
        assert list(face.results(1)) == [1]
        face.spread.submit_store(3, [key_of(7)], [7])
        io.release()
        face.nodes[0].writer.wait([100], 20)
        assert sorted(face.results(2)) == [2, 3]
        assert [len(store.keys(face.digest(store))) for store in face.stores] == [2, 0]
        assert not face.spread._under_way
