"""Tells the index what the table has decided."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.store.entry import Reservation
from kvxfer.store.index import TRANSACTION, Index
from kvxfer.store.records import IndexRecord, Item, Put, item
from kvxfer.store.table import Table

_USES = 256  # rows of times of use in one transaction


class Ledger:
    """Writes the table's changes into the index. All calls are made with the root's lock."""

    def __init__(self, table: Table, index: Index) -> None:
        self._table, self._index = table, index

    @property
    def has_something_to_say(self) -> bool:
        """Whether the table has changed since the last transaction."""
        return self._table.has_doomed or self._table.leases.has_changed

    def settle(self, everything: bool = False) -> bool:
        """Tells all there is; False where the index could not be written.

        Times of use can wait, but for those of what is committed: they go with what is told anyway, and at most one
        more time alone, unless `everything`.
        """
        uses = self._table.uses
        while self.has_something_to_say:
            if not self.tell([]):
                return False
        while uses.has_changed:
            if not self.tell([]):
                return False
            if not everything:
                break
        return True

    def tell(self, puts: Sequence[Put], rows: Sequence[Item] = (), committed: Sequence[Reservation] = ()) -> bool:
        """One transaction: these, what was invalidated since the last one, and leases that have changed.

        Args:
            puts: entries to write.
            rows: other rows.
            committed: the reservations that the entries take the place of.
        """
        table = self._table
        doomed = table.doomed(TRANSACTION)
        deletes = [IndexRecord.of(entry) for entry in doomed]
        with table.lock:  # what is released from here on is told the next time
            changed = table.leases.take_changed(TRANSACTION)
            leases = [table.leases.item(lease) for lease in changed]
            leases += table.leases.without(committed)
            # Those of what is committed with it: else others would take it to be as old as its slot's last chunk.
            uses = table.uses.take_changed(_USES, [(one.slab.slab_id, one.slot) for one in committed])
        done = self._index.apply(deletes, puts, [*leases, *map(item, uses), *rows])
        if done:
            table.settle(doomed)
            return True
        table.keep_doomed(doomed)
        with table.lock:
            table.leases.keep_changed(changed)
            table.uses.keep_changed(uses)
        return False
