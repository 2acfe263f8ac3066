"""Slab files: preallocated, a header page and then slots of one layout (docs/format.md, "Slab header")."""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvxfer import _native
from kvxfer.errors import FormatError, IOFault, LayoutError
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import (
    TEMPORARY,
    fault,
    read_upto,
    share,
    sync_directory,
    sys_close,
    sys_fallocate,
    sys_fdatasync,
    sys_ftruncate,
    sys_open,
    sys_rename,
    sys_size,
    try_unlink,
)
from kvxfer.policy import CachePolicy
from kvxfer.slot import ALIGNMENT, SlotLayout
from kvxfer.staging import AlignedBuffer
from kvxfer.store.entry import Entry

SLAB_NAME = re.compile(r"slab-([0-9]{8,19})\.kvx")
_MAGIC = b"KVXSLAB1"
_FAMILY = _MAGIC[:7]
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQQQQQIII")
_HEADER_BYTES = 4096
_CRC_AT = 4092
_MAX_SLOTS = 1 << 32


def slab_name(slab_id: int) -> str:
    """The file's name."""
    return f"slab-{slab_id:08d}.kvx"


def slab_file_bytes(layout: SlotLayout, num_slots: int) -> int:
    """Size of a slab: its header page and its slots."""
    return layout.alignment + num_slots * layout.slot_bytes


