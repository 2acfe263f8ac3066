"""kvxfer.json, and what lies in the directory that is nobody's slab or index."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvxfer.config import StoreConfig
from kvxfer.errors import ConfigError, FormatError, IOFault, KvxferError
from kvxfer.io.modes import PROBE_NAME
from kvxfer.io.system import TEMPORARY, fault, read_small, replace_file, sync_directory, sys_mkdir
from kvxfer.keys import Namespace
from kvxfer.slot import ALIGNMENT
from kvxfer.store.members import LOCK_FILE, RootLock
from kvxfer.store.shares import Quota, parse_quotas, quotas_object
from kvxfer.store.slab import SLAB_NAME, scan_directory
from kvxfer.store.trust import DATA, STATE

FORMAT = 1
ROOT_FILE, NAMESPACE_FILE, SCRUB_FILE = "kvxfer.json", "namespace.json", "scrub.json"
SLABS, INDEX, NAMESPACES = "slabs", "index", "namespaces"
_DIGEST_NAME = re.compile(r"[0-9a-f]{64}")
_SMALL = 1 << 16
MAX_ALIGNMENT = 1 << 20  # buffers are made of it


_LIMITS = ("capacity_bytes", "max_files", "slab_bytes", "index_map_bytes")


@dataclass(frozen=True, slots=True)
class RootInfo:
    """kvxfer.json."""

    alignment: int
    weight_epoch: int
    limits: Mapping[str, int | None] = field(default_factory=dict)  # with which it was opened last
    durability: str = "process"  # likewise
    quotas: Mapping[bytes, Quota] = field(default_factory=dict)  # by digest

    def with_limits(self, config: StoreConfig) -> RootInfo:
        """The same, opened with the limits and the durability of `config`."""
        limits = {name: getattr(config, name) for name in _LIMITS}
        return replace(self, limits=limits, durability=config.durability)

    def body(self) -> dict[str, Any]:
        """As JSON has it."""
        known = {
            "format": FORMAT,
            "alignment": self.alignment,
            "weight_epoch": self.weight_epoch,
            "limits": dict(self.limits),
            "durability": self.durability,
        }
        return known | ({"quotas": quotas_object(self.quotas)} if self.quotas else {})

    def config(self, root: Path) -> StoreConfig:
        """A configuration with the limits and the durability with which the root was opened last.

        Raises:
            ConfigError: it does not say, or they cannot be.
        """
        if self.limits.keys() != set(_LIMITS):
            raise ConfigError(f"{root / ROOT_FILE} does not say with which limits the root was opened last")
        return StoreConfig.from_mapping({"root": root, **self.limits, "durability": self.durability})


def read_root(root: Path) -> RootInfo | None:
    """What a root says of itself; None where there is no root yet and one can be made. Changes nothing.

    Raises:
        FormatError: it is of another version, damaged, or a directory with something else in it.
        IOFault: it cannot be read.
    """
    path = root / ROOT_FILE
    for name in (SLABS, INDEX, NAMESPACES):
        if os.path.lexists(root / name) and not _is_directory(root / name):
            raise FormatError(f"{root / name} is no directory of its own, but a link or a file; nothing was changed")
    raw = read_small(path, _SMALL)
    if raw is None and _is_empty(root):
        return None
    raw = raw or read_small(path, _SMALL) or b""  # another process may just have made it
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
    power = type(alignment) is int and ALIGNMENT <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not power or type(epoch) is not int or not 0 <= epoch < 1 << 63:
        raise FormatError(f"{path} says alignment {alignment!r}, weight_epoch {epoch!r}: damaged; nothing was changed")
    limits = body.get("limits")
    durability = body.get("durability", "process")  # which roots were before they said it
    try:
        quotas = parse_quotas(body.get("quotas", {}))
    except ConfigError as exc:
        raise FormatError(f"{path} is damaged: {exc}; nothing was changed") from None
    return RootInfo(alignment, epoch, limits if isinstance(limits, dict) else {}, durability, quotas)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def raise_weight_epoch(root: Path) -> tuple[int, int]:
    """Makes everything stored so far a miss for all processes; the epoch that was, and the one that is.

    Raises:
        ConfigError: there is no root.
        FormatError, IOFault: it cannot be read or written.
        StoreError: another process keeps the root locked.
    """
    new = change_root(root, lambda info: next_epoch(root, info)).weight_epoch
    return new - 1, new


def next_epoch(root: Path, info: RootInfo) -> RootInfo:
    """The next weight epoch. Quotas go with their namespaces, as far as files say what those are; others end."""
    epoch = info.weight_epoch + 1
    named = {namespace.digest(info.weight_epoch): namespace for namespace in _namespaces(root).values()}
    quotas = {named[digest].digest(epoch): quota for digest, quota in info.quotas.items() if digest in named}
    return replace(info, weight_epoch=epoch, quotas=quotas)


def quota_bearers(root: Path) -> set[bytes]:
    """Namespaces of other epochs whose files say to whom a quota belongs: nobody may have registered it since."""
    if (info := read_root(root)) is None or not info.quotas:
        return set()
    now = {digest: namespace.digest(info.weight_epoch) for digest, namespace in _namespaces(root).items()}
    return {digest for digest, current in now.items() if current in info.quotas.keys() - now.keys()}


def digests_of_epoch(root: Path, weight_epoch: int) -> set[bytes]:
    """Namespaces of this epoch, of which a file says what they are."""
    return {digest for digest, namespace in _namespaces(root).items() if namespace.digest(weight_epoch) == digest}


def _namespaces(root: Path) -> dict[bytes, Namespace]:
    """Those, of any epoch, of which a file says what they are, by digest."""
    found = {}
    with suppress(OSError):
        for name in filter(_DIGEST_NAME.fullmatch, os.listdir(root / NAMESPACES)):
            digest = bytes.fromhex(name)
            if (namespace := read_namespace(root / NAMESPACES / name, digest)) is not None:
                found[digest] = namespace
    return found


def read_namespace(place: Path, digest: bytes) -> Namespace | None:
    """What a namespace's directory says of it; None where it has no file that names just this digest."""
    try:
        if (raw := None if place.is_symlink() else read_small(place / NAMESPACE_FILE, _SMALL)) is None:
            return None
        body = json.loads(raw)
        namespace = Namespace.from_json(body["namespace"])
        return namespace if namespace.digest(body["weight_epoch"]) == digest else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, KvxferError):
        return None


