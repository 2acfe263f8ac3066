"""The resident set's row: what a process keeps of jobs that are done, in a child of its own.

Run as `python -m bench.resident FOLDER WARM_UP JOBS` it is that child: it prints {"before", "after", "why"}, in bytes.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.options import Options
from bench.table import Row, Table, figure
from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.errors import StoreError
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.keys import kvx1_namespace, make_offload_key
from kvxfer.layout import PageLayout, kvx1_mapping
from kvxfer.store import Store

__all__ = ["run"]

MOST_KIB = 1024.0  # that the resident set may have grown by: noise of allocators, and no job's 100 bytes
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16", tokens_per_block=16)
CHUNKS = 4  # of a job
CAPACITY = 8 << 20  # small: the store is full after a few hundred jobs, and evicts from then on
TIMEOUT_S = 60.0


def resident_bytes() -> int:
    """Of this process, files that are mapped included: the second number of statm, in pages."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Worker:
    """One engine over one cache; block b + CHUNKS is where a load puts what a store took from block b."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        page = PageLayout.nhd(GEOMETRY, GEOMETRY.num_kv_heads)
        mapping = kvx1_mapping(GEOMETRY, ShardSpec(), page)
        rng = np.random.default_rng(1)
        blocks = 2 * CHUNKS
        self._tensors = [
            rng.integers(0, 256, (blocks, page.block_stride), dtype=np.uint8) for _ in range(GEOMETRY.num_layers)
        ]
        store = stack.enter_context(Store.open(StoreConfig(root=root, capacity_bytes=CAPACITY)))
        namespace = kvx1_namespace(GEOMETRY, model="bench", weights_fingerprint="random bytes")
        pages = [KVPages(mapping, [tensor.reshape(-1) for tensor in self._tensors], blocks)]
        self._engine = stack.enter_context(TransferEngine(store, namespace, pages, config=EngineConfig(io_threads=2)))
        self._jobs = itertools.count(1)

    def _run(self, call: str, keys: Sequence[bytes], first: int) -> None:
        job = next(self._jobs)
        getattr(self._engine, call)(job, keys, range(first, first + CHUNKS))
        results = self._engine.wait([job], TIMEOUT_S)
        if job not in results or not results[job].bitmap.all():
            raise StoreError(f"{call} of job {job}: {results.get(job)}")

    def pairs(self, count: int) -> str | None:
        """So many stores, each followed by the load of the same keys. What came back wrong."""
        why = None
        for _ in range(count):
            number = next(self._jobs)
            keys = [make_offload_key(number.to_bytes(28, "big") + bytes([i]) * 4, 0) for i in range(CHUNKS)]
            for tensor in self._tensors:
                tensor[:CHUNKS, :8] = np.frombuffer(number.to_bytes(8, "big"), np.uint8)  # other bytes in every job
                tensor[CHUNKS:] = 0
            self._run("submit_store", keys, 0)
            self._run("submit_load", keys, CHUNKS)
            for tensor in self._tensors:
                if not np.array_equal(tensor[:CHUNKS], tensor[CHUNKS:]):
                    why = why or f"job {number} brought other bytes back"
        return why


def child(root: Path, warm_up: int, jobs: int) -> dict[str, object]:
    """What the child process prints."""
    with ExitStack() as stack:
        worker = Worker(stack, root)
        why = worker.pairs(warm_up)
        before = resident_bytes()
        why = worker.pairs(jobs) or why
        return {"before": before, "after": resident_bytes(), "why": why}


def measure_growth(folder: Path, warm_up: int, jobs: int) -> list[Row]:
    """The rows, from a process that does nothing else."""
    place = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "bench.resident", str(folder / "root"), str(warm_up), str(jobs)],
        capture_output=True, text=True, check=False, cwd=place, env=os.environ | {"PYTHONPATH": place},
    )  # fmt: skip
    why = None
    found = {"before": 0, "after": 0}
    if done.returncode:
        why = f"exit status {done.returncode}: {(done.stderr.splitlines() or [''])[-1]}"
    else:
        found = json.loads(done.stdout.splitlines()[-1])
        why = found.pop("why")
    growth = found["after"] - found["before"]
    case = f"{jobs:,} stores and {jobs:,} loads"
    return [
        figure(case, "before", found["before"] / 1024, "KiB resident", why=why),
        figure(case, "after", found["after"] / 1024, "KiB resident", why=why),
        figure(case, "growth", growth / 1024, "KiB", most=MOST_KIB, why=why),
        figure(case, "growth", growth / (2 * jobs), "bytes a job", why=why),
    ]


def run(table: Table, options: Options) -> None:
    """Adds the resident set's rows."""
    warm_up = max(1000, options.jobs // 5)
    table.note(
        f"resident set: one engine, {CHUNKS} chunks a job, {CAPACITY >> 20} MiB of store that is full; counted after "
        f"{warm_up:,} pairs of warm-up; flat is a growth of at most {MOST_KIB:.0f} KiB"
    )
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-", dir=options.dirs[-1]) as folder:
        table.add(measure_growth(Path(folder), warm_up, options.jobs))


if __name__ == "__main__":
    print(json.dumps(child(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
