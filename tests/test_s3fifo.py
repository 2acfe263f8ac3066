"""S3-FIFO against the paper: caches that are asked for things. (Its queues: test_policy_models.py.)"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from kvxfer.policy import LRUPolicy, S3FIFOPolicy
from tests.test_arc import changing, hits, with_scans, zipf


def s3fifo() -> S3FIFOPolicy[int]:
    return S3FIFOPolicy(name_of=lambda item: item)


def paper_hits(c: int, requests: Iterable[int]) -> int:
    """Algorithm 1 of the paper: room is made when it is known for whom, and before its ghost is looked at."""
    small: list[int] = []
    main: list[int] = []
    ghosts: list[int] = []
    uses: dict[int, int] = {}
    found = 0

    def evict_main() -> None:
        while True:
            x = main.pop(0)
            if not uses[x]:
                del uses[x]
                return
            uses[x] -= 1
            main.append(x)

    def evict_small() -> None:
        while small:
            x = small.pop(0)
            if uses[x] <= 1:
                ghosts.append(x)
                del uses[x], ghosts[: max(0, len(ghosts) - (c - max(1, c // 10)))]
                return
            uses[x] = 0
            main.append(x)
            if len(main) > c - max(1, c // 10):
                evict_main()
                return

    for x in requests:
        if x in uses:
            found += 1
            uses[x] = min(3, uses[x] + 1)
            continue
        while len(uses) >= c:
            if len(small) >= max(1, c // 10) or not main:
                evict_small()
            else:
                evict_main()
        if x in ghosts:
            ghosts.remove(x)
            main.append(x)
        else:
            small.append(x)
        uses[x] = 0
    return found


@pytest.mark.parametrize("capacity", [10, 50, 100])
@pytest.mark.parametrize(
    "trace", [with_scans, changing, lambda rng: zipf(rng, 8000, 600)], ids=["scans", "turns", "zipf"]
)
def test_it_finds_as_much_as_the_papers(trace: Callable[[random.Random], Iterable[int]], capacity: int) -> None:
    requests = list(trace(random.Random(capacity)))
    mine, papers = hits(s3fifo, capacity, requests), paper_hits(capacity, requests)
    assert abs(mine - papers) <= 0.03 * len(requests), (mine, papers, len(requests))


def test_between_scans_it_keeps_what_lru_loses() -> None:
    mine, by_lru = (hits(make, 100, with_scans(random.Random(1))) for make in (s3fifo, LRUPolicy))
    assert mine > 1.2 * by_lru


def test_what_was_used_once_on_probation_goes_and_is_kept_when_it_comes_back() -> None:
    policy = S3FIFOPolicy(name_of=lambda item: item, capacity=20)
    for item in range(20):
        policy.insert(item)
    policy.touch(0)
    policy.touch(1)
    policy.touch(1)
    assert policy.victims(2) == [0, 2], "used once is not enough, used twice is"
    for item in (0, 2):
        policy.remove(item)
    assert policy.ghosts == 2
    policy.victims(0)
    policy.insert(2)
    assert policy.ghosts == 1
    assert policy.victims(20) == [*range(3, 19), 1, 2, 19], "1 and 2 are in the main queue by now; 19 is on probation"


def test_three_uses_count_and_no_more() -> None:
    policy = S3FIFOPolicy(name_of=lambda item: item, capacity=10)
    for item in range(3):
        policy.insert(item)
        policy.touch(item)
        policy.touch(item)
    policy.victims(0)
    assert policy.victims(3) == [0, 1, 2], "all have come into the main queue, and lost their count"
    for _ in range(50):
        policy.touch(1)
    policy.touch(0)
    assert policy.victims(3) == [2, 0, 1]
    policy.touch(2)  # whatever was named is put back
    for _ in range(3):
        policy.touch(0)
    assert policy.victims(3) == [1, 2, 0]
