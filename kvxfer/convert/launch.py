"""The Triton converter: checks, tables and grids. The device code is kernels.py.

`gather`, `scatter` and `checksum` put one launch on torch's current stream (and a small one before it that clears the
sums, where there are any) and return at once. They allocate nothing and copy nothing from the host, so that they can be
captured into a CUDA graph; what they need is made at the first call for a (pages, mapping), or before it by `prepare`.
The caller keeps pages and buffers until the stream has passed.

Under TRITON_INTERPRET=1 the same code runs on host memory, slowly: for tests.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from kvxfer.checksum import k1_table, k2
from kvxfer.convert import kernels
from kvxfer.convert.pages import KVPages, check_block_ids, check_distinct, check_mapping
from kvxfer.convert.tables import TILE, WIDEST, Shape, grain_of, places_of, planes_of, shape_of, tiles_of
from kvxfer.errors import DeviceError, LayoutError
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping
from kvxfer.mapping import CanonicalMapping

__all__ = [
    "INTERPRETED",
    "Variant",
    "check_block_ids",
    "check_distinct",
    "checksum",
    "gather",
    "prepare",
    "scatter",
    "variants",
]

INTERPRETED = not isinstance(kernels.move_planes, triton.runtime.JITFunction)
WARPS = {16: 4, 8: 4, 4: 8, 2: 8, 1: 8}  # by vector
# Vectors of a turn: every one has its addresses in a thread's registers, and of more than four a thread some compiler
# spills. So a tile of 2-byte vectors takes two turns, one of single bytes four.
LANES = {vector: min(TILE // vector, 1024) for vector in WARPS}
# A program's first and last words cost two tiles' time: more tiles spread that, as long as enough programs are left for
# every multiprocessor to end at about the same time.
UNITS_PER_SM = 20
MOST_TILES = 16
CLEAR_SPAN = 1024

Tensor = Any  # torch.Tensor, which is not typed here


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """What a checksum needs of a mapping, on one device."""

    places: Tensor
    k1: Tensor
    k2: Tensor
    most_payload: int  # bytes of the longest segment
    most_padded: int
    payload_grain: int
    multiprocessors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the kernels read of a mapping over the tensors of pages."""

    sums: _Sums
    grain: int
    shape: Shape | None
    planes: Tensor  # where there is a shape, else:
    tiles: Tensor
    units: Tensor
    payload_units: int


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel as some call launches it: `triton.compile(ASTSource(kernel, signature, constexprs, attrs))`.

    To be compiled, kernels must have been imported with TRITON_INTERPRET=0.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    num_warps: int
    sector: int  # bytes that one global access of pages and chunks should move: 16 where all is aligned
    tile_bytes: int  # that a program moves in one turn of its innermost loop


def gather(
    pages: KVPages,
    block_ids: Tensor,
    mapping: CanonicalMapping,
    out: Tensor,
    sums: Tensor | None = None,
    *,
    programs: int | None = None,
) -> None:
    """As `reference.gather`, on the device of `pages`.

    Args:
        block_ids: int64 [n, blocks_per_chunk]. Their values are the caller's to check: `check_block_ids`.
        out: uint8 [n, slot.payload_stride]; rows may be apart.
        sums: int64 or uint64 [n, slot.num_segments], contiguous.
        programs: launch at most so many, each of four warps: leaves multiprocessors to others. None: no limit.

    `block_ids`, `out` and `sums` are on the device of `pages`, or in pinned host memory, which the device then reads
    and writes over its link.

    Raises:
        LayoutError: a tensor does not fit; nothing was launched.
        DeviceError: the stream is being captured, and nothing was prepared for this mapping.
    """
    _move(pages, block_ids, mapping, out, sums, programs, to_pages=False)


def scatter(
    src: Tensor,
    block_ids: Tensor,
    mapping: CanonicalMapping,
    pages: KVPages,
    sums: Tensor | None = None,
    *,
    programs: int | None = None,
) -> None:
    """As `reference.scatter`, on the device of `pages`. See `gather`.

    Args:
        block_ids: each block at most once in all, which is the caller's to check: `check_distinct`.

    Raises:
        LayoutError: a tensor does not fit, or the pages are read-only; nothing was launched.
        DeviceError: as `gather`.
    """
    if not pages.writable:
        raise LayoutError("a tensor of these pages is read-only")
    _move(pages, block_ids, mapping, src, sums, programs, to_pages=True)


