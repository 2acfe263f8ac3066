"""Any geometry under any sharding: mappings tile, both converters are the oracle, and a store brings all back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.convert.rows import gather_rows, scatter_rows
from kvxfer.engine import TransferEngine
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.keys import Namespace, kvx1_namespace, make_offload_key
from kvxfer.layout import LAYOUTS, PageLayout, kvx1_mappings, local_heads, row_mapping
from kvxfer.mapping import CanonicalMapping
from kvxfer.rows import RowPage, vllm_v1_mappings
from kvxfer.store import Store
from tests.convert.common import CONVERTERS, assert_same, buffers
from tests.examples import examples
from tests.oracle import LAYOUT_AXES, Bytes, Model
from tests.row_oracle import Layer, Place

NUM_BLOCKS = 7
CONFIG = EngineConfig(io_threads=2, shutdown_timeout_s=1.0)
DTYPES = ["uint8", "float16", "bfloat16", "float32"]


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    """Small, with sizes that divide nothing."""
    kind = draw(st.sampled_from([Kind.ATTENTION, Kind.ATTENTION, Kind.SLIDING_WINDOW, Kind.MLA]))
    return KVGeometry(
        num_layers=draw(st.sampled_from([1, 2, 3, 4, 6])),
        num_kv_heads=1 if kind is Kind.MLA else draw(st.sampled_from([1, 2, 3, 4, 8])),
        head_dim=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from(DTYPES)),
        tokens_per_block=draw(st.integers(1, 9)),
        kind=kind,
        window=7 if kind is Kind.SLIDING_WINDOW else None,
    )


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


@dataclass(frozen=True)
class Sharding:
    """How many ranks, and what each of them says of its pages."""

    tp: int
    pp: int
    layout: str
    padding: int
    offset: int

    def place(self, rank: int) -> dict[str, int]:
        return {
            "tp_size": self.tp, "tp_rank": rank % self.tp, "pp_size": self.pp, "pp_rank": rank // self.tp,
            "padding": self.padding, "offset": self.offset,
        }  # fmt: skip

    def mappings(self, geometry: KVGeometry, **chunk: int) -> tuple[CanonicalMapping, ...]:
        heads = len(local_heads(geometry, ShardSpec(tp_size=self.tp)))
        page = LAYOUTS[self.layout](geometry, heads, padding=self.padding, offset=self.offset)
        return kvx1_mappings(geometry, self.tp, page, pp_size=self.pp, **chunk)

    def tensors(self, model: Model, rank: int, only: Sequence[int] | None = None) -> list[Bytes]:
        return model.pages(self.layout, only=only, **self.place(rank))

    def pages(self, model: Model, only: Sequence[int] | None = None, **chunk: int) -> list[KVPages]:
        return [
            KVPages(mapping, self.tensors(model, rank, only), model.num_blocks)
            for rank, mapping in enumerate(self.mappings(model.geometry, **chunk))
        ]

    def check(self, model: Model, pages: Sequence[KVPages], blocks: Sequence[int]) -> None:
        """Asserts that these blocks are the model's and that not a byte beside them was touched."""
        for rank, mine in enumerate(pages):
            for number, (got, want) in enumerate(
                zip(mine.tensors, self.tensors(model, rank, list(blocks)), strict=True)
            ):
                assert_same(got, want, f"{self}, rank {rank}, tensor {number}")


@st.composite
def shardings(draw: st.DrawFn, geometry: KVGeometry, layer_groups: int) -> Sharding:
    """Fewer ranks than heads, as many, or several for each."""
    heads = geometry.num_kv_heads
    tp = draw(st.sampled_from([*divisors(heads), *(heads * n for n in (2, 3))]))
    return Sharding(
        tp=tp,
        pp=draw(st.sampled_from(divisors(layer_groups))),
        layout=draw(st.sampled_from(sorted(LAYOUT_AXES))),
        padding=draw(st.sampled_from([0, 1, 8, 24, 61])),
        offset=draw(st.sampled_from([0, 1, 8, 100])),
    )


