from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from kvxfer.errors import LayoutError
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.keys import Namespace
from kvxfer.layout import PageLayout
from kvxfer.mapping import LocalTensor, verify_tiling
from kvxfer.opaque import opaque_mapping, opaque_mappings, opaque_namespace

TENSORS = [PageLayout.whole(size, padding=16, offset=n).tensor for n, size in enumerate((40, 24, 24, 40))]
SIZES = ShardSpec(tp_size=2, pp_size=2, pcp_size=2, dcp_size=2, interleave=4)


def test_every_rank_has_segments_of_its_own() -> None:
    mappings = opaque_mappings([TENSORS] * 8, SIZES, blocks_per_chunk=3, parts=2)
    verify_tiling(mappings)
    for rank, mapping in enumerate(mappings):
        assert mapping.segments == (2 * rank, 2 * rank + 1)
        assert (mapping.slot.num_segments, mapping.slot.segment_bytes) == (16, 3 * 64)
        assert mapping.slot.segments_per_trailer == 1
        assert mapping.canonical_block_stride == 64
        assert mapping.runs["canonical_offset"].tolist() == [0, 40, 0, 24]
        assert mapping.runs["local_offset"].tolist() == [0, 1, 2, 3]
        assert mapping.topology == "tp2 pp2 dcp2 pcp2 interleave4"
        assert (mapping.num_writers, mapping.writer_index) == (1, 0)


def test_a_rank_alone_is_the_rank_among_all() -> None:
    together = opaque_mappings([TENSORS] * 8, SIZES, alignment=8192)
    for shard, mapping in zip(SIZES.ranks, together, strict=True):
        alone = opaque_mapping(TENSORS, shard, alignment=8192)
        assert (alone.segments, alone.slot, alone.topology) == (mapping.segments, mapping.slot, mapping.topology)
        assert alone.runs.tolist() == mapping.runs.tolist()


@pytest.mark.parametrize(
    ("tensors", "parts", "message"),
    [
        ([], 1, "parts=1 must divide the 0 tensors"),
        (TENSORS, 0, "parts=0 must divide the 4 tensors"),
        (TENSORS, 3, "parts=3 must divide the 4 tensors"),
        (TENSORS, 4, r"parts=4 makes parts of \[24, 40\] bytes"),
        ([replace(TENSORS[0], block_stride=39)], 1, "page_bytes of tensor 0 exceeds its block_stride"),
    ],
)
def test_tensors_that_make_no_equal_segments_are_refused(tensors: list[LocalTensor], parts: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        opaque_mapping(tensors, ShardSpec(), parts=parts)


def test_ranks_that_differ_are_refused() -> None:
    with pytest.raises(LayoutError, match="1 ranks' tensors were given for 2 ranks"):
        opaque_mappings([TENSORS], ShardSpec(tp_size=2))
    with pytest.raises(LayoutError, match="rank 1: its slot layout"):
        opaque_mappings([TENSORS, TENSORS[:3]], ShardSpec(tp_size=2))


def test_the_namespace_names_the_topology() -> None:
    geometry = KVGeometry.opaque((40, 24), tokens_per_block=16)
    named = opaque_namespace(geometry, SIZES, model="m", weights_fingerprint="w", blocks_per_chunk=3, parts=2)
    assert named == Namespace(
        model="m",
        weights_fingerprint="w",
        dtype="uint8",
        canonical_form="opaque",
        geometry=[asdict(geometry)],
        blocks_per_chunk=3,
        tokens_per_chunk=48,
        layer_groups=2,
        topology="tp2 pp2 dcp2 pcp2 interleave4",
    )
    plain = opaque_namespace(geometry, ShardSpec(), model="m", weights_fingerprint="w", extra={"layout": "nhd"})
    assert (plain.blocks_per_chunk, plain.layer_groups, plain.extra) == (1, 1, {"layout": "nhd"})
