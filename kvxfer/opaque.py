"""Pages that nobody here can look into, such as state-space layers': moved whole, under their exact topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvxfer.errors import LayoutError
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.keys import Namespace
from kvxfer.mapping import RUN_DTYPE, CanonicalMapping, LocalTensor, verify_mapping, verify_writers
from kvxfer.slot import ALIGNMENT, SlotLayout

__all__ = ["opaque_mapping", "opaque_mappings", "opaque_namespace"]


def opaque_mapping(
    tensors: Sequence[LocalTensor],
    shard: ShardSpec,
    *,
    blocks_per_chunk: int = 1,
    parts: int = 1,
    alignment: int = ALIGNMENT,
) -> CanonicalMapping:
    """A rank's pages at a place of its own in a slot (docs/format.md, `opaque`): nothing is said about their bytes.

    Every rank has `parts` segments, numbered by `shard.rank`; each holds consecutive tensors, for each block in turn
    their pages. All ranks' parts must have one size. The bytes mean something only under this very sharding: the
    namespace must name it (`CanonicalMapping.topology`).

    Args:
        tensors: this rank's, one for each page of a block; `PageLayout.tensor` makes one of declared strides.
        parts: segments of a rank, of as many tensors each: what is read and verified at a time.

    Raises:
        LayoutError: the tensors do not divide into parts of one size.
    """
    if not tensors or parts < 1 or len(tensors) % parts:
        raise LayoutError(f"parts={parts} must divide the {len(tensors)} tensors of a rank")
    share = len(tensors) // parts
    sizes = np.array([tensor.page_bytes for tensor in tensors], dtype=np.uint64).reshape(parts, share)
    totals = sorted(set(sizes.sum(axis=1).tolist()))
    if len(totals) > 1:
        raise LayoutError(f"parts={parts} makes parts of {totals} bytes a block: segments have equal sizes")
    slot = SlotLayout(
        segment_bytes=blocks_per_chunk * totals[0],
        last_segment_bytes=blocks_per_chunk * totals[0],
        num_segments=shard.world_size * parts,
        segments_per_trailer=1,
        blocks_per_chunk=blocks_per_chunk,
        alignment=alignment,
    )
    runs = np.zeros(len(tensors), dtype=RUN_DTYPE)
    runs["tensor"] = np.arange(len(tensors))
    runs["segment"] = shard.rank * parts + runs["tensor"] // share
    runs["local_offset"] = [tensor.offset for tensor in tensors]
    runs["canonical_offset"] = (np.cumsum(sizes, axis=1) - sizes).reshape(-1)
    runs["fragment_size"] = runs["local_stride"] = sizes.reshape(-1)
    runs["num_fragments"] = 1
    mapping = CanonicalMapping(
        slot=slot,
        runs=runs,
        segments=tuple(range(shard.rank * parts, (shard.rank + 1) * parts)),
        canonical_block_stride=totals[0],
        tensors=tuple(tensors),
        topology=shard.topology,
    )
    verify_mapping(mapping)
    return mapping


def opaque_mappings(
    per_rank: Sequence[Sequence[LocalTensor]],
    sizes: ShardSpec,
    *,
    blocks_per_chunk: int = 1,
    parts: int = 1,
    alignment: int = ALIGNMENT,
) -> tuple[CanonicalMapping, ...]:
    """The mappings of all ranks, in the order of `sizes.ranks`, proved to tile the slot together.

    Args:
        per_rank: each rank's tensors.
        sizes: of all axes; which rank it is does not matter.

    Raises:
        LayoutError: as `opaque_mapping`; or the ranks' pages differ in size.
    """
    if len(per_rank) != sizes.world_size:
        raise LayoutError(f"{len(per_rank)} ranks' tensors were given for {sizes.world_size} ranks")
    mappings = tuple(
        opaque_mapping(tensors, shard, blocks_per_chunk=blocks_per_chunk, parts=parts, alignment=alignment)
        for tensors, shard in zip(per_rank, sizes.ranks, strict=True)
    )
    verify_writers(mappings)
    return mappings


def opaque_namespace(
    geometry: KVGeometry,
    sizes: ShardSpec,
    *,
    model: str,
    weights_fingerprint: str,
    blocks_per_chunk: int = 1,
    parts: int = 1,
    extra: Mapping[str, Any] | None = None,
) -> Namespace:
    """The namespace of one KV-cache group whose pages are moved whole: it names the topology.

    Args:
        geometry: of any kind: its pages mean what they mean to its kernels under this sharding alone.
        sizes: of all axes; which rank it is does not matter.
        weights_fingerprint: which weights: `weights_fingerprint(path)`, a revision, a digest.
        blocks_per_chunk, parts: as given to `opaque_mapping`.
        extra: what else changes the bytes of a page, such as its layout's name; salt, tenant, adapter, ...

    Raises:
        ConfigError: a field is empty, out of bounds or not JSON-able.
    """
    return Namespace(
        model=model,
        weights_fingerprint=weights_fingerprint,
        dtype=geometry.dtype,
        canonical_form="opaque",
        geometry=[asdict(geometry)],
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_chunk=blocks_per_chunk * geometry.tokens_per_block,
        layer_groups=parts,
        topology=sizes.topology,
        extra=extra or {},
    )
