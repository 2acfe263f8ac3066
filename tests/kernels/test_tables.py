"""tables.py: the tables say of every byte what the runs say, and every access that they lead to is aligned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.convert.tables import TILE, grain_of, places_of, planes_of, shape_of, tiles_of
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.layout import LAYOUTS, PageLayout, kvx1_mapping, local_heads, row_mapping
from kvxfer.mapping import CanonicalMapping, LocalTensor
from kvxfer.opaque import opaque_mapping
from kvxfer.slot import ROW_SEGMENT_BYTES
from tests.examples import examples

BLOCK = 1  # a block id that tells a block stride from its double
Byte = tuple[int, int, int, int]  # segment, offset in it, position in the chunk, address of block BLOCK's byte


def bytes_of_runs(mapping: CanonicalMapping, addresses: list[int]) -> Iterator[Byte]:
    """What moves whither, by the runs' own formula."""
    for tensor, segment, run in mapping.copy_runs():
        for position in range(mapping.blocks_per_chunk):
            for f in range(run.num_fragments):
                near = addresses[tensor] + BLOCK * mapping.tensors[tensor].block_stride
                near += run.local_offset + f * run.local_stride
                far = run.canonical_offset + position * mapping.canonical_block_stride + f * run.canonical_stride
                for w in range(run.fragment_size):
                    yield segment, far + w, position, near + w


def bytes_of_planes(mapping: CanonicalMapping, addresses: list[int]) -> Iterator[Byte]:
    """What moves whither, by the formula of `kernels.move_planes`."""
    shape = shape_of(mapping)
    assert shape is not None
    planes = planes_of(mapping, shape, addresses)
    places = places_of(mapping)
    assert planes.shape == (len(places), shape.planes)
    for s, (_, number, _, _) in enumerate(places.tolist()):
        far = 0
        for p in range(shape.planes):
            for b in range(shape.blocks):
                for f in range(shape.fragments):
                    near = int(planes[s, p]) + BLOCK * shape.block_stride + f * shape.fragment_stride
                    for w in range(shape.fragment):
                        yield number, far + w, b, near + w
                    far += shape.fragment


def bytes_of_tiles(mapping: CanonicalMapping, addresses: list[int]) -> Iterator[Byte]:
    """What moves whither, by the formula of `kernels.move_tiles`; padding is not moved."""
    made = tiles_of(mapping, addresses)
    places = places_of(mapping)
    for ordinal, first, end in made.units.tolist():
        assert first < end
        for tile in range(first, end):
            offset, count, _, address, block_stride, position, skip, fragment, stride = made.tiles[tile].tolist()
            for w in range(count):
                near = address + BLOCK * block_stride + (skip + w) // fragment * stride + (skip + w) % fragment
                yield int(places[ordinal, 1]), offset + w, position, near


def check_tiles(mapping: CanonicalMapping, addresses: list[int]) -> None:
    """Tiles are small, aligned as the vector says, and write each byte of a segment with its padding once."""
    made, places = tiles_of(mapping, addresses), places_of(mapping)
    grain = grain_of(mapping, addresses)
    written = {ordinal: np.zeros(places[ordinal, 3], np.int64) for ordinal in range(len(places))}
    for number, (ordinal, first, end) in enumerate(made.units.tolist()):
        for offset, count, stored, *rest in made.tiles[first:end].tolist():
            assert (count > 0) == (number < made.payload_units)
            assert 0 <= count <= TILE and 0 < stored <= TILE and rest[3] < TILE
            assert not any(value % grain for value in (offset, count, stored, *rest[:2], *rest[3:]))
            written[ordinal][offset : offset + stored] += 1
    assert all((each == 1).all() for each in written.values())


@st.composite
def mappings(draw: st.DrawFn) -> CanonicalMapping:
    """Attention in any layout and sharding, latents with extra bytes, opaque pages: all small."""
    per_chunk = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["attention", "latent", "opaque"]))
    if kind == "opaque":
        sizes = draw(st.lists(st.sampled_from([1, 6, 8, 16, 48, 5000, 8192]), min_size=1, max_size=3))
        tensors = [
            LocalTensor(block_stride=n + draw(st.integers(0, 9)), page_bytes=n, offset=draw(st.integers(0, 3)))
            for n in sizes
        ]
        return opaque_mapping(
            tensors, ShardSpec(), blocks_per_chunk=per_chunk, alignment=draw(st.sampled_from([4096, 8192]))
        )
    geometry = KVGeometry(
        num_layers=draw(st.sampled_from([1, 2])),
        num_kv_heads=2 if kind == "attention" else 1,
        head_dim=draw(st.sampled_from([1, 8, 33, 64])),
        dtype=draw(st.sampled_from(["uint8", "float16", "float32"])),
        tokens_per_block=draw(st.sampled_from([1, 3, 16])),
        kind=Kind.ATTENTION if kind == "attention" else Kind.MLA,
        extra_bytes=0 if kind == "attention" else draw(st.sampled_from([0, 4, 13])),
    )
    edges = {"padding": draw(st.sampled_from([0, 3, 16])), "offset": draw(st.sampled_from([0, 2, 32]))}
    if kind == "latent":
        layouts = [PageLayout.nhd(one, 1, **edges) for one in geometry.tensors]
        page = layouts if any(geometry.layer_extra_bytes) else layouts[0]
        return kvx1_mapping(geometry, ShardSpec(), page, blocks_per_chunk=per_chunk)
    shard = ShardSpec(tp_size=draw(st.sampled_from([1, 2])), tp_rank=0)
    page = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](geometry, len(local_heads(geometry, shard)), **edges)
    groups = draw(st.sampled_from([1, geometry.num_layers]))
    return kvx1_mapping(geometry, shard, page, blocks_per_chunk=per_chunk, layer_groups=groups)


