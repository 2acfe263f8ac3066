"""A whole slot in memory: believed or not, and sealed anew for another place."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from kvxfer import _native
from kvxfer.slot import TRAILER_SUMS, SlotLayout
from kvxfer.staging import AlignedBuffer
from kvxfer.store.rebuild import identify, parse_page
from kvxfer.store.records import IndexRecord


class Image(NamedTuple):
    """What a slot holds, every byte of which was checked."""

    record: IndexRecord  # its slab and slot are 0
    sums: np.ndarray  # [num_segments] uint64


def examine(buffer: AlignedBuffer, layout: SlotLayout) -> Image | str:
    """What the slot at the beginning of a buffer holds; why it is not believed, otherwise: `bad_trailer`, `bad_sum`."""
    trailers = buffer.address + layout.payload_stride
    places = [trailers + page * layout.alignment for page in range(layout.num_trailers)]
    record = identify([parse_page(place, layout) for place in places], layout, 0, 0)
    if record is None:
        return "bad_trailer"
    sums = np.empty(layout.num_segments, dtype=np.uint64)
    page_sums, fields = (ctypes.c_uint64 * TRAILER_SUMS)(), _native.Trailer()
    for place in places:
        _native.lib().kvx_trailer_parse(place, layout.alignment, ctypes.byref(fields), page_sums)
        sums[fields.first_segment : fields.first_segment + fields.segment_count] = page_sums[: fields.segment_count]
    for segment in range(layout.num_segments):
        start = buffer.address + segment * layout.segment_stride
        if _native.lib().kvx_checksum(start, layout.segment_length(segment), 0) != int(sums[segment]):
            return "bad_sum"
    return Image(record, sums)


def write_trailers(buffer: AlignedBuffer, layout: SlotLayout, image: Image, digest: bytes, generation: int) -> None:
    """Seals the payload that lies in a buffer, in `layout`, for another namespace and generation.

    The sums are those of the image: whatever happened to the payload since shows.
    """
    for page in range(layout.num_trailers):
        first = page * layout.segments_per_trailer
        fields = _native.Trailer()
        key = image.record.key
        fields.namespace_digest[:], fields.key[: len(key)], fields.key_bytes = digest, key, len(key)
        fields.generation, fields.first_segment = generation, first
        fields.segment_count = min(layout.segments_per_trailer, layout.num_segments - first)
        fields.num_segments, fields.blocks_per_chunk = layout.num_segments, layout.blocks_per_chunk
        fields.payload_bytes, fields.segment_bytes = layout.payload_bytes, layout.segment_bytes
        fields.mask[:] = [image.record.mask >> (64 * word) & (2**64 - 1) for word in range(4)]
        place = buffer.address + layout.payload_stride + page * layout.alignment
        sums = np.ascontiguousarray(image.sums[first : first + fields.segment_count])
        if _native.lib().kvx_trailer_seal(ctypes.byref(fields), sums.ctypes.data, place, layout.alignment) != 0:
            raise AssertionError(f"a trailer of {layout} cannot be sealed")


def lay_out(source: AlignedBuffer, layout: SlotLayout, target: AlignedBuffer, other: SlotLayout) -> None:
    """Copies a payload into a layout of the same segments with another alignment; padding is zero."""
    target.array[:] = 0
    for segment in range(layout.num_segments):
        start, place, length = (
            segment * layout.segment_stride,
            segment * other.segment_stride,
            layout.segment_length(segment),
        )
        target.array[place : place + length] = source.array[start : start + length]
