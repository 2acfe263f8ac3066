"""The lookup's rows: `Store.lookup_prefix` over an index of many keys."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.options import Options
from bench.table import Row, Table, figure
from kvxfer.config import StoreConfig
from kvxfer.keys import Namespace, make_offload_key
from kvxfer.slot import SlotLayout
from kvxfer.store import Entry, Store

__all__ = ["run"]

MOST_US = 2.0  # a key
CHAINS = (16, 256, 4096)  # keys of one call
ROUND_KEYS = 1 << 15  # of one timed round
MISSING = 1 << 40  # numbers from here on were never stored
SLOT = SlotLayout(segment_bytes=4096, last_segment_bytes=4096, num_segments=1, segments_per_trailer=1)


def key_of(number: int) -> bytes:
    """A key as a server makes it; another object at every call, whose hash nobody knows yet."""
    return make_offload_key(number.to_bytes(8, "big") * 4, 0)


def namespace() -> Namespace:
    """Of the keys."""
    return Namespace(
        model="bench",
        weights_fingerprint="none",
        dtype="uint8",
        canonical_form="row",
        geometry=[{}],
        blocks_per_chunk=1,
        tokens_per_chunk=16,
        topology="one host",
    )


def fill(store: Store, digest: bytes, keys: int) -> None:
    """Has a store's table take in so many entries, as opening a root with them does.

    What a lookup reads is then what it would be. The slots are not on disk: a million of the smallest take 8 GiB.
    """
    (reservation,) = store.reserve(digest, SLOT, 1)
    slab = reservation.slab
    store.release([reservation])
    order = list(range(keys))
    random.Random(1).shuffle(order)  # or neighbours in a chain would be neighbours in memory
    store._table.load([Entry(digest, key_of(n), slab, 1 + i, 1 + i, 1) for i, n in enumerate(order)])


def wrong_answers(store: Store, digest: bytes, keys: int) -> str | None:
    """Chains whose answer is known."""
    rng = random.Random(2)
    for length in (0, 1, 2, 100, 1000):
        chain = [rng.randrange(keys) for _ in range(length)]
        for gap in {None, 0, length // 2, length - 1} if length else {None}:
            numbers = [MISSING + n if place == gap else n for place, n in enumerate(chain)]
            want = length if gap is None else gap
            if (found := store.lookup_prefix(digest, map(key_of, numbers))) != want:
                return f"{found} of {length} keys were found, with the first missing one at {want}"
    if store.lookup_prefix(bytes(32), [key_of(0)]):
        return "another namespace's keys were found"
    return None


def measure_chain(store: Store, digest: bytes, options: Options, length: int) -> Row:
    """One row: calls of `length` keys that are all there."""
    rng = random.Random(length)
    seconds, why = [], wrong_answers(store, digest, options.keys)
    calls = max(1, ROUND_KEYS // length)
    for number in range(options.runs + 1):
        chains = [[key_of(rng.randrange(options.keys)) for _ in range(length)] for _ in range(calls)]
        start = time.perf_counter()
        found = [store.lookup_prefix(digest, chain) for chain in chains]
        took = time.perf_counter() - start
        if found != [length] * calls:
            why = why or f"{sum(found)} of {length * calls} keys were found"
        if number:  # the first is the warm-up
            seconds.append(took / (calls * length))
    case = f"lookup_prefix of {length} keys, {options.keys:,} stored"
    return figure(
        case, "kvxfer", statistics.median(seconds) * 1e6, "us a key", most=MOST_US, why=why, runs=len(seconds)
    )


def run(table: Table, options: Options) -> None:
    """Adds the lookup's rows."""
    table.note(
        f"lookup: {options.keys:,} entries taken into the table as opening a root does, without slots on disk; keys at "
        "random, made anew for every call"
    )
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-", dir=options.dirs[-1]) as folder:
        config = StoreConfig(root=Path(folder) / "root", capacity_bytes=32 << 20)
        with Store.open(config) as store:
            digest = store.register(namespace(), SLOT)
            fill(store, digest, options.keys)
            table.add(measure_chain(store, digest, options, length) for length in CHAINS)
