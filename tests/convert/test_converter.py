"""One suite over every converter: gather and scatter against an oracle that slices tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.convert import native
from kvxfer.convert.pages import KVPages
from kvxfer.layout import row_mapping
from kvxfer.slot import ROW_SEGMENT_BYTES
from tests.convert.common import (
    CONVERTERS,
    NUM_BLOCKS,
    assert_same,
    attention,
    block_ids,
    buffers,
    latent,
    rank_pages,
    with_kernels,
)
from tests.oracle import LAYOUT_AXES, POISON, Model

GEOMETRIES = {
    "4": attention(1, "float32", 5),
    "33": attention(33, "uint8", 7),
    "52": attention(26, "float16", 3),
    "72": attention(36, "bfloat16", 4),
    "80": attention(40, "float16", 16),
    "132": attention(132, "float8_e4m3fn", 2),
    "256": attention(128, "bfloat16", 16),
    "one token": attention(64, "int8", 1),
    "mla 656": latent(656, "uint8", 3),
    "mla 1152": latent(576, "bfloat16", 4),
}


class Place(NamedTuple):
    """Where a rank is, and its pages in memory."""

    tp_size: int
    per_chunk: int
    padding: int = 0
    offset: int = 0
    only_rank: int | None = None  # None: all in turn


# tp_size below, at and above four KV heads.
PLACES = [
    Place(*sizes, *edges)
    for sizes, edges in zip(
        product((1, 2, 4, 8), (1, 2, 4)), cycle([(0, 0), (64, 0), (0, 24), (40, 7), (3, 4096)]), strict=False
    )
]
# For the kernels: every layout, size, way to cut a tile, and vector of 1 to 16 bytes.
FEW = [
    ("nhd", "4", Place(4, 2, 64, 0, 1)),
    ("packed", "33", Place(2, 4, 40, 7, 1)),
    ("hnd", "52", Place(8, 2, 0, 24, 5)),
    ("split", "72", Place(2, 2, 2, 4096, 0)),
    ("packed-nhd", "80", Place(4, 4, 64, 0, 3)),
    ("split-hnd", "132", Place(8, 1, 0, 0, 2)),
    ("nhd", "132", Place(1, 1, 8, 40, 0)),
    ("nhd", "256", Place(4, 1, 0, 0, 2)),
    ("packed-nhd", "256", Place(8, 2, 64, 0, 7)),
    ("hnd", "256", Place(4, 1, 0, 16, 1)),
    ("split", "one token", Place(2, 4, 0, 0, 1)),
    ("nhd", "mla 656", Place(4, 4, 16, 0, 1)),
    ("nhd", "mla 1152", Place(1, 1, 0, 24, 0)),
]


SWEEP = pytest.mark.parametrize(
    ("converter", "layout", "geometry", "places"),
    with_kernels(
        *((layout, geometry, [place]) for layout, geometry, place in FEW),
        every=product(LAYOUT_AXES, GEOMETRIES, [PLACES]),
    ),
    indirect=["converter"],
)


def ranks(model: Model, layout: str, place: Place, only: list[int] | None = None) -> Iterator[tuple[int, KVPages]]:
    for rank in range(place.tp_size) if place.only_rank is None else (place.only_rank,):
        yield (
            rank,
            rank_pages(
                model,
                layout,
                padding=place.padding,
                offset=place.offset,
                blocks_per_chunk=place.per_chunk,
                only=only,
                tp_size=place.tp_size,
                tp_rank=rank,
            ),
        )


@SWEEP
def test_gather_writes_a_ranks_segments_and_nothing_else(
    converter: Any, layout: str, geometry: str, places: list[Place]
) -> None:
    model = Model.random(GEOMETRIES[geometry], NUM_BLOCKS)
    for place in places:
        ids = block_ids(place.per_chunk)
        payloads, sums = model.payloads(ids), model.sums(ids)
        for rank, pages in ranks(model, layout, place):
            what = f"rank {rank} of {place}"
            found, found_sums = buffers(pages, len(ids))
            want, want_sums = buffers(pages, len(ids))
            stride = pages.mapping.slot.segment_stride
            for s in model.segments_of(tp_size=place.tp_size, tp_rank=rank):
                want[:, s * stride : (s + 1) * stride] = payloads[:, s * stride : (s + 1) * stride]
                want_sums[:, s] = sums[:, s]
            converter.gather(pages, ids, pages.mapping, found, found_sums)
            assert_same(found, want, what)
            assert_same(found_sums, want_sums, f"{what}: sums")
            without_sums, _ = buffers(pages, len(ids))
            converter.gather(pages, ids, pages.mapping, without_sums)
            assert_same(without_sums, want, f"{what}, without sums")


@SWEEP
def test_scatter_writes_the_blocks_named_and_nothing_else(
    converter: Any, layout: str, geometry: str, places: list[Place]
) -> None:
    """The payload is the oracle's, so that a gather that is wrong the same way cannot hide it."""
    g = GEOMETRIES[geometry]
    model = Model.random(g, NUM_BLOCKS)
    for place in places:
        ids = block_ids(place.per_chunk)
        full = np.where(ids < 0, 7, ids)  # the payload has bytes for the blocks that are not wanted, too
        src, sums = model.payloads(full), model.sums(full)
        segment_bytes = g.block_bytes * place.per_chunk // g.num_kv_heads
        src.reshape(len(ids), g.num_kv_heads, -1)[..., segment_bytes:] = 0xEE  # padding is nobody's concern
        present = ids[ids >= 0].tolist()
        for rank, pages in ranks(model, layout, place, only=[]):
            what = f"rank {rank} of {place}"
            where = {"tp_size": place.tp_size, "tp_rank": rank}
            _, found_sums = buffers(pages, len(ids))
            _, want_sums = buffers(pages, len(ids))
            owned = model.segments_of(**where)
            want_sums[:, owned] = sums[:, owned]
            converter.scatter(src, ids, pages.mapping, pages, found_sums)
            want = model.pages(layout, padding=place.padding, offset=place.offset, only=present, **where)
            for tensor, memory in enumerate(want):
                assert_same(pages.tensors[tensor], memory, f"{what}, tensor {tensor}")
            assert_same(found_sums, want_sums, f"{what}: sums")