def checksum(src: Tensor, mapping: CanonicalMapping, sums: Tensor, *, programs: int | None = None) -> None:
    """The sums that `scatter` would give, of the mapping's segments, and nothing else. See `gather`.

    Args:
        src, sums: on one device, or pinned; where both are, torch's current device does the work.

    Raises:
        LayoutError: a tensor does not fit; nothing was launched.
        DeviceError: as `gather`.
    """
    device = _device_of(src, sums)
    _check_buffers(device, mapping, src, sums, len(src), programs)
    if not len(src):
        return
    with _on(device):
        tables = _sums_of(mapping, device)
        at, stride = src.data_ptr(), _stride(src, mapping)
        vector = gcd(tables.payload_grain, at, stride)
        parts, tiles = _cut(tables, tables.most_payload, len(src), programs)
        units = len(src) * len(mapping.segments) * parts
        cleared = _cleared(tables, mapping, sums)
        kernels.sum_segments[(_grid(units, programs),)](
            tables.places, tables.k1, tables.k2, cleared, at, stride, mapping.slot.num_segments,
            len(mapping.segments), parts, tiles, units,
            **_turn(vector), LONG=_long(tables, vector), num_warps=WARPS[vector],
        )  # fmt: skip


def prepare(pages: KVPages, mapping: CanonicalMapping) -> None:
    """Makes and uploads the tables for `mapping`; may wait for the device. Kernels are compiled at their first call.

    Raises:
        LayoutError: the mapping is not of these pages, or they are where Triton cannot reach them.
    """
    with _on(pages.device):
        _plan_of(pages, mapping)


def _move(
    pages: KVPages,
    block_ids: Tensor,
    mapping: CanonicalMapping,
    stage: Tensor,
    sums: Tensor | None,
    programs: int | None,
    to_pages: bool,
) -> None:
    check_mapping(pages, mapping)
    chunks = len(block_ids)
    _check_tensor("block_ids", block_ids, pages.device, (torch.int64,), (chunks, mapping.blocks_per_chunk))
    if not block_ids.is_contiguous():
        raise LayoutError("block_ids must be contiguous")
    _check_buffers(pages.device, mapping, stage, sums, chunks, programs)
    if not chunks:
        return
    with _on(pages.device):
        plan = _plan_of(pages, mapping)
        # Without sums a kernel reads neither of k1, k2 and sums: any table will do.
        target = plan.sums.k2 if sums is None else _cleared(plan.sums, mapping, sums)
        at, stride = stage.data_ptr(), _stride(stage, mapping)
        tables = (block_ids, plan.sums.k1, plan.sums.k2, target, at, stride, mapping.slot.num_segments)
        vector = gcd(plan.grain, at, stride)
        options = {**_turn(vector), "SCATTER": to_pages, "SUMS": sums is not None, "num_warps": WARPS[vector]}
        if plan.shape is None:
            _launch_tiles(plan, mapping, chunks, programs, tables, options)
        else:
            _launch_planes(plan, plan.shape, chunks, programs, tables, options)


def _launch_planes(
    plan: _Plan, shape: Shape, chunks: int, programs: int | None, tables: tuple[Any, ...], options: dict[str, Any]
) -> None:
    sums, vector = plan.sums, options["VECTOR"]
    segments = len(sums.places)
    parts, tiles = _cut(sums, sums.most_payload if options["SCATTER"] else sums.most_padded, chunks, programs)
    units = chunks * segments * parts
    kernels.move_planes[(_grid(units, programs),)](
        plan.planes, sums.places, *tables, shape.block_stride, shape.fragment_stride, shape.planes,
        segments, parts, tiles, units,
        **_plane_sizes(shape, vector), LONG=_long(sums, vector, shape), **options,
    )  # fmt: skip


