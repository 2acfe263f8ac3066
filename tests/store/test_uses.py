"""When chunks were used last: kept over a close, a crash of the index and between processes; and a store's own ttl."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.store import Store, uses
from kvxfer.store.records import USE_SLOTS, IndexRecord, UsedRow, gone, item, parse, parse_name
from kvxfer.store.uses import UseTimes
from kvxfer.testing import ManualClock
from tests.store import rig
from tests.store.sharing import Group, rows_of

DAY = 86400
Opened = Callable[..., Store]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """What the store takes for the time: it begins about now, when ten minutes begin."""
    clock = ManualClock(float(int(time.time()) // uses.GRAIN_S * uses.GRAIN_S))
    monkeypatch.setattr(uses, "clock", clock)
    return clock


def used(store: Store) -> dict[bytes, int]:
    """When each chunk was used last, by key."""
    table = store._table
    with table.lock:
        return {entry.key: table.uses.at(entry.slab.slab_id, entry.slot) for entry in table.living()}


def test_rows_say_what_was_put_in() -> None:
    row = UsedRow(7, 3, tuple(range(USE_SLOTS)))
    assert parse(*item(row)) == row
    name, value = gone(row)
    assert value is None
    assert parse_name(name) is not None
    assert parse(name, b"short") is None
    assert parse(name[:-1], item(row)[1]) is None


def test_a_store_and_a_use_are_noted_and_outlive_a_close(opened: Opened, clock: ManualClock) -> None:
    names = [rig.key(i) for i in range(60)]
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    start = clock.now
    assert all(rig.put(store, digest, [name])[0] for name in names)  # each follows nothing
    clock.advance(uses.GRAIN_S)
    store.touch(digest, names[:5])
    clock.advance(uses.GRAIN_S)
    store.unpin(store.pin(digest, names[5:9]))
    clock.advance(uses.GRAIN_S - 1)
    store.touch(digest, names[5:9])  # in the ten minutes of the last one: not written down
    want = {name: start + uses.GRAIN_S * (1 if i < 5 else 2 if i < 9 else 0) for i, name in enumerate(names)}
    assert used(store) == want
    assert store.close()
    clock.advance(DAY)
    again = opened()
    assert used(again) == want


def test_a_slots_next_chunk_is_as_new_as_it_is(opened: Opened, clock: ManualClock) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(i) for i in range(273)]))
    clock.advance(DAY)
    assert all(rig.put(store, digest, [rig.key(1000 + i) for i in range(10)]))  # in slots of evicted ones
    times = used(store)
    assert {times[rig.key(1000 + i)] for i in range(10)} == {clock.now}


def test_the_index_never_has_a_chunk_with_its_slots_last_time(
    opened: Opened, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much else it has not heard yet: another process's ttl would take out what was just stored."""
    monkeypatch.setattr("kvxfer.store.ledger._USES", 1)
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(i) for i in range(273)]))
    clock.advance(DAY)
    store.touch(digest, [rig.key(i) for i in range(273)])  # some rows of each slab
    assert all(rig.put(store, digest, new := [rig.key(1000 + i) for i in range(30)]))
    with store.cleaning():
        rows = store._index.everything()
    times = {(row.slab_id, row.block): row.times for row in rows if isinstance(row, UsedRow)}
    records = [row for row in rows if isinstance(row, IndexRecord) and row.key in new]
    assert [times[one.slab_id, one.slot // USE_SLOTS][one.slot % USE_SLOTS] for one in records] == [clock.now] * 30
    assert store._table.uses.has_changed, "the others wait"


def test_after_the_index_was_lost_all_count_as_used_now(opened: Opened, root: Path, clock: ManualClock) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(i) for i in range(20)]))
    assert store.close()
    (root / "index" / "state.json").unlink()
    clock.advance(30 * DAY)
    again = opened()
    assert again.stats().rebuilds == 1
    assert set(used(again).values()) == {clock.now}


def test_a_time_to_come_counts_as_now(opened: Opened, clock: ManualClock) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    clock.advance(1000 * DAY)
    assert all(rig.put(store, digest, [rig.key(0)]))
    assert store.close()
    clock.now -= 1000 * DAY
    assert set(used(opened()).values()) == {clock.now}


def test_after_a_clock_was_set_back_others_hear_of_uses(clock: ManualClock) -> None:
    """Who came later takes a time to come for now: its ttl would take out what is in use here all the while."""
    mine, theirs = UseTimes(), UseTimes()
    clock.advance(DAY)
    for slot in range(3):
        mine.note(1, slot)
        clock.advance(uses.GRAIN_S)
    clock.now -= DAY
    for row in mine.take_changed(99):
        theirs.merge(row)
    for _ in range(12):
        clock.advance(uses.GRAIN_S)
        mine.note(1, 1)
        for row in mine.take_changed(99):
            theirs.merge(row)
    assert theirs.at(1, 1) == mine.at(1, 1) == clock.now
    assert theirs.at(1, 0) <= theirs.at(1, 2) <= clock.now - 11 * uses.GRAIN_S


