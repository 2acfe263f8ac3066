"""A root's own small files: kvxfer.json, the lock, and what lies in the directory that is nobody's slab or index."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import FormatError, IOFault, StoreError
from kvxfer.io.modes import PROBE_NAME
from kvxfer.io.system import (
    TEMPORARY,
    fault,
    read_small,
    read_upto,
    replace_file,
    sys_close,
    sys_flock,
    sys_ftruncate,
    sys_mkdir,
    sys_open,
    write_all,
)
from kvxfer.report import reporter
from kvxfer.slot import ALIGNMENT
from kvxfer.store.index import DATA, STATE
from kvxfer.store.slab import SLAB_NAME

FORMAT = 1
ROOT_FILE, LOCK_FILE, NAMESPACE_FILE = "kvxfer.json", "lock", "namespace.json"
SLABS, INDEX, NAMESPACES = "slabs", "index", "namespaces"
_DIGEST_NAME = re.compile(r"[0-9a-f]{64}")
_SMALL = 1 << 16


@dataclass(frozen=True, slots=True)
class RootInfo:
    """kvxfer.json."""

    alignment: int
    weight_epoch: int


def read_root(root: Path) -> RootInfo | None:
    """What a root says of itself; None where there is no root yet and one can be made. Changes nothing.

    Raises:
        FormatError: it is of another version, damaged, or a directory with something else in it.
        IOFault: it cannot be read.
    """
    path = root / ROOT_FILE
    raw = read_small(path, _SMALL)
    if raw is None:
        _check_empty(root)
        return None
    try:
        body = json.loads(raw)
        known = body["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise FormatError(
            f"{path} is damaged; nothing was changed. Restore it, or remove the root to start anew"
        ) from None
    if known != FORMAT:
        raise FormatError(
            f"{path} is of format {known!r}; this kvxfer knows format {FORMAT}. "
            "Nothing was changed: use the kvxfer that wrote it, or give another root"
        )
    alignment, epoch = body.get("alignment"), body.get("weight_epoch")
    power = type(alignment) is int and alignment >= ALIGNMENT and alignment & (alignment - 1) == 0
    if not power or type(epoch) is not int or epoch < 0:
        raise FormatError(f"{path} says alignment {alignment!r}, weight_epoch {epoch!r}: damaged; nothing was changed")
    return RootInfo(alignment, epoch)


def _check_empty(root: Path) -> None:
    """A root is only made in an empty directory, or where making one was cut short."""
    try:
        names = set(os.listdir(root))
    except FileNotFoundError:
        return
    except OSError as exc:
        raise fault(exc.errno or errno.EIO, "cannot list the root", root) from exc
    strange = {name for name in names if not PROBE_NAME.fullmatch(name)} - {LOCK_FILE, ROOT_FILE + TEMPORARY}
    if strange:
        raise FormatError(
            f"{root} is not empty and has no {ROOT_FILE}: {', '.join(sorted(strange)[:5])}; nothing was changed"
        )


def write_root(root: Path, info: RootInfo) -> None:
    """Replaces kvxfer.json; it is on the device when this returns.

    Raises:
        IOFault: it could not be written; the old one is as it was.
    """
    body = {"format": FORMAT, "alignment": info.alignment, "weight_epoch": info.weight_epoch}
    replace_file(root / ROOT_FILE, json.dumps(body).encode() + b"\n")


def make_directories(path: Path) -> None:
    """Makes `path` and the missing ones above it, for the owner alone.

    Raises:
        IOFault: one cannot be made.
    """
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        sys_mkdir(directory)


class RootLock:
    """The flock that says which process has a root open. The kernel drops it when the process ends, however."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path

    @classmethod
    def take(cls, root: Path) -> RootLock:
        """The lock.

        Raises:
            StoreError: another process (or another Store of this one) has it; names the process.
            IOFault: the file cannot be made or locked.
        """
        path = root / LOCK_FILE
        fd = sys_open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            if sys_flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, path):
                return cls(fd, path)
            holder = read_upto(fd, 32, 0, path).decode("ascii", "replace").strip()
        except BaseException:
            sys_close(fd)
            raise
        sys_close(fd)
        raise StoreError(f"{root} is open in another process (pid {holder or 'not known yet'}); one may have it")

    def sign(self) -> None:
        """Writes this process's number into the file, for whoever is refused."""
        try:
            sys_ftruncate(self._fd, 0, self._path)
            write_all(self._fd, b"%d\n" % os.getpid(), 0, self._path)
        except IOFault as exc:
            reporter.warn("lock", f"the lock cannot be signed: {exc}")  # it is held all the same

    def drop(self) -> None:
        """Gives the lock back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            sys_close(fd)


def strangers(root: Path) -> tuple[int, int, list[Path]]:
    """What lies under a root beside the store's own files: (bytes, files, small leftovers that can be removed).

    Slabs are not counted here, nor their leftovers: slab.scan_directory sees those.
    """
    nbytes = nfiles = 0
    leftovers = []
    for path, status in _walk(root):
        relative = path.relative_to(root).parts
        if _is_own(relative):
            continue
        if PROBE_NAME.fullmatch(path.name) or (path.name.endswith(TEMPORARY) and _is_own(_plain_name(relative))):
            leftovers.append(path)
            continue
        nbytes += max(status.st_size, status.st_blocks * 512)
        nfiles += 1
    return nbytes, nfiles, leftovers


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            try:
                yield path, os.lstat(path)
            except OSError:
                continue  # gone meanwhile


def _plain_name(relative: tuple[str, ...]) -> tuple[str, ...]:
    return (*relative[:-1], relative[-1].removesuffix(TEMPORARY))


def _is_own(relative: tuple[str, ...]) -> bool:
    match relative:
        case ("kvxfer.json",) | ("lock",):
            return True
        case ("slabs", name):
            return SLAB_NAME.fullmatch(name.removesuffix(TEMPORARY)) is not None
        case ("index", name):
            return name in (DATA, STATE, "lock.mdb")
        case ("namespaces", digest, "namespace.json"):
            return _DIGEST_NAME.fullmatch(digest) is not None
    return False
