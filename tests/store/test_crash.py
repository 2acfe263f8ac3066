"""Processes that are killed, and an index whose own calls fail: in processes of their own."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.store import Store, trust
from tests.store import rig

Opened = Callable[..., Store]
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/preload_lmdb.c, compiled."""
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "cc")
    library = tmp_path_factory.mktemp("shim") / "preload_lmdb.so"
    source = CHECKOUT / "tests" / "native" / "preload_lmdb.c"
    subprocess.run([*compiler.split(), "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def play(
    scene: str, root: Path, shim: Path | None = None, fault: str = "", limit: int | None = None
) -> tuple[int, list[str]]:
    """Runs a scene of child.py; its exit status and what it said."""
    env = os.environ | {"PYTHONPATH": str(CHECKOUT), "KVX_LMDB_ARMED": str(root.parent / "armed")}
    if shim is not None:
        env["LD_PRELOAD"] = " ".join(filter(None, [env.get("LD_PRELOAD"), str(shim)]))
        env["KVX_LMDB_FAULT"] = fault
        if limit is not None:
            env["KVX_LMDB_FAULT_LIMIT"] = str(limit)
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.child", scene, str(root)], capture_output=True, text=True, timeout=60,
        check=False, env=env, cwd=CHECKOUT,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("fault", "limit"),
    [
        (f"write:{errno.ENOSPC}:1", None), (f"write:{errno.EIO}:1", None), (f"write:{errno.EDQUOT}:2", 1),
        (f"write:{errno.EIO}:2", 1), (f"write:{errno.ENOSPC}:3", 2),
    ],
)  # fmt: skip
def test_transactions_that_fail_cost_stores_and_nothing_else(
    opened: Opened, root: Path, shim: Path, fault: str, limit: int | None
) -> None:
    status, said = play("failing_index", root, shim, fault, limit)
    assert status == 0
    entries = int(said[-1].split()[1])
    store = opened()
    assert store.stats().rebuilds == 0
    assert store.stats().entries == entries >= 268
    digest = store.register(rig.namespace(), rig.ROW)
    assert len(rig.check_all(store, digest, [rig.key(i) for i in range(273)])) == entries


KILLS = "before:1 half:1 after:1 before:2 half:2 after:2 after:7".split()


@pytest.mark.parametrize("when", [f"kill-{kill}" for kill in KILLS])
def test_a_kill_in_a_transaction_leaves_all_of_it_or_nothing(opened: Opened, root: Path, shim: Path, when: str) -> None:
    status, said = play("killed_in_a_commit", root, shim, f"write:{when}")
    assert status == -signal.SIGKILL
    assert said[0] == "stored 273"
    committed = [int(line.split()[1]) for line in said if line.startswith("committed")]
    store = opened()
    assert store.stats().rebuilds == 0, store.stats().rebuild_reason
    digest = store.register(rig.namespace(), rig.ROW)
    names = [rig.key(i) for i in [*range(273), *range(1000, 1400)]]
    found = set(rig.check_all(store, digest, names))
    assert {rig.key(i + j) for i in committed for j in range(4)} <= found
    assert len(found & {rig.key(i) for i in range(1000, 1400)}) % 4 == 0
    assert len(found) >= 269
    assert len(store.reserve(digest, rig.ROW, 273)) == 273  # no slot was lost to the dead


def test_a_killed_process_leaves_no_lock_and_no_reservation(opened: Opened, root: Path) -> None:
    status, _ = play("not_closed", root)
    assert status == 0
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    names = [rig.key(i) for i in range(100)]
    assert store.lookup_prefix(digest, names) == 5
    assert rig.check_all(store, digest, names) == names[:5] + names[6:]
    stats = store.stats()
    assert (stats.rebuilds, stats.reserved_slots, stats.entries) == (0, 0, 99)


def test_damage_to_an_index_that_was_not_closed_is_noticed(opened: Opened, root: Path) -> None:
    play("not_closed", root)
    data = root / "index" / "data.mdb"
    with data.open("r+b") as file:
        for page in range(2, data.stat().st_size // 4096):
            file.seek(page * 4096 + 16)
            file.write(b"\xff" * 100)
    store = opened()
    assert store.stats().rebuild_reason.startswith("damaged")
    digest = store.register(rig.namespace(), rig.ROW)
    assert len(rig.check_all(store, digest, [rig.key(i) for i in range(100)])) == 100  # the invalidated one too


def test_after_the_machine_went_down_the_index_is_rebuilt(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play("not_closed", root)
    monkeypatch.setattr(trust, "boot_id", lambda: "the next boot")
    store = opened()
    assert store.stats().rebuild_reason == "the machine went down while the index was open"
    digest = store.register(rig.namespace(), rig.ROW)
    assert len(rig.check_all(store, digest, [rig.key(i) for i in range(100)])) == 100


def test_a_close_that_cannot_sync_does_not_call_itself_clean(
    opened: Opened, root: Path, shim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = play("a_sync_that_fails", root, shim, f"sync:{errno.EIO}:1")
    assert (status, said) == (0, ["errors 1"])
    assert '"open"' in (root / "index" / "state.json").read_text()
    monkeypatch.setattr(trust, "boot_id", lambda: "the next boot")
    assert opened().stats().rebuilds == 1


def test_a_thousand_failures_in_a_row_leave_nothing_behind(root: Path, shim: Path) -> None:
    assert play("a_thousand_failures", root, shim, f"write:{errno.EIO}:1") == (0, ["done"])


@pytest.mark.parametrize("op", ["fallocate", "pwrite", "rename"])
@pytest.mark.parametrize("before", [True, False])
def test_a_kill_while_a_slab_is_made_leaves_nothing_that_counts(
    opened: Opened, root: Path, op: str, before: bool
) -> None:
    code = (
        "import sys; from pathlib import Path; from kvxfer.store import Store; from kvxfer.testing import FaultyIO\n"
        "from tests.store import rig\n"
        "store = Store.open(rig.config(Path(sys.argv[1])), writers=1)\n"
        "digest = store.register(rig.namespace(), rig.ROW)\n"
        "assert all(rig.put(store, digest, [rig.key(i) for i in range(21)]))\n"
        "FaultyIO().kill(sys.argv[2], before=sys.argv[3] == 'True')\n"
        "store.reserve(digest, rig.ROW, 1)\n"
    )
    done = rig.run_python(code, root, op, before)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = opened()
    whole = 2 if (op, before) == ("rename", False) else 1
    assert store.stats().slabs == whole
    assert len(list((root / "slabs").iterdir())) == whole
    digest = store.register(rig.namespace(), rig.ROW)
    assert len(rig.check_all(store, digest, [rig.key(i) for i in range(21)])) == 21
