"""Where chunks live and who may use a slot: `Store`."""

from kvxfer.store.access import Access
from kvxfer.store.audit import Verification, verify_root
from kvxfer.store.entry import Entry, Reservation
from kvxfer.store.gaps import Gaps
from kvxfer.store.stats import StoreStats
from kvxfer.store.store import Store
from kvxfer.store.survey import FINDINGS, Finding, Survey, survey_root

__all__ = [
    "FINDINGS", "Access", "Entry", "Finding", "Gaps", "Reservation", "Store", "StoreStats", "Survey", "Verification",
    "survey_root", "verify_root",
]  # fmt: skip
