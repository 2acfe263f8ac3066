from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.errors import LayoutError
from kvxfer.geometry import PRESETS, Kind, KVGeometry, ShardSpec
from kvxfer.layout import (
    LAYOUTS,
    RUN_DTYPE,
    CanonicalMapping,
    CopyRun,
    LocalTensor,
    PageLayout,
    kvx1_mapping,
    kvx1_mappings,
    kvx1_slot,
    local_heads,
    local_layers,
    row_mapping,
    verify_mapping,
    verify_tiling,
)
from kvxfer.slot import ROW_SEGMENT_BYTES, SlotLayout
from tests.oracle import LAYOUT_AXES

SMALL = KVGeometry(num_layers=4, num_kv_heads=4, head_dim=8, dtype="float16", tokens_per_block=3)
MLA = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=9, dtype="uint8", tokens_per_block=2, kind=Kind.MLA)
LLAMA = PRESETS["llama-3.1-8b"]


def test_run_dtype_is_kvx_run() -> None:
    assert RUN_DTYPE.itemsize == ctypes.sizeof(_native.Run)
    assert RUN_DTYPE.fields is not None
    for name, ctype, *_ in _native.Run._fields_:
        assert RUN_DTYPE.fields[name] == (np.dtype(ctype), getattr(_native.Run, name).offset)


# ---- page layouts


def test_strides_of_each_layout() -> None:
    """SMALL: heads of 16 bytes, 3 tokens; 2 local heads, so 96 bytes a plane and 192 a page."""
    strides = {name: make(SMALL, 2) for name, make in LAYOUTS.items()}
    found = {
        name: (page.block_stride, page.kv_stride, page.head_stride, page.token_stride) for name, page in strides.items()
    }
    assert found == {
        "nhd": (192, 96, 16, 32),
        "hnd": (192, 96, 48, 16),
        "packed": (192, 16, 96, 32),
        "packed-nhd": (192, 16, 32, 64),
        "split": (96, None, 16, 32),
        "split-hnd": (96, None, 48, 16),
    }
    assert {page.dim_stride for page in strides.values()} == {2}
    assert LAYOUTS.keys() == LAYOUT_AXES.keys()


def test_padding_and_offset_are_outside_the_page() -> None:
    page = PageLayout.hnd(SMALL, 2, padding=64, offset=40)
    assert (page.page_bytes, page.block_stride, page.offset) == (192, 256, 40)
    mapping = kvx1_mapping(SMALL, ShardSpec(tp_size=2), page)
    assert mapping.tensor_block_strides == (256,) * 4
    assert mapping.tensor_extent == (232,) * 4
    assert int(mapping.runs["local_offset"].min()) == 40


def test_what_is_left_out_is_nothing() -> None:
    pages = [make(SMALL, 2) for make in LAYOUTS.values()]
    for page in (*pages, PageLayout.whole(192)):
        assert (page.block_stride, page.offset) == (page.page_bytes, 0)
    assert kvx1_slot(SMALL) == kvx1_slot(SMALL, blocks_per_chunk=1, layer_groups=1)
    assert local_layers(SMALL, ShardSpec()) == local_layers(SMALL, ShardSpec(), 1)
    assert {mapping.blocks_per_chunk for mapping in kvx1_mappings(SMALL, 2, pages[0])} == {1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_stride": 191}, "page_bytes=192 .* exceeds block_stride=191"),
        ({"token_stride": 0}, "token_stride=0"),
        ({"head_stride": -16}, "head_stride=-16"),
        ({"offset": -1}, "offset=-1"),
        ({"kv_stride": -1}, "kv_stride=-1"),
        ({"page_bytes": 0}, "page_bytes=0"),
    ],
)
def test_strides_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(PageLayout.nhd(SMALL, 2), **change)


