"""Timing steps of a device on checked bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.gpu.report import Row
from bench.gpu.sections import Work
from kvxfer.device.copy_bench import Lane

__all__ = ["Case", "add", "measure"]

ROUNDS = 5
ROUND_S = 10e-3  # that a round's repeats should take at the least
MOST_REPEATS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to time."""

    case: str
    impl: str
    step: Callable[[], None]  # queues the work on torch's current stream
    poison: Callable[[], None]  # overwrites what it must write
    check: Callable[[], str | None]  # compares the bytes; a text says what differs
    nbytes: int  # payload


def measure(
    work: Work, lane: Lane, case: Case, *, of: str = "", bar: float | None = None, keep: str = ""
) -> float | None:
    """Adds the row of a case: the median of some rounds, with its bytes compared before and after. Its GB/s.

    Args:
        of: what it is compared with: a name in `work.numbers`.
        bar: the least percent of that.
        keep: the name under which others are compared with it.
    """
    case.poison()
    lane.once(case.step)
    if why := case.check():
        work.wrong(case.case, case.impl, why)
        return None
    case.poison()
    once = lane.seconds(case.step)
    repeats = max(1, min(MOST_REPEATS, int(ROUND_S / max(once, 1e-6))))
    took = statistics.median(lane.seconds(case.step, repeats) for _ in range(ROUNDS))
    if why := case.check():
        work.wrong(case.case, case.impl, f"after it was timed: {why}")
        return None
    return add(work, case.case, case.impl, case.nbytes, took, of=of, bar=bar, keep=keep).GBps


def add(
    work: Work,
    case: str,
    impl: str,
    nbytes: int,
    seconds: float,
    *,
    of: str = "",
    bar: float | None = None,
    keep: str = "",
    more: Mapping[str, Any] | None = None,
) -> Row:
    """A row of a time."""
    speed = nbytes / seconds / 1e9
    if keep:
        work.numbers[keep] = speed
    known = work.numbers.get(of)
    return work.add(
        case, impl, GBps=speed, ms=seconds * 1e3, percent=None if known is None else 100 * speed / known,
        of=of if known is not None else "", bar=bar, more={"payload_bytes": nbytes, **(more or {})},
    )  # fmt: skip
