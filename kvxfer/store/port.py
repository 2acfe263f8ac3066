"""A namespace out of one root and into another: every chunk is verified on its way out, and on its way in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvxfer.errors import ConfigError, IOFault, StoreError
from kvxfer.io.system import (
    TEMPORARY,
    sync_directory,
    sys_close,
    sys_fsync,
    sys_open,
    sys_rename,
    try_unlink,
    write_all,
)
from kvxfer.keys import Namespace
from kvxfer.slot import SlotLayout
from kvxfer.staging import AlignedBuffer
from kvxfer.store.access import Access
from kvxfer.store.entry import Entry, Reservation
from kvxfer.store.image import Image, examine, lay_out, write_trailers
from kvxfer.store.records import IndexRecord
from kvxfer.store.store import Store
from kvxfer.store.survey import NamespaceView, Survey
from kvxfer.store.transfer_file import ExportReader, Heading, pack_end, pack_heading

BATCH_BYTES = 64 << 20  # of slots that are reserved and committed together

Progress = Callable[[int, int], None]  # (chunks done, chunks in all)


@dataclass(slots=True)
class Exported:
    """What an export came to. Sizes in bytes."""

    digest: bytes
    chunks: int = 0
    nbytes: int = 0  # of the file
    changed: int = 0  # evicted or replaced meanwhile
    failed: int = 0  # not what they should be, or not readable: left out


@dataclass(slots=True)
class Imported:
    """What an import came to."""

    digest: bytes  # in this root
    chunks: int = 0  # adopted
    present: int = 0  # that were there already
    failed: int = 0  # of the file, not believed
    no_room: int = 0  # that got no slot
    complete: bool = True  # whether the file has its end
    reasons: dict[str, int] = field(default_factory=dict)  # of those that failed


def find_namespace(seen: Survey, digest: str) -> NamespaceView:
    """The one namespace whose digest begins like this.

    Raises:
        ConfigError: there is none, or more than one; or no file says what it is.
    """
    found = [view for view in seen.namespaces if digest and view.digest.hex().startswith(digest)]
    if len(found) != 1:
        raise ConfigError(f"namespace={digest!r}: {len(found)} namespaces of {seen.root} begin like that; one must")
    if found[0].fields is None:
        raise ConfigError(f"namespace {found[0].digest.hex()}: {found[0].why}, so nobody could use it elsewhere")
    return found[0]


# ---- out ---------------------------------------------------------------------------------------------------


def export_namespace(root: Path, heading_of: NamespaceView, target: Path, progress: Progress | None = None) -> Exported:
    """Writes a namespace's chunks into a new file, which appears under its name when it is whole.

    Raises:
        ConfigError: there is a file of that name, or the namespace has no chunks.
        FormatError, StoreError, IOFault: the root cannot be opened or read, or the file not written.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already")
    digest, fields, epoch = heading_of.digest, heading_of.fields, heading_of.weight_epoch
    if fields is None or epoch is None:
        raise ConfigError(f"namespace {digest.hex()} has no fields")
    with Store.open_existing(root) as store:
        with store.cleaning() as cleaner:
            entries = cleaner.find(lambda entry, used: entry.digest == digest)
        layouts = {entry.slab.layout for entry in entries}
        if len(layouts) != 1:
            raise ConfigError(f"namespace {digest.hex()} has {len(entries)} chunks in slots of {len(layouts)} layouts")
        entries.sort(key=lambda entry: entry.tick)  # as they were used: whoever adopts them stores them in that order
        heading = Heading(Namespace.from_json(fields), epoch, layouts.pop())
        with _new_file(target) as (fd, temporary):
            return _write_out(store, heading, entries, fd, temporary, progress)


@contextmanager
def _new_file(target: Path) -> Iterator[tuple[int, Path]]:
    """A file (descriptor, temporary name), the owner's alone, that gets its name at the end of the block, or goes."""
    temporary = target.with_name(target.name + TEMPORARY)
    fd = sys_open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        yield fd, temporary
        sys_fsync(fd, temporary)
        if os.path.lexists(target):
            raise ConfigError(f"{target} is there by now")
        sys_rename(temporary, target)
        sync_directory(target.absolute().parent)
    finally:
        sys_close(fd)
        try_unlink(temporary)