@pytest.mark.parametrize("arguments", [{"local_heads": 0}, {"local_heads": 1, "padding": -1}])
def test_constructors_refuse_what_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="local_heads"):
        PageLayout.nhd(SMALL, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim_stride": 4}, "dim_stride=4 .* not the itemsize 2"),
        ({"kv_stride": 0}, "two runs cover"),  # K and V in one place
        ({"head_stride": 8}, "two runs cover"),
        ({"head_stride": 32, "page_bytes": 208, "block_stride": 256}, "two runs cover|no run covers"),
        ({"page_bytes": 200, "block_stride": 200}, r"no run covers bytes \[192, 200\)"),
        ({"page_bytes": 180}, "beyond its end"),
        ({"token_stride": 40, "page_bytes": 224, "block_stride": 224}, "no run covers"),  # a hole in the page
    ],
)
def test_a_page_that_does_not_add_up_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        kvx1_mapping(SMALL, ShardSpec(tp_size=2), replace(PageLayout.nhd(SMALL, 2), **change))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("declared", [1, 4])
def test_pages_of_another_number_of_heads_are_refused(name: str, declared: int) -> None:
    with pytest.raises(LayoutError, match=r" runs? cover"):
        kvx1_mapping(SMALL, ShardSpec(tp_size=2), LAYOUTS[name](SMALL, declared))


# ---- who holds what


def heads_of(tp_size: int, num_kv_heads: int = 4) -> list[list[int]]:
    geometry = replace(SMALL, num_kv_heads=num_kv_heads)
    return [list(local_heads(geometry, ShardSpec(tp_size=tp_size, tp_rank=rank))) for rank in range(tp_size)]


def test_heads_below_at_and_above_their_number() -> None:
    assert heads_of(1) == [[0, 1, 2, 3]]
    assert heads_of(2) == [[0, 1], [2, 3]]
    assert heads_of(4) == [[0], [1], [2], [3]]
    assert heads_of(8) == [[0], [0], [1], [1], [2], [2], [3], [3]]
    assert heads_of(3, num_kv_heads=1) == [[0], [0], [0]]


@pytest.mark.parametrize("tp_size", [3, 6])
def test_heads_that_do_not_divide_are_refused(tp_size: int) -> None:
    with pytest.raises(LayoutError, match=f"tp_size={tp_size} and num_kv_heads=4"):
        heads_of(tp_size)


def test_stages_hold_whole_layer_groups() -> None:
    assert local_layers(SMALL, ShardSpec(pp_size=2, pp_rank=1), 2) == range(2, 4)
    assert local_layers(SMALL, ShardSpec(pp_size=2, pp_rank=1), 4) == range(2, 4)
    with pytest.raises(LayoutError, match="layer_groups=3 must divide num_layers=4"):
        kvx1_slot(SMALL, layer_groups=3)
    with pytest.raises(LayoutError, match="layer_groups=0"):
        kvx1_slot(SMALL, layer_groups=0)
    with pytest.raises(LayoutError, match="layer_groups=1 must be a multiple of pp_size=2"):
        kvx1_mapping(SMALL, ShardSpec(pp_size=2), PageLayout.nhd(SMALL, 4))


def test_unequal_stages_hold_whole_layer_groups() -> None:
    def layers_of(stages: tuple[int, ...], groups: int) -> list[range]:
        return [
            local_layers(SMALL, ShardSpec(pp_size=len(stages), pp_rank=rank), groups, stages)
            for rank in range(len(stages))
        ]

    assert layers_of((3, 1), 4) == [range(3), range(3, 4)]
    assert layers_of((1, 2, 1), 4) == [range(1), range(1, 3), range(3, 4)]
    assert layers_of((2, 2), 2) == [range(2), range(2, 4)]
    for stages, groups in (((3, 1), 2), ((3, 2), 4), ((4, 0), 4), ((5, -1), 4), ((4,), 1)):
        with pytest.raises(LayoutError, match=r"stage_layers=\(.*must be 2 multiples of the \d layers"):
            local_layers(SMALL, ShardSpec(pp_size=2), groups, stages)
    assert kvx1_mapping(
        SMALL, ShardSpec(pp_size=2, pp_rank=1), PageLayout.nhd(SMALL, 4), layer_groups=4, stage_layers=(3, 1)
    ).segments == (12, 13, 14, 15)


