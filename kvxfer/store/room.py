"""The slabs' share of the capacity: making slabs, removing them, and the sums that keep both under the cap."""

from __future__ import annotations

import errno
import time
from enum import Enum

from kvxfer.config import StoreConfig, slab_cost
from kvxfer.errors import ConfigError, IOFault
from kvxfer.io.system import TEMPORARY, try_unlink
from kvxfer.report import reporter
from kvxfer.slot import SlotLayout
from kvxfer.store.opening import Opened
from kvxfer.store.root import SLABS
from kvxfer.store.slab import SlabFile, slab_file_bytes, slab_name, slots_for
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
    """Makes and removes slabs. The store's change lock serialises all calls."""

    def __init__(self, config: StoreConfig, opened: Opened, table: Table, writers: int) -> None:
        self.created = self.removed = 0
        self.errors = opened.slab_errors
        self.other_bytes, self.other_files = opened.other_bytes, opened.other_files
        self._config = config
        self._direct = opened.mode.direct
        self._table = table
        self._writers = writers
        self._directory = config.root / SLABS
        self._budget = config.slab_budget
        self._next_id = opened.next_slab_id
        self._retry_at = 0.0
        self._shapes: dict[SlotLayout, tuple[int, int]] = {}  # slots of a new slab, what it counts as
        # What is counted for slabs and for what is not the store's.
        self.used_bytes = self.other_bytes + sum(slab_cost(slab.file_bytes) for slab in opened.slabs)
        self.used_files = self.other_files + len(opened.slabs)

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

    def create(self, layout: SlotLayout) -> Made:
        """Makes a slab, if the cap has room for it, and gives its slots to the table.

        Pre: `slots_per_slab` has accepted the layout.
        """
        num_slots, cost = self._shapes[layout]
        nbytes, nfiles = self._budget
        if self.used_bytes + cost > nbytes or self.used_files + 1 > nfiles:
            return Made.OVER_CAP
        if time.monotonic() < self._retry_at:
            return Made.FAILED
        slab_id, self._next_id = self._next_id, self._next_id + 1
        try:
            slab = SlabFile.create(self._directory, slab_id, layout, num_slots, self._direct)
        except IOFault as exc:
            self.errors += 1
            self._retry_at = time.monotonic() + RETRY_S
            reporter.warn("slab", f"a slab cannot be made; the store goes on with those it has: {exc}")
            if try_unlink(self._directory / (slab_name(slab_id) + TEMPORARY)) is not None:
                self._count(cost)  # it cannot be removed either
            return Made.FULL if exc.errno in _FULL else Made.FAILED
        self.created += 1
        self._count(cost)
        self._table.attach(slab)
        return Made.YES

    def remove(self, slab: SlabFile) -> bool:
        """Removes the file of a slab that was taken out of the table and that the index names no more.

        One that cannot be removed goes back into the table, empty, and is not chosen again.
        """
        if (fault := try_unlink(slab.path)) is not None:
            self.errors += 1
            reporter.warn("slab removal", f"{slab.name} cannot be removed and stays in use: {fault}")
            slab.stuck = True
            self._table.attach(slab)
            return False
        self._count(-slab_cost(slab.file_bytes))
        slab.close()
        self.removed += 1
        self._retry_at = 0.0
        return True

    def _count(self, cost: int) -> None:
        self.used_bytes += cost
        self.used_files += 1 if cost > 0 else -1
