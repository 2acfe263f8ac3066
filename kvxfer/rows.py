"""vLLM's canonical host rows (`vllm-v1`): which byte of a rank's page is which byte of a row that all ranks share.

A row is a chunk in host memory. It holds, for each tensor in turn, that tensor's canonical pages of the chunk's
blocks, side by side; a canonical page is the page that a single rank would have: all heads, and the tokens of all
context-parallel ranks. A rank covers only parts of it, and of the ranks that hold the same parts one writes: they take
turns, page by page. (In a store a row is one writer's: see `layout.row_mapping`.)

The bytes are those of vLLM 0.32, which knows four orders of a page. Where it certifies nothing it moves the page
whole, to a place that is the rank's alone; here that has to be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import LayoutError
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, local_heads
from kvxfer.mapping import CopyRun, LocalTensor, unroll, verify_cover

__all__ = ["PageMapping", "RowCell", "RowMapping", "RowPage", "row_pages", "verify_rows", "vllm_v1_mapping",
           "vllm_v1_mappings"]  # fmt: skip

# The orders of a page, in the sequence in which vLLM tries them: [token][head][K, V], [head][token][K, V],
# [K, V][token][head], [K, V][head][token].
_ORDERS: tuple[Callable[..., PageLayout], ...] = (
    PageLayout.packed_nhd,
    PageLayout.packed,
    PageLayout.nhd,
    PageLayout.hnd,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMapping:
    """One tensor's page on one rank, and which bytes of the canonical page it has: vLLM's CanonicalPageMapping.

    Sizes and offsets in bytes, from the start of either page.
    """

    canonical_bytes: int
    local_bytes: int
    runs: tuple[CopyRun, ...]  # ascending in the local page, which they cover once
    num_writers: int = 1  # ranks that hold these same bytes
    writer_index: int = 0  # this rank's place among them
    portable: bool = True  # the canonical page is the same under any sharding with as many tokens in it

    def is_writer(self, page: int) -> bool:
        """Whether this rank, of those that hold the same bytes, writes the canonical page of this number.

        Pages are counted through all rows: row number * blocks_per_chunk + block of the chunk.
        """
        return page % self.num_writers == self.writer_index


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPage:
    """One tensor whose pages a row holds.

    Raises:
        LayoutError: the geometry is of several tensors (see `row_pages`).
    """

    geometry: KVGeometry  # of one layer and tensor; tokens_per_block are those of a rank's page
    layout: PageLayout
    cell_bytes: int = 0  # a block's room in the row, where layers of other groups use this tensor for larger pages

    def __post_init__(self) -> None:
        if self.geometry.num_layers != 1 or len(self.geometry.tensors) != 1:
            raise LayoutError("a RowPage is of one layer and tensor: row_pages makes them of a whole geometry")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCell:
    """Where a row has a tensor's canonical pages: block i of the chunk at `offset + i * block_stride`."""

    tensor: LocalTensor
    offset: int
    block_stride: int
    page: PageMapping


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class RowMapping:
    """One rank's part of a row. Immutable, compared by identity. Take it from `vllm_v1_mapping`, which proves it."""

    cells: tuple[RowCell, ...]  # of this rank's tensors, in order
    blocks_per_chunk: int
    row_bytes: int  # to the end of the last cell; rows may lie further apart
    topology: str | None  # None where every page is portable; else the namespace must name it

    @property
    def tensors(self) -> tuple[LocalTensor, ...]:
        """This rank's."""
        return tuple(cell.tensor for cell in self.cells)


def row_pages(geometry: KVGeometry, layout: PageLayout | Sequence[PageLayout]) -> tuple[RowPage, ...]:
    """The pages of all layers of a geometry, in order; `layout` is of every tensor, or has one for each.

    Raises:
        LayoutError: not as many layouts as tensors.
    """
    tensors = geometry.tensors
    layouts = (layout,) * len(tensors) if isinstance(layout, PageLayout) else tuple(layout)
    if len(layouts) != len(tensors):
        raise LayoutError(f"{len(layouts)} page layouts were given for the {len(tensors)} tensors of the geometry")
    return tuple(RowPage(geometry=one, layout=page) for one, page in zip(tensors, layouts, strict=True))