@pytest.mark.parametrize("axis", ["dcp_size", "pcp_size"])
def test_context_parallelism_is_refused_with_the_reason(axis: str) -> None:
    with pytest.raises(LayoutError, match=f"{axis}=2.*context parallelism"):
        kvx1_mapping(SMALL, ShardSpec(**{axis: 2}), PageLayout.nhd(SMALL, 4))


def test_the_slot_is_the_same_for_every_sharding() -> None:
    slot = kvx1_slot(SMALL, blocks_per_chunk=5, layer_groups=2)
    assert slot == SlotLayout(
        segment_bytes=2 * 2 * 15 * 16,
        last_segment_bytes=2 * 2 * 15 * 16,
        num_segments=8,
        segments_per_trailer=1,
        blocks_per_chunk=5,
    )
    page = PageLayout.split(SMALL, 2)
    for mapping in kvx1_mappings(SMALL, 2, page, pp_size=2, blocks_per_chunk=5, layer_groups=2):
        assert mapping.slot == slot
        assert (mapping.blocks_per_chunk, mapping.num_tensors) == (5, 4)


def test_the_alignment_reaches_the_slot() -> None:
    assert kvx1_mapping(SMALL, ShardSpec(), PageLayout.nhd(SMALL, 4), alignment=16384).slot.segment_stride == 16384
    assert row_mapping(5, alignment=8192).slot.slot_bytes == 2 * 8192


def test_segments_and_tensors_of_a_rank() -> None:
    shard = ShardSpec(tp_size=2, tp_rank=1, pp_size=2, pp_rank=1)
    mapping = kvx1_mapping(SMALL, shard, PageLayout.split(SMALL, 2), layer_groups=4)
    assert mapping.segments == (10, 11, 14, 15)  # layer groups 2 and 3, heads 2 and 3
    assert mapping.num_tensors == 4  # K and V of two layers
    assert mapping.part_bytes == 4 * mapping.slot.segment_bytes
    assert (mapping.num_writers, mapping.writer_index) == (1, 0)


@pytest.mark.parametrize(("geometry", "tp_size", "writers"), [(SMALL, 8, 2), (SMALL, 4, 1), (SMALL, 2, 1), (MLA, 4, 4)])
def test_replicas_take_turns(geometry: KVGeometry, tp_size: int, writers: int) -> None:
    page = PageLayout.nhd(geometry, len(local_heads(geometry, ShardSpec(tp_size=tp_size))))
    mappings = kvx1_mappings(geometry, tp_size, page)
    assert {mapping.num_writers for mapping in mappings} == {writers}
    for slot_index in range(2 * writers):
        segments = [s for mapping in mappings if mapping.is_writer(slot_index) for s in mapping.segments]
        assert sorted(segments) == list(range(geometry.num_kv_heads))


# ---- runs


def test_runs_of_adjacent_tokens_are_one_piece() -> None:
    hnd = kvx1_mapping(SMALL, ShardSpec(tp_size=4), PageLayout.hnd(SMALL, 1))
    nhd = kvx1_mapping(SMALL, ShardSpec(tp_size=2), PageLayout.nhd(SMALL, 2))
    assert set(zip(hnd.runs["fragment_size"], hnd.runs["num_fragments"], strict=True)) == {(48, 1)}
    assert set(zip(nhd.runs["fragment_size"], nhd.runs["num_fragments"], strict=True)) == {(16, 3)}
    one_token = replace(SMALL, tokens_per_block=1)
    assert set(kvx1_mapping(one_token, ShardSpec(), PageLayout.nhd(one_token, 4)).runs["num_fragments"]) == {1}


def test_copy_runs_speak_of_the_same_bytes() -> None:
    mapping = kvx1_mapping(SMALL, ShardSpec(tp_size=2, tp_rank=1), PageLayout.nhd(SMALL, 2), blocks_per_chunk=2)
    runs = list(mapping.copy_runs())
    assert len(runs) == len(mapping.runs) == 4 * 2 * 2
    # Segment 3 is head 3, the second local one; its fourth run is V of layer 1.
    assert runs[8 + 3] == (
        1,
        3,
        CopyRun(
            local_offset=96 + 16,
            canonical_offset=3 * 6 * 16,
            fragment_size=16,
            num_fragments=3,
            local_stride=32,
            canonical_stride=16,
        ),
    )


