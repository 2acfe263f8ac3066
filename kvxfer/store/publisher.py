"""Makes what was written visible: to the index first, and then to lookups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvxfer.errors import IOFault
from kvxfer.report import reporter
from kvxfer.slot import MAX_KEY_BYTES, SlotLayout
from kvxfer.store.access import Access
from kvxfer.store.allocator import Allocator
from kvxfer.store.entry import Entry, Reservation, SlotState
from kvxfer.store.ledger import Ledger
from kvxfer.store.records import IndexRecord, Put
from kvxfer.store.slab import SlabFile
from kvxfer.store.stats import Counts
from kvxfer.store.table import Table


class Publisher:
    """Decides what becomes of chunks that were written, by what is under their keys."""

    def __init__(self, table: Table, ledger: Ledger, allocator: Allocator, counts: Counts) -> None:
        self._table, self._ledger, self._allocator, self._counts = table, ledger, allocator, counts

    def flush(self, slabs: Iterable[SlabFile]) -> None:
        """Waits for the device, before any lock is taken; what did not get there is not committed."""
        for slab in slabs:
            try:
                slab.flush()
            except IOFault as exc:
                self._counts.failed_flushes += 1
                reporter.warn("flush", f"{slab.name} cannot be flushed; what was written is dropped: {exc}", error=exc)
                self._table.doubt(slab)

    def publish(self, digest: bytes, items: Sequence[tuple[bytes, Reservation, int]], access: Access) -> list[bool]:
        """One transaction for at most TRANSACTION chunks; which of them can be looked up now. With the root's lock."""
        layout = self._table.layouts.get(digest)
        room = len(items) if layout is None else self._allocator.fit(digest, layout, len(items), access)
        planned: dict[bytes, tuple[Entry, Reservation]] = {}
        puts: dict[bytes, Put] = {}
        outcome: list[bool] = []
        waiting: list[bytes | None] = []  # whose commit an outcome depends on
        surplus: list[Reservation] = []
        for key, reservation, mask in items:
            usable = _fits(layout, key, reservation, mask)
            known = self._table.find(digest, key)
            there = planned[key][0] if key in planned else known
            usable = usable and (len(planned) < room or key in planned or known is not None)
            present = usable and there is not None and mask & ~there.mask == 0
            waiting.append(key if usable and (not present or key in planned) else None)
            outcome.append(present)
            if not usable or present:
                self._counts.duplicates += present
                surplus += [reservation] if reservation.state is SlotState.RESERVED else []
                continue
            if key in planned:
                surplus.append(planned[key][1])
            entry = Entry(digest, key, reservation.slab, reservation.slot, reservation.generation, mask)
            planned[key] = entry, reservation
            puts[key] = Put(IndexRecord.of(entry), known.generation if known else 0)
        with self._table.lock:  # before the index hears of it: other processes are to know both at once
            for entry, _ in planned.values():
                self._table.uses.note(entry.slab.slab_id, entry.slot)
        done = self._ledger.tell(list(puts.values()), committed=[one for _, one in planned.values()])
        if done:
            self._counts.replacements += self._table.install(planned.values(), access)
            self._counts.commits += len(planned)
        else:
            surplus += [reservation for _, reservation in planned.values()]
            self._counts.failed_commits += len(planned)
        self._table.release(surplus)
        return [done if key is not None else present for key, present in zip(waiting, outcome, strict=True)]


def _fits(layout: SlotLayout | None, key: bytes, reservation: Reservation, mask: int) -> bool:
    """Whether a reservation can become this entry."""
    return (
        reservation.state is SlotState.RESERVED
        and not reservation.lease.void
        and reservation.generation not in reservation.slab.doubted
        and layout is not None
        and reservation.slab.layout == layout
        and isinstance(key, bytes)
        and 1 <= len(key) <= MAX_KEY_BYTES
        and 0 < mask < 1 << layout.blocks_per_chunk
    )
