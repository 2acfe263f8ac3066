"""Sections one after the other, each in its time, none of which can lose what the others found."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.report import FAILED, HUNG, SKIPPED, WRONG, Report, Row, Section

__all__ = ["Plan", "Skip", "Work", "run_all"]

GRACE_S = 10.0  # for the case under way when a section's time is up, before it counts as hung


class Skip(Exception):
    """A section cannot run here; says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A section to come."""

    name: str
    limit_s: float
    run: Callable[[Work], None]


class Work:
    """What a section is given: where its rows go, and how long it may take.

    `numbers` goes from section to section: figures that others are compared with, by name.
    """

    def __init__(
        self, report: Report, section: Section, end: float, clock: Callable[[], float], common: Common
    ) -> None:
        self._report, self._section, self._end, self._clock = report, section, end, clock
        self._given_up = False
        self.common = common
        self.numbers = common.numbers

    @property
    def left(self) -> float:
        """Seconds until the section should end."""
        return self._end - self._clock()

    def over(self, what: str) -> bool:
        """Whether no case should be begun any more; then `what` is noted as left out."""
        if self.left > 0 and not self._given_up:
            return False
        self.cut(what)
        return True

    def cut(self, what: str) -> None:
        """Note what is left out."""
        if not self._given_up:
            self._section.cut.append(what)

    def add(self, case: str, impl: str, **fields: Any) -> Row:
        """A row of checked bytes."""
        row = Row(case=case, impl=impl, **fields)
        if not self._given_up:
            self._report.add(self._section, row)
        return row

    def wrong(self, case: str, impl: str, why: str) -> Row:
        """A row of wrong bytes, without a number."""
        return self.add(case, impl, ok=WRONG, why=why)

    def fail(self, why: str) -> None:
        """The section failed, and goes on."""
        if not self._given_up:
            self._section.status, self._section.why = FAILED, why

    def give_up(self) -> None:
        """Nothing that the section's thread still does counts."""
        self._given_up = True


@dataclass(slots=True)
class Common:
    """What sections share."""

    numbers: dict[str, float] = field(default_factory=dict)
    settings: Any = None


def run_all(
    plans: Sequence[Plan],
    report: Report,
    *,
    total_s: float,
    settings: Any = None,
    clock: Callable[[], float] = time.monotonic,
    grace_s: float = GRACE_S,
) -> None:
    """Runs sections in order until `total_s` are over; writes the report after each.

    A section runs on a thread of its own: where it does not come back, it is left behind, and so are all that use the
    device after it, since a device that hangs would hold them too.
    """
    common, end, hung = Common(settings=settings), clock() + total_s, ""
    for plan in plans:
        limit = min(plan.limit_s, end - clock())
        section = report.begin(plan.name, max(limit, 0.0))
        start = clock()
        if limit <= 0 or hung:
            section.status, section.why = SKIPPED, hung or f"the {total_s:g} s of the whole run are over"
        else:
            work = Work(report, section, start + limit, clock, common)
            thread = threading.Thread(
                target=_guarded, args=(plan, work, section), name=f"bench-{plan.name}", daemon=True
            )
            thread.start()
            thread.join(limit + grace_s)
            if thread.is_alive():
                work.give_up()
                section.status, section.why = HUNG, f"no end within {limit + grace_s:.0f} s"
                hung = f"{plan.name} hung"
        report.end(section, clock() - start)
    report.close()


def _guarded(plan: Plan, work: Work, section: Section) -> None:
    """Runs a section; what it raises is its own end and nobody else's."""
    try:
        plan.run(work)
    except Skip as exc:
        if section.status != WRONG:
            section.status = SKIPPED
        section.why = str(exc)
    except Exception as exc:  # whatever a driver, a compiler or a missing package raises
        last = traceback.extract_tb(exc.__traceback__)[-1]
        why = f"{type(exc).__name__}: {exc} ({last.filename.rpartition('/')[2]}:{last.lineno})"
        if section.status != WRONG:
            section.status = FAILED
        section.why = "; ".join(filter(None, [section.why, why]))
