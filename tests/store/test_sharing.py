"""Several processes on one root: what one stores the others find, and nobody's slot is anybody else's."""

from __future__ import annotations

import errno
import random

import pytest

from kvxfer.store import Store
from tests.store import rig
from tests.store.peer import Dead, Peer, Refused
from tests.store.sharing import Group, eventually, settle

N = range(30)


def test_what_one_process_stores_another_finds(group: Group) -> None:
    a, b = group.open(), group.open()
    assert all(a.call("put", [*N]))
    assert b.call("find", [*N]) == []
    assert b.call("maintain")
    assert b.call("check_all", [*N]) == [*N]
    assert all(b.call("put", [*range(30, 60)]))
    assert a.call("put", [31]) == [True]
    assert a.call("stats")["duplicates"] == 1  # a store looks before it decides
    assert a.call("check_all", [*range(60)]) == [*range(60)]
    c = group.open()
    assert c.call("check_all", [*range(60)]) == [*range(60)]
    group.agree()


def test_with_the_housekeeper_it_is_found_soon(group: Group) -> None:
    a, b = group.open(housekeeping=True), group.open(housekeeping=True)
    waits = []
    for number in range(20):
        assert a.call("put", [number]) == [True]
        waits.append(eventually(lambda: b.call("lookup", [*range(number + 1)]) == number + 1))  # noqa: B023
    print(f"another process finds a chunk after {sorted(waits)[10] * 1e3:.0f} ms, {max(waits) * 1e3:.0f} at most")
    assert sorted(waits)[10] < 1.0
    b.call("invalidate", [3])
    eventually(lambda: a.call("find", [3]) == [])
    assert a.call("bump_epoch") == 1
    eventually(lambda: b.call("find", [*N]) == [])


def test_replacements_invalidations_and_evictions_are_seen(group: Group) -> None:
    a, b, c = group.open(), group.open(), group.open()
    assert all(a.call("put", [*N], mask=1))
    settle([b, c])
    assert all(b.call("put", [*range(10)], mask=7))
    settle([c, a])
    assert c.call("find", [*N], mask=7) == a.call("find", [*N], mask=7) == [*range(10)]
    assert a.call("check_all", [*N]) == [*N]
    assert b.call("stats")["replacements"] == 10
    assert c.call("invalidate", [5, 25]) == [True, True]
    assert a.call("find", [5, 25]) == [5, 25]
    settle([c, a, b])
    assert a.call("find", [5, 25]) == b.call("find", [5, 25]) == []
    assert all(b.call("put", [5, 25]))
    group.agree()
    for start in range(1000, 1400, 20):
        assert all(c.call("put", [*range(start, start + 20)]))
    picture = group.agree()
    assert len(picture["entries"]) == c.call("stats")["entries"] <= 273
    found = a.call("check_all", [*N, *range(1000, 1400)])
    assert found == b.call("check_all", [*N, *range(1000, 1400)])
    assert set(range(1200, 1400)) <= set(found)


def test_pinned_in_one_process_and_evicted_by_another(group: Group) -> None:
    a, b = group.open(), group.open()
    a.call("put", [*N])
    handle, found = a.call("pin", [*N])
    assert all(found)
    for start in range(1000, 1600, 20):
        assert all(b.call("put", [*range(start, start + 20)]))
    settle([a, b])
    assert a.call("find", [*N]) == []
    a.call("unpin", handle)
    group.agree()
    assert all(a.call("put", [*N]))
    group.agree()


@pytest.mark.parametrize("outside", [False, True])
def test_the_weight_epoch_is_everybodys(group: Group, outside: bool) -> None:
    a, b = group.open(), group.open()
    a.call("put", [*N])
    settle([a, b])
    taken = b.call("reserve", 2)
    b.call("write", [taken[0][0]], [100])
    if outside:
        assert Store.bump_epoch_of(group.root) == (0, 1)
    else:
        assert a.call("bump_epoch") == 1
    assert b.call("commit", [taken[0][0]], [100]) == [False]  # of a digest that was
    settle([a, b])
    assert a.call("find", [*N]) == b.call("find", [*N, 100]) == []
    assert a.call("weight_epoch") == b.call("weight_epoch") == 1
    assert b.call("reserve", 1) == []
    for peer in (a, b):
        peer.call("register")
    assert b.call("put", [*N]) == [True] * 30
    settle([a])
    assert a.call("check_all", [*N]) == [*N]
    b.call("release", [taken[1][0]])
    group.agree()


