"""The converter of libkvx behind the arguments of `reference`."""

from __future__ import annotations

import ctypes as C
import errno
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.convert.pages import KVPages, check_gather, check_host, check_mapping, check_scatter
from kvxfer.errors import LayoutError
from kvxfer.mapping import CanonicalMapping


def mapping_handle(pages: KVPages, mapping: CanonicalMapping, live: bool = True) -> int:
    """The `kvx_mapping *` of a mapping over the tensors of `pages`: made at the first call, valid as long as `pages`.

    A job counts its own reference to the handle, which does not keep the tensors alive: its owner keeps `pages`.

    Args:
        live: False where the tensors become live only by a load's result (host rows); see kvx.h.

    Raises:
        LayoutError: the mapping does not fit the tensors, or they are in a device's memory.
        NativeError: libkvx cannot be loaded.
    """
    check_host(pages)
    check_mapping(pages, mapping)
    key = (id(mapping), live)
    with pages.lock:
        if key not in pages.handles:
            handle = _new_handle(pages, mapping, live)
            weakref.finalize(pages, _native.lib().kvx_mapping_release, handle)
            pages.handles[key] = (handle, mapping)  # the mapping stays, so that its id is not given to another
        return int(pages.handles[key][0])


def _new_handle(pages: KVPages, mapping: CanonicalMapping, live: bool) -> int:
    lib = _native.lib()
    tensors = (_native.Tensor * mapping.num_tensors)(
        *(
            _native.Tensor(address, local.block_stride, pages.num_blocks)
            for address, local in zip(pages.addresses, mapping.tensors, strict=True)
        )
    )
    segments = (C.c_uint32 * len(mapping.segments))(*mapping.segments)
    layout = _native.SlotLayoutStruct.of(mapping.slot)
    handle = C.c_void_p()
    _check(
        "kvx_mapping_new",
        lib.kvx_mapping_new(
            C.byref(layout),
            _native.address(mapping.runs),
            len(mapping.runs),
            segments,
            len(mapping.segments),
            mapping.canonical_block_stride,
            tensors,
            mapping.num_tensors,
            int(live),
            C.byref(handle),
        ),
    )
    assert handle.value is not None  # kvx_mapping_new returned 0
    return handle.value


def gather(
    pages: KVPages,
    block_ids: NDArray[np.int64],
    mapping: CanonicalMapping,
    out: NDArray[np.uint8],
    sums: NDArray[np.uint64] | None = None,
    *,
    threads: int = 1,
) -> None:
    """As `reference.gather`, by up to `threads` threads. The GIL is released meanwhile.

    Raises:
        LayoutError: a shape or block id does not fit; nothing was written.
        NativeError: libkvx cannot be loaded.
    """
    check_gather(pages, block_ids, mapping, out, sums)
    _call("kvx_gather", pages, block_ids, mapping, out, sums, threads)


def scatter(
    src: NDArray[np.uint8],
    block_ids: NDArray[np.int64],
    mapping: CanonicalMapping,
    pages: KVPages,
    sums: NDArray[np.uint64] | None = None,
    *,
    threads: int = 1,
) -> None:
    """As `reference.scatter`, by up to `threads` threads. The GIL is released meanwhile.

    Raises:
        LayoutError: a shape or block id does not fit, or a tensor is read-only; nothing was written.
        NativeError: libkvx cannot be loaded.
    """
    check_scatter(pages, block_ids, mapping, src, sums)
    _call("kvx_scatter", pages, block_ids, mapping, src, sums, threads)


def _call(
    name: str,
    pages: KVPages,
    block_ids: NDArray[np.int64],
    mapping: CanonicalMapping,
    buffer: NDArray[np.uint8],
    sums: NDArray[np.uint64] | None,
    threads: int,
) -> None:
    handle = mapping_handle(pages, mapping)
    chunks = len(block_ids)
    if not chunks:
        return
    ids = np.ascontiguousarray(block_ids)
    stride = buffer.strides[0] if chunks > 1 else mapping.slot.payload_stride
    call: Any = getattr(_native.lib(), name)
    sums_at = None if sums is None else _native.address(sums)
    _check(name, call(handle, _native.address(ids), chunks, _native.address(buffer), stride, sums_at, threads))


def _check(name: str, result: int) -> None:
    if result == -errno.ENOMEM:
        raise MemoryError(name)
    if result < 0:
        raise LayoutError(f"{name} refused its arguments: {os.strerror(-result)}")
