"""Recency over a reopen, and between processes; and that what is past its time leaves from the ends of chains."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.policy import POLICIES
from kvxfer.store import Access, Store, uses
from kvxfer.store.cleaner import Cleaner
from kvxfer.store.collect import Selection, carry_out, plan
from kvxfer.store.survey import survey_root
from kvxfer.store.uses import GRAIN_S, UseTimes
from kvxfer.testing import ManualClock
from tests.store import rig
from tests.store.sharing import Group
from tests.store.test_chains import chain, make_room

DAY = 86400.0
Opened = Callable[..., Store]
named = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """What stores take for the time: it begins about now, somewhere in ten minutes."""
    clock = ManualClock(float(int(time.time())))
    monkeypatch.setattr(uses, "clock", clock)
    return clock


def register(store: Store) -> bytes:
    return store.register(rig.namespace(), rig.ROW)


def lone(n: int) -> bytes:
    """A key of a group of its own: a chain of one."""
    return b"%6d" % n + n.to_bytes(4, "big")


def fill(store: Store, digest: bytes, clock: ManualClock) -> list[bytes]:
    """Stores what there is room for; the middle third is used later, the first after that. In order of last use."""
    room = store.reserve(digest, rig.ROW, 1000)
    store.release(room)
    names, third = [lone(n) for n in range(len(room))], len(room) // 3
    assert all(rig.put(store, digest, names))
    for start, end in ((third, 2 * third), (0, third)):
        clock.advance(GRAIN_S)
        store.touch(digest, names[start:end])
    return names[2 * third :] + names[third : 2 * third] + names[:third]


@named
def test_after_a_reopen_the_least_recently_used_goes_first(opened: Opened, clock: ManualClock, policy: str) -> None:
    store = opened(capacity_bytes=4 << 20)
    names = fill(store, register(store), clock)
    assert store.close()
    store = opened(capacity_bytes=4 << 20, policy=policy)
    digest = register(store)
    for gone in range(10, len(names), 10):
        make_room(store, digest, gone - (len(names) - len(store.keys(digest))))
        assert set(store.keys(digest)) == set(names[gone:])


def test_a_process_that_comes_later_goes_by_what_was_used(root: Path, group: Group) -> None:
    """Nobody else's uses are heard of while it is there; at its start they are."""
    one = group.open(capacity_bytes=4 << 20)
    room = one.call("reserve", 1000)
    one.call("release", [handle for handle, *_ in room])
    n = len(room)
    assert all(one.call("put", list(range(n))))
    one.call("set_time", time.time() + DAY)
    one.call("touch", list(range(40)))
    one.call("maintain")
    with Store.open(rig.config(root, capacity_bytes=4 << 20), housekeeping=False) as store:
        digest = store.register(rig.namespace(extra={"n": 0}), rig.ROW)
        make_room(store, digest, n - 40)
        assert set(store.keys(digest)) == {rig.key(i) for i in range(40)}


def test_of_a_smaller_store_the_slabs_that_were_used_are_left(opened: Opened, clock: ManualClock) -> None:
    store = opened(writers=1)
    digest = register(store)
    names = [lone(n) for n in range(273)]
    assert all(rig.put(store, digest, names))
    clock.advance(GRAIN_S)
    store.touch(digest, names[:42])  # in the two oldest slabs
    assert store.close()
    store = opened(capacity_bytes=4 << 20)
    assert set(names[:42]) <= set(store.keys(register(store)))
    assert store.stats().evictions["shrunk"] > 0


def test_what_is_not_known_counts_as_used_now(opened: Opened, root: Path, clock: ManualClock) -> None:
    """So a clock that was wrong once, or an index without times, costs the order of storing nothing."""
    clock.advance(10 * DAY)
    store = opened(capacity_bytes=4 << 20)
    names = sorted(fill(store, register(store), clock))  # as they were stored
    assert store.close()
    clock.now -= 20 * DAY
    store = opened(capacity_bytes=4 << 20)
    digest = register(store)
    make_room(store, digest, 30)
    assert set(store.keys(digest)) == set(names[30:])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2 * GRAIN_S), st.integers(0, 3)), min_size=1))
