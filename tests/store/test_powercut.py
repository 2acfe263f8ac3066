"""The power goes, at any moment, and the disk has kept any part of what it was not made to keep (powercut.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.engine import TransferEngine
from kvxfer.errors import FormatError
from kvxfer.store import Store, trust
from tests.engine.rig import GEOMETRY, expect, keys_of, namespace_of, ranks
from tests.native.shims import compiled, preloaded
from tests.oracle import POISON, Model
from tests.store import powercut
from tests.store.powercut import CHUNKS, HOW, Call

CHECKOUT = Path(__file__).parents[2]
MODEL = Model.random(GEOMETRY, CHUNKS, seed=3)
ROOT = Path("srv", "root")  # neither was there before
Recorded = Callable[[str], tuple[Path, list[Call]]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """recorded(durability): the directory in which a process made its root, and all that it did there."""
    place = tmp_path_factory.mktemp("powercut")
    library = compiled("record", place)
    done: dict[str, tuple[Path, list[Call]]] = {}

    def record(durability: str) -> tuple[Path, list[Call]]:
        if durability not in done:
            world, log = place / durability, place / f"{durability}.log"
            world.mkdir()
            env = os.environ | preloaded(library)
            env |= {"PYTHONPATH": str(CHECKOUT), "KVX_RECORD_ROOT": str(world), "KVX_RECORD_LOG": str(log)}
            subprocess.run(
                [sys.executable, "-m", "tests.store.powercut", str(world / ROOT), durability], check=True, env=env,
                cwd=CHECKOUT, timeout=110,
            )  # fmt: skip
            done[durability] = world, powercut.read_log(log)
        return done[durability]

    return record


def notes(calls: list[Call]) -> list[dict[str, Any]]:
    """What the process said."""
    return [json.loads(call.words[0]) for call in calls if call.kind == "N"]


def promised(calls: list[Call], cut: int) -> set[int]:
    """Chunks that were acknowledged before the cut, and that what was under way did not evict."""
    before = [note for note in notes(calls[:cut]) if "have" in note]
    after = [note for note in notes(calls[cut:]) if "have" in note]
    if not before or before[-1]["durability"] != "power":
        return set()
    return set(before[-1]["have"]) & set((after or before[-1:])[0]["have"])


def doing(calls: list[Call], cut: int) -> str:
    """What was under way."""
    return next((note["doing"] for note in reversed(notes(calls[:cut])) if "doing" in note), "open")


def reopen(root: Path, durability: str) -> tuple[set[int], Any]:
    """After the next boot: the chunks that a load brings, all of them right and nothing else written; the stats."""
    config = StoreConfig(root=root, durability=durability, **HOW)
    target = ranks(MODEL, "hnd", 1, filled=False)
    with (
        mock.patch.object(trust, "boot_id", return_value="the next boot"),
        Store.open(config, housekeeping=False) as store,
    ):
        engine = TransferEngine(store, namespace_of(), target, config=EngineConfig(io_threads=2))
        for mine in target:
            for tensor in mine.tensors:
                tensor[:] = POISON
        engine.submit_load(1, keys_of(range(CHUNKS)), [*range(CHUNKS)])
        result = engine.wait([1], 100.0)[1]
        hits = {k for k in range(CHUNKS) if result.bitmap[k]}
        expect(MODEL, "hnd", target, sorted(hits))
        stats = store.stats()
        engine.shutdown()
    return hits, stats


def check_cut(recorded: Recorded, durability: str, where: float, seed: int, share: float) -> tuple[set[int], Any]:
    old, calls = recorded(durability)
    cut = 1 + int(where * (len(calls) - 1))
    with tempfile.TemporaryDirectory() as place:
        root = place / ROOT
        powercut.lay_out(powercut.after_a_cut(calls[:cut], seed, share), old, Path(place))
        if not root.exists():
            assert not promised(calls, cut), "the root is gone"
            return set(), None
        try:
            hits, stats = reopen(root, "power" if durability == "switch" else durability)
        except FormatError:  # a root that was just being made: nothing was promised, and nothing is touched
            assert not (root / "kvxfer.json").exists()
            assert not promised(calls, cut)
            return set(), None
    lost = promised(calls, cut) - hits
    assert not lost, f"cut {cut}, {doing(calls, cut)}: lost {sorted(lost)}, {stats.rebuild_reason!r}"
    if durability == "power" and doing(calls, cut) in ("put", "invalidate", "end"):
        assert stats.rebuilds == 0, stats.rebuild_reason
    return hits, stats


# 0 is the harshest: only what was flushed is there.
CUTS = {"where": st.floats(0, 1), "seed": st.integers(0, 1 << 30), "share": st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9])}


def test_the_recording_has_what_the_proof_needs(recorded: Recorded) -> None:
    _, calls = recorded("power")
    assert {note["doing"] for note in notes(calls) if "doing" in note} == {
        "put", "recreate", "invalidate", "close", "end",
    }  # fmt: skip
    assert notes(calls)[-2]["evicted"] > 20
    assert len(promised(calls, len(calls))) > 60
    assert {call.kind for call in calls} >= set("CMWSDRUFN")
    assert any(call.kind == "W" and call.words[3] == "1" for call in calls)  # LMDB's meta pages


@pytest.mark.parametrize("durability", ["power", pytest.param("switch", marks=pytest.mark.slow)])
@settings(max_examples=5, deadline=None, database=None)
@example(where=1.0, seed=0, share=0.0)
@given(**CUTS)
def test_what_was_acknowledged_under_power_is_there_and_right(
    recorded: Recorded, durability: str, where: float, seed: int, share: float
) -> None:
    check_cut(recorded, durability, where, seed, share)


@pytest.mark.slow
def test_what_another_durability_left_is_acknowledged_once_it_is_opened_under_power(recorded: Recorded) -> None:
    _, calls = recorded("switch")
    (opened, *_) = [at for at, call in enumerate(calls) if call.kind == "N" and '"power"' in call.words[0]]
    assert len(promised(calls, opened + 1)) >= 40
    hits, _ = check_cut(recorded, "switch", opened / (len(calls) - 1), 0, 0.0)
    assert len(hits) >= 40


@pytest.mark.parametrize("durability", [pytest.param("process", marks=pytest.mark.slow), "none"])
@settings(max_examples=2, deadline=None, database=None)
@example(where=1.0, seed=0, share=0.5)
@given(**CUTS)
def test_whatever_is_there_under_the_others_is_right(
    recorded: Recorded, durability: str, where: float, seed: int, share: float
) -> None:
    hits, stats = check_cut(recorded, durability, where, seed, share)
    if durability == "none" and stats is not None:
        assert not hits
        assert stats.rebuilds == 0


def test_a_scan_finds_what_the_device_has_and_none_does_not_look(recorded: Recorded) -> None:
    """The kernel had written everything when the machine went down."""
    for durability, scans in (("process", 1), ("none", 0)):
        hits, stats = check_cut(recorded, durability, 1.0, 0, 1.0)
        assert stats.rebuilds == scans
        assert len(hits) >= 40 * scans
        assert stats.rebuild_reason == "the machine went down while the index was open"


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["power", "switch", "process", "none"])
@settings(max_examples=60, deadline=None, database=None)
@given(**CUTS)
def test_many_more_cuts(recorded: Recorded, durability: str, where: float, seed: int, share: float) -> None:
    check_cut(recorded, durability, where, seed, share)
