"""What every policy promises, and the order of the least recently used against a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.policy import ARCPolicy, CachePolicy, LRUPolicy

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "touch", "pin", "unpin", "remove", "victims"]), st.integers(0, 9)), max_size=80
)


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


POLICIES: dict[str, Callable[[], CachePolicy[int]]] = {"lru": LRUPolicy, "arc": lambda: ARCPolicy(name_of=itself)}
COUNTED: dict[str, Callable[[], CachePolicy[Counted]]] = {"lru": LRUPolicy, "arc": ARCPolicy}
policies = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
counted = pytest.mark.parametrize("make", COUNTED.values(), ids=COUNTED)


@given(OPERATIONS)
def test_lru_is_a_list_with_the_pinned_ones_taken_out(operations: list[tuple[str, int]]) -> None:
    policy: LRUPolicy[int] = LRUPolicy()
    order: list[int] = []
    pinned: set[int] = set()
    for operation, item in operations:
        held = item in order
        if operation == "insert" and not held and item not in pinned:
            policy.insert(item)
            order.append(item)
        elif operation == "touch" and (held or item in pinned):
            policy.touch(item)
            order = [other for other in order if other != item] + [item] * held
        elif operation == "pin" and held:
            policy.pin(item)
            order.remove(item)
            pinned.add(item)
        elif operation == "unpin" and item in pinned:
            policy.unpin(item)
            pinned.remove(item)
            order.append(item)
        elif operation == "remove" and (held or item in pinned):
            policy.remove(item)
            order = [other for other in order if other != item]
            pinned.discard(item)
        elif operation == "victims":
            assert policy.victims(item) == order[:item]
        assert len(policy) == len(order)
    assert policy.victims(100) == order


@policies
@given(operations=OPERATIONS)
def test_victims_are_held_entries_each_once(
    make: Callable[[], CachePolicy[int]], operations: list[tuple[str, int]]
) -> None:
    policy, held, pinned = make(), set[int](), set[int]()
    for operation, item in operations:
        if operation == "insert" and item not in held | pinned:
            policy.insert(item)
            held.add(item)
        elif operation == "touch" and item in held | pinned:
            policy.touch(item)
        elif operation == "pin" and item in held:
            policy.pin(item)
            held.remove(item)
            pinned.add(item)
        elif operation == "unpin" and item in pinned:
            policy.unpin(item)
            pinned.remove(item)
            held.add(item)
        elif operation == "remove" and item in held | pinned:
            policy.remove(item)
            held.discard(item)
            pinned.discard(item)
        elif operation == "victims":
            everyone = policy.victims(100)
            assert sorted(everyone) == sorted(held)
            assert policy.victims(item) == everyone[:item], "asking changes nothing, and for fewer gives the first"
        assert len(policy) == len(held)
    assert sorted(policy.victims(100)) == sorted(held)


@policies
@pytest.mark.parametrize("n", [0, -3])
def test_no_victims_are_none(make: Callable[[], CachePolicy[int]], n: int) -> None:
    policy = make()
    policy.insert(1)
    assert policy.victims(n) == []


@policies
def test_what_was_just_inserted_or_used_is_not_the_next_victim(make: Callable[[], CachePolicy[int]]) -> None:
    policy = make()
    for item in range(10):
        policy.insert(item)
    policy.touch(0)
    policy.pin(1)
    policy.unpin(1)
    assert policy.victims(7) == [2, 3, 4, 5, 6, 7, 8]


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
