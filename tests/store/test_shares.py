"""Quotas of namespaces: who evicts whom, exact between processes, and kept with the root."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import main
from kvxfer.errors import FormatError
from kvxfer.policy import POLICIES, ARCPolicy, LRUPolicy
from kvxfer.store import Store
from kvxfer.store.collect import reset
from kvxfer.store.root import change_root
from tests.cli.commands import json_of
from tests.store import rig

Opened = Callable[..., Store]
SLOT = rig.ROW.slot_bytes
FULL = 273  # slots of the small store


def group_key(i: int) -> bytes:
    """All of one KV-cache group: those of one call are a chain."""
    return rig.key(i)[:-4] + bytes(4)


def set_quota(root: Path, digest: bytes, *options: object) -> None:
    assert main(["quota", str(root), "--namespace", digest.hex(), *map(str, options), "--yes"]) == 0


def put(store: Store, digest: bytes, first: int, n: int, batch: int = 7) -> int:
    """How many of these chunks were stored."""
    done = 0
    for start in range(first, first + n, batch):
        done += sum(rig.put(store, digest, [rig.key(i) for i in range(start, min(start + batch, first + n))]))
    return done


@pytest.fixture
def two(opened: Opened) -> tuple[Store, bytes, bytes]:
    """A store, and two namespaces."""
    store = opened()
    return store, store.register(rig.namespace(), rig.ROW), store.register(rig.namespace(model="b"), rig.ROW)


def held(store: Store, digest: bytes) -> int:
    names = store.keys(digest)
    assert len(rig.check_all(store, digest, names)) == len(names)
    return len(names)


def test_a_namespace_never_has_more_than_its_quota_and_costs_nobody_else(
    two: tuple[Store, bytes, bytes], root: Path
) -> None:
    store, a, b = two
    assert put(store, b, 0, 200) == 200
    set_quota(root, a, "--at-most", 40 * SLOT)
    most = 0
    for start in range(1000, 1300, 5):
        assert put(store, a, start, 5, 5) == 5
        most = max(most, len(store.keys(a)))
    assert most == 40
    assert held(store, a) > 30
    assert held(store, b) == 200
    assert set(store.keys(a)) >= {rig.key(i) for i in range(1295, 1300)}, "the oldest go"
    assert store.stats().evictions["quota"] >= 260
    assert store.stats().evictions["capacity"] == 0


def test_a_quota_that_is_lowered_takes_effect_with_the_next_store(two: tuple[Store, bytes, bytes], root: Path) -> None:
    store, a, _ = two
    assert put(store, a, 0, 100) == 100
    set_quota(root, a, "--at-most", 10 * SLOT)
    assert put(store, a, 500, 1) == 1
    assert len(store.keys(a)) <= 10
    set_quota(root, a, "--clear")
    assert put(store, a, 600, 100) == 100
    assert len(store.keys(a)) > 100


def test_what_is_pinned_stays_and_the_quota_holds_all_the_same(two: tuple[Store, bytes, bytes], root: Path) -> None:
    store, a, _ = two
    names = [rig.key(i) for i in range(10)]
    assert put(store, a, 0, 10) == 10
    pinned = store.pin(a, names)
    set_quota(root, a, "--at-most", 10 * SLOT)
    assert put(store, a, 100, 5, 5) == 0
    assert store.stats().reserved_slots == 0
    assert sorted(store.keys(a)) == sorted(names)
    store.unpin(pinned)
    assert put(store, a, 100, 5, 5) == 5


def test_reservations_that_were_given_before_are_held_to_it_at_the_commit(
    two: tuple[Store, bytes, bytes], root: Path
) -> None:
    store, a, _ = two
    slots = store.reserve(a, rig.ROW, 30)
    set_quota(root, a, "--at-most", 12 * SLOT)
    for i, slot in enumerate(slots):
        rig.write(slot, a, rig.key(i))
    done = store.commit(a, [(rig.key(i), slot, rig.FULL) for i, slot in enumerate(slots)])
    assert sum(done) == 12 == held(store, a)
    assert store.stats().reserved_slots == 0


@pytest.mark.parametrize("policy", [LRUPolicy, pytest.param(ARCPolicy, marks=pytest.mark.slow)])
def test_others_leave_a_namespace_its_share(root: Path, opened: Opened, policy: Any) -> None:
    with Store.open(rig.config(root), writers=2, policy=policy, housekeeping=False) as store:
        a, b = store.register(rig.namespace(), rig.ROW), store.register(rig.namespace(model="b"), rig.ROW)
        assert put(store, a, 0, 100) == 100
        set_quota(root, a, "--at-least", 60 * SLOT)
        assert put(store, b, 1000, 2 * FULL, 20) == 2 * FULL
        assert held(store, a) >= 60
        before = set(store.keys(a))
        assert put(store, b, 5000, FULL, 20) == FULL
        assert set(store.keys(a)) == before, "what is at its share is left alone"
        assert held(store, a) + held(store, b) >= FULL - 2
        assert put(store, a, 200, FULL, 20) == FULL, "its own chunks it may evict"
        assert set(store.keys(a)) >= {rig.key(200 + FULL - 1)}


def test_where_all_is_protected_nothing_is_evicted(two: tuple[Store, bytes, bytes], root: Path) -> None:
    store, a, b = two
    assert put(store, a, 0, FULL) == FULL
    set_quota(root, a, "--at-least", FULL * SLOT)
    assert put(store, b, 1000, 20) == 0
    assert held(store, a) == FULL
    assert store.stats().reserved_slots == 0


def test_slabs_of_another_layout_are_not_taken_from_it(two: tuple[Store, bytes, bytes], root: Path) -> None:
    store, a, _ = two
    assert put(store, a, 0, FULL) == FULL
    shared = store.register(rig.namespace(model="c", blocks_per_chunk=8), rig.SHARED)
    set_quota(root, a, "--at-least", 200 * SLOT)
    names = [rig.key(2000 + i) for i in range(500)]
    for start in range(0, 500, 10):
        rig.put(store, shared, names[start : start + 10], rig.SHARED)
    assert len(store.keys(shared)) > 0
    assert held(store, a) >= 200


def test_quotas_are_kept_and_go_with_the_namespace_into_the_next_epoch(opened: Opened, root: Path) -> None:
    store = opened()
    a = store.register(rig.namespace(), rig.ROW)
    set_quota(root, a, "--at-most", 5 * SLOT)
    assert store.bump_epoch() == 1
    a = store.register(rig.namespace(), rig.ROW)
    assert put(store, a, 0, 20) > 5
    assert len(store.keys(a)) <= 5
    assert store.close()
    assert Store.bump_epoch_of(root) == (1, 2)
    again = opened(capacity_bytes=16 << 20)  # other limits are written down beside them
    a = again.register(rig.namespace(), rig.ROW)
    put(again, a, 0, 20)
    assert len(again.keys(a)) <= 5


def test_two_processes_hold_one_quota(opened: Opened, root: Path) -> None:
    """Each is told of it, and counts what the other has stored."""
    from tests.store.sharing import Group

    group = Group(root)
    try:
        one, other = group.open(), group.open()
        one.call("put", [0])
        digest = bytes.fromhex(next(iter(group.agree()["entries"]))[:64])
        set_quota(root, digest, "--at-most", 30 * SLOT)
        for start in range(0, 120, 6):
            one.call("put", list(range(start, start + 3)))
            other.call("put", list(range(start + 3, start + 6)))
            assert len(other.call("picture")["entries"]) <= 30
        assert 20 < len(group.agree()["entries"]) <= 30
    finally:
        group.end()


def test_the_command(opened: Opened, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = opened()
    a = store.register(rig.namespace(), rig.ROW).hex()
    assert json_of(capsys, "quota", root) == (0, {"root": str(root), "quotas": {}})
    options = ["--namespace", a[:8], "--at-most", "1M", "--at-least", "512KiB", "--yes"]
    wanted = {a: {"at_most": 1 << 20, "at_least": 1 << 19}}
    assert json_of(capsys, "quota", root, *options)[1]["quotas"] == wanted
    assert main(["quota", str(root)]) == 0
    assert "at most 1.0 MiB, others leave it 512.0 KiB" in capsys.readouterr().out
    for bad in (
        ["--at-most", "1M"], ["--namespace", a, "--yes"], ["--namespace", "ff", "--clear", "--yes"],
        ["--namespace", a, "--at-most", "1M", "--at-least", "2M", "--yes"],
        ["--namespace", a, "--at-least", "1T", "--yes"], ["--namespace", a, "--at-most", "1M", "--clear", "--yes"],
    ):  # fmt: skip
        assert json_of(capsys, "quota", root, *bad)[0] == 2, bad
    assert json_of(capsys, "quota", root)[1]["quotas"] == wanted
    assert json_of(capsys, "quota", root, "--namespace", a, "--clear", "--yes")[1]["quotas"] == {}


@pytest.mark.parametrize(
    "quotas",
    [
        [], {"ab": {}}, {"ab" * 32: {"at_most": -1}}, {"ab" * 32: {"at_most": 1, "at_least": 2}}, {"ab" * 32: None},
        {"ab" * 32: {"more": 1}}, {"zz" * 32: {}}, {"ab" * 32: {"at_most": 1 << 70}}, {"ab" * 32: {"at_least": "1"}},
        {f"{i:064x}": {} for i in range(257)},
    ],
    ids=lambda quotas: str(quotas)[:40],
)  # fmt: skip
def test_quotas_that_cannot_be(opened: Opened, root: Path, quotas: Any) -> None:
    opened().close()
    change_root(root, lambda info: info)
    path = root / "kvxfer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quotas": quotas}))
    with pytest.raises(FormatError, match="quotas"):
        opened()


def test_at_its_quota_a_namespace_gives_up_ends_of_chains_before_what_they_follow(opened: Opened, root: Path) -> None:
    store = opened()
    a = store.register(rig.namespace(), rig.ROW)
    old, new, last = [[group_key(i) for i in range(first, first + 10)] for first in (0, 100, 200)]
    for names in (old, new):
        assert all(rig.put(store, a, names))
    set_quota(root, a, "--at-most", 20 * SLOT)
    for n in range(1, 11):
        assert all(rig.put(store, a, last[n - 1 : n]))
        assert (store.lookup_prefix(a, old), store.lookup_prefix(a, new)) == (10 - n, 10)
        assert store.stats().unreachable_entries == 0


def test_at_its_quota_what_a_pinned_chunk_follows_stays(opened: Opened, root: Path) -> None:
    store = opened()
    a = store.register(rig.namespace(), rig.ROW)
    names = [group_key(i) for i in range(10)]
    assert all(rig.put(store, a, names))
    pinned = store.pin(a, names[5:6])
    set_quota(root, a, "--at-most", 10 * SLOT)
    assert sum(rig.put(store, a, [group_key(i) for i in range(100, 107)])) == 4
    assert store.lookup_prefix(a, names) == 6
    store.unpin(pinned)
    assert all(rig.put(store, a, [group_key(i) for i in range(200, 210)]))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_protected_hides_nothing_that_may_go(root: Path, policy: str) -> None:
    """Whichever of a policy's orders it is in, and however far in front."""
    with Store.open(rig.config(root, policy=policy), writers=2, housekeeping=False) as store:
        a, b = store.register(rig.namespace(), rig.ROW), store.register(rig.namespace(model="b"), rig.ROW)
        assert put(store, a, 0, 60) == 60
        set_quota(root, a, "--at-least", 60 * SLOT)
        names = [rig.key(i) for i in range(60)]
        for round_ in range(4):
            for _ in range(round_):
                store.touch(a, names)
            assert put(store, b, 1000 * (round_ + 1), FULL, 5) == FULL
            assert store.lookup_prefix(a, names) == 60


