"""The rows of durability: what a batch of chunks costs from the reservation to the commit, under each of the three."""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from pathlib import Path

from bench.lookup import key_of, namespace
from bench.options import MIB, Options
from bench.table import Table, figure
from kvxfer import _native
from kvxfer.config import DURABILITIES, StoreConfig
from kvxfer.slot import SlotLayout
from kvxfer.staging import AlignedBuffer
from kvxfer.store import Store

__all__ = ["run"]

BATCH = 16
SLOT = SlotLayout(segment_bytes=MIB // 4, last_segment_bytes=MIB // 4, num_segments=2, segments_per_trailer=1)


def batch_ms(root: Path, durability: str, rounds: int) -> tuple[float, str | None]:
    """Reserve, write and commit BATCH slots, again and again over the capacity; milliseconds, and what went wrong."""
    config = StoreConfig(root=root, capacity_bytes=3 * BATCH * MIB, durability=durability)
    page = AlignedBuffer(SLOT.slot_bytes, SLOT.alignment)
    page.array[:] = 7
    seconds, moved = [], ctypes.c_uint64()
    with Store.open(config, housekeeping=False) as store:
        digest = store.register(namespace(), SLOT)
        for number in range(rounds):
            start = time.perf_counter()
            slots = store.reserve(digest, SLOT, BATCH)
            wrote = [
                _native.lib().kvx_file_pwrite(
                    slot.slab.handle, page.address, len(page), slot.slot_offset, ctypes.byref(moved)
                )
                for slot in slots
            ]
            items = [(key_of(number * BATCH + i), slot, 1) for i, slot in enumerate(slots)]
            done = store.commit(digest, items)
            seconds.append(time.perf_counter() - start)
            if done != [True] * BATCH or wrote != [len(page)] * BATCH:
                return 0.0, f"{sum(done)} of {BATCH} chunks were committed"
    return statistics.median(seconds) * 1e3, None


def run(table: Table, options: Options) -> None:
    """Adds the rows, on the first directory: where that is memory a flush costs nothing."""
    table.note(f"durability: {BATCH} slots of {SLOT.slot_bytes >> 10} KiB written by one thread, in {options.dirs[0]}")
    for durability in DURABILITIES:
        with tempfile.TemporaryDirectory(prefix="kvxfer-bench-", dir=options.dirs[0]) as folder:
            found, why = batch_ms(Path(folder) / "root", durability, 2 * options.runs)
        case = f"reserve, write and commit {BATCH} chunks"
        table.add([figure(case, durability, found, "ms", why=why, runs=2 * options.runs)])
