"""The index by itself: transactions, a file that is full, and what it remembers of generations."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.store import index as index_module
from kvxfer.store.index import Index, max_records
from kvxfer.store.records import IndexRecord, Put
from tests.store import rig

MAP = 1 << 20


def record(i: int, generation: int = 1, slot: int | None = None) -> IndexRecord:
    return IndexRecord(bytes(32), rig.key(i), 1, i if slot is None else slot, generation, 1)


def contents(directory: Path, map_bytes: int = MAP) -> set[IndexRecord]:
    index = Index(directory, map_bytes)
    loaded = index.load()
    assert loaded is not None, index.lost
    index.drop()
    return set(loaded.records)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """An empty one."""
    made = Index(tmp_path / "index", MAP)
    assert made.load() is None
    assert made.lost == "there is no index"
    made.mark_open()
    assert made.recreate([], {})
    return made


def test_a_delete_compares_slab_slot_and_generation(index: Index) -> None:
    assert index.apply([], [Put(record(i), 0) for i in range(5)])
    others = [record(0, generation=2), record(1, slot=7), record(2)._replace(slab_id=2), record(9)]
    assert index.apply([*others, record(3)], [])
    assert index.close()
    assert contents(index.directory) == {record(i) for i in (0, 1, 2, 4)}


def test_a_put_replaces_and_counts_what_was_not_expected(index: Index) -> None:
    assert index.apply([], [Put(record(0), 0), Put(record(1), 0)])
    assert index.apply([], [Put(record(0, generation=2), 1), Put(record(1, generation=3), 0), Put(record(2), 9)])
    assert index.conflicts == 2
    assert index.apply([], [])
    assert index.close()
    assert contents(index.directory) == {record(0, generation=2), record(1, generation=3), record(2)}


def test_a_full_file_is_written_anew_and_says_no_without_raising(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    living: set[IndexRecord] = set()
    index.living = lambda: living
    monkeypatch.setattr(index_module, "RECOVERY_INTERVAL_S", 0.0)
    refused = 0
    for start in range(0, 8000, 100):
        batch = [record(i) for i in range(start, start + 100)]
        if index.apply([], [Put(one, 0) for one in batch]):
            living |= set(batch)
        else:
            refused += 1
            assert "MapFull" in index.last_error or "MAP_FULL" in index.last_error
    assert refused > 0
    assert index.recoveries > 0
    assert len(living) > max_records(MAP)
    gone = set(list(living)[: len(living) // 2])
    living -= gone
    assert index.apply([*gone][:100], [])
    assert index.recover()
    assert index.close()
    assert contents(index.directory) >= living
    assert (index.directory / "data.mdb").stat().st_size <= MAP


def test_recoveries_are_not_tried_too_often(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvxfer.store.index.time.monotonic", lambda: now[0])
    monkeypatch.setattr(index, "recreate", lambda records, epochs: False)
    index.drop()
    for _ in range(10):
        assert not index.apply([], [Put(record(0), 0)])
    assert index.recoveries == 1
    now[0] += 1.0
    assert not index.apply([], [Put(record(0), 0)])
    assert index.recoveries == 2


def test_used_epochs_are_remembered_in_order_and_not_for_ever(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_MAX_EPOCHS", 8)
    for epoch in range(100, 120):
        index.add_epoch(epoch)
    index.close()
    again = Index(index.directory, MAP)
    loaded = again.load()
    again.drop()
    assert loaded is not None
    assert sorted(loaded.epochs, key=lambda epoch: loaded.epochs[epoch])[-4:] == [116, 117, 118, 119]
    assert len(loaded.epochs) <= 8
    assert loaded.records == []


@pytest.mark.parametrize("map_bytes", [1 << 20, 16 << 20, 1 << 30])
def test_the_entries_allowed_leave_room_to_change_them(map_bytes: int) -> None:
    most = max_records(map_bytes)
    assert most * 330 + min(3 * most * 330, 3 * (4 << 20)) < map_bytes
    assert most * 2000 > map_bytes - (64 << 10) - (12 << 20)
