"""What a root says of itself, followed while it is open: its weight epoch and its quotas."""

from __future__ import annotations

import threading
from pathlib import Path

from kvxfer.errors import FormatError, IOFault
from kvxfer.report import reporter
from kvxfer.store.root import RootInfo, next_epoch, read_root, root_stamp, write_root
from kvxfer.store.table import Table


class RootWatch:
    """kvxfer.json as it was seen last. What changes in it reaches the table.

    Args:
        info: as it was when the root was opened.
    """

    def __init__(self, root: Path, info: RootInfo, table: Table) -> None:
        self.info = info
        self._root, self._table = root, table
        self._looking = threading.Lock()
        self._stamp = root_stamp(root)
        table.shares.quotas = info.quotas

    def look(self) -> None:
        """Takes note of what another process changed. Without the root's lock: the file is replaced whole."""
        with self._looking:
            stamp = root_stamp(self._root)
            if stamp == self._stamp:
                return
            try:
                info = read_root(self._root)
            except (FormatError, IOFault) as exc:
                reporter.warn("root", f"{self._root} cannot be read any more: {exc}", error=exc)
                return
            self._stamp = stamp
            if info is not None:
                old, self.info = self.info, info
                self._table.shares.quotas = info.quotas
                if info.weight_epoch != old.weight_epoch:
                    self._table.serve_nothing()

    def raise_epoch(self) -> None:
        """The next weight epoch. With the root's lock.

        Raises:
            IOFault: it could not be written down; `info` says whether it is raised until the machine goes down.
        """
        try:
            write_root(self._root, next_epoch(self._root, self.info))
        finally:
            self.look()  # it may be there although it is not known to be on the device
