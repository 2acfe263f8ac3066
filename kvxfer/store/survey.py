"""What is in a root, without opening it as a store: nothing is changed, and nothing is locked.

Others may have the root open meanwhile; what is said may then be a moment old. The index is judged by the store's own
rules (Index.load), but on a copy: LMDB must not map pages that another process writes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.errors import ConfigError, IOFault, KvxferError
from kvxfer.io.system import fault, read_small, sys_open
from kvxfer.keys import Namespace
from kvxfer.slot import ALIGNMENT, SlotLayout, round_up
from kvxfer.store.index import Index, Loaded
from kvxfer.store.members import RootLock
from kvxfer.store.namespaces import named_digests
from kvxfer.store.records import USE_SLOTS, IndexRecord
from kvxfer.store.root import (
    INDEX,
    NAMESPACE_FILE,
    NAMESPACES,
    ROOT_FILE,
    SLABS,
    RootInfo,
    read_root,
    strangers,
)
from kvxfer.store.scrub_pass import Scrubs, read_scrubs
from kvxfer.store.slab import FoundSlab, scan_directory, slab_file_bytes, slab_name, whole_slots
from kvxfer.store.trust import DATA, STATE

_LEAST_MAP = 1 << 20
_TRIES, _PAUSE_S = 20, 0.02  # copies of an index that is being written
_PIECE = 1 << 20
_NAMESPACE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be. `what` is one of FINDINGS."""

    what: str
    detail: str
    slab_id: int | None = None
    slot: int | None = None
    offset: int | None = None  # of the slot in its file
    record: IndexRecord | None = None  # the entry that fails


FINDINGS: Mapping[str, str] = {
    "index": "the index cannot be used; an open rebuilds it",
    "slab_header": "a file with a slab's name has no header of its own; an open that is alone removes it",
    "slab_short": "a slab is shorter than its header says; an open that is alone extends it",
    "slab_long": "a slab is longer than its header says; an open that is alone cuts it",
    "slab_unreadable": "a slab cannot be read",
    "slab_missing": "the index names a slab that is not there",
    "slot_missing": "the index names a slot that its slab does not have",
    "truncated": "the file ended inside the slot",
    "bad_trailer": "a trailer page is damaged",
    "foreign": "the index names what the slot does not hold",
    "bad_sum": "a segment's bytes do not match their sum",
    "io": "the slot cannot be read",
}


@dataclass(frozen=True, slots=True)
class Slab:
    """A slab with a header that is its own. Sizes in bytes."""

    slab_id: int
    path: Path
    file_bytes: int
    layout: SlotLayout
    num_slots: int  # as the header says
    whole_slots: int  # of these, so many lie in the file

    def slot_offset(self, slot: int) -> int:
        """Where a slot starts in the file."""
        return self.layout.alignment + slot * self.layout.slot_bytes


