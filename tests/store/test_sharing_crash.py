"""Processes that are killed, stopped, or cannot write, while others of the root live on."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.store import rig
from tests.store.peer import Dead, Peer, Refused
from tests.store.sharing import Group, eventually, settle
from tests.store.test_crash import KILLS
from tests.store.test_crash import shim as shim

pytestmark = pytest.mark.slow  # a minute and a half of processes in all
N = range(40)
SMALL = {"capacity_bytes": 4 << 20, "slab_bytes": 65 * 4096}  # slabs of 12 slots, 10 of them


def preloaded(shim: Path, root: Path, fault: str, limit: int | None = None) -> dict[str, str]:
    """The environment of a peer whose index fails."""
    env = {
        "LD_PRELOAD": " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(shim)])), "KVX_LMDB_FAULT": fault,
        "KVX_LMDB_ARMED": str(root.parent / "armed"),
    }  # fmt: skip
    return env if limit is None else env | {"KVX_LMDB_FAULT_LIMIT": str(limit)}


def arm(root: Path, on: bool = True) -> None:
    """Lets the shim act."""
    path = root.parent / "armed"
    path.touch() if on else path.unlink(missing_ok=True)


def churn_until_it_dies(peer: Peer, first: int) -> list[int]:
    """Puts, replacements and reservations; the chunks whose put was acknowledged."""
    stored: list[int] = []
    try:
        for start in range(first, first + 400, 5):
            numbers = [*range(start, start + 5)]
            stored += [k for k, ok in zip(numbers, peer.call("put", numbers, n=start // 5 % 2), strict=True) if ok]
            peer.call("reserve", 1)
            peer.call("invalidate", [start])
            stored.remove(start)
    except (Dead, ValueError):
        return stored
    raise AssertionError("it did not die")


def full_again(group: Group, survivor: Peer) -> None:
    """The survivor stores at full capacity."""
    settle([survivor])
    survivor.call("put", [1], n=1)  # one slab may be the other layout's
    slots = 0
    for turn in range(30):
        numbers = [*range(5000 + 12 * turn, 5012 + 12 * turn)]
        assert survivor.call("put", numbers) == [True] * 12, survivor.call("stats")
        slots = max(slots, survivor.call("stats")["entries"])
    assert slots >= 12 * 9
    group.agree()


def some_slow(cases: Sequence[Any]) -> list[Any]:
    """The same, every other one marked slow."""
    return [
        pytest.param(*([case] if isinstance(case, str) else case), marks=[pytest.mark.slow] * (i % 2))
        for i, case in enumerate(cases)
    ]


KILLED_AT = [
    ("fallocate", True, 0), ("fallocate", False, 1), ("pwrite", True, 6), ("pwrite", False, 31), ("rename", True, 0),
    ("rename", False, 1), ("open", True, 1), ("open", False, 2), ("unlink", True, 0), ("unlink", False, 0),
    ("unlink", True, 1), ("lock", True, 0), ("lock", False, 0), ("lock", False, 1), ("lock", False, 6),
    ("lock", False, 17), ("lock", True, 33), ("close", False, 1), ("pwrite", False, 77),
]  # fmt: skip


@pytest.mark.parametrize(("op", "before", "after"), some_slow(KILLED_AT))
def test_killed_at_a_call_of_its_own(group: Group, op: str, before: bool, after: int) -> None:
    b = group.open(room_RETRY_S=0.0, **SMALL)
    b.call("register", 1, "shared")
    assert all(b.call("put", [*N]))
    a = group.open(room_RETRY_S=0.0, **SMALL)
    a.call("register", 1, "shared")
    with group.watch():
        a.call("fault", "kill", op, before=before, after=after)
        stored = churn_until_it_dies(a, 1000)
        assert a.died() == -signal.SIGKILL
        settle([b])
        group.agree(b)
        # Nothing that was acknowledged and not evicted is lost: what is missing was the oldest.
        found = [k for n in range(2) for k in b.call("check_all", [*range(1000, 1400)], n=n)]
        recent = [k for k in stored[-8:] if k % 5]
        assert set(recent) <= set(found), (recent, found)
        full_again(group, b)
    b.call("close")
    b.end()
    again = group.open(**SMALL)
    assert again.call("stats")["rebuilds"] == 0
    group.agree(again)


@pytest.mark.parametrize("when", some_slow([f"kill-{kill}" for kill in [*KILLS, "before:12", "half:31"]]))
def test_killed_in_a_transaction(group: Group, shim: Path, when: str) -> None:
    b = group.open(room_RETRY_S=0.0, **SMALL)
    b.call("register", 1, "shared")
    assert all(b.call("put", [*N]))
    a = group.open(env=preloaded(shim, group.root, f"write:{when}"), **SMALL)
    a.call("register", 1, "shared")
    a.call("put", [900])
    with group.watch():
        arm(group.root)
        stored = churn_until_it_dies(a, 1000)
        assert a.died() == -signal.SIGKILL
        settle([b])
        assert b.call("stats")["index_errors"] == 0
        found = [k for n in range(2) for k in b.call("check_all", [*range(1000, 1400)], n=n)]
        assert set(stored[-8:]) <= set(found)
        group.agree(b)
        full_again(group, b)


def test_killed_while_others_wait_for_its_lock(group: Group) -> None:
    a, b = group.open(**SMALL), group.open(**SMALL)
    a.call("put", [*range(12)])
    a.call("fault", "hang", "fallocate")
    a.send("reserve", 40)
    eventually(
        lambda: (group.root / "slabs").is_dir() and any(p.suffix == ".tmp" for p in (group.root / "slabs").iterdir())
    )
    b.send("reserve", 20)
    time.sleep(0.3)
    a.kill()
    assert len(b.answer()) == 20
    assert b.call("stats")["reserved_slots"] == 20
    assert b.call("check_all", [*range(12)]) == [*range(12)]
    group.agree()


def test_all_killed_then_a_fresh_open(group: Group) -> None:
    peers = [group.open(housekeeping=True, **SMALL) for _ in range(3)]
    for seed, peer in enumerate(peers):
        peer.send("churn", seed, 30.0)
    time.sleep(1.0)
    for peer in peers:
        peer.kill()
    a = group.open(**SMALL)
    assert a.call("stats")["rebuilds"] == 0, a.call("stats")["rebuild_reason"]
    a.call("check_all", [*range(400)])
    group.agree()
    assert len(a.call("reserve", 300)) >= 108


# ---- a writer that was stopped, and whose slot is another's by now -------------------------------------------------


@pytest.mark.parametrize("how", ["taken", "rebuilt"])
def test_a_stalled_writer_does_not_publish_a_slot_that_was_given_away(group: Group, how: str) -> None:
    a, b = group.open(**SMALL), group.open(**SMALL)
    mine = a.call("reserve", 5)
    places = {(slab, slot) for _, slab, slot, _ in mine}
    a.signal(signal.SIGSTOP)
    if how == "taken":
        assert b.call("take_leases") == 1
    else:  # b dies, and the next one finds an index that is no use: it cannot know what a has taken
        b.kill()
        (group.root / "index" / "data.mdb").write_bytes(b"x" * 4096 * 5)
        b = group.open(**SMALL)
        assert b.call("stats")["rebuilds"] == 1
    got = b.call("reserve", 200)
    theirs = [(handle, 500 + i) for i, (handle, slab, slot, _) in enumerate(got) if (slab, slot) in places]
    assert len(theirs) == 5
    b.call("write", [handle for handle, _ in theirs], [k for _, k in theirs])
    assert all(b.call("commit", [handle for handle, _ in theirs], [k for _, k in theirs]))
    a.signal(signal.SIGCONT)
    handles = [handle for handle, *_ in mine]
    a.call("write", handles, [*range(5)])  # over what b has stored
    assert a.call("commit", handles, [*range(5)]) == [False] * 5
    assert a.call("find", [*range(5)]) == []
    b.call("release", [handle for handle, *_ in got if handle not in dict(theirs)])
    group.agree()


def test_what_a_stalled_writer_wrote_over_is_a_miss_and_a_hit_once_stored_again(group: Group) -> None:
    a, b = group.open(register=False, **SMALL), group.open(register=False, **SMALL)
    digest = b.call("engine")
    assert a.call("engine") == digest
    mine = a.call("reserve_pages", 3)
    a.signal(signal.SIGSTOP)
    b.call("take_leases")
    chunks = [*range(48)]
    bits = b.call("save", chunks)
    assert all(bits)
    assert b.call("load", chunks) == [True] * 48
    a.signal(signal.SIGCONT)
    a.call("write_pages", mine, [40, 41, 42])  # what a wanted to store there, sealed and all
    bits = b.call("load", chunks)  # every byte of what came is looked at
    lost = [k for k, bit in zip(chunks, bits, strict=True) if not bit]
    assert len(lost) == 3
    assert b.call("load", lost) == [False] * 3
    assert b.call("save", lost) == [True] * 3
    assert b.call("load", chunks) == [True] * 48
    a.call("release", mine)
    for peer in (a, b):
        peer.call("shutdown")
    group.agree()


# ---- a process that holds the root's lock and does not go on --------------------------------------------------------


@pytest.mark.parametrize("how", ["hung", "stopped"])
def test_a_process_that_keeps_the_lock_costs_the_others_stores_and_nothing_else(group: Group, how: str) -> None:
    quick = {"members_LOCK_TIMEOUT_S": 0.5, "open_timeout_s": 0.5}
    a, b = group.open(**SMALL), group.open(register=False, housekeeping=True, **quick, **SMALL)
    b.call("register")
    b.call("engine")
    assert all(b.call("save", [*range(10)]))
    assert all(b.call("put", [*range(12)]))
    taken = b.call("reserve", 3)
    a.call("fault", "hang", "fallocate")
    a.send("reserve", 80)
    eventually(lambda: any(path.suffix == ".tmp" for path in (group.root / "slabs").iterdir()))
    if how == "stopped":
        a.signal(signal.SIGSTOP)
    assert b.call("lookup", [*range(12)]) == 12
    handle, found = b.call("pin", [*range(12)])
    assert all(found)
    b.call("unpin", handle)
    assert b.call("load", [*range(12)]) == [True] * 10 + [False] * 2
    assert b.call("reserve", 5, timeout=30) == []
    assert b.call("commit", [taken[0][0]], [100], timeout=30) == [False]
    assert b.call("save", [20, 21], timeout=40) == [False] * 2
    assert b.call("maintain", timeout=30) is False
    assert b.call("stats")["busy"] >= 4
    with pytest.raises(Refused, match=f"StoreError: .*{a.pid}|RootBusy"):
        group.open(**quick, **SMALL)
    group.peers[-1].end()
    if how == "stopped":
        a.signal(signal.SIGCONT)
    a.kill()
    b.call("release", [handle for handle, *_ in taken[1:]])
    assert len(b.call("reserve", 5)) == 5
    assert b.call("load", [*range(12)]) == [True] * 10 + [False] * 2
    assert b.call("save", [20, 21]) == [True] * 2
    b.call("shutdown")
    group.agree()


def test_a_close_beside_a_process_that_keeps_the_lock_is_bounded(group: Group) -> None:
    a, b = group.open(**SMALL), group.open(members_LOCK_TIMEOUT_S=0.5, **SMALL)
    b.call("put", [*range(12)])
    b.call("reserve", 5)
    a.call("fault", "delay", "fallocate", 2.0, times=1)
    a.send("reserve", 30)
    eventually(lambda: any(path.suffix == ".tmp" for path in (group.root / "slabs").iterdir()))
    a.signal(signal.SIGSTOP)  # with the lock, for as long as it takes
    assert b.call("close", 5.0, timeout=20) is True
    a.signal(signal.SIGCONT)
    b.end()
    assert len(a.answer()) == 30
    assert a.call("check_all", [*range(12)]) == [*range(12)]
    settle([a])
    assert a.call("stats")["processes"] == 1
    group.agree()


def test_a_stopped_process_that_goes_on_catches_up(group: Group) -> None:
    a, b = group.open(housekeeping=True, **SMALL), group.open(housekeeping=True, **SMALL)
    a.call("register", 1, "shared")
    assert all(a.call("put", [*range(12)]))
    held = a.call("reserve", 2)
    settle([b])
    a.signal(signal.SIGSTOP)
    for turn in range(60):  # more than the log of changes keeps
        assert all(b.call("put", [*range(1000 + turn * 10, 1010 + turn * 10)]))
    c = group.open(**SMALL)
    a.signal(signal.SIGCONT)
    assert a.call("maintain")
    a.call("write", [handle for handle, *_ in held], [50, 51])
    assert a.call("commit", [handle for handle, *_ in held], [50, 51]) == [True, True]
    settle([a, b, c])
    assert c.call("check_all", [50, 51]) == [50, 51]
    group.agree()


# ---- an index that is no use ----------------------------------------------------------------------------------------


def hurt(data: Path, how: str) -> None:
    """Damages an index behind everybody's back."""
    match how:
        case "deleted":
            data.unlink()
        case "another file":
            data.unlink()
            data.write_bytes(os.urandom(16 * 4096))
        case "garbage over it":
            size = data.stat().st_size
            with data.open("r+b") as file:
                for page in range(2, size // 4096):
                    file.seek(page * 4096 + 16)
                    file.write(b"\xff" * 100)
        case "garbage from the start":
            with data.open("r+b") as file:
                file.write(b"\x5a" * 4096 * 4)
        case "truncated":
            os.truncate(data, 4096 * 3)
        case "emptied":
            os.truncate(data, 0)


DAMAGE = ["deleted", "another file", "truncated", "emptied"]
GARBAGE = ["garbage over it", "garbage from the start"]


@pytest.mark.parametrize("how", DAMAGE + GARBAGE)
def test_a_joiner_meets_a_damaged_index(group: Group, how: str) -> None:
    a = group.open(**SMALL)
    assert all(a.call("put", [*N]))
    held = a.call("reserve", 3)
    hurt(group.root / "index" / "data.mdb", how)
    c = group.open(**SMALL)
    assert c.call("check_all", [*N]) == [*N]
    settle([a, c])
    assert a.call("check_all", [*N]) == [*N]
    assert all(a.call("put", [*range(100, 110)]))
    a.call("release", [handle for handle, *_ in held])
    settle([a, c])
    assert c.call("check_all", [*N, *range(100, 110)]) == [*N, *range(100, 110)]
    group.agree()


@pytest.mark.parametrize("how", DAMAGE)
def test_the_index_is_damaged_under_those_who_use_it(group: Group, how: str) -> None:
    a, b = group.open(index_RECOVERY_INTERVAL_S=0.0, **SMALL), group.open(index_RECOVERY_INTERVAL_S=0.0, **SMALL)
    assert all(a.call("put", [*N]))
    settle([a, b])
    hurt(group.root / "index" / "data.mdb", how)
    b.call("put", [*range(100, 105)])
    a.call("put", [*range(200, 205)])
    settle([a, b])
    assert b.call("check_all", [*N]) == a.call("check_all", [*N]) == [*N]
    assert all(b.call("put", [*range(100, 105)]))
    assert all(a.call("put", [*range(200, 205)]))
    settle([a, b])
    group.agree()
    assert a.call("check_all", [*N, *range(100, 105)]) == [*N, *range(100, 105)]


@pytest.mark.parametrize("how", GARBAGE)
def test_pages_turn_to_garbage_under_those_who_use_them(group: Group, how: str) -> None:
    """LMDB believes its pages: a process may die of them. Nothing stored is lost, and nobody is told wrong bytes."""
    peers = [group.open(index_RECOVERY_INTERVAL_S=0.0, **SMALL) for _ in range(2)]
    assert all(peers[0].call("put", [*N]))
    settle(peers)
    hurt(group.root / "index" / "data.mdb", how)
    for peer in peers:
        with suppress(Dead):
            peer.call("put", [*range(100, 105)])
    c = group.open(**SMALL)
    assert c.call("check_all", [*N]) == [*N]
    with suppress(Dead):
        settle(group.peers)
    assert {peer.died() for peer in peers if not peer.is_alive()} <= {-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT}
    group.agree()
    assert c.call("check_all", [*N]) == [*N]


def test_one_that_broke_does_not_write_over_what_others_did_since(group: Group) -> None:
    a, b = group.open(**SMALL), group.open(**SMALL)
    assert all(a.call("put", [*N]))
    settle([a, b])
    b.call("break_index", 30.0)  # and it may not be mended yet
    assert all(a.call("put", [*range(100, 160)]))
    assert b.call("put", [7000]) == [False]
    b.call("break_index", 0.0)
    assert b.call("put", [7001]) == [True]
    expected = [*range(100, 160), 7001]
    settle([a, b])
    assert a.call("check_all", expected) == b.call("check_all", expected) == expected
    assert b.call("stats")["index_recoveries"] == 0
    group.agree()


@pytest.mark.parametrize(
    ("fault", "limit"),
    [
        (f"write:{errno.ENOSPC}:1", 40),
        (f"write:{errno.EIO}:2", 1),
        (f"write:{errno.EIO}:3", 2),
        (f"write:{errno.ENOSPC}:2", 3),
    ],
)
def test_the_index_fails_in_one_of_them(group: Group, shim: Path, fault: str, limit: int) -> None:
    a = group.open(env=preloaded(shim, group.root, fault, limit), index_RECOVERY_INTERVAL_S=0.2, **SMALL)
    b = group.open(**SMALL)
    assert all(a.call("put", [*N]))
    kept: dict[str, Any] = {}
    with group.watch():
        arm(group.root)
        for turn in range(60):
            numbers = [*range(1000 + turn * 2, 1002 + turn * 2)]
            kept[str(turn)] = (a.call("put", numbers), b.call("put", [2000 + turn]), a.call("invalidate", [turn % 40]))
            if turn % 7 == 3:
                handles = [handle for handle, *_ in a.call("reserve", 2)]
                b.call("maintain")
                a.call("release", handles)
        arm(group.root, False)
        time.sleep(0.25)
        settle([a, b])
    assert a.call("stats")["index_errors"] > 0
    assert b.call("stats")["index_errors"] == 0
    assert b.call("stats")["index_conflicts"] == 0
    recent = [2000 + turn for turn in range(50, 60) if kept[str(turn)][1] == [True]]
    assert recent
    assert a.call("check_all", recent) == b.call("check_all", recent) == recent
    group.agree()
    full_again_numbers = [*range(3000, 3012)]
    assert all(a.call("put", full_again_numbers))
    group.agree()


def test_one_that_cannot_sign_in_is_not_overlooked(group: Group, shim: Path) -> None:
    a = group.open(**SMALL)
    assert all(a.call("put", [*range(12)]))
    arm(group.root)
    b = group.open(env=preloaded(shim, group.root, f"write:{errno.ENOSPC}:1"), index_RECOVERY_INTERVAL_S=0.0, **SMALL)
    handles = [handle for handle, *_ in a.call("reserve", 12)]
    a.call("write", handles, [*range(100, 112)])
    assert all(a.call("commit", handles, [*range(100, 112)]))
    assert b.call("lookup", [*range(12)]) == 12
    arm(group.root, False)
    taken = b.call("reserve", 30)
    assert len(taken) == 30
    settle([a, b])
    assert b.call("check_all", [*range(100, 112)]) == [*range(100, 112)]
    group.agree()


@pytest.mark.parametrize("when", some_slow(["before:1", "after:6", "after:1", "half:3", "before:13"]))
def test_killed_while_it_writes_the_index_anew(group: Group, shim: Path, when: str) -> None:
    a = group.open(capacity_bytes=16 << 20)
    b = group.open(env=preloaded(shim, group.root, f"write:kill-{when}"), index_BATCH=50, capacity_bytes=16 << 20)
    assert all(a.call("put", [*range(400)]))
    settle([a, b])
    hurt(group.root / "index" / "data.mdb", "deleted")
    arm(group.root)
    b.send("maintain")
    assert b.died() == -signal.SIGKILL
    settle([a])
    assert a.call("check_all", [*range(400)]) == [*range(400)]
    group.agree(a)
    c = group.open(capacity_bytes=16 << 20)
    assert c.call("check_all", [*range(400)]) == [*range(400)]
    group.agree()
    assert rig.disk_use(group.root)[0] <= 16 << 20
