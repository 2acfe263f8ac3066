"""launch.py: what it refuses, which vector, grid and tables it chooses; that a call needs nothing but its launch."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.checksum import segment_checksum
from kvxfer.convert import launch
from kvxfer.convert.pages import KVPages
from kvxfer.errors import DeviceError, LayoutError
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping, row_mapping
from kvxfer.mapping import LocalTensor
from kvxfer.opaque import opaque_mapping
from kvxfer.slot import ROW_SEGMENT_BYTES
from tests.convert.common import NUM_BLOCKS, UNTOUCHED_SUM, assert_same, attention, block_ids, buffers, rank_pages
from tests.convert.on_triton import OnTriton
from tests.kernels.recorder import Recorder, record
from tests.oracle import POISON, Model

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="these need Triton's interpreter: run without -m gpu")

MODEL = Model.random(attention(8, "uint8", 2), NUM_BLOCKS)
SMALL = attention(128, "bfloat16", 16)  # 4 KiB of a block for each head and plane
IDS = torch.tensor([[0, 1], [2, 3], [4, -1]])
STRIDE = 4 * 4096


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return record(monkeypatch)


@pytest.fixture
def pages() -> KVPages:
    return rank_pages(MODEL, "nhd", blocks_per_chunk=2, only=[])


def aligned(size: int, at: int = 0) -> np.ndarray:
    """Bytes whose address is `at` modulo 4096."""
    memory = np.zeros(size + 8192, np.uint8)
    start = -memory.ctypes.data % 4096 + at
    return memory[start : start + size]


def one_page(geometry: KVGeometry, page: PageLayout, at: int = 0, num_blocks: int = 2) -> KVPages:
    mapping = kvx1_mapping(geometry, ShardSpec(), page)
    size = page.offset + num_blocks * page.block_stride
    return KVPages(mapping, [aligned(size, at) for _ in range(mapping.num_tensors)], num_blocks)


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


# ---- what is refused

GOOD: dict[str, Any] = {"block_ids": IDS, "stage": torch.zeros((3, STRIDE), dtype=torch.uint8), "sums": None}
INT64, U8, ELSEWHERE = torch.int64, torch.uint8, torch.device("meta")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "ids of int32": ({"block_ids": IDS.to(torch.int32)}, "must be a torch tensor of torch.int64, not torch.i"),
    "ids of numpy": ({"block_ids": IDS.numpy()}, "block_ids must be a torch tensor of torch.int64, not ndarray"),
    "one id a chunk": ({"block_ids": IDS.reshape(-1, 1)}, r"block_ids has shape \(6, 1\), want \(6, 2\)"),
    "ids transposed": ({"block_ids": torch.zeros((2, 3), dtype=INT64).T}, "block_ids must be contiguous"),
    "ids elsewhere": ({"block_ids": IDS.to(ELSEWHERE)}, "block_ids is on meta: want cpu, or pinned host memory"),
    "fewer ids": ({"block_ids": IDS[:2]}, r"the canonical buffer has shape \(3, 16384\), want \(2, 16384\)"),
    "a short buffer": ({"stage": torch.zeros((3, STRIDE - 1), dtype=U8)}, r"want \(3, 16384\)"),
    "a flat buffer": ({"stage": torch.zeros(3 * STRIDE, dtype=U8)}, r"want \(.*, 16384\)"),
    "a buffer of int8": ({"stage": torch.zeros((3, STRIDE), dtype=torch.int8)}, "of torch.uint8, not torch.int8"),
    "a buffer of numpy": ({"stage": np.zeros((3, STRIDE), np.uint8)}, "of torch.uint8, not ndarray"),
    "a buffer elsewhere": ({"stage": torch.zeros((3, STRIDE), dtype=U8, device=ELSEWHERE)}, "is on meta: want cpu"),
    "every other byte": ({"stage": torch.zeros((3, 2 * STRIDE), dtype=U8)[:, ::2]}, "side by side"),
    "overlapping": ({"stage": torch.zeros(2 * STRIDE, dtype=U8).as_strided((3, STRIDE), (8, 1))}, "not overlapping"),
    "sums of float64": ({"sums": torch.zeros((3, 4), dtype=torch.float64)}, "torch.int64 or torch.uint64, not"),
    "sums of another slot": ({"sums": torch.zeros((3, 5), dtype=INT64)}, r"sums has shape \(3, 5\), want \(3, 4\)"),
    "sums transposed": ({"sums": torch.zeros((4, 3), dtype=INT64).T}, "sums must be contiguous"),
    "sums elsewhere": ({"sums": torch.zeros((3, 4), dtype=INT64, device=ELSEWHERE)}, "sums is on meta"),
    "no programs": ({"programs": 0}, "programs=0 must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD)
def test_arguments_that_do_not_fit(recorder: Recorder, pages: KVPages, wrong: dict[str, Any], message: str) -> None:
    given = GOOD | wrong
    options = {"programs": given.pop("programs", None)}
    with pytest.raises(LayoutError, match=message):
        launch.gather(pages, given["block_ids"], pages.mapping, given["stage"], given["sums"], **options)
    with pytest.raises(LayoutError, match=message):
        launch.scatter(given["stage"], given["block_ids"], pages.mapping, pages, given["sums"], **options)
    if "block_ids" not in wrong:
        sums = torch.zeros((3, 4), dtype=torch.int64) if given["sums"] is None else given["sums"]
        with pytest.raises(LayoutError, match=message):
            launch.checksum(given["stage"], pages.mapping, sums, **options)
    assert recorder.launches == []


def test_what_fits_is_launched(recorder: Recorder, pages: KVPages) -> None:
    """The other side of the test above: nothing there is refused for another reason."""
    launch.gather(pages, GOOD["block_ids"], pages.mapping, GOOD["stage"], torch.zeros((3, 4), dtype=torch.uint64))
    launch.scatter(GOOD["stage"], GOOD["block_ids"], pages.mapping, pages)
    launch.checksum(GOOD["stage"], pages.mapping, torch.zeros((3, 4), dtype=torch.int64), programs=1)
    names = [each.kernel for each in recorder.launches]
    assert names == ["clear_sums", "move_planes", "move_planes", "clear_sums", "sum_segments"]


def test_no_chunks_need_no_launch(recorder: Recorder, pages: KVPages) -> None:
    stage, sums = torch.zeros((0, STRIDE), dtype=torch.uint8), torch.zeros((0, 4), dtype=torch.int64)
    launch.gather(pages, IDS[:0], pages.mapping, stage, sums)
    launch.scatter(stage, IDS[:0], pages.mapping, pages, sums)
    launch.checksum(stage, pages.mapping, sums)
    assert recorder.launches == []


def test_read_only_pages_can_be_gathered_and_not_written(recorder: Recorder) -> None:
    rows = np.zeros(16, np.uint8)
    rows.flags.writeable = False
    mapping = row_mapping(8)
    pages = KVPages(mapping, [rows], 2)
    stage, ids = torch.zeros((1, 4096), dtype=torch.uint8), torch.tensor([[0]])
    with pytest.raises(LayoutError, match="read-only"):
        launch.scatter(stage, ids, mapping, pages)
    assert recorder.launches == []
    launch.gather(pages, ids, mapping, stage)
    assert len(recorder.launches) == 1


def test_a_mapping_of_other_pages(recorder: Recorder, pages: KVPages) -> None:
    other = rank_pages(MODEL, "nhd", blocks_per_chunk=2, padding=8).mapping
    calls: tuple[Callable[[], Any], ...] = (
        lambda: launch.gather(pages, IDS, other, GOOD["stage"]),
        lambda: launch.scatter(GOOD["stage"], IDS, other, pages),
        lambda: launch.prepare(pages, other),
    )
    for call in calls:
        with pytest.raises(LayoutError, match="another layout"):
            call()
    assert recorder.launches == []


def test_pages_in_host_memory_need_the_interpreter(
    recorder: Recorder, pages: KVPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(LayoutError, match="in host memory, where only Triton's interpreter works"):
        launch.gather(pages, IDS, pages.mapping, GOOD["stage"])
    with pytest.raises(LayoutError, match="in host memory"):
        launch.prepare(pages, pages.mapping)
    assert recorder.launches == []


def test_host_memory_beside_a_device_must_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.zeros((1, 4), dtype=torch.int64)
    with pytest.raises(LayoutError, match="sums is on cpu: want cuda:0, or pinned host memory"):
        launch._check_tensor("sums", here, "cuda:0", (torch.int64,), (1, 4))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    launch._check_tensor("sums", here, "cuda:0", (torch.int64,), (1, 4))
    with pytest.raises(LayoutError, match="sums is on meta: want cuda:0"):
        launch._check_tensor("sums", here.to("meta"), "cuda:0", (torch.int64,), (1, 4))


def test_ids_are_checked_on_the_host(pages: KVPages) -> None:
    launch.check_block_ids(pages, pages.mapping, IDS.numpy())
    launch.check_distinct(IDS.numpy())
    for value in (NUM_BLOCKS, -2, 2**32):
        ids = IDS.numpy().copy()
        ids[1, 0] = value
        with pytest.raises(LayoutError, match=rf"block_ids\[1, 0\]={value}"):
            launch.check_block_ids(pages, pages.mapping, ids)
    with pytest.raises(LayoutError, match="block_ids has shape"):
        launch.check_block_ids(pages, pages.mapping, IDS.numpy().reshape(-1, 1))
    with pytest.raises(LayoutError, match="block 3 is named twice"):
        launch.check_distinct(np.array([[3, -1], [-1, 3]]))


# ---- tables are made once


def test_a_call_makes_and_uploads_nothing_that_is_there(
    recorder: Recorder, pages: KVPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.prepare(pages, pages.mapping)

    def refuse(*_: Any) -> Any:
        raise AssertionError("made again")

    monkeypatch.setattr(launch, "_upload", refuse)
    sums = torch.zeros((3, 4), dtype=torch.int64)
    for _ in range(2):
        launch.gather(pages, IDS, pages.mapping, GOOD["stage"], sums)
        launch.scatter(GOOD["stage"], IDS, pages.mapping, pages, sums)
        launch.checksum(GOOD["stage"], pages.mapping, sums)
    found = [each.arguments["places"].data_ptr() for each in recorder.launches]
    assert len(set(found)) == 1


def test_each_mapping_has_tables_of_its_own(recorder: Recorder, pages: KVPages) -> None:
    other = rank_pages(MODEL, "nhd", blocks_per_chunk=1).mapping
    launch.gather(pages, IDS, pages.mapping, GOOD["stage"])
    launch.gather(pages, IDS.reshape(-1, 1), other, torch.zeros((6, STRIDE), dtype=torch.uint8))
    assert [each.arguments["BLOCKS"] for each in recorder.launches] == [2, 1]
    assert len(pages.plans) == 2
    kept = weakref.ref(other)
    del other
    gc.collect()
    assert kept() is not None  # or another mapping could get its id, and with it its tables


def test_tables_go_with_their_pages_and_mapping() -> None:
    mapping = row_mapping(64)
    sums = torch.zeros((1, 1), dtype=torch.int64)
    launch.checksum(torch.zeros((1, 4096), dtype=torch.uint8), mapping, sums)
    pages = KVPages(mapping, [np.zeros(64, np.uint8)], 1)
    launch.prepare(pages, mapping)
    gone: list[Any] = [
        weakref.ref(mapping),
        weakref.ref(pages),
        weakref.ref(launch._sums_by_mapping[mapping]["cpu"].places),
    ]
    del mapping, pages
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_a_capture_that_would_hold_an_upload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(DeviceError, match=r"call prepare\(pages, mapping\) before the capture"):
        launch._upload(np.zeros(3, np.int64), "cuda:0")


# ---- what is compiled offline is what is launched


def test_variants_are_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {each.name: each for each in launch.variants()}
    assert len(known) == len(list(launch.variants()))
    recorder = record(monkeypatch)
    geometry = KVGeometry(num_layers=2, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=16)
    pages = one_page(geometry, PageLayout.nhd(geometry, 8))
    stage = torch.from_numpy(aligned(pages.mapping.slot.payload_stride)).view(1, -1)
    sums, ids = torch.zeros((1, 8), dtype=torch.int64), torch.tensor([[0]])
    for name, call in {
        "planes-nhd-256-gather": lambda: launch.gather(pages, ids, pages.mapping, stage),
        "planes-nhd-256-gather+sum": lambda: launch.gather(pages, ids, pages.mapping, stage, sums),
        "planes-nhd-256-scatter": lambda: launch.scatter(stage, ids, pages.mapping, pages),
        "planes-nhd-256-scatter+sum": lambda: launch.scatter(stage, ids, pages.mapping, pages, sums),
        "sum-16": lambda: launch.checksum(stage, pages.mapping, sums),
    }.items():
        recorder.launches.clear()
        call()
        found, variant = recorder.moved.arguments, known[name]
        assert {key: found[key] for key in variant.constexprs} == variant.constexprs
        assert found["num_warps"] == variant.num_warps
        assert list(variant.signature) == [key for key in found if key != "num_warps"]
        for key, kind in variant.signature.items():
            value = found[key]
            if kind.startswith("*"):
                assert value.dtype == {"*i32": torch.int32, "*i64": torch.int64}[kind], key
            elif kind != "constexpr":
                assert isinstance(value, int) and kind in ("i32", "i64"), key


def test_variants_cover_every_vector_and_mode() -> None:
    seen = {(each.name.split("-")[0], each.sector) for each in launch.variants()}
    assert {("tiles", v) for v in (1, 2, 4, 8, 16)} | {("sum", v) for v in (1, 2, 4, 8, 16)} <= seen
    assert {("planes", v) for v in (1, 4, 8, 16)} <= seen
    modes = {
        tuple(sorted((k, v) for k, v in each.constexprs.items() if k in ("SCATTER", "SUMS")))
        for each in launch.variants()
    }
    assert len(modes - {()}) == 4