def vllm_v1_mapping(
    pages: Sequence[RowPage | int], shard: ShardSpec, *, blocks_per_chunk: int = 1, opaque: bool = False
) -> RowMapping:
    """A rank's part of vLLM's canonical row, proved to tile it with all others'.

    Args:
        pages: one for each tensor in the order of the row; a number stands for a tensor of other KV-cache groups, with
            that many bytes a block in the row.
        shard: the rank's place; vLLM has canonical rows without pipeline stages only.
        opaque: pages that vLLM does not certify are moved whole to a place of the rank's own, as vLLM does; the row
            then depends on the exact topology. False: they are refused. Opaque geometries are always moved whole.

    Raises:
        LayoutError: what is not certified, and why.
    """
    if shard.dcp_rank != shard.tp_rank % shard.dcp_size:
        raise LayoutError(
            f"dcp_rank={shard.dcp_rank} must be tp_rank={shard.tp_rank} modulo dcp_size={shard.dcp_size}: "
            "decode-context groups are of neighbours"
        )
    return vllm_v1_mappings(pages, shard, blocks_per_chunk=blocks_per_chunk, opaque=opaque)[shard.rank]


def vllm_v1_mappings(
    pages: Sequence[RowPage | int], sizes: ShardSpec, *, blocks_per_chunk: int = 1, opaque: bool = False
) -> tuple[RowMapping, ...]:
    """The mappings of all ranks, in the order of `sizes.ranks`: see `vllm_v1_mapping`.

    Args:
        sizes: of all axes; which rank it is does not matter.

    Raises:
        LayoutError: as `vllm_v1_mapping`.
    """
    if sizes.pp_size > 1:
        raise LayoutError(f"pp_size={sizes.pp_size}: vLLM's canonical rows are of all layers, so its stages have none")
    if blocks_per_chunk < 1 or not any(isinstance(page, RowPage) for page in pages):
        raise LayoutError(f"blocks_per_chunk={blocks_per_chunk} must be at least 1, and a row needs a page")
    derived: dict[RowPage, list[PageMapping]] = {}
    cells: list[list[RowCell]] = [[] for _ in sizes.ranks]
    offset = 0
    for page in pages:
        if isinstance(page, int):
            if page < 1:
                raise LayoutError(f"a tensor of other groups must have bytes in the row, not {page}")
            offset += page * blocks_per_chunk
            continue
        if page not in derived:
            derived[page] = _derive(page, sizes, opaque)
        stride = page.cell_bytes or derived[page][0].canonical_bytes
        if stride < derived[page][0].canonical_bytes:
            raise LayoutError(f"cell_bytes={stride} do not hold the page's {derived[page][0].canonical_bytes} bytes")
        for mine, mapping in zip(cells, derived[page], strict=True):
            mine.append(RowCell(tensor=page.layout.tensor, offset=offset, block_stride=stride, page=mapping))
        offset += stride * blocks_per_chunk
    portable = all(mapping.portable for of_page in derived.values() for mapping in of_page)
    mappings = tuple(
        RowMapping(
            cells=tuple(mine),
            blocks_per_chunk=blocks_per_chunk,
            row_bytes=offset,
            topology=None if portable else sizes.topology,
        )
        for mine in cells
    )
    verify_rows(mappings)
    return mappings


def verify_rows(per_rank: Sequence[RowMapping]) -> None:
    """Proves that these mappings, of all ranks, cover their pages once, that whichever ranks a page elects as writers
    cover the canonical page once, and that the cells of a row do not overlap.

    Raises:
        LayoutError: what is left out or doubled.
    """
    if not per_rank:
        raise LayoutError("no rank's mapping was given")
    first = per_rank[0]
    shape = [(cell.offset, cell.block_stride) for cell in first.cells]
    for rank, mapping in enumerate(per_rank):
        if [(cell.offset, cell.block_stride) for cell in mapping.cells] != shape or (
            (mapping.blocks_per_chunk, mapping.row_bytes) != (first.blocks_per_chunk, first.row_bytes)
        ):
            raise LayoutError(f"rank {rank}: its row differs from rank 0's")
    end = 0
    for offset, stride in shape:
        if offset < end:
            raise LayoutError(f"the cell at offset {offset} of the row overlaps the one that ends at {end}")
        end = offset + stride * first.blocks_per_chunk
    if end > first.row_bytes:
        raise LayoutError(f"cells end at {end}, beyond row_bytes={first.row_bytes}")
    proved: set[tuple[int, ...]] = set()
    for number, cells in enumerate(zip(*(mapping.cells for mapping in per_rank), strict=True)):
        if (same := tuple(id(cell.page) for cell in cells)) not in proved:
            _verify_page([cell.page for cell in cells], f"tensor {number}: ")
            proved.add(same)
        if any(cell.page.canonical_bytes > cell.block_stride for cell in cells):
            raise LayoutError(f"tensor {number}: its canonical page exceeds its cell")


