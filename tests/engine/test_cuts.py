"""A request's chain that was cut is not stored behind its gap, whatever cut it: engines and ranks, one root and two."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvxfer.store import Access
from kvxfer.testing import FaultyIO
from tests.engine.cuts_rig import (
    FACES,
    SPARED,
    TRIED_AGAIN,
    Face,
    OneEngine,
    Ranks,
    SeveralEngines,
    SpreadRanks,
    key_of,
    refuse,
    reserves,
    trouble,
)
from tests.jobs.test_faults import until


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Face]:
    with ExitStack() as stack:
        yield FACES[request.param](tmp_root, stack)


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
        assert ended == {why: 2} or (ended == {why: 1, "gap": 1} and len(face.stores) > 1)
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


def test_a_gap_that_another_request_has_under_way_is_none(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Access(), Access()
    with trouble(face, "dropped", monkeypatch):
        face.put([0, 1], other)
    with FaultyIO() as io:
        write = io.hang("pwrite", offset=(4096, 1 << 40))
        offers = [((0, 1), one), ((0, 1), other), ((2, 3), other)]
        waits = [face.begin([key_of(n) for n in numbers], list(numbers), access) for numbers, access in offers]
        until(lambda: write.hits > 0, "the first one's are being written")
        io.release()
        for wait in waits:
            wait()
    assert face.there(range(4)) == [0, 1, 2, 3]


def test_what_another_request_had_under_way_and_lost_is_a_gap_of_both(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Access(), Access()
    with trouble(face, "dropped", monkeypatch):
        face.put([0, 1], other)
    with FaultyIO() as io, monkeypatch.context() as patch:
        for store in face.stores:
            patch.setattr(store, "commit", refuse(store))
        write = io.hang("pwrite", offset=(4096, 1 << 40))
        waits = [face.begin([key_of(0), key_of(1)], [0, 1], access) for access in (one, other)]
        until(lambda: write.hits > 0, "the first one's are being written")
        io.release()
        for wait in waits:
            wait()
    assert face.there(range(2)) == []
    for access in (one, other):
        assert face.put([2, 3], access) == {"gap": 2}
    assert face.put(range(4), other) == {"stored": 4}


def test_what_was_touched_before_has_its_place(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that comes before a gap is not behind it, though it is offered later: the request's uses say so."""
    one = Access()
    assert face.put(range(8)) == {"stored": 8}
    face.touch([key_of(n) for n in range(8)], one)
    for number in (3, 6):
        face.drop(number)
    with trouble(face, "io", monkeypatch):
        assert face.put([6], one) == {"io": 1}
    assert face.put([3], one) == {"stored": 1}


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


def test_what_is_found_under_way_when_one_rank_has_failed_already_is_a_gap_too(tmp_root: Path) -> None:
    with ExitStack() as stack:
        face, one, late = Ranks(tmp_root, stack), Access(), Access()
        _, ticket = face.coordinator.store([key_of(0)])
        first, second = face.server.group.ranks
        with FaultyIO() as io:
            io.fail("pwrite", errno.EIO, offset=(4096, 1 << 40))
            first.submit(ticket, [0])
            until(lambda: bool(first.collect()), "the first rank has failed")
        face.coordinator.settle(first.report())
        face.begin([key_of(0)], [0], late)
        second.submit(ticket, [0])
        face.server.settle()
        assert face.there([0]) == [] and face.put([1], late) == {"gap": 1} and face.put([1], one) == {"stored": 1}


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
        monkeypatch.setattr(first.store, "commit", refuse(first.store))
        for job, numbers in enumerate(([0, 1, 2, 3, 4, 5], [6, 7])):
            face.spread.submit_store(job, [key_of(n) for n in numbers], numbers, access=one)
        until(lambda: len(first.writer._results) == 2, "the first root's parts have ended")
        io.release()
        second.writer.wait([100], 20)
        first_job, _ = face.results(0, 1)
        assert [error.status.name for error in first_job.errors] == ["INDEX", "GAP"] * 3
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
        face.results(1)
        face.spread.submit_store(3, [key_of(7)], [7])
        io.release()
        face.nodes[0].writer.wait([100], 20)
        face.results(2, 3)
        assert [len(store.keys(face.digest(store))) for store in face.stores] == [2, 0]
        assert not face.spread._under_way


