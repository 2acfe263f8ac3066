"""Chunks for store tests: written into reserved slots, and read back as another program would."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer import _native
from kvxfer.config import StoreConfig
from kvxfer.keys import Namespace
from kvxfer.slot import TRAILER_SUMS, SlotLayout
from kvxfer.staging import AlignedBuffer
from kvxfer.store import Entry, Reservation, Store

KIB, MIB = 1 << 10, 1 << 20
# Three segments, the last one short; one trailer page, or one for each.
ROW = SlotLayout(
    segment_bytes=5000, last_segment_bytes=300, num_segments=3, segments_per_trailer=TRAILER_SUMS, blocks_per_chunk=4
)
SHARED = SlotLayout(
    segment_bytes=4096, last_segment_bytes=4096, num_segments=2, segments_per_trailer=1, blocks_per_chunk=8
)
FULL = 0b1111


def config(root: Path, **changes: Any) -> StoreConfig:
    """A small store: 8 MiB, 13 slabs of 21 ROW slots."""
    return StoreConfig(**({"root": root, "capacity_bytes": 8 * MIB} | changes))


def namespace(**changes: Any) -> Namespace:
    """A namespace; changes make others."""
    fields: dict[str, Any] = {
        "model": "org/model", "weights_fingerprint": "f00d", "dtype": "bfloat16", "canonical_form": "row",
        "geometry": [{"num_layers": 2}], "blocks_per_chunk": 4, "tokens_per_chunk": 64,
    }  # fmt: skip
    return Namespace(**(fields | changes))


def key(i: int) -> bytes:
    """The i-th key."""
    return hashlib.sha256(b"%d" % i).digest() + (i % 3).to_bytes(4, "big")


def payload(name: bytes, layout: SlotLayout, segment: int) -> np.ndarray:
    """What a segment of a chunk holds: bytes that no other chunk has."""
    data = hashlib.shake_128(name + bytes([segment])).digest(layout.segment_length(segment))
    return np.frombuffer(data, dtype=np.uint8)


def slot_image(name: bytes, digest: bytes, layout: SlotLayout, generation: int, mask: int) -> AlignedBuffer:
    """A whole slot, sealed."""
    buffer = AlignedBuffer(layout.slot_bytes, layout.alignment)
    sums = np.zeros(layout.num_segments, dtype=np.uint64)
    for segment in range(layout.num_segments):
        data = payload(name, layout, segment)
        start = segment * layout.segment_stride
        buffer.array[start : start + len(data)] = data
        sums[segment] = _native.lib().kvx_checksum(data.ctypes.data, len(data), 0)
    for page in range(layout.num_trailers):
        first = page * layout.segments_per_trailer
        fields = _native.Trailer()
        fields.namespace_digest[:], fields.key[: len(name)] = digest, name
        fields.key_bytes, fields.generation, fields.first_segment = len(name), generation, first
        fields.segment_count = min(layout.segments_per_trailer, layout.num_segments - first)
        fields.num_segments, fields.blocks_per_chunk = layout.num_segments, layout.blocks_per_chunk
        fields.payload_bytes, fields.segment_bytes = layout.payload_bytes, layout.segment_bytes
        fields.mask[:] = [mask >> (64 * word) & (2**64 - 1) for word in range(4)]
        place = buffer.address + layout.payload_stride + page * layout.alignment
        part = np.ascontiguousarray(sums[first:])
        assert _native.lib().kvx_trailer_seal(ctypes.byref(fields), part.ctypes.data, place, layout.alignment) == 0
    return buffer


def write(reservation: Reservation, digest: bytes, name: bytes, mask: int = FULL) -> None:
    """Writes a chunk into its slot, as a job would."""
    layout = reservation.slab.layout
    image = slot_image(name, digest, layout, reservation.generation, mask)
    moved = ctypes.c_uint64()
    n = _native.lib().kvx_file_pwrite(
        reservation.slab.handle, image.address, len(image), reservation.slot_offset, ctypes.byref(moved)
    )
    assert n == len(image), n


def put(store: Store, digest: bytes, names: Sequence[bytes], layout: SlotLayout = ROW, mask: int = FULL) -> list[bool]:
    """Stores chunks from reserve to commit; False for those that got no slot or were not committed."""
    slots = store.reserve(digest, layout, len(names))
    for name, slot in zip(names, slots, strict=False):
        write(slot, digest, name, mask)
    done = store.commit(digest, [(name, slot, mask) for name, slot in zip(names, slots, strict=False)])
    return done + [False] * (len(names) - len(slots))


def verify(entry: Entry) -> bool:
    """Whether the slot of a (pinned) entry holds exactly its chunk."""
    image = slot_image(entry.key, entry.digest, entry.slab.layout, entry.generation, entry.mask)
    with entry.slab.path.open("rb") as file:
        return os.pread(file.fileno(), len(image), entry.slot_offset) == image.array.tobytes()


def check_all(store: Store, digest: bytes, names: Iterable[bytes]) -> list[bytes]:
    """The keys that are stored; every one of them with the right bytes."""
    entries = [entry for entry in store.pin(digest, names) if entry is not None]
    try:
        wrong = [entry for entry in entries if not verify(entry)]
        assert not wrong, wrong
        places = [(entry.slab.slab_id, entry.slot) for entry in entries]
        assert len(set(places)) == len(places)
        return [entry.key for entry in entries]
    finally:
        store.unpin(entries)


def disk_use(root: Path) -> tuple[int, int]:
    """(bytes, files) under a root, directories included in the bytes; of size and blocks the larger."""
    nbytes = nfiles = 0
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            status = os.lstat(os.path.join(folder, name))
            nbytes += max(status.st_size, status.st_blocks * 512)
        nfiles += len(files)
    return nbytes, nfiles


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file under a root, with its mode and bytes."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): (path.stat().st_mode, path.read_bytes()) for path in files}


def run_python(code: str, *args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs code in another interpreter."""
    place = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": place} | (env or {}),
    )  # fmt: skip