def change_root(root: Path, change: Callable[[RootInfo], RootInfo]) -> RootInfo:
    """Changes kvxfer.json, whoever has the root open; what it says now. Raises as `raise_weight_epoch`, or `change`."""
    if read_root(root) is None:
        raise ConfigError(f"{root} is no root: it has no {ROOT_FILE}")
    lock = RootLock.open(root)
    try:
        with lock.held():
            if (info := read_root(root)) is None:
                raise ConfigError(f"{root} is no root any more")
            scan_directory(root / SLABS, info.alignment)  # refuses another version's
            write_root(root, info := change(info))
    finally:
        lock.drop()
    return info


def root_stamp(root: Path) -> tuple[int, int]:
    """Changes whenever kvxfer.json is replaced; zeros where there is none."""
    try:
        status = os.stat(f"{root}/{ROOT_FILE}")  # looked at with every change: quicker than joining paths
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _is_empty(root: Path) -> bool:
    """Whether a root can be made: in an empty directory, or where making one was cut short. False: there is one now."""
    try:
        names = set(os.listdir(root))
    except FileNotFoundError:
        return True
    except OSError as exc:
        raise fault(exc.errno or errno.EIO, "cannot list the root", root) from exc
    if ROOT_FILE in names:
        return False
    strange = {name for name in names if not PROBE_NAME.fullmatch(name)} - {LOCK_FILE, ROOT_FILE + TEMPORARY}
    if strange:
        raise FormatError(
            f"{root} is not empty and has no {ROOT_FILE}: {', '.join(sorted(strange)[:5])}; nothing was changed"
        )
    return True


def write_root(root: Path, info: RootInfo) -> None:
    """Replaces kvxfer.json; it is on the device when this returns.

    Raises:
        IOFault: it could not be written; the old one is as it was.
    """
    replace_file(root / ROOT_FILE, json.dumps(info.body()).encode() + b"\n")


def make_directories(path: Path, durable: bool) -> None:
    """Makes `path` and the missing ones above it, for the owner alone, and puts their names on the device.

    Where that does not work it matters if they have to be `durable`.

    Raises:
        IOFault: one cannot be made.
    """
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        sys_mkdir(directory)
        try:
            sync_directory(directory.parent)
        except IOFault:
            if durable:
                raise


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
        case ("kvxfer.json",) | ("lock",) | ("scrub.json",):
            return True
        case ("slabs", name):
            return SLAB_NAME.fullmatch(name.removesuffix(TEMPORARY)) is not None
        case ("index", name):
            return name in (DATA, STATE, "lock.mdb")
        case ("namespaces", digest, "namespace.json"):
            return _DIGEST_NAME.fullmatch(digest) is not None
    return False
