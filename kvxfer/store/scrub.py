"""Reads and checks what is stored while it is served, no faster than told; what is damaged becomes a miss.

The store's own table says what is where, so nothing is copied and nobody waits. A slot may be given to another chunk
while it is read: what fails counts only if the table, brought up to date, still has it, and it fails again.

How far a pass has come is kept in the root (scrub_pass.py), and a pass that was cut short is gone on with.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import IOFault, KvxferError
from kvxfer.report import reporter
from kvxfer.store import scrub_pass
from kvxfer.store.entry import Entry
from kvxfer.store.reading import Readable, SlotReader, open_slab
from kvxfer.store.records import IndexRecord
from kvxfer.store.slab import SlabFile
from kvxfer.store.survey import Finding, Slab

if TYPE_CHECKING:
    from kvxfer.store.store import Store

PAUSE_S = 60.0  # between the passes of a store's own thread
NOTE_S = 30.0  # how often it is written down how far a pass has come: what a process that is killed has read in vain

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
    """What a pass came to, or the part of it that one process did."""

    started: int = 0  # when the pass began, in seconds since 1970
    went_on: bool = False  # with a pass that was begun before
    chunks: int = 0  # that were verified
    nbytes: int = 0  # their payload
    changed: int = 0  # that were evicted or replaced while they were read
    removed: list[Finding] = field(default_factory=list)  # damaged: they are misses now
    unreadable: list[Finding] = field(default_factory=list)  # the drive did not give them: they stay
    complete: bool = False  # whether all was looked at since the pass began

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
        clock: seconds.
        anew: begins a pass, though one is under way.
    """

    def __init__(
        self,
        store: Callable[[], Store | None],
        throttle: Throttle,
        stop: threading.Event,
        progress: Progress | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        anew: bool = False,
    ) -> None:
        self._store, self._throttle, self._stop, self._progress = store, throttle, stop, progress
        self._clock, self._anew = clock, anew
        self._pass = scrub_pass.Pass(0, 0)
        self._next_note = 0.0
        self.done: Scrubbed | None = None  # of the latest pass, for whoever interrupts it

    def run(self) -> Scrubbed:
        """Looks at everything that is there, in the order in which it lies on the disk, slab by slab; where a pass is
        under way, at what comes behind its place.

        Raises:
            StoreError, IOFault: the store is closed, or its root cannot be locked.
        """
        self._begin()
        done = self.done = Scrubbed(started=self._pass.started, went_on=self._pass.place > (0, 0))
        try:
            done.complete = all(self._look_into(slab, done) for slab in self._slabs()) and self._end()
        finally:
            if not done.complete:
                self._note()
        return done

    def _begin(self) -> None:
        self._pass = scrub_pass.new_pass()
        self._next_note = self._clock() + NOTE_S
        if (store := self._store()) is None or not store.config.keeps_scrubs:
            return
        with store.cleaning():
            try:
                self._pass = scrub_pass.begin(store.config.root, anew=self._anew)
            except IOFault as exc:  # then it is not gone on with
                _not_written(exc)

    def _look_done(self, slab_id: int, slot: int) -> None:
        """Everything before a slot was looked at."""
        self._pass = replace(self._pass, slab=slab_id, slot=slot)
        if self._clock() >= self._next_note:
            self._note()

    def _note(self) -> None:
        """Writes down how far the pass is, and takes over what another process did for it."""
        self._next_note = self._clock() + NOTE_S
        if (store := self._store()) is None or store.is_closed or not store.config.keeps_scrubs:
            return
        try:
            with store.cleaning():
                self._pass = scrub_pass.note(store.config.root, self._pass)
        except KvxferError as exc:
            if not store.is_closed:  # it may just have been
                _not_written(exc)

    def _end(self) -> bool:
        """All was looked at; False where that is because the store has gone."""
        if (store := self._store()) is None:
            return False
        if not store.config.keeps_scrubs:
            return True
        try:
            with store.cleaning():
                store.counts.scrub_ended = scrub_pass.end(store.config.root, self._pass)
        except IOFault as exc:
            _not_written(exc)
        return True

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
        """All chunks of one slab that the pass has not come to yet; False where it was told to stop."""
        entries = [entry for entry in self._entries(slab) if (slab.slab_id, entry.slot) >= self._pass.place]
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
                if (slab.slab_id, entry.slot) < self._pass.place:  # another process was here meanwhile
                    continue
                if entry.dead:
                    done.changed += 1
                else:
                    self._look(entry, reader, done)
                self._look_done(slab.slab_id, entry.slot + 1)
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
        store = self._store()
        if what == "io":
            done.unreadable.append(finding)
            if store is not None:
                store.counts.unreadable_chunks += 1
        elif store is not None:
            done.removed.append(finding)  # first: an interrupt may come at any time
            if store.invalidate(entry, what):
                store.maintain()
            else:
                done.removed.pop()
        reporter.warn("scrub", f"{entry.slab.name} slot {entry.slot} fails: {what}: {detail}")

    def _is_there(self, entry: Entry) -> bool:
        """Whether an up-to-date table has the entry; where it cannot be brought up to date nobody can say so."""
        store = self._store()
        if store is None:
            return False
        with store.cleaning():
            return not entry.dead


def _not_written(exc: KvxferError) -> None:
    reporter.warn("scrub", f"how far a scrub is cannot be written down: {exc}", error=exc)


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
