"""The row of several processes: how long it takes until one finds what another has stored."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.lookup import MISSING, SLOT, key_of, namespace
from bench.options import Options
from bench.table import Table, figure
from kvxfer.config import StoreConfig
from kvxfer.store import Store

__all__ = ["run"]

MOST_MS = 100.0
BATCH = 64  # chunks, as the engine takes rows of 512 KiB
PATIENCE_S = 30.0
_WATCHER = """
import sys, time
from pathlib import Path
from bench import sharing
sharing.watch(Path(sys.argv[1]), int(sys.argv[2]))
"""


def config(root: Path) -> StoreConfig:
    """Of the root that both processes open."""
    return StoreConfig(root=root, capacity_bytes=32 << 20)


def watch(root: Path, rounds: int) -> None:
    """The other process: says when it found each key, by the clock that all processes share."""
    with Store.open(config(root)) as store:
        digest = store.register(namespace(), SLOT)
        print("ready", flush=True)
        for n in range(rounds):
            end = time.monotonic() + PATIENCE_S
            while not store.contains(digest, key_of(n)):
                if time.monotonic() > end:
                    sys.exit(f"key {n} was never found")
                time.sleep(0.0005)
            print(time.monotonic(), flush=True)


def commit_us(store: Store, digest: bytes, rounds: int, first: int) -> tuple[float, str | None]:
    """Reserving and committing in batches of BATCH, without a write between: microseconds a chunk; what went wrong."""
    seconds = []
    for number in range(rounds):
        keys = [key_of(first + number * BATCH + i) for i in range(BATCH)]
        start = time.perf_counter()
        slots = store.reserve(digest, SLOT, BATCH)
        done = store.commit(digest, [(key, slot, 1) for key, slot in zip(keys, slots, strict=False)])
        seconds.append(time.perf_counter() - start)
        if done != [True] * BATCH:
            return 0.0, f"{sum(done)} of {BATCH} chunks were committed"
    return statistics.median(seconds) / BATCH * 1e6, None


def run(table: Table, options: Options) -> None:
    """Adds the rows."""
    rounds = 10 * options.runs
    delays: list[float] = []
    why = None
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-", dir=options.dirs[-1]) as folder:
        root = Path(folder) / "root"
        with Store.open(config(root)) as store:
            digest = store.register(namespace(), SLOT)
            alone, wrong_alone = commit_us(store, digest, rounds, MISSING)
            child = subprocess.Popen(
                [sys.executable, "-c", _WATCHER, str(root), str(rounds)],
                stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
            )  # fmt: skip
            with child:
                assert child.stdout is not None
                child.stdout.readline()
                beside, wrong_beside = commit_us(store, digest, rounds, 2 * MISSING)
                for n in range(rounds):
                    (slot,) = store.reserve(digest, SLOT, 1)
                    if store.commit(digest, [(key_of(n), slot, 1)]) != [True]:
                        why = "a key was not stored"
                        break
                    stored = time.monotonic()
                    if not (line := child.stdout.readline()):
                        why = "the other process did not find a key"
                        break
                    delays.append((float(line) - stored) * 1e3)
                child.stdout.close()
    case = "stored here, found by another process"
    found = statistics.median(delays) if delays else 0.0
    table.note("sharing: from the commit's return to the first lookup of another process that finds the key")
    batch = f"reserve and commit, {BATCH} at a time"
    table.add([figure(batch, "alone", alone, "us a chunk", why=wrong_alone, runs=rounds)])
    table.add([figure(batch, "beside another", beside, "us a chunk", why=wrong_beside, runs=rounds)])
    table.add([figure(case, "median", found, "ms", most=MOST_MS, why=why, runs=len(delays))])
    table.add([figure(case, "longest", max(delays, default=0.0), "ms", most=MOST_MS, why=why, runs=len(delays))])
