"""Adaptive replacement against the paper: caches that are asked for things. (Its lists: test_policy_models.py.)"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest

from kvxfer.policy import ARCPolicy, CachePolicy, LRUPolicy, chunk_name

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
