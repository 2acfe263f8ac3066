"""The bench's files: made under unpredictable names, with room kept free, removed however the run ends; or given."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvxfer.cli.bench_content import PAGE
from kvxfer.errors import ConfigError, IOFault
from kvxfer.io.modes import MEMORY_FILESYSTEMS, NETWORK_FILESYSTEMS, filesystem_type
from kvxfer.io.system import TEMPORARY, sys_close, sys_fallocate, sys_open, try_unlink

PREFIX = ".kvx-bench-"
_MARGIN_BYTES = 1 << 30
_MARGIN_SHARE = 20  # of the file system: whichever is less


def check_room(directory: Path, nbytes: int) -> None:
    """Raises ConfigError where `nbytes` more would leave the file system, or the machine's memory, too full."""
    kind = filesystem_type(directory)
    if kind in NETWORK_FILESYSTEMS:
        raise ConfigError(f"{directory} is on {kind}, a network file system: the bench measures drives")
    room = os.statvfs(directory)
    free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    margin = min(_MARGIN_BYTES, whole // _MARGIN_SHARE)
    if free - nbytes < margin:
        raise ConfigError(f"{directory}: {nbytes} bytes are needed and {margin} must stay free; {free} are; see --span")
    if kind in MEMORY_FILESYSTEMS and nbytes > (memory := _memory_available()):
        raise ConfigError(f"{directory} is memory: {nbytes} bytes are needed, {memory} are to be had; see --span")


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


@contextmanager
def made(directory: Path, count: int, nbytes: int) -> Iterator[list[Path]]:
    """`count` preallocated files of `nbytes`, the owner's alone.

    Raises:
        ConfigError: there is not as much room.
        IOFault: one cannot be made; none is left.
    """
    check_room(directory, count * nbytes)
    token = secrets.token_hex(8)
    paths: list[Path] = []
    try:
        for index in range(count):
            path = directory / f"{PREFIX}{token}-{index}{TEMPORARY}"
            paths.append(path)  # before it is there: a signal may come at any point
            fd = sys_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
            try:
                sys_fallocate(fd, nbytes, path)
            finally:
                sys_close(fd)
        yield paths
    finally:
        left = [fault for path in paths if (fault := try_unlink(path)) is not None]
    if left:
        raise left[0]


def given(paths: Sequence[Path], span: int) -> list[int]:
    """How much of each file is used: whole pages, all of them together at most `span`.

    Raises:
        ConfigError: one is no regular file, is there twice, or holds no page.
        IOFault: one cannot be looked at.
    """
    seen: set[tuple[int, int]] = set()
    used: list[int] = []
    share = span // len(paths) // PAGE * PAGE
    for path in paths:
        try:
            found = path.stat()
        except OSError as exc:
            raise IOFault(exc.errno or errno.EIO, os.strerror(exc.errno or errno.EIO), str(path)) from None
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is no regular file: give one directory, or files")
        if (found.st_dev, found.st_ino) in seen:
            raise ConfigError(f"{path} is there twice")
        seen.add((found.st_dev, found.st_ino))
        used.append(min(share, found.st_size // PAGE * PAGE))
        if not used[-1]:
            raise ConfigError(f"{path} has {found.st_size} bytes: at least {PAGE} are needed")
    return used
