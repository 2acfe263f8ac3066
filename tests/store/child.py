"""What the processes do that tests start in order to fail or kill them: python -m tests.store.child SCENE ROOT.

Each line that is printed is a promise: what it says has happened before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from kvxfer.store import Store, room
from kvxfer.store import index as index_module
from tests.store import rig


def say(*words: object) -> None:
    print(*words, flush=True)


def arm(on: bool) -> None:
    """Lets the preloaded library act, or not."""
    path = Path(os.environ["KVX_LMDB_ARMED"])
    if on:
        path.touch()
    else:
        path.unlink(missing_ok=True)


def failing_index(root: Path) -> None:
    """Transactions fail for a while: nothing raises, what is served stays, slots come back, and then it goes on."""
    index_module.RECOVERY_INTERVAL_S = 0.0
    with Store.open(rig.config(root), writers=2, housekeeping=False) as store:
        digest = store.register(rig.namespace(), rig.ROW)
        names = [rig.key(i) for i in range(273)]
        assert all(rig.put(store, digest, names[:20]))
        free = store.stats().free_slots
        arm(True)
        for start in range(20, 60, 4):
            assert rig.put(store, digest, names[start : start + 4]) in ([False] * 4, [True] * 4)
            assert store.lookup_prefix(digest, names) >= 20
        arm(False)
        stats = store.stats()
        assert stats.index_errors > 0
        assert stats.reserved_slots == 0
        assert all(rig.put(store, digest, names))
        assert rig.check_all(store, digest, names) == names
        arm(True)
        evicted = store.reserve(digest, rig.ROW, 5)  # an eviction that the index is not told of is none
        held = {(slot.slab.slab_id, slot.slot) for slot in evicted}
        left = [name for name in names if store.contains(digest, name)]
        assert len(left) == 273 - len(evicted) == 273 - len(held)
        arm(False)
        store.release(evicted)
        assert store.maintain()
        assert free > 0
        say("entries", store.stats().entries, "recoveries", store.stats().index_recoveries)


def killed_in_a_commit(root: Path) -> None:
    """Commits with acknowledgements until it is killed."""
    store = Store.open(rig.config(root), writers=2, housekeeping=False)
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(i) for i in range(273)]))
    say("stored", 273)
    arm(True)
    for start in range(1000, 1400, 4):
        slots = store.reserve(digest, rig.ROW, 4)  # evicts four
        say("reserved", start)
        for slot, i in zip(slots, range(start, start + 4), strict=True):
            rig.write(slot, digest, rig.key(i))
        assert all(store.commit(digest, [(rig.key(start + j), slot, rig.FULL) for j, slot in enumerate(slots)]))
        say("committed", start)


def not_closed(root: Path) -> None:
    """Stores, invalidates and reserves, and ends without a word."""
    store = Store.open(rig.config(root), writers=2, housekeeping=False)
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, [rig.key(i) for i in range(100)]))
    (entry,) = store.pin(digest, [rig.key(5)])
    assert entry is not None
    store.invalidate(entry, "bad_sum")
    assert store.maintain()
    assert len(store.reserve(digest, rig.ROW, 50)) == 50
    say("pid", os.getpid())
    os._exit(0)


def a_sync_that_fails(root: Path) -> None:
    """The close cannot put the index on the device."""
    with Store.open(rig.config(root), writers=2, housekeeping=False) as store:
        digest = store.register(rig.namespace(), rig.ROW)
        assert all(rig.put(store, digest, [rig.key(i) for i in range(100)]))
        arm(True)
    say("errors", store.stats().index_errors)


def a_thousand_failures(root: Path) -> None:
    """One error after the other; buffers and slots come back."""
    with Store.open(rig.config(root), writers=2, housekeeping=False) as store:
        digest = store.register(rig.namespace(), rig.ROW)
        assert all(rig.put(store, digest, [rig.key(i) for i in range(10)]))
        before = store.stats()
        arm(True)
        for i in range(1000):
            slots = store.reserve(digest, rig.ROW, 2)
            items = [(rig.key(100 + 2 * i + j), slot, 1) for j, slot in enumerate(slots)]
            assert items == [] == store.commit(digest, items)
        arm(False)
        after = store.stats()
        assert after.index_errors >= 1000
        assert (after.free_slots, after.entries) == (before.free_slots + 21 * (after.slabs - before.slabs), 10)
        assert store.lookup_prefix(digest, [rig.key(i) for i in range(10)]) == 10
        say("done")


SCENES: dict[str, Callable[[Path], None]] = {
    scene.__name__: scene
    for scene in (failing_index, killed_in_a_commit, not_closed, a_sync_that_fails, a_thousand_failures)
}

if __name__ == "__main__":
    room.RETRY_S = 0.0
    SCENES[sys.argv[1]](Path(sys.argv[2]))
