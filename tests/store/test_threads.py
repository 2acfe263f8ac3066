"""Many threads on one store: storers, loaders, invalidators."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kvxfer.store import Store
from tests.store import rig

Opened = Callable[..., Store]


def test_threads_never_see_each_others_bytes(opened: Opened) -> None:
    store = opened(capacity_bytes=6 << 20)
    digests = [store.register(rig.namespace(extra={"n": n}), rig.ROW) for n in range(2)]
    end = time.monotonic() + 3
    failures: list[BaseException] = []
    turns = [0] * 6

    def run(number: int, work: Callable[[random.Random, bytes], None]) -> None:
        draw = random.Random(number)
        try:
            while (time.monotonic() < end or not turns[number]) and not failures:
                work(draw, draw.choice(digests))
                turns[number] += 1
        except BaseException as exc:  # the main thread shows it
            failures.append(exc)

    def names(draw: random.Random, n: int) -> list[bytes]:
        return [rig.key(i) for i in draw.sample(range(400), n)]

    def storer(draw: random.Random, digest: bytes) -> None:
        rig.put(store, digest, names(draw, draw.randint(1, 12)), mask=draw.choice([1, 3, 15]))

    def loader(draw: random.Random, digest: bytes) -> None:
        entries = store.pin(digest, names(draw, 6))
        for entry in entries:
            assert entry is None or rig.verify(entry)
        if draw.random() < 0.1:
            for entry in filter(None, entries):
                store.invalidate(entry, "bad_sum")
        store.unpin(entries)

    def looker(draw: random.Random, digest: bytes) -> None:
        wanted = names(draw, 50)
        assert 0 <= store.lookup_prefix(digest, wanted) <= 50
        store.stats()
        store.touch(digest, wanted[:5])

    works = [storer, storer, loader, loader, loader, looker]
    threads = [threading.Thread(target=run, args=(i, work)) for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert min(turns) > 0
    assert store.maintain()
    stats = store.stats()
    assert (stats.pinned_entries, stats.reserved_slots, stats.index_errors) == (0, 0, 0)
    assert stats.entries + stats.free_slots == sum(slab.num_slots for slab in store._table.slabs())
    everything = [rig.key(i) for i in range(400)]
    assert sum(len(rig.check_all(store, digest, everything)) for digest in digests) == stats.entries
    store.close()
    again = opened(capacity_bytes=6 << 20)
    assert again.stats().entries == stats.entries
    for n, digest in enumerate(digests):
        assert again.register(rig.namespace(extra={"n": n}), rig.ROW) == digest
        rig.check_all(again, digest, everything)
