"""Order of eviction, against a list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.policy import LRUPolicy

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "touch", "pin", "unpin", "remove", "victims"]), st.integers(0, 9)), max_size=80
)


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


@pytest.mark.parametrize("n", [0, -3])
def test_no_victims_are_none(n: int) -> None:
    policy: LRUPolicy[str] = LRUPolicy()
    policy.insert("a")
    assert policy.victims(n) == []


def test_victims_visit_what_they_return_however_many_are_pinned() -> None:
    class Counted:
        looks = 0

        def __hash__(self) -> int:
            Counted.looks += 1
            return id(self)

    policy: LRUPolicy[Counted] = LRUPolicy()
    items = [Counted() for _ in range(5000)]
    for item in items:
        policy.insert(item)
    for item in items[:4000]:
        policy.pin(item)
    Counted.looks = 0
    assert policy.victims(10) == items[4000:4010]
    assert Counted.looks <= 10
