"""Cases of docs/rules.md that no other file has: each is a way in which another engine once went wrong."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.jobs import Status
from kvxfer.layout import row_mapping
from kvxfer.testing import FaultyIO
from tests.engine.rig import GEOMETRY, Node, expect, keys_of, namespace_of, poisoned, ranks
from tests.jobs.rig import Rig
from tests.jobs.test_faults import until
from tests.oracle import Model

MODEL = Model.random(GEOMETRY, 12)
ALL = list(range(12))


@pytest.fixture
def node(tmp_root: Path) -> Iterator[Node]:
    with Node(tmp_root, MODEL) as opened:
        yield opened


# ---- R2


@pytest.mark.parametrize("changed", [{"canonical_form": "v1-hnd"}, {"extra": {"pages": "hnd"}}, {"dtype": "int16"}])
def test_rows_of_one_size_and_another_page_layout_are_misses(node: Node, changed: dict[str, Any]) -> None:
    rows = np.random.default_rng(1).integers(0, 256, (4, 6000), dtype=np.uint8)
    back = np.zeros_like(rows)
    mapping, keys = row_mapping(6000), keys_of(range(4))
    mine = namespace_of(canonical_form="v1-nhd", topology="tp1", extra={"pages": "nhd"})
    theirs = namespace_of(**({"canonical_form": "v1-nhd", "topology": "tp1", "extra": {"pages": "nhd"}} | changed))
    with TransferEngine(node.store, mine, [KVPages(mapping, [rows], 4)], live=False) as engine:
        engine.submit_store(1, keys, range(4))
        assert engine.wait([1], 10)[1].bitmap.all()
    with TransferEngine(node.store, theirs, [KVPages(mapping, [back], 4)], live=False) as engine:
        assert engine.lookup(keys) == 0
        engine.submit_load(1, keys, range(4))
        assert engine.wait([1], 10)[1].bitmap.none()
    assert not back.any()


# ---- R3


def test_a_chunk_that_is_being_stored_is_a_miss_and_then_a_hit(node: Node) -> None:
    with FaultyIO() as io:
        rule = io.hang("pwrite", offset=(4096, 1 << 40))
        node.writer.submit_store(101, keys_of([0]), [0])
        until(lambda: rule.hits >= 1, "the write hangs")
        assert node.reader.lookup(keys_of([0])) == 0
        assert node.get([0]).bitmap.none()
        assert poisoned(node.target)
        io.release()
    assert node.writer.wait([101], 10)[101].bitmap.all()
    assert node.get([0]).bitmap.all()
    node.check([0])


# ---- R4


@pytest.mark.parametrize("how", ["missing", "damaged", "failing"])
@pytest.mark.parametrize(
    "gaps",
    [[0], [6], [11], [0, 11], [0, 1, 2], [5, 6, 7], [1, 3, 5, 7, 9, 11], ALL],
    ids=lambda gaps: str(len(gaps)) + "at" + str(gaps[0]),
)
def test_every_chunk_is_attempted_whatever_came_of_those_before(node: Node, gaps: list[int], how: str) -> None:
    rest = [chunk for chunk in ALL if chunk not in gaps]
    if rest or how != "missing":
        assert node.put(rest if how == "missing" else ALL).bitmap.all()
    with FaultyIO() as io:
        for chunk in gaps if how != "missing" else []:
            if how == "damaged":
                node.flip(chunk, 40)
            else:
                io.fail("pread", errno.EIO, offset=_inside(node.offset_range(chunk)))
        result = node.get(ALL)
    if how == "failing":
        assert set(gaps) <= set(result.bitmap.missing())
        rest = [chunk for chunk in ALL if result.bitmap[chunk]]
    else:
        assert result.bitmap.missing() == gaps
    assert {error.chunk for error in result.errors} == (set() if how == "missing" else set(result.bitmap.missing()))
    node.check(rest)


def _inside(span: tuple[int, int]) -> tuple[int, int]:
    """A place in this slot. Slots of other files may lie at the same offset: those fail too."""
    return span[0], span[0] + 1


# ---- R5


def test_a_chunk_that_goes_between_lookup_and_load_is_a_plain_miss(node: Node) -> None:
    node.put(ALL)
    assert node.reader.lookup(keys_of(ALL)) == 12
    (entry,) = node.store.pin(node.digest, keys_of([4]))
    assert entry is not None
    assert node.store.invalidate(entry, "other")
    node.store.unpin([entry])
    result = node.get(ALL)
    assert (result.bitmap.missing(), result.errors) == ([4], ())
    assert node.reader.lookup(keys_of(ALL)) == 4
    assert node.put([4]).bitmap.all()
    assert node.get(ALL).bitmap.all()


def test_slabs_that_were_deleted_cost_no_load_its_result(tmp_root: Path) -> None:
    """What is open can be read on; the next owner of the root finds a miss, and a store makes it a hit."""
    with Node(tmp_root, MODEL) as node:
        node.put(ALL)
        for path in (tmp_root / "slabs").iterdir():
            path.unlink()
        result = node.get(ALL)
        node.check([chunk for chunk in ALL if result.bitmap[chunk]])
    with Node(tmp_root, MODEL) as node:
        assert node.reader.lookup(keys_of(ALL)) == 0
        assert node.get(ALL).bitmap.none()
        assert node.put(ALL).bitmap.all()
        assert node.get(ALL).bitmap.all()
        node.check(ALL)


@pytest.mark.parametrize("broken", ["invalidate", "commit"])
def test_an_exception_while_a_job_is_settled_costs_no_result(
    node: Node, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    node.put([0, 1])
    node.flip(1, 30)

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(node.store, broken, fail)
        stored, loaded = node.put([2, 3]), node.get([0, 1])
        assert not loaded.bitmap[1], "what is doubtful is a miss"
        assert stored.bitmap.all() == (broken == "invalidate")
    assert node.store.stats().pinned_entries == node.store.stats().reserved_slots == 0
    assert node.put([4]).bitmap.all(), "the threads go on"
    assert node.get([4]).bitmap.all()


@pytest.mark.parametrize("broken", ["release", "unpin"])
def test_an_exception_in_what_gives_slots_and_pins_back_costs_no_result(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    with Node(tmp_root, MODEL, breaker_failures=0) as node:
        node.put([0, 1])

        def fail(*_: object) -> None:
            raise RuntimeError("on purpose")

        with monkeypatch.context() as patch, FaultyIO() as io:
            patch.setattr(node.store._table, broken, fail)
            io.fail("pwrite", errno.EIO, offset=(4096, 1 << 40), times=1)
            assert not node.put([2]).bitmap[0], "its slot is to be released"
            assert node.put([0, 3]).bitmap[0], "what is held of it is to be unpinned"
            assert node.get([0, 1]).bitmap.all()
        assert node.put([2, 5]).bitmap.all() and node.get([2, 5]).bitmap.all(), "the threads go on"


# ---- R7


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ESTALE, errno.EROFS])
def test_whatever_the_storage_answers_jobs_end_and_everything_comes_back(tmp_root: Path, code: int) -> None:
    with Node(tmp_root, MODEL, breaker_failures=0) as node:  # or after some of them nothing would be tried any more
        node.put([0])
        before = node.reader.stats()["leaked_bytes"]
        with FaultyIO() as io:
            for op in ("open", "pread", "pwrite", "fallocate", "fsync", "rename"):
                io.fail(op, code)
            for _ in range(20):
                assert node.put([1]).bitmap.none()
                assert node.get([0]).bitmap.none()
        stats = node.store.stats()
        assert (stats.pinned_entries, stats.reserved_slots, stats.quarantined_slots) == (0, 0, 0)
        assert node.reader.stats()["leaked_bytes"] == before
        assert node.get([0]).bitmap.all()
        node.check([0])


# ---- R9


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_storage_that_moves_64_kib_a_call(tmp_root: Path, direct: str) -> None:
    """More chunks than there are threads, each of many calls."""
    rows = np.random.default_rng(7).integers(0, 256, (10, 300_000), dtype=np.uint8)
    back = np.zeros_like(rows)
    mapping = row_mapping(300_000)
    space = namespace_of(canonical_form="row", topology="tp1")
    with Node(tmp_root, MODEL, direct=direct) as node, FaultyIO() as io:
        rules = [io.short(op, 64 << 10) for op in ("pread", "pwrite")]
        for memory, call in ((rows, "submit_store"), (back, "submit_load")):
            with TransferEngine(node.store, space, [KVPages(mapping, [memory], 10)], live=False) as engine:
                getattr(engine, call)(1, keys_of(range(10)), range(10))
                assert engine.wait([1], 20)[1].bitmap.all()
        assert all(rule.hits >= 10 * 4 for rule in rules)
    assert np.array_equal(rows, back)


# ---- R10


def test_a_disk_that_makes_no_slab_is_not_asked_at_every_step(node: Node) -> None:
    with FaultyIO() as io:
        rule = io.fail("fallocate", errno.EIO)
        start = time.monotonic()
        for chunk in ALL * 5:
            result = node.put([chunk])
            assert [error.status for error in result.errors] == [Status.NO_SPACE]
        assert 1 <= rule.hits <= 1 + (time.monotonic() - start), "once a second at most"
        assert node.store.stats().refused_reservations == 60


# ---- R12


def test_counters_begin_at_zero_never_go_down_and_count_once(node: Node) -> None:
    fresh = node.reader.stats() | node.writer.stats()
    assert {name: count for name, count in fresh.items() if count and name != "threads"} == {}
    seen: list[dict[str, int]] = []
    for _ in range(3):
        node.put(ALL)
        node.flip(3, 50)
        node.get(ALL)
        before = node.reader.stats()
        assert node.reader.poll() == []
        assert node.reader.wait([1, 2, 3], 0) == {}
        assert node.reader.stats() == before, "asking again counts nothing"
        seen.append(before)
    gauges = {"jobs_open", "threads", "staging_bytes", "busy_threads", "lost_threads", "leaked_bytes", "queued_chunks"}
    for one, two in zip([fresh, *seen], seen, strict=False):
        assert {name for name in one if name not in gauges and two[name] < one[name]} == set()
    assert seen[-1]["bad_sum"] == 3


# ---- R14


def test_slots_beyond_4_gib_of_their_file(tmp_path: Path) -> None:
    source, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "hnd", 1, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        far = [(size // rig.slot.slot_bytes) + 1 for size in (2**31, 2**32, 2**33)]

        def records(slots: Sequence[int]) -> list[bytes]:
            return [rig.record(chunk, slot=slot) for chunk, slot in enumerate(slots)]

        assert not rig.store(source, [[0], [1], [2]], records=records(far)).status.any()
        assert os.stat(tmp_path / "slots").st_size > 2**33
        assert not rig.load(target, [[0], [1], [2]], records=records(far)).status.any()
        expect(MODEL, "hnd", target, range(3))
        folded = [slot * rig.slot.slot_bytes % 2**32 // rig.slot.slot_bytes for slot in far[1:]]
        near = records(folded)
        assert not set(rig.load(target, [[3], [4]], records=near).status.tolist()) & {Status.OK}, "nothing lies there"