def test_what_is_protected_is_passed_over_once(root: Path) -> None:
    """It counts as used: the next search does not begin with it again."""
    with Store.open(rig.config(root, policy="lru"), writers=2, housekeeping=False) as store:
        a, b = store.register(rig.namespace(), rig.ROW), store.register(rig.namespace(model="b"), rig.ROW)
        assert put(store, a, 0, 60) == 60
        set_quota(root, a, "--at-least", 60 * SLOT)
        assert put(store, b, 1000, FULL, 5) == FULL
        (entry,) = store.pin(b, [rig.key(1000 + FULL - 1)])
        assert entry is not None
        store.unpin([entry])
        first = entry.slab.policy.first()
        assert first is not None and first.digest == b


def test_a_quota_that_the_index_does_not_hear_of_costs_no_order(opened: Opened, root: Path) -> None:
    store = opened()
    a = store.register(rig.namespace(), rig.ROW)
    names = [group_key(i) for i in range(20)]
    assert all(rig.put(store, a, names))
    set_quota(root, a, "--at-most", 20 * SLOT)
    apply, store._index.apply = store._index.apply, lambda *_: False  # type: ignore[method-assign]
    assert not any(rig.put(store, a, [group_key(100)]))
    store._index.apply = apply  # type: ignore[method-assign]
    assert store.lookup_prefix(a, names) == 20
    store.touch(a, names)
    set_quota(root, a, "--clear")
    for i in range(1000, 1000 + FULL):
        assert all(rig.put(store, a, [group_key(i)]))
        assert store.lookup_prefix(a, names) == sum(store.contains(a, name) for name in names)
    assert not store.contains(a, names[0])


