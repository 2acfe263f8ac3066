from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import LayoutError
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.layout import LAYOUTS, PageLayout
from kvxfer.mapping import CopyRun
from kvxfer.rows import (
    PageMapping,
    RowCell,
    RowMapping,
    RowPage,
    row_pages,
    verify_rows,
    vllm_v1_mapping,
    vllm_v1_mappings,
)

ORDERS = {
    "packed-nhd": PageLayout.packed_nhd,
    "packed": PageLayout.packed,
    "nhd": PageLayout.nhd,
    "hnd": PageLayout.hnd,
    "mla": PageLayout.nhd,
}
SMALL = KVGeometry(num_layers=1, num_kv_heads=4, head_dim=2, dtype="float16", tokens_per_block=4)
MLA = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=3, dtype="float16", tokens_per_block=4, kind=Kind.MLA)


def page_of(order: str = "nhd", geometry: KVGeometry = SMALL, tp_size: int = 1, padding: int = 0) -> RowPage:
    heads = max(1, geometry.num_kv_heads // tp_size)
    return RowPage(geometry=geometry, layout=ORDERS[order](geometry, heads, padding=padding))


# ---- against vLLM's own answers


# The runs that derive_canonical_mappings of vLLM 0.32.0 gave, for pages of these strides: a case a line, for each rank
# [canonical bytes, local bytes, writers, index among them, portable, runs].
VECTORS = json.loads((Path(__file__).parent / "vectors" / "vllm_v1.json").read_text())


def bytes_of(runs: Iterable[Iterable[int]]) -> dict[int, int]:
    """For each byte of a local page its place in the canonical page."""
    places: dict[int, int] = {}
    for local, canonical, size, count, near, far in runs:
        for fragment in range(count):
            for byte in range(size):
                at = local + fragment * near + byte
                assert at not in places
                places[at] = canonical + fragment * far + byte
    return places


def as_tuple(run: CopyRun) -> tuple[int, ...]:
    return (
        run.local_offset,
        run.canonical_offset,
        run.fragment_size,
        run.num_fragments,
        run.local_stride,
        run.canonical_stride,
    )


def name_of(case: dict[str, Any]) -> str:
    return (
        f"{case['order']} {case['heads']} heads tp{case['tp']} dcp{case['dcp']} pcp{case['pcp']} i{case['interleave']}"
    )


@pytest.mark.parametrize("case", VECTORS, ids=name_of)
def test_every_byte_is_where_vllm_puts_it(case: dict[str, Any]) -> None:
    geometry = KVGeometry(
        num_layers=1,
        num_kv_heads=case["heads"],
        head_dim=case["head_elements"],
        dtype="float16",
        tokens_per_block=case["tokens"],
        kind=Kind.MLA if case["order"] == "mla" else Kind.ATTENTION,
    )
    page = page_of(case["order"], geometry, case["tp"], case["padding"])
    sizes = ShardSpec(tp_size=case["tp"], dcp_size=case["dcp"], pcp_size=case["pcp"], interleave=case["interleave"])
    if not case["certified"]:
        with pytest.raises(LayoutError, match="divide|multiple"):
            vllm_v1_mappings([page], sizes)
    mappings = vllm_v1_mappings([page], sizes, opaque=not case["certified"])
    assert len(mappings) == len(case["ranks"])
    for mapping, (canonical, local, writers, index, portable, runs) in zip(mappings, case["ranks"], strict=True):
        mine = mapping.cells[0].page
        assert (mine.canonical_bytes, mine.local_bytes) == (canonical, local)
        assert (mine.num_writers, mine.writer_index, mine.portable) == (writers, index, bool(portable))
        assert bytes_of(map(as_tuple, mine.runs)) == bytes_of(runs)
        assert len(mine.runs) <= len(runs)
        assert (mapping.topology is None) == mine.portable
        assert mapping.row_bytes == canonical


def test_the_vectors_cover_what_they_should() -> None:
    assert {case["order"] for case in VECTORS} == ORDERS.keys()
    assert {case["tp"] for case in VECTORS} == {1, 2, 3, 4, 5, 6, 8}
    assert {bool(case["certified"]) for case in VECTORS} == {True, False}
    assert {case["ranks"][0][2] for case in VECTORS} >= {1, 2, 4}


# ---- rows


def test_a_row_holds_each_tensors_pages_side_by_side() -> None:
    """Two tensors of 64 and 24 canonical bytes a block, and 10 of another group's between them; 3 blocks a chunk."""
    pages = [page_of("nhd", tp_size=2), 10, page_of("mla", MLA, padding=8)]
    mappings = vllm_v1_mappings(pages, ShardSpec(tp_size=2), blocks_per_chunk=3)
    for mapping in mappings:
        assert [(cell.offset, cell.block_stride) for cell in mapping.cells] == [(0, 128), (3 * 138, 24)]
        assert mapping.row_bytes == 3 * (128 + 10 + 24)
        assert [(t.page_bytes, t.block_stride) for t in mapping.tensors] == [(64, 64), (24, 32)]
        assert mapping.topology is None
    assert [mapping.cells[0].page.num_writers for mapping in mappings] == [1, 1]
    assert [(m.cells[1].page.num_writers, m.cells[1].page.writer_index) for m in mappings] == [(2, 0), (2, 1)]


def test_other_groups_may_have_a_single_byte() -> None:
    assert vllm_v1_mapping([1, page_of()], ShardSpec(), blocks_per_chunk=3).cells[0].offset == 3


def test_a_cell_may_be_larger_than_the_page() -> None:
    small, large = replace(page_of(), cell_bytes=200), replace(page_of(), cell_bytes=127)
    mapping = vllm_v1_mapping([small, small], ShardSpec(), blocks_per_chunk=2)
    assert [(cell.offset, cell.block_stride) for cell in mapping.cells] == [(0, 200), (400, 200)]
    with pytest.raises(LayoutError, match="cell_bytes=127 do not hold the page's 128"):
        vllm_v1_mapping([large], ShardSpec())


def test_a_rank_gets_its_own_mapping() -> None:
    sizes = ShardSpec(tp_size=4, dcp_size=2, pcp_size=2, interleave=2)
    pages = [page_of("hnd", replace(SMALL, num_kv_heads=2), 4)]
    together = vllm_v1_mappings(pages, sizes)
    assert [shard.rank for shard in sizes.ranks] == list(range(8))
    for shard, mapping in zip(sizes.ranks, together, strict=True):
        assert vllm_v1_mapping(pages, shard).cells == mapping.cells
        assert mapping.topology == "tp4 pp1 dcp2 pcp2 interleave2"


def test_writers_take_turns_by_the_page() -> None:
    page = vllm_v1_mapping([page_of("mla", MLA)], ShardSpec(tp_size=4, tp_rank=3)).cells[0].page
    assert [page.is_writer(number) for number in range(6)] == [False, False, False, True, False, False]


def test_runs_are_as_few_as_can_be() -> None:
    one = vllm_v1_mapping([page_of("packed")], ShardSpec()).cells[0].page.runs
    assert [as_tuple(run) for run in one] == [(0, 0, 128, 1, 128, 128)]
    half = vllm_v1_mapping([page_of("packed", tp_size=2)], ShardSpec(tp_size=2, tp_rank=1)).cells[0].page.runs
    assert [as_tuple(run) for run in half] == [(0, 64, 64, 1, 64, 64)]
    tokens = vllm_v1_mapping([page_of("nhd", tp_size=2)], ShardSpec(tp_size=2, tp_rank=1)).cells[0].page.runs
    assert [as_tuple(run) for run in tokens] == [(0, 8, 8, 8, 8, 16)]  # K and V halves follow each other on both sides


def test_pages_of_a_whole_geometry() -> None:
    geometry = KVGeometry(
        num_layers=3,
        num_kv_heads=1,
        head_dim=3,
        dtype="float16",
        tokens_per_block=4,
        kind=Kind.MLA,
        extra_bytes=(5, 0, 5),
    )
    latent, extra = geometry.tensors[:2]
    layouts = [PageLayout.nhd(one, 1) for one in geometry.tensors]
    pages = row_pages(geometry, layouts)
    assert [page.geometry for page in pages] == [latent, extra, latent, latent, extra]
    mapping = vllm_v1_mapping(pages, ShardSpec(tp_size=2, tp_rank=1), blocks_per_chunk=2)
    assert [cell.offset for cell in mapping.cells] == [0, 48, 88, 136, 184]
    assert mapping.row_bytes == 2 * (3 * 24 + 2 * 20)
    assert row_pages(replace(SMALL, num_layers=3), layouts[0]) == (RowPage(geometry=SMALL, layout=layouts[0]),) * 3
    with pytest.raises(LayoutError, match="2 page layouts were given for the 5 tensors"):
        row_pages(geometry, layouts[:2])
    with pytest.raises(LayoutError, match="row_pages makes them"):
        RowPage(geometry=geometry, layout=layouts[0])
    with pytest.raises(LayoutError, match="row_pages makes them"):
        RowPage(geometry=replace(geometry, num_layers=1, extra_bytes=5), layout=layouts[0])


def test_opaque_pages_lie_whole_at_a_place_of_the_ranks_own() -> None:
    geometry = KVGeometry.opaque((40,), tokens_per_block=64)
    state = RowPage(geometry=geometry, layout=PageLayout.whole(40, padding=24))
    mappings = vllm_v1_mappings([state, page_of("nhd", tp_size=2)], ShardSpec(tp_size=2, pcp_size=2, interleave=4))
    for rank, mapping in enumerate(mappings):
        page = mapping.cells[0].page
        assert (page.canonical_bytes, page.local_bytes, page.num_writers, page.portable) == (160, 40, 1, False)
        assert [as_tuple(run) for run in page.runs] == [(0, 40 * rank, 40, 1, 40, 40)]
        assert mapping.topology is not None
    alone = vllm_v1_mapping([state], ShardSpec())
    assert alone.topology == "tp1 pp1 dcp1 pcp1 interleave1"
    with pytest.raises(LayoutError, match="page_bytes=41 of layout 'whole' is not the geometry's page_bytes=40"):
        vllm_v1_mapping([replace(state, layout=PageLayout.whole(41))], ShardSpec())


# ---- what is refused


@pytest.mark.parametrize(
    ("page", "sizes", "message"),
    [
        (page_of(), {"pp_size": 2}, "pp_size=2: .* have none"),
        (page_of(), {"tp_size": 4, "dcp_size": 3}, "dcp_size=3 must divide tp_size=4"),
        (
            page_of(tp_size=4),
            {"tp_size": 4, "dcp_size": 2},
            "dcp_size=2 does not divide the 1 ranks that hold the same",
        ),
        (page_of(tp_size=3), {"tp_size": 3}, "tp_size=3 and num_kv_heads=4"),
        (page_of(tp_size=6), {"tp_size": 6}, "tp_size=6 and num_kv_heads=4"),
        (page_of(), {"pcp_size": 2, "interleave": 3}, "interleave=3 does not divide the 4 tokens"),
        (page_of(), {"pcp_size": 2, "interleave": 8}, "interleave=8 does not divide the 4 tokens"),
        (page_of(tp_size=2), {}, "no dense page of 4 tokens and 4 heads"),
    ],
)
def test_what_vllm_does_not_certify_is_refused_with_the_reason(
    page: RowPage, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        vllm_v1_mappings([page], ShardSpec(**sizes))


def test_an_interleave_without_context_parallelism_does_not_matter() -> None:
    assert vllm_v1_mapping([page_of()], ShardSpec(interleave=3)).topology is None


@pytest.mark.parametrize(
    "change",
    [
        {"token_stride": 20},
        {"head_stride": 12},
        {"kv_stride": 68},
        {"kv_stride": None},
        {"dim_stride": 4},
        {"page_bytes": 132, "block_stride": 132},
        {"page_bytes": 124},
    ],
)
@pytest.mark.parametrize("order", ["packed-nhd", "packed", "nhd", "hnd"])
def test_strides_of_no_known_order_are_refused_or_moved_whole(order: str, change: dict[str, Any]) -> None:
    page = page_of(order)
    page = replace(page, layout=replace(page.layout, **change))
    with pytest.raises(LayoutError, match="in an order that vLLM certifies"):
        vllm_v1_mapping([page], ShardSpec(tp_size=1))
    mapping = vllm_v1_mapping([page], ShardSpec(tp_size=1), opaque=True)
    assert mapping.row_bytes == page.layout.page_bytes
    assert mapping.topology == "tp1 pp1 dcp1 pcp1 interleave1"


@pytest.mark.parametrize("order", LAYOUTS)
def test_latents_have_one_order_however_it_is_declared(order: str) -> None:
    page = RowPage(geometry=MLA, layout=LAYOUTS[order](MLA, 1))
    assert (
        vllm_v1_mapping([page], ShardSpec(tp_size=2)).cells
        == vllm_v1_mapping([page_of("mla", MLA)], ShardSpec(tp_size=2)).cells
    )


def test_latents_must_lie_side_by_side() -> None:
    page = page_of("mla", MLA)
    with pytest.raises(LayoutError, match="token_stride=8"):
        vllm_v1_mapping(
            [replace(page, layout=replace(page.layout, token_stride=8, page_bytes=32, block_stride=32))], ShardSpec()
        )


def test_a_page_of_one_vector_pair_does_not_tell_its_order() -> None:
    one = replace(SMALL, num_kv_heads=2, tokens_per_block=1)
    with pytest.raises(LayoutError, match="one token and one head"):
        vllm_v1_mapping([page_of("nhd", one, 2)], ShardSpec(tp_size=2))


def test_a_rank_that_is_not_where_its_group_is_is_refused() -> None:
    page = page_of("nhd", replace(SMALL, num_kv_heads=2), 4)
    with pytest.raises(LayoutError, match="dcp_rank=0 must be tp_rank=1 modulo dcp_size=2"):
        vllm_v1_mapping([page], ShardSpec(tp_size=4, tp_rank=1, dcp_size=2))


@pytest.mark.parametrize(("pages", "blocks"), [([], 1), ([5], 1), ([page_of()], 0), ([page_of(), 0], 1)])
def test_rows_that_cannot_be_are_refused(pages: list[RowPage | int], blocks: int) -> None:
    with pytest.raises(LayoutError, match="row"):
        vllm_v1_mappings(pages, ShardSpec(), blocks_per_chunk=blocks)


# ---- the proof


def changed(mapping: RowMapping, cell: int = 0, **page: Any) -> RowMapping:
    """`mapping` with fields of one cell's page replaced."""
    cells = list(mapping.cells)
    cells[cell] = replace(cells[cell], page=replace(cells[cell].page, **page))
    return replace(mapping, cells=tuple(cells))


def run(*numbers: int) -> CopyRun:
    names = ("local_offset", "canonical_offset", "fragment_size", "num_fragments", "local_stride", "canonical_stride")
    return CopyRun(**dict(zip(names, numbers, strict=True)))


GOOD = vllm_v1_mappings([page_of("nhd", tp_size=2)] * 2, ShardSpec(tp_size=2), blocks_per_chunk=2)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ({"runs": (run(0, 8, 8, 7, 8, 16),)}, r"tensor 1: page of rank 1, .* no run covers bytes \[56, 64\)"),
        ({"runs": (run(0, 8, 8, 9, 8, 16),)}, "tensor 1: page of rank 1, .* beyond its end"),
        ({"runs": ()}, "tensor 1: page of rank 1, .* no run covers any"),
        ({"runs": (run(0, 8, 8, 8, 7, 16),)}, "tensor 1: page of rank 1, .* two runs cover"),
        ({"runs": (run(0, 0, 8, 8, 8, 16),)}, "tensor 1: canonical page 0 modulo 1, .* two runs cover"),
        ({"runs": (run(0, 9, 8, 8, 8, 16),)}, "tensor 1: canonical page 0 modulo 1, .* no run covers"),
        ({"runs": (run(0, 8, 8, 8, 8, 24),)}, "tensor 1: canonical page 0 modulo 1, .* two runs cover|no run covers"),
        ({"canonical_bytes": 130}, "tensor 1: rank 1 has another canonical page"),
        ({"num_writers": 2}, "tensor 1: rank 1 has another canonical page or number of writers"),
        ({"local_bytes": 63}, "tensor 1: page of rank 1, .* beyond its end"),
    ],
)
def test_the_proof_names_what_is_left_out_or_doubled(page: dict[str, Any], message: str) -> None:
    verify_rows(GOOD)
    with pytest.raises(LayoutError, match=message):
        verify_rows((GOOD[0], changed(GOOD[1], 1, **page)))


