"""What happens before a store serves anything: checks, then clean-up, then the index or what stands for it.

Nothing is changed on disk before every check has passed: formats, file system, capacity.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field, replace
from pathlib import Path

import lmdb

from kvxfer.config import StoreConfig, slab_cost
from kvxfer.errors import ConfigError, FormatError, IOFault
from kvxfer.io.modes import IOMode, nearest, probe_mode, refuse_network
from kvxfer.io.system import mkdir_within, sync_directory, sys_close, sys_fdatasync, sys_open, try_unlink
from kvxfer.io.uring import choose_backend
from kvxfer.report import reporter
from kvxfer.store.entry import Entry
from kvxfer.store.index import TRANSACTION, Index
from kvxfer.store.members import RootLock
from kvxfer.store.namespaces import NamespaceFiles
from kvxfer.store.rebuild import scan_slabs
from kvxfer.store.records import EpochRow, IndexRecord, MemberRow, Row, SlabRow, SlabState, UsedRow, gone
from kvxfer.store.root import (
    INDEX,
    NAMESPACES,
    SCRUB_FILE,
    SLABS,
    RootInfo,
    make_directories,
    read_root,
    strangers,
    write_root,
)
from kvxfer.store.slab import FoundSlab, SlabFile, SlabHeader, restore_size, scan_directory, whole_slots
from kvxfer.store.uses import recency


@dataclass(slots=True)
class Opened:
    """A root that is checked and, by the first process that opens it, cleaned up."""

    info: RootInfo
    lock: RootLock
    others: list[int]  # seats of other processes that have it open
    mode: IOMode
    found: list[FoundSlab]
    leftovers: list[Path]
    other_bytes: int = 0  # not the store's, or its own that could not be opened or removed
    other_files: int = 0
    slabs: list[SlabFile] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)  # the least recently used first
    epochs: dict[int, int] = field(default_factory=dict)  # used ones, in the order of their use where that is known
    uses: list[UsedRow] = field(default_factory=list)
    next_slab_id: int = 1
    shrunk: int = 0  # entries dropped because the cap is smaller now
    slab_errors: int = 0
    rebuilds: int = 0
    rebuild_reason: str = ""

    def close(self) -> None:
        """Closes the slabs."""
        for slab in self.slabs:
            slab.close()


def lock_root(config: StoreConfig) -> tuple[RootLock, IOMode | None]:
    """Makes the root's directory if there is none, and opens its lock file.

    Returns:
        The lock, and for a new root the mode that was found for it.

    Raises:
        ConfigError, FormatError, IOFault: as Store.open says; a root that was there is as it was.
    """
    root = config.root
    refuse_network(root)
    _check_descriptors(config)
    mode: IOMode | None = None
    if read_root(root) is None:
        mode = _mode_of(nearest(root), config)  # refuses before anything is made
        make_directories(root, config.durability == "power")
    _check_owner(root)
    return RootLock.open(root), mode


def _check_owner(root: Path) -> None:
    """Says where somebody else could change the root: nothing in it protects against forged bytes."""
    status = os.stat(root)
    if status.st_uid != os.geteuid():
        reporter.warn("owner", f"{root} belongs to user {status.st_uid}, this process is of {os.geteuid()}")
    if status.st_mode & 0o002:
        reporter.warn("mode", f"{root} can be changed by every user (mode {status.st_mode & 0o7777:o}): chmod 0700 it")


def open_root(config: StoreConfig, lock: RootLock, others: list[int], mode: IOMode | None) -> Opened:
    """Checks everything. With the root's lock. `others`: seats of processes that have it open.

    Raises:
        ConfigError, FormatError, StoreError, IOFault: as Store.open says; a root that was there is as it was.
    """
    root = config.root
    info = read_root(root)
    if info is None and mode is not None and not others:
        write_root(root, info := RootInfo(mode.alignment, 0).with_limits(config))
    elif info is None:
        raise FormatError(f"{root} lost its kvxfer.json while it was being opened; nothing was changed")
    if others:
        _check_limits(config, info.config(root), lock)
    found, leftovers = scan_directory(root / SLABS, info.alignment)
    mode = _fit_mode(mode or _mode_of(root, config), info, config)
    nbytes, nfiles, small = strangers(root)
    unopened = [slab for slab in found if slab.error]
    nbytes += sum(max(slab.size, slab.blocks) for slab in unopened)
    nfiles += len(unopened)
    config.check_room(nbytes, nfiles)
    for slab in unopened:
        reporter.warn(f"slab {slab.slab_id}", f"a slab cannot be read and is left alone: {slab.error}")
    return Opened(info, lock, others, mode, found, leftovers + small, nbytes, nfiles, slab_errors=len(unopened))


def _check_limits(config: StoreConfig, theirs: StoreConfig, lock: RootLock) -> None:
    for name in ("capacity_bytes", "max_files", "effective_slab_bytes", "effective_index_map_bytes", "durability"):
        if getattr(config, name) != getattr(theirs, name):
            raise ConfigError(
                f"{name}={getattr(config, name)}, but processes {lock.pids()} have {config.root} open with "
                f"{name}={getattr(theirs, name)}: processes of one root share its limits and its durability"
            )


def _check_descriptors(config: StoreConfig) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and config.descriptors > limit:
        raise ConfigError(
            f"capacity_bytes={config.capacity_bytes} with slab_bytes={config.effective_slab_bytes} means "
            f"{config.max_slabs} open files; this process may have {limit}: raise slab_bytes, or the limit (ulimit -n)"
        )


def _mode_of(directory: Path, config: StoreConfig) -> IOMode:
    return choose_backend(probe_mode(directory, config.direct), directory, config.io)


def _fit_mode(mode: IOMode, info: RootInfo, config: StoreConfig) -> IOMode:
    """The mode at the root's own alignment, which never changes."""
    if not mode.direct or mode.alignment <= info.alignment:
        return replace(mode, alignment=info.alignment)
    why = f"the root is aligned to {info.alignment}, direct I/O here asks for {mode.alignment}"
    if config.direct == "on":
        raise ConfigError(f"direct='on', but {why}; use auto or off, or make a new root")
    return replace(mode, direct=False, alignment=info.alignment, why=f"direct I/O off: {why}")


