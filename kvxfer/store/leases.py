"""Which slots are taken and not committed: by this process, and by others. Under the table's lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvxfer.store.entry import Lease, Reservation
from kvxfer.store.records import Item, LeaseName, LeaseRow, gone, item

Slot = tuple[int, int, int]  # slab, slot, generation


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
        self._changed: dict[int, Lease] = {}  # the index names slots of it that are settled
        self._number = 0

    # ---- this process's ----------------------------------------------------------------------------------

    def new(self) -> Lease:
        """A lease without slots."""
        self._number += 1
        return Lease(self._number)

    def open(self, lease: Lease, taken: Sequence[Reservation]) -> None:
        """Its slots. One that has none is forgotten."""
        lease.slots = {one.generation: (one.slab.slab_id, one.slot, one.generation) for one in taken}
        if taken:
            self._own[lease.number] = lease

    def settle(self, reservation: Reservation, told: bool) -> None:
        """A reservation is settled. `told`: the index does not name it any more (`without`)."""
        lease = reservation.lease
        lease.slots.pop(reservation.generation, None)
        if lease.void:
            return
        if not told:
            self._changed[lease.number] = lease
        elif not lease.slots and lease.number not in self._changed:
            self._own.pop(lease.number, None)

    def without(self, committed: Iterable[Reservation]) -> list[Item]:
        """What the index is to say of leases when these are committed: an entry takes the place of each.

        Where it cannot be said the reservations are released, and so are on the list again.
        """
        leases: dict[int, tuple[Lease, set[int]]] = {}
        for one in committed:
            leases.setdefault(one.lease.number, (one.lease, set()))[1].add(one.generation)
        for number in leases:
            self._changed.pop(number, None)  # what is released from here on is not in these
        return [self._item(lease, gone_with) for lease, gone_with in leases.values()]

    def take_changed(self, most: int) -> list[Lease]:
        """Takes up to `most` off the list of those of which the index has to hear."""
        taken = [self._changed.pop(number) for number in list(self._changed)[:most]]
        for lease in taken:
            if not lease.slots:
                self._own.pop(lease.number, None)
        return taken

    def keep_changed(self, leases: Iterable[Lease]) -> None:
        """Puts them back on it."""
        for lease in leases:
            self._own[lease.number] = self._changed[lease.number] = lease

    @property
    def has_changed(self) -> bool:
        """Whether there is something to tell the index."""
        return bool(self._changed)

    def item(self, lease: Lease) -> Item:
        """What the index is to say of it: its slots, or nothing any more."""
        return self._item(lease, set())

    def _item(self, lease: Lease, less: set[int]) -> Item:
        row = LeaseRow(self.epoch, lease.number, [slot for slot in lease.slots.values() if slot[2] not in less])
        return item(row) if row.slots else gone(row)

    def own_rows(self) -> list[LeaseRow]:
        """Those of this process that have slots."""
        return [LeaseRow(self.epoch, one.number, list(one.slots.values())) for one in self._own.values() if one.slots]

    # ---- all ---------------------------------------------------------------------------------------------

    def rows(self) -> list[LeaseRow]:
        """Of all processes."""
        return [*self.own_rows(), *self.foreign.values()]

    def names(self) -> list[LeaseName]:
        """Of all processes."""
        return [LeaseName(row.epoch, row.number) for row in self.rows()]

    def set_foreign(self, row: LeaseRow) -> tuple[set[Slot], set[Slot]]:
        """Another process's lease as it is now: slots that came, and slots that went. This process's are left alone."""
        if row.epoch == self.epoch:
            return set(), set()
        known = self.foreign.get((row.epoch, row.number))
        before, after = set(known.slots if known else ()), set(row.slots)
        self.foreign[row.epoch, row.number] = row
        self.foreign_slots += len(after) - len(before)
        return after - before, before - after

    def end(self, epoch: int, number: int) -> LeaseRow | None:
        """The index names it no more. Returns another process's; one of this process becomes void."""
        if epoch == self.epoch:
            if (lease := self._own.pop(number, None)) is not None:
                lease.void = True
                self._changed.pop(number, None)
            return None
        if (row := self.foreign.pop((epoch, number), None)) is not None:
            self.foreign_slots -= len(row.slots)
        return row
