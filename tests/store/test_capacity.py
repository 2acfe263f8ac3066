"""The cap on bytes and files, several layouts under it, and slabs that cannot be made or removed."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.slot import SlotLayout
from kvxfer.store import Store, room
from kvxfer.testing import FaultyIO
from tests.store import rig

Opened = Callable[..., Store]
TINY = SlotLayout(
    segment_bytes=100, last_segment_bytes=100, num_segments=1, segments_per_trailer=464, blocks_per_chunk=2
)
LAYOUTS = [rig.ROW, rig.SHARED, TINY]


def names_of(start: int, stop: int) -> list[bytes]:
    return [rig.key(i) for i in range(start, stop)]


def register(store: Store) -> list[bytes]:
    """One namespace for each of LAYOUTS."""
    return [store.register(rig.namespace(extra={"group": i}), layout) for i, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize(
    ("capacity", "max_files", "slab"), [(8 << 20, 4096, None), (5_000_000, 4096, 300 * 4096), (8 << 20, 12, None)]
)
def test_ten_times_the_capacity_never_passes_it(
    opened: Opened, root: Path, capacity: int, max_files: int, slab: int | None
) -> None:
    draw = random.Random(5)
    config = {"capacity_bytes": capacity, "max_files": max_files, "slab_bytes": slab}
    store = opened(**config)
    digests = [store.register(rig.namespace(), rig.ROW)] if max_files < 100 else register(store)
    stored = 0
    turn = 0
    while stored < 10 * capacity:
        which = draw.randrange(len(digests))
        layout = LAYOUTS[which]
        names = names_of(turn * 100, turn * 100 + draw.choice([1, 20, 80]))
        got = rig.put(store, digests[which], names, layout=layout, mask=3)
        assert got[0]
        stored += sum(got) * layout.slot_bytes
        turn += 1
        nbytes, nfiles = rig.disk_use(root)
        assert nbytes <= capacity
        assert nfiles <= max_files
        assert nbytes <= store.stats().disk_bytes + (256 << 10)
    assert store.stats().evictions["capacity"] > 0
    store.close()
    assert rig.disk_use(root)[0] <= capacity
    store = opened(**config)
    digests = [store.register(rig.namespace(), rig.ROW)] if max_files < 100 else register(store)
    for layout, digest in zip(LAYOUTS, digests, strict=False):
        assert layout and len(rig.check_all(store, digest, store.keys(digest))) == len(store.keys(digest))


def test_a_new_layout_takes_the_coldest_slab_of_the_old_one(opened: Opened, root: Path) -> None:
    store = opened(writers=1)
    row, shared, _ = register(store)
    names = names_of(0, 273)
    assert sum(rig.put(store, row, names)) == 273
    kept = store.pin(row, names[:5])  # the first slab is pinned
    used = store.pin(row, names[21:42])  # the second was used last
    store.unpin(used)
    assert rig.put(store, shared, names[:3], layout=rig.SHARED) == [True] * 3
    stats = store.stats()
    assert stats.evictions == {"capacity": 0, "reclaimed": 21, "index": 0, "shrunk": 0, "quota": 0}
    assert (stats.slabs_created, stats.slabs_removed, stats.slabs) == (14, 1, 13)
    assert [name for name in names if not store.contains(row, name)] == names[42:63]
    store.unpin(kept)
    assert len(rig.check_all(store, row, names)) == 252
    assert rig.check_all(store, shared, names) == names[:3]


def test_a_layout_gives_its_own_coldest_before_warmer_slabs_of_others(opened: Opened) -> None:
    store = opened(writers=1)
    row, shared, _ = register(store)
    assert all(rig.put(store, shared, names_of(0, 31), layout=rig.SHARED))  # one slab, the oldest
    assert all(rig.put(store, row, names_of(0, 252)))
    for i in range(40):
        store.unpin(store.pin(row, names_of(0, 400)))
        assert rig.put(store, shared, [rig.key(1000 + i)], layout=rig.SHARED) == [True]
    stats = store.stats()
    assert stats.evictions["reclaimed"] == 0
    assert stats.evictions["capacity"] == 40
    assert len(store.keys(row)) == 252


def test_a_layout_that_is_used_grows_into_one_that_is_not(opened: Opened) -> None:
    store = opened(writers=1)
    row, shared, _ = register(store)
    assert sum(rig.put(store, row, names_of(0, 400))) == 273
    for i in range(300):
        assert rig.put(store, shared, [rig.key(1000 + i)], layout=rig.SHARED) == [True]
    assert len(store.keys(shared)) > 200
    assert len(store.keys(row)) < 100


def test_nothing_held_is_ever_reclaimed(opened: Opened) -> None:
    store = opened(writers=2)
    row, shared, _ = register(store)
    slots = store.reserve(row, rig.ROW, 273)
    assert len(slots) == 273
    assert store.reserve(shared, rig.SHARED, 1) == []
    store.quarantine(slots[0])
    store.release([slot for slot in slots[1:] if slot.slab is slots[0].slab])
    assert store.reserve(shared, rig.SHARED, 1) == []  # a lost write may still land there
    store.release(slots[:1])
    assert len(store.reserve(shared, rig.SHARED, 1)) == 1


def test_a_slab_that_was_pinned_since_it_was_chosen_stays(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(writers=1)
    row, shared, _ = register(store)
    names = names_of(0, 273)
    rig.put(store, row, names)
    choose = store._table.coldest_other
    pinned = []

    def pin_what_is_chosen(layout: SlotLayout) -> object:
        slab = choose(layout)
        pinned.extend(store.pin(row, names[:1]))
        return slab

    monkeypatch.setattr(store._table, "coldest_other", pin_what_is_chosen)
    assert store.reserve(shared, rig.SHARED, 1) == []
    assert store.lookup_prefix(row, names) == 273
    assert rig.verify(pinned[0])
    store.unpin(pinned)


def test_a_slab_that_the_index_cannot_forget_stays(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(writers=1)
    row, shared, _ = register(store)
    names = names_of(0, 273)
    rig.put(store, row, names)
    with monkeypatch.context() as broken:
        broken.setattr(store._index, "apply", lambda deletes, puts, rows=(): not (deletes or puts or rows))
        assert store.reserve(shared, rig.SHARED, 1) == []
    assert (store.stats().slabs, store.stats().entries, store.stats().free_slots) == (13, 273, 0)
    assert rig.check_all(store, row, names) == names
    assert len(store.reserve(row, rig.ROW, 273)) == 273


def test_a_slab_that_cannot_be_removed_is_skipped(opened: Opened, root: Path, faults: FaultyIO) -> None:
    store = opened(writers=1)
    row, shared, _ = register(store)
    names = names_of(0, 273)
    rig.put(store, row, names)
    faults.fail("unlink", errno.EPERM, times=1)
    assert rig.put(store, shared, names[:1], layout=rig.SHARED) == [False]
    assert rig.put(store, shared, names[:1], layout=rig.SHARED) == [True]
    stats = store.stats()
    assert (stats.slab_errors, stats.slabs, stats.free_slots) == (1, 13, 21 + 31 - 1)
    assert stats.evictions["reclaimed"] == 42
    assert rig.check_all(store, row, names) == names[42:]
    assert sum(rig.put(store, row, names_of(1000, 1021))) == 21  # into the one that stayed
    assert rig.disk_use(root)[0] <= 8 << 20


def test_the_index_names_no_more_than_it_has_room_for(opened: Opened, root: Path) -> None:
    store = opened(capacity_bytes=12 << 20, index_map_bytes=1 << 20)
    *_, tiny = register(store)
    most = store.stats().max_entries
    for start in range(0, 3000, 300):
        slots = store.reserve(tiny, TINY, 300)
        assert len(slots) == 300
        names = names_of(start, start + 300)
        assert all(store.commit(tiny, [(name, slot, 1) for name, slot in zip(names, slots, strict=True)]))
        assert store.stats().entries <= most
    stats = store.stats()
    assert stats.entries == most
    assert stats.evictions["index"] == 3000 - most
    assert stats.index_errors == 0
    assert (root / "index" / "data.mdb").stat().st_size <= 1 << 20
    assert len(store.reserve(tiny, TINY, 5000)) == most


def test_a_full_index_makes_room_among_all_layouts(opened: Opened) -> None:
    store = opened(capacity_bytes=12 << 20, index_map_bytes=1 << 20)
    row, _, tiny = register(store)
    most = store.stats().max_entries
    slots = store.reserve(tiny, TINY, most)
    names = names_of(0, most)
    assert all(store.commit(tiny, [(name, slot, 1) for name, slot in zip(names, slots, strict=True)]))
    assert rig.put(store, row, names[:10]) == [True] * 10
    left = set(store.keys(tiny))
    assert len(left) == most - 10
    for group in range(3):  # the oldest chains lose their ends
        chain = [name in left for name in names[group::3]]
        assert chain == sorted(chain, reverse=True)


# ---- slabs that cannot be made -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "code"),
    [
        ("fallocate", errno.ENOSPC), ("fallocate", errno.EIO), ("fallocate", errno.EDQUOT), ("open", errno.EMFILE),
        ("open", errno.EROFS), ("pwrite", errno.EIO), ("rename", errno.EIO),
    ],
)  # fmt: skip
def test_no_new_slab_means_evicting_in_those_that_exist(
    opened: Opened, root: Path, faults: FaultyIO, monkeypatch: pytest.MonkeyPatch, op: str, code: int
) -> None:
    store = opened(writers=1)
    digest, *_ = register(store)
    assert all(rig.put(store, digest, names_of(0, 21)))
    rule = faults.fail(op, code)
    assert len(slots := store.reserve(digest, rig.ROW, 30)) == 21
    assert rule.hits == 1  # and not once for each slot
    faults.__exit__(None, None, None)
    for slot, name in zip(slots, names_of(100, 121), strict=True):
        rig.write(slot, digest, name)
    assert all(store.commit(digest, [(n, s, 1) for n, s in zip(names_of(100, 121), slots, strict=True)]))
    stats = store.stats()
    assert (stats.slabs, stats.slab_errors, stats.refused_reservations) == (1, 1, 9)
    assert len(list((root / "slabs").iterdir())) == 1
    assert store.reserve(digest, rig.ROW, 1)  # evicts: it is too early to try again
    assert store.stats().slabs == 1
    monkeypatch.setattr("kvxfer.store.room.time.monotonic", lambda: 1e12)
    assert len(store.reserve(digest, rig.ROW, 30)) == 30
    assert store.stats().slabs == 3


def test_an_empty_store_on_a_full_disk_refuses_and_goes_on(
    opened: Opened, faults: FaultyIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.0)
    store = opened()
    digest, *_ = register(store)
    faults.fail("fallocate", errno.ENOSPC)
    for _ in range(50):
        assert store.reserve(digest, rig.ROW, 3) == []
    assert store.stats().refused_reservations == 150
    faults.__exit__(None, None, None)
    assert len(store.reserve(digest, rig.ROW, 3)) == 3


def test_a_full_disk_costs_another_layout_one_slab_at_a_time(
    opened: Opened, faults: FaultyIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(writers=1)
    row, shared, _ = register(store)
    rig.put(store, row, names_of(0, 42))
    faults.fail("fallocate", errno.ENOSPC)
    for _ in range(5):
        assert store.reserve(shared, rig.SHARED, 5) == []
        assert store.stats().slabs_removed == 1
    faults.__exit__(None, None, None)
    faults.fail("fallocate", errno.ENOSPC, times=1)
    monkeypatch.setattr("kvxfer.store.room.time.monotonic", lambda: 1e12)
    assert len(store.reserve(shared, rig.SHARED, 5)) == 5
    assert store.stats().slabs_removed == 2


def test_a_broken_disk_costs_other_layouts_nothing(opened: Opened, faults: FaultyIO) -> None:
    store = opened(writers=1)
    row, shared, _ = register(store)
    rig.put(store, row, names_of(0, 42))
    faults.fail("fallocate", errno.EIO)
    for _ in range(5):
        assert store.reserve(shared, rig.SHARED, 5) == []
    assert len(store.keys(row)) == 42


def test_what_a_failed_slab_leaves_behind_counts(opened: Opened, root: Path, faults: FaultyIO) -> None:
    store = opened(writers=1)
    digest, *_ = register(store)
    faults.fail("rename", errno.EIO, times=1)
    faults.fail("unlink", errno.EIO, times=2)
    before = store.stats().disk_bytes
    assert store.reserve(digest, rig.ROW, 1) == []
    assert [path.suffix for path in (root / "slabs").iterdir()] == [".tmp"]
    assert store.stats().disk_bytes > before + 500_000
    store.close()
    opened()
    assert list((root / "slabs").iterdir()) == []
