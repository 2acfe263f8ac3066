"""What a store promises its callers: reserve, commit, lookup, pin, invalidate, evict."""

from __future__ import annotations

import os
import struct
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError, ForkError, StoreError
from kvxfer.slot import SlotLayout
from kvxfer.store import Store
from kvxfer.testing import FaultyIO
from tests.store import rig

Opened = Callable[..., Store]
KEYS = [rig.key(i) for i in range(20)]


def test_what_is_committed_is_found_until_the_first_gap(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert store.lookup_prefix(digest, KEYS) == 0
    assert rig.put(store, digest, KEYS[:7] + KEYS[8:]) == [True] * 19
    assert store.lookup_prefix(digest, KEYS) == 7
    assert store.lookup_prefix(digest, iter(KEYS[8:])) == 12
    assert store.lookup_prefix(digest, []) == 0
    entries = store.pin(digest, KEYS)
    assert [entry is not None for entry in entries] == [True] * 7 + [False] + [True] * 12
    store.unpin(entries)
    assert rig.check_all(store, digest, KEYS) == KEYS[:7] + KEYS[8:]
    assert sorted(store.keys(digest)) == sorted(KEYS[:7] + KEYS[8:])


def test_nothing_is_found_before_it_is_committed(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    (slot,) = store.reserve(digest, rig.ROW, 1)
    rig.write(slot, digest, KEYS[0])
    assert not store.contains(digest, KEYS[0])
    assert store.commit(digest, [(KEYS[0], slot, rig.FULL)]) == [True]
    assert store.contains(digest, KEYS[0])


def test_records_are_what_csrc_reads(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    (slot,) = store.reserve(digest, rig.ROW, 1)
    record = slot.chunk_record(b"abc")
    want = (slot.slab.handle, slot.slot_offset, slot.generation, 3, 0, b"abc" + bytes(61))
    assert struct.unpack("=QQQII64s", record) == want
    store.commit(digest, [(b"abc", slot, 1)])
    (entry,) = store.pin(digest, [b"abc"])
    assert entry is not None
    assert entry.record == record
    assert store.locate(digest, b"abc") == (entry.slab.path, slot.slot_offset, rig.ROW)
    assert store.locate(digest, b"abd") is None
    assert slot.generation >> 32 > 0
    assert slot.slot_offset % 4096 == 0
    store.unpin([entry])


def test_generations_are_never_used_twice(opened: Opened, root: Path) -> None:
    seen: set[int] = set()
    epochs: set[int] = set()
    for _ in range(3):
        store = opened()
        digest = store.register(rig.namespace(), rig.ROW)
        slots = store.reserve(digest, rig.ROW, 50)
        assert len({slot.generation for slot in slots} - seen) == 50
        seen |= {slot.generation for slot in slots}
        epochs |= {slot.generation >> 32 for slot in slots}
        store.release(slots)
        store.close()
    assert len(epochs) == 3


@pytest.mark.parametrize(
    ("first", "second", "kept"), [(0b0011, 0b0111, 0b0111), (0b0111, 0b0011, 0b0111), (0b0001, 0b1000, 0b1000)]
)
def test_more_blocks_replace_fewer_and_not_the_other_way(opened: Opened, first: int, second: int, kept: int) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert rig.put(store, digest, KEYS[:1], mask=first) == [True]
    free = store.stats().free_slots
    assert rig.put(store, digest, KEYS[:1], mask=second) == [True]
    assert store.contains(digest, KEYS[0], kept)
    assert not store.contains(digest, KEYS[0], 0b1111)
    assert rig.check_all(store, digest, KEYS) == KEYS[:1]
    stats = store.stats()
    assert stats.free_slots + stats.entries == free + 1 + 21 * (stats.slabs - 1)
    assert (stats.replacements, stats.duplicates) == ((1, 0) if kept == second else (0, 1))


def test_one_key_twice_in_a_batch_takes_one_slot(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    slots = store.reserve(digest, rig.ROW, 4)
    for slot, mask in zip(slots, (1, 3, 3, 1), strict=True):
        rig.write(slot, digest, KEYS[0], mask)
    items = [(KEYS[0], slot, mask) for slot, mask in zip(slots, (1, 3, 3, 1), strict=True)]
    assert store.commit(digest, items) == [True] * 4
    assert rig.check_all(store, digest, KEYS) == KEYS[:1]
    stats = store.stats()
    assert (stats.entries, stats.reserved_slots, stats.free_slots) == (1, 0, 21 * stats.slabs - 1)


def test_a_replaced_entry_keeps_its_bytes_while_it_is_pinned(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS[:1], mask=1)
    (old,) = store.pin(digest, KEYS[:1])
    assert old is not None
    rig.put(store, digest, KEYS[:1], mask=3)
    while slots := store.reserve(digest, rig.ROW, 100):  # everything else is taken and written over
        for slot in slots:
            rig.write(slot, digest, b"other")
    assert rig.verify(old)
    assert old.dead
    store.unpin([old])
    assert len(store.reserve(digest, rig.ROW, 100)) == 1


def test_commits_that_cannot_be_give_their_slots_back(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    slots = store.reserve(digest, rig.ROW, 5)
    bad = [(b"", slots[0], 1), (b"x" * 65, slots[1], 1), (KEYS[0], slots[2], 0), (KEYS[1], slots[3], 16)]
    assert store.commit(digest, [*bad, (KEYS[2], slots[4], 1)]) == [False] * 4 + [True]
    assert store.commit(digest, [(KEYS[3], slots[4], 1)]) == [False]  # settled before
    assert store.commit(bytes(32), []) == []
    stats = store.stats()
    assert (stats.entries, stats.reserved_slots) == (1, 0)
    assert store.keys(digest) == [KEYS[2]]


def test_an_unknown_namespace_gets_and_has_nothing(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    slots = store.reserve(digest, rig.ROW, 2)
    other = bytes(32)
    assert store.reserve(other, rig.ROW, 3) == store.reserve(digest, rig.SHARED, 3) == []
    assert store.commit(other, [(KEYS[0], slots[0], 1)]) == [False]
    assert store.lookup_prefix(other, KEYS) == 0
    assert store.pin(other, KEYS[:2]) == [None, None]
    assert not store.contains(other, KEYS[0])
    assert store.keys(other) == []
    assert store.stats().refused_reservations == 6


def test_invalidate_misses_at_once_and_frees_after_index_and_pins(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    (entry, twin) = store.pin(digest, [KEYS[3], KEYS[3]])
    assert entry is twin
    assert entry is not None
    assert store.invalidate(entry, "bad_sum")
    assert not store.invalidate(entry, "bad_sum")
    assert store.lookup_prefix(digest, KEYS) == 3
    store.unpin([entry])
    free = store.stats().free_slots
    assert store.maintain()
    assert store.stats().free_slots == free
    store.unpin([twin])
    assert store.stats().free_slots == free + 1
    store.unpin([twin])  # once too often does no harm
    assert store.stats().invalidations == {
        "truncated": 0, "bad_trailer": 0, "foreign": 0, "bad_sum": 1, "layout": 0, "expired": 0,
        "removed": 0, "other": 0,
    }  # fmt: skip
    assert store.stats().pinned_entries == 0


def test_a_slot_is_not_used_again_before_the_index_has_forgotten_what_was_in_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    (entry,) = store.pin(digest, KEYS[:1])
    assert entry is not None
    with monkeypatch.context() as broken:
        broken.setattr(store._index, "apply", lambda deletes, puts, rows=(): not (deletes or puts or rows))
        store.invalidate(entry, "bad_sum")
        store.unpin([entry])
        assert not store.maintain()
        assert store.reserve(digest, rig.ROW, 300) == []  # nobody could be told, and nothing is evicted either
        assert store.stats().evictions["capacity"] == 0
        assert store.lookup_prefix(digest, KEYS[1:]) == 19
        assert rig.put(store, digest, KEYS[:1]) == [False]
    taken = store.reserve(digest, rig.ROW, 273 - 19)
    assert (entry.slab, entry.slot) in [(one.slab, one.slot) for one in taken]
    assert store.lookup_prefix(digest, KEYS[1:]) == 19


def test_an_invalidation_that_comes_late_leaves_the_new_entry(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS[:1], mask=1)
    (old,) = store.pin(digest, KEYS[:1])
    assert old is not None
    rig.put(store, digest, KEYS[:1], mask=3)
    assert not store.invalidate(old, "foreign")
    assert store.contains(digest, KEYS[0], 3)
    store.unpin([old])
    assert rig.check_all(store, digest, KEYS) == KEYS[:1]


def test_an_invalidated_entry_stays_out_after_a_reopen_and_a_new_store_is_a_hit(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    (entry,) = store.pin(digest, [KEYS[2]])
    assert entry is not None
    store.invalidate(entry, "no reason known")
    store.unpin([entry])
    assert store.stats().invalidations["other"] == 1
    store.close()
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert store.lookup_prefix(digest, KEYS) == 2
    assert rig.put(store, digest, [KEYS[2]]) == [True]
    assert store.lookup_prefix(digest, KEYS) == 20


def test_the_least_recently_used_go_and_the_pinned_stay(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    names = [rig.key(i) for i in range(273)]
    for name in names:  # one by one: none follows another
        assert rig.put(store, digest, [name]) == [True]
    pinned = store.pin(digest, names[:10])
    store.unpin(store.pin(digest, names[10:20]))  # used
    store.touch(digest, names[20:25])
    assert rig.put(store, digest, [rig.key(i) for i in range(1000, 1050)]) == [True] * 50
    gone = [name for name in names if not store.contains(digest, name)]
    assert gone == names[25:75]
    assert all(entry is not None and rig.verify(entry) for entry in pinned)
    assert store.stats().evictions == {"capacity": 50, "reclaimed": 0, "index": 0, "shrunk": 0, "quota": 0}
    store.unpin(pinned)


def test_a_batch_larger_than_the_store_gets_what_fits(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    names = [rig.key(i) for i in range(400)]
    assert sum(rig.put(store, digest, names)) == 273
    assert store.lookup_prefix(digest, names) == 273
    pinned = store.pin(digest, names[:270])
    assert len(store.reserve(digest, rig.ROW, 400)) == 3
    assert store.reserve(digest, rig.ROW, 1) == []
    assert store.reserve(digest, rig.ROW, 0) == store.reserve(digest, rig.ROW, -1) == []
    store.unpin(pinned)


def test_quarantined_slots_are_nobodys_until_they_are_released(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    slots = store.reserve(digest, rig.ROW, 300)
    assert len(slots) == 273
    store.quarantine(slots[0])
    store.quarantine(slots[0])
    assert store.commit(digest, [(KEYS[0], slots[0], 1)]) == [False]
    store.release(slots[1:])
    assert len(store.reserve(digest, rig.ROW, 300)) == 272
    stats = store.stats()
    assert (stats.quarantined_slots, stats.reserved_slots, stats.free_slots) == (1, 272, 0)
    store.release([slots[0], slots[0]])
    assert len(store.reserve(digest, rig.ROW, 300)) == 1
    assert store.stats().quarantined_slots == 0


def test_slots_are_spread_over_as_many_slabs_as_there_are_writers(opened: Opened) -> None:
    store = opened(writers=5)
    digest = store.register(rig.namespace(), rig.ROW)
    slots = store.reserve(digest, rig.ROW, 20)
    counts = [sum(slot.slab.slab_id == number for slot in slots) for number in range(1, 7)]
    assert counts == [4, 4, 4, 4, 4, 0]
    assert store.reserve(digest, rig.ROW, 5)[0].slab.slab_id in range(1, 6)
    assert store.stats().slabs == 5


def test_single_reservations_open_a_slab_at_a_time(opened: Opened) -> None:
    store = opened(writers=3)
    digest = store.register(rig.namespace(), rig.ROW)
    slabs = [store.reserve(digest, rig.ROW, 1)[0].slab.slab_id for _ in range(9)]
    assert set(slabs) == {1, 2, 3}


def test_a_bumped_epoch_makes_everything_a_miss_for_good(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    slots = store.reserve(digest, rig.ROW, 1)
    assert (store.weight_epoch, store.bump_epoch(), store.weight_epoch) == (0, 1, 1)
    assert store.lookup_prefix(digest, KEYS) == 0
    assert store.commit(digest, [(KEYS[0], slots[0], 1)]) == [False]
    again = store.register(rig.namespace(), rig.ROW)
    assert again != digest
    assert store.lookup_prefix(again, KEYS) == 0
    assert rig.put(store, again, KEYS[:3]) == [True] * 3
    store.close()
    store = opened()
    assert store.weight_epoch == 1
    assert store.register(rig.namespace(), rig.ROW) == again
    assert store.lookup_prefix(again, KEYS) == 3
    assert store.lookup_prefix(digest, KEYS) == 0


def test_old_epochs_entries_make_room(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, [rig.key(i) for i in range(273)])
    store.bump_epoch()
    digest = store.register(rig.namespace(), rig.ROW)
    assert sum(rig.put(store, digest, [rig.key(i) for i in range(273)])) == 273


def test_namespaces_do_not_see_each_other(opened: Opened) -> None:
    store = opened()
    one = store.register(rig.namespace(), rig.ROW)
    two = store.register(rig.namespace(extra={"salt": "a"}), rig.ROW)
    rig.put(store, one, KEYS)
    assert store.lookup_prefix(two, KEYS) == 0
    rig.put(store, two, KEYS[:4])
    assert (store.lookup_prefix(one, KEYS), store.lookup_prefix(two, KEYS)) == (20, 4)
    assert rig.check_all(store, two, KEYS) == KEYS[:4]


def test_slots_of_another_layout_are_dropped_when_a_namespace_comes_back(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    assert store.register(rig.namespace(), rig.SHARED) == digest
    assert store.lookup_prefix(digest, KEYS) == 0
    assert store.stats().invalidations["layout"] == 20
    assert rig.put(store, digest, KEYS[:2], layout=rig.SHARED) == [True] * 2
    assert rig.check_all(store, digest, KEYS) == KEYS[:2]


def test_slots_that_do_not_fit_the_root_are_refused(opened: Opened, root: Path) -> None:
    store = opened(slab_bytes=1 << 20)
    wide = SlotLayout(
        segment_bytes=8192, last_segment_bytes=8192, num_segments=1, segments_per_trailer=464, alignment=8192
    )
    with pytest.raises(ConfigError, match="slots are aligned to 8192, but .* to 4096"):
        store.register(rig.namespace(), wide)
    large = SlotLayout(segment_bytes=1 << 20, last_segment_bytes=1 << 20, num_segments=1, segments_per_trailer=464)
    with pytest.raises(ConfigError, match="slab_bytes=1048576 holds no slot of 1052672 bytes"):
        store.register(rig.namespace(blocks_per_chunk=1), large)


def test_large_slots_get_slabs_of_one_where_no_size_was_given(opened: Opened) -> None:
    store = opened()
    large = SlotLayout(segment_bytes=1 << 20, last_segment_bytes=1 << 20, num_segments=2, segments_per_trailer=464)
    digest = store.register(rig.namespace(), large)
    slots = store.reserve(digest, large, 10)
    assert [slot.slot for slot in slots] == [0, 0, 0]
    assert store.stats().slabs == 3
    huge = SlotLayout(segment_bytes=8 << 20, last_segment_bytes=8 << 20, num_segments=1, segments_per_trailer=464)
    with pytest.raises(ConfigError, match="capacity_bytes=8388608 has .* bytes for slabs, one for slots of 8392704"):
        store.register(rig.namespace(), huge)


def test_lookups_answer_while_a_slab_is_being_made(opened: Opened, faults: FaultyIO) -> None:
    store = opened(writers=1)
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    faults.hang("fallocate", times=1)
    got: list[int] = []
    worker = threading.Thread(target=lambda: got.append(len(store.reserve(digest, rig.ROW, 30))))
    worker.start()
    while faults.calls("fallocate") < 2 and worker.is_alive():
        time.sleep(0.001)
    time.sleep(0.05)
    start = time.monotonic()
    for _ in range(200):
        assert store.lookup_prefix(digest, KEYS) == 20
        entries = store.pin(digest, KEYS)
        assert None not in entries
        store.unpin(entries)
        assert store.contains(digest, KEYS[0])
        assert store.stats().entries == 20
    assert store.invalidate(store.pin(digest, KEYS[:1])[0], "foreign")
    elapsed = time.monotonic() - start
    assert worker.is_alive()
    assert got == []
    faults.release()
    worker.join()
    assert got == [30]
    assert elapsed < 20


def test_a_forks_child_is_told_and_leaves_the_root_locked_to_its_parent(opened: Opened, root: Path) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns where numpy has threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            calls: list[Callable[[], object]] = [
                lambda: store.lookup_prefix(digest, KEYS), lambda: store.pin(digest, KEYS), lambda: store.unpin([]),
                lambda: store.reserve(digest, rig.ROW, 1), lambda: store.commit(digest, []), store.stats,
                store.bump_epoch, store.maintain, lambda: store.register(rig.namespace(), rig.ROW),
            ]  # fmt: skip
            told = 0
            for call in calls:
                try:
                    call()
                except ForkError:
                    told += 1
            store.close()
            code = 0 if told == len(calls) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    script = (
        "import sys; from pathlib import Path; from tests.store import rig; from kvxfer.store import Store\n"
        "with Store.open(rig.config(Path(sys.argv[1]))) as store: print(store.stats().processes)\n"
    )
    done = rig.run_python(script, root)
    assert done.stdout == "2\n", done.stderr  # the child's end did not give the parent's seat away
    assert rig.put(store, digest, [rig.key(100)]) == [True]
    assert store.lookup_prefix(digest, KEYS) == 20


def test_a_forks_child_that_lives_on_does_not_keep_the_root(opened: Opened, root: Path) -> None:
    store = opened()
    ready, go = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"x"
        store.close()
        opened().close()
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)


def test_a_closed_store_says_so_and_takes_back_what_is_given_back(opened: Opened) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, KEYS)
    entries = store.pin(digest, KEYS)
    slots = store.reserve(digest, rig.ROW, 2)
    with store:
        pass
    store.close()
    store.unpin(entries)
    store.quarantine(slots[0])
    store.release(slots)
    assert store.stats().pinned_entries == 0
    for call in (lambda: store.lookup_prefix(digest, KEYS), lambda: store.reserve(digest, rig.ROW, 1)):
        with pytest.raises(StoreError, match="is closed"):
            call()


def test_every_series_is_there_at_zero(opened: Opened) -> None:
    stats = opened().stats()
    assert set(stats.evictions) == {"capacity", "reclaimed", "index", "shrunk", "quota"}
    assert set(stats.invalidations) == {
        "truncated", "bad_trailer", "foreign", "bad_sum", "layout", "expired", "removed", "other",
    }  # fmt: skip
    assert not any([*stats.evictions.values(), *stats.invalidations.values()])
    counters = (
        stats.commits, stats.replacements, stats.duplicates, stats.failed_commits, stats.refused_reservations,
        stats.slabs_created, stats.slabs_removed, stats.slab_errors, stats.index_errors, stats.index_conflicts,
        stats.index_recoveries, stats.rebuilds, stats.namespace_errors, stats.scrubbed_chunks,
        stats.scrubbed_bytes, stats.unreadable_chunks,
    )  # fmt: skip
    assert not any(counters)


def test_writers_must_be_a_number(root: Path) -> None:
    with pytest.raises(ConfigError, match="writers=0"):
        Store.open(rig.config(root), writers=0)
    assert not root.exists()