def test_two_bumps_in_a_row_are_seen(group: Group) -> None:
    a = group.open()
    for turn in range(1, 40, 2):
        a.call("put", [1])
        for _ in range(2):
            Store.bump_epoch_of(group.root)
        a.call("maintain")
        assert a.call("weight_epoch") == turn + 1
        assert a.call("find", [1]) == []
        a.call("register")


@pytest.mark.parametrize(
    "change",
    [{"capacity_bytes": 9 << 20}, {"max_files": 100}, {"index_map_bytes": 2 << 20}],
    ids=lambda c: next(iter(c)),
)
def test_limits_that_differ_are_refused_by_name(group: Group, change: dict[str, int]) -> None:
    a = group.open()
    a.call("put", [*N])
    with pytest.raises(Refused, match=f"ConfigError: .*{next(iter(change))}.*{a.pid}"):
        group.open(**change)
    group.capacity, group.files = 8 << 20, 4096
    group.peers[-1].end()
    assert all(a.call("put", [*range(50)]))
    group.agree()
    a.call("close")
    group.open(**change)


def test_every_seat_taken(group: Group) -> None:
    a = group.open(members_MAX_MEMBERS=2)
    b = group.open(members_MAX_MEMBERS=2)
    with pytest.raises(Refused, match="StoreError: .*seats"):
        group.open(members_MAX_MEMBERS=2)
    group.peers[-1].end()
    assert all(a.call("put", [*N]))
    group.agree()
    b.call("close")
    b.end()
    group.open(members_MAX_MEMBERS=2)
    group.agree()


def test_a_slot_is_given_once(group: Group) -> None:
    peers = [group.open() for _ in range(3)]
    draw = random.Random(1)
    held: dict[Peer, list[list[int]]] = {peer: [] for peer in peers}
    for _ in range(60):
        peer = draw.choice(peers)
        if draw.random() < 0.6 or not held[peer]:
            held[peer] += peer.call("reserve", draw.randint(1, 20))
        else:
            draw.shuffle(held[peer])
            some, held[peer] = held[peer][:10], held[peer][10:]
            peer.call("release", [handle for handle, *_ in some])
        places = [(slab, slot) for mine in held.values() for _, slab, slot, _ in mine]
        assert len(set(places)) == len(places)
    assert len(places) > 100
    for peer in peers:
        peer.call("release", [handle for handle, *_ in held[peer]])
    picture = group.agree()
    assert picture["leases"] == picture["foreign"] == {}


# store.py has to take the slots of a commit out of their lease's row in the transaction that puts the entries.


def test_part_of_a_lease_is_committed(group: Group) -> None:
    a, b = group.open(), group.open()
    taken = a.call("reserve", 4)
    handles = [handle for handle, *_ in taken]
    a.call("write", handles[:2], [1, 2])
    assert a.call("commit", handles[:2], [1, 2]) == [True, True]
    settle([a, b])
    c = group.open()  # meets a lease of which two slots are entries'
    assert c.call("check_all", [1, 2]) == [1, 2]
    group.agree()
    a.call("release", handles[2:])
    group.agree()
    assert c.call("check_all", [1, 2]) == [1, 2]


def test_the_rest_of_a_lease_ends_after_its_first_slot_was_given_to_another(group: Group) -> None:
    a, b = sorted([group.open(), group.open()], key=lambda peer: -peer.call("picture")["me"][1])  # a's rows come last
    handles = [handle for handle, *_ in a.call("reserve", 2)]
    a.call("write", handles[:1], [1])
    assert a.call("commit", handles[:1], [1]) == [True]
    assert b.call("maintain")
    assert b.call("invalidate", [1]) == [True]
    got = b.call("reserve", 272)  # every slot but the one that a holds
    assert len(got) == 272
    c = group.open()
    assert c.call("reserve", 1) == []
    a.call("release", handles[1:])
    settle([a, b, c])
    assert len(c.call("reserve", 5)) == 1
    group.agree()


