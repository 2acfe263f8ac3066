"""The index, found again in the slots: every slot's trailer pages say what it holds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvxfer import _native
from kvxfer.errors import IOFault
from kvxfer.report import reporter
from kvxfer.slot import TRAILER_SUMS, SlotLayout
from kvxfer.staging import AlignedBuffer
from kvxfer.store.records import IndexRecord
from kvxfer.store.slab import SlabFile


@dataclass(slots=True)
class Scan:
    """What a scan of slabs found."""

    records: list[IndexRecord] = field(default_factory=list)  # one for each key
    epochs: set[int] = field(default_factory=set)  # of every trailer page that is whole, believed or not


def scan_slabs(slabs: Sequence[SlabFile], threads: int) -> Scan:
    """Reads every slot's trailers, `threads` slabs at a time. Payload is not read: a load verifies it.

    Where two slots hold one key, the one with more valid blocks stays, then the one with the larger generation.
    """
    whole = Scan()
    best: dict[tuple[bytes, bytes], IndexRecord] = {}
    with ThreadPoolExecutor(max(1, min(threads, len(slabs))), thread_name_prefix="kvx-scan") as pool:
        for part in pool.map(_scan_slab, slabs):
            whole.epochs |= part.epochs
            for record in part.records:
                name = record.digest, record.key
                if name not in best or _worth(record) > _worth(best[name]):
                    best[name] = record
    whole.records = list(best.values())
    return whole


def _worth(record: IndexRecord) -> tuple[int, int]:
    return record.mask.bit_count(), record.generation


def _scan_slab(slab: SlabFile) -> Scan:
    part = Scan()
    layout = slab.layout
    if not slab.usable:  # what its header claims may be more than there is memory
        return part
    nbytes = layout.num_trailers * layout.alignment
    buffer = AlignedBuffer(nbytes, layout.alignment)
    for slot in range(slab.usable):
        record, epochs = read_record(slab, slot, buffer)
        part.epochs |= epochs
        if record is not None:
            part.records.append(record)
    return part


def read_record(slab: SlabFile, slot: int, buffer: AlignedBuffer) -> tuple[IndexRecord | None, set[int]]:
    """What a slot holds by its trailers, None where that is nothing or not readable; epochs that its pages name.

    Args:
        buffer: of the size of a slot's trailers.
    """
    layout, nbytes = slab.layout, len(buffer)
    try:
        moved = slab.read(buffer, nbytes, slab.slot_offset(slot) + layout.payload_stride)
    except IOFault as exc:
        reporter.warn("scan", f"a slot cannot be read and counts as free: {exc}", error=exc)
        return None, set()
    if moved != nbytes:
        return None, set()
    pages = [parse_page(buffer.address + i * layout.alignment, layout) for i in range(layout.num_trailers)]
    epochs = {page.generation >> 32 for page in pages if page is not None}
    return identify(pages, layout, slab.slab_id, slot), epochs


def parse_page(address: int, layout: SlotLayout) -> _native.Trailer | None:
    """A trailer page's fields, if its magic, version and CRC are right."""
    fields = _native.Trailer()
    status = _native.lib().kvx_trailer_parse(address, layout.alignment, ctypes.byref(fields), _sums())
    return fields if status == 0 else None


def _sums() -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * TRAILER_SUMS)()


def identify(
    pages: Iterable[_native.Trailer | None], layout: SlotLayout, slab_id: int, slot: int
) -> IndexRecord | None:
    """What a slot holds, if all of its trailer pages agree on it and cover all segments; else None: it is free."""
    found: IndexRecord | None = None
    for i, page in enumerate(pages):
        first = i * layout.segments_per_trailer
        expected = (
            first, min(layout.segments_per_trailer, layout.num_segments - first), layout.num_segments,
            layout.blocks_per_chunk, layout.payload_bytes, layout.segment_bytes,
        )  # fmt: skip
        if page is None or expected != (
            page.first_segment, page.segment_count, page.num_segments,
            page.blocks_per_chunk, page.payload_bytes, page.segment_bytes,
        ):  # fmt: skip
            return None
        record = IndexRecord(
            bytes(page.namespace_digest), bytes(page.key)[: page.key_bytes], slab_id, slot, page.generation,
            sum(word << (64 * w) for w, word in enumerate(page.mask)),
        )  # fmt: skip
        if found is not None and record != found:
            return None
        found = record
    return found if found is not None and found.mask and found.generation else None