def test_a_mapping_does_not_change() -> None:
    mapping = row_mapping(100)
    with pytest.raises(ValueError, match="read-only"):
        mapping.runs["segment"] = 1


def runs_of(*runs: tuple[int, ...]) -> NDArray[np.void]:
    return np.array(list(runs), dtype=RUN_DTYPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": runs_of((0, 1, 0, 0, 8, 1, 8), (0, 0, 8, 0, 8, 1, 8))}, "sorted"),
        ({"runs": runs_of((0, 0, 0, 8, 8, 1, 8), (0, 0, 8, 0, 8, 1, 8))}, "sorted"),
        ({"runs": runs_of((1, 0, 0, 0, 8, 1, 8))}, "names tensor 1 of 1"),
        ({"runs": np.zeros(2, dtype=np.uint64)}, "RUN_DTYPE"),
        ({"runs": np.zeros(0, dtype=RUN_DTYPE)}, "RUN_DTYPE"),
        ({"segments": (0, 1)}, "segments="),
        ({"writer_index": 1}, "writer_index=1"),
        ({"writer_index": -1}, "writer_index=-1"),
    ],
)
def test_a_mapping_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(row_mapping(8), **change)


# ---- other kinds


def test_a_window_changes_no_byte() -> None:
    sliding = replace(SMALL, kind=Kind.SLIDING_WINDOW, window=5)
    for plain, windowed in zip(
        kvx1_mappings(SMALL, 2, PageLayout.nhd(SMALL, 2), pp_size=2, layer_groups=2),
        kvx1_mappings(sliding, 2, PageLayout.nhd(sliding, 2), pp_size=2, layer_groups=2),
        strict=True,
    ):
        assert plain.slot == windowed.slot
        assert plain.runs.tolist() == windowed.runs.tolist()
        assert windowed.topology is None


INDEXED = replace(MLA, num_layers=4, extra_bytes=(4, 0, 0, 4))
INDEXED_PAGES = [PageLayout.nhd(one, 1) for one in INDEXED.tensors]


def test_blocks_are_outermost_where_layers_keep_extra_bytes() -> None:
    """Latents of 18 bytes a block and 8 extra ones in the first and last layer."""
    mapping = kvx1_mapping(INDEXED, ShardSpec(), INDEXED_PAGES, blocks_per_chunk=3)
    assert mapping.slot.segment_bytes == 3 * (4 * 18 + 2 * 8)
    assert mapping.canonical_block_stride == 88
    assert mapping.runs["canonical_offset"].tolist() == [0, 18, 26, 44, 62, 80]
    assert mapping.runs["fragment_size"].tolist() == [18, 8, 18, 18, 18, 8]
    assert mapping.runs["tensor"].tolist() == [0, 1, 2, 3, 4, 5]
    assert [tensor.page_bytes for tensor in mapping.tensors] == [18, 8, 18, 18, 18, 8]
    halves = kvx1_mappings(INDEXED, 1, INDEXED_PAGES, pp_size=2, layer_groups=2)
    assert [half.segments for half in halves] == [(0,), (1,)]
    assert [half.runs["canonical_offset"].tolist() for half in halves] == [[0, 18, 26], [0, 18, 36]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_groups": 4}, r"layer_groups=4 makes groups whose extra_bytes add up to \[0, 4\]"),
        ({"page_layout": INDEXED_PAGES[0]}, "a page layout for each of these 6 tensors"),
        ({"page_layout": INDEXED_PAGES[:5]}, "a page layout for each of these 6 tensors"),
        ({"page_layout": INDEXED_PAGES[::-1]}, "run"),
        ({"page_layout": [replace(page, dim_stride=2) for page in INDEXED_PAGES]}, "dim_stride=2"),
        ({"geometry": MLA, "page_layout": INDEXED_PAGES[:2]}, "this one needs one for all"),
        ({"geometry": KVGeometry.opaque((4,), tokens_per_block=1)}, "take opaque_mapping"),
    ],
)
def test_layers_that_do_not_add_up_are_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"geometry": INDEXED, "shard": ShardSpec(), "page_layout": INDEXED_PAGES} | arguments
    with pytest.raises(LayoutError, match=message):
        kvx1_mapping(**given)


