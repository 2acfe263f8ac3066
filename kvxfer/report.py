"""Warnings that a failing disk cannot turn into a flood."""

from __future__ import annotations

import logging
import threading
import time

INTERVAL_S = 10.0


class Reporter:
    """Logs at most one warning of a kind within INTERVAL_S, and says how many it kept back."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._kept_back: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Logs `message`, or counts it."""
        with self._lock:
            now = time.monotonic()
            if now - self._last.get(kind, -INTERVAL_S) < INTERVAL_S:
                self._kept_back[kind] = self._kept_back.get(kind, 0) + 1
                return
            self._last[kind] = now
            kept_back = self._kept_back.pop(kind, 0)
        self._logger.warning("%s%s", message, f" ({kept_back} more like this before)" if kept_back else "")


reporter = Reporter("kvxfer.store")
