"""The stores that this process has open. LMDB opens a file once in a process, and a fork's child has none of them."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.errors import StoreError

if TYPE_CHECKING:
    from kvxfer.store.store import Store

_OPEN: weakref.WeakSet[Store] = weakref.WeakSet()


def remember(store: Store) -> None:
    """`store` is open, for as long as it lives."""
    _OPEN.add(store)


def refuse_twice(root: Path) -> None:
    """Raises StoreError where this process has that root open."""
    if any(store.belongs_here(root) for store in list(_OPEN)):
        raise StoreError(f"{root} is open in this process already: engines can share one store")


def _after_fork() -> None:
    # Nothing here may wait: other threads, and what they held, are gone.
    for store in list(_OPEN):
        store.forget()


os.register_at_fork(after_in_child=_after_fork)
