"""When each slot was used last, to ten minutes: in memory, and in rows of the index (ADR 13).

A time belongs to the slot, not to the chunk in it: whatever is stored into it later was stored later, so times only go
up, and whoever merges two pictures takes the later one. An unknown time is 0, and counts as now.

Times are beginnings of ten minutes, the same for all slots, so that what is used in one request, head and tail of a
chain, has one time. A use of a chunk is one of all that it is known to follow (access.py).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from kvxfer.store.entry import Entry
from kvxfer.store.records import USE_SLOTS, IndexRecord, Item, UsedRow, gone

_LATEST = 2**32 - 1  # that a row can say
GRAIN_S = 600  # a use in the same ten minutes as the one before it is not written down
clock: Callable[[], float] = time.time

_Block = tuple[int, int]  # slab, number of the block of USE_SLOTS slots


class UseTimes:
    """Seconds since 1970 by slab and slot. Belongs to the table, and is used with its lock but for `has_changed`."""

    def __init__(self) -> None:
        self._slabs: dict[int, dict[int, array[int]]] = {}
        self._changed: dict[_Block, None] = {}  # in the order in which the index is to hear of them
        self._latest = 0  # of the times at which something was noted

    def note(self, slab_id: int, slot: int) -> bool:
        """The slot is used now; whether that is news."""
        at = now() // GRAIN_S * GRAIN_S
        if at != self._latest:
            if at < self._latest - GRAIN_S:
                self._set_back(at)
            self._latest = at
        return self.note_at(slab_id, slot, at)

    def _set_back(self, latest: int) -> None:
        """The clock was: no use is later than now. Else none would be news until the clock is there again, and others,
        who took those times for the moment at which they heard of them, would take out what is in use here."""
        for blocks in self._slabs.values():
            for times in blocks.values():
                if max(times) > latest:
                    times[:] = array("I", (min(used, latest) for used in times))

    def note_at(self, slab_id: int, slot: int, at: int) -> bool:
        """The slot was used at a time that `at` gave for another one; whether that is news."""
        block, place = slot // USE_SLOTS, slot % USE_SLOTS
        try:
            times = self._slabs[slab_id][block]
        except KeyError:
            times = self._block(slab_id, block)
        if times[place] >= at:
            return False
        times[place] = at
        self._changed[slab_id, block] = None
        return True

    def at(self, slab_id: int, slot: int) -> int:
        """When a slot was used last, at the earliest, and at most GRAIN_S later; 0 where that is not known."""
        times = self._slabs.get(slab_id, {}).get(slot // USE_SLOTS)
        return times[slot % USE_SLOTS] if times is not None else 0

    def adopt(self, rows: Iterable[UsedRow], entries: Iterable[Entry]) -> None:
        """What an earlier process left. Entries of which it says nothing (the index was lost) count as used now."""
        for row in rows:
            self.merge(row)
        for entry in entries:
            if not self.at(entry.slab.slab_id, entry.slot):
                self.note(entry.slab.slab_id, entry.slot)

    def before(self, slab_id: int, cutoff: float) -> Iterator[int]:
        """The slots of a slab that were used last before `cutoff`. Not those of which nothing is known."""
        for block, times in self._slabs.get(slab_id, {}).items():
            if min(times) < cutoff:
                for place, used in enumerate(times):
                    if 0 < used < cutoff:
                        yield block * USE_SLOTS + place

    def _block(self, slab_id: int, block: int) -> array[int]:
        blocks = self._slabs.setdefault(slab_id, {})
        if (times := blocks.get(block)) is None:
            times = blocks[block] = array("I", bytes(4 * USE_SLOTS))
        return times

    # ---- the index's rows --------------------------------------------------------------------------------

    def merge(self, row: UsedRow) -> None:
        """Takes in what another process knows. A time that is yet to come counts as now: a clock was wrong once."""
        times, latest = self._block(row.slab_id, row.block), now() // GRAIN_S * GRAIN_S
        for place, used in enumerate(row.times):
            if used > times[place]:
                times[place] = min(used, latest)

    @property
    def has_changed(self) -> bool:
        """Whether there is something to tell the index."""
        return bool(self._changed)

    def take_changed(self, most: int, ahead: Iterable[tuple[int, int]] = ()) -> list[UsedRow]:
        """Takes up to `most` rows off the list of those of which the index has to hear: those with the slots `ahead`
        (slab, slot), all of them, and then the others in their order."""
        names = ((slab_id, slot // USE_SLOTS) for slab_id, slot in ahead)
        taken = list(dict.fromkeys(name for name in names if name in self._changed))
        first = set(taken)
        taken += islice((name for name in self._changed if name not in first), max(0, most - len(taken)))
        for name in taken:
            del self._changed[name]
        return [self._row(*name) for name in taken if name[1] in self._slabs.get(name[0], ())]

    def keep_changed(self, rows: Iterable[UsedRow]) -> None:
        """Puts them back on it."""
        self._changed |= {(row.slab_id, row.block): None for row in rows}

    def rows(self) -> list[UsedRow]:
        """All of it."""
        return [self._row(slab_id, block) for slab_id, blocks in self._slabs.items() for block in blocks]

    def forgotten(self, slab_id: int) -> list[Item]:
        """What the index is to say of a slab that is not there any more: nothing."""
        return [gone(self._row(slab_id, block)) for block in self._slabs.get(slab_id, ())]

    def drop(self, slab_id: int) -> None:
        """The slab is gone, and its rows with it."""
        self._slabs.pop(slab_id, None)

    def _row(self, slab_id: int, block: int) -> UsedRow:
        return UsedRow(slab_id, block, tuple(self._slabs[slab_id][block]))


def now() -> int:
    """The time that rows and comparisons with them go by: a clock that is far out keeps nobody from using a chunk."""
    return min(max(0, int(clock())), _LATEST)


def unused_since(at: float, seconds: float) -> float:
    """What was used last before this had not been used for so long at that time: a use in the ten minutes after one
    that was written down was not written down itself."""
    return at - seconds - GRAIN_S


def recency(rows: Iterable[UsedRow], order_of: Callable[[int], int]) -> Callable[[IndexRecord], int]:
    """By what records are sorted so that the least recently used is first: last use, then (or not known) storing.

    Args:
        rows: when slots were used last.
        order_of: of an epoch of generations, when it began against others.
    """
    times, latest, unknown = {(row.slab_id, row.block): row.times for row in rows}, now(), (0,) * USE_SLOTS

    def key(record: IndexRecord) -> int:  # one number: a million of them are compared twenty times each
        _, _, slab_id, slot, generation, _ = record
        used = times.get((slab_id, slot // USE_SLOTS), unknown)[slot % USE_SLOTS]
        if not 0 < used < latest:
            used = latest
        return used << 96 | order_of(generation >> 32) << 32 | generation & 0xFFFFFFFF

    return key