def fill(opened: Opened, config: StoreConfig, index: Index, threads: int) -> None:
    """For the first process: cleans up, opens the slabs that the cap has room for, finds out what they hold.

    Raises:
        IOFault: the directories cannot be made, or (durability "power") what is there not be flushed.
    """
    for name in (SLABS, INDEX, NAMESPACES):
        mkdir_within(config.root / name)
    if config.durability == "power":
        _put_on_device(opened, config)
    _note_limits(opened, config)
    if not config.keeps_scrubs and os.path.lexists(config.root / SCRUB_FILE):
        opened.leftovers.append(config.root / SCRUB_FILE)
    _clean_up(opened)
    NamespaceFiles(config).trim()
    loaded = index.load()
    headers = _open_slabs(opened)
    if loaded is not None:
        records, opened.epochs, opened.uses = loaded.records, dict(loaded.epochs), loaded.uses
        for record in records:
            opened.epochs.setdefault(record.generation >> 32, 0)
    elif config.durability == "none":
        records = []
        _begin_anew(opened, index)
    else:
        most = config.slab_budget[0]  # larger ones go whatever is in them
        scan = scan_slabs([slab for slab in opened.slabs if slab_cost(slab.file_bytes) <= most], threads)
        records, opened.epochs = scan.records, dict.fromkeys(scan.epochs, 0)
        if opened.slabs:
            opened.rebuilds, opened.rebuild_reason = 1, index.lost
            reporter.warn("rebuild", f"index rebuilt from {len(opened.slabs)} slabs: {index.lost}")
    known = {slab.slab_id for slab in opened.found} | {record.slab_id for record in records}
    opened.next_slab_id = 1 + max(known, default=0)
    records.sort(key=recency(opened.uses, lambda epoch: opened.epochs.get(epoch, 0)))
    opened.shrunk += _trim_slabs(opened, config, records)
    whole = {slab.slab_id: _restore(opened, slab, *headers[slab.slab_id]) for slab in opened.slabs}
    dropped = _believe(opened, index, records, whole)
    there = {slab.slab_id for slab in opened.found if slab.slab_id in whole or slab.path.exists()}
    stale = [gone(row) for row in opened.uses if row.slab_id not in there]
    opened.uses = [row for row in opened.uses if row.slab_id in there]
    index.living = lambda: [*map(IndexRecord.of, opened.entries), *opened.uses]
    index.mark_open()
    if loaded is None or index.data_bytes > index.map_bytes:
        index.recreate(index.living(), opened.epochs)
    else:
        for start in range(0, len(stale), TRANSACTION):
            index.apply((), (), stale[start : start + TRANSACTION])
        for start in range(0, len(dropped), TRANSACTION):
            index.apply(dropped[start : start + TRANSACTION], ())


