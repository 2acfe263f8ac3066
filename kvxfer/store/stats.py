"""What a store tells about itself."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvxfer.admission import WriteBudget
from kvxfer.config import StoreConfig

if TYPE_CHECKING:
    from kvxfer.store.assembly import Parts

# Every reason is there from the start, at zero.
EVICTION_REASONS = ("capacity", "reclaimed", "index", "shrunk", "quota")
INVALIDATION_REASONS = ("truncated", "bad_trailer", "foreign", "bad_sum", "layout", "expired", "removed", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters since the store was opened, and gauges. Sizes in bytes."""

    # gauges
    capacity_bytes: int
    # What there is now of slabs (as they are counted: with what the file system keeps to find them), index and others'
    # files. Not the store's small files, whose share of the capacity is set aside from the start.
    disk_bytes: int
    live_bytes: int  # slots that hold an entry
    entries: int
    max_entries: int  # what the index can name
    pinned_entries: int
    unreachable_entries: int  # before which a chunk is known to be missing: no lookup gets to them
    reserved_slots: int
    quarantined_slots: int  # under a lost write
    free_slots: int  # in the slabs that exist
    slabs: int
    slab_bytes: int
    index_bytes: int
    namespaces: int  # registered by this process
    processes: int  # that have the root open
    foreign_slots: int  # that other processes have taken and not committed
    weight_epoch: int
    write_budget_bytes_per_s: float  # of all processes together; infinity: there is none
    write_budget_left_bytes: float  # what this process may write at once
    direct: bool
    mode: str  # how files are opened, and why
    # counters
    commits: int
    replacements: int  # commits that took the place of an entry with fewer blocks
    duplicates: int  # commits of what was there already
    failed_commits: int
    failed_flushes: int  # of slabs before a commit, under durability "power"
    refused_reservations: int  # slots asked for and not given
    evictions: dict[str, int]
    invalidations: dict[str, int]
    slabs_created: int
    slabs_removed: int
    slab_errors: int  # slabs that could not be made, opened or removed
    index_errors: int  # transactions that failed
    index_conflicts: int  # records that the index had and the table had not
    index_recoveries: int  # times the index was written anew from the table
    rebuilds: int  # times the index was rebuilt from the trailers: at most 1, at open
    rebuild_reason: str
    busy: int  # times the root's lock could not be had
    namespace_errors: int  # namespace.json files that could not be written
    scrubbed_chunks: int  # that a scrub read and found right
    scrubbed_bytes: int  # their payload
    unreadable_chunks: int  # that the drive did not give a scrub: they stay, and the next pass tries again
    scrub_ended: int  # when a whole pass over the root last ended, of any process's; seconds since 1970, 0: never


@dataclass(slots=True)
class Counts:
    """The counters that the store itself keeps."""

    commits: int = 0
    replacements: int = 0
    duplicates: int = 0
    failed_commits: int = 0
    failed_flushes: int = 0
    refused_reservations: int = 0
    busy: int = 0
    namespace_errors: int = 0
    scrubbed_chunks: int = 0
    scrubbed_bytes: int = 0
    unreadable_chunks: int = 0
    scrub_ended: int = 0  # no counter: as it was read, or written, last

    def scrubbed(self, nbytes: int) -> None:
        """A scrub has found a chunk of `nbytes` bytes to be right."""
        self.scrubbed_chunks += 1
        self.scrubbed_bytes += nbytes


def gather(
    config: StoreConfig, weight_epoch: int, counts: Counts, parts: Parts, budget: WriteBudget | None
) -> StoreStats:
    """Everything, from those who know it."""
    opened, index, table, room, follower = parts.opened, parts.index, parts.table, parts.room, parts.follower
    slabs, disk_bytes, index_bytes = table.slabs(), room.used_bytes, index.data_bytes
    with table.lock:
        return StoreStats(
            capacity_bytes=config.capacity_bytes, disk_bytes=disk_bytes + index_bytes, live_bytes=table.live_bytes,
            entries=table.entries, max_entries=index.max_entries, pinned_entries=table.pinned,
            unreachable_entries=sum(slots.policy.unreachable for slots in table.classes.values()),
            reserved_slots=table.reserved, quarantined_slots=table.quarantined,
            free_slots=sum(slab.free_slots for slab in slabs), slabs=len(slabs),
            slab_bytes=sum(slab.file_bytes for slab in slabs), index_bytes=index_bytes,
            namespaces=len(table.served), processes=max(1, len(follower.members)),
            foreign_slots=table.leases.foreign_slots, weight_epoch=weight_epoch,
            write_budget_bytes_per_s=math.inf if budget is None else budget.bytes_per_s,
            write_budget_left_bytes=math.inf if budget is None else budget.available(), direct=opened.mode.direct,
            mode=opened.mode.why,
            evictions=dict(table.evictions), invalidations=dict(table.invalidations), slabs_created=room.created,
            slabs_removed=room.removed, slab_errors=room.errors, index_errors=index.errors,
            index_conflicts=index.conflicts, index_recoveries=index.recoveries, rebuilds=opened.rebuilds,
            rebuild_reason=opened.rebuild_reason, **asdict(counts),
        )  # fmt: skip