def test_a_time_is_never_later_than_the_use_nor_ten_minutes_earlier(steps: list[tuple[int, int]]) -> None:
    clock, times, last = ManualClock(1.7e9), UseTimes(), dict[int, float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uses, "clock", clock)
        for wait, slot in steps:
            clock.advance(wait)
            times.note(1, slot)
            last[slot] = clock.now
    for slot, at in last.items():
        assert times.at(1, slot) <= at < times.at(1, slot) + GRAIN_S


# ---- chains ------------------------------------------------------------------------------------------------


def used(store: Store, digest: bytes, keys: list[bytes]) -> list[int]:
    entries = [store._table.find(digest, key) for key in keys]
    return [store._table.uses.at(entry.slab.slab_id, entry.slot) for entry in entries if entry is not None]


def store_behind(store: Store, digest: bytes, head: list[bytes], tail: list[bytes]) -> None:
    """As a request does whose head the device has."""
    access = Access().place([*head, *tail])
    slots = store.reserve(digest, rig.ROW, len(tail))
    assert all(store.commit(digest, [(k, s, rig.FULL) for k, s in zip(tail, slots, strict=True)], access))


def test_a_use_of_a_tail_is_one_of_its_head(opened: Opened, clock: ManualClock) -> None:
    """Also where nobody asks for the head: the device has it."""
    store = opened()
    digest = register(store)
    keys, other = chain(1, 10), chain(2, 4)
    assert all(rig.put(store, digest, keys))
    assert all(rig.put(store, digest, other))
    at = used(store, digest, keys)[0]
    clock.advance(GRAIN_S)
    store.touch(digest, keys[5:7])
    assert used(store, digest, keys) == [at + GRAIN_S] * 7 + [at] * 3
    clock.advance(GRAIN_S)
    store_behind(store, digest, other, chain(2, 6)[4:])
    assert used(store, digest, chain(2, 6)) == [at + 2 * GRAIN_S] * 6
    clock.advance(GRAIN_S)
    store.unpin(store.pin(digest, other[3:]))
    assert used(store, digest, chain(2, 6)) == [at + 3 * GRAIN_S] * 4 + [at + 2 * GRAIN_S] * 2
    assert used(store, digest, keys[:1]) == [at + GRAIN_S]


def test_a_request_that_lasts_has_one_time_for_all(opened: Opened, clock: ManualClock) -> None:
    store = opened()
    digest = register(store)
    keys, access = chain(1, 12), Access()
    for start in range(0, 12, 4):
        names = keys[start : start + 4]
        slots = store.reserve(digest, rig.ROW, 4)
        items = [(key, slot, rig.FULL) for key, slot in zip(names, slots, strict=True)]
        assert all(store.commit(digest, items, access.place(names)))
        clock.advance(DAY)
    assert len(set(used(store, digest, keys))) == 1


def test_links_that_are_learned_later_say_it_of_earlier_uses(opened: Opened, clock: ManualClock) -> None:
    store = opened()
    digest = register(store)
    keys = chain(1, 6)
    for key in keys:
        assert all(rig.put(store, digest, [key]))
    clock.advance(GRAIN_S)
    store.touch(digest, keys[5:])
    late = used(store, digest, keys[5:])[0]
    clock.now -= GRAIN_S  # so that only the link says it
    store.touch(digest, keys)
    assert set(used(store, digest, keys)) == {late}


def tend(store: Store) -> bool:
    store._cleaner._next_tend = 0.0
    return store.maintain()


def test_a_ttl_takes_no_head_whose_tail_stays(opened: Opened, clock: ManualClock) -> None:
    store = opened(ttl_s=DAY)
    digest = register(store)
    one, two, three = chain(1, 10), chain(2, 10), chain(3, 10)
    for keys in (one, two, three):
        assert all(rig.put(store, digest, keys))
    branch = [*one[:3], *chain(4, 5)]
    store_behind(store, digest, branch[:3], branch[3:])
    pinned = store.pin(digest, one[6:7])
    entry = store._table.find(digest, two[4])
    assert entry is not None
    clock.advance(2 * DAY)
    store._table.uses.note(entry.slab.slab_id, entry.slot)  # what is heard of another process's uses
    assert tend(store)
    assert set(store.keys(digest)) == {*one[:7], *two[:5]}
    assert store.stats().unreachable_entries == 0
    assert store.stats().invalidations["expired"] == 3 + 5 + 10 + 5
    store.unpin(pinned)
    assert tend(store)
    assert set(store.keys(digest)) == set(two[:5])


