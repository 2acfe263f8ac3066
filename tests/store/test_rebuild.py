"""The index lost or damaged: what the trailers say comes back, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.slot import SlotLayout
from kvxfer.store import Store, trust
from kvxfer.store import index as index_module
from kvxfer.store.records import Put
from kvxfer.testing import FaultyIO
from tests.store import rig

Opened = Callable[..., Store]
KEYS = [rig.key(i) for i in range(100)]


def fill(opened: Opened, layout: SlotLayout = rig.ROW) -> bytes:
    store = opened()
    digest = store.register(rig.namespace(), layout)
    assert all(rig.put(store, digest, KEYS, layout=layout))
    store.close()
    return digest


def delete(index: Path) -> None:
    shutil.rmtree(index)


def write_garbage(index: Path) -> None:
    (index / "data.mdb").write_bytes(os.urandom(100_000))


def cut(index: Path) -> None:
    os.truncate(index / "data.mdb", (index / "data.mdb").stat().st_size // 2)


def empty(index: Path) -> None:
    (index / "data.mdb").write_bytes(b"")


def scribble(index: Path) -> None:
    size = (index / "data.mdb").stat().st_size
    with (index / "data.mdb").open("r+b") as file:
        for page in range(2, size // 4096):
            file.seek(page * 4096 + 20)
            file.write(os.urandom(8))


def forget_state(index: Path) -> None:
    (index / "state.json").unlink()


def damage_state(index: Path) -> None:
    (index / "state.json").write_text("[1")


def newer_state(index: Path) -> None:
    (index / "state.json").write_text(json.dumps({"format": 3, "boot_id": "x", "state": "clean"}))


def other_boot(index: Path) -> None:
    (index / "state.json").write_text(json.dumps({"format": 2, "boot_id": "another", "state": "open"}))


DAMAGES = [delete, write_garbage, cut, empty, scribble, forget_state, damage_state, newer_state, other_boot]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("layout", [rig.ROW, rig.SHARED], ids=["one trailer", "a trailer a segment"])
def test_everything_comes_back_from_the_trailers(
    opened: Opened, root: Path, damage: Callable[[Path], None], layout: SlotLayout
) -> None:
    digest = fill(opened, layout)
    damage(root / "index")
    store = opened()
    stats = store.stats()
    assert (stats.rebuilds, stats.entries) == (1, 100)
    assert stats.rebuild_reason
    store.register(rig.namespace(), layout)
    assert rig.check_all(store, digest, KEYS) == KEYS
    rig.put(store, digest, [rig.key(i) for i in range(500, 600)], layout=layout)
    store.close()
    store = opened()
    assert store.stats().rebuilds == 0
    store.register(rig.namespace(), layout)
    assert len(rig.check_all(store, digest, [rig.key(i) for i in range(600)])) == store.stats().entries


def test_an_index_that_was_open_in_this_boot_is_used(opened: Opened, root: Path) -> None:
    fill(opened)
    state = {"format": 2, "boot_id": trust.boot_id(), "state": "open"}
    (root / "index" / "state.json").write_text(json.dumps(state))
    assert opened().stats().rebuilds == 0


def test_a_machine_without_a_boot_id_always_rebuilds_what_was_open(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trust, "_BOOT_ID", tmp_path / "missing")
    digest = fill(opened)
    store = opened()
    assert store.stats().rebuilds == 0  # it was closed
    (root / "index" / "state.json").write_text(json.dumps({"format": 2, "boot_id": "", "state": "open"}))
    store.close()
    (root / "index" / "state.json").write_text(json.dumps({"format": 2, "boot_id": "", "state": "open"}))
    store = opened()
    assert store.stats().rebuilds == 1
    store.register(rig.namespace(), rig.ROW)
    assert store.lookup_prefix(digest, KEYS) == 100


def test_without_a_verifier_the_index_is_rebuilt(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(opened)
    monkeypatch.setattr(trust, "lmdb_verify", None)
    assert opened().stats().rebuild_reason == "this lmdb has no verifier (lmdb >= 3 has)"


def test_a_lost_index_gives_no_generation_twice(opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(opened)
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    store.close()
    entry_epochs = set()
    shutil.rmtree(root / "index")
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    for entry in store.pin(digest, KEYS):
        assert entry is not None
        entry_epochs.add(entry.generation >> 32)
    (used,) = entry_epochs
    store.close()
    shutil.rmtree(root / "index")
    draws = iter([0, used, used, 12345])
    monkeypatch.setattr("kvxfer.store.generations.secrets.randbits", lambda bits: next(draws))
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    assert store.reserve(digest, rig.ROW, 1)[0].generation >> 32 == 12345


def place_of(store: Store, digest: bytes, name: bytes) -> tuple[Path, int]:
    place = store.locate(digest, name)
    assert place is not None
    return place[0], place[1]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def read(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), nbytes, offset)


@pytest.mark.parametrize("page", [0, 1])
def test_a_slot_whose_trailers_do_not_agree_is_free(opened: Opened, root: Path, page: int) -> None:
    layout = rig.SHARED
    store = opened()
    digest = store.register(rig.namespace(), layout)
    rig.put(store, digest, KEYS, layout=layout)
    places = {name: place_of(store, digest, name) for name in KEYS}
    at = layout.payload_stride + page * 4096
    (first, where_first), (second, where_second) = places[KEYS[0]], places[KEYS[1]]
    overwrite(first, where_first + at, read(second, where_second + at, 4096))  # a page of another chunk
    (third, where_third) = places[KEYS[2]]
    overwrite(third, where_third + at + 100, b"\xa5")  # damaged
    (fourth, where_fourth) = places[KEYS[3]]
    twin = read(fourth, where_fourth + layout.payload_stride + (1 - page) * 4096, 4096)
    overwrite(fourth, where_fourth + at, twin)  # the other segment's page in this one's place
    generation = store.pin(digest, [KEYS[4]])[0].generation  # type: ignore[union-attr]
    for mask, number, name in ((0b111, generation, KEYS[4]), (rig.FULL, generation + 1000, KEYS[5])):
        image = rig.slot_image(name, digest, layout, number, mask)  # written once more, as far as one page
        path, where = places[name]
        overwrite(path, where + at, image.array[at : at + 4096].tobytes())
    store.close()
    shutil.rmtree(root / "index")
    store = opened()
    store.register(rig.namespace(), layout)
    assert [name for name in KEYS if not store.contains(digest, name)] == [KEYS[0], *KEYS[2:6]]
    assert rig.check_all(store, digest, KEYS) == [KEYS[1], *KEYS[6:]]


def test_a_slot_copied_into_another_layouts_slab_is_free(opened: Opened, root: Path) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    other = store.register(rig.namespace(canonical_form="kvx1"), rig.SHARED)
    rig.put(store, digest, KEYS[:1])
    rig.put(store, other, KEYS[1:2], layout=rig.SHARED)
    (row, at_row), (shared, at_shared) = place_of(store, digest, KEYS[0]), place_of(store, other, KEYS[1])
    trailer = read(row, at_row + rig.ROW.payload_stride, 4096)
    for page in range(2):
        overwrite(shared, at_shared + rig.SHARED.payload_stride + page * 4096, trailer)
    store.close()
    shutil.rmtree(root / "index")
    store = opened()
    assert store.stats().entries == 1
    store.register(rig.namespace(), rig.ROW)
    assert rig.check_all(store, digest, KEYS) == KEYS[:1]


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [((0b0111, 2), (0b0011, 3), 0), ((0b0011, 2), (0b0111, 1), 1), ((0b0011, 2), (0b0011, 3), 1)],
)
def test_of_two_slots_with_one_key_the_fuller_then_the_later_wins(
    opened: Opened, root: Path, first: tuple[int, int], second: tuple[int, int], winner: int
) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    slots = store.reserve(digest, rig.ROW, 2)
    for slot, (mask, generation) in zip(slots, (first, second), strict=True):
        slot.generation = generation
        rig.write(slot, digest, KEYS[0], mask)
    offset, slab = slots[winner].slot_offset, slots[winner].slab.path
    store.close()
    shutil.rmtree(root / "index")
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    assert place_of(store, digest, KEYS[0]) == (slab, offset)
    assert store.stats().entries == 1


def test_an_unreadable_slot_is_free_and_the_rest_comes_back(opened: Opened, root: Path, faults: FaultyIO) -> None:
    digest = fill(opened)
    shutil.rmtree(root / "index")
    at = 4096 + 2 * rig.ROW.slot_bytes + rig.ROW.payload_stride
    faults.fail("pread", errno.EIO, offset=(at, at + 1))
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    found = rig.check_all(store, digest, KEYS)
    assert 90 <= len(found) < 100


def test_rebuilding_keeps_the_cap(opened: Opened, root: Path) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    names = [rig.key(i) for i in range(273)]
    assert all(rig.put(store, digest, names))
    store.close()
    shutil.rmtree(root / "index")
    store = opened(capacity_bytes=4 << 20, slab_bytes=1 << 19)
    assert rig.disk_use(root)[0] <= 4 << 20
    store.register(rig.namespace(), rig.ROW)
    assert len(rig.check_all(store, digest, names)) == store.stats().entries > 50


def test_records_that_cannot_be_are_dropped(opened: Opened, root: Path) -> None:
    digest = fill(opened)
    index = index_module.Index(root / "index", 1 << 20)
    loaded = index.load()
    assert loaded is not None
    good = loaded.records[0]
    bad = [
        good._replace(key=b"a", slab_id=99), good._replace(key=b"b", slot=21), good._replace(key=b"c", mask=0),
        good._replace(key=b"d", mask=1 << 4), good._replace(key=b"e", generation=0),
        good._replace(key=b"f", generation=good.generation - (1 << 32)),  # on a slot that has an owner
    ]  # fmt: skip
    assert index.apply([], [Put(record, 0) for record in bad])
    with index._env.begin(write=True) as txn:
        txn.put(digest + b"odd", b"short")
    index.close()
    store = opened()
    assert store.stats().entries == 100
    store.register(rig.namespace(), rig.ROW)
    assert len(rig.check_all(store, digest, KEYS)) == 100
    assert not any(store.contains(digest, name) for name in (b"a", b"b", b"c", b"d", b"e", b"f"))
    store.close()
    loaded = index_module.Index(root / "index", 1 << 20).load()
    assert loaded is not None
    assert len(loaded.records) == 100