def test_quotas_outlive_epochs_in_which_nobody_registers(opened: Opened, root: Path) -> None:
    store = opened()
    a = store.register(rig.namespace(), rig.ROW)
    set_quota(root, a, "--at-most", 5 * SLOT)
    assert store.bump_epoch() == 1
    assert store.bump_epoch() == 2
    store.close()
    for epoch in (3, 4):
        assert reset(root)[1] == epoch
        assert main(["gc", str(root), "--yes"]) == 0
    store = opened()
    a = store.register(rig.namespace(), rig.ROW)
    put(store, a, 0, 20)
    assert len(store.keys(a)) <= 5


def test_where_all_of_one_layout_is_protected_another_one_gives(opened: Opened, root: Path) -> None:
    store = opened(writers=1)
    a, b = store.register(rig.namespace(), rig.ROW), store.register(rig.namespace(model="b"), rig.ROW)
    assert put(store, a, 0, 105) == 105
    set_quota(root, a, "--at-least", 105 * SLOT)
    other = store.register(rig.namespace(model="c", blocks_per_chunk=8), rig.SHARED)
    for start in range(2000, 3000, 10):
        rig.put(store, other, [rig.key(i) for i in range(start, start + 10)], rig.SHARED)
    assert put(store, b, 5000, 30) == 30
    assert held(store, a) == 105
    assert store.keys(other)


def test_where_the_index_is_full_of_what_is_protected_another_layout_gives(opened: Opened, root: Path) -> None:
    store = opened(writers=1)
    store._index.max_entries = 100
    a = store.register(rig.namespace(), rig.ROW)
    assert put(store, a, 0, 60) == 60
    other = store.register(rig.namespace(model="c", blocks_per_chunk=8), rig.SHARED)
    names = [rig.key(i) for i in range(2000, 2060)]
    for start in range(0, 60, 10):
        assert all(rig.put(store, other, names[start : start + 10], rig.SHARED))
    a_left = len(store.keys(a))
    set_quota(root, a, "--at-least", 60 * SLOT)
    assert all(rig.put(store, other, [rig.key(i) for i in range(3000, 3010)], rig.SHARED))
    assert len(store.keys(a)) == a_left
