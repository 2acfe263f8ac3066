"""A chunk that is stored, and a slot that is spoken for. Both belong to the store's table (table.py) and its lock."""

from __future__ import annotations

import struct
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.store.slab import SlabFile

# kvx_chunk: file, slot_offset, generation, key_bytes, reserved, key zero-filled.
_CHUNK = struct.Struct("=QQQII64s")


class Entry:
    """One chunk under its key. Compared by identity: a chunk stored again is another entry, with another generation."""

    __slots__ = (
        "after", "dead", "digest", "generation", "indexed", "key", "mask", "pins", "record", "slab", "slot", "tick",
    )  # fmt: skip

    def __init__(self, digest: bytes, key: bytes, slab: SlabFile, slot: int, generation: int, mask: int) -> None:
        self.digest = digest
        self.key = key
        self.slab = slab
        self.slot = slot
        self.generation = generation
        self.mask = mask  # bit b: block b of the chunk is valid
        self.pins = 0
        self.dead = False  # no lookup finds it any more; its slot is free once `indexed` and `pins` allow
        self.indexed = True  # the index names it
        self.tick = 0  # when it was used last, in the table's clock
        self.after = b""  # the key that it is known to follow
        self.record = b""  # its kvx_chunk; made by the first pin, valid while pinned

    @property
    def slot_offset(self) -> int:
        """Where its slot starts in the slab."""
        return self.slab.slot_offset(self.slot)

    def __repr__(self) -> str:
        return f"Entry({self.key.hex()}, {self.slab.name} slot {self.slot}, generation {self.generation:#x})"


class SlotState(Enum):
    """Where a reservation is in its life."""

    RESERVED = "reserved"
    QUARANTINED = "quarantined"  # a write that was given up may still land in it
    SETTLED = "settled"  # committed or released


class Lease:
    """Slots that were taken together. The index names it, so that no other process takes them."""

    __slots__ = ("number", "slots", "void")

    def __init__(self, number: int) -> None:
        self.number = number
        self.slots: dict[int, tuple[int, int, int]] = {}  # not settled: (slab, slot, generation) by generation
        self.void = False  # the index was lost, or another process took this one for dead: nothing can be committed


class Reservation:
    """A slot that is the caller's to write, until it is committed or released. Its slab stays open for so long."""

    __slots__ = ("generation", "lease", "slab", "slot", "state")

    def __init__(self, slab: SlabFile, slot: int, generation: int, lease: Lease) -> None:
        self.slab = slab
        self.slot = slot
        self.generation = generation
        self.lease = lease
        self.state = SlotState.RESERVED

    @property
    def slot_offset(self) -> int:
        """Where the slot starts in the slab."""
        return self.slab.slot_offset(self.slot)

    def chunk_record(self, key: bytes) -> bytes:
        """The packed kvx_chunk for writing `key` here."""
        return pack_chunk(self.slab, self.slot, self.generation, key)

    def __repr__(self) -> str:
        return f"Reservation({self.slab.name} slot {self.slot}, generation {self.generation:#x}, {self.state.value})"


def pack_chunk(slab: SlabFile, slot: int, generation: int, key: bytes) -> bytes:
    """kvx_chunk as csrc reads it; the records of a job are joined end to end."""
    return _CHUNK.pack(slab.handle, slab.slot_offset(slot), generation, len(key), 0, key)
