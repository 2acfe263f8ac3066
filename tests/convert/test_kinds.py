"""Latents with an indexer's keys, and opaque pages: every converter against what slicing gives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.checksum import segment_checksum
from kvxfer.convert.pages import KVPages
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping, kvx1_mappings
from kvxfer.mapping import CanonicalMapping, LocalTensor
from kvxfer.opaque import opaque_mappings
from tests.convert.common import CONVERTERS, NUM_BLOCKS, assert_same, block_ids, buffers, with_kernels
from tests.oracle import POISON

Bytes = NDArray[np.uint8]


def random_pages(sizes: Sequence[int], seed: int = 0) -> list[Bytes]:
    """A tensor's pages [blocks, bytes] for each size."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size=(NUM_BLOCKS, size), dtype=np.uint8) for size in sizes]


def memory_of(pages: Bytes, stride: int, offset: int, only: Sequence[int] | None = None) -> Bytes:
    """The memory of a tensor with these pages, all else POISON."""
    memory = np.full(offset + NUM_BLOCKS * stride, POISON, dtype=np.uint8)
    for block in range(NUM_BLOCKS) if only is None else only:
        start = offset + block * stride
        memory[start : start + pages.shape[1]] = pages[block]
    return memory


def segments_of(tensors: Sequence[Bytes], ids: Sequence[int], parts: int) -> list[Bytes]:
    """`parts` segments of as many tensors each: for each block in turn the pages of all of them, zeros where absent."""
    share = len(tensors) // parts
    out = []
    for first in range(0, len(tensors), share):
        pages = [
            tensor[block] if block >= 0 else np.zeros_like(tensor[0])
            for block in ids
            for tensor in tensors[first : first + share]
        ]
        out.append(np.concatenate(pages))
    return out


def check(
    converter: Any,
    mapping: CanonicalMapping,
    tensors: Sequence[Bytes],
    segments: Sequence[int],
    ids: NDArray[np.int64],
    want: Sequence[Sequence[Bytes]],
) -> None:
    """A rank gathers `want` [chunk][segment] into `segments` and nothing else, and scatters it back."""
    assert list(mapping.segments) == list(segments)
    places = [(local.block_stride, local.offset) for local in mapping.tensors]
    pages = KVPages(mapping, [memory_of(t, *place) for t, place in zip(tensors, places, strict=True)], NUM_BLOCKS)
    found, sums = buffers(pages, len(ids))
    expected, expected_sums = buffers(pages, len(ids))
    stride = mapping.slot.segment_stride
    for chunk, parts in enumerate(want):
        for segment, part in zip(segments, parts, strict=True):
            expected[chunk, segment * stride : (segment + 1) * stride] = 0
            expected[chunk, segment * stride : segment * stride + part.size] = part
            expected_sums[chunk, segment] = segment_checksum(part)
    converter.gather(pages, ids, mapping, found, sums)
    assert_same(found, expected, "gathered")
    assert_same(sums, expected_sums, "sums")
    empty = [memory_of(t, *place, only=[]) for t, place in zip(tensors, places, strict=True)]
    converter.scatter(expected, ids, mapping, KVPages(mapping, empty, NUM_BLOCKS))
    present = ids[ids >= 0].tolist()
    for number, (got, tensor, place) in enumerate(zip(empty, tensors, places, strict=True)):
        assert_same(got, memory_of(tensor, *place, only=present), f"tensor {number}")


# ---- latents with extra bytes


def indexed(extra: int | tuple[int, ...], layers: int = 4, tokens: int = 3, elements: int = 9) -> KVGeometry:
    return KVGeometry(
        num_layers=layers,
        num_kv_heads=1,
        head_dim=elements,
        dtype="float16",
        tokens_per_block=tokens,
        kind=Kind.MLA,
        extra_bytes=extra,
    )


def layouts_of(geometry: KVGeometry) -> list[PageLayout]:
    """Every tensor with another padding and offset."""
    return [PageLayout.nhd(one, 1, padding=4 * n, offset=3 * n) for n, one in enumerate(geometry.tensors)]


@pytest.mark.parametrize(
    ("converter", "extra", "per_chunk", "tp_sizes"),
    with_kernels(
        ((0, 0, 0, 132), 2, (1,)),
        ((0, 4, 1, 3), 1, (1,)),
        every=product([132, (6, 0, 6, 0), (0, 4, 1, 3), (0, 0, 0, 7)], [1, 2, 4], [(1, 4)]),
    ),
    indirect=["converter"],
)
def test_latents_and_extra_bytes_of_a_block_lie_together(
    converter: Any, extra: int | tuple[int, ...], per_chunk: int, tp_sizes: tuple[int, ...]
) -> None:
    geometry = indexed(extra)
    layouts = layouts_of(geometry)
    tensors = random_pages([page.page_bytes for page in layouts])
    ids = block_ids(per_chunk)
    want = [segments_of(tensors, row, 1) for row in ids.tolist()]
    for tp_size in tp_sizes:
        for mapping in kvx1_mappings(geometry, tp_size, layouts, blocks_per_chunk=per_chunk):
            check(converter, mapping, tensors, [0], ids, want)
            assert mapping.num_writers == tp_size


