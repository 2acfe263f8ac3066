"""Warnings that a failing disk cannot turn into a flood: of each kind at most one within INTERVAL_S.

Every record has fields beside its text, for logs that are read by machines: `event` (its kind), `count` (how many
errors it stands for, those kept back before it included), `kept_back`, `errno`, `path`, and whatever else was given;
those that do not apply are None. Over all records of a kind the counts add up to the errors there were, once `flush`
has been called a last time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError

INTERVAL_S = 10.0
_MOST_KINDS = 512  # remembered at once: some kinds name a file


@dataclass(slots=True)
class _Kind:
    """What there is to know of one kind of warning."""

    since: float  # when a line was written last
    level: int
    calls: int = 0  # kept back since then
    count: int = 0  # errors that these stood for
    message: str = ""  # of the last of them, for flush
    errno: int | None = None
    path: str | None = None


class Reporter:
    """Logs at most one warning of a kind within INTERVAL_S, and says how many it kept back. Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: the logger's. `clock`: seconds."""
        self._logger = logging.getLogger(name)
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}

    def warn(
        self,
        kind: str,
        message: str,
        *,
        errno: int | None = None,
        path: str | None = None,
        error: BaseException | None = None,
        count: int = 1,
        exc_info: BaseException | None = None,
        level: int = logging.WARNING,
        **fields: Any,
    ) -> None:
        """Logs `message`, or counts it.

        Args:
            kind: of few: what is kept back is counted under it.
            errno, path: of the error, if it has them.
            error: what was raised: gives both, where it has them.
            count: errors that this one stands for.
            level: of the record; one for a kind.
            exc_info: an exception whose trace belongs to it: a defect.
            fields: further attributes of the record, such as job=3.
        """
        if isinstance(error, OSError):
            errno, path = error.errno, error.filename
        with self._lock:
            now = self._clock()
            known = self._kinds.get(kind)
            if known is not None and now - known.since < INTERVAL_S:
                known.calls += 1
                known.count += count
                known.message, known.errno, known.path = message, errno, path
                return
            self._kinds[kind] = _Kind(now, level)
            if len(self._kinds) > _MOST_KINDS:
                self._forget(now)
        calls, before = (known.calls, known.count) if known is not None else (0, 0)
        self._write(kind, level, message, calls, count + before, errno, path, exc_info, fields)

    def failed(self, kind: str, message: str, exc: BaseException, **fields: Any) -> None:
        """`warn` of an exception that ends here: kvxfer's own errors are said; others are defects and leave a trace."""
        self.warn(kind, f"{message}: {exc}", exc_info=None if isinstance(exc, KvxferError) else exc, **fields)

    @contextmanager
    def no_further(self, kind: str, message: str) -> Iterator[None]:
        """What raises in its block is said and ends here: for giving back what others' results must not hang on."""
        try:
            yield
        except Exception as exc:  # a defect, or no memory
            self.failed(kind, message, exc)

    def flush(self, everything: bool = False) -> None:
        """Says what was kept back of kinds whose INTERVAL_S has passed, or of all: so that the last errors show, too.

        Cheap where there is nothing to say.
        """
        due: list[tuple[str, _Kind]] = []
        with self._lock:
            now = self._clock()
            for kind, known in self._kinds.items():
                if known.calls and (everything or now - known.since >= INTERVAL_S):
                    due.append((kind, known))
            for kind, _ in due:
                self._kinds[kind] = _Kind(now, known.level)
        for kind, known in due:
            message = f"{known.message} ({known.calls} like this since the last line)"
            extra = {"event": kind, "errno": known.errno, "path": known.path}
            extra |= {"count": known.count, "kept_back": known.calls}
            self._logger.log(known.level, "%s", message, extra=extra)

    def _forget(self, now: float) -> None:
        """Kinds that have nothing to say, oldest first; called with the lock held."""
        quiet = [kind for kind, known in self._kinds.items() if not known.calls and known.since < now]
        for kind in quiet[: _MOST_KINDS // 2]:
            del self._kinds[kind]

    def _write(
        self,
        kind: str,
        level: int,
        message: str,
        kept_back: int,
        count: int,
        errno: int | None,
        path: str | None,
        exc_info: BaseException | None,
        fields: dict[str, Any],
    ) -> None:
        more = f" ({kept_back} more like this before)" if kept_back else ""
        extra = {"event": kind, "errno": errno, "path": path, "count": count, "kept_back": kept_back} | fields
        self._logger.log(level, "%s%s", message, more, exc_info=exc_info, extra=extra)


reporter = Reporter("kvxfer.store")
engine_reporter = Reporter("kvxfer.engine")