@pytest.mark.parametrize(
    ("converter", "layout", "stages"),
    with_kernels(
        ("nhd", (2, 2)),
        ("split-hnd", (1, 2)),
        every=product(["nhd", "split-hnd"], [(1, 2), (2, 2), (2, 6), (3, 3), (6, 6)]),
    ),
    indirect=["converter"],
)
def test_pipeline_stages(converter: Any, layout: str, stages: tuple[int, int]) -> None:
    pp_size, layer_groups = stages
    model = Model.random(attention(20, "uint8", 3, layers=6, heads=2), NUM_BLOCKS)
    ids = block_ids(2)
    present = ids[ids >= 0].tolist()
    found: np.ndarray | None = None
    want = model.payloads(ids, layer_groups=layer_groups)
    for stage in range(pp_size):
        for rank in range(2):
            place = {"tp_size": 2, "tp_rank": rank, "pp_size": pp_size, "pp_rank": stage}
            pages = rank_pages(model, layout, blocks_per_chunk=2, layer_groups=layer_groups, **place)
            if found is None:
                found, sums = buffers(pages, len(ids))
            assert list(pages.mapping.segments) == model.segments_of(layer_groups=layer_groups, **place)
            converter.gather(pages, ids, pages.mapping, found, sums)
            empty = rank_pages(model, layout, blocks_per_chunk=2, layer_groups=layer_groups, only=[], **place)
            converter.scatter(want, ids, empty.mapping, empty)
            for tensor, memory in enumerate(model.pages(layout, only=present, **place)):
                assert_same(empty.tensors[tensor], memory, f"stage {stage} rank {rank} tensor {tensor}")
    assert found is not None
    assert_same(found, want)
    assert_same(sums, model.sums(ids, layer_groups=layer_groups), "sums")


def test_up_and_down_the_ladder_of_tensor_parallel_sizes(converter: Any) -> None:
    """R8: four KV heads, padded pages; TP1 -> TP8 -> TP2 -> TP4 -> TP1 gives the first bytes back."""
    model = Model.random(attention(26, "float16", 5), NUM_BLOCKS)
    ids = np.arange(8, dtype=np.int64).reshape(4, 2)
    want = model.payloads(ids)
    held = [rank_pages(model, "nhd", padding=48, blocks_per_chunk=2, only=list(range(8)))]
    first = [memory.copy() for memory in held[0].tensors]
    for tp_size, layout in ((8, "packed"), (2, "hnd"), (4, "split"), (1, "nhd")):
        payload, sums = buffers(held[0], len(ids))
        for slot_index in range(len(ids)):  # each chunk from its elected writers alone
            one = slice(slot_index, slot_index + 1)
            for pages in held:
                if pages.mapping.is_writer(slot_index):
                    converter.gather(pages, ids[one], pages.mapping, payload[one], sums[one])
        assert_same(payload, want, f"before tp{tp_size}")
        assert_same(sums, model.sums(ids), f"sums before tp{tp_size}")
        held = [pages for _, pages in ranks(model, layout, Place(tp_size, 2, 48), only=[])]
        for pages in held:
            converter.scatter(payload, ids, pages.mapping, pages)
    for tensor, memory in enumerate(first):
        assert_same(held[0].tensors[tensor], memory, f"tensor {tensor}")


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_mla_rows_are_one_length_under_every_tp(converter: Any, tp_size: int) -> None:
    model = Model.random(GEOMETRIES["mla 656"], NUM_BLOCKS)
    ids = block_ids(2)
    for _, pages in ranks(model, "nhd", Place(tp_size, 2, 16)):
        found, _ = buffers(pages, len(ids))
        converter.gather(pages, ids, pages.mapping, found)
        assert_same(found, model.payloads(ids))


