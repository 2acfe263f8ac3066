"""launch.py: which vector and grid it chooses, and the bytes and sums of what is moved then."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from kvxfer.checksum import segment_checksum
from kvxfer.convert import launch
from kvxfer.convert.pages import KVPages
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, row_mapping
from kvxfer.mapping import LocalTensor
from kvxfer.opaque import opaque_mapping
from kvxfer.slot import ROW_SEGMENT_BYTES
from tests.convert.common import NUM_BLOCKS, UNTOUCHED_SUM, assert_same, attention, block_ids, buffers, rank_pages
from tests.convert.on_triton import OnTriton
from tests.kernels.launch_rig import SMALL, aligned, interpreted, one_page, recorder
from tests.kernels.recorder import Recorder
from tests.oracle import POISON, Model

__all__ = ["recorder"]

pytestmark = interpreted


# ---- the vector: no access may be wider than what it touches is aligned

FP8 = attention(52, "uint8", 16)
VECTORS = {
    "all aligned": (SMALL, {}, {}, 16),
    "160 bytes": (attention(80, "float16", 16), {}, {}, 16),
    "52 bytes": (FP8, {}, {}, 4),
    "33 bytes": (attention(33, "uint8", 4), {}, {}, 1),
    "blocks 8 bytes further": (SMALL, {"padding": 8}, {}, 8),
    "blocks 2 bytes further": (SMALL, {"padding": 2}, {}, 2),
    "first block at 4": (SMALL, {"offset": 4}, {}, 4),
    "tensor at 8": (SMALL, {}, {"pages_at": 8}, 8),
    "tensor at 1": (SMALL, {}, {"pages_at": 1}, 1),
    "buffer at 8": (SMALL, {}, {"buffer_at": 8}, 8),
    "buffer at 3": (SMALL, {}, {"buffer_at": 3}, 1),
    "buffer at 16": (SMALL, {}, {"buffer_at": 16}, 16),
    "chunks 4 bytes further": (SMALL, {}, {"apart": 4}, 4),
    "a single chunk, whose stride says nothing": (SMALL, {}, {"apart": 4, "chunks": 1}, 16),
}


@pytest.mark.parametrize(("geometry", "layout", "buffer", "want"), VECTORS.values(), ids=VECTORS)
def test_the_vector_divides_everything(
    recorder: Recorder, geometry: KVGeometry, layout: dict[str, int], buffer: dict[str, int], want: int
) -> None:
    pages = one_page(geometry, PageLayout.nhd(geometry, 4, **layout), buffer.get("pages_at", 0))
    chunks, stride = buffer.get("chunks", 2), pages.mapping.slot.payload_stride
    row = stride + buffer.get("apart", 0)
    memory = torch.from_numpy(aligned(chunks * row, buffer.get("buffer_at", 0)))
    stage = memory.view(chunks, row)[:, :stride]
    ids = torch.zeros((chunks, 1), dtype=torch.int64)
    for call in (
        lambda: launch.gather(pages, ids, pages.mapping, stage),
        lambda: launch.scatter(stage, ids, pages.mapping, pages),
    ):
        recorder.launches.clear()
        call()
        found = recorder.moved.arguments
        assert found["VECTOR"] == want
        assert found["FRAGMENT"] * want == geometry.head_bytes
        assert launch.WARPS[want] == found["num_warps"]
        assert found["LANES"] == min(4096 // want, 1024)
        assert found["stage"] == stage.data_ptr()


def test_the_vector_divides_every_tensor_of_pages_that_differ(recorder: Recorder) -> None:
    """Of two tensors one has pages of 36 bytes: the other's begin at 4 modulo 16 in the segment."""
    tensors = [LocalTensor(block_stride=640, page_bytes=36), LocalTensor(block_stride=640, page_bytes=16)]
    mapping = opaque_mapping(tensors, ShardSpec())
    pages = KVPages(mapping, [aligned(1280), aligned(1280)], 2)
    launch.gather(pages, torch.tensor([[0]]), mapping, torch.from_numpy(aligned(4096)).view(1, 4096))
    assert recorder.moved.kernel == "move_tiles"
    assert recorder.moved.arguments["VECTOR"] == 4


def test_sums_alone_need_the_segments_length_divided(recorder: Recorder) -> None:
    stage = torch.from_numpy(aligned(2 * 4096)).view(2, 4096)
    sums = torch.zeros((2, 1), dtype=torch.int64)
    for size, want in ((64, 16), (40, 8), (100, 4), (7, 1)):
        recorder.launches.clear()
        launch.checksum(stage, row_mapping(size), sums)
        assert recorder.moved.arguments["VECTOR"] == want
    recorder.launches.clear()
    launch.checksum(torch.from_numpy(aligned(4096, 2)).view(1, 4096), row_mapping(64), sums[:1])
    assert recorder.moved.arguments["VECTOR"] == 2


LONG = {
    "2 GiB of single bytes": (1 << 31, 1, True),
    "a little less": ((1 << 31) - (1 << 17), 1, False),
    "a page of 2 GiB": (1 << 31, 0, True),
    "a page of 1 GiB": (1 << 30, 0, False),
}


