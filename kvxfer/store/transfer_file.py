"""The file into which a namespace is exported (docs/format.md, "An exported namespace"): header, slots, end.

Nothing that is read is believed before it was checked, and nothing in it names a file.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvxfer import _native
from kvxfer.errors import ConfigError, FormatError, KvxferError
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import read_upto, sys_close, sys_open
from kvxfer.keys import Namespace
from kvxfer.slot import SlotLayout, round_up
from kvxfer.staging import AlignedBuffer
from kvxfer.store.root import MAX_ALIGNMENT

MAGIC, END = b"KVXPORT1", b"KVXPEND1"
VERSION = 1
_HEAD = struct.Struct("<8sII")  # magic, version, bytes of the text
_END = struct.Struct("<8sQ")  # magic, slots
_CRC_BYTES = 4
END_BYTES = _END.size + _CRC_BYTES
MAX_TEXT = 1 << 17


@dataclass(frozen=True, slots=True)
class Heading:
    """What a file begins with."""

    namespace: Namespace
    weight_epoch: int  # of the root that it is from
    layout: SlotLayout  # of its slots

    @property
    def digest(self) -> bytes:
        """The namespace's, in the root that it is from."""
        return self.namespace.digest(self.weight_epoch)


def _crc(data: bytes) -> bytes:
    return int(_native.lib().kvx_crc32c(data, len(data))).to_bytes(_CRC_BYTES, "little")


def pack_heading(heading: Heading) -> bytes:
    """The file's first bytes, up to where the slots begin."""
    body = {
        "namespace": heading.namespace.as_json(), "weight_epoch": heading.weight_epoch, "slot": asdict(heading.layout),
    }  # fmt: skip
    text = json.dumps(body).encode()
    if len(text) > MAX_TEXT:
        raise ConfigError(f"the namespace's fields take {len(text)} bytes; {MAX_TEXT} fit into an export")
    head = _HEAD.pack(MAGIC, VERSION, len(text)) + text
    return (head + _crc(head)).ljust(round_up(len(head) + _CRC_BYTES, heading.layout.alignment), b"\0")


def pack_end(slots: int) -> bytes:
    """The file's last bytes."""
    body = _END.pack(END, slots)
    return body + _crc(body)


class ExportReader:
    """An exported file, open for reading."""

    def __init__(self, path: Path) -> None:
        """Opens it and reads its heading.

        Raises:
            FormatError: it is no such file, of another version, or its heading is damaged.
            IOFault: it cannot be read, or is no regular file.
        """
        self.path = path
        fd = sys_open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is no regular file")
            self.size = status.st_size
            self.heading, self._start = _read_heading(fd, path)
            self.slots, self.complete = self._count(fd)
        except BaseException:
            sys_close(fd)
            raise
        self._file = PosixFile(fd, str(path), False)

    def _count(self, fd: int) -> tuple[int, bool]:
        """(whole slots that lie in the file, whether the file says that these are all)."""
        slot_bytes = self.heading.layout.slot_bytes
        room = max(0, self.size - self._start)
        count, over = divmod(room - END_BYTES, slot_bytes) if room >= END_BYTES else (0, 1)
        if over == 0 and read_upto(fd, END_BYTES, self.size - END_BYTES, self.path) == pack_end(count):
            return count, True
        return room // slot_bytes, False

    def images(self) -> Iterator[AlignedBuffer]:
        """The slots, one after the other, in one buffer; fewer where the file has become shorter. Nothing is checked.

        Raises:
            IOFault: the file cannot be read.
        """
        layout = self.heading.layout
        if not self.slots:  # what a slot claims to be may be more than there is memory
            return
        buffer = AlignedBuffer(layout.slot_bytes, layout.alignment)
        for number in range(self.slots):
            if (
                self._file.read(buffer.array, layout.slot_bytes, self._start + number * layout.slot_bytes)
                < layout.slot_bytes
            ):
                return
            yield buffer

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _read_heading(fd: int, path: Path) -> tuple[Heading, int]:
    head = read_upto(fd, _HEAD.size, 0, path)
    if len(head) < _HEAD.size or head[:7] != MAGIC[:7]:
        raise FormatError(f"{path} is no exported namespace")
    magic, version, length = _HEAD.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise FormatError(f"{path} is an export of version {version} ({magic!r}); this kvxfer knows version {VERSION}")
    if length > MAX_TEXT:
        raise FormatError(f"{path} claims a heading of {length} bytes; {MAX_TEXT} are allowed: damaged")
    rest = read_upto(fd, length + _CRC_BYTES, _HEAD.size, path)
    text = rest[:length]
    if len(rest) < length + _CRC_BYTES or rest[length:] != _crc(head + text):
        raise FormatError(f"{path} has a damaged heading")
    try:
        heading = _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KvxferError) as exc:
        raise FormatError(f"{path} has a heading that cannot be: {exc}") from None
    return heading, round_up(_HEAD.size + length + _CRC_BYTES, heading.layout.alignment)


def _parse(body: Any) -> Heading:
    epoch = body["weight_epoch"]
    if type(epoch) is not int or not 0 <= epoch < 1 << 63:
        raise ConfigError(f"weight_epoch={epoch!r}")
    slot = body["slot"]
    if any(type(value) is not int for value in slot.values()):
        raise ConfigError("slot has values that are no integers")
    layout = SlotLayout(**slot)
    if layout.alignment > MAX_ALIGNMENT or layout.num_segments >= 1 << 32:
        raise ConfigError(f"alignment={layout.alignment}, num_segments={layout.num_segments}")
    return Heading(Namespace.from_json(body["namespace"]), epoch, layout)
