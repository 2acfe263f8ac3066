"""Which byte of a rank's pages is which byte of a slot: the only code that reasons about parallelism.

    a page layout (declared strides) + a geometry + a rank's place  ->  CanonicalMapping: runs

Everything after this module sees runs and asks no more who holds what. Nothing is inferred from a tensor's shape, and a
mapping is handed out only when it was proved to tile: see `mapping.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import LayoutError
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.mapping import (
    MAX_BYTES,
    RUN_DTYPE,
    CanonicalMapping,
    CopyRun,
    LocalTensor,
    verify_mapping,
    verify_tiling,
    verify_writers,
)
from kvxfer.slot import ALIGNMENT, ROW_SEGMENT_BYTES, TRAILER_SUMS, SlotLayout

__all__ = [
    "LAYOUTS",
    "RUN_DTYPE",
    "CanonicalMapping",
    "CopyRun",
    "LocalTensor",
    "PageLayout",
    "kvx1_mapping",
    "kvx1_mappings",
    "kvx1_slot",
    "local_heads",
    "local_layers",
    "row_mapping",
    "verify_mapping",
    "verify_tiling",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Where one layer's K and V of a block are on one rank, as byte strides that the owner of the pages declares.

    Byte b of token t, head h, plane p (K or V) of block i is at
    `offset + i * block_stride + p * kv_stride + h * head_stride + t * token_stride + b` of the tensor. Every byte of
    [offset, offset + page_bytes) must belong to exactly one of them. Heads count from the rank's first one.

    Raises:
        LayoutError: a stride is not positive, or the page does not fit its block.
    """

    name: str  # for messages
    block_stride: int  # padding after the page included
    kv_stride: int | None  # None: K and V are two tensors, K first. Without meaning for MLA
    head_stride: int
    token_stride: int
    dim_stride: int  # must be the itemsize: elements of a head lie side by side
    page_bytes: int  # what a block uses of its stride (of one tensor)
    offset: int = 0  # where block 0 starts, from the address that the tensor gives as its first element

    def __post_init__(self) -> None:
        for field in ("block_stride", "head_stride", "token_stride", "dim_stride", "page_bytes"):
            if not 0 < getattr(self, field) < MAX_BYTES:
                raise LayoutError(f"{field}={getattr(self, field)} of layout {self.name!r} must be positive")
        if not 0 <= self.offset < MAX_BYTES or not 0 <= (self.kv_stride or 0) < MAX_BYTES:
            raise LayoutError(
                f"offset={self.offset} and kv_stride={self.kv_stride} of layout {self.name!r} must not be negative"
            )
        if self.page_bytes > self.block_stride:
            raise LayoutError(
                f"page_bytes={self.page_bytes} of layout {self.name!r} exceeds block_stride={self.block_stride}: "
                "blocks would overlap (where K and V are in two halves of one tensor, pass the halves as two tensors)"
            )

    @classmethod
    def nhd(cls, geometry: KVGeometry, local_heads: int, *, padding: int = 0, offset: int = 0) -> PageLayout:
        """Pages of [K | V][token][head][dim]."""
        return cls._dense("nhd", ("kv", "token", "head"), geometry, local_heads, padding, offset)

    @classmethod
    def hnd(cls, geometry: KVGeometry, local_heads: int, *, padding: int = 0, offset: int = 0) -> PageLayout:
        """Pages of [K | V][head][token][dim]."""
        return cls._dense("hnd", ("kv", "head", "token"), geometry, local_heads, padding, offset)

    @classmethod
    def packed(cls, geometry: KVGeometry, local_heads: int, *, padding: int = 0, offset: int = 0) -> PageLayout:
        """Pages of [head][token][K dims, V dims]: the shape of vLLM's pages on CPUs.

        (Its kernels there put all keys of a head before its values, so of these pages only whole heads may be moved.)
        """
        return cls._dense("packed", ("head", "token", "kv"), geometry, local_heads, padding, offset)

    @classmethod
    def packed_nhd(cls, geometry: KVGeometry, local_heads: int, *, padding: int = 0, offset: int = 0) -> PageLayout:
        """Pages of [token][head][K dims, V dims]."""
        return cls._dense("packed-nhd", ("token", "head", "kv"), geometry, local_heads, padding, offset)

    @classmethod
    def split(cls, geometry: KVGeometry, local_heads: int, *, padding: int = 0, offset: int = 0) -> PageLayout:
        """Two tensors a layer, K and V, each with pages of [token][head][dim]."""
        return cls._dense("split", ("token", "head"), geometry, local_heads, padding, offset)

    @classmethod
    def split_hnd(cls, geometry: KVGeometry, local_heads: int, *, padding: int = 0, offset: int = 0) -> PageLayout:
        """Two tensors a layer, K and V, each with pages of [head][token][dim]."""
        return cls._dense("split-hnd", ("head", "token"), geometry, local_heads, padding, offset)

    @classmethod
    def whole(cls, page_bytes: int, *, padding: int = 0, offset: int = 0) -> PageLayout:
        """Pages without a declared order: opaque ones, that are moved whole."""
        return cls(
            name="whole",
            block_stride=page_bytes + padding,
            kv_stride=0,
            head_stride=page_bytes,
            token_stride=page_bytes,
            dim_stride=1,
            page_bytes=page_bytes,
            offset=offset,
        )

    @property
    def tensor(self) -> LocalTensor:
        """One tensor of such pages."""
        return LocalTensor(block_stride=self.block_stride, page_bytes=self.page_bytes, offset=self.offset)

    @classmethod
    def _dense(
        cls, name: str, axes: tuple[str, ...], geometry: KVGeometry, local_heads: int, padding: int, offset: int
    ) -> PageLayout:
        """Pages without holes, `axes` from the outermost in."""
        if local_heads < 1 or padding < 0:
            raise LayoutError(f"local_heads={local_heads} must be at least 1 and padding={padding} at least 0")
        sizes = {"kv": geometry.planes, "token": geometry.tokens_per_block, "head": local_heads}
        strides = {}
        extent = geometry.head_bytes
        for axis in reversed(axes):
            strides[axis] = extent
            extent *= sizes[axis]
        return cls(
            name=name,
            block_stride=extent + padding,
            kv_stride=strides.get("kv"),
            head_stride=strides["head"],
            token_stride=strides["token"],
            dim_stride=geometry.itemsize,
            page_bytes=extent,
            offset=offset,
        )


