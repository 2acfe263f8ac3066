"""How files of a directory are best opened: found out by trying, with a reason for every step down."""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvxfer.errors import ConfigError, IOFault
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import TEMPORARY, fault, sys_close, sys_dioalign, sys_fallocate, sys_open, sys_unlink
from kvxfer.slot import ALIGNMENT
from kvxfer.staging import AlignedBuffer

PROBE_NAME = re.compile(r"\.kvx-probe-[0-9a-f]{16}\.tmp")
PROBE_TIMEOUT_S = 10.0
_PAGES = 4

# What mountinfo calls file systems whose bytes lie on another machine, or that answer for one.
NETWORK_FILESYSTEMS = frozenset(
    "9p afs afpfs beegfs ceph cifs coda davfs fuse.ceph fuse.ceph-fuse fuse.davfs fuse.gcsfuse fuse.glusterfs "
    "fuse.juicefs fuse.mount-s3 fuse.nfs fuse.rclone fuse.s3fs fuse.smbnetfs fuse.sshfs gfs gfs2 glusterfs gpfs "
    "lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb2 smb3 smbfs vboxsf virtiofs wekafs".split()
)

PATHS = ("posix direct", "posix buffered", "uring direct", "uring buffered")  # IOMode.name
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class IOMode:
    """How to open files of one directory."""

    direct: bool  # with O_DIRECT
    alignment: int  # of buffers, sizes and offsets; a power of two of at least 4096
    why: str  # what was found, and the reason for each step down
    backend: str = "posix"  # posix | uring: how an engine's jobs move bytes (io/uring.py)

    @property
    def name(self) -> str:
        """Such as "posix direct": one of PATHS."""
        return f"{self.backend} {'direct' if self.direct else 'buffered'}"


def nearest(path: Path) -> Path:
    """The path, or of what it lies in the nearest directory that exists: where what is to be made there is tried."""
    while not path.exists():
        path = path.parent
    return path


def probe_mode(directory: Path, direct: str = "auto", timeout_s: float | None = None) -> IOMode:
    """Tries direct I/O in `directory`: opens a file with O_DIRECT, preallocates it, writes, reads back and compares.

    Args:
        directory: an existing one; a temporary file is made there and removed.
        direct: auto, on (it must work) or off (it is not tried).
        timeout_s: how long a try may take before it counts as failed.

    Raises:
        ConfigError: `direct` is unknown, or "on" where direct I/O does not work.
        IOFault: buffered I/O does not work either.
    """
    if direct not in ("auto", "on", "off"):
        raise ConfigError(f"direct={direct!r} must be one of auto, on, off")
    timeout = PROBE_TIMEOUT_S if timeout_s is None else timeout_s
    steps = []
    if direct == "off":
        steps.append("direct I/O off: configured")
    else:
        tried = _bounded(directory, True, timeout)
        if isinstance(tried, IOMode):
            return tried
        steps.append(f"direct I/O off: {tried}")
        if direct == "on":
            raise ConfigError(f"direct='on', but direct I/O does not work in {directory}: {tried}; use auto or off")
    tried = _bounded(directory, False, timeout)
    if isinstance(tried, OSError):
        raise IOFault(tried.errno or errno.EIO, f"cannot store files: {tried.strerror}", str(directory))
    return IOMode(tried.direct, tried.alignment, "; ".join([*steps, tried.why]))


def _bounded(directory: Path, direct: bool, timeout_s: float) -> IOMode | OSError:
    """`_try` on a thread that is left behind if it does not come back: a call on a dead device cannot be ended."""
    answer: list[IOMode | Exception] = []

    def attempt() -> None:
        try:
            answer.append(_try(directory, direct))
        except Exception as exc:  # whatever it is, it belongs to the caller and not to this thread
            answer.append(exc)

    thread = threading.Thread(target=attempt, name="kvx-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answer:
        return fault(errno.ETIMEDOUT, f"no answer within {timeout_s:g} s", directory)
    if isinstance(answer[0], IOMode | OSError):
        return answer[0]
    raise answer[0]


def _try(directory: Path, direct: bool) -> IOMode:
    path = directory / f".kvx-probe-{secrets.token_hex(8)}{TEMPORARY}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = sys_open(path, flags)
    try:
        sys_unlink(path)  # nothing is left behind, however this ends
        asked = sys_dioalign(fd)
        alignment = max(ALIGNMENT, asked or 0)
        if alignment & (alignment - 1):
            raise fault(errno.EINVAL, f"an alignment of {alignment} is no power of two", path)
        if (full := _allocate(fd, _PAGES * alignment, path)) is not None:
            # Serving what is there must not wait for room. Without a try, the kernel's word has to do.
            sys_close(fd)
            return IOMode(direct and asked is not None, alignment, f"not tried: {full.strerror}")
    except BaseException:
        sys_close(fd)
        raise
    with PosixFile(fd, path.name, direct) as file:
        _write_and_compare(file, alignment)
    if not direct:
        return IOMode(False, alignment, "buffered I/O works")
    said = f"statx asks for {asked}" if asked else "statx does not say, taken as " + str(ALIGNMENT)
    return IOMode(True, alignment, f"direct I/O works, aligned to {alignment} ({said})")


def _allocate(fd: int, nbytes: int, path: Path) -> IOFault | None:
    """Preallocates; the fault if the disk is full."""
    try:
        sys_fallocate(fd, nbytes, path)
    except IOFault as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return exc
    return None


def _write_and_compare(file: PosixFile, alignment: int) -> None:
    out, back = (AlignedBuffer(_PAGES * alignment, alignment) for _ in range(2))
    out.array[:] = np.frombuffer(secrets.token_bytes(len(out)), dtype=np.uint8)
    for page in (2, 0, 3, 1):
        piece = slice(page * alignment, (page + 1) * alignment)
        file.write(out.array[piece], file_offset=piece.start)
    moved = file.read(back.array)
    if moved != len(back) or not np.array_equal(out.array, back.array):
        raise fault(errno.EIO, f"{moved} of {len(back)} bytes came back, and not as written", file.label)


def filesystem_type(path: Path, mountinfo: str | None = None) -> str:
    """The type of the file system that `path` (or its nearest existing parent) is on; "unknown" if none is listed.

    `mountinfo` is the text of /proc/self/mountinfo, for tests.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return "unknown"
    place = os.path.realpath(path)
    best, found = -1, "unknown"
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5 or not right:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:  # a later mount on the same place hides the earlier one
            best, found = len(mount), right.split(" ")[0]
    return found


def in_memory(path: Path) -> bool:
    """Whether the files at `path` are pages of memory, so that reads and writes are copies."""
    return filesystem_type(path) in MEMORY_FILESYSTEMS


def refuse_network(path: Path, mountinfo: str | None = None) -> None:
    """Raises ConfigError if `path` is on another machine's file system: locks and mapped pages are not safe there."""
    if (kind := filesystem_type(path, mountinfo)) in NETWORK_FILESYSTEMS:
        raise ConfigError(
            f"root={path} is on {kind}, a network file system; a store needs a local one (ext4, xfs, ...)"
        )