def test_slabs_of_several_layouts_come_and_go(group: Group) -> None:
    peers = [group.open(max_files=60) for _ in range(3)]
    for peer in peers:
        peer.call("register", 1, "shared")
        peer.call("register", 2, "row")
    before = None
    for turn in range(8):
        n = (0, 1, 2, 1)[turn % 4]  # of two layouts; what was stored before is cold by then
        for i, peer in enumerate(peers):
            assert any(peer.call("put", [*range(turn * 200 + i * 60, turn * 200 + i * 60 + 60)], n=n))
        group.agree()
        wanted = [*range(turn * 200, turn * 200 + 200)]  # the others would be used
        assert peers[0].call("check_all", wanted, n=n) == peers[2].call("check_all", wanted, n=n)
        before = before or [peer.call("fds") for peer in peers]
    assert sum(peer.call("stats")["slabs_removed"] for peer in peers) > 0
    slabs = peers[0].call("stats")["slabs"]
    assert all(now <= was + slabs for now, was in zip([peer.call("fds") for peer in peers], before, strict=True))


def test_a_dead_processs_slots_come_back(group: Group) -> None:
    a, b = group.open(), group.open()
    a.call("put", [*N])
    assert len(a.call("reserve", 200)) == 200
    b.call("maintain")
    assert len(b.call("reserve", 43)) == 43
    a.kill()
    with pytest.raises(Dead):
        a.call("stats")
    b.call("maintain")
    assert b.call("check_all", [*N]) == [*N]
    assert b.call("stats")["processes"] == 1
    assert len(b.call("reserve", 200)) == 200
    group.agree()


def test_a_dead_processs_seat_is_taken_before_anybody_noticed(group: Group) -> None:
    a, b = group.open(), group.open()
    assert len(a.call("reserve", 200)) == 200
    b.call("maintain", False)
    a.kill()
    c = group.open()
    settle([b, c])
    assert len(c.call("reserve", 273)) == 273
    group.agree()


def test_a_process_that_slept_while_slabs_came_and_went(group: Group) -> None:
    a, b = group.open(), group.open()
    for peer in (a, b):
        peer.call("register", 1, "shared")
    assert all(a.call("put", [*range(270)]))
    settle([a, b])
    assert b.call("put", [1000], n=1) == [True]  # a slab of row slots went for it
    c = group.open()
    for turn in range(12):  # and that one again; the log of changes forgets
        assert any(c.call("put", [*range(2000 + 100 * turn, 2100 + 100 * turn)]))
    group.agree()
    assert all(a.call("put", [*range(20)]))
    settle([b, c])
    assert b.call("check_all", [*range(20)]) == [*range(20)]


def test_a_process_that_slept_while_a_slabs_number_was_given_again(group: Group) -> None:
    a, b = group.open(), group.open(room_RETRY_S=0.0)
    for peer in (a, b):
        peer.call("register", 1, "shared")
    assert all(a.call("put", [*range(240)]))  # 12 slabs
    assert b.call("put", [1000], n=1) == [True]  # the 13th
    settle([a, b])
    b.call("touch", [*range(240)])
    assert all(b.call("put", [*range(3000, 3012)]))  # the last free slots
    b.call("fault", "fail", "fallocate", errno.ENOSPC)
    assert b.call("put", [*range(4000, 4030)])
    b.call("no_faults")
    assert (b.call("stats")["slabs_removed"], b.call("stats")["slabs"]) == (1, 12)
    c = group.open()
    assert all(c.call("put", [*range(5000, 5040)]))
    assert (group.root / "slabs" / "slab-00000013.kvx").exists()
    for turn in range(12):  # the log of changes forgets
        assert all(c.call("put", [*range(6000 + 50 * turn, 6050 + 50 * turn)]))
    group.agree()
    assert all(a.call("put", [*range(60)]))
    settle([b, c])
    assert b.call("check_all", [*range(60)]) == [*range(60)]


def test_a_released_slot_is_given_to_another_while_the_rest_of_its_lease_is_open(group: Group) -> None:
    a, b = sorted([group.open(), group.open()], key=lambda peer: -peer.call("picture")["me"][1])  # a's rows come last
    first = a.call("reserve", 2)
    a.call("release", [first[0][0]])
    again = a.call("reserve", 271)
    a.call("write", [again[-1][0]], [1])
    assert a.call("commit", [again[-1][0]], [1]) == [True]
    place = {tuple(again[-1][1:3])}
    assert place == {tuple(first[0][1:3])} or tuple(first[0][1:3]) in {(slab, slot) for _, slab, slot, _ in again}
    a.call("release", [handle for handle, *_ in again[:-1]])
    b.call("maintain")
    b.call("invalidate", [1])
    got = b.call("reserve", 272)
    c = group.open()
    a.call("release", [first[1][0]])
    settle([a, b, c])
    mine = {(slab, slot) for _, slab, slot, _ in c.call("reserve", 10)}
    assert not mine & {(slab, slot) for _, slab, slot, _ in got}
    group.agree()