# Layouts by the name a command line takes; each is called as (geometry, local_heads, *, padding=0, offset=0).
LAYOUTS: Mapping[str, Callable[..., PageLayout]] = MappingProxyType(
    {
        "nhd": PageLayout.nhd,
        "hnd": PageLayout.hnd,
        "packed": PageLayout.packed,
        "packed-nhd": PageLayout.packed_nhd,
        "split": PageLayout.split,
        "split-hnd": PageLayout.split_hnd,
    }
)


def local_heads(geometry: KVGeometry, shard: ShardSpec) -> range:
    """The KV heads of the model that a rank holds; where there are more ranks than heads, several hold the same one.

    Raises:
        LayoutError: the heads and the tensor-parallel ranks do not divide.
    """
    heads, tp = geometry.num_kv_heads, shard.tp_size
    if tp <= heads and heads % tp == 0:
        share = heads // tp
        return range(shard.tp_rank * share, (shard.tp_rank + 1) * share)
    if tp > heads and tp % heads == 0:
        head = shard.tp_rank // (tp // heads)
        return range(head, head + 1)
    raise LayoutError(
        f"tp_size={tp} and num_kv_heads={heads}: one must be a multiple of the other, "
        "or ranks would hold parts of heads"
    )


def local_layers(
    geometry: KVGeometry, shard: ShardSpec, layer_groups: int = 1, stage_layers: Sequence[int] | None = None
) -> range:
    """The layers of a rank's pipeline stage: whole layer groups.

    Args:
        layer_groups: equal parts that the model's layers are cut into.
        stage_layers: how many layers each stage has; None: as many as any other.

    Raises:
        LayoutError: the layers do not divide into the groups, or a group would lie in two stages.
    """
    layers, stages = geometry.num_layers, shard.pp_size
    if layer_groups < 1 or layers % layer_groups:
        raise LayoutError(f"layer_groups={layer_groups} must divide num_layers={layers}: groups have equal sizes")
    if stage_layers is None:
        if layer_groups % stages:
            raise LayoutError(
                f"layer_groups={layer_groups} must be a multiple of pp_size={stages}: a group must lie within one "
                "stage (where stages are unequal, say so with stage_layers)"
            )
        stage_layers = (layers // stages,) * stages
    share = layers // layer_groups
    if len(stage_layers) != stages or sum(stage_layers) != layers or any(n < 1 or n % share for n in stage_layers):
        raise LayoutError(
            f"stage_layers={tuple(stage_layers)} must be {stages} multiples of the {share} layers of a group (of "
            f"{layer_groups} layer_groups), together num_layers={layers}: a group must lie within one stage"
        )
    start = sum(stage_layers[: shard.pp_rank])
    return range(start, start + stage_layers[shard.pp_rank])


def kvx1_slot(
    geometry: KVGeometry, *, blocks_per_chunk: int = 1, layer_groups: int = 1, alignment: int = ALIGNMENT
) -> SlotLayout:
    """The slot of a chunk in the `kvx1` form (docs/format.md): the same for every sharding and page layout.

    Raises:
        LayoutError: `layer_groups` does not divide the layers, or the format has no such slot.
    """
    if geometry.kind is Kind.OPAQUE:
        raise LayoutError("opaque pages have no heads and tokens to put in order: take opaque_mapping")
    share = len(local_layers(geometry, ShardSpec(), layer_groups)) // layer_groups
    extra = geometry.layer_extra_bytes
    extras = {sum(extra[first : first + share]) for first in range(0, geometry.num_layers, share)}
    if len(extras) > 1:
        raise LayoutError(
            f"layer_groups={layer_groups} makes groups whose extra_bytes add up to {sorted(extras)}: segments have "
            "equal sizes"
        )
    tokens = blocks_per_chunk * geometry.tokens_per_block
    segment = tokens * (share * geometry.planes * geometry.head_bytes + extras.pop())
    return SlotLayout(
        segment_bytes=segment,
        last_segment_bytes=segment,
        num_segments=layer_groups * geometry.num_kv_heads,
        segments_per_trailer=1,
        blocks_per_chunk=blocks_per_chunk,
        alignment=alignment,
    )


def kvx1_mapping(
    geometry: KVGeometry,
    shard: ShardSpec,
    page_layout: PageLayout | Sequence[PageLayout],
    *,
    blocks_per_chunk: int = 1,
    layer_groups: int = 1,
    stage_layers: Sequence[int] | None = None,
    alignment: int = ALIGNMENT,
) -> CanonicalMapping:
    """A rank's part of a `kvx1` slot, proved to cover its pages and its segments exactly once.

    The rank's tensors are those of its own layers in order: one a layer, or K then V where `page_layout` splits them,
    or the latent and then the extra bytes.

    Args:
        page_layout: of every tensor; a sequence with one for each tensor where the geometry has extra bytes.
        stage_layers: layers of each pipeline stage; None: equal.

    Raises:
        LayoutError: the sharding cannot be cut into whole heads and layer groups, or the page layout does not fit.
    """
    if shard.dcp_size > 1 or shard.pcp_size > 1:
        raise LayoutError(
            f"dcp_size={shard.dcp_size}, pcp_size={shard.pcp_size}: context parallelism spreads the tokens of a block "
            "over ranks, which kvx1 mappings do not describe yet; both must be 1"
        )
    slot = kvx1_slot(geometry, blocks_per_chunk=blocks_per_chunk, layer_groups=layer_groups, alignment=alignment)
    layers = local_layers(geometry, shard, layer_groups, stage_layers)
    share = geometry.num_layers // layer_groups
    if any(geometry.layer_extra_bytes):
        runs, tensors, block_stride = _runs_with_extra(geometry, page_layout, layers, share)
    elif isinstance(page_layout, PageLayout):
        _check_elements(geometry, page_layout)
        runs = _kvx1_runs(geometry, page_layout, local_heads(geometry, shard), layers, share, slot)
        tensors = (page_layout.tensor,) * (len(layers) * (geometry.planes if page_layout.kv_stride is None else 1))
        block_stride = geometry.tokens_per_block * geometry.head_bytes
    else:
        raise LayoutError(
            "a page layout for each tensor is for geometries with extra_bytes: this one needs one for all"
        )
    replicas = max(1, shard.tp_size // geometry.num_kv_heads)
    mapping = CanonicalMapping(
        slot=slot,
        runs=runs,
        segments=tuple(np.unique(runs["segment"]).tolist()),
        canonical_block_stride=block_stride,
        tensors=tensors,
        num_writers=replicas,
        writer_index=shard.tp_rank % replicas,
    )
    verify_mapping(mapping)
    return mapping


def _check_elements(geometry: KVGeometry, page: PageLayout) -> None:
    if page.dim_stride != geometry.itemsize:
        raise LayoutError(
            f"dim_stride={page.dim_stride} of layout {page.name!r} is not the itemsize {geometry.itemsize} of "
            f"{geometry.dtype}: elements of a head must lie side by side"
        )


def _kvx1_runs(
    geometry: KVGeometry, page: PageLayout, heads: range, layers: range, group_layers: int, slot: SlotLayout
) -> NDArray[np.void]:
    """One run for each (layer group, head, layer of the group, plane), in that order: the order of canonical bytes."""
    tokens, head_bytes, planes = geometry.tokens_per_block, geometry.head_bytes, geometry.planes
    shape = (len(layers) // group_layers, len(heads), group_layers, planes)
    group, head, layer, plane = (axis.reshape(-1).astype(np.uint64) for axis in np.indices(shape, dtype=np.int64))
    runs = np.zeros(group.size, dtype=RUN_DTYPE)
    local_layer = group * group_layers + layer
    runs["segment"] = (group + layers.start // group_layers) * geometry.num_kv_heads + head + heads.start
    runs["canonical_offset"] = (layer * planes + plane) * (slot.blocks_per_chunk * tokens * head_bytes)
    runs["local_offset"] = page.offset + head * page.head_stride
    if page.kv_stride is None:
        runs["tensor"] = local_layer * planes + plane
    else:
        runs["tensor"] = local_layer
        runs["local_offset"] += plane * page.kv_stride
    if page.token_stride == head_bytes or tokens == 1:  # a head's tokens lie side by side: one piece
        runs["fragment_size"] = runs["local_stride"] = tokens * head_bytes
        runs["num_fragments"] = 1
    else:
        runs["fragment_size"], runs["num_fragments"], runs["local_stride"] = head_bytes, tokens, page.token_stride
    return runs


def _runs_with_extra(
    geometry: KVGeometry, pages: PageLayout | Sequence[PageLayout], layers: range, group_layers: int
) -> tuple[NDArray[np.void], tuple[LocalTensor, ...], int]:
    """Runs, tensors, and bytes of a block in a segment, of layers that keep extra bytes beside their latent.

    Planes of different sizes have no common stride between blocks, so here the blocks are the outermost axis.
    """
    count = sum(1 + (geometry.layer_extra_bytes[layer] > 0) for layer in layers)
    if isinstance(pages, PageLayout) or len(pages) != count:
        raise LayoutError(
            f"layers with extra_bytes need a page layout for each of these {count} tensors: latents and extra bytes "
            "differ in size"
        )
    runs: list[tuple[int, ...]] = []
    tokens, offset = geometry.tokens_per_block, 0
    for layer in layers:
        if layer % group_layers == 0:
            offset = 0
        for tensor in _layer(geometry, layer).tensors:
            page = pages[len(runs)]
            _check_elements(tensor, page)
            size, count, stride = tensor.head_bytes, tokens, page.token_stride
            if stride == size:  # tokens lie side by side: one piece
                size, count, stride = size * tokens, 1, size * tokens
            runs.append((len(runs), layer // group_layers, page.offset, offset, size, count, stride))
            offset += tokens * tensor.head_bytes
    return np.array(runs, dtype=RUN_DTYPE), tuple(page.tensor for page in pages), offset


def _layer(geometry: KVGeometry, layer: int) -> KVGeometry:
    return replace(geometry, num_layers=1, extra_bytes=geometry.layer_extra_bytes[layer])


def kvx1_mappings(
    geometry: KVGeometry,
    tp_size: int,
    page_layout: PageLayout | Sequence[PageLayout],
    *,
    pp_size: int = 1,
    blocks_per_chunk: int = 1,
    layer_groups: int = 1,
    stage_layers: Sequence[int] | None = None,
    alignment: int = ALIGNMENT,
) -> tuple[CanonicalMapping, ...]:
    """The mappings of all ranks, pipeline stage by stage, proved to tile the slot together.

    `page_layout` as a sequence names the tensors of all layers; each rank takes those of its own.

    Raises:
        LayoutError: as `kvx1_mapping`.
    """
    mappings = tuple(
        kvx1_mapping(
            geometry,
            shard,
            page_layout if isinstance(page_layout, PageLayout) else _of_layers(geometry, page_layout, layers),
            blocks_per_chunk=blocks_per_chunk,
            layer_groups=layer_groups,
            stage_layers=stage_layers,
            alignment=alignment,
        )
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
        for shard in [ShardSpec(tp_size=tp_size, tp_rank=tp_rank, pp_size=pp_size, pp_rank=pp_rank)]
        for layers in [local_layers(geometry, shard, layer_groups, stage_layers)]
    )
    verify_writers(mappings)
    return mappings


def _of_layers(geometry: KVGeometry, pages: Sequence[PageLayout], layers: range) -> Sequence[PageLayout]:
    """Of page layouts of all tensors those of `layers`."""
    ends = np.cumsum([0, *(1 + (extra > 0) for extra in geometry.layer_extra_bytes)])
    return pages[ends[layers.start] : ends[layers.stop]]


def row_mapping(row_bytes: int, *, row_stride: int | None = None, alignment: int = ALIGNMENT) -> CanonicalMapping:
    """Host rows stored as they are: one tensor, one writer, a row a chunk, cut into segments of 256 KiB.

    Args:
        row_bytes: bytes of a row.
        row_stride: bytes from one row to the next; None: rows are adjacent.
        alignment: of the root.

    Raises:
        LayoutError: rows without bytes, or that overlap.
    """
    row_bytes = index(row_bytes)
    stride = row_bytes if row_stride is None else index(row_stride)
    if not 0 < row_bytes <= stride < MAX_BYTES:
        raise LayoutError(f"row_bytes={row_bytes} and row_stride={stride}: want 0 < row_bytes <= row_stride")
    count = -(-row_bytes // ROW_SEGMENT_BYTES)
    slot = SlotLayout(
        segment_bytes=min(row_bytes, ROW_SEGMENT_BYTES),
        last_segment_bytes=row_bytes - (count - 1) * ROW_SEGMENT_BYTES,
        num_segments=count,
        segments_per_trailer=TRAILER_SUMS,
        alignment=alignment,
    )
    runs = np.zeros(count, dtype=RUN_DTYPE)
    runs["segment"] = np.arange(count)
    runs["local_offset"] = np.arange(count, dtype=np.uint64) * ROW_SEGMENT_BYTES
    runs["fragment_size"] = slot.segment_bytes
    runs["fragment_size"][-1] = slot.last_segment_bytes
    runs["local_stride"] = runs["fragment_size"]
    runs["num_fragments"] = 1
    mapping = CanonicalMapping(
        slot=slot,
        runs=runs,
        segments=tuple(range(count)),
        canonical_block_stride=slot.segment_bytes,
        tensors=(LocalTensor(block_stride=stride, page_bytes=row_bytes),),
    )
    verify_mapping(mapping)
    return mapping