@settings(max_examples=examples(20))
@given(mappings(), st.sampled_from([0, 1, 4, 8]))
def test_the_tables_say_what_the_runs_say(mapping: CanonicalMapping, at: int) -> None:
    addresses = [at + (tensor << 30) for tensor in range(mapping.num_tensors)]
    want = Counter(bytes_of_runs(mapping, addresses))
    assert max(want.values()) == 1
    assert Counter(bytes_of_tiles(mapping, addresses)) == want
    check_tiles(mapping, addresses)
    if (shape := shape_of(mapping)) is not None:
        assert Counter(bytes_of_planes(mapping, addresses)) == want
        grain = grain_of(mapping, addresses)
        sizes = (shape.fragment, shape.fragment_stride, shape.block_stride)
        assert not any(size % grain for size in (*sizes, *planes_of(mapping, shape, addresses).reshape(-1).tolist()))


def test_the_grain_divides_what_no_mapping_here_has_alone() -> None:
    """The makers' offsets and strides are multiples of their fragments; runs by hand need not be."""
    mapping = row_mapping(64)
    for column, value, want in (("canonical_offset", 4, 4), ("local_stride", 72, 8), ("local_offset", 2, 2)):
        runs = mapping.runs.copy()
        runs["fragment_size"], runs["num_fragments"], runs["local_stride"] = 16, 2, 32
        runs[column] = value
        other: Any = SimpleNamespace(runs=runs, tensors=mapping.tensors, canonical_block_stride=64)
        assert grain_of(other, [4096]) == want, column


def test_the_usual_mappings_have_one_shape() -> None:
    """The fast kernel is for them; opaque pages and rows have one where they are alike."""
    geometry = KVGeometry(num_layers=3, num_kv_heads=4, head_dim=8, dtype="float16", tokens_per_block=16)
    for name, layout in LAYOUTS.items():
        for per_chunk in (1, 4):
            shape = shape_of(kvx1_mapping(geometry, ShardSpec(), layout(geometry, 4), blocks_per_chunk=per_chunk))
            assert shape is not None, name
            assert (shape.planes, shape.blocks) == (6, per_chunk)
            assert (shape.fragments, shape.fragment) in ((1, 256), (16, 16))
    tensors = [LocalTensor(block_stride=80, page_bytes=64)] * 2
    assert shape_of(opaque_mapping(tensors, ShardSpec(), parts=2, blocks_per_chunk=3)) is not None
    assert shape_of(opaque_mapping(tensors, ShardSpec())) is not None
    assert shape_of(opaque_mapping(tensors, ShardSpec(), blocks_per_chunk=3)) is None  # blocks are outermost there
    assert shape_of(row_mapping(2 * ROW_SEGMENT_BYTES)) is not None
    assert shape_of(row_mapping(2 * ROW_SEGMENT_BYTES + 4096)) is None
    unlike = [tensors[0], LocalTensor(block_stride=96, page_bytes=64)]
    assert shape_of(opaque_mapping(unlike, ShardSpec(), parts=2)) is None


def test_places_are_the_ranks_own() -> None:
    geometry = KVGeometry(num_layers=1, num_kv_heads=4, head_dim=90, dtype="uint8", tokens_per_block=64)
    mapping = kvx1_mapping(geometry, ShardSpec(tp_size=2, tp_rank=1), PageLayout.nhd(geometry, 2))
    assert places_of(mapping).tolist() == [[2 * 12288, 2, 11520, 12288], [3 * 12288, 3, 11520, 12288]]
    assert places_of(row_mapping(ROW_SEGMENT_BYTES + 5)).tolist() == [
        [0, 0, ROW_SEGMENT_BYTES, ROW_SEGMENT_BYTES],
        [ROW_SEGMENT_BYTES, 1, 5, 4096],
    ]
