"""What every policy promises, beside what its model says (test_policy_models.py)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest

from kvxfer.errors import ConfigError
from kvxfer.policy import POLICIES as BY_NAME
from kvxfer.policy import ARCPolicy, CachePolicy, LRUPolicy, S3FIFOPolicy, make_policy
from kvxfer.policy.chains import LEAST_MISSING
from kvxfer.policy.order import Order


class Counted:
    """An entry that tells when anything looks at one."""

    looks: ClassVar[Counter[int]] = Counter()

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        Counted.looks[self.number] += 1
        return id(self)

    @property
    def digest(self) -> bytes:
        Counted.looks[self.number] += 1
        return b"digest"

    @property
    def key(self) -> bytes:
        return self.number.to_bytes(4, "big")


def itself(item: int) -> int:
    return item


POLICIES: dict[str, Callable[[], CachePolicy[int]]] = {
    name: partial(make_policy, name, name_of=itself) for name in BY_NAME
}
COUNTED: dict[str, Callable[[], CachePolicy[Counted]]] = {name: partial(make_policy, name) for name in BY_NAME}
policies = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
counted = pytest.mark.parametrize("make", COUNTED.values(), ids=COUNTED)


@policies
@pytest.mark.parametrize("n", [0, -3])
def test_no_victims_are_none(make: Callable[[], CachePolicy[int]], n: int) -> None:
    policy = make()
    policy.insert(1)
    assert policy.victims(n) == []


@policies
def test_what_was_used_is_not_the_next_victim(make: Callable[[], CachePolicy[int]]) -> None:
    policy = make()
    for item in range(10):
        policy.insert(item)
    for _ in range(2):  # S3-FIFO keeps what was used twice
        policy.touch(0)
    policy.pin(1)
    policy.touch(1)
    policy.touch(1)
    policy.unpin(1)
    assert policy.victims(7) == [2, 3, 4, 5, 6, 7, 8]


@policies
def test_a_pin_alone_is_no_use(make: Callable[[], CachePolicy[int]]) -> None:
    policy = make()
    for item in range(10):
        policy.insert(item)
    before = policy.victims(10)
    for item in (0, 3, 9, 3):
        policy.pin(item)
        policy.unpin(item)
    assert policy.victims(10) == before


def test_policies_are_made_by_their_names() -> None:
    made: dict[str, type[Any]] = {name: type(make_policy(name)) for name in BY_NAME}
    assert made == {"lru": LRUPolicy, "arc": ARCPolicy, "s3fifo": S3FIFOPolicy}
    with pytest.raises(ConfigError, match=r"policy='fifo' must be one of \['arc', 'lru', 's3fifo'\]"):
        make_policy("fifo")
    with pytest.raises(ValueError, match="capacity=0"):
        make_policy("s3fifo", capacity=0)


@counted
def test_victims_visit_what_they_return_however_many_are_pinned(make: Callable[[], CachePolicy[Counted]]) -> None:
    policy = make()
    items = [Counted(number) for number in range(5000)]
    for item in items:
        policy.insert(item)
    for item in items[:4000]:
        policy.pin(item)
    Counted.looks.clear()
    victims = policy.victims(10)
    assert victims == items[4000:4010]
    for item in victims:
        policy.remove(item)
    assert Counted.looks.keys() == set(range(4000, 4010)), "no other entry was looked at"
    assert policy.victims(10) == items[4010:4020]


@counted
def test_an_eviction_of_many_looks_at_each_as_often_as_an_eviction_of_few(
    make: Callable[[], CachePolicy[Counted]],
) -> None:
    def looks(held: int, n: int) -> float:
        policy = make()
        items = [Counted(number) for number in range(held)]
        for item in items:
            policy.insert(item)
        for item in items[::2]:
            policy.pin(item)
        Counted.looks.clear()
        for item in policy.victims(n):
            policy.remove(item)
        assert len(Counted.looks) == n
        return Counted.looks.total() / n

    assert looks(2000, 10) == looks(2000, 900) == looks(20_000, 10)


# ---- chains


Linked = Callable[[], CachePolicy[int]]


def chained(make: Linked, *chains: Sequence[int]) -> CachePolicy[int]:
    """A policy that knows these chains, of which beginnings may be shared."""
    policy, known = make(), set[int]()
    for chain in chains:
        for item in [item for item in chain if item not in known]:
            policy.insert(item)
            known.add(item)
        policy.chain(chain, chain)
    return policy


@policies
def test_tails_leave_before_heads_whole_chains_after_each_other(make: Linked) -> None:
    policy = chained(make, range(100), range(100, 200))
    assert policy.victims(200) == [*range(99, -1, -1), *range(199, 99, -1)]
    assert policy.victims(7) == [99, 98, 97, 96, 95, 94, 93]
    assert policy.unreachable == 0


@policies
def test_a_suffix_that_is_stored_later_does_not_outlive_its_prefix(make: Linked) -> None:
    policy = chained(make, range(5), range(100, 105))
    for item in range(5):
        policy.touch(item)
    for item in range(5, 10):
        policy.insert(item)
        policy.link(item, item - 1)
    gone: list[int] = []
    while victims := policy.victims(3):
        for victim in victims:
            policy.remove(victim)
        gone += victims
        assert policy.unreachable == 0
    assert [item for item in gone if item < 10] == list(range(9, -1, -1))


@policies
def test_a_shared_beginning_leaves_last(make: Linked) -> None:
    policy = chained(make, [0, 1, 2, 10, 11], [0, 1, 2, 20], [0, 1, 30])
    order = policy.victims(100)
    assert sorted(order) == [0, 1, 2, 10, 11, 20, 30]
    assert order[-2:] == [1, 0]
    assert order.index(2) > max(order.index(10), order.index(20))


@policies
def test_what_a_pinned_one_follows_stays_and_is_not_looked_at_again(make: Linked) -> None:
    policy = chained(make, range(50), [0, 1, 60, 61])
    policy.pin(49)
    assert policy.victims(100) == [61, 60]
    policy.pin(61)
    assert policy.victims(100) == []
    assert policy.first() is None
    policy.unpin(49)
    assert policy.victims(100) == list(range(49, 1, -1))


@counted
def test_a_batch_visits_two_for_each_that_it_names_in_chains_too(make: Callable[[], CachePolicy[Counted]]) -> None:
    policy = make()
    items = [Counted(number) for number in range(4000)]
    for start in range(0, 4000, 400):
        for item in items[start : start + 400]:
            policy.insert(item)
        for parent, item in itertools.pairwise(items[start : start + 400]):
            policy.link(item, parent)
    for item in items[399:2000:400]:
        policy.pin(item)  # the ends of the older half
    Counted.looks.clear()
    victims = policy.victims(600)
    for item in victims:
        policy.remove(item)
    assert victims == [*items[2399:1999:-1], *items[2799:2599:-1]]
    assert len(Counted.looks) <= 600 + 2, "beside these the ends of two chains that stay"


@policies
def test_chains_that_bite_their_tail_are_not_believed(make: Linked) -> None:
    policy = chained(make, range(6))
    policy.link(0, 5)
    policy.link(3, 3)
    policy.chain([4, 2, 5, 1, 0, 3, 0], [4, 2, 5, 1, 0, 3, 0])
    assert policy.victims(10) == [5, 4, 3, 2, 1, 0]


@policies
def test_what_comes_back_makes_what_follows_it_reachable(make: Linked) -> None:
    policy = chained(make, range(10), [4, 20, 21])
    policy.remove(2)
    policy.remove(7)
    assert policy.unreachable == len([3, 4, 5, 6, 8, 9, 20, 21])
    policy.insert(2)
    assert policy.unreachable == 2
    policy.insert(7)
    assert policy.unreachable == 0
    assert policy.victims(20)[-1] == 0


@policies
def test_a_gap_that_was_never_known_counts_too(make: Linked) -> None:
    policy = make()
    for item in (1, 2, 5, 6):
        policy.insert(item)
    policy.chain([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, None, None, 5, 6, None, None])
    assert policy.unreachable == 2
    assert policy.victims(10) == [6, 5, 2, 1]
    policy.insert(4)
    assert policy.unreachable == 3
    policy.insert(3)
    assert policy.unreachable == 0


@policies
def test_the_nearest_that_is_known_is_followed(make: Linked) -> None:
    policy = make()
    for item in range(6):
        policy.insert(item)
    assert policy.chain([0, 5], [0, 5])
    assert not policy.chain([3, 5], [3, 5]), "which of 0 and 3 is nearer?"
    assert policy.chain([0, 3], [0, 3])
    assert policy.chain([3, 5], [3, 5]), "3 is, since it follows 0"
    policy.remove(3)
    assert policy.unreachable == 1


@policies
def test_what_is_remembered_of_the_missing_is_bounded(make: Linked) -> None:
    policy = chained(make, range(10_000))
    for item in range(9000):  # heads first, as another process may evict them
        policy.remove(item)
    chains = policy._chains  # type: ignore[attr-defined]
    assert chains.missing <= max(LEAST_MISSING, 1000)
    assert len(chains) <= 1000 + LEAST_MISSING
    for item in range(9000, 10_000):
        policy.remove(item)
    assert (len(chains), chains.missing, policy.unreachable) == (0, 0, 0)


@policies
def test_what_comes_and_goes_leaves_nothing_behind(make: Linked) -> None:
    policy = make()
    rng, held = random.Random(2), dict[int, None]()
    for number in range(4000):
        if len(held) >= 50:
            for victim in policy.victims(rng.randrange(1, 20)):
                policy.remove(victim)
                del held[victim]
        policy.insert(number)
        held[number] = None
        if number % 7 and number - 1 in held:
            policy.link(number, number - 1)
        used = rng.choice(list(held))
        policy.pin(used)
        policy.touch(used)
        policy.unpin(used)
    chains = policy._chains  # type: ignore[attr-defined]
    orders = [part for part in vars(policy).values() if isinstance(part, Order)]
    assert sum(map(len, orders)) == len(held) == len(policy)
    assert len(chains) <= len(held)
    assert all(len(order._back) <= 2 * len(order._returned) + 65 for order in orders)
    assert not policy._pinned  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", BY_NAME)
def test_evictions_that_are_undone_in_any_order_leave_the_chain_as_it_was(policy: str) -> None:
    for removed in itertools.permutations(range(3)):
        for back in itertools.permutations(range(3)):
            made: CachePolicy[int] = make_policy(policy, name_of=lambda x: x)
            for item in range(3):
                made.insert(item)
            made.chain(range(3), range(3))
            victims = made.victims(3)
            for place in removed:
                made.remove(victims[place])
            for place in back:
                made.insert(victims[place])
            assert made.unreachable == 0
            assert made.victims(3) == [2, 1, 0]


@pytest.mark.parametrize("policy", BY_NAME)
def test_what_is_undone_follows_what_was_stored_anew_under_the_name_it_followed(policy: str) -> None:
    made: CachePolicy[tuple[int, int]] = make_policy(policy, name_of=lambda item: item[0])
    for number in range(2):
        made.insert((number, 0))
    made.link((1, 0), (0, 0))
    for victim in made.victims(2):
        made.remove(victim)
    made.insert((0, 1))
    made.insert((1, 0))
    assert made.unreachable == 0
    assert made.victims(2) == [(1, 0), (0, 1)]
