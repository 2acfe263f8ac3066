"""namespace.json: what it says, that there are not too many, and that nothing depends on it."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.errors import IOFault, StoreError
from kvxfer.store import Store
from kvxfer.testing import FaultyIO
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