def test_other_processes_know_and_rows_go_with_their_slab(group: Group, root: Path) -> None:
    one, other = group.open(), group.open()
    one.call("put", list(range(40)))
    group.agree()
    rows = rows_of(root)
    times = {(row.slab_id, row.block): row.times for row in rows if isinstance(row, UsedRow)}
    records = [row for row in rows if isinstance(row, IndexRecord)]
    assert len(records) == 40
    for record in records:
        assert times[record.slab_id, record.slot // USE_SLOTS][record.slot % USE_SLOTS] > time.time() - 1000
    other.call("close")
    one.call("close")
    with Store.open(rig.config(root), housekeeping=False) as store:
        assert min(used(store).values()) > time.time() - 1000
        with store.cleaning() as cleaner:
            assert cleaner.drop(cleaner.find(lambda entry, at: True), "removed") == (40, 40 * rig.ROW.slot_bytes)
            slabs = len(store._table.slabs())
            assert cleaner.drop_empty_slabs()[0] == slabs > 0
    assert not [row for row in rows_of(root) if isinstance(row, UsedRow | IndexRecord)]
    assert list((root / "slabs").iterdir()) == []


def test_ttl_takes_out_what_nobody_used(opened: Opened, clock: ManualClock) -> None:
    names = [rig.key(i) for i in range(50)]
    store = opened(ttl_s=DAY)
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, names))
    clock.advance(DAY / 2)
    store.touch(digest, names[:10])
    pinned = store.pin(digest, names[10:12])
    clock.advance(DAY / 2 + uses.GRAIN_S)
    store._cleaner._next_tend = 0.0
    assert store.has_work()
    assert store.maintain()
    assert set(store.keys(digest)) == set(names), "not one moment too early"
    clock.advance(1)
    store._cleaner._next_tend = 0.0
    assert store.maintain()
    assert set(store.keys(digest)) == set(names[:12]), "pinned ones are in use"
    assert store.stats().invalidations["expired"] == 38
    assert not store.has_work()
    store.unpin(pinned)
    assert rig.check_all(store, digest, names) == names[:12]
    assert all(rig.put(store, digest, names)), "a miss can be stored again"


def test_without_a_ttl_nothing_goes(opened: Opened, clock: ManualClock) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(0)]))
    clock.advance(3650 * DAY)
    store._cleaner._next_tend = 0.0
    assert store.maintain()
    assert store.keys(digest) == [rig.key(0)]


def test_a_namespace_in_use_is_written_again(opened: Opened, root: Path, clock: ManualClock) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    path = root / "namespaces" / digest.hex() / "namespace.json"
    text = path.read_bytes()
    clock.advance(DAY)
    store._cleaner._next_tend = store._cleaner._next_touch = 0.0
    assert store.maintain()
    assert path.stat().st_mtime == clock.now
    with store.cleaning() as cleaner:
        assert cleaner.drop_namespaces([digest]) == 1
    assert not path.parent.exists()
    store._cleaner._next_tend = store._cleaner._next_touch = 0.0
    assert store.maintain()
    assert path.read_bytes() == text


@pytest.mark.parametrize("now", [-1e9, 5e9])
def test_a_clock_that_is_far_out_costs_no_use(opened: Opened, clock: ManualClock, now: float) -> None:
    names = [rig.key(i) for i in range(3)]
    clock.now = now
    store = opened(ttl_s=DAY)
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, names))
    assert rig.check_all(store, digest, names) == names
    store.touch(digest, names)
    assert store.maintain()
    assert store.close()
    clock.now = 1.8e9
    again = opened()
    assert rig.check_all(again, again.register(rig.namespace(), rig.ROW), names) == names


def test_an_index_that_breaks_while_time_runs_out_raises_nothing(opened: Opened, clock: ManualClock) -> None:
    store = opened(ttl_s=DAY)
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(0)]))
    assert store.maintain()
    clock.advance(2 * DAY)
    store._cleaner._next_tend = 0.0
    apply, store._index.apply = store._index.apply, lambda *_: False  # type: ignore[method-assign]
    assert not store.maintain()
    store._index.apply = apply  # type: ignore[method-assign]
    assert store.keys(digest) == []
    assert store.maintain()
    assert store.stats().entries == 0