@pytest.mark.parametrize(
    ("converter", "extra", "groups", "stages"),
    with_kernels((5, 2, (2, 2)), every=[(5, 2, (2, 2)), (5, 4, (1, 3)), ((0, 6, 6, 0), 2, (2, 2))]),
    indirect=["converter"],
)
def test_stages_of_latents_with_extra_bytes(
    converter: Any, extra: int | tuple[int, ...], groups: int, stages: tuple[int, ...]
) -> None:
    geometry = indexed(extra)
    layouts = layouts_of(geometry)
    tensors = random_pages([page.page_bytes for page in layouts])
    ids = block_ids(2)
    counts = [2 if size else 1 for size in geometry.layer_extra_bytes]
    first_tensor = [0, *accumulate(counts)]
    mappings = kvx1_mappings(
        geometry, 1, layouts, pp_size=2, blocks_per_chunk=2, layer_groups=groups, stage_layers=stages
    )
    share = 4 // groups
    for stage, mapping in enumerate(mappings):
        layers = range(4)[: stages[0]] if stage == 0 else range(4)[stages[0] :]
        mine = tensors[first_tensor[layers.start] : first_tensor[layers.stop]]
        segments = range(layers.start // share, layers.stop // share)
        want = [
            [segments_of(tensors[first_tensor[g * share] : first_tensor[(g + 1) * share]], row, 1)[0] for g in segments]
            for row in ids.tolist()
        ]
        check(converter, mapping, mine, segments, ids, want)


# ---- opaque pages


EVERY_RANK = range(8)
OPAQUE = [((4096,), 1), ((40, 24), 1), ((40, 24, 7), 1), ((40, 24, 24, 40), 2), ((13, 13, 13), 3)]


@pytest.mark.parametrize(
    ("converter", "sizes", "parts", "per_chunk", "ranks"),
    with_kernels(
        ((4096,), 1, 2, [6]),
        ((40, 24, 24, 40), 2, 2, [5]),
        ((13, 13, 13), 3, 1, [1]),
        ((5000, 40), 1, 1, [7]),
        every=((*case, per_chunk, EVERY_RANK) for case, per_chunk in product(OPAQUE, (1, 2, 4))),
    ),
    indirect=["converter"],
)
def test_opaque_pages_are_moved_whole(
    converter: Any, sizes: tuple[int, ...], parts: int, per_chunk: int, ranks: Sequence[int]
) -> None:
    places = ShardSpec(tp_size=2, pp_size=2, pcp_size=2)
    layouts = [PageLayout.whole(size, padding=4 * n, offset=5 * n) for n, size in enumerate(sizes)]
    tensors_of = [[page.tensor for page in layouts]] * 8
    ids = block_ids(per_chunk)
    mappings = opaque_mappings(tensors_of, places, blocks_per_chunk=per_chunk, parts=parts)
    for rank, mapping in [(rank, mappings[rank]) for rank in ranks]:
        tensors = random_pages(sizes, seed=rank)
        want = [segments_of(tensors, row, parts) for row in ids.tolist()]
        check(converter, mapping, tensors, range(rank * parts, (rank + 1) * parts), ids, want)


@settings(max_examples=40)
@given(st.data())
def test_native_is_the_oracle_for_any_sizes(data: st.DataObject) -> None:
    """Both kinds, sizes that nobody thought of."""
    per_chunk = data.draw(st.sampled_from([1, 2, 4]))
    ids = block_ids(per_chunk)
    if data.draw(st.booleans()):
        sizes = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=4))
        tensors = random_pages(sizes)
        (mapping,) = opaque_mappings(
            [[LocalTensor(block_stride=n + 3, page_bytes=n, offset=1) for n in sizes]],
            ShardSpec(),
            blocks_per_chunk=per_chunk,
        )
    else:
        extra = tuple(data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=4).filter(any)))
        geometry = indexed(extra, len(extra), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 80)))
        layouts = layouts_of(geometry)
        tensors = random_pages([page.page_bytes for page in layouts])
        mapping = kvx1_mapping(geometry, ShardSpec(), layouts, blocks_per_chunk=per_chunk)
    want = [segments_of(tensors, row, 1) for row in ids.tolist()]
    for converter in CONVERTERS.values():
        check(converter, mapping, tensors, [0], ids, want)
