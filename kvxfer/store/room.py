"""The slabs' share of the capacity: making slabs, removing them, and the sums that keep both under the cap."""

from __future__ import annotations

import errno
import time
from enum import Enum

from kvxfer.config import StoreConfig, slab_cost
from kvxfer.errors import ConfigError, IOFault
from kvxfer.io.modes import in_memory
from kvxfer.io.system import TEMPORARY, try_unlink
from kvxfer.report import reporter
from kvxfer.slot import SlotLayout
from kvxfer.store.index import Index
from kvxfer.store.opening import Opened
from kvxfer.store.records import SlabRow, SlabState, gone, item
from kvxfer.store.root import SLABS
from kvxfer.store.slab import SlabFile, inspect_slab, slab_file_bytes, slab_name, slots_for, whole_slots
from kvxfer.store.table import Table

RETRY_S = 1.0  # after a slab could not be made
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}  # what removing another slab may cure


class Made(Enum):
    """What came of making a slab."""

    YES = "yes"
    OVER_CAP = "over the cap"
    FULL = "the disk, or the table of open files, is full"
    FAILED = "failed, or failed a moment ago"


class SlabRoom:
    """Makes and removes slabs, and knows those of all processes. All calls are made with the root's lock.

    The index hears of a slab before it is made and after it was removed, so that one that a process leaves half made
    is found, counts against the cap, and goes (`finish`).
    """

    def __init__(self, config: StoreConfig, opened: Opened, table: Table, index: Index, writers: int) -> None:
        self.created = self.removed = 0
        self.errors = opened.slab_errors
        self.other_bytes, self.other_files = opened.other_bytes, opened.other_files
        self.rows: dict[int, SlabRow] = {}
        # What is counted for slabs and for what is not the store's.
        self.used_bytes, self.used_files = self.other_bytes, self.other_files
        self._config = config
        self._direct = opened.mode.direct
        # There a page is made in less time when it is written than ahead, and is of use to others until then.
        self._sparse = in_memory(config.root)
        self._durable = config.durability == "power"
        self._alignment = opened.info.alignment
        self._table = table
        self._index = index
        self._writers = writers
        self._directory = config.root / SLABS
        self._budget = config.slab_budget
        self._next_id = opened.next_slab_id
        self._retry_at = self._finish_at = 0.0
        self._unfinished: set[int] = set()
        self._shapes: dict[SlotLayout, tuple[int, int]] = {}  # slots of a new slab, what it counts as
        for slab in opened.slabs:
            self.note(SlabRow(slab.slab_id, SlabState.READY, slab_cost(slab.file_bytes)))

    # ---- what the index says -----------------------------------------------------------------------------

    def note(self, row: SlabRow) -> None:
        """There is this slab, or one is about to be made or removed."""
        self.forget(row.slab_id)
        self.rows[row.slab_id] = row
        self.used_bytes += row.cost
        self.used_files += 1
        self._next_id = max(self._next_id, row.slab_id + 1)
        if not row.is_ready:
            self._unfinished.add(row.slab_id)

    def forget(self, slab_id: int) -> None:
        """There is no such slab any more."""
        self._unfinished.discard(slab_id)
        if (row := self.rows.pop(slab_id, None)) is not None:
            self.used_bytes -= row.cost
            self.used_files -= 1

    def open(self, slab_id: int) -> SlabFile | None:
        """Another process's slab; None where the file is not what it should be.

        Raises:
            IOFault: it cannot be opened or read.
            FormatError: it is of another version.
        """
        found = inspect_slab(self._directory / slab_name(slab_id), slab_id, self._alignment)
        if found.error:
            raise IOFault(errno.EIO, found.error, str(found.path))
        if found.header is None:
            return None
        slab = SlabFile.open(found, found.header, self._direct)
        slab.usable = whole_slots(found.header, found.size)
        slab.occupy(set())
        return slab

    def finish(self) -> None:
        """Removes what a process that ended had begun to make or to remove."""
        if not self._unfinished or time.monotonic() < self._finish_at:
            return
        self._finish_at = time.monotonic() + RETRY_S
        for slab_id in sorted(self._unfinished):
            path = self._directory / slab_name(slab_id)
            faults = [try_unlink(path), try_unlink(path.with_name(path.name + TEMPORARY))]
            if any(faults):
                self.errors += 1
                reporter.warn("slab removal", f"{path.name} cannot be removed and counts against the cap: {faults}")
            else:
                self._tell_gone(slab_id)

    def _tell(self, slab_id: int, state: SlabState, cost: int) -> bool:
        row = SlabRow(slab_id, state, cost)
        if not self._index.apply([], [], [item(row)]):
            return False
        self.note(row)
        return True

    def _tell_gone(self, slab_id: int) -> None:
        with self._table.lock:
            times = self._table.uses.forgotten(slab_id)
        if self._index.apply([], [], [gone(self.rows[slab_id]), *times]):
            self.forget(slab_id)
            with self._table.lock:
                self._table.uses.drop(slab_id)

    # ---- making and removing -----------------------------------------------------------------------------

    def slots_per_slab(self, layout: SlotLayout) -> int:
        """Slots of a new slab; one where `slab_bytes` was left out and would hold none.

        Raises:
            ConfigError: a slot does not fit into a slab, or a slab not into the capacity.
        """
        slab_bytes = self._config.effective_slab_bytes
        slots = slots_for(layout, slab_bytes)
        if not slots and self._config.slab_bytes is not None:
            raise ConfigError(
                f"slab_bytes={slab_bytes} holds no slot of {layout.slot_bytes} bytes and a header of {layout.alignment}"
            )
        cost = slab_cost(slab_file_bytes(layout, max(1, slots)))
        budget = self._budget[0] - self.other_bytes
        if cost > budget:
            raise ConfigError(
                f"capacity_bytes={self._config.capacity_bytes} has {budget} bytes for slabs, one for slots of "
                f"{layout.slot_bytes} bytes takes {cost}"
            )
        self._shapes[layout] = max(1, slots), cost
        return max(1, slots)

    def widen(self, layout: SlotLayout, n: int) -> Made:
        """Makes slabs until as many as there are writers (or slots asked for) have free slots; else one more."""
        have = self._table.open_slabs(layout)
        for _ in range(min(self._writers, max(n, have + 1)) - have):
            if (made := self.create(layout)) is not Made.YES:
                return made
        return Made.YES

    def fits(self, layout: SlotLayout) -> bool:
        """Whether the cap has room for one more slab. Pre: `slots_per_slab` has accepted the layout."""
        nbytes, nfiles = self._budget
        return self.used_bytes + self._shapes[layout][1] <= nbytes and self.used_files + 1 <= nfiles

    def create(self, layout: SlotLayout) -> Made:
        """Makes a slab, if the cap has room for it, and gives its slots to the table.

        Pre: `slots_per_slab` has accepted the layout.
        """
        num_slots, cost = self._shapes[layout]
        if not self.fits(layout):
            return Made.OVER_CAP
        if time.monotonic() < self._retry_at:
            return Made.FAILED
        slab_id = self._next_id
        if not self._tell(slab_id, SlabState.MAKING, cost):
            self._retry_at = time.monotonic() + RETRY_S
            return Made.FAILED
        try:
            slab = SlabFile.create(
                self._directory, slab_id, layout, num_slots, self._direct, self._sparse, self._durable
            )
        except IOFault as exc:
            self.errors += 1
            self._retry_at = time.monotonic() + RETRY_S
            reporter.warn("slab", f"a slab cannot be made; the store goes on with those it has: {exc}", error=exc)
            self._undo(slab_id)
            return Made.FULL if exc.errno in _FULL else Made.FAILED
        if not self._tell(slab_id, SlabState.READY, cost):
            slab.close()
            self._undo(slab_id)
            return Made.FAILED
        self.created += 1
        self._table.attach(slab)
        return Made.YES

    def _undo(self, slab_id: int) -> None:
        """Removes what there is of a slab that could not be made; what cannot be removed goes on counting."""
        path = self._directory / slab_name(slab_id)
        if try_unlink(path.with_name(path.name + TEMPORARY)) is None and try_unlink(path) is None:
            self._tell_gone(slab_id)

    def remove(self, slab: SlabFile) -> bool:
        """Removes the file of a slab that was taken out of the table and that no entry of the index is in.

        One that cannot be removed goes back into the table, empty, and is not chosen again.
        """
        cost = slab_cost(slab.file_bytes)
        if not self._tell(slab.slab_id, SlabState.REMOVING, cost):
            self._table.attach(slab)
            return False
        if (fault := try_unlink(slab.path)) is not None:
            self.errors += 1
            reporter.warn("slab removal", f"{slab.name} cannot be removed and stays in use: {fault}", error=fault)
            if self._tell(slab.slab_id, SlabState.READY, cost):
                slab.stuck = True
                self._table.attach(slab)
            else:
                slab.close()
            return False
        self._tell_gone(slab.slab_id)
        slab.close()
        self.removed += 1
        self._retry_at = 0.0
        return True
