"""Tells the index what the table has decided."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.store.index import TRANSACTION, Index
from kvxfer.store.records import IndexRecord, Item, Put, gone
from kvxfer.store.table import Table


class Ledger:
    """Writes the table's changes into the index. All calls are made with the root's lock."""

    def __init__(self, table: Table, index: Index) -> None:
        self._table, self._index = table, index

    @property
    def has_something_to_say(self) -> bool:
        """Whether the table has changed since the last transaction."""
        return self._table.has_doomed or self._table.leases.has_ended

    def settle(self) -> bool:
        """Tells all there is; False where the index could not be written."""
        while self._table.has_doomed or self._table.leases.has_ended:
            if not self.tell([]):
                return False
        return True

    def tell(self, puts: Sequence[Put], rows: Sequence[Item] = ()) -> bool:
        """One transaction: these, what was invalidated since the last one, and leases that have ended."""
        doomed, ended = self._table.doomed(TRANSACTION), self._table.ended_leases(TRANSACTION)
        deletes = [IndexRecord.of(entry) for entry in doomed]
        over = [gone(self._table.leases.row(lease)) for lease in ended]
        done = self._index.apply(deletes, puts, [*over, *rows])
        if done:
            self._table.settle(doomed)
        else:
            self._table.keep_doomed(doomed)
            self._table.keep_ended(ended)
        return done
