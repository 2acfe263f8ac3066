"""A double of the kernel's admin command for NVMe drives, at the call itself: `ioctl` answers as `fcntl.ioctl` would.

The pages and the command are built from their specifications, field after field, and not from offsets: what kvxfer
takes out of a page at some offset, this has put there by counting up to it.
"""

import ctypes
import json
import os
from pathlib import Path

# struct nvme_admin_cmd of linux/nvme_ioctl.h.
FIELDS = [
    ("opcode", ctypes.c_uint8), ("flags", ctypes.c_uint8), ("rsvd1", ctypes.c_uint16), ("nsid", ctypes.c_uint32),
    ("cdw2", ctypes.c_uint32), ("cdw3", ctypes.c_uint32), ("metadata", ctypes.c_uint64), ("addr", ctypes.c_uint64),
    ("metadata_len", ctypes.c_uint32), ("data_len", ctypes.c_uint32), ("cdw10", ctypes.c_uint32),
    ("cdw11", ctypes.c_uint32), ("cdw12", ctypes.c_uint32), ("cdw13", ctypes.c_uint32), ("cdw14", ctypes.c_uint32),
    ("cdw15", ctypes.c_uint32), ("timeout_ms", ctypes.c_uint32), ("result", ctypes.c_uint32),
]  # fmt: skip


class Command(ctypes.Structure):
    _fields_ = FIELDS


# NVM Express Base Specification, SMART / Health Information: (field, bytes).
SMART = (
    ("critical_warning", 1), ("temperature", 2), ("available_spare", 1), ("spare_threshold", 1), ("percentage_used", 1),
    ("endurance_group_warning", 1), ("", 25), ("units_read", 16), ("units_written", 16), ("read_commands", 16),
    ("write_commands", 16), ("busy_minutes", 16), ("power_cycles", 16), ("power_on_hours", 16),
    ("unsafe_shutdowns", 16), ("media_errors", 16), ("log_entries", 16), ("warning_minutes", 4),
    ("critical_minutes", 4), ("sensors", 16), ("throttled", 16), ("", 280),
)  # fmt: skip

# OCP Datacenter NVMe SSD Specification, SMART / Health Information Extended.
OCP = (
    ("media_written", 16), ("media_read", 16), ("bad_user_blocks", 8), ("bad_system_blocks", 8), ("xor_recoveries", 8),
    ("uncorrectable_reads", 8), ("soft_ecc_errors", 8), ("end_to_end", 8), ("system_used", 1), ("refreshes", 7),
    ("erase_counts", 8), ("throttling", 2), ("specification", 6), ("pcie_errors", 8), ("incomplete_shutdowns", 4),
    ("", 4), ("free_blocks", 1), ("", 7), ("capacitor", 2), ("errata", 6), ("unaligned", 8), ("security_version", 8),
    ("utilization", 8), ("plp_starts", 16), ("endurance", 16), ("", 302), ("version", 2), ("guid", 16),
)  # fmt: skip
GUID = 0xAFD514C97C6F4F9CA4F2BFEA2810AFC5

INVALID_LOG_PAGE = 0x4109  # do not retry; command specific; invalid log page


def page(layout: "tuple[tuple[str, int], ...]", **values: int) -> bytes:
    """The page with these values; each field that is not given has bytes of its own, so that a wrong one shows."""
    body = b""
    for number, (name, size) in enumerate(layout):
        filler = bytes([64 + number]) * size
        body += values.pop(name).to_bytes(size, "little") if name in values else filler
    assert not values and len(body) == 512, (values, len(body))
    return body


def fill(command: bytearray, body: bytes) -> None:
    """Writes where the command says, as the drive does."""
    ctypes.memmove(Command.from_buffer(command).addr, body, len(body))


def ioctl(fd: int, request: int, command: bytearray, mutate: bool = False) -> int:
    """FAKE_NVME says, by the device file's name and the page's number, what comes: JSON {"nvme0": {"2": hex}}."""
    told = json.loads(os.environ["FAKE_NVME"])
    name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
    said = told[name].get(str(Command.from_buffer(command).cdw10 & 0xFF))
    if said is None:
        return INVALID_LOG_PAGE
    fill(command, bytes.fromhex(said))
    return 0
