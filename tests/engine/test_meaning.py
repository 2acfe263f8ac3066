"""What is refused, what is another namespace, and what many threads at once may not break."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.errors import ForkError, LayoutError, StoreError
from kvxfer.jobs import Status
from kvxfer.layout import row_mapping
from tests.engine.rig import GEOMETRY, Node, keys_of, namespace_of, poisoned, ranks
from tests.oracle import Model

MODEL = Model.random(GEOMETRY, 40)
ALL = list(range(40))


def test_bad_jobs_are_refused_before_they_are_accepted(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put([0, 1])
        for ids, message in [
            ([0], "shape"),
            ([0, 40], "block id 40"),
            ([0, -2], "block id -2"),
            ([0.0, 1.0], "float64"),
            ([3, 3], "named twice"),
        ]:
            with pytest.raises(LayoutError, match=message):
                node.reader.submit_load(500, keys_of([0, 1]), ids)
        with pytest.raises(LayoutError, match="no block at all"):
            node.writer.submit_store(500, keys_of([0]), [-1])
        node.reader.submit_load(501, keys_of([0]), [0])
        with pytest.raises(LayoutError, match="job 501"):
            node.reader.submit_load(501, keys_of([0]), [0])
        node.reader.submit_load(502, [], [])
        assert sorted(node.reader.wait([501, 502], 10)) == [501, 502]
        assert node.reader.stats()["jobs_open"] == 0


def test_ranks_that_do_not_hold_everything_cannot_store(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        half = TransferEngine(node.store, node.namespace, node.source[:1])
        with half, pytest.raises(LayoutError, match="every segment"):
            half.submit_store(1, keys_of([0]), [0])
        node.put([0])
        one = TransferEngine(node.store, node.namespace, node.target[1:2])
        with one:
            one.submit_load(1, keys_of([0]), [0])
            assert one.wait([1], 10)[1].bitmap.all()
        assert poisoned(node.target[:1] + node.target[2:]) and not poisoned(node.target[1:2])
        with pytest.raises(LayoutError, match="blocks_per_chunk=2"):
            TransferEngine(node.store, namespace_of(blocks_per_chunk=2), node.source)
        with pytest.raises(LayoutError, match="slot layouts"):
            TransferEngine(node.store, node.namespace, [*node.source, *ranks(MODEL, "nhd", 1, 2, filled=True)])


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "bfloat16"},
        {"weights_fingerprint": "seed 1"},
        {"model": "other"},
        {"extra": {"salt": "a"}},
        {"extra": {"adapter": "a"}},
        {"topology": "tp2"},
        {"form_version": 2},
    ],
)
def test_another_meaning_is_a_miss(tmp_root: Path, changed: dict) -> None:
    """R2: the same keys and sizes under a namespace that differs in one field."""
    with Node(tmp_root, MODEL) as node:
        node.put(ALL)
    with Node(tmp_root, MODEL, namespace=namespace_of(**changed)) as node:
        assert node.reader.lookup(keys_of(ALL)) == 0
        assert node.get(ALL).bitmap.none() and poisoned(node.target)
    with Node(tmp_root, MODEL) as node:
        assert node.get(ALL).bitmap.all()


def test_a_raised_weight_epoch_makes_everything_a_miss(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put(ALL)
        node.store.bump_epoch()
        assert node.reader.lookup(keys_of(ALL)) == 0 and node.get(ALL).bitmap.none()
    with Node(tmp_root, MODEL) as node:
        assert node.reader.lookup(keys_of(ALL)) == 0
        assert node.put(ALL).bitmap.all() and node.get(ALL).bitmap.all()


def test_a_fork_is_told_so(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put([0])
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                node.reader.submit_load(1, keys_of([0]), [0])
            except ForkError as exc:
                os.write(writer, str(exc).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert f"process {child} is a fork" in os.read(reader, 4096).decode()
        os.close(reader)
        assert node.get([0]).bitmap.all()


def test_rows_of_host_memory(tmp_root: Path) -> None:
    rows = np.random.default_rng(5).integers(0, 256, (16, 300_000), dtype=np.uint8)
    back = np.zeros_like(rows)
    mapping = row_mapping(300_000)
    space = namespace_of(canonical_form="row", topology="tp1")
    with Node(tmp_root, MODEL) as node:
        with TransferEngine(node.store, space, [KVPages(mapping, [rows], 16)], live=False) as engine:
            engine.submit_store(1, keys_of(range(16)), range(16))
            assert engine.wait([1], 10)[1].bitmap.all()
        with TransferEngine(node.store, space, [KVPages(mapping, [back], 16)], live=False) as engine:
            engine.submit_load(1, keys_of(range(16)), range(16))
            assert engine.wait([1], 10)[1].nbytes == rows.size
    assert np.array_equal(rows, back)


def test_loads_stores_and_evictions_from_many_threads_never_give_wrong_bytes(tmp_root: Path) -> None:
    """A store too small for what is asked of it, four threads: whatever arrives is right, and every job ends once."""
    with Node(tmp_root, MODEL, capacity_bytes=5 << 20, slab_bytes=1 << 20, io_threads=4) as node:
        arrived = [0] * 4
        failures: list[BaseException] = []

        def work(who: int) -> None:
            try:
                rng = np.random.default_rng(who)
                target = ranks(MODEL, "hnd", 2, filled=False)
                with TransferEngine(node.store, node.namespace, target, config=node.config) as reader:
                    for step in range(60):
                        prompt, first = int(rng.integers(6)), int(rng.integers(30))
                        numbers = list(range(first, first + 10))
                        keys = keys_of(numbers, prompt)
                        job = who * 1000 + step
                        node.writer.submit_store(job, keys, numbers)
                        reader.submit_load(job, keys, numbers)
                        result = reader.wait([job], 30)[job]
                        arrived[who] += result.bitmap.count()
                        for i, n in enumerate(numbers):
                            if not result.bitmap[i]:
                                continue
                            for rank, mine in enumerate(target):
                                right = MODEL.shard(2, rank)[:, :, n]  # [layer, plane, token, head, byte]
                                for layer, tensor in enumerate(mine.tensors):
                                    stride = mine.mapping.tensors[0].block_stride
                                    at = 8 + n * stride
                                    got = tensor[at : at + right[layer].size]
                                    want = right[layer].transpose(0, 2, 1, 3).reshape(-1)
                                    assert np.array_equal(got, want), f"chunk {n} of prompt {prompt}"
                        if rng.random() < 0.3:
                            node.writer.wait([job], 30)
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not failures, failures[0]
        assert node.writer.drain(30) and min(arrived) > 0
        stats = node.store.stats()
        assert (stats.pinned_entries, stats.reserved_slots, stats.quarantined_slots) == (0, 0, 0) and stats.evictions[
            "capacity"
        ] > 0


def test_a_store_closed_under_the_engine_costs_jobs_not_the_engine(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put([0])
        node.store.close()
        assert [e.status for e in node.put([1]).errors] == [Status.INDEX]
        assert [e.status for e in node.get([0]).errors] == [Status.CANCELLED]
        with pytest.raises(StoreError, match="closed"):
            node.reader.lookup(keys_of([0]))
        assert node.reader.drain(5) and node.writer.drain(5)
