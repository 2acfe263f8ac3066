"""Reads and checks what is stored while it is served, no faster than told; what is damaged becomes a miss.

The store's own table says what is where, so nothing is copied and nobody waits. A slot may be given to another chunk
while it is read: what fails counts only if the table, brought up to date, still has it, and it fails again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import IOFault, KvxferError
from kvxfer.report import reporter
from kvxfer.store.entry import Entry
from kvxfer.store.reading import Readable, SlotReader, open_slab
from kvxfer.store.records import IndexRecord
from kvxfer.store.slab import SlabFile
from kvxfer.store.survey import Finding, Slab

if TYPE_CHECKING:
    from kvxfer.store.store import Store

PAUSE_S = 60.0  # between the passes of a store's own thread

Progress = Callable[[int], None]  # chunks looked at


class Throttle:
    """So many bytes a second and no more: whoever has moved some waits until they were due.

    Args:
        bytes_per_s: the rate; None: any.
        wait: sleeps for so many seconds, or until somebody wants it to end.
        clock: seconds.
    """

    def __init__(
        self, bytes_per_s: float | None, wait: Callable[[float], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._wait, self._clock = bytes_per_s, wait, clock
        self._due = 0.0

    def moved(self, nbytes: int) -> None:
        """Returns when these bytes were due. What was not used of the past cannot be had later."""
        if self._rate is None:
            return
        now = self._clock()
        self._due = max(self._due, now) + nbytes / self._rate
        if self._due > now:
            self._wait(self._due - now)


class _Throttled:
    """A file that is read at a throttle's pace."""

    def __init__(self, file: Readable, throttle: Throttle) -> None:
        self._file, self._throttle = file, throttle

    def read(self, buf: np.ndarray, size: int, file_offset: int) -> int:
        moved = self._file.read(buf, size, file_offset)
        self._throttle.moved(moved)
        return moved


@dataclass(slots=True)
class Scrubbed:
    """What a pass came to."""

    chunks: int = 0  # that were verified
    nbytes: int = 0  # their payload
    changed: int = 0  # that were evicted or replaced while they were read
    removed: list[Finding] = field(default_factory=list)  # damaged: they are misses now
    unreadable: list[Finding] = field(default_factory=list)  # the drive did not give them: they stay
    complete: bool = False  # whether it looked at everything

    @property
    def looked_at(self) -> int:
        """Chunks, whatever came of it."""
        return self.chunks + self.changed + len(self.removed) + len(self.unreadable)


class Scrubber:
    """One pass over a store after the other.

    Args:
        store: gives the store, or None where it has gone; it is not held while a slot is read.
        throttle: of the reads.
        stop: ends a pass early.
        progress: called after each chunk.
    """

    def __init__(
        self,
        store: Callable[[], Store | None],
        throttle: Throttle,
        stop: threading.Event,
        progress: Progress | None = None,
    ) -> None:
        self._store, self._throttle, self._stop, self._progress = store, throttle, stop, progress

    def run(self) -> Scrubbed:
        """Looks at everything that is there, in the order in which it lies on the disk, slab by slab.

        Raises:
            StoreError, IOFault: the store is closed, or its root cannot be locked.
        """
        done = Scrubbed()
        for slab in self._slabs():
            if not self._look_into(slab, done):
                return done
        done.complete = not self._stop.is_set()
        return done

    def _slabs(self) -> list[SlabFile]:
        if (store := self._store()) is None:
            return []
        with store.cleaning() as cleaner:
            return cleaner.slabs()

    def _entries(self, slab: SlabFile) -> list[Entry]:
        if (store := self._store()) is None:
            return []
        with store.cleaning() as cleaner:
            return cleaner.in_slab(slab)

    def _look_into(self, slab: SlabFile, done: Scrubbed) -> bool:
        """All chunks of one slab; False where it was told to stop."""
        entries = self._entries(slab)
        if not entries:
            return True
        place = _place(slab)
        try:
            file = open_slab(place)
        except IOFault as exc:  # it may just have gone
            for entry in entries:
                self._judge(entry, ("io", str(exc)), done)
            return True
        with file:
            reader = SlotReader(_Throttled(file, self._throttle), place)
            for entry in entries:
                if self._stop.is_set():
                    return False
                if entry.dead:
                    done.changed += 1
                else:
                    self._look(entry, reader, done)
                if self._progress is not None:
                    self._progress(done.looked_at)
        return True

    def _look(self, entry: Entry, reader: SlotReader, done: Scrubbed) -> None:
        record = IndexRecord.of(entry)
        wrong = reader.check(record)
        if wrong is not None and self._is_there(entry):
            reader.forget()
            wrong = reader.check(record)
        if wrong is not None:
            self._judge(entry, wrong, done)
            return
        done.chunks += 1
        done.nbytes += entry.slab.layout.payload_bytes
        if (store := self._store()) is not None:
            store.counts.scrubbed(entry.slab.layout.payload_bytes)

    def _judge(self, entry: Entry, wrong: tuple[str, str], done: Scrubbed) -> None:
        """Takes out what fails and is still there, unless that is the drive's doing."""
        if not self._is_there(entry):
            done.changed += 1
            return
        what, detail = wrong
        record = IndexRecord.of(entry)
        finding = Finding(
            what=what, detail=detail, slab_id=record.slab_id, slot=record.slot, offset=entry.slot_offset, record=record
        )
        if what == "io":
            done.unreadable.append(finding)
        elif (store := self._store()) is not None and store.invalidate(entry, what):
            done.removed.append(finding)
            store.maintain()
        reporter.warn("scrub", f"{entry.slab.name} slot {entry.slot} fails: {what}: {detail}")

    def _is_there(self, entry: Entry) -> bool:
        """Whether an up-to-date table has the entry; where it cannot be brought up to date nobody can say so."""
        store = self._store()
        if store is None:
            return False
        with store.cleaning():
            return not entry.dead


def _place(slab: SlabFile) -> Slab:
    return Slab(slab.slab_id, slab.path, slab.file_bytes, slab.layout, slab.num_slots, slab.usable)


def keep_scrubbing(known: weakref.ref[Store], stop: threading.Event, bytes_per_s: int) -> None:
    """Starts a thread that makes one pass after the other; it ends with the store, or with `stop`."""
    threading.Thread(target=_run, args=(known, stop, bytes_per_s), name="kvxfer-scrub", daemon=True).start()


def _run(known: weakref.ref[Store], stop: threading.Event, bytes_per_s: int) -> None:
    scrubber = Scrubber(known, Throttle(bytes_per_s, stop.wait), stop)
    while not stop.wait(PAUSE_S):
        try:
            scrubber.run()
        except KvxferError as exc:
            store = known()
            if store is None or store.is_closed:
                return
            del store  # or it could not go
            reporter.warn("scrub", f"a scrub ended early: {exc}", error=exc)
        except Exception as exc:  # a defect: the next pass may do better, and nobody depends on it
            reporter.warn("scrub", f"a scrub failed: {exc!r}", error=exc)
        if known() is None:
            return
