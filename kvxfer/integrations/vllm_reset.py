"""A reset for new weights, as often as the drive takes to write it down. Needs no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvxfer.report import engine_reporter

RETRY_S = 1.0


class Reset:
    """Makes all that is stored a miss by a call that may fail or hang, in a thread of its own.

    Args:
        act: the call.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def outdated(self) -> bool:
        """Whether what is stored is of weights that are no more, and that is not on the drive yet."""
        return self._done < self._asked

    def ask(self, timeout: float) -> bool:
        """Do it. False: not within `timeout` seconds; it is tried until it succeeds."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            if self._thread is None:
                self._thread = threading.Thread(target=self._try, name="kvxfer-reset", daemon=True)
                self._thread.start()
            return self._changed.wait_for(lambda: self._done >= mine, timeout)

    def close(self) -> None:
        """No more tries. What was not written down is said."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.outdated:
            engine_reporter.warn("reset", "a reset was never written down: raise the root's weight epoch by hand")

    def _try(self) -> None:
        while True:
            with self._changed:
                wanted = self._asked
                if self._closed or self._done >= wanted:
                    self._thread = None
                    return
            try:
                self._act()
            except Exception as exc:  # until then all is a miss here
                engine_reporter.failed("reset", "a reset could not be written down, and is tried again", exc)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, RETRY_S)
                continue
            with self._changed:
                self._done = max(self._done, wanted)
                self._changed.notify_all()
