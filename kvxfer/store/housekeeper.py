"""The thread that keeps a store's table up to date with what other processes do, and its index with what it does."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from kvxfer.errors import StoreError
from kvxfer.report import reporter

if TYPE_CHECKING:
    from kvxfer.store.store import Store

REFRESH_S = 0.02  # how often it looks


def keep_house(known: weakref.ref[Store], stop: threading.Event) -> None:
    """Starts the thread; it ends with the store, or with `stop`."""
    threading.Thread(target=_run, args=(known, stop), name="kvxfer-house", daemon=True).start()


def _run(known: weakref.ref[Store], stop: threading.Event) -> None:
    # Holds no reference, so that a store that was forgotten can go.
    while not stop.wait(REFRESH_S):
        reporter.flush()
        if (store := known()) is None:
            return
        try:
            if store.has_work():
                store.maintain()
        except StoreError as exc:
            if store.is_closed:
                return
            reporter.warn("housekeeping", f"housekeeping failed: {exc}", error=exc)
        except Exception as exc:  # a defect: whatever it is, other processes must still be heard of
            reporter.warn("housekeeping", f"housekeeping failed: {exc!r}", error=exc)
        del store
