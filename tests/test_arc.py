"""Adaptive replacement against the paper: an oracle of plain lists, and caches that are asked for things."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.policy import ARCPolicy, CachePolicy, LRUPolicy, chunk_name


class Lists:
    """The paper's T1, T2, B1, B2 and p, as lists with the least recent first, and what is pinned beside them."""

    def __init__(self, capacity: int | None) -> None:
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.pinned: list[int] = []
        self.p = 0.0
        self.fixed, self.peak = capacity, 0

    @property
    def c(self) -> int:
        return self.fixed or self.peak

    def known(self) -> list[int]:
        return self.t1 + self.t2 + self.pinned

    def insert(self, x: int) -> None:
        self.peak = max(self.peak, len(self.known()) + 1)
        if x in self.b1:
            delta = 1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            self.t2.append(x)
        elif x in self.b2:
            delta = 1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            self.t2.append(x)
        else:
            self.t1.append(x)
        self.b1 = [y for y in self.b1 if y != x]
        self.b2 = [y for y in self.b2 if y != x]
        self.forget()

    def use(self, x: int) -> None:
        if x not in self.pinned:
            self.t1 = [y for y in self.t1 if y != x]
            self.t2 = [y for y in self.t2 if y != x] + [x]

    def pin(self, x: int) -> None:
        self.t1 = [y for y in self.t1 if y != x]
        self.t2 = [y for y in self.t2 if y != x]
        self.pinned.append(x)

    def unpin(self, x: int) -> None:
        self.pinned.remove(x)
        self.t2.append(x)

    def drop(self, x: int) -> None:
        self.t1, self.t2, self.pinned = ([y for y in part if y != x] for part in (self.t1, self.t2, self.pinned))

    def replace(self) -> int:
        """One victim; its name is remembered."""
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            self.b1.append(self.t1.pop(0))
            victim = self.b1[-1]
        else:
            self.b2.append(self.t2.pop(0))
            victim = self.b2[-1]
        self.forget()
        return victim

    def undo(self, x: int) -> None:
        """`x` was evicted and stays after all."""
        (self.t1 if x in self.b1 else self.t2).append(x)
        self.b1 = [y for y in self.b1 if y != x]
        self.b2 = [y for y in self.b2 if y != x]
        self.peak = max(self.peak, len(self.known()))
        self.forget()

    def forget(self) -> None:
        """|T1| + |B1| <= c and |B1| + |B2| <= c; B2 gives first where both are too long."""
        self.b1 = self.b1[max(0, len(self.t1) + len(self.b1) - self.c) :]
        self.b2 = self.b2[max(0, len(self.b1) + len(self.b2) - self.c) :]
        self.b1 = self.b1[max(0, len(self.b1) + len(self.b2) - self.c) :]


class ArcMachine(RuleBasedStateMachine):
    """Whatever is done in whatever order, the policy is the lists."""

    capacity: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.policy: ARCPolicy[int] = ARCPolicy(name_of=lambda item: item, capacity=self.capacity)
        self.lists = Lists(self.capacity)
        self.given_up: list[int] = []  # by the latest step, in case that it is undone

    @rule(items=st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True))
    def insert(self, items: list[int]) -> None:
        for item in items:
            if item not in self.lists.known() and item not in self.given_up:
                self.policy.insert(item)
                self.lists.insert(item)

    @precondition(lambda self: self.lists.known())
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.lists.known()))
        self.policy.touch(item)
        self.lists.use(item)

    @precondition(lambda self: self.lists.t1 or self.lists.t2)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.lists.t1 + self.lists.t2))
        self.policy.pin(item)
        self.lists.pin(item)

    @precondition(lambda self: self.lists.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.lists.pinned))
        self.policy.unpin(item)
        self.lists.unpin(item)

    @precondition(lambda self: self.lists.known())
    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.lists.known()))
        self.policy.touch(item)  # whatever was named before, this is no eviction
        self.lists.use(item)
        self.policy.remove(item)
        self.lists.drop(item)

    @precondition(lambda self: self.lists.t1 or self.lists.t2)
    @rule(n=st.integers(1, 12))
    def evict(self, n: int) -> None:
        victims = self.policy.victims(n)
        for victim in victims:
            self.policy.remove(victim)
        held = len(self.lists.t1) + len(self.lists.t2)
        self.given_up = [self.lists.replace() for _ in range(min(n, held))]
        assert victims == self.given_up

    @precondition(lambda self: self.given_up)
    @rule()
    def undo(self) -> None:
        remembered = self.lists.b1 + self.lists.b2
        if all(item in remembered for item in self.given_up):  # else the lists do not know any more where from
            for item in self.given_up:
                self.policy.insert(item)
                self.lists.undo(item)
            self.given_up = []

    @rule()
    def forget_what_could_be_undone(self) -> None:
        self.policy.victims(1)
        self.given_up = []

    @invariant()
    def the_order_is_the_lists(self) -> None:
        policy, lists = copy.deepcopy(self.policy), copy.deepcopy(self.lists)  # to ask is to name
        held = len(lists.t1) + len(lists.t2)
        assert len(policy) == held
        assert policy.victims(100) == [lists.replace() for _ in range(held)]

    @invariant()
    def the_target_and_the_ghosts_are_the_lists(self) -> None:
        assert self.policy.target == self.lists.p
        assert self.policy.capacity == self.lists.c
        assert self.policy.ghosts == len(self.lists.b1) + len(self.lists.b2) <= self.lists.c
        assert 0 <= self.policy.target <= self.policy.capacity


