"""namespace.json: what it says, that there are not too many, and that nothing depends on it."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvxfer.errors import IOFault, StoreError
from kvxfer.store import Store, cleaner, uses
from kvxfer.store.namespaces import NamespaceFiles
from kvxfer.testing import FaultyIO, ManualClock
from tests.store import rig

Opened = Callable[..., Store]
KEYS = [rig.key(i) for i in range(3)]


def test_namespace_files_say_what_was_given(opened: Opened, root: Path) -> None:
    store = opened()
    space = rig.namespace(model="../../etc/passwd", extra={"salt": "ü"})
    digest = store.register(space, rig.ROW)
    body = json.loads((root / "namespaces" / digest.hex() / "namespace.json").read_text())
    assert body["namespace"] == space.as_json()
    assert body["slot"]["segment_bytes"] == 5000
    assert (body["format"], body["weight_epoch"]) == (1, 0)


def test_namespace_files_stay_within_their_share(opened: Opened, root: Path) -> None:
    for i in range(10):
        store = opened(max_files=64)
        store.register(rig.namespace(extra={"turn": i}), rig.ROW)
        store.close()
    assert len(list((root / "namespaces").iterdir())) == 4
    store = opened(max_files=64)
    for i in range(4):
        store.register(rig.namespace(extra={"now": i}), rig.ROW)
    with pytest.raises(StoreError, match="5 namespaces of .* bytes are in use.*room for 4"):
        store.register(rig.namespace(extra={"now": 4}), rig.ROW)
    store.close()
    opened(max_files=20)
    assert len(list((root / "namespaces").iterdir())) == 1


def test_a_damaged_file_is_written_again(opened: Opened, root: Path) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    path = root / "namespaces" / digest.hex() / "namespace.json"
    text = path.read_text()
    for damage in ("", text[:50], text + "x"):
        path.write_text(damage)
        assert store.register(rig.namespace(), rig.ROW) == digest
        assert path.read_text() == text


def test_a_namespace_file_that_cannot_be_written_stops_nobody(opened: Opened, faults: FaultyIO) -> None:
    store = opened()
    faults.fail("rename", errno.ENOSPC, times=1)
    digest = store.register(rig.namespace(), rig.ROW)
    assert store.stats().namespace_errors == 1
    assert rig.put(store, digest, KEYS[:3]) == [True] * 3
    faults.fail("fsync", errno.ENOSPC)
    with pytest.raises(IOFault):
        store.bump_epoch()
    assert store.weight_epoch == 0
    assert store.lookup_prefix(digest, KEYS) == 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The seconds by which stores look after their files."""
    manual = ManualClock(1000.0)
    monkeypatch.setattr(cleaner, "time", SimpleNamespace(monotonic=manual))
    return manual


def remove(store: Store, digest: bytes) -> None:
    """As a gc beside it does."""
    with store.cleaning() as tool:
        assert tool.drop_namespaces([digest]) == 1


def test_a_file_that_a_gc_removed_is_there_again_a_second_later(opened: Opened, root: Path, clock: ManualClock) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    path = root / "namespaces" / digest.hex() / "namespace.json"
    text = path.read_bytes()
    assert store.maintain() and not store.has_work()
    remove(store, digest)
    clock.advance(cleaner.LOOK_S / 2)
    assert not store.has_work(), "it looks now and then"
    clock.advance(cleaner.LOOK_S / 2)
    assert store.has_work() and store.maintain()
    assert path.read_bytes() == text
    assert not store.has_work()


def test_who_has_no_housekeeper_writes_it_again_too(opened: Opened, root: Path, clock: ManualClock) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert store.maintain()
    remove(store, digest)
    clock.advance(cleaner.LOOK_S)
    assert store.maintain()
    assert (root / "namespaces" / digest.hex() / "namespace.json").is_file()


def test_the_file_of_an_epoch_that_has_passed_does_not_come_back(
    opened: Opened, root: Path, clock: ManualClock
) -> None:
    """Also where the epoch is raised between the look, which takes no lock, and the writing."""
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert store.maintain()
    remove(store, digest)
    clock.advance(cleaner.LOOK_S)
    assert store.has_work()
    assert Store.bump_epoch_of(root) == (0, 1)
    assert store.maintain()
    new = store.register(rig.namespace(), rig.ROW)
    for _ in range(3):
        clock.advance(cleaner.LOOK_S)
        store.has_work()
        assert store.maintain()
    assert [path.name for path in (root / "namespaces").iterdir()] == [new.hex()]


def test_a_file_that_made_way_for_others_waits_for_the_touch(opened: Opened, root: Path, clock: ManualClock) -> None:
    """Or two processes whose namespaces are too many for the root would remove each other's every second."""
    store = opened(max_files=64)
    digest = store.register(rig.namespace(), rig.ROW)
    assert store.maintain()
    remove(store, digest)
    others = NamespaceFiles(store.config)
    for i in range(4):
        others.write(bytes([i]) * 32, b"{}", set())
    clock.advance(cleaner.LOOK_S)
    assert store.has_work() and store.maintain()
    assert not (root / "namespaces" / digest.hex()).exists()
    clock.advance(uses.GRAIN_S)
    assert store.maintain()
    assert (root / "namespaces" / digest.hex() / "namespace.json").is_file()
    assert len(list((root / "namespaces").iterdir())) == 4


def test_a_file_that_cannot_be_written_is_tried_again(
    opened: Opened, root: Path, clock: ManualClock, faults: FaultyIO
) -> None:
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert store.maintain()
    remove(store, digest)
    clock.advance(cleaner.LOOK_S)
    rule = faults.fail("rename", errno.ENOSPC, times=1)
    assert store.has_work() and store.maintain()
    assert rule.hits and not store.has_work()
    clock.advance(cleaner.LOOK_S)
    assert store.has_work() and store.maintain()
    assert (root / "namespaces" / digest.hex() / "namespace.json").is_file()