def _verify_page(per_rank: Sequence[PageMapping], whose: str) -> None:
    """The proof for one tensor."""
    first = per_rank[0]
    for rank, page in enumerate(per_rank):
        if (page.canonical_bytes, page.num_writers) != (first.canonical_bytes, first.num_writers):
            raise LayoutError(f"{whose}rank {rank} has another canonical page or number of writers than rank 0")
        start, size = _unrolled(page, canonical=False)
        _cover(f"{whose}page of rank {rank}, tensor", page.local_bytes, start, size)
    for turn in range(first.num_writers):
        pieces = [_unrolled(page, canonical=True) for page in per_rank if page.is_writer(turn)]
        if not pieces:
            raise LayoutError(f"{whose}no rank writes pages of number {turn} modulo {first.num_writers}")
        starts, lengths = (np.concatenate(part) for part in zip(*pieces, strict=True))
        _cover(f"{whose}canonical page {turn} modulo {first.num_writers}, part", first.canonical_bytes, starts, lengths)


def _unrolled(page: PageMapping, *, canonical: bool) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Where the fragments of a page begin, and their sizes."""
    begin, stride = ("canonical_offset", "canonical_stride") if canonical else ("local_offset", "local_stride")
    table = np.array(
        [(getattr(run, begin), getattr(run, stride), run.fragment_size, run.num_fragments) for run in page.runs],
        dtype=np.uint64,
    ).reshape(-1, 4)
    index, fragment = unroll(table[:, 3])
    return table[index, 0] + fragment * table[index, 1], table[index, 2]


def _cover(what: str, length: int, start: NDArray[np.uint64], size: NDArray[np.uint64]) -> None:
    owner = np.zeros(start.size, dtype=np.int64)
    verify_cover(what, np.array([0]), np.array([0]), np.array([length]), owner, start, size)


# ---- one page


def _derive(page: RowPage, sizes: ShardSpec, opaque: bool) -> list[PageMapping]:
    """A page's mapping on every rank: certified, or whole."""
    if page.geometry.kind is not Kind.OPAQUE:
        try:
            return [_certified(page, shard) for shard in sizes.ranks]
        except LayoutError:
            if not opaque:
                raise
    elif page.layout.page_bytes != page.geometry.block_bytes:
        raise LayoutError(
            f"page_bytes={page.layout.page_bytes} of layout {page.layout.name!r} is not the geometry's "
            f"page_bytes={page.geometry.block_bytes}"
        )
    return [_whole(page.layout.page_bytes, shard) for shard in sizes.ranks]


def _whole(page_bytes: int, shard: ShardSpec) -> PageMapping:
    """A page at a place of the rank's own."""
    run = CopyRun(
        local_offset=0,
        canonical_offset=shard.rank * page_bytes,
        fragment_size=page_bytes,
        num_fragments=1,
        local_stride=page_bytes,
        canonical_stride=page_bytes,
    )
    return PageMapping(
        canonical_bytes=shard.world_size * page_bytes, local_bytes=page_bytes, runs=(run,), portable=False
    )


