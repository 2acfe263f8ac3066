"""The calls with which a store opens, reads, writes, syncs, names and removes its files, over libkvx's table of system
calls, so that each of them can be made to fail in tests. All raise IOFault.

Not in the table: what looks (stat, listing a directory, whether a path is there) or removes an empty directory, which
Python calls itself, and what LMDB does to its file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

from kvxfer import _native
from kvxfer.errors import IOFault

PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
SHARED_FILE, SHARED_DIRECTORY = 0o660, 0o2770
TEMPORARY = ".tmp"
_CHUNK = 1 << 20


def fault(code: int, what: str, path: str | os.PathLike[str]) -> IOFault:
    """The IOFault for an errno (of either sign)."""
    return IOFault(abs(code), f"{what}: {os.strerror(abs(code))}", os.fspath(path))


def sys_open(path: Path, flags: int, mode: int = PRIVATE_FILE) -> int:
    """A descriptor, closed on exec."""
    fd = int(_native.lib().kvx_sys_open(os.fsencode(path), flags | os.O_CLOEXEC, mode))
    if fd < 0:
        raise fault(fd, "open", path)
    return fd


def sys_close(fd: int) -> None:
    """Closes `fd`; whatever the call answers, it is closed."""
    _native.lib().kvx_sys_close(fd)


def sys_mkdir(path: Path) -> None:
    """Makes one directory for the owner alone; fine if it is there."""
    result = int(_native.lib().kvx_sys_mkdir(os.fsencode(path), PRIVATE_DIRECTORY))
    if result < 0 and not (result == -errno.EEXIST and path.is_dir()):
        raise fault(result, "mkdir", path)


def mkdir_within(path: Path) -> None:
    """`sys_mkdir` in a root: the new directory is as shared as the one it is in (`share`)."""
    there = path.is_dir()
    sys_mkdir(path)
    if not there and is_shared(path.parent):
        os.chmod(path, SHARED_DIRECTORY)


def is_shared(directory: Path) -> bool:
    """Whether somebody made a directory for its group: setgid, and the group may do everything (mode 2770)."""
    try:
        return os.stat(directory).st_mode & 0o2070 == 0o2070
    except OSError:
        return False


def share(fd: int, path: Path) -> None:
    """Lets the group read and write a new file in a directory that was made for the group; else it stays the owner's.

    Raises:
        IOFault: that failed.
    """
    if is_shared(path.parent):
        try:
            os.fchmod(fd, SHARED_FILE)
        except OSError as exc:
            raise fault(exc.errno or errno.EIO, "chmod", path) from exc


def share_path(path: Path) -> None:
    """`share`, of a file that is named."""
    if is_shared(path.parent) and stat.S_IMODE(os.stat(path).st_mode) != SHARED_FILE:  # else it may be another user's
        os.chmod(path, SHARED_FILE)


def check_plain(path: Path) -> None:
    """Raises IOFault where there is something at `path` that is no regular file: a link, a pipe, a directory."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as exc:
        raise fault(exc.errno or errno.EIO, "lstat", path) from exc
    if not stat.S_ISREG(mode):
        raise fault(errno.ELOOP if stat.S_ISLNK(mode) else errno.EINVAL, "no regular file", path)


def sys_unlink(path: Path) -> None:
    """Removes a file; fine if it is gone."""
    result = int(_native.lib().kvx_sys_unlink(os.fsencode(path)))
    if result < 0 and result != -errno.ENOENT:
        raise fault(result, "unlink", path)


def try_unlink(path: Path) -> IOFault | None:
    """Removes a file; what went wrong, if something did."""
    try:
        sys_unlink(path)
    except IOFault as exc:
        return exc
    return None


def sys_rename(source: Path, target: Path) -> None:
    """Replaces `target`."""
    if (result := int(_native.lib().kvx_sys_rename(os.fsencode(source), os.fsencode(target)))) < 0:
        raise fault(result, "rename", source)


def sys_fallocate(fd: int, nbytes: int, path: Path) -> None:
    """Gives the file blocks for its first `nbytes` bytes, at least that size, and keeps what it holds."""
    if (result := _retried("kvx_sys_fallocate", fd, nbytes)) < 0:
        raise fault(result, f"fallocate of {nbytes} bytes", path)


def sys_ftruncate(fd: int, nbytes: int, path: Path) -> None:
    """Cuts or extends the file."""
    if (result := _retried("kvx_sys_ftruncate", fd, nbytes)) < 0:
        raise fault(result, f"ftruncate to {nbytes} bytes", path)


def sys_fsync(fd: int, path: Path) -> None:
    """Waits until the file's bytes, and all that the file system keeps of it, are on the device."""
    if (result := int(_native.lib().kvx_sys_fsync(fd))) < 0:
        raise fault(result, "fsync", path)