@pytest.mark.parametrize(("size", "at", "want"), LONG.values(), ids=LONG)
def test_long_segments_are_counted_in_64_bits(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, size: int, at: int, want: bool
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, size + 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000), np.uint8)
    mapping = opaque_mapping([LocalTensor(block_stride=size, page_bytes=size)], ShardSpec())
    pages = KVPages(mapping, [memory[at:]], 1)
    monkeypatch.setattr(launch, "_check_buffers", lambda *_: None)  # a buffer that is not there
    launch.gather(pages, torch.tensor([[0]]), mapping, torch.empty((1, 1), dtype=torch.uint8, device="meta"))
    assert recorder.moved.arguments["LONG"] is want


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_64_bit_counting_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(launch, "_long", lambda *_: True)
    moves_what_the_oracle_says(OnTriton("cpu"), layout, attention(20, "uint8", 3), 2)


# ---- grids


def test_one_launch_moves_everything(recorder: Recorder) -> None:
    """However many layers, heads, runs, blocks and chunks; and one before it where sums are to be cleared."""
    regular = rank_pages(Model.random(attention(8, "uint8", 2, layers=6), NUM_BLOCKS), "split", blocks_per_chunk=2)
    mapping = opaque_mapping([LocalTensor(block_stride=n, page_bytes=n) for n in (7, 24, 5000)], ShardSpec())
    irregular = KVPages(mapping, [aligned(n * NUM_BLOCKS) for n in (7, 24, 5000)], NUM_BLOCKS)
    for pages, kernel in ((regular, "move_planes"), (irregular, "move_tiles")):
        chunks = 4
        ids = torch.zeros((chunks, pages.mapping.blocks_per_chunk), dtype=torch.int64)
        stage = torch.zeros((chunks, pages.mapping.slot.payload_stride), dtype=torch.uint8)
        sums = torch.zeros((chunks, pages.mapping.slot.num_segments), dtype=torch.uint64)
        for with_sums, want in ((None, [kernel]), (sums, ["clear_sums", kernel])):
            recorder.launches.clear()
            launch.gather(pages, ids, pages.mapping, stage, with_sums)
            assert [each.kernel for each in recorder.launches] == want
            recorder.launches.clear()
            launch.scatter(stage, ids, pages.mapping, pages, with_sums)
            assert [each.kernel for each in recorder.launches] == want
    recorder.launches.clear()
    launch.checksum(stage, mapping, sums)
    assert [each.kernel for each in recorder.launches] == ["clear_sums", "sum_segments"]


def test_programs_are_at_most_as_many_as_told(recorder: Recorder) -> None:
    model = Model.random(SMALL, NUM_BLOCKS)
    pages = rank_pages(model, "nhd")
    ids = torch.arange(NUM_BLOCKS).view(-1, 1)
    stage = torch.zeros((NUM_BLOCKS, pages.mapping.slot.payload_stride), dtype=torch.uint8)
    sums = torch.zeros((NUM_BLOCKS, 4), dtype=torch.int64)
    for programs, want in ((None, NUM_BLOCKS * 4), (1, 1), (3, 3), (10**6, NUM_BLOCKS * 4 * 4)):
        for call in (
            lambda n: launch.gather(pages, ids, pages.mapping, stage, programs=n),
            lambda n: launch.scatter(stage, ids, pages.mapping, pages, programs=n),
            lambda n: launch.checksum(stage, pages.mapping, sums, programs=n),
        ):
            recorder.launches.clear()
            call(programs)
            assert recorder.moved.programs == want
            found = recorder.moved.arguments
            assert found["units"] == NUM_BLOCKS * 4 * found["parts"]
            assert found["parts"] * found["tiles"] >= 4  # of a segment of 16 KiB


def moves_what_the_oracle_says(
    converter: OnTriton, layout: str, geometry: KVGeometry, per_chunk: int, **place: int
) -> None:
    model = Model.random(geometry, NUM_BLOCKS)
    ids = block_ids(per_chunk)
    pages = rank_pages(model, layout, blocks_per_chunk=per_chunk, **place)
    mapping, mine = pages.mapping, list(pages.mapping.segments)
    found, sums = buffers(pages, len(ids))
    converter.gather(pages, ids, mapping, found, sums)
    want, want_sums = buffers(pages, len(ids))
    segments = (len(ids), mapping.slot.num_segments, -1)
    want.reshape(segments)[:, mine] = model.payloads(ids).reshape(segments)[:, mine]
    want_sums[:, mine] = model.sums(ids)[:, mine]
    assert_same(found, want)
    assert_same(sums, want_sums, "sums")
    target = rank_pages(model, layout, blocks_per_chunk=per_chunk, only=[], **place)
    again = np.full_like(sums, UNTOUCHED_SUM)
    converter.scatter(found, ids, target.mapping, target, again)
    assert_same(again, want_sums, "sums of the scatter")
    for number, memory in enumerate(model.pages(layout, only=ids[ids >= 0].tolist(), **place)):
        assert_same(target.tensors[number], memory, f"tensor {number}")