# ---- over two roots ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["spread", "spread ranks"])
def two(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Face]:
    with ExitStack() as stack:
        yield FACES[request.param](tmp_root, stack, second_touch_names=getattr(request.function, "names", 0))


def second_touch(test: Callable[..., None]) -> Callable[..., None]:
    """The test's roots share a memory of what was offered."""
    test.names = 1000  # type: ignore[attr-defined]
    return test


@second_touch
def test_an_unknown_chunk_cuts_the_parts_of_all_roots(two: Face) -> None:
    """Whichever root decides first: the unknown one's is asked last here, being the one of later chunks alone."""
    one = Access()
    assert two.put([0, 1, 2, 4, 5]) == {"not_admitted": 5}
    assert two.put(range(6), one) == {"stored": 3, "not_admitted": 3}
    assert two.there(range(6)) == [0, 1, 2]
    assert two.put([6], one) == {"not_admitted": 1}
    assert two.put(range(7), one) == {"present": 3, "stored": 4}


def test_a_store_of_nobodys_is_one_request_over_all_roots_too(tmp_root: Path) -> None:
    with ExitStack() as stack:
        face = SpreadRanks(tmp_root, stack, second_touch_names=100)
        face.put([0, 1, 2, 4, 5])
        chosen, _ = face.coordinator.store([key_of(n) for n in range(6)], "nobody")
        assert chosen == [key_of(n) for n in range(3)]
        assert "nobody" not in face.coordinator._accesses
        assert not any("nobody" in each._accesses or "nobody" in each._failed for each in face.coordinators)


@pytest.mark.parametrize("positions", [False, True])
def test_a_gap_on_one_root_holds_back_what_follows_on_both_until_it_is_stored_on_either(
    two: Face, positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Access(dict(zip(map(key_of, range(20)), range(20), strict=True)).get if positions else None)
    with monkeypatch.context() as patch:
        patch.setattr(two.stores[1], "commit", refuse(two.stores[1]))
        two.put(range(6), one)
    assert set(two.there(range(6))) <= {0, 2, 4}, "the second root's failed"
    assert two.put([6, 7], one) == {"gap": 2}, "one for each root"
    assert two.put([0], one) in ({"present": 1}, {"stored": 1}), "what comes before it is not behind it"
    two.intakes[1].turn(False)
    assert sum(two.put([n for n in range(8) if n not in two.there(range(8))]).values()) >= 5, "another's, on the first"
    two.intakes[1].turn(True)
    assert two.there(range(8)) == list(range(8))
    assert two.put([8, 9], one) == {"stored": 2}


@pytest.mark.parametrize("root", [0, 1])
def test_what_a_root_raised_is_a_gap_with_all_that_was_offered_beside_it(
    two: Face, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is tried when it is offered again: none of it is there, whatever the other root had begun."""
    one = Access()

    def raises(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        if isinstance(two, SpreadRanks):
            patch.setattr(two.coordinators[root], "store", raises)
        else:
            assert isinstance(two, SeveralEngines)
            patch.setattr(two.engines[root], "_accept", raises)
        if root == 0 or isinstance(two, SpreadRanks):
            with pytest.raises(RuntimeError, match="a defect"):
                two.put(range(4), one)
        else:
            two.put(range(4), one)
    assert set(two.there(range(4))) <= ({0, 2} if isinstance(two, SeveralEngines) and root == 1 else set())
    assert two.put([4, 5], one) == {"gap": 2}
    two.put(range(6), one)
    assert two.there(range(6)) == list(range(6))
