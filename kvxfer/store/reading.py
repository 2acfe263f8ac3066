"""Slots of a closed or a running root, read and checked: what of a chunk's bytes is as its trailers say."""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

import numpy as np

from kvxfer import _native
from kvxfer.errors import IOFault
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import sys_open
from kvxfer.slot import TRAILER_SUMS, SlotLayout
from kvxfer.staging import AlignedBuffer
from kvxfer.store.rebuild import identify, parse_page
from kvxfer.store.records import IndexRecord
from kvxfer.store.survey import Slab

_PIECE = 1 << 20  # bytes of payload that a reader holds; trailer pages are fewer


class Readable(Protocol):
    """A file as far as a reader of slots needs it."""

    def read(self, buf: np.ndarray, size: int, file_offset: int) -> int:
        """Bytes moved; fewer than `size` where the file ends. Raises IOFault."""


def open_slab(slab: Slab) -> PosixFile:
    """The file, for reading; past the page cache where that works, so that the drive's bytes are what is checked."""
    flags = os.O_RDONLY | os.O_NOFOLLOW
    try:
        file = PosixFile(sys_open(slab.path, flags | os.O_DIRECT), slab.path.name, True)
        try:
            file.read(AlignedBuffer(slab.layout.alignment, slab.layout.alignment).array)
        except BaseException:
            file.close()
            raise
    except IOFault:
        return PosixFile(sys_open(slab.path, flags), slab.path.name, False)
    return file


class Ended(Exception):
    """The file ends before the bytes that were asked for."""


class _Window:
    """A buffer that slides over one slot's bytes; whoever asks in order causes few reads. Sizes in bytes."""

    def __init__(self, file: Readable, nbytes: int, alignment: int) -> None:
        self._file = file
        self._buffer = AlignedBuffer(max(nbytes, alignment), alignment)
        self._start = self._end = 0

    def forget(self) -> None:
        """What is asked for next is read again."""
        self._start = self._end = 0

    def address(self, offset: int, nbytes: int, limit: int) -> int:
        """Where the `nbytes` at `offset` of the file are now; reads on, at most up to `limit`. Both aligned.

        Raises:
            IOFault: the call failed.
            Ended: the file ends before.
        """
        if not self._start <= offset or not offset + nbytes <= self._end:
            self._start = self._end = 0  # whatever the read comes to, what was there is gone
            moved = self._file.read(self._buffer.array, min(len(self._buffer), limit - offset), offset)
            if moved < nbytes:
                raise Ended
            self._start, self._end = offset, offset + moved
        return self._buffer.address + offset - self._start


class SlotReader:
    """Reads the slots of one slab; used by one thread."""

    def __init__(self, file: Readable, slab: Slab) -> None:
        layout = slab.layout
        self._slab, self._layout = slab, layout
        self._piece = max(_PIECE, layout.alignment)
        self._payload = _Window(file, min(self._piece, layout.payload_stride), layout.alignment)
        self._trailers = _Window(file, min(self._piece, layout.num_trailers * layout.alignment), layout.alignment)
        self._sums = (ctypes.c_uint64 * TRAILER_SUMS)()

    def forget(self) -> None:
        """What is asked for next is read again."""
        self._payload.forget()
        self._trailers.forget()

    def identify(self, slot: int) -> IndexRecord | None:
        """What a slot says it holds, if all its trailer pages say so; None for a free one."""
        pages = (parse_page(self._page(slot, page), self._layout) for page in range(self._layout.num_trailers))
        return identify(pages, self._layout, self._slab.slab_id, slot)

    def check(self, record: IndexRecord) -> tuple[str, str] | None:
        """What is wrong with an entry, (what, detail); None if every byte of it is right."""
        layout, slot = self._layout, record.slot
        try:
            for page in range(layout.num_trailers):
                if (wrong := self._check_page(record, page)) is not None:
                    return wrong
                first = page * layout.segments_per_trailer
                for segment in range(first, min(first + layout.segments_per_trailer, layout.num_segments)):
                    if self._sum(slot, segment) != self._sums[segment - first]:
                        return "bad_sum", f"segment {segment} of {layout.num_segments} does not match its sum"
        except Ended:
            return "truncated", f"{self._slab.path.name} ends inside slot {slot}"
        except IOFault as exc:
            return "io", str(exc)
        return None

    def _check_page(self, record: IndexRecord, page: int) -> tuple[str, str] | None:
        """Leaves the page's sums in `_sums`."""
        layout, address = self._layout, self._page(record.slot, page)
        fields = _native.Trailer()
        where = f"trailer page {page} of {layout.num_trailers}"
        if _native.lib().kvx_trailer_parse(address, layout.alignment, ctypes.byref(fields), self._sums) != 0:
            empty = not any(ctypes.string_at(address, layout.alignment))
            return "bad_trailer", f"{where} {'is all zeros' if empty else 'is damaged'}"
        if _shape(fields) != _expected_shape(layout, page):
            return "bad_trailer", f"{where} is of a slot of another shape"
        key = bytes(fields.key)[: fields.key_bytes]
        mask = sum(word << (64 * w) for w, word in enumerate(fields.mask))
        for name, found, wanted in (
            ("namespace", bytes(fields.namespace_digest).hex(), record.digest.hex()),
            ("key", key.hex(), record.key.hex()),
            ("generation", f"{fields.generation:#x}", f"{record.generation:#x}"),
            ("mask of blocks", f"{mask:#x}", f"{record.mask:#x}"),
        ):
            if found != wanted:
                return "foreign", f"{where} has {name} {found}, the index says {wanted}"
        return None

    def _page(self, slot: int, page: int) -> int:
        """Address of a trailer page."""
        layout = self._layout
        start = self._slab.slot_offset(slot) + layout.payload_stride
        end = start + layout.num_trailers * layout.alignment
        return self._trailers.address(start + page * layout.alignment, layout.alignment, end)

    def _sum(self, slot: int, segment: int) -> int:
        """The checksum of a segment, summed piece by piece."""
        layout = self._layout
        start = self._slab.slot_offset(slot)
        end, at = start + layout.payload_stride, start + segment * layout.segment_stride
        left, total = layout.segment_length(segment), 0
        done = 0
        while done < left:
            nbytes = min(left - done, self._piece)
            stride = -(-nbytes // layout.alignment) * layout.alignment
            address = self._payload.address(at + done, stride, end)
            total += int(_native.lib().kvx_checksum(address, nbytes, done // 4))
            done += nbytes
        return total % 2**64


def _shape(fields: _native.Trailer) -> tuple[int, ...]:
    return (
        fields.first_segment, fields.segment_count, fields.num_segments,
        fields.blocks_per_chunk, fields.payload_bytes, fields.segment_bytes,
    )  # fmt: skip


def _expected_shape(layout: SlotLayout, page: int) -> tuple[int, ...]:
    first = page * layout.segments_per_trailer
    return (
        first, min(layout.segments_per_trailer, layout.num_segments - first), layout.num_segments,
        layout.blocks_per_chunk, layout.payload_bytes, layout.segment_bytes,
    )  # fmt: skip
