"""Faults under named calls of a double: the n-th fails, does not return, or takes the device with it."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from kvxfer.errors import DeviceError


@dataclass(eq=False)
class CallRule:
    """One fault that was asked for. Of the calls that match, `after` pass, then `times` (None: all) are hit."""

    op: str  # "*": any
    action: str  # fail, hang, lose
    after: int
    times: int | None
    hits: int = 0
    seen: int = field(default=0, repr=False)

    def matches(self, op: str) -> bool:
        """Whether it hits this call."""
        if self.op not in ("*", op):
            return False
        self.seen += 1
        hit = self.seen > self.after and (self.times is None or self.seen <= self.after + self.times)
        self.hits += hit
        return hit


class CallFaults:
    """Rules for calls. Thread-safe. The first that hits decides."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # calls so far, by name
        self._rules: list[CallRule] = []
        self._lock = threading.Lock()
        self._released = threading.Event()

    def fail(self, op: str, *, after: int = 0, times: int | None = 1) -> CallRule:
        """The call does nothing and raises DeviceError; the device goes on."""
        return self._add(op, "fail", after, times)

    def hang(self, op: str, *, after: int = 0, times: int | None = 1) -> CallRule:
        """The call does not go on before `release`."""
        return self._add(op, "hang", after, times)

    def lose(self, op: str, *, after: int = 0) -> CallRule:
        """From this call on every one raises DeviceError, and nothing that is queued is done."""
        return self._add(op, "lose", after, 1)

    def release(self) -> None:
        """Calls that hang go on; no further one hangs."""
        self._released.set()

    def meet(self, op: str) -> bool:
        """Does to a call what was asked for. True: the device is lost.

        Raises:
            DeviceError: it fails.
        """
        with self._lock:
            self.counts[op] += 1
            rule = next((rule for rule in self._rules if rule.matches(op)), None)
        if rule is None:
            return False
        if rule.action == "hang":
            self._released.wait()
            return False
        if rule.action == "fail":
            raise DeviceError(f"{op} was made to fail")
        return True

    def _add(self, op: str, action: str, after: int, times: int | None) -> CallRule:
        rule = CallRule(op, action, after, times)
        with self._lock:
            self._rules.append(rule)
        return rule
