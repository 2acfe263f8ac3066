"""The parts of a store, put together while its root is locked."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.config import StoreConfig
from kvxfer.io.modes import IOMode
from kvxfer.store.follow import Follower
from kvxfer.store.generations import Generations
from kvxfer.store.index import Index
from kvxfer.store.members import RootLock
from kvxfer.store.opening import Opened, fill, join, open_root
from kvxfer.store.records import EpochRow, IndexRecord, Row
from kvxfer.store.room import SlabRoom
from kvxfer.store.root import INDEX
from kvxfer.store.table import Policies, Table


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store is made of."""

    opened: Opened
    index: Index
    table: Table
    room: SlabRoom
    follower: Follower


def assemble(
    config: StoreConfig, lock: RootLock, others: list[int], mode: IOMode | None, writers: int, policy: Policies
) -> Parts:
    """Opens a root: as the first process, which cleans up, or beside `others`, whose index it reads.

    Raises:
        ConfigError, FormatError, StoreError, IOFault: as Store.open says; nothing is left open.
    """
    opened = open_root(config, lock, others, mode)
    index = Index(config.root / INDEX, config.effective_index_map_bytes, config.durability)
    try:
        rows: list[Row] = []
        if others:
            rows = join(opened, config, index, writers)
            epochs = {row.epoch for row in rows if isinstance(row, EpochRow)}
            epochs |= {row.generation >> 32 for row in rows if isinstance(row, IndexRecord)}
        else:
            fill(opened, config, index, writers)
            epochs = set(opened.epochs)
        table = Table(Generations(epochs), writers, policy)
        room = SlabRoom(config, opened, table, index, writers)
        follower = Follower(index, table, room, lock)
        index.living = follower.everything
        for slab in opened.slabs:
            table.attach(slab)
        table.load(opened.entries)
        with table.lock:
            table.uses.adopt(opened.uses, opened.entries)
        table.evictions["shrunk"] = opened.shrunk
        if others:
            follower.reload(rows)
        else:
            follower.begin()
            index.add_epoch(table.generations.epoch)
    except BaseException:
        index.drop()
        opened.close()
        raise
    opened.entries, opened.found, opened.slabs = [], [], []
    return Parts(opened, index, table, room, follower)