def join(opened: Opened, config: StoreConfig, index: Index, threads: int) -> list[Row]:
    """For a process that is not the first: what the index says, or the slots where that cannot be trusted."""
    try:
        rows = index.join()
        present = {(row.seat, row.pid) for row in rows if isinstance(row, MemberRow)}
        # One that could not sign is believed to be the one that the index names.
        seats = {seat for seat, _ in present}
        signed = {seat: opened.lock.pid(seat) for seat in opened.others}
        missing = [seat for seat, pid in signed.items() if seat not in seats or (pid and (seat, pid) not in present)]
        index.lost = f"it does not know the processes in seats {missing}" if missing else ""
    except (lmdb.Error, OSError) as exc:
        index.lost = f"unreadable: {exc}"
    if index.lost:
        scan = None if config.durability == "none" else threads
        rows = _slabs_beside_others(opened, index, scan)
    known = {row.slab_id for row in rows if isinstance(row, SlabRow)}
    for slab in opened.found:
        if slab.slab_id not in known and not slab.error:  # nobody's, or one that the first process could not open
            _count_other(opened, slab.path)
    config.check_room(opened.other_bytes, opened.other_files)
    index.mark_open()
    if index.lost:
        others = [row for row in rows if not isinstance(row, EpochRow)]
        index.recreate(others, {row.epoch: row.order for row in rows if isinstance(row, EpochRow)})
    return rows