class SmallArcMachine(ArcMachine):
    """With a capacity that is often less than what is held."""

    capacity = 5


ArcMachine.TestCase.settings = SmallArcMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestArc = ArcMachine.TestCase
TestSmallArc = SmallArcMachine.TestCase


# ---- caches that are asked for things


def hits(make: Callable[[], CachePolicy[int]], capacity: int, requests: Iterable[int]) -> int:
    """How many of the requests find what they ask for in a store that makes room as kvxfer's does."""
    policy, held, found = make(), set[int](), 0
    for x in requests:
        if x in held:
            found += 1
            policy.touch(x)
            continue
        if len(held) == capacity:
            for victim in policy.victims(1):
                policy.remove(victim)
                held.remove(victim)
        policy.insert(x)
        held.add(x)
    return found


def paper_hits(c: int, requests: Iterable[int]) -> int:
    """The same for ARC(c) as figure 4 of the paper has it, case by case."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p, found = 0.0, 0

    def replace(x: int) -> None:
        if t1 and ((x in b2 and len(t1) == p) or len(t1) > p):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in requests:
        if x in t1 or x in t2:  # case I
            found += 1
            (t1 if x in t1 else t2).remove(x)
        elif x in b1:  # case II
            p = min(p + max(1, len(b2) / len(b1)), c)
            replace(x)
            b1.remove(x)
        elif x in b2:  # case III
            p = max(p - max(1, len(b1) / len(b2)), 0)
            replace(x)
            b2.remove(x)
        else:  # case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif (total := len(t1) + len(t2) + len(b1) + len(b2)) >= c:
                if total == 2 * c:
                    b2.pop(0)
                replace(x)
            t1.append(x)
            continue
        t2.append(x)
    return found


def zipf(rng: random.Random, count: int, distinct: int) -> list[int]:
    weights = [1 / (rank + 1) for rank in range(distinct)]
    return rng.choices(range(distinct), weights, k=count)


def with_scans(rng: random.Random) -> Iterator[int]:
    """A working set that is used over and over, and now and then a long run of what never comes back."""
    fresh = 10_000
    for _ in range(40):
        yield from rng.choices(range(60), k=200)
        yield from range(fresh, fresh + 150)
        fresh += 150


def changing(rng: random.Random) -> Iterator[int]:
    """By turns what is recent and what is frequent pays."""
    for phase in range(8):
        if phase % 2:
            yield from (rng.randrange(90) + 1000 * phase for _ in range(1500))
        else:
            yield from zipf(rng, 1500, 400)


def arc() -> ARCPolicy[int]:
    return ARCPolicy(name_of=lambda item: item)


def test_a_scan_does_not_wash_out_what_is_used_again_and_again() -> None:
    policy = arc()
    for item in range(50):
        policy.insert(item)
        policy.touch(item)
    for item in range(1000, 1050):
        policy.insert(item)
    held = set(policy.victims(100))
    for item in range(2000, 12_000):
        (victim,) = policy.victims(1)
        policy.remove(victim)
        held.remove(victim)
        policy.insert(item)
        held.add(item)
    assert held >= set(range(50))
    assert policy.ghosts <= 100


def test_between_scans_arc_keeps_what_lru_loses() -> None:
    by_arc, by_lru = (hits(make, 100, with_scans(random.Random(1))) for make in (arc, LRUPolicy))
    assert by_arc > 1.2 * by_lru


@pytest.mark.parametrize("capacity", [8, 50, 100])
@pytest.mark.parametrize(
    "trace", [with_scans, changing, lambda rng: zipf(rng, 8000, 600)], ids=["scans", "turns", "zipf"]
)
def test_it_finds_as_much_as_the_papers(trace: Callable[[random.Random], Iterable[int]], capacity: int) -> None:
    """Room made before it is known for whom costs next to nothing."""
    requests = list(trace(random.Random(capacity)))
    mine, papers = hits(arc, capacity, requests), paper_hits(capacity, requests)
    assert abs(mine - papers) <= 0.02 * len(requests), (mine, papers, len(requests))


def test_the_target_follows_the_ghosts_that_come_back() -> None:
    policy = arc()
    for item in range(10):
        policy.insert(item)
    for victim in policy.victims(4):
        policy.remove(victim)
    assert (policy.ghosts, policy.target) == (4, 0)
    policy.victims(0)  # from here on the evictions cannot be undone any more
    policy.insert(0)
    assert (policy.ghosts, policy.target) == (3, 1)
    policy.insert(50)
    assert policy.target == 1, "what is new says nothing"


# ---- what counts as an eviction


def test_only_evictions_are_remembered() -> None:
    policy = arc()
    for item in range(8):
        policy.insert(item)
    policy.remove(0)  # never named
    policy.victims(2)
    policy.touch(1)
    policy.remove(1)  # named, and used since
    policy.victims(1)
    policy.remove(7)  # another one
    policy.remove(2)  # named, but not by the call before
    assert policy.ghosts == 0
    policy.pin(3)
    policy.victims(100)
    policy.remove(3)  # pinned: no victim
    assert policy.ghosts == 0
    for victim in policy.victims(2):
        policy.remove(victim)
    assert policy.ghosts == 2


def test_an_eviction_that_is_undone_was_none() -> None:
    policy = arc()
    for item in range(6):
        policy.insert(item)
    for item in (4, 5):
        policy.touch(item)
    evicted = policy.victims(6)
    for item in evicted:
        policy.remove(item)
    for item in evicted:
        policy.insert(item)
    assert (policy.ghosts, policy.target) == (0, 0)
    assert policy.victims(6) == evicted == [0, 1, 2, 3, 4, 5]


def test_an_entry_is_remembered_by_namespace_and_key_and_compared_by_identity() -> None:
    class Chunk:
        def __init__(self, digest: bytes, key: bytes) -> None:
            self.digest, self.key = digest, key

    policy: ARCPolicy[Chunk] = ARCPolicy(capacity=10)
    for n in range(4):
        policy.insert(Chunk(b"mine", bytes([n])))
    (victim,) = policy.victims(1)
    policy.remove(victim)
    assert chunk_name(victim) == (b"mine", b"\0")
    policy.insert(Chunk(b"yours", b"\0"))
    assert (policy.ghosts, policy.target) == (1, 0), "the same key of another namespace is another chunk"
    again = Chunk(b"mine", b"\0")
    policy.insert(again)
    assert (policy.ghosts, policy.target) == (0, 1)
    assert [entry for entry in policy.victims(10) if entry is again] == [again]
    assert victim not in policy.victims(10)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_of_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity={capacity}"):
        ARCPolicy(capacity=capacity)


def test_ghosts_are_bounded_however_much_goes_through() -> None:
    policy: ARCPolicy[int] = ARCPolicy(name_of=lambda item: item)
    rng, held, most = random.Random(3), set[int](), 0
    for _ in range(5000):
        item = rng.randrange(200)
        if item in held:
            policy.touch(item)
            continue
        if len(held) >= 64:
            for victim in policy.victims(rng.randrange(1, 40)):
                policy.remove(victim)
                held.remove(victim)
        policy.insert(item)
        held.add(item)
        most = max(most, policy.ghosts)
    assert 32 < most <= policy.capacity == 64