@st.composite
def block_ids(draw: st.DrawFn, per_chunk: int) -> NDArray[np.int64]:
    """Whole and partial chunks of scattered blocks, none of them empty."""
    chunks = draw(st.integers(1, NUM_BLOCKS // per_chunk))
    ids = np.array(draw(st.permutations(range(NUM_BLOCKS)))[: chunks * per_chunk], np.int64).reshape(chunks, per_chunk)
    for row in ids:
        row[list(draw(st.sets(st.integers(0, per_chunk - 1), max_size=per_chunk - 1)))] = -1
    return ids


@st.composite
def chunk_shapes(draw: st.DrawFn, geometry: KVGeometry) -> dict[str, int]:
    return {
        "blocks_per_chunk": draw(st.integers(1, 3)),
        "layer_groups": draw(st.sampled_from(divisors(geometry.num_layers))),
    }


def count(size: int, pieces: Iterator[tuple[int, int]]) -> NDArray[np.int64]:
    """How many of the pieces (start, bytes) each of `size` bytes is in."""
    times = np.zeros(size, np.int64)
    for start, length in pieces:
        assert start >= 0
        assert start + length <= size
        times[start : start + length] += 1
    return times


@settings(max_examples=examples(20))
@given(st.data())
def test_kvx1_mappings_tile_byte_by_byte(data: st.DataObject) -> None:
    """Counted here, and not by the proof that the product has for itself."""
    geometry = data.draw(geometries())
    shape = data.draw(chunk_shapes(geometry))
    sharding = data.draw(shardings(geometry, shape["layer_groups"]))
    mappings = sharding.mappings(geometry, **shape)
    slot = mappings[0].slot
    turns = mappings[0].num_writers
    for mapping in mappings:
        for number, tensor in enumerate(mapping.tensors):
            local = (
                (run.local_offset - tensor.offset + f * run.local_stride, run.fragment_size)
                for of, _, run in mapping.copy_runs()
                for f in range(run.num_fragments)
                if of == number
            )
            assert (count(tensor.page_bytes, local) == 1).all(), f"tensor {number}"
    for turn in range(turns):
        written = np.zeros(slot.num_segments * slot.segment_bytes, np.int64)
        for mapping in mappings:
            if mapping.is_writer(turn):
                canonical = (
                    (
                        segment * slot.segment_bytes + run.canonical_offset
                        + block * mapping.canonical_block_stride + f * run.canonical_stride,
                        run.fragment_size,
                    )
                    for _, segment, run in mapping.copy_runs()
                    for block in range(slot.blocks_per_chunk)
                    for f in range(run.num_fragments)
                )  # fmt: skip
                written += count(written.size, canonical)
        assert (written == 1).all(), f"slots of number {turn} modulo {turns}"


ROW_ORDERS = {
    "packed-nhd": PageLayout.packed_nhd,
    "packed": PageLayout.packed,
    "nhd": PageLayout.nhd,
    "hnd": PageLayout.hnd,
}


@st.composite
def row_groups(draw: st.DrawFn, heads: int, cp: bool) -> ShardSpec:
    """Tensor- and (cp) context-parallel ranks that `heads` can be dealt out to."""
    tp = draw(st.sampled_from([*divisors(heads), heads * 2, heads * 4]))
    dcp = draw(st.sampled_from([n for n in (1, 2) if max(1, tp // heads) % n == 0])) if cp else 1
    pcp = draw(st.sampled_from([1, 2])) if cp else 1
    return ShardSpec(tp_size=tp, dcp_size=dcp, pcp_size=pcp, interleave=draw(st.sampled_from([1, 2])) if cp else 1)


@settings(max_examples=examples(20))
@given(st.data())
def test_vllm_rows_tile_byte_by_byte(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([1, 2, 3, 4]))
    sizes = data.draw(row_groups(heads, cp=True))
    geometry = KVGeometry(
        num_layers=1, num_kv_heads=heads, head_dim=data.draw(st.integers(1, 20)),
        dtype="uint8", tokens_per_block=2 * data.draw(st.integers(1, 4)),
    )  # fmt: skip
    local = max(1, heads // sizes.tp_size)
    pages = [
        RowPage(geometry=geometry, layout=ROW_ORDERS[order](geometry, local, padding=8 * n, offset=3 * n))
        for n, order in enumerate(data.draw(st.lists(st.sampled_from(sorted(ROW_ORDERS)), min_size=1, max_size=3)))
    ]
    mappings = vllm_v1_mappings(pages, sizes, blocks_per_chunk=data.draw(st.integers(1, 3)))
    assert len(mappings) == sizes.world_size
    for number in range(len(pages)):
        cells = [mapping.cells[number].page for mapping in mappings]
        for page in cells:
            near = (
                (run.local_offset + f * run.local_stride, run.fragment_size)
                for run in page.runs
                for f in range(run.num_fragments)
            )
            assert (count(page.local_bytes, near) == 1).all()
        for turn in range(cells[0].num_writers):
            far = (
                (run.canonical_offset + f * run.canonical_stride, run.fragment_size)
                for page in cells if page.is_writer(turn)
                for run in page.runs
                for f in range(run.num_fragments)
            )  # fmt: skip
            assert (count(cells[0].canonical_bytes, far) == 1).all()
    ends = [(cell.offset, cell.offset + cell.block_stride * mappings[0].blocks_per_chunk) for cell in mappings[0].cells]
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == mappings[0].row_bytes


@settings(max_examples=examples(20))
@given(st.data())
def test_any_converter_gathers_what_the_oracle_sliced(data: st.DataObject) -> None:
    geometry = data.draw(geometries())
    shape = data.draw(chunk_shapes(geometry))
    sharding = data.draw(shardings(geometry, shape["layer_groups"]))
    model = Model.random(geometry, NUM_BLOCKS, seed=data.draw(st.integers(0, 9)))
    ids = data.draw(block_ids(shape["blocks_per_chunk"]))
    pages = sharding.pages(model, **shape)
    want = model.payloads(ids.tolist(), layer_groups=shape["layer_groups"])
    sums = model.sums(ids.tolist(), layer_groups=shape["layer_groups"])
    for name, converter in CONVERTERS.items():
        out, found = buffers(pages[0], len(ids))
        for mine in pages:
            converter.gather(mine, ids, mine.mapping, out, found)
        assert_same(out, want, name)
        assert_same(found, sums, f"{name}'s sums")


@settings(max_examples=examples(20))
@given(st.data())
def test_a_scatter_of_any_subset_touches_nothing_else(data: st.DataObject) -> None:
    geometry = data.draw(geometries())
    shape = data.draw(chunk_shapes(geometry))
    sharding = data.draw(shardings(geometry, shape["layer_groups"]))
    model = Model.random(geometry, NUM_BLOCKS)
    ids = data.draw(block_ids(shape["blocks_per_chunk"]))
    payloads = model.payloads(ids.tolist(), layer_groups=shape["layer_groups"])
    kept = payloads.copy()
    wanted = np.where(
        np.array(data.draw(st.lists(st.booleans(), min_size=ids.size, max_size=ids.size))).reshape(ids.shape), ids, -1
    )
    for converter in CONVERTERS.values():
        pages = sharding.pages(model, only=[], **shape)
        for mine in pages:
            converter.scatter(payloads, wanted, mine.mapping, mine)
        sharding.check(model, pages, wanted[wanted >= 0].tolist())
        assert np.array_equal(payloads, kept)


# ---- through a store


@contextmanager
def store_of(writers: int = 2) -> Iterator[Store]:
    """A store on a directory of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-properties-") as folder,
        Store.open(StoreConfig(root=Path(folder) / "root", capacity_bytes=8 << 20), writers=writers) as store,
    ):
        yield store


def move(store: Store, namespace: Namespace, pages: Sequence[KVPages], call: str, ids: Any, live: bool = True) -> None:
    """One job, all of whose chunks must arrive."""
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(len(ids))]
    with TransferEngine(store, namespace, pages, config=CONFIG, live=live) as engine:
        getattr(engine, call)(1, keys, ids)
        result = engine.wait([1], 20)[1]
    assert result.bitmap.all(), result
    assert not result.errors


@settings(max_examples=examples(15))
@given(st.data())
def test_what_one_sharding_stored_another_loads(data: st.DataObject) -> None:
    geometry = data.draw(geometries())
    shape = data.draw(chunk_shapes(geometry))
    source, target = (data.draw(shardings(geometry, shape["layer_groups"])) for _ in range(2))
    model = Model.random(geometry, NUM_BLOCKS)
    ids = data.draw(block_ids(shape["blocks_per_chunk"]))
    namespace = kvx1_namespace(geometry, model="test", weights_fingerprint="seed 0", **shape)
    empty = target.pages(model, only=[], **shape)
    with store_of() as store:
        move(store, namespace, source.pages(model, **shape), "submit_store", ids)
        move(store, namespace, empty, "submit_load", ids)
    target.check(model, empty, ids[ids >= 0].tolist())


@settings(max_examples=examples(10))
@given(st.data())
def test_rows_that_one_group_filled_another_reads_from_the_store(data: st.DataObject) -> None:
    """vLLM's rows: filled by all ranks of one size, stored by one writer, read by the ranks of another size."""
    heads = data.draw(st.sampled_from([1, 2, 4]))
    geometry = KVGeometry(num_layers=1, num_kv_heads=heads, head_dim=5, dtype="float16", tokens_per_block=4)
    order = data.draw(st.sampled_from(sorted(ROW_ORDERS)))
    layers = [Layer.random(geometry, order, NUM_BLOCKS, seed=seed) for seed in range(2)]
    ids = np.arange(NUM_BLOCKS).reshape(-1, 1)

    def ranks(tp: int) -> Any:
        page = ROW_ORDERS[order](geometry, max(1, heads // tp), padding=8, offset=4)
        return vllm_v1_mappings([RowPage(geometry=geometry, layout=page)] * 2, ShardSpec(tp_size=tp))

    def tensors(tp: int, rank: int, only: Sequence[int] | None = None) -> list[Bytes]:
        return [layer.tensor(Place(tp=tp, rank=rank), padding=8, offset=4, only=only) for layer in layers]

    before, after = (data.draw(row_groups(heads, cp=False)).tp_size for _ in range(2))
    size = ranks(before)[0].row_bytes
    rows, back = np.zeros((NUM_BLOCKS, size), np.uint8), np.zeros((NUM_BLOCKS, size), np.uint8)
    everything = np.arange(NUM_BLOCKS)
    for rank, mapping in enumerate(ranks(before)):
        gather_rows(tensors(before, rank), ids, mapping, rows, everything)
    namespace = Namespace(
        model="test", weights_fingerprint="seed 0", dtype="float16", canonical_form="row", geometry=[{"heads": heads}],
        blocks_per_chunk=1, tokens_per_chunk=4,
    )  # fmt: skip
    with store_of() as store:
        for call, memory in (("submit_store", rows), ("submit_load", back)):
            move(store, namespace, [KVPages(row_mapping(size), [memory], NUM_BLOCKS)], call, everything, live=False)
    for rank, mapping in enumerate(ranks(after)):
        mine = tensors(after, rank, only=[])
        scatter_rows(back, everything, mapping, mine, ids)
        for got, want in zip(mine, tensors(after, rank), strict=True):
            assert_same(got, want, f"tp{before} to tp{after}, rank {rank}")