def _write_out(
    store: Store, heading: Heading, entries: list[Entry], fd: int, path: Path, progress: Progress | None
) -> Exported:
    done, layout = Exported(heading.digest), heading.layout
    head = pack_heading(heading)
    write_all(fd, head, 0, path)
    done.nbytes = len(head)
    buffer = AlignedBuffer(layout.slot_bytes, layout.alignment)
    for number, entry in enumerate(entries):
        if entry.dead or not _read(store, entry, buffer):
            with store.cleaning():
                still = not entry.dead
            done.failed, done.changed = done.failed + still, done.changed + (not still)
        else:
            write_all(fd, memoryview(buffer.array.data), done.nbytes, path)
            done.chunks, done.nbytes = done.chunks + 1, done.nbytes + layout.slot_bytes
        if progress is not None:
            progress(number + 1, len(entries))
    end = pack_end(done.chunks)
    write_all(fd, end, done.nbytes, path)
    done.nbytes += len(end)
    return done


def _read(store: Store, entry: Entry, buffer: AlignedBuffer) -> bool:
    """Whether the buffer has the entry's slot now, every byte of it right."""
    try:
        if entry.slab.read(buffer, len(buffer), entry.slot_offset) != len(buffer):
            return False
    except (IOFault, StoreError):
        return False
    image = examine(buffer, entry.slab.layout)
    return isinstance(image, Image) and image.record == IndexRecord.of(entry)._replace(slab_id=0, slot=0)


# ---- in ----------------------------------------------------------------------------------------------------


def import_namespace(
    root: Path, source: ExportReader, *, same_weights: bool = False, progress: Progress | None = None
) -> Imported:
    """Adopts the chunks of an exported file that are right. What is there already stays.

    A chunk is committed when it is in its slot, so that an import that is interrupted leaves whole chunks only. Where
    there is no room, what was used least goes.

    Args:
        root: an existing root; servers may have it open.
        source: the file.
        same_weights: the caller knows that the weights are those of the root's weight epoch, whatever the file's is.

    Raises:
        ConfigError: the file is of another weight epoch, or its slots do not fit into this root's slabs.
        FormatError, StoreError, IOFault: the root cannot be opened or written, or the file not read.
    """
    heading = source.heading
    with Store.open_existing(root) as store:
        if heading.weight_epoch != store.weight_epoch and not same_weights:
            raise ConfigError(
                f"{source.path} is of weight epoch {heading.weight_epoch}, {root} is at {store.weight_epoch}: the "
                "weights may have changed in between. If they are the same, say so (--same-weights)"
            )
        layout = replace(heading.layout, alignment=store.alignment)
        digest = heading.namespace.digest(store.weight_epoch)
        with store.cleaning() as cleaner:
            if cleaner.find(lambda entry, used: entry.digest == digest and entry.slab.layout != layout):
                raise ConfigError(f"{source.path}: {root} has this namespace's chunks in slots of another layout")
        store.register(heading.namespace, layout)
        return _take_in(store, digest, layout, source, progress)


def _take_in(
    store: Store, digest: bytes, layout: SlotLayout, source: ExportReader, progress: Progress | None
) -> Imported:
    done, theirs = Imported(digest, complete=source.complete), source.heading
    most = max(1, BATCH_BYTES // layout.slot_bytes)
    target = AlignedBuffer(layout.slot_bytes, layout.alignment) if source.slots else None
    written: list[tuple[bytes, Reservation, int]] = []
    with ExitStack() as undo:
        undo.callback(lambda: store.release([slot for _, slot, _ in written]))
        for number, buffer in enumerate(source.images()):
            image = examine(buffer, theirs.layout)
            if isinstance(image, str) or image.record.digest != theirs.digest:
                why = image if isinstance(image, str) else "foreign"
                done.reasons[why] = done.reasons.get(why, 0) + 1
                done.failed += 1
            elif store.contains(digest, image.record.key, image.record.mask):
                done.present += 1
            elif not (slots := store.reserve(digest, layout, 1)):
                done.no_room += 1
            else:
                assert target is not None
                written.append((image.record.key, slots[0], image.record.mask))
                lay_out(buffer, theirs.layout, target, layout)
                write_trailers(target, layout, image, digest, slots[0].generation)
                slots[0].slab.write(target, slots[0].slot_offset)
            if len(written) >= most:
                _commit(store, digest, written, done)
            if progress is not None:
                progress(number + 1, source.slots)
        _commit(store, digest, written, done)
    return done


def _commit(store: Store, digest: bytes, written: list[tuple[bytes, Reservation, int]], done: Imported) -> None:
    outcome = store.commit(digest, written, Access(lambda key: None))  # a file says nothing of what follows what
    written.clear()
    done.chunks += sum(outcome)
    done.no_room += len(outcome) - sum(outcome)