def page_of(tensor: np.ndarray, block: int) -> np.ndarray:
    """One of NUM_BLOCKS pages, zeros where it is absent."""
    pages = tensor.reshape(NUM_BLOCKS, -1)
    return pages[block] if block >= 0 else np.zeros_like(pages[0])


@pytest.mark.parametrize("programs", [1, 3])
def test_few_programs_do_it_all(programs: int) -> None:
    """Several units a program, of several tiles; also where a table lists them."""
    geometry = attention(96, "uint8", 16)
    moves_what_the_oracle_says(OnTriton("cpu", programs), "nhd", geometry, 2, tp_size=2, tp_rank=1)
    sizes = (4100, 24, 9000)
    mapping = opaque_mapping(
        [LocalTensor(block_stride=n, page_bytes=n) for n in sizes], ShardSpec(), blocks_per_chunk=2
    )
    tensors = [np.random.default_rng(n).integers(0, 256, n * NUM_BLOCKS, dtype=np.uint8) for n in sizes]
    pages = KVPages(mapping, tensors, NUM_BLOCKS)
    ids = np.array([[3, 0], [-1, 8]])
    found, sums = buffers(pages, 2)
    OnTriton("cpu", programs).gather(pages, ids, mapping, found, sums)
    want = np.zeros_like(found)
    for chunk, row in enumerate(ids.tolist()):
        parts = [
            t.reshape(NUM_BLOCKS, -1)[b] if b >= 0 else np.zeros(n, np.uint8)
            for b in row
            for t, n in zip(tensors, sizes, strict=True)
        ]
        joined = np.concatenate(parts)
        want[chunk, : joined.size] = joined
        assert sums[chunk, 0] == segment_checksum(joined)
    assert_same(found, want)


# ---- sums alone


@pytest.mark.parametrize("programs", [None, 1, 3])
def test_sums_alone_are_of_the_payload(programs: int | None) -> None:
    """A rank's segments of several, chunks apart, everything that is not payload poisoned."""
    geometry = attention(90, "uint8", 16)  # 5760 bytes a segment
    model = Model.random(geometry, NUM_BLOCKS)
    ids = block_ids(1)
    mapping = rank_pages(model, "nhd", tp_size=2, tp_rank=1).mapping
    payloads = model.payloads(ids).reshape(3, 4, 8192)
    payloads[:, :, 5760:] = POISON
    wide = np.full((3, 4 * 8192 + 64), POISON, np.uint8)
    wide[:, : 4 * 8192] = payloads.reshape(3, -1)
    sums = np.full((3, 4), UNTOUCHED_SUM, np.uint64)
    OnTriton("cpu", programs).checksum(wide[:, : 4 * 8192], mapping, sums)
    want = np.full_like(sums, UNTOUCHED_SUM)
    want[:, 2:] = model.sums(ids)[:, 2:]
    assert_same(sums, want)


def test_sums_alone_of_a_row_whose_last_segment_is_short() -> None:
    size = ROW_SEGMENT_BYTES + 52
    mapping = row_mapping(size)
    row = np.random.default_rng(1).integers(0, 256, (1, mapping.slot.payload_stride), dtype=np.uint8)
    sums = np.zeros((1, 2), np.uint64)
    OnTriton("cpu").checksum(row, mapping, sums)
    assert sums[0].tolist() == [
        segment_checksum(row[0, :ROW_SEGMENT_BYTES]),
        segment_checksum(row[0, ROW_SEGMENT_BYTES:size]),
    ]


def test_a_row_whose_last_segment_is_short_goes_both_ways() -> None:
    size = ROW_SEGMENT_BYTES + 52
    mapping = row_mapping(size)
    rows = np.random.default_rng(2).integers(0, 256, (2, size), dtype=np.uint8)
    pages = KVPages(mapping, [rows.copy()], 2)
    found, sums = buffers(pages, 1)
    OnTriton("cpu").gather(pages, np.array([[1]]), mapping, found, sums)
    assert_same(found[0, :size], rows[1])
    assert not found[0, size:].any()
    assert sums[0].tolist() == [
        segment_checksum(rows[1, :ROW_SEGMENT_BYTES]),
        segment_checksum(rows[1, ROW_SEGMENT_BYTES:]),
    ]
    OnTriton("cpu").scatter(found, np.array([[0]]), mapping, pages)
    assert_same(pages.tensors[0], rows[[1, 1]])


@pytest.mark.parametrize("sizes", [(100,), (100, 36)], ids=["alike", "unlike"])
def test_padding_beyond_a_tile_is_zero(sizes: tuple[int, ...]) -> None:
    """A payload of one tile in segments of two."""
    mapping = opaque_mapping([LocalTensor(block_stride=n, page_bytes=n) for n in sizes], ShardSpec(), alignment=8192)
    tensors = [np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8) for n in sizes]
    pages = KVPages(mapping, tensors, 1)
    found, sums = buffers(pages, 1)
    OnTriton("cpu").gather(pages, np.array([[0]]), mapping, found, sums)
    want = np.zeros_like(found)
    want[0, : sum(sizes)] = np.concatenate(tensors)
    assert_same(found, want)
    assert sums[0, 0] == segment_checksum(np.concatenate(tensors))
