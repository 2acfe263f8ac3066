"""Which slots are taken and not committed: by this process, and by others. Under the table's lock."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.store.entry import Lease, Reservation
from kvxfer.store.records import LeaseName, LeaseRow


class Leases:
    """Leases as the index has them, or is about to have them.

    Args:
        epoch: names this process in the index; stays, also when its generations go on under another one.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.foreign: dict[tuple[int, int], LeaseRow] = {}  # by epoch and number
        self.foreign_slots = 0
        self._own: dict[int, Lease] = {}  # by number
        self._ended: list[Lease] = []  # all settled, but the index still names them
        self._number = 0

    # ---- this process's ----------------------------------------------------------------------------------

    def new(self) -> Lease:
        """A lease without slots."""
        self._number += 1
        return Lease(self._number)

    def open(self, lease: Lease, taken: Sequence[Reservation]) -> None:
        """Its slots. One that has none is forgotten."""
        lease.open = len(taken)
        lease.slots = [(one.slab.slab_id, one.slot, one.generation) for one in taken]
        if taken:
            self._own[lease.number] = lease

    def settle(self, lease: Lease) -> None:
        """One of its reservations is settled."""
        lease.open -= 1
        if not lease.open and not lease.void:
            self._ended.append(lease)

    def take_ended(self, most: int) -> list[Lease]:
        """Takes up to `most` off the list of those that the index can forget."""
        taken, self._ended = self._ended[:most], self._ended[most:]
        for lease in taken:
            self._own.pop(lease.number, None)
        return taken

    def keep_ended(self, leases: list[Lease]) -> None:
        """Puts them back on it."""
        self._own |= {lease.number: lease for lease in leases}
        self._ended = leases + self._ended

    @property
    def has_ended(self) -> bool:
        """Whether there are leases for the index to forget."""
        return bool(self._ended)

    def row(self, lease: Lease) -> LeaseRow:
        """Its row."""
        return LeaseRow(self.epoch, lease.number, lease.slots)

    def own_rows(self) -> list[LeaseRow]:
        """Those of this process."""
        return [self.row(lease) for lease in self._own.values()]

    # ---- all ---------------------------------------------------------------------------------------------

    def rows(self) -> list[LeaseRow]:
        """Of all processes."""
        return [*self.own_rows(), *self.foreign.values()]

    def names(self) -> list[LeaseName]:
        """Of all processes."""
        return [LeaseName(row.epoch, row.number) for row in self.rows()]

    def add_foreign(self, row: LeaseRow) -> bool:
        """Another process's lease; False if it is known, or this process's."""
        name = row.epoch, row.number
        if row.epoch == self.epoch or name in self.foreign:
            return False
        self.foreign[name] = row
        self.foreign_slots += len(row.slots)
        return True

    def end(self, epoch: int, number: int) -> LeaseRow | None:
        """The index names it no more. Returns another process's; one of this process becomes void."""
        if epoch == self.epoch:
            if (lease := self._own.pop(number, None)) is not None:
                lease.void = True
            return None
        if (row := self.foreign.pop((epoch, number), None)) is not None:
            self.foreign_slots -= len(row.slots)
        return row