def test_pages_that_are_moved_whole() -> None:
    page = PageLayout.whole(100, padding=28, offset=4)
    assert page.tensor == LocalTensor(block_stride=128, page_bytes=100, offset=4)
    assert PageLayout.nhd(SMALL, 2, padding=8).tensor == LocalTensor(block_stride=200, page_bytes=192)


# ---- rows


@pytest.mark.parametrize(
    ("row_bytes", "segments", "last"),
    [
        (1, 1, 1),
        (ROW_SEGMENT_BYTES, 1, ROW_SEGMENT_BYTES),
        (ROW_SEGMENT_BYTES + 1, 2, 1),
        (8 * ROW_SEGMENT_BYTES, 8, ROW_SEGMENT_BYTES),
    ],
)
def test_rows_are_cut_into_segments(row_bytes: int, segments: int, last: int) -> None:
    mapping = row_mapping(row_bytes)
    assert (mapping.slot.num_segments, mapping.slot.last_segment_bytes) == (segments, last)
    assert mapping.slot.payload_bytes == mapping.part_bytes == row_bytes
    assert mapping.tensors == (LocalTensor(block_stride=row_bytes, page_bytes=row_bytes),)
    assert mapping.runs["local_offset"].tolist() == [i * ROW_SEGMENT_BYTES for i in range(segments)]


def test_rows_may_be_apart_but_not_overlap() -> None:
    assert row_mapping(100, row_stride=128).tensor_block_strides == (128,)
    for row_bytes, stride in ((100, 99), (0, 128), (-1, None)):
        with pytest.raises(LayoutError, match="row_bytes"):
            row_mapping(row_bytes, row_stride=stride)


# ---- the proof


def broken(rank: int, **changes: Callable[[NDArray[Any]], object]) -> list[CanonicalMapping]:
    """Two ranks' mappings, fields of one rank's runs changed in place."""
    mappings = list(kvx1_mappings(SMALL, 2, PageLayout.nhd(SMALL, 2), blocks_per_chunk=2))
    runs = mappings[rank].runs.copy()
    for field, change in changes.items():
        change(runs[field])
    order = np.lexsort((runs["canonical_offset"], runs["segment"]))
    mappings[rank] = replace(mappings[rank], runs=runs[order], segments=tuple(np.unique(runs["segment"]).tolist()))
    return mappings


def put(index: int, value: int) -> Callable[[NDArray[Any]], object]:
    return lambda column: column.__setitem__(index, value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_offset": put(0, 17)}, "rank 1: tensor 0: "),
        ({"local_offset": put(0, 4096)}, "rank 1: tensor 0: "),
        ({"tensor": put(2, 0)}, "rank 1: tensor 0: two runs cover"),
        ({"canonical_offset": put(1, 95)}, r"rank 1: segment 2: "),
        ({"canonical_offset": put(7, 4096)}, r"rank 1: segment 2: no run covers"),
        ({"fragment_size": put(7, 15)}, "rank 1: "),
        ({"fragment_size": put(0, 0)}, "rank 1: run 0 does not fit"),
        ({"num_fragments": put(3, 2**63)}, "rank 1: run 3 does not fit"),
        ({"num_fragments": put(3, 2**40), "local_stride": put(3, 0)}, "rank 1: run 3 does not fit"),
        ({"fragment_size": put(3, 2**63)}, "rank 1: run 3 does not fit"),
        ({"local_stride": put(3, 2**63)}, "rank 1: run 3 does not fit"),
        ({"local_offset": put(3, 2**63)}, "rank 1: run 3 does not fit"),
        ({"canonical_offset": put(7, 2**63)}, "rank 1: run 7 does not fit"),
        ({"local_stride": put(3, 33)}, "rank 1: tensor 1: "),
        ({"segment": put(0, 3)}, "rank 1: segment 2: no run covers"),
    ],
)
def test_the_proof_names_what_is_left_out_or_doubled(changes: dict[str, Any], message: str) -> None:
    verify_tiling(broken(0))
    with pytest.raises(LayoutError, match=message):
        verify_tiling(broken(1, **changes))