def whole_slots(header: SlabHeader, nbytes: int) -> int:
    """Slots that a file of `nbytes` bytes has whole; at most as many as its header says."""
    return min(header.num_slots, max(0, nbytes - header.layout.alignment) // header.layout.slot_bytes)


def slots_for(layout: SlotLayout, slab_bytes: int) -> int:
    """Slots of `layout` in a slab of at most `slab_bytes`; 0 if none fits."""
    return min(_MAX_SLOTS, max(0, slab_bytes - layout.alignment) // layout.slot_bytes)


def pack_header(slab_id: int, layout: SlotLayout, num_slots: int) -> bytes:
    """The header page."""
    fields = _HEADER.pack(
        _MAGIC, _VERSION, layout.alignment, slab_id, num_slots, layout.slot_bytes, layout.segment_bytes,
        layout.last_segment_bytes, layout.segment_stride, layout.num_segments, layout.segments_per_trailer,
        layout.blocks_per_chunk,
    )  # fmt: skip
    body = fields.ljust(_CRC_AT, b"\0")
    return (body + _crc(body).to_bytes(4, "little")).ljust(layout.alignment, b"\0")


def _crc(body: bytes) -> int:
    return int(_native.lib().kvx_crc32c(body, len(body)))


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """What a header page says, once it was believed."""

    slab_id: int
    num_slots: int
    layout: SlotLayout


def parse_header(page: bytes, slab_id: int, alignment: int, name: str) -> SlabHeader | None:
    """The header of the slab that its name and root say it is; None for bytes that no kvxfer left like this.

    Raises:
        FormatError: another version of kvxfer wrote it.
    """
    if len(page) < _HEADER_BYTES or page[:7] != _FAMILY:
        return None
    values = _HEADER.unpack_from(page)
    magic, version, at, found_id, num_slots, slot_bytes, segment, last, stride, segments, per_trailer, blocks = values
    if magic != _MAGIC or version != _VERSION:
        raise FormatError(
            f"{name} is of slab version {version} ({magic!r}); this kvxfer knows version {_VERSION}. "
            "Nothing was changed: use the kvxfer that wrote it, or give another root. If the file is damaged, remove "
            "it: what it held is recomputed"
        )
    if int.from_bytes(page[_CRC_AT:_HEADER_BYTES], "little") != _crc(page[:_CRC_AT]):
        return None
    try:
        layout = SlotLayout(
            segment_bytes=segment, last_segment_bytes=last, num_segments=segments, segments_per_trailer=per_trailer,
            blocks_per_chunk=blocks, alignment=at,
        )  # fmt: skip
    except LayoutError:
        return None
    same = found_id == slab_id and at == alignment and stride == layout.segment_stride
    if not same or slot_bytes != layout.slot_bytes or not 1 <= num_slots <= _MAX_SLOTS:
        return None
    return SlabHeader(slab_id, num_slots, layout)


class SlabFile:
    """An open slab and which of its slots are taken. Slots are handed out and taken back in constant time.

    What changes here belongs to the table's lock.
    """

    __slots__ = (
        "_file", "_freed", "_fresh", "_taken", "doubted", "entries", "file_bytes", "free_slots", "held", "last_used",
        "layout", "lessees", "name", "num_slots", "owners", "path", "policy", "retired", "slab_id", "slot_bytes",
        "stuck", "usable",
    )  # fmt: skip

    policy: CachePolicy[Entry]  # of its layout; set by the table that it is attached to

    def __init__(self, path: Path, file: PosixFile, header: SlabHeader) -> None:
        self.path = path
        self.name = path.name
        self.slab_id = header.slab_id
        self.layout = header.layout
        self.slot_bytes = header.layout.slot_bytes
        self.num_slots = header.num_slots
        self.file_bytes = slab_file_bytes(header.layout, header.num_slots)
        self.usable = header.num_slots  # fewer where the file was cut short and could not be extended
        self.entries: dict[int, Entry] = {}  # by slot; dead ones too, until their slot is free
        self.lessees: dict[int, tuple[int, int]] = {}  # slots that other processes took: the lease they are in
        self.owners: dict[int, int] = {}  # slots that this process took and has not settled: their generations
        self.doubted: set[int] = set()  # generations of `owners` whose bytes may not reach the device any more
        self.held = 0  # pinned entries, reserved and quarantined slots: the file must stay
        self.last_used = 0  # the table's clock at the latest use of any entry
        self.retired = False  # being removed: gives no slots
        self.stuck = False  # could not be removed once
        self.free_slots = 0  # that `take` can still give; none before `occupy`
        self._file = file
        self._taken = bytearray()  # [usable]
        self._fresh = 0  # slots from here on were never given by `take`
        self._freed: list[int] = []  # the free ones below; some twice, and some that were marked since

    @classmethod
    def create(
        cls,
        directory: Path,
        slab_id: int,
        layout: SlotLayout,
        num_slots: int,
        direct: bool,
        sparse: bool = False,
        durable: bool = False,
    ) -> SlabFile:
        """A new slab, all of it preallocated, or (sparse) its header alone. It appears under its name when it is whole.

        Durable: its name outlives a power cut, and with the first `flush` its size and its header.

        Raises:
            IOFault: a call failed (ENOSPC: no room for it); nothing is left behind.
        """
        path = directory / slab_name(slab_id)
        temporary = path.with_name(path.name + TEMPORARY)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        with ExitStack() as undo:
            fd = sys_open(temporary, flags)
            undo.callback(try_unlink, temporary)
            file = PosixFile(fd, path.name, direct)
            undo.callback(file.close)
            share(file.fd, temporary)
            nbytes = slab_file_bytes(layout, num_slots)
            sys_fallocate(file.fd, layout.alignment if sparse else nbytes, temporary)
            if sparse:
                sys_ftruncate(file.fd, nbytes, temporary)
            page = AlignedBuffer(layout.alignment, layout.alignment)
            page.array[:] = np.frombuffer(pack_header(slab_id, layout, num_slots), dtype=np.uint8)
            file.write(page.array)
            sys_rename(temporary, path)
            if durable:
                undo.callback(try_unlink, path)
                sync_directory(directory)
            undo.pop_all()
        slab = cls(path, file, SlabHeader(slab_id, num_slots, layout))
        slab.occupy(set())
        return slab

    @classmethod
    def open(cls, found: FoundSlab, header: SlabHeader, direct: bool) -> SlabFile:
        """A slab that `scan_directory` found.

        Raises:
            IOFault: it cannot be opened.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        return cls(found.path, PosixFile(sys_open(found.path, flags), found.path.name, direct), header)

    def slot_offset(self, slot: int) -> int:
        """Where a slot starts in the file."""
        return self.layout.alignment + slot * self.slot_bytes

    @property
    def handle(self) -> int:
        """Address of its kvx_file.

        Raises:
            StoreError: it is closed.
        """
        return self._file.handle

    def take(self) -> int:
        """A free slot; the one freed last, which the caches are likeliest to know. Pre: free_slots > 0."""
        while self._freed:
            if not self._taken[slot := self._freed.pop()]:
                break
        else:
            while self._taken[self._fresh]:
                self._fresh += 1
            slot, self._fresh = self._fresh, self._fresh + 1
        self._taken[slot] = 1
        self.free_slots -= 1
        return slot

    def mark(self, slot: int) -> bool:
        """Another process has taken it; False if it was taken already, or cannot be used here."""
        if slot >= len(self._taken) or self._taken[slot]:
            return False
        self._taken[slot] = 1
        self.free_slots -= 1
        return True

    def free(self, slot: int) -> bool:
        """Takes a slot back; False if it was free already."""
        if slot >= len(self._taken) or not self._taken[slot]:
            return False
        self._taken[slot] = 0
        self.free_slots += 1
        if slot < self._fresh:
            self._freed.append(slot)
            if len(self._freed) > 2 * self.usable:
                self._freed = [slot for slot in dict.fromkeys(self._freed) if not self._taken[slot]]
        return True

    def occupy(self, slots: set[int]) -> None:
        """Says how many slots can be used (`usable`) and which are taken. Pre: none was taken or freed yet."""
        self._taken = bytearray(self.usable)
        for slot in slots:
            self._taken[slot] = 1
        self.free_slots = self.usable - len(slots)
        self._fresh = max(slots) + 1 if slots else 0
        self._freed = [slot for slot in range(self._fresh - 1, -1, -1) if slot not in slots]

    def read(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> int:
        """Reads in the calling thread; the bytes moved.

        Raises:
            IOFault: the call failed.
        """
        return self._file.read(buffer.array, nbytes, offset)

    def flush(self) -> None:
        """Waits until what was written so far, by whomever, is on the device.

        Raises:
            IOFault: it may not be, nor ever be, even if a later flush works: the kernel reports what it lost once.
        """
        sys_fdatasync(self._file.fd, self.path)

    def write(self, buffer: AlignedBuffer, offset: int) -> None:
        """Writes all of the buffer in the calling thread.

        Raises:
            IOFault: the call failed.
        """
        self._file.write(buffer.array, len(buffer), offset)

    def is_named(self) -> bool:
        """Whether its file is still the one under its name."""
        try:
            named, mine = os.stat(self.path), os.fstat(self._file.fd)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Drops the file; jobs that still use it keep it open."""
        self._file.close()

    def __repr__(self) -> str:
        return f"SlabFile({self.name}, {self.num_slots} slots of {self.layout.slot_bytes})"


@dataclass(frozen=True, slots=True)
class FoundSlab:
    """A file in slabs/ with a slab's name. Without header: nobody's bytes, or (error) it could not be read now."""

    path: Path
    slab_id: int
    size: int  # bytes
    blocks: int  # bytes that the file system gave it
    header: SlabHeader | None
    error: str = ""


def scan_directory(directory: Path, alignment: int) -> tuple[list[FoundSlab], list[Path]]:
    """All slabs by number, and what creations that never ended left behind. Changes nothing.

    Raises:
        FormatError: a slab is of another version.
        IOFault: the directory cannot be read.
    """
    found: list[FoundSlab] = []
    leftovers: list[Path] = []
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        names = []
    except OSError as exc:
        raise fault(exc.errno or errno.EIO, "cannot list slabs", directory) from exc
    for name in names:
        path = directory / name
        if name.endswith(TEMPORARY) and SLAB_NAME.fullmatch(name.removesuffix(TEMPORARY)):
            leftovers.append(path)
        elif match := SLAB_NAME.fullmatch(name):
            found.append(inspect_slab(path, int(match[1]), alignment))
    return sorted(found, key=lambda slab: slab.slab_id), leftovers


def inspect_slab(path: Path, slab_id: int, alignment: int) -> FoundSlab:
    """What lies at `path`. Changes nothing.

    Raises:
        FormatError: it is of another version.
    """
    size = blocks = 0
    try:
        status = os.lstat(path)
        size, blocks = status.st_size, status.st_blocks * 512
        if not stat.S_ISREG(status.st_mode):
            return FoundSlab(path, slab_id, size, blocks, None, f"{path} is no regular file")
        fd = sys_open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            page = read_upto(fd, ALIGNMENT, 0, path)
        finally:
            sys_close(fd)
    except OSError as exc:
        return FoundSlab(path, slab_id, size, blocks, None, str(exc))
    header = parse_header(page, slab_id, alignment, path.name)
    return FoundSlab(path, slab_id, size, blocks, header if path.name == slab_name(slab_id) else None)


def restore_size(found: FoundSlab, header: SlabHeader) -> tuple[int, int]:
    """Brings a slab's file back to the size that its header says.

    Returns:
        (slots that were whole before, slots that can be used now).

    Raises:
        IOFault: it cannot be opened.
    """
    wanted = slab_file_bytes(header.layout, header.num_slots)
    whole = whole_slots(header, found.size)
    if found.size == wanted and found.blocks >= wanted:
        return whole, header.num_slots
    fd = sys_open(found.path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if found.size > wanted:
            sys_ftruncate(fd, wanted, found.path)
        sys_fallocate(fd, wanted, found.path)
        return whole, header.num_slots
    except IOFault:
        # No room to extend it, or to fill its holes: what is there can be used.
        now = sys_size(fd, found.path)
        return whole, whole_slots(header, now)
    finally:
        sys_close(fd)


class SlotClass:
    """The slabs of one slot layout, and the order in which their entries would go."""

    __slots__ = ("available", "layout", "policy", "rotor", "slabs")

    def __init__(self, layout: SlotLayout, policy: CachePolicy[Entry]) -> None:
        self.layout = layout
        self.policy = policy
        self.slabs: list[SlabFile] = []
        self.available: list[SlabFile] = []  # with a free slot; the first `writers` of them take turns
        self.rotor = 0