ROW_SIZES = [1, 100, ROW_SEGMENT_BYTES, ROW_SEGMENT_BYTES + 5, 3 * ROW_SEGMENT_BYTES - 4096]


@pytest.mark.parametrize(
    ("converter", "row_bytes"),
    with_kernels((1,), (100,), every=product(ROW_SIZES)),
    indirect=["converter"],
)
def test_rows_go_as_they_are(converter: Any, row_bytes: int) -> None:
    mapping = row_mapping(row_bytes, row_stride=row_bytes + 24)
    rows = np.random.default_rng(3).integers(0, 256, size=(5, row_bytes + 24), dtype=np.uint8)
    rows[:, row_bytes:] = POISON
    pages = KVPages(mapping, [rows], 5)
    ids = np.array([[3], [-1], [1]])
    found, sums = buffers(pages, 3)
    converter.gather(pages, ids, mapping, found, sums)
    want = np.zeros_like(found)
    want[[0, 2], :row_bytes] = rows[[3, 1], :row_bytes]
    assert_same(found, want)
    target = np.full_like(rows, POISON)
    again = np.zeros_like(sums)
    converter.scatter(found, ids, mapping, KVPages(mapping, [target], 5), again)
    expected = np.full_like(rows, POISON)
    expected[[3, 1]] = rows[[3, 1]]
    assert_same(target, expected)
    assert_same(again, sums, "sums")


@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed-nhd"])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_threads_and_streaming_stores_leave_the_same_bytes(layout: str, threads: int) -> None:
    """Enough bytes that libkvx writes around the caches and starts helpers."""
    model = Model.random(attention(128, "bfloat16", 16, layers=4, heads=8), 80)
    ids = np.random.default_rng(5).permutation(80).reshape(20, 4)
    ids[0, :2] = ids[-1, 1:] = -1
    pages = rank_pages(model, layout, blocks_per_chunk=4, padding=64)
    found, sums = buffers(pages, len(ids))
    native.gather(pages, ids, pages.mapping, found, sums, threads=threads)
    want = model.payloads(ids)
    assert_same(found, want)
    assert_same(sums, model.sums(ids), "sums")
    target = rank_pages(model, layout, blocks_per_chunk=4, padding=64, only=[])
    again = np.zeros_like(sums)
    native.scatter(want, ids, target.mapping, target, again, threads=threads)
    for tensor, memory in enumerate(model.pages(layout, padding=64, only=ids[ids >= 0].tolist())):
        assert_same(target.tensors[tensor], memory, f"tensor {tensor}")
    assert_same(again, sums, "sums")


@settings(max_examples=60)
@given(st.data())
def test_native_is_the_reference_for_any_geometry(data: st.DataObject) -> None:
    """Sizes that nobody thought of: both converters, both ways, byte for byte."""
    draw = data.draw
    dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32"]))
    heads = draw(st.sampled_from([1, 2, 4]))
    geometry = attention(draw(st.integers(1, 80)), dtype, draw(st.integers(1, 20)), layers=2, heads=heads)
    model = Model.random(geometry, 6, seed=draw(st.integers(0, 99)))
    per_chunk, layout = draw(st.integers(1, 3)), draw(st.sampled_from(sorted(LAYOUT_AXES)))
    tp_size = draw(st.sampled_from([1, 2, 4, 8]))
    where = {
        "tp_size": tp_size,
        "tp_rank": draw(st.integers(0, tp_size - 1)),
        "padding": draw(st.integers(0, 70)),
        "offset": draw(st.integers(0, 70)),
        "blocks_per_chunk": per_chunk,
    }
    order = draw(st.permutations(range(6)))[: 2 * per_chunk]
    absent = draw(st.sets(st.integers(0, 5)))
    ids = np.array([-1 if b in absent else b for b in order], dtype=np.int64).reshape(2, per_chunk)
    source = rank_pages(model, layout, **where)
    results = []
    for converter in CONVERTERS.values():
        out, sums = buffers(source, 2)
        converter.gather(source, ids, source.mapping, out, sums)
        target = rank_pages(model, layout, only=[], **where)
        again = np.zeros_like(sums)
        converter.scatter(out, ids, target.mapping, target, again)
        results.append([out, sums, again, *target.tensors])
    for found, want in zip(results[1], results[0], strict=True):
        assert_same(found, want)