def test_a_ttl_begins_at_the_ends_of_chains(
    opened: Opened, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.store.cleaner.STEP", 7)
    store = opened(ttl_s=DAY)
    digest = register(store)
    chains = [[*chain(0, 5), *chain(n, 20 + n)] for n in range(1, 6)]
    for keys in chains:
        store.touch(digest, keys)
        store_behind(store, digest, keys[:5] if keys is not chains[0] else [], keys[5 * (keys is not chains[0]) :])
    n = len(store.keys(digest))
    clock.advance(2 * DAY)
    for left in range(n - 7, -7, -7):
        assert tend(store)
        assert len(store.keys(digest)) == max(0, left)
        assert store.stats().unreachable_entries == 0
        for keys in chains:
            assert store.lookup_prefix(digest, keys) == sum(store.contains(digest, key) for key in keys)


def test_gc_in_another_process_takes_tails_before_heads(opened: Opened, root: Path, clock: ManualClock) -> None:
    store = opened()
    digest = register(store)
    keys, other = chain(1, 12), chain(2, 12)
    for names in (keys, other):
        assert all(rig.put(store, digest, names))
    clock.advance(2 * DAY)
    store.touch(digest, keys[3:8])  # the device has the rest
    store.unpin(store.pin(digest, other[5:6]))
    assert store.close()  # the command has no links
    done = carry_out(root, plan(survey_root(root), Selection(unused_for_s=DAY)))
    assert done.chunks == 4 + 6
    store = opened()
    digest = register(store)
    assert (store.lookup_prefix(digest, keys), store.lookup_prefix(digest, other)) == (8, 6)


def stepwise(monkeypatch: pytest.MonkeyPatch, before: Callable[[Cleaner, int], None]) -> None:
    """gc goes by three chunks; `before` is called with the cleaner and the number of the step that comes."""
    drop, steps = Cleaner.drop, iter(range(1000))

    def step(self: Cleaner, *args: Any, **named: Any) -> tuple[int, int]:
        before(self, next(steps))
        return drop(self, *args, **named)

    monkeypatch.setattr("kvxfer.store.collect.STEP", 3)
    monkeypatch.setattr(Cleaner, "drop", step)


def test_gc_leaves_what_is_used_while_it_is_at_it(
    opened: Opened, root: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    digest, keys = register(store), chain(1, 12)
    assert all(rig.put(store, digest, keys))
    assert store.close()
    clock.advance(2 * DAY)

    def before(cleaner: Cleaner, number: int) -> None:
        if number == 2:  # as it is heard of a server's uses
            for entry in cleaner._table.living():
                cleaner._table.uses.note(entry.slab.slab_id, entry.slot)

    stepwise(monkeypatch, before)
    assert carry_out(root, plan(survey_root(root), Selection(unused_for_s=DAY))).chunks == 6
    store = opened()
    assert store.lookup_prefix(register(store), keys) == len(store.keys(digest)) == 6


def test_a_gc_that_is_stopped_half_way_leaves_heads(
    opened: Opened, root: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    digest, keys = register(store), chain(1, 20)
    assert all(rig.put(store, digest, keys))
    clock.advance(GRAIN_S)
    store.touch(digest, keys[:8])
    assert store.close()
    clock.advance(2 * DAY)

    def before(cleaner: Cleaner, number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt

    stepwise(monkeypatch, before)
    with pytest.raises(KeyboardInterrupt):
        carry_out(root, plan(survey_root(root), Selection(unused_for_s=DAY)))
    store = opened()
    assert store.lookup_prefix(register(store), keys) == len(store.keys(digest)) == 5
