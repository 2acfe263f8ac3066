"""What NVMe drives themselves say of their wear: how much was written to them, and how much they wrote inside.

Two log pages. SMART / Health Information (02h; every NVMe drive has it) counts what all hosts wrote, ever, and says how
much of the drive's life is used. OCP's SMART log (C0h; most drives for data centres have it) counts what reached the
media. Their quotient is the drive's own write amplification since it was made. Both are of the whole drive: of all its
namespaces, partitions and users.

Asking is an admin command: it needs CAP_SYS_ADMIN, and waits for the drive, however sick that is. So it is done where
somebody asked for it (`kvxfer doctor`), in a process of its own with a time limit, and never by a store or an engine.
What is not known is None, and `why` has the reason; nothing here raises.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvxfer import probe
from kvxfer.topology import SYSFS, controllers_of, disks_under

DEV = Path("/dev")
WARNINGS = (  # bits of SMART's critical warning
    "the spare is below its threshold",
    "the temperature is beyond its threshold",
    "its reliability is degraded",
    "its media are read-only",
    "the backup of its volatile memory has failed",
)
_AT_ONCE = 8  # children

# linux/nvme_ioctl.h: struct nvme_admin_cmd and NVME_IOCTL_ADMIN_CMD, _IOWR('N', 0x41, 72 bytes).
_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
_ADMIN_CMD = 3 << 30 | _COMMAND.size << 16 | ord("N") << 8 | 0x41
_GET_LOG_PAGE, _ALL_NAMESPACES = 0x02, 0xFFFFFFFF
_SMART, _OCP, _LOG_BYTES = 0x02, 0xC0, 512
_UNIT = 1000 * 512  # of SMART's data units, rounded up by the drive
_OCP_GUID = bytes.fromhex("AFD514C97C6F4F9CA4F2BFEA2810AFC5")[::-1]  # the last 16 bytes of such a page
_NEVER = 1 << 70  # bytes that no drive writes in its life
_STATUS = 0x7FF  # code and type of an NVMe status


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveWear:
    """One controller. Bytes since the drive was made; None: not known."""

    controller: str  # "nvme0"
    host_written_bytes: int | None = None
    media_written_bytes: int | None = None
    percentage_used: int | None = None  # of what it is rated for; 100: all of it, 255: that and more
    available_spare: int | None = None  # percent
    spare_threshold: int | None = None
    media_errors: int | None = None  # that it could not correct
    critical_warning: int | None = None  # WARNINGS, by bits
    why: str = "not asked"  # what is not known, and why

    @property
    def amplification(self) -> float | None:
        """Written inside by written to it; below 1 where the drive compresses."""
        return _quotient(self.media_written_bytes, self.host_written_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """The drives under a directory."""

    drives: tuple[DriveWear, ...] = ()
    why: str = ""  # why not all of the directory's disks are among them

    @property
    def amplification(self) -> float | None:
        """Of the drives together; None where one of them does not tell, or is not among them."""
        return _quotient(self._sum("media_written_bytes"), self._sum("host_written_bytes"))

    def _sum(self, name: str) -> int | None:
        each = [getattr(drive, name) for drive in self.drives]
        return None if self.why or None in each else sum(each)

    def as_json(self) -> dict[str, Any]:
        """All of it, amplification included."""
        drives = [asdict(drive) | {"amplification": drive.amplification} for drive in self.drives]
        return {"drives": drives, "amplification": self.amplification, "why": self.why}


def _quotient(media: int | None, host: int | None) -> float | None:
    return media / host if media is not None and host else None


def drives_under(path: Path, sysfs: Path = SYSFS, device: tuple[int, int] | None = None) -> Wear:
    """The controllers of the drives under a directory, not asked yet, each once. May hang where the mount is dead.

    Args:
        sysfs, device: for tests, as `topology.drive_of`'s.
    """
    disks, why = disks_under(path, sysfs, device)
    found: dict[str, DriveWear] = {}
    whys = [why] if why else []
    for disk in disks:
        try:
            names = [place.name for place in controllers_of(disk)]
        except OSError as exc:
            whys.append(f"the controllers of {disk.name} cannot be listed: {exc}")
            continue
        if len(names) == 1:
            found[names[0]] = DriveWear(controller=names[0])
        elif names:  # each may count what went through it alone
            whys.append(f"{disk.name} has several controllers: which of them counts what is not known")
        else:
            whys.append(f"{disk.name} is no NVMe drive")
    return Wear(drives=tuple(found.values()), why="; ".join(whys))


def ask_wear(known: Wear, timeout_s: float = probe.TIMEOUT_S, dev: Path = DEV) -> Wear:
    """Asks each of these drives, in a process of its own: one that hangs costs `timeout_s` seconds, and no other drive.

    Args:
        dev: for tests.
    """

    def ask(drive: DriveWear) -> DriveWear:
        code = f"from kvxfer.drive_wear import read_logs\nanswer(read_logs({str(dev / drive.controller)!r}))"
        answer = probe.ask(code, timeout_s)
        said = {"why": answer.why} if answer.said is None else answer.said
        return DriveWear(controller=drive.controller, **said)

    if not known.drives:
        return known
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return Wear(drives=tuple(pool.map(ask, known.drives)), why=known.why)


# ---- in a child ----------------------------------------------------------------------------------------


class _Unknown(Exception):
    """Why a log page is not there."""


def read_logs(path: str) -> dict[str, Any]:
    """The fields of a DriveWear, by the controller's file. As long as the drive takes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        return {"why": _refusal(exc, path)}
    try:
        try:
            found = smart(_log_page(fd, path, _SMART))
        except _Unknown as exc:
            return {"why": str(exc)}
        try:
            return found | {"media_written_bytes": media_written(_log_page(fd, path, _OCP)), "why": ""}
        except _Unknown as exc:
            return found | {"why": f"what it writes inside is not known: {exc}"}
    finally:
        os.close(fd)


