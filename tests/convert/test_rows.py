"""vLLM's canonical rows, filled by all ranks and read back by others, against an oracle that slices tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.convert import native_rows
from kvxfer.convert import rows as reference_rows
from kvxfer.errors import LayoutError
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.layout import PageLayout
from kvxfer.rows import RowMapping, RowPage, vllm_v1_mappings
from tests.convert import device_rows
from tests.convert.common import assert_same
from tests.oracle import POISON
from tests.row_oracle import Layer, Place

MAKE = {
    "packed-nhd": PageLayout.packed_nhd,
    "packed": PageLayout.packed,
    "nhd": PageLayout.nhd,
    "hnd": PageLayout.hnd,
    "mla": PageLayout.nhd,
}
# Each has gather_rows and scatter_rows.
CONVERTERS: dict[str, ModuleType] = {"reference": reference_rows, "native": native_rows, "triton": device_rows}
with_each = pytest.mark.parametrize("convert", CONVERTERS.values(), ids=CONVERTERS)
# Triton's interpreter takes milliseconds a tile: of what is tried a lot it gets a part, and the rest is marked slow.
HOSTS = [CONVERTERS["reference"], CONVERTERS["native"]]
with_each_host = pytest.mark.parametrize("convert", HOSTS, ids=["reference", "native"])
BLOCKS = 7
SPARE = 48  # bytes of a row beyond the mapping's


def attention(heads: int, tokens: int = 4, elements: int = 3, dtype: str = "float16") -> KVGeometry:
    return KVGeometry(num_layers=1, num_kv_heads=heads, head_dim=elements, dtype=dtype, tokens_per_block=tokens)


def latent(tokens: int = 4, elements: int = 5) -> KVGeometry:
    return KVGeometry(
        num_layers=1, num_kv_heads=1, head_dim=elements, dtype="uint8", tokens_per_block=tokens, kind=Kind.MLA
    )


class Group:
    """All ranks over the oracle's layers: padding and offset differ from layer to layer."""

    def __init__(
        self,
        layers: Sequence[Layer],
        tp: int,
        dcp: int = 1,
        pcp: int = 1,
        interleave: int = 1,
        per_chunk: int = 1,
        convert: ModuleType = reference_rows,
    ) -> None:
        self.layers, self.convert = layers, convert
        self.places = [Place(tp, dcp, pcp, interleave, rank) for rank in range(tp * pcp)]
        self.edges = [(8 * (n % 3), 5 * n) for n in range(len(layers))]
        pages = [
            RowPage(
                geometry=layer.geometry,
                layout=MAKE[layer.order](
                    layer.geometry, max(1, layer.geometry.num_kv_heads // tp), padding=padding, offset=offset
                ),
            )
            for layer, (padding, offset) in zip(layers, self.edges, strict=True)
        ]
        sizes = ShardSpec(tp_size=tp, dcp_size=dcp, pcp_size=pcp, interleave=interleave)
        self.mappings: tuple[RowMapping, ...] = vllm_v1_mappings(pages, sizes, blocks_per_chunk=per_chunk)

    def tensors(self, rank: int, only: Sequence[int] | None = None) -> list[NDArray[np.uint8]]:
        return [
            layer.tensor(self.places[rank], padding=padding, offset=offset, only=only)
            for layer, (padding, offset) in zip(self.layers, self.edges, strict=True)
        ]

    def rows(self, count: int) -> NDArray[np.uint8]:
        return np.full((count, self.mappings[0].row_bytes + SPARE), POISON, dtype=np.uint8)

    def expected(self, count: int, row_ids: Sequence[int], block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The rows, by the oracle: each tensor's canonical pages side by side, tensor after tensor."""
        rows = self.rows(count)
        for row, ids in zip(row_ids, block_ids.tolist(), strict=True):
            at = 0
            for layer in self.layers:
                for block in ids:
                    page = layer.canonical(max(block, 0))
                    if block >= 0:
                        rows[row, at : at + page.size] = page
                    at += page.size
        return rows

    def fill(self, rows: NDArray[np.uint8], row_ids: NDArray[np.int64], block_ids: NDArray[np.int64]) -> None:
        """Every rank writes what is its own."""
        for rank, mapping in enumerate(self.mappings):
            self.convert.gather_rows(self.tensors(rank), block_ids, mapping, rows, row_ids)

    def check_load(self, rows: NDArray[np.uint8], row_ids: NDArray[np.int64], block_ids: NDArray[np.int64]) -> None:
        """Every rank reads all of its pages, and nothing else is touched."""
        present = block_ids[block_ids >= 0].tolist()
        for rank, mapping in enumerate(self.mappings):
            found = self.tensors(rank, only=[])
            self.convert.scatter_rows(rows, row_ids, mapping, found, block_ids)
            for number, (got, want) in enumerate(zip(found, self.tensors(rank, only=present), strict=True)):
                assert_same(got, want, f"rank {rank} tensor {number}")


def ids_of(per_chunk: int) -> NDArray[np.int64]:
    rows = {1: [[5], [0], [6]], 2: [[-1, 5], [6, 0], [3, -1]], 3: [[-1, 5, 2], [0, 1, 3], [6, -1, -1]]}
    return np.array(rows[per_chunk], dtype=np.int64)


PLACES = [
    # heads, tp, dcp, pcp, interleave
    (4, 1, 1, 1, 1),
    (4, 2, 1, 1, 1),
    (4, 4, 1, 1, 1),
    (2, 8, 1, 1, 1),
    (6, 3, 1, 1, 1),
    (1, 5, 1, 1, 1),
    (2, 8, 2, 1, 2),
    (2, 4, 2, 2, 1),
    (4, 2, 1, 2, 4),
    (1, 8, 4, 2, 2),
]


@with_each_host
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", MAKE)
def test_all_ranks_together_write_the_row_and_read_their_pages_back(
    convert: ModuleType, order: str, place: Sequence[int]
) -> None:
    check_all_ranks(convert, order, *place)


@pytest.mark.parametrize(("order", "place"), list(zip([*MAKE, *MAKE], PLACES, strict=True)))
def test_triton_writes_the_row_and_reads_it_back(order: str, place: Sequence[int]) -> None:
    """Each order and each place, not all of their pairs."""
    check_all_ranks(device_rows, order, *place, sizes=(2,), num_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", MAKE)
def test_triton_writes_every_row_and_reads_it_back(order: str, place: Sequence[int]) -> None:
    check_all_ranks(device_rows, order, *place, sizes=(3,))


def check_all_ranks(
    convert: ModuleType,
    order: str,
    heads: int,
    tp: int,
    dcp: int,
    pcp: int,
    interleave: int,
    *,
    sizes: Sequence[int] = (1, 2, 3),
    num_layers: int = 2,
) -> None:
    geometry = latent() if order == "mla" else attention(heads)
    for per_chunk in sizes:
        layers = [Layer.random(geometry, order, BLOCKS, dcp * pcp, seed) for seed in range(num_layers)]
        group = Group(layers, tp, dcp, pcp, interleave, per_chunk, convert)
        block_ids, row_ids = ids_of(per_chunk), np.array([4, 0, 3])
        rows = group.rows(5)
        group.fill(rows, row_ids, block_ids)
        want = group.expected(5, row_ids.tolist(), block_ids)
        assert_same(rows, want, f"{per_chunk} blocks a chunk")
        group.check_load(want, row_ids, block_ids)


@with_each
def test_layers_of_unequal_pages_share_a_row(convert: ModuleType) -> None:
    """A latent, an indexer's keys, and attention of two sizes: different writers and cells in one row."""
    layers = [
        Layer.random(latent(), "mla", BLOCKS, 1, 1),
        Layer.random(latent(elements=2), "mla", BLOCKS, 1, 2),
        Layer.random(attention(4), "hnd", BLOCKS, 1, 3),
        Layer.random(attention(2, elements=7), "packed-nhd", BLOCKS, 1, 4),
    ]
    group = Group(layers, 4, per_chunk=3, convert=convert)
    assert [cell.page.num_writers for cell in group.mappings[0].cells] == [4, 4, 1, 2]
    block_ids, row_ids = ids_of(3), np.array([4, 0, 3])
    rows = group.rows(5)
    group.fill(rows, row_ids, block_ids)
    want = group.expected(5, row_ids.tolist(), block_ids)
    assert_same(rows, want)
    group.check_load(want, row_ids, block_ids)


@with_each_host
def test_up_and_down_the_ladder_of_tensor_parallel_sizes(convert: ModuleType) -> None:
    """R8: what TP1, 8, 2 and 4 write is one row, each from what the one before it read."""
    layers = [Layer.random(attention(4), "packed", BLOCKS, 1, seed) for seed in range(3)]
    block_ids, row_ids = np.arange(6).reshape(3, 2), np.array([1, 0, 2])
    rows = None
    for tp in (1, 8, 2, 4, 1):
        group = Group(layers, tp, per_chunk=2)
        tensors = [group.tensors(rank) for rank in range(tp)]
        if rows is not None:
            tensors = [group.tensors(rank, only=[]) for rank in range(tp)]
            for mine, mapping in zip(tensors, group.mappings, strict=True):
                convert.scatter_rows(rows, row_ids, mapping, mine, block_ids)
        rows = group.rows(3)
        for mine, mapping in zip(tensors, group.mappings, strict=True):
            convert.gather_rows(mine, block_ids, mapping, rows, row_ids)
        assert_same(rows, group.expected(3, row_ids.tolist(), block_ids), f"tp{tp}")


@with_each
def test_replicas_write_only_their_turns(convert: ModuleType) -> None:
    """Pages are counted through the rows: row 3 of two blocks has pages 6 and 7."""
    group = Group([Layer.random(latent(), "mla", BLOCKS)], 4, per_chunk=2)
    block_ids = np.array([[1, 2], [-1, 4]])
    written = []
    for rank, mapping in enumerate(group.mappings):
        rows = group.rows(4)
        convert.gather_rows(group.tensors(rank), block_ids, mapping, rows, np.array([3, 0]))
        places = np.argwhere(rows[:, : mapping.row_bytes].reshape(4, 2, -1)[:, :, 0] != POISON)
        written.append([tuple(place) for place in places.tolist()])
    assert written == [[], [(0, 1)], [(3, 0)], [(3, 1)]]


@with_each_host
@settings(max_examples=60)
@given(st.data())
def test_any_row_is_the_oracles(convert: ModuleType, data: st.DataObject) -> None:
    check_any_row(convert, data)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_any_row_by_triton_is_the_oracles(data: st.DataObject) -> None:
    check_any_row(device_rows, data)


def check_any_row(convert: ModuleType, data: st.DataObject) -> None:
    draw = data.draw
    order = draw(st.sampled_from(sorted(MAKE)))
    heads = 1 if order == "mla" else draw(st.sampled_from([1, 2, 3, 4]))
    tp = draw(st.sampled_from([heads, *[heads * n for n in (2, 4)], *[n for n in (1, 2) if heads % n == 0]]))
    replicas = max(1, tp // heads)
    dcp = draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0 and tp % n == 0]))
    pcp, interleave = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    lone = order != "mla" and interleave * max(1, heads // tp) == 1  # one token and one head are refused
    tokens = interleave * draw(st.integers(2 if lone else 1, 3))
    elements = draw(st.integers(1, 9))
    geometry = latent(tokens, elements) if order == "mla" else attention(heads, tokens, elements, "uint8")
    per_chunk = draw(st.sampled_from([1, 2, 3]))
    layers = [Layer.random(geometry, order, BLOCKS, dcp * pcp, seed) for seed in range(draw(st.integers(1, 2)))]
    group = Group(layers, tp, dcp, pcp, interleave, per_chunk, convert)
    block_ids, row_ids = ids_of(per_chunk), np.array(draw(st.permutations(range(5)))[:3])
    rows = group.rows(5)
    group.fill(rows, row_ids, block_ids)
    want = group.expected(5, row_ids.tolist(), block_ids)
    assert_same(rows, want)
    group.check_load(want, row_ids, block_ids)


@with_each
def test_a_number_stands_for_a_tensor_of_other_groups(convert: ModuleType) -> None:
    geometry = attention(2)
    layer = Layer.random(geometry, "nhd", BLOCKS)
    page = RowPage(geometry=geometry, layout=PageLayout.nhd(geometry, 2))
    (mapping,) = vllm_v1_mappings([10, page, 6], ShardSpec(), blocks_per_chunk=2)
    rows = np.full((1, mapping.row_bytes), POISON, dtype=np.uint8)
    convert.gather_rows([layer.tensor(Place())], np.array([[3, 1]]), mapping, rows, np.array([0]))
    want = np.full_like(rows, POISON)
    want[0, 20:-12] = np.concatenate([layer.canonical(3), layer.canonical(1)])
    assert_same(rows, want)


# ---- refusals

GROUP = Group([Layer.random(attention(2), "nhd", BLOCKS)], 1, per_chunk=2)
GOOD: dict[str, Any] = {
    "tensors": GROUP.tensors(0),
    "block_ids": np.array([[0, 1], [2, -1]]),
    "rows": GROUP.rows(3),
    "row_ids": np.array([2, 0]),
}


@with_each_host
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ids": np.array([[0, 1, 2], [3, 4, 5]])}, r"block_ids has shape \(2, 3\), want \(2, 2\)"),
        ({"block_ids": np.array([[0, 1]])}, r"block_ids has shape \(1, 2\)"),
        ({"block_ids": np.array([0, 1])}, "block_ids of int64 .* must be int64 and 2-dimensional"),
        ({"block_ids": np.array([[0, 1], [2, 3]], dtype=np.int32)}, "block_ids of int32"),
        ({"block_ids": np.array([[0, 1], [BLOCKS, 3]])}, f"tensor 0 has .* block {BLOCKS} lies beyond its end"),
        ({"block_ids": np.array([[0, 1], [2**62, 3]])}, "lies beyond its end"),
        ({"block_ids": np.array([[0, 1], [-2, 3]])}, "block id -2"),
        ({"rows": GOOD["rows"][:, :191]}, "rows of 191 bytes cannot hold the mapping's 192"),
        ({"rows": GOOD["rows"].astype(np.int8)}, "rows of int8"),
        ({"row_ids": np.array([3, 0])}, r"row id 3 must be in 0..2"),
        ({"row_ids": np.array([0, -1])}, r"row id -1 must be in 0..2"),
        ({"row_ids": np.array([2.0, 0.0])}, "row_ids of float64"),
        ({"tensors": []}, "0 tensors were given, the mapping has 1"),
        ({"tensors": [GOOD["tensors"][0].reshape(BLOCKS, -1)]}, "tensor 0 of uint8"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    convert: ModuleType, change: dict[str, Any], message: str
) -> None:
    given = {**GOOD, "rows": GOOD["rows"].copy(), "tensors": [t.copy() for t in GOOD["tensors"]]} | change
    before = [array.copy() for array in (given["rows"], *given["tensors"])]
    (mapping,) = GROUP.mappings
    with pytest.raises(LayoutError, match=message):
        convert.gather_rows(given["tensors"], given["block_ids"], mapping, given["rows"], given["row_ids"])
    with pytest.raises(LayoutError, match=message):
        convert.scatter_rows(given["rows"], given["row_ids"], mapping, given["tensors"], given["block_ids"])
    for array, old in zip((given["rows"], *given["tensors"]), before, strict=True):
        assert_same(array, old)


@with_each_host
def test_a_place_named_twice_is_refused_where_it_is_written(convert: ModuleType) -> None:
    (mapping,) = GROUP.mappings
    twice = np.array([[0, 1], [-1, 0]])
    rows = GOOD["rows"].copy()
    convert.gather_rows(GOOD["tensors"], twice, mapping, rows, GOOD["row_ids"])
    with pytest.raises(LayoutError, match="block 0 is named twice"):
        convert.scatter_rows(rows, GOOD["row_ids"], mapping, GOOD["tensors"], twice)
    with pytest.raises(LayoutError, match="row 2 is named twice"):
        convert.gather_rows(GOOD["tensors"], GOOD["block_ids"], mapping, rows, np.array([2, 2]))
