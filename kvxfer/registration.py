"""A namespace as a store knows it, over weight epochs that are raised."""

from __future__ import annotations

import logging
from contextlib import suppress

from kvxfer.errors import IOFault, StoreError
from kvxfer.keys import Namespace
from kvxfer.report import engine_reporter
from kvxfer.slot import SlotLayout
from kvxfer.store import Store


class Registration:
    """Registers a namespace with a store, and anew when the weight epoch is raised, by whatever process.

    Raises:
        ConfigError, StoreError: as Store.register.
    """

    def __init__(self, store: Store, namespace: Namespace, slot: SlotLayout) -> None:
        self._store, self._namespace, self._slot = store, namespace, slot
        self._epoch = store.weight_epoch  # before the digest: one raised in between is seen by `renew`
        self.digest = store.register(namespace, slot)

    def renew(self) -> bool:
        """Whether there is a new digest. May wait for the disk."""
        epoch = self._store.weight_epoch
        if epoch == self._epoch:
            return False
        with suppress(StoreError, IOFault):  # the next turn tries again: until then all is a miss
            self.digest = self._store.register(self._namespace, self._slot)
            self._epoch = epoch
            message = f"weight epoch {epoch}: everything stored before is a miss"
            engine_reporter.warn("epoch", message, level=logging.INFO, epoch=epoch)
            return True
        return False