def _log_page(fd: int, path: str, page: int) -> bytes:
    # Filled with ones, so that what the drive did not write is no plausible figure.
    data = ctypes.create_string_buffer(b"\xff" * _LOG_BYTES, _LOG_BYTES)
    length = (_LOG_BYTES // 4 - 1) << 16  # in dwords, less one
    # The last but one is the time limit: 0, the kernel's own. A shorter one would have it abort the command and then
    # reset the controller, under everybody's reads and writes.
    command = bytearray(
        _COMMAND.pack(_GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0, 0, ctypes.addressof(data), 0, _LOG_BYTES,
                      page | length, 0, 0, 0, 0, 0, 0, 0)
    )  # fmt: skip
    try:
        status = fcntl.ioctl(fd, _ADMIN_CMD, command, True)
    except OSError as exc:
        raise _Unknown(_refusal(exc, path)) from exc
    if status:
        raise _Unknown(f"the drive gives no log page {page:02X}h (status {status & _STATUS:#05x})")
    return data.raw


def _refusal(exc: OSError, path: str) -> str:
    if exc.errno in (errno.EACCES, errno.EPERM):
        return f"{path} answers root alone (CAP_SYS_ADMIN)"
    if exc.errno == errno.ENOENT:
        return f"there is no {path} here (a container has the devices that it was given)"
    if exc.errno == errno.ENOTTY:
        return f"{path} is no NVMe controller"
    return f"{path}: {exc.strerror}"


def smart(page: bytes) -> dict[str, Any]:
    """What log page 02h says.

    Raises:
        _Unknown: no drive can say that.
    """
    spare, threshold, used = page[3], page[4], page[5]
    written = int.from_bytes(page[48:64], "little") * _UNIT
    if spare > 100 or threshold > 100 or written >= _NEVER or not any(page):
        raise _Unknown("its log page 02h makes no sense")
    return {
        "host_written_bytes": written,
        "percentage_used": used,
        "available_spare": spare,
        "spare_threshold": threshold,
        "media_errors": int.from_bytes(page[160:176], "little"),
        "critical_warning": page[0],
    }


def media_written(page: bytes) -> int:
    """Bytes, by log page C0h.

    Raises:
        _Unknown: it is none of OCP's: the number is free for any maker.
    """
    written = int.from_bytes(page[:16], "little")
    if page[-16:] != _OCP_GUID:
        raise _Unknown("its log page C0h is not OCP's")
    if written >= _NEVER:
        raise _Unknown("its log page C0h makes no sense")
    return written


def warnings(bits: int) -> list[str]:
    """A critical warning in words."""
    named = [text for bit, text in enumerate(WARNINGS) if bits >> bit & 1]
    rest = bits >> len(WARNINGS) << len(WARNINGS)
    return named + ([f"warning {rest:#04x}"] if rest else [])
