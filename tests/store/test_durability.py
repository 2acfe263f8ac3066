"""What durability changes: what is flushed when, what an open believes, and who may open a root beside others."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.store import Store, trust
from kvxfer.store.collect import reset
from kvxfer.store.index import Index
from kvxfer.store.root import read_root
from kvxfer.store.slab import SlabFile
from kvxfer.testing import FaultyIO
from tests.cli.commands import json_of
from tests.store import rig
from tests.store.sharing import Group

Opened = Callable[..., Store]
NAMES = [rig.key(i) for i in range(24)]


def state(root: Path) -> str:
    """What state.json says."""
    return str(json.loads((root / "index" / "state.json").read_text())["state"])


def keep(store: Store, names: list[bytes]) -> bytes:
    """Stores these; the digest."""
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, names))
    return digest


def test_one_flush_of_each_slab_serves_a_batch_and_the_others_flush_nothing(opened: Opened, root: Path) -> None:
    for durability in ("none", "process", "power"):
        store = opened(writers=2, durability=durability)
        digest = store.register(rig.namespace(extra={"n": durability}), rig.ROW)
        assert all(rig.put(store, digest, NAMES[:2]))  # slabs are made
        slots = store.reserve(digest, rig.ROW, 20)
        for name, slot in zip(NAMES[2:], slots, strict=False):
            rig.write(slot, digest, name)
        before = FaultyIO.calls("fsync")
        assert all(store.commit(digest, [(n, s, rig.FULL) for n, s in zip(NAMES[2:], slots, strict=False)]))
        flushed = FaultyIO.calls("fsync") - before
        assert flushed == (len({slot.slab for slot in slots}) if durability == "power" else 0)
        store.close()


def test_a_flush_that_fails_costs_what_was_being_stored_and_cannot_be_made_good(
    opened: Opened, faults: FaultyIO
) -> None:
    store = opened(writers=1, durability="power")
    digest = keep(store, NAMES[:3])
    slots = store.reserve(digest, rig.ROW, 4)
    assert len({slot.slab for slot in slots}) == 1
    for name, slot in zip(NAMES[10:], slots, strict=False):
        rig.write(slot, digest, name)
    rule = faults.fail("fsync", errno.EIO, times=1)
    assert store.commit(digest, [(NAMES[10], slots[0], rig.FULL)]) == [False]
    assert rule.hits == 1
    # What was in the slab by then may be gone, although the next flush says nothing of it.
    assert store.commit(digest, [(NAMES[11], slots[1], rig.FULL)]) == [False]
    store.release(slots[2:])
    assert store.stats().failed_flushes == 1
    assert store.stats().reserved_slots == 0
    assert all(rig.put(store, digest, NAMES[10:14])), "slots that are taken anew are as good as any"
    assert rig.check_all(store, digest, NAMES[:14]) == NAMES[:3] + NAMES[10:14]


def test_a_slab_whose_name_is_not_on_the_device_is_not_used(opened: Opened, root: Path, faults: FaultyIO) -> None:
    store = opened(writers=1, durability="power")
    digest = store.register(rig.namespace(), rig.ROW)
    faults.fail("fsync", errno.EIO, times=1)
    assert store.reserve(digest, rig.ROW, 1) == []
    assert store.stats().slab_errors == 1
    assert not any((root / "slabs").iterdir())


@pytest.mark.parametrize(("durability", "written"), [("none", "open"), ("process", "open"), ("power", "synced")])
def test_what_state_json_says(opened: Opened, root: Path, durability: str, written: str) -> None:
    store = opened(durability=durability)
    assert state(root) == written
    store.close()
    assert state(root) == ("open" if durability == "none" else "clean")
    again = opened(durability=durability)
    assert state(root) == written
    again.close()


def test_synced_is_not_said_of_an_index_whose_name_may_not_be_on_the_device(tmp_path: Path, faults: FaultyIO) -> None:
    index = Index(tmp_path / "index", 1 << 20, "power")
    assert index.load() is None
    assert index.mark_open()
    faults.fail("fsync", errno.EIO, times=1)
    assert not index.recreate([], {})
    assert state(tmp_path) == "open"
    assert index.recreate([], {})
    assert state(tmp_path) == "synced"
    index.drop()


@pytest.mark.parametrize("first", ["none", "process", "power"])
@pytest.mark.parametrize("then", ["none", "process", "power"])
def test_the_next_boot(opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch, first: str, then: str) -> None:
    """After a close, under any two of them: nothing is lost but by what "none" does not say at its close."""
    store = opened(durability=first)
    digest = keep(store, NAMES)
    store.close()
    monkeypatch.setattr(trust, "boot_id", lambda: "the next boot")
    store = opened(durability=then)
    assert store.register(rig.namespace(), rig.ROW) == digest
    kept = first != "none" or then != "none"
    assert rig.check_all(store, digest, NAMES) == (NAMES if kept else [])
    assert store.stats().rebuilds == (first == "none" and then != "none")
    assert all(rig.put(store, digest, NAMES))


def test_what_none_forgot_is_in_the_slots_until_it_is_written_over(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(durability="none")
    digest = keep(store, NAMES)
    store.close()
    monkeypatch.setattr(trust, "boot_id", lambda: "the next boot")
    store = opened(durability="none")
    assert store.stats().entries == 0
    assert store.stats().rebuild_reason == "the machine went down while the index was open"
    assert store.stats().slabs > 0
    store.close()
    (root / "index" / "state.json").unlink()
    store = opened(durability="process")
    assert store.register(rig.namespace(), rig.ROW) == digest
    assert rig.check_all(store, digest, NAMES) == NAMES


def test_processes_of_a_root_agree_on_it_and_tools_take_it_over(group: Group, opened: Opened, root: Path) -> None:
    group.open(durability="power")
    with pytest.raises(ConfigError, match=r"durability=process, but processes \[\d+\] have .* durability=power"):
        opened(durability="process")
    with Store.open_existing(root, housekeeping=False) as store:
        assert store.config.durability == "power"


@pytest.mark.parametrize("durability", [pytest.param("process", marks=pytest.mark.slow), "none"])
def test_one_that_joins_an_index_that_is_no_use(group: Group, root: Path, durability: str) -> None:
    a = group.open(durability=durability)
    assert all(a.call("put", [*range(20)]))
    (root / "index" / "data.mdb").unlink()
    b = group.open(durability=durability)
    found = b.call("check_all", [*range(20)])
    assert found == ([*range(20)] if durability == "process" else [])
    assert b.call("stats")["rebuilds"] == (durability == "process")
    assert all(b.call("put", [*range(20, 30)]))
    a.call("maintain")
    assert a.call("check_all", [*range(30)]) == [*found, *range(20, 30)]
    group.agree()


def test_a_rebuild_finds_what_none_has_stored(opened: Opened, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = opened(durability="none")
    digest = keep(store, NAMES)
    store.close()
    assert json_of(capsys, "rebuild-index", root, "--yes")[1]["entries"] == len(NAMES)
    store = opened(durability="none")
    assert len(rig.check_all(store, store.register(rig.namespace(), rig.ROW), NAMES)) == len(NAMES)
    assert store.keys(digest)
    assert read_root(root).durability == "none"  # type: ignore[union-attr]


@pytest.mark.parametrize("durability", ["none", "process", "power"])
def test_what_is_removed_is_overwritten_on_the_device_before_the_index_forgets_it(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    store = opened(durability=durability)
    keep(store, NAMES)
    store.close()
    done: list[object] = []
    write, flush, apply = SlabFile.write, SlabFile.flush, Index.apply

    def noted_write(slab: SlabFile, *args: Any) -> None:
        done.append(("write", slab.slab_id))
        write(slab, *args)

    def noted_flush(slab: SlabFile) -> None:
        done.append(("flush", slab.slab_id))
        flush(slab)

    def noted_apply(index: Index, deletes: Any, *args: Any) -> bool:
        done.append({record.slab_id for record in deletes})
        return apply(index, deletes, *args)

    monkeypatch.setattr(SlabFile, "write", noted_write)
    monkeypatch.setattr(SlabFile, "flush", noted_flush)
    monkeypatch.setattr(Index, "apply", noted_apply)
    removed, _ = reset(root)
    assert removed.chunks == len(NAMES)
    said = [i for i, one in enumerate(done) if isinstance(one, set) and one]
    for slab_id in {slab_id for i in said for slab_id in done[i]}:  # type: ignore[attr-defined]
        written = [i for i, one in enumerate(done) if one == ("write", slab_id)]
        flushed = [i for i, one in enumerate(done) if one == ("flush", slab_id)]
        assert flushed, "it stays in the machine's memory"
        assert max(written) < min(flushed) < said[0]