def _certified(page: RowPage, shard: ShardSpec) -> PageMapping:
    """A rank's mapping of a page whose order is known.

    Raises:
        LayoutError: why vLLM does not certify it.
    """
    geometry, cp_size = page.geometry, shard.dcp_size * shard.pcp_size
    tokens = geometry.tokens_per_block
    heads = local_heads(geometry, shard)
    replicas = max(1, shard.tp_size // geometry.num_kv_heads)
    if replicas % shard.dcp_size:
        raise LayoutError(
            f"dcp_size={shard.dcp_size} does not divide the {replicas} ranks that hold the same head: decode-context "
            "ranks share out the tokens of one head"
        )
    if cp_size > 1 and tokens % shard.interleave:
        raise LayoutError(
            f"interleave={shard.interleave} does not divide the {tokens} tokens of a page: a rank's turn of tokens "
            "would lie in two blocks"
        )
    local, canonical = _orders(page, len(heads), cp_size)
    turn, within = np.divmod(np.arange(tokens, dtype=np.int64), shard.interleave)
    cp_rank = shard.pcp_rank * shard.dcp_size + shard.dcp_rank
    place = (turn * cp_size + cp_rank) * shard.interleave + within
    # [plane, head, token]: where each vector is.
    planes = np.arange(geometry.planes, dtype=np.int64)[:, None, None]
    near = planes * (local.kv_stride or 0) + np.arange(len(heads))[:, None] * local.head_stride
    near = near + np.arange(tokens) * local.token_stride
    far = planes * (canonical.kv_stride or 0) + np.array(heads)[:, None] * canonical.head_stride
    far = far + place * canonical.token_stride
    return PageMapping(
        canonical_bytes=canonical.page_bytes,
        local_bytes=local.page_bytes,
        runs=_runs(near.reshape(-1), far.reshape(-1), geometry.head_bytes),
        num_writers=replicas // shard.dcp_size,
        writer_index=shard.tp_rank % replicas // shard.dcp_size,
        portable=cp_size == 1,
    )


def _orders(page: RowPage, heads: int, cp_size: int) -> tuple[PageLayout, PageLayout]:
    """A rank's page without padding, and the canonical page in the same order.

    Raises:
        LayoutError: the strides are of no order that vLLM knows.
    """
    geometry, layout = page.geometry, page.layout
    whole = replace(geometry, tokens_per_block=geometry.tokens_per_block * cp_size)
    if geometry.planes == 2 and geometry.tokens_per_block * heads == 1:
        raise LayoutError("a page of one token and one head: its strides do not tell K and V side by side from halves")
    orders = _ORDERS if geometry.planes == 2 else (PageLayout.nhd,)
    for order in orders:
        dense = order(geometry, heads)
        if geometry.planes == 1:
            fits = layout.token_stride == dense.token_stride
        else:
            fits = (layout.kv_stride, layout.head_stride, layout.token_stride) == (
                dense.kv_stride,
                dense.head_stride,
                dense.token_stride,
            )
        if fits and layout.page_bytes == dense.page_bytes and layout.dim_stride == geometry.itemsize:
            return dense, order(whole, geometry.num_kv_heads)
    raise LayoutError(
        f"layout {layout.name!r} with kv_stride={layout.kv_stride}, head_stride={layout.head_stride}, "
        f"token_stride={layout.token_stride}, dim_stride={layout.dim_stride} and page_bytes={layout.page_bytes} is no "
        f"dense page of {geometry.tokens_per_block} tokens and {heads} heads in an order that vLLM certifies"
    )


def _runs(near: NDArray[np.int64], far: NDArray[np.int64], size: int) -> tuple[CopyRun, ...]:
    """The fewest pieces that join vectors of `size` bytes adjacent on both sides, and equally spaced ones as a run."""
    order = np.argsort(near)
    near, far = near[order], far[order]
    joined = (np.diff(near) == size) & (np.diff(far) == size)
    first = np.flatnonzero(np.append(True, ~joined))
    lengths = (np.diff(np.append(first, near.size)) * size).tolist()
    runs: list[CopyRun] = []
    for local, canonical, length in zip(near[first].tolist(), far[first].tolist(), lengths, strict=True):
        last = runs[-1] if runs else None
        if last is not None and last.fragment_size == length:
            count = last.num_fragments
            steps = (local - last.local_offset, canonical - last.canonical_offset)
            if count == 1:
                runs[-1] = replace(last, num_fragments=2, local_stride=steps[0], canonical_stride=steps[1])
                continue
            if steps == (count * last.local_stride, count * last.canonical_stride):
                runs[-1] = replace(last, num_fragments=count + 1)
                continue
        runs.append(
            CopyRun(
                local_offset=local,
                canonical_offset=canonical,
                fragment_size=length,
                num_fragments=1,
                local_stride=length,
                canonical_stride=length,
            )
        )
    return tuple(runs)
