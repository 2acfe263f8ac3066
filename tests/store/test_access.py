"""A request's uses of a chunk are one, through whichever calls it makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.coordinator import Coordinator
from kvxfer.policy import POLICIES, LRUPolicy
from kvxfer.policy.order import Order
from kvxfer.store import Access, Gaps, Store
from kvxfer.tickets import Report, Settled, Ticket
from tests.engine.rig import GEOMETRY, Node, keys_of
from tests.oracle import Model
from tests.store import rig

MODEL = Model.random(GEOMETRY, 40)
named = pytest.mark.parametrize("policy", POLICIES)


def state_of(store: Store) -> list[Any]:
    """What the policy knows: its orders, each the oldest first, and how often each entry was used."""
    (policy,) = {id(slab.policy): slab.policy for slab in store._table.slabs()}.values()
    policy = getattr(policy, "_policy", policy)  # a watched one
    orders = [part for part in vars(policy).values() if isinstance(part, Order)]
    numbers = [{**order._listed, **order._returned, **order._hidden} for order in orders]
    uses = {entry.key: count for entry, count in getattr(policy, "_uses", {}).items()}
    return [[[entry.key for entry in sorted(each, key=each.__getitem__)] for each in numbers], uses]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    """node(policy): a store of a prompt of 8 chunks and another one, each stored by a job of its own."""
    with ExitStack() as stack:

        def make(policy: str) -> Node:
            made = stack.enter_context(Node(tmp_path / str(len(list(tmp_path.iterdir()))), MODEL, policy=policy))
            assert made.put(range(8)).bitmap.all()
            assert made.put(range(20, 28)).bitmap.all()
            return made

        yield make


def touch(node: Node, access: Access | None) -> None:
    """By the thread for stores, which has done it when a store after it has ended."""
    node.writer.touch(keys_of(range(8)), access)


@named
def test_a_request_that_does_everything_leaves_what_one_touch_leaves(node: Callable[[str], Node], policy: str) -> None:
    once, often = node(policy), node(policy)
    touch(once, None)
    assert once.put([30]).bitmap.all()

    request = Access()
    touch(often, request)
    assert often.put([30]).bitmap.all()
    for _ in range(3):
        assert often.reader.lookup(keys_of(range(8))) == 8
        often.poison()
        assert often.get(range(8), access=request).bitmap.all()
        assert often.put(range(8), access=request).bitmap.all()  # all of it is there
        touch(often, request)
    assert often.put(range(30, 31), access=Access()).bitmap.all()
    once.writer.touch(keys_of([30]))
    assert once.put([31]).bitmap.all()
    assert often.put([31]).bitmap.all()
    assert state_of(often.store) == state_of(once.store)


@named
def test_another_request_is_another_use(node: Callable[[str], Node], policy: str) -> None:
    one, two = node(policy), node(policy)
    for each, requests in ((one, 1), (two, 2)):
        for _ in range(requests):
            assert each.get(range(20, 28)).bitmap.all()
            assert each.get(range(8)).bitmap.all()
    assert (state_of(one.store) == state_of(two.store)) is (policy != "s3fifo"), "only a count can tell"


@named
def test_what_a_request_has_stored_it_has_used(node: Callable[[str], Node], policy: str) -> None:
    stored, used = node(policy), node(policy)
    request = Access()
    assert stored.put(range(30, 34), access=request).bitmap.all()
    assert used.put(range(30, 34)).bitmap.all()
    before = state_of(stored.store)
    assert before == state_of(used.store)
    assert len(max(before[0], key=len)) == len(stored.store.keys(stored.digest)), "all are in the order of the new"
    assert before[1] == {}, "that was a store, and no use beside it"
    assert stored.get(range(30, 34), access=request).bitmap.all()
    touch_all = keys_of(range(30, 34))
    stored.store.touch(stored.digest, touch_all, request)
    assert state_of(stored.store) == before


@named
def test_the_coordinators_calls_of_one_owner_are_one_use(tmp_path: Path, policy: str) -> None:
    def coordinate(root: Path, request: Callable[[Coordinator, Store, list[bytes]], None]) -> list[Any]:
        with Store.open(rig.config(root, policy=policy)) as store:
            digest = store.register(rig.namespace(), rig.ROW)
            names = [rig.key(3 * n) for n in range(8)]
            assert all(rig.put(store, digest, names))
            assert all(rig.put(store, digest, [rig.key(3 * n) for n in range(20, 28)]))
            one = Coordinator(store, rig.namespace(), rig.ROW, ranks=1)
            try:
                request(one, store, names)
                return state_of(store)
            finally:
                one.shutdown()

    def everything(one: Coordinator, store: Store, names: list[bytes]) -> None:
        one.begin("a")
        for _ in range(2):
            one.touch(names, "a")
            assert all(one.lookup(name, "a") for name in names)
            ticket = one.load(names, "a")
            one.settle(_settled(ticket))
            assert one.store(names, "a") == ([], None)
        one.end("a")

    touched = coordinate(tmp_path / "one", lambda one, store, names: one.touch(names))
    assert coordinate(tmp_path / "all", everything) == touched


def _settled(ticket: Ticket) -> Report:
    return Report(settled={ticket.number: Settled(ranks=1)})


def test_a_touch_without_a_request_is_one_by_itself(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, touched = node("lru"), []
    monkeypatch.setattr(LRUPolicy, "touch", lambda policy, entry: touched.append(entry.key))
    keys = keys_of(range(4))
    one.store.touch(one.digest, [*keys, *keys])
    assert touched == keys
    one.store.touch(one.digest, keys)
    assert touched == 2 * keys


# ---- the order of keys


def before(access: Access, keys: list[bytes]) -> list[bytes | None]:
    return [access.before(key) for key in keys]


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(8, "big") + group.to_bytes(4, "big")


def test_a_call_follows_what_was_asked_for_before() -> None:
    k = [key(n) for n in range(10)]
    access = Access().place(k[:4])
    assert before(access, k[:5]) == [None, *k[:3], None]
    access.place(k[4:6])
    access.place(k[:2])  # again, from the start
    access.place(k[6:8])
    assert before(access, k[:9]) == [None, *k[:7], None]


def test_groups_are_chains_by_themselves() -> None:
    mixed = [key(n, group) for n in range(4) for group in (0, 1)]
    access = Access().place(mixed)
    assert before(access, mixed) == [None, None, *mixed[:-2]]


def test_what_came_in_between_is_followed() -> None:
    k = [key(n) for n in range(6)]
    access = Access().place([k[0], k[4], k[5]])
    assert before(access, k) == [None, None, None, None, k[0], k[4]]
    access.place(k)
    assert before(access, k) == [None, *k[:5]]


def test_with_positions_keys_may_come_in_any_order() -> None:
    k = [key(n) for n in range(8)]
    places = {name: 64 * (n + 1) for n, name in enumerate(k[:7])}
    access = Access(places.get).place([k[5], k[3], k[4], k[7]])
    assert before(access, k) == [None, None, None, None, k[3], k[4], None, None]
    access.place([k[1], k[0]])
    access.place([k[6]])
    assert before(access, k) == [None, k[0], None, None, k[3], k[4], k[5], None]


@pytest.mark.parametrize("positions", [False, True])
def test_keys_are_put_in_the_order_of_the_request_and_what_is_not_known_comes_last(positions: bool) -> None:
    k = [key(n) for n in range(8)]
    places = {name: 64 * (n + 1) for n, name in enumerate(k[:6])}
    access = Access(places.get if positions else None).place(k[:6])
    mixed = [k[7], k[5], k[0], k[6], k[3]]
    assert [mixed[n] for n in access.order(mixed)] == [k[0], k[3], k[5], k[7], k[6]]
    assert access.order([]) == [] and access.order([k[7]]) == [0]


def test_what_is_asked_for_behind_what_is_known_comes_behind_all_of_it() -> None:
    k = [key(n) for n in range(6)]
    access = Access().place(k[:4])
    access.place([k[1], k[4]])
    assert before(access, k[:5]) == [None, *k[:4]]


def test_parts_of_a_request_in_several_stores_know_their_own_keys() -> None:
    k = [key(n) for n in range(6)]
    access = Access()
    access.part(0).place(k[::2])
    access.part(1).place(k[1::2])
    access.part(0).place([])
    assert before(access.part(0), k[::2]) == [None, k[0], k[2]]
    assert before(access.part(1), k[1::2]) == [None, k[1], k[3]]
    assert access.part(0).use(k[0]) and not access.part(0).use(k[0]) and access.part(1).use(k[0])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=12), st.booleans())
def test_whatever_is_asked_for_nothing_follows_itself(calls: list[list[int]], positions: bool) -> None:
    access = Access((lambda name: int.from_bytes(name[:8], "big") // 2) if positions else None)
    for numbers in calls:
        access.place([key(n) for n in numbers])
    for n in range(10):
        at, steps = access.before(key(n)), 0
        while at is not None:
            at, steps = access.before(at), steps + 1
            assert steps < 10


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("open close store ask".split()), st.integers(0, 9), st.integers(0, 1)), max_size=40
    ),
    st.booleans(),
)
def test_a_chunk_is_behind_a_gap_if_one_of_its_group_comes_before_it(
    steps: list[tuple[str, int, int]], positions: bool
) -> None:
    everything = [key(n, group) for n in range(10) for group in (0, 1)]
    access = Access((lambda name: int.from_bytes(name[:8], "big")) if positions else None).place(everything)
    gaps, stored, model = access.gaps, set[bytes](), dict[bytes, int]()
    for what, number, group in steps:
        name = key(number, group)
        if what == "open":
            gaps.open(name, number)
            model[name] = number
            stored.discard(name)
        elif what == "close":
            gaps.close(name)
            model.pop(name, None)
        elif what == "store":
            stored.add(name)
        else:
            clear = {
                key(n, group) for n in range(number // 2) if not model.keys() & {key(m, group) for m in range(n + 1)}
            }
            why = {model[key(n, group)] for n in range(number) if key(n, group) in model.keys() - stored}
            found = gaps.ahead(name, stored.__contains__, clear)
            assert (found in why) if why else found is None


def test_a_gap_that_opens_again_and_again_takes_no_more_room() -> None:
    places = {b"%d...." % n: n for n in range(9)}
    gaps = Gaps(dict.fromkeys(places), places)
    for _ in range(100):
        for key in list(places)[2:]:
            gaps.open(key, 1)
        for key in list(places)[3:]:
            gaps.close(key)
    assert sum(map(len, gaps._first.values())) <= len(places)
    assert gaps.ahead(b"8....", lambda key: False) == 1
    assert gaps.ahead(b"8....", lambda key: True) is None and gaps.ahead(b"2....", lambda key: False) is None
    gaps.open(b"3....", 2)
    assert gaps.ahead(b"8....", lambda key: False) == 2 and gaps.ahead(b"3....", lambda key: False) is None


def test_an_offer_of_a_long_chain_behind_one_gap_looks_at_each_key_a_few_times() -> None:
    class Counting(dict[bytes, bytes | None]):
        looks = 0

        def get(self, key: bytes, default: Any = None) -> Any:
            self.looks += 1
            return super().get(key, default)

    keys = keys_of(range(2000))
    before = Counting(zip(keys, [None, *keys], strict=False))
    gaps = Gaps(before, None)
    gaps.open(keys[5], 7)
    gaps.close_some(keys, lambda key: key != keys[5], lambda why: False)
    assert gaps.at(keys[5]) == 7 and before.looks < 10 * len(keys)
    gaps.close_some(keys, lambda key: True, lambda why: False)
    assert not gaps
