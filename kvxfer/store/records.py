"""The index's rows: what their names and values say (docs/format.md, "Index"). Entries have names longer than 32 bytes,
all other rows shorter ones."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from kvxfer.slot import MAX_KEY_BYTES
from kvxfer.store.entry import Entry

DIGEST_BYTES = 32
_VALUE = struct.Struct("<QQQ32s")  # slab, slot, generation, mask
_PLACE = struct.Struct("<QQQ")
PLACE_BYTES = _PLACE.size
# What the names of each kind begin with.
EPOCHS, SLABS, MEMBERS, LEASES, USES = b"epoch", b"slab", b"member", b"lease", b"used"
USE_SLOTS = 32  # of one row
_EPOCH_VALUE = struct.Struct("<Q")
_SLAB_VALUE = struct.Struct("<BQ")
_MEMBER_VALUE = struct.Struct("<II")
_LEASE_SLOT = struct.Struct("<QQQ")
_USE_VALUE = struct.Struct(f"<{USE_SLOTS}I")


class IndexRecord(NamedTuple):
    """Where one chunk is."""

    digest: bytes
    key: bytes
    slab_id: int
    slot: int
    generation: int
    mask: int

    @classmethod
    def of(cls, entry: Entry) -> IndexRecord:
        """The record of an entry."""
        return cls(entry.digest, entry.key, entry.slab.slab_id, entry.slot, entry.generation, entry.mask)

    def place(self) -> bytes:
        """What its value begins with."""
        return _PLACE.pack(self.slab_id, self.slot, self.generation)

    def pack(self) -> bytes:
        """Its value."""
        return _VALUE.pack(self.slab_id, self.slot, self.generation, self.mask.to_bytes(32, "little"))


class Put(NamedTuple):
    """A record to write, and the generation that the table knows under its key (0: none)."""

    record: IndexRecord
    expected: int


class EpochRow(NamedTuple):
    """A generation epoch that was used; `order` counts them up."""

    epoch: int
    order: int


class SlabState(IntEnum):
    """Where a slab is in its life. A process that ends in between leaves MAKING or REMOVING: the file is to go."""

    MAKING = 1
    READY = 2
    REMOVING = 3


class SlabRow(NamedTuple):
    """A slab, and what it counts as."""

    slab_id: int
    state: SlabState
    cost: int  # bytes

    @property
    def is_ready(self) -> bool:
        """Whether its slots can be used."""
        return self.state is SlabState.READY


class MemberRow(NamedTuple):
    """A process that has the root open."""

    seat: int  # the byte of the lock file that it has locked
    epoch: int  # of its generations
    pid: int


class LeaseRow(NamedTuple):
    """Slots that a process has taken and not committed. Which process: the epoch of the generations."""

    epoch: int
    number: int
    slots: Sequence[tuple[int, int, int]]  # (slab, slot, generation)


class UsedRow(NamedTuple):
    """When the slots of a part of a slab were used last: seconds since 1970, 0 where that is not known."""

    slab_id: int
    block: int  # the first of its slots is block * USE_SLOTS
    times: Sequence[int]


Row = IndexRecord | EpochRow | SlabRow | MemberRow | LeaseRow | UsedRow
Item = tuple[bytes, bytes | None]  # the name of a row, and its value; None where it is gone


class EntryName(NamedTuple):
    """What an entry's name says."""

    digest: bytes
    key: bytes


class EpochName(NamedTuple):
    """What an epoch's name says."""

    epoch: int


class SlabName(NamedTuple):
    """What a slab's name says."""

    slab_id: int


class MemberName(NamedTuple):
    """What a member's name says."""

    seat: int


class LeaseName(NamedTuple):
    """What a lease's name says."""

    epoch: int
    number: int


class UsedName(NamedTuple):
    """What the name of times of use says."""

    slab_id: int
    block: int


Name = EntryName | EpochName | SlabName | MemberName | LeaseName | UsedName
_NUMBERED: tuple[tuple[bytes, int, Callable[[int], Name]], ...] = (
    (EPOCHS, 4, EpochName),
    (SLABS, 8, SlabName),
    (MEMBERS, 1, MemberName),
)


def item(row: Row) -> tuple[bytes, bytes]:
    """A row's name and value."""
    match row:
        case IndexRecord():
            return row.digest + row.key, row.pack()
        case EpochRow():
            return EPOCHS + row.epoch.to_bytes(4, "big"), _EPOCH_VALUE.pack(row.order)
        case SlabRow():
            return SLABS + row.slab_id.to_bytes(8, "big"), _SLAB_VALUE.pack(row.state, row.cost)
        case MemberRow():
            return MEMBERS + bytes([row.seat]), _MEMBER_VALUE.pack(row.epoch, row.pid)
        case LeaseRow():
            name = LEASES + row.epoch.to_bytes(4, "big") + row.number.to_bytes(8, "big")
            return name, b"".join([_LEASE_SLOT.pack(*slot) for slot in row.slots])
        case UsedRow():
            return USES + row.slab_id.to_bytes(8, "big") + row.block.to_bytes(4, "big"), _USE_VALUE.pack(*row.times)


def gone(row: Row) -> Item:
    """Says that a row is not there any more."""
    return item(row)[0], None


def parse_name(name: bytes) -> Name | None:
    """What a row is about; None for what is none of these."""
    if len(name) > DIGEST_BYTES:
        fits = len(name) <= DIGEST_BYTES + MAX_KEY_BYTES
        return EntryName(name[:DIGEST_BYTES], name[DIGEST_BYTES:]) if fits else None
    if name.startswith(LEASES) and len(name) == len(LEASES) + 12:
        return LeaseName(int.from_bytes(name[5:9], "big"), int.from_bytes(name[9:], "big"))
    if name.startswith(USES) and len(name) == len(USES) + 12:
        return UsedName(int.from_bytes(name[4:12], "big"), int.from_bytes(name[12:], "big"))
    for prefix, length, make in _NUMBERED:
        if name.startswith(prefix) and len(name) == len(prefix) + length:
            return make(int.from_bytes(name[len(prefix) :], "big"))
    return None


def parse(name: bytes, value: bytes) -> Row | None:
    """A row; None for one that cannot be."""
    try:
        match parse_name(name):
            case EntryName(digest, key):
                slab_id, slot, generation, mask = _VALUE.unpack(value)
                return IndexRecord(digest, key, slab_id, slot, generation, int.from_bytes(mask, "little"))
            case EpochName(epoch):
                return EpochRow(epoch, *_EPOCH_VALUE.unpack(value))
            case SlabName(slab_id):
                state, cost = _SLAB_VALUE.unpack(value)
                return SlabRow(slab_id, SlabState(state), cost)
            case MemberName(seat):
                return MemberRow(seat, *_MEMBER_VALUE.unpack(value))
            case LeaseName(epoch, number):
                return LeaseRow(epoch, number, list(_LEASE_SLOT.iter_unpack(value)))
            case UsedName(slab_id, block):
                return UsedRow(slab_id, block, _USE_VALUE.unpack(value))
            case _:
                return None
    except (struct.error, ValueError):
        return None