def sys_fdatasync(fd: int, path: str | os.PathLike[str]) -> None:
    """As `sys_fsync`, but for what reading the file does not need (its times). Not for directories."""
    if (result := int(_native.lib().kvx_sys_fdatasync(fd))) < 0:
        raise fault(result, "fdatasync", path)


def sys_size(fd: int, path: Path) -> int:
    """The file's size."""
    if (result := int(_native.lib().kvx_sys_size(fd))) < 0:
        raise fault(result, "fstat", path)
    return result


def sys_lock(fd: int, offset: int, path: Path) -> bool:
    """Takes the lock on one byte, if no other open file has it. It ends when `fd` (and its copies) are closed."""
    return _lock(fd, offset, _native.LOCK_TRY, path)


def sys_unlock(fd: int, offset: int, path: Path) -> None:
    """Gives it back."""
    _lock(fd, offset, _native.LOCK_DROP, path)


def sys_locked(fd: int, offset: int, path: Path) -> bool:
    """Whether another open file has the lock on that byte."""
    return not _lock(fd, offset, _native.LOCK_TEST, path)


def _lock(fd: int, offset: int, operation: int, path: Path) -> bool:
    result = int(_native.lib().kvx_sys_lock(fd, offset, operation))
    if result < 0 and result != -errno.EWOULDBLOCK:
        raise fault(result, "lock", path)
    return result >= 0


def sys_dioalign(fd: int) -> int | None:
    """What statx asks of direct I/O on this file (the larger of memory and offset); None where it does not say."""
    memory, offset = ctypes.c_uint32(), ctypes.c_uint32()
    result = _native.lib().kvx_sys_dioalign(fd, ctypes.byref(memory), ctypes.byref(offset))
    return max(int(memory.value), int(offset.value)) if result >= 0 else None


def _retried(name: str, fd: int, nbytes: int) -> int:
    while (result := int(getattr(_native.lib(), name)(fd, nbytes))) == -errno.EINTR:
        pass
    return result


def write_all(fd: int, data: bytes | memoryview, offset: int, path: Path) -> None:
    """Writes all of `data` at `offset`, over as many calls as it takes."""
    moved = 0
    while moved < len(data):
        left = bytes(data[moved : moved + _CHUNK])
        result = int(_native.lib().kvx_sys_pwrite(fd, left, len(left), offset + moved))
        if result == -errno.EINTR:
            continue
        if result <= 0:
            raise fault(result or errno.EIO, f"write: {moved} of {len(data)} bytes at offset {offset:#x}", path)
        moved += result


def read_upto(fd: int, nbytes: int, offset: int, path: Path) -> bytes:
    """The `nbytes` bytes at `offset`; fewer where the file ends."""
    parts, moved = [], 0
    while moved < nbytes:
        want = min(_CHUNK, nbytes - moved)
        part = ctypes.create_string_buffer(want)
        result = int(_native.lib().kvx_sys_pread(fd, part, want, offset + moved))
        if result == -errno.EINTR:
            continue
        if result < 0:
            raise fault(result, f"read: {moved} of {nbytes} bytes at offset {offset:#x}", path)
        if result == 0:
            break
        parts.append(part.raw[:result])
        moved += result
    return b"".join(parts)


def read_small(path: Path, limit: int = _CHUNK) -> bytes | None:
    """A small file's bytes (at most `limit`); None if there is no such file.

    Raises:
        IOFault: it cannot be read, or is no file but something that could keep its reader waiting.
    """
    try:
        fd = sys_open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except IOFault as exc:
        if exc.errno == errno.ENOENT:
            return None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise fault(errno.EINVAL, "no regular file", path)
        return read_upto(fd, limit, 0, path)
    finally:
        sys_close(fd)


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Makes `data` the contents of `path`: a reader finds the old ones or the new ones, never a mixture.

    Durable: the same holds after the machine went down, and the new ones are on the device when this returns.

    Raises:
        IOFault: it failed; the old file is as it was and the temporary one is gone. Where only the directory could not
            be put on the device, the new one is there, until the machine goes down at least.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        fd = sys_open(temporary, flags)
    except IOFault as exc:
        if exc.errno != errno.EEXIST:
            raise
        sys_unlink(temporary)  # left by a process that was killed, or another's link: not written through
        fd = sys_open(temporary, flags)
    try:
        try:
            share(fd, temporary)
            write_all(fd, data, 0, temporary)
            if durable:
                sys_fsync(fd, temporary)
        finally:
            sys_close(fd)
        sys_rename(temporary, path)
    except IOFault:
        _native.lib().kvx_sys_unlink(os.fsencode(temporary))
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the device."""
    fd = sys_open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sys_fsync(fd, path)
    finally:
        sys_close(fd)
