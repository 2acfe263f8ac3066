"""Pages of a device to slots and back: the bytes, whatever order the device's streams go on in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvxfer.jobs import LOAD, STORE, Status
from tests.device.rig import MODEL, Card, card, chunks_of, device_threads, expect_but
from tests.jobs.rig import expect, poisoned, ranks
from tests.oracle import POISON

SHARDINGS = [("nhd", 1, "hnd", 4), ("hnd", 4, "nhd", 2), ("nhd", 2, "nhd", 8), ("hnd", 8, "hnd", 1)]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
@pytest.mark.parametrize("source, source_tp, target, target_tp", SHARDINGS)
def test_a_cache_comes_back_under_another_sharding(
    tmp_path: Path, source: str, source_tp: int, target: str, target_tp: int, blocks_per_chunk: int
) -> None:
    """In any order of the streams; the blocks are filled just before, and spoiled just after."""
    ids = chunks_of(blocks_per_chunk, 22)  # 22: the last chunk of four lacks two
    for seed in range(3):
        pages = ranks(MODEL, source, source_tp, blocks_per_chunk, filled=False)
        with Card(tmp_path / f"slots {seed}", pages, seed=seed) as writer:
            stored = writer.store_trapped(MODEL, source, pages, ids)
            assert not stored.errors and stored.status.tolist() == [Status.OK] * len(ids)
            assert stored.nbytes == len(ids) * pages[0].mapping.slot.payload_bytes
            payload = pages[0].mapping.slot.payload_stride
            want = MODEL.payloads(ids)
            for chunk in range(len(ids)):
                assert np.array_equal(writer.bytes_of(chunk)[:payload], want[chunk]), f"slot {chunk}"
        pages = ranks(MODEL, target, target_tp, blocks_per_chunk, filled=False)
        with Card(tmp_path / f"slots {seed}", pages, seed=seed + 100) as reader:
            loaded = reader.load_trapped(pages, ids)
            assert not loaded.errors and loaded.nbytes == stored.nbytes
            expect(MODEL, target, pages, range(22))
            assert reader.runner.stats()["chunks_verified"] == len(ids)
    assert device_threads() == []


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_one_rank_of_several_moves_its_segments_alone(tmp_path: Path, blocks_per_chunk: int) -> None:
    """Its bays hold no more than these; the ranks write one slot after the other."""
    ids = chunks_of(blocks_per_chunk)
    pages = ranks(MODEL, "nhd", 4, blocks_per_chunk, filled=False)
    everything = [
        tensor.copy() for mine in ranks(MODEL, "nhd", 4, blocks_per_chunk, filled=True) for tensor in mine.tensors
    ]
    for mine in pages:
        for tensor in mine.tensors:
            tensor[:] = everything.pop(0)
        with card(tmp_path, [mine], seed=1) as writer:
            slot = mine.mapping.slot
            assert writer.runner.stats()["device_bays_bytes"] == 3 * 3 * slot.segment_stride * len(
                mine.mapping.segments
            )
            assert not writer.store([mine], ids).errors
            assert writer.runner.stats()["bytes_written"] == len(ids) * len(mine.mapping.segments) * (
                slot.segment_stride + slot.alignment
            )
    targets = ranks(MODEL, "hnd", 2, blocks_per_chunk, filled=False)
    for mine in reversed(targets):
        with card(tmp_path, [mine], seed=2) as reader:
            loaded = reader.load_trapped([mine], ids)
            assert not loaded.errors and loaded.nbytes == len(ids) * mine.mapping.part_bytes
    expect(MODEL, "hnd", targets, range(MODEL.num_blocks))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_are_not_wanted_are_not_touched(tmp_path: Path, seed: int) -> None:
    source, target = (ranks(MODEL, layout, 2, 4, filled=layout == "nhd") for layout in ("nhd", "hnd"))
    with card(tmp_path, source, seed=seed) as writer:
        assert not writer.store(source, [[0, 1, 2, 3], [4, 5, -1, -1], [8, 9, 10, -1]]).errors
    with card(tmp_path, target, seed=seed) as reader:
        outcome = reader.load_trapped(target, [[0, -1, 2, -1], [4, 5, 6, -1], [-1, 9, 10, -1]])
        assert [(e.chunk, e.status) for e in outcome.errors] == [(1, Status.ABSENT)]
        expect_but(MODEL, "hnd", target, [0, 2, 9, 10], [4, 5, 6])


@pytest.mark.parametrize("seed", range(3))
def test_damage_leaves_its_chunk_untouched_and_takes_no_other_with_it(tmp_path: Path, seed: int) -> None:
    source, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "hnd", 2, filled=False)
    ids = chunks_of(1)
    with card(tmp_path, source, seed=seed) as writer:
        assert not writer.store(source, ids).errors
        slot = writer.slot
        writer.flip(4, 2 * slot.segment_stride + 77)  # payload
        writer.flip(9, slot.payload_stride + 100)  # a trailer
        writer.overwrite(23, 0, bytes(writer.bytes_of(22)))  # somebody else's slot
        with writer.path.open("r+b") as file:
            file.truncate(23 * slot.slot_bytes + slot.slot_bytes - 4096)
    with card(tmp_path, target, seed=seed) as reader:
        outcome = reader.load_trapped(target, ids)
        found = {error.chunk: error.status for error in outcome.errors}
        assert found == {4: Status.BAD_SUM, 9: Status.BAD_TRAILER, 23: Status.TRUNCATED}
        expect_but(MODEL, "hnd", target, [b for b in range(24) if b not in found], list(found))


def test_many_jobs_at_once_in_both_directions(tmp_path: Path) -> None:
    """Loads of what was stored, beside stores of the rest, over bays that are shared: no bytes are mixed up."""
    for seed in range(4):
        pages = ranks(MODEL, "nhd", 2, filled=True)
        target = ranks(MODEL, "nhd", 2, filled=False)
        with Card(tmp_path / f"{seed}", [*pages], seed=seed, chunks_per_bay=2) as both:
            assert not both.store(pages, chunks_of(1, 12)).errors
            for block in range(12):
                both.submit(LOAD, target, [[block]], chunks=[block])
                both.submit(STORE, pages, [[12 + block]], chunks=[12 + block])
            for _ in range(12):
                assert not both.finish(LOAD).errors and not both.finish(STORE).errors
            expect(MODEL, "nhd", target, range(12))
            assert not both.load(target, [[b] for b in range(12, 24)], chunks=range(12, 24)).errors
            expect(MODEL, "nhd", target, range(24))


def test_replicas_are_gathered_once_and_all_filled(tmp_path: Path) -> None:
    source = ranks(MODEL, "nhd", 8, filled=True)  # 4 heads: two ranks have each
    with card(tmp_path, source) as writer:
        assert not writer.store(source, chunks_of(1, 2)).errors
        assert [call[0] for call in writer.calls].count("gather") == 4
    target = ranks(MODEL, "hnd", 8, filled=False)
    with card(tmp_path, target) as reader:
        assert not reader.load(target, chunks_of(1, 2)).errors
        assert [call[0] for call in reader.calls].count("scatter") == 8
    expect(MODEL, "hnd", target, range(2))


def test_a_segment_of_several_ranks_is_the_first_ones(tmp_path: Path) -> None:
    """Of two ranks that overlap, as the native runner does it. (Ranks that are right hold the same bytes.)"""
    half, whole = ranks(MODEL, "nhd", 2, filled=True)[0], ranks(MODEL, "hnd", 1, filled=False)[0]
    with card(tmp_path, [half, whole]) as writer:
        assert not writer.store([half, whole], [[7]]).errors
        payload, stride = writer.bytes_of(0), writer.slot.segment_stride
        want = MODEL.payloads([[7]])[0]
        assert np.array_equal(payload[: 2 * stride], want[: 2 * stride])
        size = writer.slot.segment_bytes
        assert (payload[2 * stride : 2 * stride + size] == POISON).all()


def test_one_launch_and_one_copy_a_batch(tmp_path: Path) -> None:
    pages = ranks(MODEL, "nhd", 1, filled=True)
    with card(tmp_path, pages, chunks_per_bay=24) as both:
        both.store(pages, chunks_of(1))
        names = [call[0] for call in both.calls]
        assert names.count("gather") == 1 and names.count("copy") == 2  # block ids, and the bay
        assert max(call[-1] for call in both.calls if call[0] == "copy") == 24 * pages[0].mapping.slot.payload_stride


def test_nothing_is_loaded_into_pages_of_a_job_without_chunks_that_arrive(tmp_path: Path) -> None:
    target = ranks(MODEL, "hnd", 2, filled=False)
    with card(tmp_path, target) as reader:
        outcome = reader.load(target, chunks_of(1, 5))
        assert {error.status for error in outcome.errors} == {Status.TRUNCATED} and outcome.nbytes == 0
        assert "scatter" not in [call[0] for call in reader.calls]
    assert poisoned(target)