def test_a_rank_that_leaves_out_a_layer_is_found() -> None:
    mapping = kvx1_mapping(SMALL, ShardSpec(), PageLayout.nhd(SMALL, 4))
    with pytest.raises(LayoutError, match="tensor 3: no run covers any"):
        verify_mapping(replace(mapping, runs=mapping.runs[mapping.runs["tensor"] < 3]))
    with pytest.raises(LayoutError, match=r"segment 0: no run covers bytes \[288, 384\)"):
        verify_mapping(replace(mapping, runs=mapping.runs[mapping.runs["tensor"] < 3], tensors=mapping.tensors[:3]))


def test_a_wrong_stride_between_blocks_is_found() -> None:
    mapping = broken(0)[0]
    for stride in (47, 49, 0):
        with pytest.raises(LayoutError, match="segment 0: "):
            verify_mapping(replace(mapping, canonical_block_stride=stride))
    with pytest.raises(LayoutError, match="canonical_block_stride"):
        verify_mapping(replace(mapping, canonical_block_stride=2**62))


def test_pages_wider_than_their_stride_are_found() -> None:
    mapping = broken(0)[0]
    tensors = (*mapping.tensors[:2], replace(mapping.tensors[2], block_stride=191), mapping.tensors[3])
    with pytest.raises(LayoutError, match="page_bytes of tensor 2"):
        verify_mapping(replace(mapping, tensors=tensors))


def test_writers_that_leave_out_or_double_a_segment_are_found() -> None:
    mappings = kvx1_mappings(SMALL, 8, PageLayout.nhd(SMALL, 1))
    verify_tiling(mappings)
    for broken_set, message in (
        (mappings[:7], "segment 3: 0 ranks write it in slots of number 1 modulo 2"),
        ((*mappings, mappings[0]), "segment 0: 2 ranks write it in slots of number 0 modulo 2"),
        ((replace(mappings[0], writer_index=1), *mappings[1:]), "segment 0: 0 ranks write"),
        ((replace(mappings[0], topology="tp8"), *mappings[1:]), "rank 1: its slot layout"),
        (
            (replace(mappings[0], num_writers=4), *mappings[1:]),
            "rank 1: its slot layout, number of writers or topology",
        ),
        ((row_mapping(64), *mappings), "rank 1: its slot layout"),
        ((), "no rank"),
    ):
        with pytest.raises(LayoutError, match=message):
            verify_tiling(broken_set)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("geometry", "tp_size", "pp_size", "groups"),
    [(SMALL, 1, 1, 1), (SMALL, 2, 2, 4), (SMALL, 4, 4, 4), (SMALL, 8, 1, 2), (MLA, 4, 2, 2), (LLAMA, 8, 1, 1)],
)
def test_all_ranks_together_tile(name: str, geometry: KVGeometry, tp_size: int, pp_size: int, groups: int) -> None:
    heads = len(local_heads(geometry, ShardSpec(tp_size=tp_size)))
    page = LAYOUTS[name](geometry, heads, padding=32, offset=16)
    mappings = kvx1_mappings(geometry, tp_size, page, pp_size=pp_size, layer_groups=groups, blocks_per_chunk=3)
    assert len(mappings) == tp_size * pp_size
    verify_tiling(mappings)


def test_a_large_geometry_is_proved() -> None:
    large = KVGeometry(num_layers=80, num_kv_heads=64, head_dim=128, dtype="bfloat16", tokens_per_block=16)
    verify_tiling(kvx1_mappings(large, 8, PageLayout.nhd(large, 8), blocks_per_chunk=4))