@dataclass(frozen=True, slots=True)
class IndexView:
    """What the index says, or why it cannot be asked."""

    state: str  # usable | lost (the next open rebuilds it) | busy (no quiet moment to copy it)
    why: str  # empty if usable
    file_bytes: int
    records: tuple[IndexRecord, ...] = ()
    uses: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)  # by slab and block

    def used_at(self, record: IndexRecord) -> int:
        """When it was used last, to ten minutes; 0 where that is not known."""
        times = self.uses.get((record.slab_id, record.slot // USE_SLOTS))
        return times[record.slot % USE_SLOTS] if times else 0

    @property
    def usable(self) -> bool:
        """Whether `records` are what the store would believe."""
        return self.state == "usable"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceView:
    """A namespace that the index or a namespace file names."""

    digest: bytes
    entries: int
    used_at: float = 0.0  # when a process that uses it last said so; 0 where no file says it
    weight_epoch: int | None = None
    fields: Mapping[str, Any] | None = None  # as namespace.json has them
    why: str = ""  # why there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is in a root. Sizes in bytes."""

    root: Path
    info: RootInfo
    holders: tuple[int, ...]  # processes that have it open; 0 for one whose number is not known
    index: IndexView
    slabs: Mapping[int, Slab]
    namespaces: tuple[NamespaceView, ...]  # the one with the most entries first
    leftovers: int  # files that the next open removes
    other_bytes: int  # of files that are not the store's
    other_files: int
    disk_bytes: int  # everything under the root
    disk_files: int
    findings: tuple[Finding, ...]
    scrubs: Scrubs

    def is_there(self, record: IndexRecord) -> bool:
        """Whether the slot that a record names lies in a slab's file."""
        slab = self.slabs.get(record.slab_id)
        return slab is not None and record.slot < slab.whole_slots


def survey_root(root: Path) -> Survey:
    """Looks at everything but the slots.

    Raises:
        ConfigError: there is no root.
        FormatError: it, or a slab, is of another version, or kvxfer.json is damaged.
        IOFault: it cannot be read.
    """
    seen = _look(root)
    if not seen.findings or not seen.holders:
        return seen
    # What others change between two reads of one look is in no two looks: an entry that the index names both times had
    # its slot, and its slab, all the while.
    later = _look(root)
    return _with(later, [finding for finding in later.findings if finding in seen.findings])


def _look(root: Path) -> Survey:
    info = _read_info(root)
    holding = holders(root)
    index = read_index(root / INDEX, busy=bool(holding))
    found, leftovers = scan_directory(root / SLABS, info.alignment)
    slabs, findings = _judge_slabs(found)
    if index.state == "lost" and (found or index.file_bytes):
        findings.insert(0, Finding(what="index", detail=index.why))
    other_bytes, other_files, small = strangers(root)
    disk_bytes, disk_files = _disk_use(root)
    seen = Survey(
        root=root, info=info, holders=holding, index=index, slabs=slabs,
        namespaces=_namespaces(root / NAMESPACES, index), leftovers=len(leftovers) + len(small),
        other_bytes=other_bytes, other_files=other_files, disk_bytes=disk_bytes, disk_files=disk_files, findings=(),
        scrubs=read_scrubs(root),
    )  # fmt: skip
    unreadable = {slab.slab_id for slab in found if slab.error}
    return _with(seen, [*findings, *_astray(seen, unreadable)])


def _with(seen: Survey, findings: list[Finding]) -> Survey:
    fields = {name: getattr(seen, name) for name in Survey.__dataclass_fields__}
    return Survey(**(fields | {"findings": tuple(findings)}))


def _read_info(root: Path) -> RootInfo:
    try:
        there = (root / ROOT_FILE).exists()
    except OSError as exc:
        raise fault(exc.errno or errno.EIO, "cannot look into the root", root) from exc
    if not there or (info := read_root(root)) is None:
        raise ConfigError(f"{root} is no kvxfer root: it has no {ROOT_FILE}")
    return info


def holders(root: Path) -> tuple[int, ...]:
    """The processes that have a root open; 0 stands for one whose number is not known. Locks nothing."""
    try:
        lock = RootLock.open(root, only_look=True)
    except IOFault:
        return ()
    try:
        return tuple(sorted(lock.pid(seat) for seat in lock.others()))
    except IOFault:
        return ()
    finally:
        lock.drop()


def read_index(directory: Path, *, busy: bool) -> IndexView:
    """What the index holds, by the rules of an open, from a copy in the folder for temporary files.

    Args:
        directory: the root's.
        busy: it may be written meanwhile: a copy that is no index is made again.
    """
    try:
        nbytes = os.stat(directory / DATA).st_size
    except OSError:
        nbytes = 0
    why = ""
    for attempt in range(_TRIES if busy else 1):
        time.sleep(_PAUSE_S * bool(attempt))
        try:
            with tempfile.TemporaryDirectory(prefix="kvxfer-index-") as folder:
                if nbytes > (free := shutil.disk_usage(folder).free):
                    return IndexView("busy", f"no room to copy its {nbytes} bytes: {folder} has {free}", nbytes)
                loaded, why = _load_copy(directory, Path(folder))
        except OSError as exc:
            loaded, why = None, f"cannot be copied: {exc}"
        if loaded is not None:
            uses = {(row.slab_id, row.block): row.times for row in loaded.uses}
            return IndexView("usable", "", nbytes, tuple(loaded.records), uses)
    return IndexView("busy" if busy else "lost", why, nbytes)


def _load_copy(directory: Path, folder: Path) -> tuple[Loaded | None, str]:
    if (state := read_small(directory / STATE)) is not None:
        (folder / STATE).write_bytes(state)
    if (directory / DATA).exists():
        _copy(directory / DATA, folder / DATA)
    size = (folder / DATA).stat().st_size if (folder / DATA).exists() else 0
    index = Index(folder, round_up(max(size, _LEAST_MAP), ALIGNMENT))
    loaded = index.load()
    index.drop()
    return loaded, index.lost


def _copy(source: Path, target: Path) -> None:
    """Copies a regular file, as long as it is now."""
    fd = sys_open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as reader, target.open("wb") as writer:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise fault(errno.EINVAL, "no regular file", source)
        left = status.st_size
        while left and (piece := reader.read(min(left, _PIECE))):
            writer.write(piece)
            left -= len(piece)


def _judge_slabs(found: list[FoundSlab]) -> tuple[dict[int, Slab], list[Finding]]:
    slabs: dict[int, Slab] = {}
    findings: list[Finding] = []
    for file in found:
        header, slab_id = file.header, file.slab_id
        if file.error:
            if os.path.lexists(file.path):  # else it was removed just now
                findings.append(Finding(what="slab_unreadable", detail=file.error, slab_id=slab_id))
            continue
        if header is None:
            detail = f"{file.path.name} has no header that could be its own"
            findings.append(Finding(what="slab_header", detail=detail, slab_id=slab_id))
            continue
        layout, wanted = header.layout, slab_file_bytes(header.layout, header.num_slots)
        whole = whole_slots(header, file.size)
        slabs[slab_id] = Slab(slab_id, file.path, file.size, layout, header.num_slots, whole)
        if file.size != wanted:
            what = "slab_short" if file.size < wanted else "slab_long"
            detail = (
                f"{file.path.name} has {file.size} of {wanted} bytes: {whole} of {header.num_slots} slots are whole"
            )
            findings.append(Finding(what=what, detail=detail, slab_id=slab_id))
    return slabs, findings


def _astray(seen: Survey, unreadable: set[int]) -> Iterator[Finding]:
    """Records of slots that are not there. Those of a slab that cannot be read now may be there the next time."""
    for record in seen.index.records:
        if seen.is_there(record) or record.slab_id in unreadable:
            continue
        slab = seen.slabs.get(record.slab_id)
        if slab is None:
            what, detail = "slab_missing", f"{slab_name(record.slab_id)} is not there, or has no header of its own"
        else:
            what, detail = "slot_missing", f"{slab.path.name} has {slab.whole_slots} whole slots"
        yield Finding(what=what, detail=detail, slab_id=record.slab_id, slot=record.slot, record=record)


def _disk_use(root: Path) -> tuple[int, int]:
    """(bytes, files) under a root; of a file's size and its blocks the larger."""
    nbytes = nfiles = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue  # gone meanwhile
            nbytes += max(status.st_size, status.st_blocks * 512)
            nfiles += 1
    return nbytes, nfiles


def _namespaces(directory: Path, index: IndexView) -> tuple[NamespaceView, ...]:
    counts = Counter(record.digest for record in index.records)
    named = named_digests(directory)
    views = [_namespace(directory, digest, counts[digest]) for digest in named | counts.keys()]
    return tuple(sorted(views, key=lambda view: (-view.entries, view.digest)))


def _namespace(directory: Path, digest: bytes, entries: int) -> NamespaceView:
    """What namespace.json says, if its fields are those that the digest stands for."""
    path = directory / digest.hex() / NAMESPACE_FILE
    try:
        if path.parent.is_symlink():
            raise fault(errno.ELOOP, "its directory is a link to another place", path.parent)
        raw = read_small(path, _NAMESPACE_BYTES)
        used_at = os.lstat(path).st_mtime if raw is not None else 0.0
    except OSError as exc:
        return NamespaceView(digest=digest, entries=entries, why=f"{NAMESPACE_FILE} cannot be read: {exc}")
    if raw is None:
        return NamespaceView(digest=digest, entries=entries, why=f"it has no {NAMESPACE_FILE}")
    try:
        body = json.loads(raw)
        epoch, namespace = body["weight_epoch"], Namespace.from_json(body["namespace"])
        matches = type(epoch) is int and namespace.digest(epoch) == digest
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KvxferError):
        matches = False
    if not matches:
        why = f"{NAMESPACE_FILE} is damaged: its fields are not those of the digest"
        return NamespaceView(digest=digest, entries=entries, used_at=used_at, why=why)
    fields = namespace.as_json()
    return NamespaceView(digest=digest, entries=entries, used_at=used_at, weight_epoch=epoch, fields=fields)