def test_the_index_is_as_full_as_it_gets(group: Group) -> None:
    """1 MiB of index, more slots than it can name: entries make way, and the file never fills."""
    how = {"capacity_bytes": 32 << 20, "index_map_bytes": 1 << 20}
    peers = [group.open(**how) for _ in range(3)]
    with group.watch():
        for turn in range(12):
            for i, peer in enumerate(peers):
                start = (turn * 3 + i) * 100
                assert sum(peer.call("put", [*range(start, start + 100)])) == 100
        for peer in peers:
            assert len(peer.call("reserve", 60)) == 60
        assert all(peers[0].call("put", [*range(9000, 9100)]))
    group.agree()
    for peer in peers:
        stats = peer.call("stats")
        assert (stats["index_errors"], stats["index_recoveries"], stats["index_conflicts"]) == (0, 0, 0)
        assert stats["entries"] + 180 <= stats["max_entries"]


def test_the_last_one_out_leaves_it_whole(group: Group) -> None:
    a, b = group.open(), group.open()
    a.call("put", [*N])
    b.call("maintain")
    b.call("invalidate", [4])
    assert a.call("close")
    assert '"open"' in (group.root / "index" / "state.json").read_text()
    assert b.call("put", [100]) == [True]
    assert b.call("close")
    assert '"clean"' in (group.root / "index" / "state.json").read_text()
    for peer in (a, b):
        peer.end()
    c = group.open()
    assert c.call("stats")["rebuilds"] == 0
    assert c.call("check_all", [*N, 100]) == [*range(4), *range(5, 30), 100]
    group.agree()


def test_many_come_and_go_at_once(group: Group) -> None:
    a = group.open()
    a.call("put", [*N])
    for _ in range(3):
        peers = [group.start() for _ in range(4)]
        for peer in peers:
            peer.send("open")
        for peer in peers:
            peer.answer()
            peer.send("register")
        for peer in peers:
            peer.answer()
        group.agree()
        for peer in peers:
            peer.send("close")
        for peer in peers:
            assert peer.answer() is True
            peer.end()
    group.agree()
    assert a.call("check_all", [*N]) == [*N]


def test_tables_of_all_are_the_index_after_everybody_stored_ten_times_the_capacity(group: Group) -> None:
    how = {"capacity_bytes": 6 << 20, "max_files": 40}
    peers = [group.open(housekeeping=True, **how) for _ in range(4)]
    for peer in peers:
        peer.call("register", 1, "shared")
    with group.watch() as watch:
        for seed, peer in enumerate(peers):
            peer.send("churn", seed, 4.0, namespaces=[0, 1])
        counts = [peer.answer() for peer in peers]
    assert min(count["stored"] for count in counts) > 20
    print(f"{sum(count['stored'] for count in counts)} stored, {watch.most} on disk at most in {watch.looks} looks")
    group.agree()
    for peer in peers:
        stats = peer.call("stats")
        assert (stats["index_errors"], stats["index_conflicts"], stats["reserved_slots"]) == (0, 0, 0)
        assert [peer.call("check_all", [*range(400)], n=n) for n in range(2)] == [
            peers[0].call("check_all", [*range(400)], n=n) for n in range(2)
        ]
    assert sum(stats["evictions"].values()) + sum(stats["invalidations"].values()) > 0


def test_what_a_load_brings_is_right_while_others_rewrite_the_slots(group: Group) -> None:
    how = {"capacity_bytes": 4 << 20, "slab_bytes": 65 * 4096}
    peers = [group.open(housekeeping=True, register=False, **how) for _ in range(4)]
    for peer in peers:
        peer.call("engine")
    with group.watch():
        for seed, peer in enumerate(peers):
            peer.send("saving" if seed < 2 else "loading", seed, 4.0)
        counts = [peer.answer() for peer in peers]
    print(counts)
    assert sum(count.get("saved", 0) for count in counts) > 50
    assert sum(count.get("hits", 0) for count in counts) > 20
    for peer in peers:
        peer.call("shutdown")
    group.agree()
    assert rig.disk_use(group.root)[0] <= group.capacity
