"""SIGKILL before, at and after a commit: what was said to be stored is there, nothing wrong is, and nothing leaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.engine.rig import GEOMETRY, Node, keys_of
from tests.oracle import Model
from tests.store.test_crash import CHECKOUT, shim  # noqa: F401  (a fixture)

MODEL = Model.random(GEOMETRY, 40)
ALL = list(range(40))


def play(root: Path, *words: object, **env: str) -> int:
    """Runs the child; it must be killed. How many chunks it said were stored."""
    env = {"KVX_LMDB_ARMED": str(root.parent / "armed")} | env
    if "LD_PRELOAD" in env:
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.crash_child", str(root), *map(str, words)], capture_output=True,
            text=True, timeout=60, check=False, cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | env,
        )  # fmt: skip
    else:
        done = forks.run("tests.engine.crash_child", root, *words, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return int(done.stdout.split()[-1])


def inspect(root: Path, said: int, rebuilt: bool = False) -> None:
    """A new process opens the root: every promise holds, every byte that arrives is right, the store works on."""
    with Node(root, MODEL) as node:
        assert node.store.stats().rebuilds == int(rebuilt)
        found = node.reader.lookup(keys_of(ALL))
        assert said <= found
        result = node.get(ALL)
        arrived = [c for c, bit in enumerate(result.bitmap) if bit]
        assert arrived[:said] == ALL[:said]
        node.check(arrived)
        stats = node.reader.stats()
        damaged = stats["bad_sum"] + stats["bad_trailer"] + stats["foreign"] + stats["truncated"]
        assert stats["chunks_verified"] == len(arrived) + damaged
        assert damaged == 0 or rebuilt, "an index that survived names no half-written chunk"
        assert node.store.stats().reserved_slots == 0
        assert node.put(ALL).bitmap.all() and node.get(ALL).bitmap.all()
        node.check(ALL)


@pytest.mark.parametrize(
    ("when", "nbytes", "after"),
    [("before", 0, 0), ("after", 0, 0), ("after", 4096, 2), ("before", 0, 7), ("after", 9000, 19)],
)
@pytest.mark.parametrize("lose_index", [False, True])
def test_killed_in_a_write_before_the_commit(
    tmp_root: Path, when: str, nbytes: int, after: int, lose_index: bool
) -> None:
    said = play(tmp_root, "table", when, nbytes, after)
    assert said == 20 + after // 5 * 5
    if lose_index:
        (tmp_root / "index" / "data.mdb").unlink()
    inspect(tmp_root, said, rebuilt=lose_index)


@pytest.mark.parametrize(
    "fault", ["kill-before:1", "kill-half:1", "kill-after:1", "kill-before:2", "kill-after:2", "kill-before:4"]
)
def test_killed_at_the_commit(tmp_root: Path, fault: str, shim: Path) -> None:  # noqa: F811
    preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(shim)]))
    said = play(tmp_root, "lmdb", LD_PRELOAD=preload, KVX_LMDB_FAULT=f"write:{fault}")
    inspect(tmp_root, said)


def test_killed_after_the_commit(tmp_root: Path) -> None:
    """At the first write of the job after: the one before is whole, though its process never closed anything."""
    said = play(tmp_root, "table", "before", 0, 10)
    assert said == 30
    with Node(tmp_root, MODEL) as node:
        assert node.reader.lookup(keys_of(ALL)) == 30
    inspect(tmp_root, said)
