"""Keeps a process's table as the index is: what other processes of the root have changed since the last look.

All of it happens with the root's lock, so that whoever holds that decides on what is so, and not on what was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import lmdb

from kvxfer.errors import FormatError, IOFault
from kvxfer.report import reporter
from kvxfer.store.index import TRANSACTION, Index
from kvxfer.store.members import RootLock
from kvxfer.store.records import (
    EntryName,
    IndexRecord,
    Item,
    LeaseName,
    LeaseRow,
    MemberName,
    MemberRow,
    Name,
    Row,
    SlabName,
    SlabRow,
    UsedName,
    UsedRow,
    gone,
    item,
    parse,
    parse_name,
)
from kvxfer.store.room import SlabRoom
from kvxfer.store.table import Table
from kvxfer.store.uses import recency

# A row may name one of an earlier kind, and entries come last: where one and a lease name one slot, it was committed.
_KINDS = (SlabRow, MemberRow, LeaseRow)


class Follower:
    """Applies the index's changes to a table and a room, and knows who else is there."""

    def __init__(self, index: Index, table: Table, room: SlabRoom, lock: RootLock) -> None:
        self.members: dict[int, MemberRow] = {}  # by seat
        self._tools: set[int] = set()  # seats of those that write for no request
        self.me = MemberRow(lock.seat, table.leases.epoch, os.getpid())
        self._unopened: set[int] = set()  # slabs that are there, and that this process could not open
        self._index, self._table, self._room, self._lock = index, table, room, lock

    def catch_up(self) -> bool:
        """Brings everything up to date; False where that failed while others are there: nothing may be changed then.

        Storage errors are counted. The index is then read again, or written anew from the table, by `Index.recover`.
        """
        behind = False
        try:
            changed = self._index.changes()
            if changed is None:
                self.reload(self._index.everything())
            elif changed:
                self._apply([_parsed(change) for change in changed])
            self._sign()
        except (lmdb.Error, OSError) as exc:
            self._index.failed("catching up", exc)
            self._index.forget_position()
            behind = not self.is_alone
        except BaseException:
            self._index.forget_position()
            raise
        if not behind:
            self._room.finish()
        return not behind

    def _sign(self) -> None:
        """Tells others that this process is there, as long as the index does not say it."""
        if self.members.get(self.me.seat) != self.me and self._index.add_epoch(self.me.epoch, [item(self.me)]):
            self._apply([self.me])

    def reload(self, rows: list[Row]) -> None:
        """Makes everything as these rows, which are all there are, say."""
        rows.sort(key=self._order(rows))
        kept = {(type(name), name) for name in map(_name, rows)}  # a named tuple is equal to one of another kind
        # A number may have been given again meanwhile, to another file.
        self._apply([SlabName(slab.slab_id) for slab in self._table.slabs() if not slab.is_named()])
        stale: list[Name] = [SlabName(slab_id) for slab_id in self._room.rows]
        stale += [MemberName(seat) for seat in self.members]
        with self._table.lock:
            living, leases = self._table.living(), self._table.leases.names()
        stale += [EntryName(entry.digest, entry.key) for entry in living]
        stale += leases
        self._apply([name for name in stale if (type(name), name) not in kept])
        self._apply(rows)
        self._sign()

    def _order(self, rows: list[Row]) -> Callable[[Row], tuple[int, ...]]:
        """Kinds after each other; entries as they were used, as far as that is known."""
        kinds = {kind: number for number, kind in enumerate(_KINDS)}
        key = recency((row for row in rows if isinstance(row, UsedRow)), self._index.epoch_order)
        return lambda row: (len(kinds), key(row)) if isinstance(row, IndexRecord) else (kinds.get(type(row), -1),)

    def begin(self) -> None:
        """The first process: writes down itself and its slabs, and forgets what earlier ones were doing."""
        self.members = {self.me.seat: self.me}
        self._index.begin([*self._room.rows.values(), self.me])

    def everything(self) -> list[Row]:
        """All rows but epochs, for an index that is written anew."""
        with self._table.lock:
            uses = self._table.uses.rows()
        return [*self._table.everything(), *uses, *self._room.rows.values(), *self.members.values()]

    @property
    def is_alone(self) -> bool:
        """Whether no other process has the root open, as far as is known."""
        return self.members.keys() <= {self.me.seat}

    @property
    def writers(self) -> int:
        """Processes that have the root open and write for requests, as far as is known."""
        return len(self.members.keys() - self._tools)

    def reap(self) -> None:
        """Takes back what processes that have ended had taken."""
        try:
            dead = [row for row in self.members.values() if not self._is_alive(row)]
        except IOFault as exc:
            self._index.failed("looking for processes", exc)
            return
        # Not only those of the dead: a row in the seat of one may be another's by now.
        epochs = {row.epoch for row in self.members.values()} - {row.epoch for row in dead}
        leases = [row for row in self._table.leases.foreign.values() if row.epoch not in epochs]
        over: list[Row] = [*dead, *leases]
        if not over:
            return
        items = [gone(row) for row in over]
        if self._index.apply([], [], items):
            self._apply([_parsed(change) for change in items])

    def _is_alive(self, row: MemberRow) -> bool:
        return row.seat == self.me.seat or self._lock.is_taken(row.seat)

    def _apply(self, changed: Iterable[Row | Name | None]) -> None:
        entries: list[Row | Name] = []
        for change in changed:
            match change:
                case None | UsedName():  # times go with their slab
                    continue
                case UsedRow():
                    with self._table.lock:
                        self._table.uses.merge(change)
                    continue
                case IndexRecord() | EntryName() | LeaseRow() | LeaseName():
                    entries.append(change)
                    continue
            self._apply_entries(entries)
            entries = []
            match change:
                case SlabRow():
                    self._slab(change)
                case SlabName(slab_id):
                    self._retire(slab_id)
                    self._room.forget(slab_id)
                    with self._table.lock:
                        self._table.uses.drop(slab_id)
                case MemberRow(seat=seat):
                    self.members[seat] = change
                    self._tools.discard(seat)
                    if self._lock.is_tool(seat):
                        self._tools.add(seat)
                case MemberName(seat):
                    self.members.pop(seat, None)
        self._apply_entries(entries)
        self._index.shared = not self.is_alone
        self._table.close_idle()

    def _apply_entries(self, changed: list[Row | Name]) -> None:
        for start in range(0, len(changed), TRANSACTION):  # a pin is not to wait for a million of them
            with self._table.lock:
                for change in changed[start : start + TRANSACTION]:
                    self._apply_entry(change)

    def _apply_entry(self, change: Row | Name) -> None:
        match change:
            case IndexRecord():
                self._table.follow_put(change)
            case EntryName(digest, key):
                self._table.follow_delete(digest, key)
            case LeaseRow():
                self._table.follow_lease(change)
            case LeaseName(epoch, number):
                self._table.follow_lease_end(epoch, number)

    def _slab(self, row: SlabRow) -> None:
        self._room.note(row)
        self._unopened.discard(row.slab_id)
        if not row.is_ready:
            self._retire(row.slab_id)
        elif row.slab_id not in self._table.slabs_by_id:
            self._open(row.slab_id)

    def _open(self, slab_id: int) -> bool:
        try:
            if (slab := self._room.open(slab_id)) is not None:
                self._table.attach(slab)
                return True
        except (IOFault, FormatError) as exc:
            self._room.errors += 1
            self._unopened.add(slab_id)
            reporter.warn(f"slab {slab_id}", f"another process's slab cannot be opened here: {exc}", error=exc)
        return False

    def retry(self) -> None:
        """Tries slabs again that could not be opened; what is in them is read with the next look at the index."""
        for slab_id in list(self._unopened & self._room.rows.keys()):
            self._unopened.discard(slab_id)
            if self._open(slab_id):
                self._index.forget_position()

    def _retire(self, slab_id: int) -> None:
        with self._table.lock:
            self._table.follow_retire(slab_id)


def _parsed(change: Item) -> Row | Name | None:
    name, value = change
    return parse_name(name) if value is None else parse(name, value)


def _name(row: Row) -> Name | None:
    return parse_name(gone(row)[0])
