"""Peers against a dictionary, and a campaign of writers, readers and kills."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.store import rig
from tests.store.peer import Dead, Peer
from tests.store.sharing import Group, settle

KEYS = range(60)
ROOMY = {"capacity_bytes": 8 << 20}  # 273 slots: nothing is evicted, so that the model is exact


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_peers_against_a_dictionary(group: Group, seed: int) -> None:
    draw = random.Random(seed)
    model: dict[int, int] = {}
    peers = [group.open(**ROOMY) for _ in range(3)]
    held: dict[Peer, list[int]] = {peer: [] for peer in peers}

    def drop(peer: Peer) -> None:
        peers.remove(peer)
        held.pop(peer)
        peer.end()

    for step in range(150):
        peer = draw.choice(peers)
        numbers = draw.sample(KEYS, draw.randint(1, 6))
        mask = draw.choice([1, 3, 7, rig.FULL])
        match draw.choice(
            ["put"] * 5 + ["invalidate"] * 2 + ["reserve", "release", "commit", "kill", "leave", "sleep"]
        ):
            case "put":
                assert all(peer.call("put", numbers, mask=mask))
                for k in numbers:
                    model[k] = model.get(k, 0) if mask & ~model.get(k, 0) == 0 else mask
            case "invalidate":
                peer.call("maintain")
                assert peer.call("invalidate", numbers) == [k in model for k in numbers]
                peer.call("maintain")  # or a put of somebody else would find what is to be forgotten
                for k in numbers:
                    model.pop(k, None)
            case "reserve" if len(held[peer]) < 15:
                held[peer] += [handle for handle, *_ in peer.call("reserve", draw.randint(1, 6))]
            case "release":
                peer.call("release", held[peer])
                held[peer] = []
            case "commit" if held[peer]:
                handle, k = held[peer].pop(), numbers[0]
                peer.call("write", [handle], [k], mask=mask)
                assert peer.call("commit", [handle], [k], mask=mask) == [True]
                model[k] = model.get(k, 0) if mask & ~model.get(k, 0) == 0 else mask
            case "kill" if step % 3 == 0:
                peer.kill()
                drop(peer)
            case "leave" if step % 3 == 0:
                assert peer.call("close")
                drop(peer)
        while len(peers) < 3 and (not peers or draw.random() < 0.5):
            peers.append(group.open(**ROOMY))
            held[peers[-1]] = []
        if step % 5 == 0:
            settle(peers)
            for mine in peers:
                for bit in (1, 3, 7, rig.FULL):
                    assert mine.call("find", [*KEYS], mask=bit) == [k for k in KEYS if model.get(k, 0) & bit == bit]
    for mine in peers:
        mine.call("release", held[mine])
    group.agree(*peers)
    assert [mine.call("check_all", [*KEYS]) for mine in peers] == [sorted(model)] * len(peers)


def campaign(group: Group, seconds: float) -> None:
    """4 writers and 4 readers; one of them is killed every now and then, and another takes its place."""
    how = {"capacity_bytes": 5 << 20, "slab_bytes": 65 * 4096, "max_files": 40}
    draw = random.Random(int(seconds))
    end = time.monotonic() + seconds
    totals: dict[str, int] = {}

    def start(role: str) -> Peer:
        peer = group.start()
        peer.send("set", "room", "RETRY_S", 0.05).send("open", housekeeping=True, **how).send(
            "register", 7, "shared"
        ).send("engine")
        return peer.send(role, draw.randrange(1 << 30), max(0.5, end - time.monotonic()))

    group.capacity, group.files = how["capacity_bytes"], how["max_files"]
    team = [(role, start(role)) for role in ["saving", "saving", "both", "both", *["loading"] * 4]]
    kills = 0
    with group.watch() as watch:
        while time.monotonic() < end - 1.5:
            time.sleep(draw.uniform(0.2, 0.6))
            i = draw.randrange(len(team))
            role, victim = team[i]
            assert victim.is_alive(), victim.errors()
            victim.kill()
            victim.end()
            kills += 1
            team[i] = role, start(role)
        for _, peer in team:
            for _ in range(4):
                peer.answer()
            for name, count in peer.answer().items():
                totals[name] = totals.get(name, 0) + count
            peer.call("shutdown")
    living = [peer for _, peer in team]
    group.agree(*living)
    for peer in living:
        stats = peer.call("stats")
        assert (stats["index_errors"], stats["index_conflicts"], stats["rebuilds"]) == (0, 0, 0)
        assert stats["reserved_slots"] == stats["foreign_slots"] == 0
    found = living[0].call("check_all", [*range(400)], n=7)
    assert [peer.call("check_all", [*range(400)], n=7) for peer in living] == [found] * len(living)
    print(f"{seconds:.0f} s, {kills} kills: {totals}; at most {watch.most} on disk")
    assert kills > 0
    assert totals["hits"] > 0
    assert totals["saved"] > 0


def test_a_short_campaign(group: Group) -> None:
    campaign(group, 5.0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif("KVXFER_CAMPAIGN_S" not in os.environ, reason="KVXFER_CAMPAIGN_S says how long, such as 600")
def test_a_long_campaign(group: Group) -> None:
    campaign(group, float(os.environ["KVXFER_CAMPAIGN_S"]))


def test_a_dead_peer_says_so(group: Group) -> None:
    a = group.open()
    a.kill()
    with pytest.raises(Dead):
        a.call("stats")