def test_writers_that_leave_out_or_double_a_page_are_found() -> None:
    ranks = vllm_v1_mappings([page_of("mla", MLA)], ShardSpec(tp_size=4))
    verify_rows(ranks)
    for broken, message in (
        (ranks[:3], "no rank writes pages of number 3 modulo 4"),
        ((*ranks, ranks[2]), "canonical page 2 modulo 4, .* two runs cover"),
        ((changed(ranks[0], writer_index=1), *ranks[1:]), "no rank writes pages of number 0 modulo 4"),
        ((), "no rank's mapping"),
    ):
        with pytest.raises(LayoutError, match=message):
            verify_rows(broken)


def test_rows_that_differ_or_overlap_are_found() -> None:
    first = GOOD[0]
    cells = first.cells

    def with_cells(*changed_cells: RowCell) -> RowMapping:
        return replace(first, cells=changed_cells)

    for broken, message in (
        ((first, replace(GOOD[1], blocks_per_chunk=1)), "rank 1: its row differs"),
        ((first, replace(GOOD[1], row_bytes=600)), "rank 1: its row differs"),
        ((first, replace(GOOD[1], cells=GOOD[1].cells[:1])), "rank 1: its row differs"),
        ((with_cells(cells[0], replace(cells[1], offset=255)),), "the cell at offset 255 of the row overlaps"),
        ((with_cells(cells[0], replace(cells[1], offset=257)),), "cells end at 513, beyond row_bytes=512"),
        ((with_cells(replace(cells[0], block_stride=127), cells[1]),), "rank 0's|exceeds its cell|two runs|no run"),
    ):
        with pytest.raises(LayoutError, match=message):
            verify_rows(broken)


def test_a_page_larger_than_its_cell_is_found() -> None:
    narrow = tuple(replace(m, cells=tuple(replace(c, block_stride=127) for c in m.cells)) for m in GOOD)
    with pytest.raises(LayoutError, match="tensor 0: its canonical page exceeds its cell"):
        verify_rows(narrow)


def test_a_large_model_is_proved_quickly() -> None:
    """80 layers, every rank of TP8 x PCP2: layers of one shape are derived and proved once."""
    large = KVGeometry(num_layers=80, num_kv_heads=64, head_dim=128, dtype="bfloat16", tokens_per_block=32)
    for order in ("packed", "packed-nhd"):
        mappings = vllm_v1_mappings(
            row_pages(large, ORDERS[order](large, 8)),
            ShardSpec(tp_size=8, pcp_size=2, interleave=8),
            blocks_per_chunk=4,
        )
        assert len(mappings) == 16
        assert mappings[0].row_bytes == 4 * 2 * large.block_bytes


def test_a_page_mapping_is_plain() -> None:
    assert PageMapping(canonical_bytes=4, local_bytes=4, runs=(run(0, 0, 4, 1, 4, 4),)).portable
