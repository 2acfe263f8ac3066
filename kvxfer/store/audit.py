"""Every slot of a root, read and checked, without opening the root as a store: nothing is changed.

Where others have the root open, a slot may be given to another chunk while it is read. The index forgets an entry
before its slot is given away, so what fails counts only if the index names it still when it is asked afterwards; and it
has to fail twice, since a read may go wrong once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvxfer.errors import ConfigError, IOFault, StoreError
from kvxfer.store.reading import Ended, SlotReader, open_slab
from kvxfer.store.records import IndexRecord
from kvxfer.store.survey import Finding, Slab, Survey, survey_root

MAX_THREADS = 256
_SPAN_BYTES = 64 << 20  # slots that a thread takes at a time

Place = tuple[int, int]  # slab, slot
Progress = Callable[[int, int], None]  # (slots looked at, slots in all)


@dataclass(slots=True)
class Verification:
    """What came of it. An entry is a chunk that the index names, or, without an index, what a rebuild would take."""

    survey: Survey
    slots: int = 0  # that were read
    free: int = 0  # that hold nothing
    stale: int = 0  # that hold what the index names no more; their payload is not read
    verified: int = 0  # entries whose every byte is right
    verified_bytes: int = 0  # their payload
    changed: int = 0  # slots that were given to another chunk while they were read
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Verification) -> None:
        """Takes in what another look found to be right."""
        self.free += other.free
        self.stale += other.stale
        self.verified += other.verified
        self.verified_bytes += other.verified_bytes

    @property
    def entries_failed(self) -> int:
        """Entries that cannot be loaded."""
        return sum(finding.record is not None for finding in self.findings)


def verify_root(
    root: Path, *, threads: int = 4, progress: Progress | None = None, only: Collection[Place] | None = None
) -> Verification:
    """Reads every slot of every slab: trailers, and each entry's payload against its sums.

    Args:
        root: an existing root; it may be in use.
        threads: that read; each holds 1 MiB and a few pages.
        progress: called from their threads, one at a time.
        only: places to look at, instead of all.

    Raises:
        ConfigError: there is no root, or `threads` is not 1 to MAX_THREADS.
        FormatError: it, or a slab, is of another version.
        IOFault: it cannot be read.
        StoreError: it is in use, and its index is written too often to be read.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads={threads} must be 1..{MAX_THREADS}")
    seen = _survey(root)
    first = _Pass(seen, threads, progress).run(only)
    result = first.result
    if not result.findings:
        result.findings = list(seen.findings)
        return result
    later = _survey(root)
    failing = {finding.record for finding in result.findings if finding.record}
    named = failing & set(later.index.records) if later.index.usable else failing
    places = {(record.slab_id, record.slot) for record in named}
    second = _Pass(later, threads, None).run(places)
    result.survey = later
    result.changed = len(first.failed - places)
    result.add(second.result)
    result.findings = [*later.findings, *(each for each in second.result.findings if each.record in failing)]
    return result


def _survey(root: Path) -> Survey:
    seen = survey_root(root)
    if seen.index.state == "busy":
        raise StoreError(f"the index of {root} cannot be read now: {seen.index.why}; try again at a quieter moment")
    return seen


class _Pass:
    """One look at slots, by several threads. What fails is in `failed`, and not in the result's counts."""

    def __init__(self, seen: Survey, threads: int, progress: Progress | None) -> None:
        self.result = Verification(seen)
        self.failed: set[Place] = set()
        self._survey = seen
        self._threads = threads
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = False
        self._total = 0
        self._named: Mapping[Place, list[IndexRecord]] = defaultdict(list)
        for record in seen.index.records:
            if seen.is_there(record):
                self._named[record.slab_id, record.slot].append(record)

    def run(self, only: Collection[Place] | None) -> _Pass:
        """Looks at all slots, or at those."""
        slabs = self._survey.slabs
        if only is None:
            self._total = sum(slab.whole_slots for slab in slabs.values())
            spans = iter(_spans(slabs.values()))
        else:
            here = sorted(place for place in only if place[0] in slabs and place[1] < slabs[place[0]].whole_slots)
            self._total = len(here)
            spans = iter([(slabs[slab_id], range(slot, slot + 1)) for slab_id, slot in here])
        with ThreadPoolExecutor(self._threads, thread_name_prefix="kvx-verify") as pool:
            try:
                for worker in [pool.submit(self._work, spans) for _ in range(self._threads)]:
                    worker.result()
            finally:
                self._stop = True  # an exception, or Ctrl-C, does not wait for the rest
        return self

    def _work(self, spans: Iterator[tuple[Slab, range]]) -> None:
        while not self._stop:
            with self._lock:
                span = next(spans, None)
            if span is None:
                return
            self._look_at_span(*span)

    def _look_at_span(self, slab: Slab, slots: range) -> None:
        try:
            file = open_slab(slab)
        except IOFault as exc:
            for slot in slots:
                if records := self._records(slab, slot):
                    self._settle(slab, slot, [self._finding(slab, slot, "io", str(exc), each) for each in records])
            return
        with file:
            reader = SlotReader(file, slab)
            for slot in slots:
                if self._stop:
                    return
                self._settle(slab, slot, self._look_at(reader, slab, slot))

    def _records(self, slab: Slab, slot: int) -> Sequence[IndexRecord]:
        return self._named.get((slab.slab_id, slot), ())

    def _look_at(self, reader: SlotReader, slab: Slab, slot: int) -> list[Finding] | str:
        """What fails in a slot, or what it is otherwise: "verified", "free" or "stale"."""
        records: Sequence[IndexRecord] = self._records(slab, slot)
        if not records:
            try:
                sealed = reader.identify(slot)
            except (IOFault, Ended):
                return "free"  # nobody's bytes: a write into it will tell
            if sealed is None or self._survey.index.usable:
                return "free" if sealed is None else "stale"
            records = [sealed]
        findings = []
        for record in records:
            if (wrong := reader.check(record)) is not None:
                findings.append(self._finding(slab, slot, *wrong, record))
        return findings or "verified"

    @staticmethod
    def _finding(slab: Slab, slot: int, what: str, detail: str, record: IndexRecord) -> Finding:
        return Finding(
            what=what, detail=detail, slab_id=slab.slab_id, slot=slot, offset=slab.slot_offset(slot), record=record
        )

    def _settle(self, slab: Slab, slot: int, outcome: list[Finding] | str) -> None:
        with self._lock:
            result = self.result
            result.slots += 1
            if isinstance(outcome, list):
                self.failed.add((slab.slab_id, slot))
                result.findings += outcome
            elif outcome == "verified":
                result.verified += 1
                result.verified_bytes += slab.layout.payload_bytes
            elif outcome == "stale":
                result.stale += 1
            else:
                result.free += 1
            if self._progress is not None:
                self._progress(result.slots, self._total)


def _spans(slabs: Iterable[Slab]) -> Iterator[tuple[Slab, range]]:
    for slab in slabs:
        step = max(1, _SPAN_BYTES // slab.layout.slot_bytes)
        for first in range(0, slab.whole_slots, step):
            yield slab, range(first, min(first + step, slab.whole_slots))
