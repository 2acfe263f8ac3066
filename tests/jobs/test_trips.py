"""What a job moves, and what it believes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvxfer.convert.pages import KVPages
from kvxfer.jobs import Status
from kvxfer.layout import row_mapping
from tests.jobs.rig import EACH, GEOMETRY, MODEL, Rig, expect, poisoned, ranks
from tests.oracle import POISON, Model


def unwritten(outcome, chunk: int, status: Status) -> None:
    """Asserts that `chunk`, and no other, failed with `status`."""
    want = np.zeros(len(outcome.status), np.uint8)
    want[chunk] = status
    assert outcome.status.tolist() == want.tolist()
    assert [(e.chunk, e.status) for e in outcome.errors] == [(chunk, status)]


@pytest.mark.parametrize("store_tp, load_tp", [(1, 1), (2, 4), (4, 1), (8, 2), (2, 8)])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_any_sharding_reads_what_any_other_wrote(
    tmp_path: Path, store_tp: int, load_tp: int, blocks_per_chunk: int
) -> None:
    blocks = [list(range(c, c + blocks_per_chunk)) for c in range(0, 8, blocks_per_chunk)]
    source = ranks(MODEL, "nhd", store_tp, blocks_per_chunk, filled=True)
    target = ranks(MODEL, "packed", load_tp, blocks_per_chunk, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        stored = rig.store(source, blocks)
        assert not stored.status.any() and stored.nbytes == MODEL.full.size
        payload = [rig.bytes_of(c)[: rig.slot.payload_stride] for c in range(len(blocks))]
        assert np.array_equal(np.stack(payload), MODEL.payloads(blocks))
        loaded = rig.load(target, blocks)
        assert not loaded.status.any() and loaded.nbytes == MODEL.full.size
        assert rig.runner.stats()["segments_verified"] == len(blocks) * rig.slot.num_segments
    expect(MODEL, "packed", target, range(8))


def test_a_rank_reads_only_its_share(tmp_path: Path) -> None:
    source = ranks(MODEL, "nhd", 1, filled=True)
    target = ranks(MODEL, "hnd", 4, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        rig.load(target[2:3], EACH)
        per_chunk = rig.slot.segment_stride + rig.slot.alignment
        assert rig.runner.stats()["bytes_read"] == 8 * per_chunk
    assert poisoned(target[:2] + target[3:])


def test_replicas_take_turns_and_write_each_segment_once(tmp_path: Path) -> None:
    source = ranks(MODEL, "nhd", 8, filled=True)
    with Rig(tmp_path / "slots", source) as rig:
        writes = np.array([[p.mapping.is_writer(c) for p in source] for c in range(8)], dtype=np.uint8)
        assert writes.sum() == 8 * 4
        rig.store(source, EACH, part_writes=writes)
        assert rig.runner.stats()["bytes_written"] == 8 * rig.slot.slot_bytes
        target = ranks(MODEL, "nhd", 2, filled=False)
        rig.load(target, EACH)
    expect(MODEL, "nhd", target, range(8))


def test_one_rank_alone_writes_only_what_it_is_elected_for(tmp_path: Path) -> None:
    source = ranks(MODEL, "nhd", 8, filled=True)
    with Rig(tmp_path / "slots", source) as rig:
        for rank in (0, 1):  # the two replicas of head 0
            writes = np.array([[source[rank].mapping.is_writer(c)] for c in range(8)], dtype=np.uint8)
            assert not rig.store(source[rank : rank + 1], EACH, part_writes=writes).status.any()
        assert rig.runner.stats()["bytes_written"] == 8 * (rig.slot.segment_stride + rig.slot.alignment)


@pytest.mark.parametrize("row_bytes", [64 << 10, (256 << 10) + 4, 1 << 20, (600 << 10) + 33])
@pytest.mark.parametrize("live", [False, True])
def test_rows(tmp_path: Path, row_bytes: int, live: bool) -> None:
    mapping = row_mapping(row_bytes)
    rows = np.random.default_rng(1).integers(0, 256, (5, row_bytes), dtype=np.uint8)
    back = np.full_like(rows, POISON)
    pages, target = KVPages(mapping, [rows], 5), KVPages(mapping, [back], 5)
    with Rig(tmp_path / "slots", [pages], live=live) as rig:
        assert not rig.store([pages], [[3], [0], [4]]).status.any()
        outcome = rig.load([target], [[1], [2], [0]])
        assert not outcome.status.any() and outcome.nbytes == 3 * row_bytes
    assert np.array_equal(back[[1, 2, 0]], rows[[3, 0, 4]])
    assert (back[3:] == POISON).all()


@pytest.mark.parametrize("segment", range(4))
def test_one_flipped_bit_costs_one_chunk_and_touches_no_page(tmp_path: Path, segment: int) -> None:
    source = ranks(MODEL, "nhd", 2, filled=True)
    target = ranks(MODEL, "hnd", 4, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        rig.flip(5, segment * rig.slot.segment_stride + 17)
        outcome = rig.load(target, EACH)
        unwritten(outcome, 5, Status.BAD_SUM)
        assert outcome.errors[0].segment == segment
        stats = rig.runner.stats()
        assert (stats["bad_sum"], stats["chunks_verified"], stats["chunks_loaded"]) == (1, 8, 7)
    expect(MODEL, "hnd", target, [b for b in range(8) if b != 5])


@pytest.mark.parametrize("at", [0, 8, 12, 32, 60, 100, 130, 256, 260, 4091, 4095])
def test_a_changed_trailer_is_not_believed(tmp_path: Path, at: int) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "nhd", 1, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        rig.flip(2, rig.slot.payload_stride + 3 * rig.slot.alignment + at)
        unwritten(rig.load(target, EACH), 2, Status.BAD_TRAILER)
        assert rig.runner.stats()["bad_trailer"] == 1
    expect(MODEL, "nhd", target, [b for b in range(8) if b != 2])


def swap(rig: Rig, slot: int, a: int, b: int, size: int = 4096) -> None:
    data = rig.bytes_of(slot)
    left, right = data[a : a + size].tobytes(), data[b : b + size].tobytes()
    rig.overwrite(slot, a, right)
    rig.overwrite(slot, b, left)


def test_damage_that_keeps_every_size(tmp_path: Path) -> None:
    """Swapped pages, another chunk's slot, an older generation, zeros: each is found and costs its chunk."""
    big = Model.random(
        GEOMETRY.__class__(num_layers=8, num_kv_heads=4, head_dim=64, dtype="float32", tokens_per_block=8), 8
    )
    source, target = ranks(big, "nhd", 2, filled=True), ranks(big, "split", 2, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        older = rig.bytes_of(3).tobytes()
        rig.store(source, [[3]], records=[rig.record(3, generation=99)])
        stride = rig.slot.segment_stride
        assert stride > 3 * 4096
        swap(rig, 0, 4096, 8192)  # two pages of a segment
        swap(rig, 1, 0, stride, 4096)  # pages of two segments
        rig.overwrite(2, 0, rig.bytes_of(7).tobytes())  # another chunk's slot, whole
        rig.overwrite(4, 0, bytes(rig.slot.slot_bytes))
        swap(rig, 5, rig.slot.payload_stride, rig.slot.payload_stride + 4096)  # two trailer pages
        records = [rig.record(i) for i in range(8)]
        outcome = rig.load(target, EACH, records=records)
        want = [
            Status.BAD_SUM,
            Status.BAD_SUM,
            Status.FOREIGN,
            Status.FOREIGN,
            Status.BAD_TRAILER,
            Status.FOREIGN,
            0,
            0,
        ]
        assert outcome.status.tolist() == want
        stats = rig.runner.stats()
        assert (stats["bad_sum"], stats["foreign"], stats["bad_trailer"]) == (2, 3, 1)
        expect(big, "split", target, [6, 7])
        rig.overwrite(3, 0, older)
        assert not rig.load(target, [[3]], chunks=[3]).status.any()


def test_another_namespace_is_foreign(tmp_path: Path) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "nhd", 1, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        outcome = rig.load(target, EACH, digest=bytes(32))
        assert set(outcome.status.tolist()) == {Status.FOREIGN}
    assert poisoned(target)


@pytest.mark.parametrize("cut_at", ["payload", "trailer", "start"])
def test_a_file_cut_short_is_truncated(tmp_path: Path, cut_at: str) -> None:
    source, target = ranks(MODEL, "nhd", 1, filled=True), ranks(MODEL, "nhd", 1, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        keep = {"start": 0, "payload": 5000, "trailer": rig.slot.payload_stride + 5}[cut_at]
        with (tmp_path / "slots").open("r+b") as file:
            file.truncate(7 * rig.slot.slot_bytes + keep)
        unwritten(rig.load(target, EACH), 7, Status.TRUNCATED)
        assert rig.runner.stats()["truncated"] == 1
    expect(MODEL, "nhd", target, range(7))


def test_partial_chunks_give_what_they_have_and_no_more(tmp_path: Path) -> None:
    source = ranks(MODEL, "nhd", 2, 4, filled=True)
    target = ranks(MODEL, "hnd", 1, 4, filled=False)
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, [[-1, -1, 2, 3], [4, 5, -1, -1]])
        assert np.array_equal(rig.bytes_of(1)[: rig.slot.payload_stride], MODEL.payloads([[4, 5, -1, -1]])[0])
        outcome = rig.load(target, [[-1, -1, -1, 3], [4, 5, 6, -1]])
        unwritten(outcome, 1, Status.ABSENT)
        assert rig.runner.stats()["absent"] == 1
        expect(MODEL, "hnd", target, [3])
        assert not rig.load(target, [[-1, -1, 2, -1], [-1, 5, -1, -1]]).status.any()
    expect(MODEL, "hnd", target, [2, 3, 5])


@pytest.mark.parametrize("piece", [1, 4096, 20_000, 1 << 30])
@pytest.mark.parametrize("live", [False, True])
def test_the_size_of_reads_does_not_show(tmp_path: Path, piece: int, live: bool) -> None:
    source, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "hnd", 2, filled=False)
    with Rig(tmp_path / "slots", source, live=live, read_piece_bytes=piece) as rig:
        rig.store(source, EACH)
        assert not rig.load(target, EACH).status.any()
    expect(MODEL, "hnd", target, range(8))