def _put_on_device(opened: Opened, config: StoreConfig) -> None:
    """The directories, and what was stored while nothing was flushed: from here on it counts as acknowledged.

    Raises:
        IOFault: a flush failed.
    """
    if opened.info.durability != "power":
        for slab in opened.found:
            if slab.header is not None:
                fd = sys_open(slab.path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    sys_fdatasync(fd, slab.path)
                finally:
                    sys_close(fd)
    sync_directory(config.root / SLABS)
    sync_directory(config.root)


def _begin_anew(opened: Opened, index: Index) -> None:
    """The slabs stay, and what is in them is not looked for."""
    opened.rebuild_reason = index.lost
    if opened.slabs:
        lost = f"begun anew over {len(opened.slabs)} slabs, which hold nothing now (durability='none'): {index.lost}"
        reporter.warn("rebuild", f"index {lost}")


def _slabs_beside_others(opened: Opened, index: Index, threads: int | None) -> list[Row]:
    """What the slots say (threads given), and which slabs there are.

    What other processes have taken is not known: they cannot commit it, and sign in again.
    """
    _open_slabs(opened)
    rows: list[Row] = [SlabRow(s.slab_id, SlabState.READY, slab_cost(s.file_bytes)) for s in opened.slabs]
    if threads is None:
        _begin_anew(opened, index)
    else:
        scan = scan_slabs(opened.slabs, threads)
        rows += scan.records
        rows += [EpochRow(epoch, 0) for epoch in scan.epochs]
        opened.rebuilds, opened.rebuild_reason = 1, index.lost
        reporter.warn("rebuild", f"index rebuilt from {len(opened.slabs)} slabs: {index.lost}")
    for slab in opened.slabs:
        slab.close()
    opened.slabs = []
    return rows


def _note_limits(opened: Opened, config: StoreConfig) -> None:
    """Writes down limits that have changed: processes that open the root beside this one are held to them.

    Raises:
        IOFault: they could not be written, so that another process could pass them.
    """
    info = opened.info.with_limits(config)
    if info == opened.info:
        return
    write_root(config.root, info)
    opened.info = info


def _clean_up(opened: Opened) -> None:
    destroyed = [slab.path for slab in opened.found if slab.header is None and not slab.error]
    for path in destroyed:
        reporter.warn(f"destroyed {path.name}", f"{path.name} has no header that could be its own: removed")
    for path in opened.leftovers + destroyed:
        _remove(opened, path)


def _remove(opened: Opened, path: Path) -> bool:
    if (fault := try_unlink(path)) is None:
        return True
    reporter.warn(f"remove {path.name}", f"cannot be removed and counts against the capacity: {fault}", error=fault)
    opened.slab_errors += 1
    _count_other(opened, path)
    return False


def _count_other(opened: Opened, path: Path) -> None:
    try:
        status = os.lstat(path)
    except OSError:
        return  # gone after all
    opened.other_files += 1
    opened.other_bytes += max(status.st_size, status.st_blocks * 512)


def _open_slabs(opened: Opened) -> dict[int, tuple[FoundSlab, SlabHeader]]:
    headers = {}
    for found in opened.found:
        if found.header is None:
            continue
        try:
            opened.slabs.append(slab := SlabFile.open(found, found.header, opened.mode.direct))
            headers[found.slab_id] = found, found.header
            slab.usable = whole_slots(found.header, found.size)
        except IOFault as exc:
            opened.slab_errors += 1
            reporter.warn(f"slab {found.slab_id}", f"a slab cannot be opened and is left alone: {exc}", error=exc)
            _count_other(opened, found.path)
    return headers


def _trim_slabs(opened: Opened, config: StoreConfig, records: list[IndexRecord]) -> int:
    """Removes the slabs that the cap has no room for, the least recently used first; the entries that went."""
    latest = {record.slab_id: rank for rank, record in enumerate(records, 1)}
    left_bytes, left_files = config.slab_budget
    left_bytes, left_files = left_bytes - opened.other_bytes, left_files - opened.other_files
    kept, gone = [], set()
    for slab in sorted(opened.slabs, key=lambda slab: (-latest.get(slab.slab_id, 0), slab.slab_id)):
        cost = slab_cost(slab.file_bytes)
        if cost <= left_bytes and left_files >= 1:
            kept.append(slab)
            left_bytes, left_files = left_bytes - cost, left_files - 1
            continue
        slab.close()
        gone.add(slab.slab_id)
        _remove(opened, slab.path)
    opened.slabs = sorted(kept, key=lambda slab: slab.slab_id)
    return sum(record.slab_id in gone for record in records)


def _restore(opened: Opened, slab: SlabFile, found: FoundSlab, header: SlabHeader) -> int:
    """How many of a slab's first slots were whole; extends it again where it was cut short."""
    try:
        whole, slab.usable = restore_size(found, header)
    except IOFault as exc:
        opened.slab_errors += 1
        reporter.warn(f"slab {slab.slab_id}", f"{slab.name} cannot be brought to its size: {exc}", error=exc)
        whole = slab.usable = 0
    if whole < slab.num_slots:
        reporter.warn(f"cut {slab.slab_id}", f"{slab.name} was cut short: {whole} of {slab.num_slots} slots are whole")
    return whole


def _believe(opened: Opened, index: Index, records: list[IndexRecord], whole: dict[int, int]) -> list[IndexRecord]:
    """Makes entries of the records that can be right; returns those that the index has to forget."""
    slabs = {slab.slab_id: slab for slab in opened.slabs}
    unopened = {found.slab_id for found in opened.found if found.path.exists()} - slabs.keys()
    slots: dict[int, set[int]] = {slab_id: set() for slab_id in slabs}
    dropped = []
    # The latest first: where two records name one slot, the later one is the likelier, and the cap is for the later.
    for record in reversed(records):
        slab = slabs.get(record.slab_id)
        if slab is None:
            if record.slab_id not in unopened:  # one that could not be opened now may be there the next time
                dropped.append(record)
            continue
        blocks = slab.layout.blocks_per_chunk
        possible = record.slot < whole[record.slab_id] and 0 < record.mask < 1 << blocks and record.generation > 0
        if not possible or record.slot in slots[record.slab_id] or len(opened.entries) >= index.max_entries:
            opened.shrunk += possible and len(opened.entries) >= index.max_entries
            dropped.append(record)
            continue
        slots[record.slab_id].add(record.slot)
        opened.entries.append(Entry(record.digest, record.key, slab, record.slot, record.generation, record.mask))
    for slab_id, slab in slabs.items():
        slab.occupy(slots[slab_id])
    opened.entries.reverse()
    return dropped
