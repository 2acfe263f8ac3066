"""Where chunks live and who may use a slot: `Store`."""

from kvxfer.store.entry import Entry, Reservation
from kvxfer.store.stats import StoreStats
from kvxfer.store.store import Store

__all__ = ["Entry", "Reservation", "Store", "StoreStats"]