def _launch_tiles(
    plan: _Plan,
    mapping: CanonicalMapping,
    chunks: int,
    programs: int | None,
    tables: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    chunk_units = plan.payload_units if options["SCATTER"] else len(plan.units)
    units = chunks * chunk_units
    kernels.move_tiles[(_grid(units, programs),)](
        plan.tiles, plan.units, plan.sums.places, *tables, mapping.blocks_per_chunk, chunk_units, units, **options
    )


def _turn(vector: int) -> dict[str, int]:
    return {"VECTOR": vector, "LANES": LANES[vector]}


def _plane_sizes(shape: Shape, vector: int) -> dict[str, int]:
    return {"FRAGMENT": shape.fragment // vector, "FRAGMENTS": shape.fragments, "BLOCKS": shape.blocks}


def _long(tables: _Sums, vector: int, shape: Shape | None = None) -> bool:
    """Whether the vectors of a segment, and of a tile beyond its end, or the bytes of a page need more than 31 bits."""
    page = 0 if shape is None else shape.fragments * shape.fragment_stride
    return max(tables.most_padded // vector + WIDEST * TILE, page) >= 2**31


def _cut(tables: _Sums, longest: int, chunks: int, programs: int | None) -> tuple[int, int]:
    """(units of a segment, tiles of a unit): enough units for every multiprocessor, and no more than it gains from."""
    count = -(-longest // TILE)
    wanted = programs or tables.multiprocessors * UNITS_PER_SM
    tiles = min(max(chunks * len(tables.places) * count // wanted, 1), MOST_TILES)
    parts = -(-count // tiles)
    return parts, -(-count // parts)


def _grid(units: int, programs: int | None) -> int:
    return units if programs is None else min(units, programs)


def _cleared(tables: _Sums, mapping: CanonicalMapping, sums: Tensor) -> Tensor:
    """`sums` as int64, those of the rank's segments zero once the stream comes to it."""
    numbers = sums.view(torch.int64)
    total = len(sums) * len(mapping.segments)
    kernels.clear_sums[(-(-total // CLEAR_SPAN),)](
        tables.places, numbers, mapping.slot.num_segments, len(mapping.segments), total, SPAN=CLEAR_SPAN
    )
    return numbers


def _stride(stage: Tensor, mapping: CanonicalMapping) -> int:
    """Bytes from one chunk's payload area to the next; of a single one a tensor's stride says nothing."""
    return int(stage.stride(0)) if len(stage) > 1 else mapping.slot.payload_stride


# ---- checks


def _check_buffers(
    device: str, mapping: CanonicalMapping, stage: Tensor, sums: Tensor | None, chunks: int, programs: int | None
) -> None:
    if programs is not None and programs < 1:
        raise LayoutError(f"programs={programs} must be at least 1")
    width = mapping.slot.payload_stride
    _check_tensor("the canonical buffer", stage, device, (torch.uint8,), (chunks, width))
    if chunks and (stage.stride(1) != 1 or (chunks > 1 and stage.stride(0) < width)):
        raise LayoutError(
            f"the canonical buffer has strides {tuple(stage.stride())}: want the bytes of a chunk side by side and "
            "chunks not overlapping"
        )
    if sums is not None:
        _check_tensor("sums", sums, device, (torch.int64, torch.uint64), (chunks, mapping.slot.num_segments))
        if not sums.is_contiguous():
            raise LayoutError("sums must be contiguous")


def _check_tensor(name: str, tensor: Tensor, device: str, dtypes: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes:
        found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise LayoutError(f"{name} must be a torch tensor of {' or '.join(map(str, dtypes))}, not {found}")
    if tuple(tensor.shape) != shape:
        raise LayoutError(f"{name} has shape {tuple(tensor.shape)}, want {shape}")
    here = str(tensor.device)
    if here != device and not (here == "cpu" and tensor.is_pinned()):
        raise LayoutError(f"{name} is on {here}: want {device}, or pinned host memory")


def _device_of(*tensors: Tensor) -> str:
    """The device of the first tensor that is on one; torch's current one where all are in host memory."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
            return str(tensor.device)
    return "cpu" if INTERPRETED else f"cuda:{torch.cuda.current_device()}"


def _on(device: str) -> AbstractContextManager[Any]:
    """Makes `device` torch's and Triton's current one.

    Raises:
        LayoutError: kernels that run here do not reach it.
    """
    if device != "cpu":
        return torch.cuda.device(device)  # type: ignore[no-any-return]
    if not INTERPRETED:
        raise LayoutError("these pages are in host memory, where only Triton's interpreter works")
    return nullcontext()


# ---- plans


_lock = threading.Lock()
_sums_by_mapping: weakref.WeakKeyDictionary[CanonicalMapping, dict[str, _Sums]] = weakref.WeakKeyDictionary()


def _plan_of(pages: KVPages, mapping: CanonicalMapping) -> _Plan:
    """The plan, made at the first call, valid as long as `pages`."""
    check_mapping(pages, mapping)
    with pages.lock:
        if id(mapping) not in pages.plans:
            pages.plans[id(mapping)] = (_new_plan(pages, mapping), mapping)  # mapping stays: its id is not given away
        plan: _Plan = pages.plans[id(mapping)][0]
        return plan


def _new_plan(pages: KVPages, mapping: CanonicalMapping) -> _Plan:
    sums, shape = _sums_of(mapping, pages.device), shape_of(mapping)
    planes = tiles = units = None
    payload_units = 0
    if shape is not None:
        planes = _upload(planes_of(mapping, shape, pages.addresses), pages.device)
    else:
        made = tiles_of(mapping, pages.addresses)
        tiles, units = _upload(made.tiles, pages.device), _upload(made.units, pages.device)
        payload_units = made.payload_units
    return _Plan(
        sums=sums,
        grain=grain_of(mapping, pages.addresses),
        shape=shape,
        planes=planes,
        tiles=tiles,
        units=units,
        payload_units=payload_units,
    )


def _sums_of(mapping: CanonicalMapping, device: str) -> _Sums:
    with _lock:
        per_device = _sums_by_mapping.setdefault(mapping, {})
        if device not in per_device:
            per_device[device] = _new_sums(mapping, device)
        return per_device[device]


def _new_sums(mapping: CanonicalMapping, device: str) -> _Sums:
    places = places_of(mapping)
    rows = np.arange(-(-int(places[:, 2].max()) // TILE), dtype=np.uint64)
    on_gpu = device != "cpu"
    return _Sums(
        places=_upload(places, device),
        k1=_upload(k1_table().astype(np.uint32).view(np.int32), device),
        k2=_upload(k2(rows).view(np.int64), device),
        most_payload=int(places[:, 2].max()),
        most_padded=int(places[:, 3].max()),
        payload_grain=gcd(WIDEST, *places[:, 2].tolist()),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1,
    )


def _upload(table: NDArray[Any], device: str) -> Tensor:
    """A table on the device: it is there when this returns, whatever stream reads it.

    Raises:
        DeviceError: the current stream is being captured, and would keep the upload for later.
    """
    if device != "cpu" and torch.cuda.is_current_stream_capturing():
        raise DeviceError("nothing was prepared for this mapping: call prepare(pages, mapping) before the capture")
    return torch.from_numpy(table).to(device)


# ---- for the offline compiler


def variants() -> Iterator[Variant]:
    """Every kernel as the usual caches launch it, for each mode; what is launched is made of the same parts."""
    attention = KVGeometry(num_layers=1, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=16)
    fp8 = replace(attention, dtype="float8_e4m3fn")
    latent = replace(attention, num_kv_heads=1, head_dim=576, tokens_per_block=64, kind=Kind.MLA)
    nhd, hnd = PageLayout.nhd, PageLayout.hnd
    cases = {
        "nhd-256": (attention, nhd, 1, 16),
        "nhd-256-4blocks": (attention, nhd, 4, 16),
        "nhd-256-odd": (attention, nhd, 1, 8),  # pages or chunks at multiples of 8 bytes
        "nhd-128-4blocks": (fp8, nhd, 4, 16),
        "nhd-160": (replace(attention, head_dim=80), nhd, 1, 16),
        "nhd-132": (replace(fp8, head_dim=132), nhd, 1, 4),
        "nhd-33": (replace(fp8, head_dim=33), nhd, 1, 1),
        "hnd-4096": (attention, hnd, 1, 16),
        "mla-1152": (latent, nhd, 1, 16),
        "mla-656": (replace(latent, head_dim=656, dtype="uint8"), nhd, 1, 16),
        "mla-656-4blocks": (replace(latent, head_dim=656, dtype="uint8"), nhd, 4, 16),
    }
    for name, (geometry, layout, blocks, vector) in cases.items():
        page = layout(geometry, geometry.num_kv_heads)
        shape = shape_of(kvx1_mapping(geometry, ShardSpec(), page, blocks_per_chunk=blocks))
        assert shape is not None
        sizes = {**_plane_sizes(shape, vector), **_turn(vector), "LONG": False}
        for mode, options in _MODES.items():
            yield _variant(f"planes-{name}-{mode}", kernels.move_planes, sizes | options, vector)
    for vector in (16, 8, 4, 2, 1):
        for mode, options in _MODES.items():
            yield _variant(f"tiles-{vector}-{mode}", kernels.move_tiles, _turn(vector) | options, vector)
        yield _variant(f"sum-{vector}", kernels.sum_segments, _turn(vector) | {"LONG": False}, vector)
    yield _variant("clear", kernels.clear_sums, {"SPAN": CLEAR_SPAN}, 8)


_MODES: Mapping[str, dict[str, bool]] = {
    "gather": {"SCATTER": False, "SUMS": False},
    "gather+sum": {"SCATTER": False, "SUMS": True},
    "scatter": {"SCATTER": True, "SUMS": False},
    "scatter+sum": {"SCATTER": True, "SUMS": True},
}
_POINTERS = {"k1": "*i32"} | dict.fromkeys(
    ("planes", "places", "block_ids", "k2", "sums", "tile_table", "unit_table"), "*i64"
)
_ALIGNED = {
    "planes",
    "places",
    "k1",
    "k2",
    "tile_table",
    "unit_table",
}  # torch's allocations; the others are a caller's


def _variant(name: str, kernel: Any, constexprs: dict[str, Any], sector: int) -> Variant:
    signature: dict[str, str] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (argument, parameter) in enumerate(inspect.signature(kernel.fn).parameters.items()):
        if argument in constexprs:
            signature[argument] = "constexpr"
        else:
            signature[argument] = _POINTERS.get(argument) or f"i{parameter.annotation.primitive_bitwidth}"
        if argument in _ALIGNED:
            attrs[(index,)] = [["tt.divisibility", 16]]
    tile_bytes = sector * LANES[sector]
    return Variant(name, kernel, signature, constexprs, attrs, WARPS[sector], sector, tile_bytes)
