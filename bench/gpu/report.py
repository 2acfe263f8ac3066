"""What a run found: rows of sections, printed as they come and written to one JSON file after every section."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

__all__ = ["FAILED", "HUNG", "OK", "SKIPPED", "WRONG", "Report", "Row", "Section", "file_name"]

OK, WRONG, FAILED, HUNG, SKIPPED = "ok", "WRONG", "failed", "hung", "skipped"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. Without numbers where the bytes were wrong."""

    case: str
    impl: str
    ok: str = OK  # OK | WRONG
    why: str = ""  # what was wrong
    GBps: float | None = None  # 1e9 payload bytes a second
    ms: float | None = None
    percent: float | None = None  # of what `of` names
    of: str = ""
    bar: float | None = None  # the least `percent`
    more: Mapping[str, Any] = field(default_factory=dict)  # whatever else is worth keeping

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None: there is none, or nothing to compare with."""
        return None if self.bar is None or self.percent is None else self.percent >= self.bar

    def as_json(self) -> dict[str, Any]:
        """Its fields, with `met`."""
        return {**asdict(self), "more": dict(self.more), "met": self.met}


@dataclass(slots=True)
class Section:
    """What one section came to."""

    name: str
    status: str = OK
    why: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)  # what was left out for want of time or memory

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {
            "name": self.name, "status": self.status, "why": self.why, "seconds": round(self.seconds, 3),
            "limit_s": self.limit_s, "rows": [row.as_json() for row in self.rows], "cut": list(self.cut),
        }  # fmt: skip


class Report:
    """All sections of a run.

    Args:
        facts: of the machine.
        path: of the JSON; None: none is written.
        out: where rows are printed; None: nowhere.
    """

    def __init__(self, facts: Mapping[str, Any], path: Path | None, out: TextIO | None = sys.stdout) -> None:
        self.facts, self.path, self.out = dict(facts), path, out
        self.sections: list[Section] = []
        self.complete = False
        for name, value in self.facts.items():
            self.say(f"{name + ':':<12} {value}")

    def begin(self, name: str, limit_s: float) -> Section:
        """A new section, from now on part of the report."""
        section = Section(name, limit_s=round(limit_s, 1))
        self.sections.append(section)
        self.say(f"\n{name} (at most {limit_s:.0f} s)")
        return section

    def add(self, section: Section, row: Row) -> None:
        """One more row."""
        section.rows.append(row)
        if row.ok == WRONG:
            section.status = WRONG
            self.say(f"  {row.case:<44} {row.impl:<16} WRONG  {row.why}")
            return
        speed = "" if row.GBps is None else f"{row.GBps:.1f} GB/s"
        took = "" if row.ms is None else f"{row.ms:.3f} ms"
        share = "" if row.percent is None else f"{row.percent:.1f} % of {row.of}"
        bar = (
            "" if row.bar is None else f"  {'?' if row.met is None else 'met' if row.met else 'short'} >= {row.bar:g} %"
        )
        more = "".join(f"  {name} {value}" for name, value in row.more.items() if _is_short(name, value))
        self.say(f"  {row.case:<44} {row.impl:<16} {speed:>13} {took:>12}  {share}{bar}{more}".rstrip())

    def end(self, section: Section, seconds: float) -> None:
        """The section is over, whatever it came to: what there is so far is written."""
        section.seconds = seconds
        for what in section.cut:
            self.say(f"  cut: {what}")
        if section.status != OK or section.why:
            self.say(f"  {section.status}{': ' + section.why if section.why else ''}")
        self.say(f"  {seconds:.1f} s")
        self.write()

    def as_json(self) -> dict[str, Any]:
        """{"format", "complete", "exit", "facts", "sections"}."""
        return {
            "format": FORMAT, "complete": self.complete, "exit": self.exit_status, "facts": self.facts,
            "sections": [section.as_json() for section in self.sections],
        }  # fmt: skip

    def write(self) -> None:
        """Replaces the file in one step."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        os.replace(fresh, self.path)

    @property
    def exit_status(self) -> int:
        """1 where bytes were wrong, or a section failed or hung. Bars that are missed are facts, and no failures."""
        return int(any(section.status in (WRONG, FAILED, HUNG) for section in self.sections))

    def say(self, line: str) -> None:
        """Prints it."""
        if self.out is not None:
            print(line, file=self.out, flush=True)

    def close(self) -> None:
        """The last lines."""
        self.complete = True
        rows = [row for section in self.sections for row in section.rows]
        barred = [row for row in rows if row.bar is not None]
        wrong = sum(row.ok == WRONG for row in rows)
        self.say(
            f"\n{len(rows)} rows, {sum(row.met is True for row in barred)} of {len(barred)} bars met, {wrong} WRONG"
        )
        for section in self.sections:
            if section.status != OK:
                self.say(f"  {section.name}: {section.status}{': ' + section.why if section.why else ''}")
        self.write()
        if self.path is not None:
            self.say(f"written: {self.path}")


def _is_short(name: str, value: object) -> bool:
    """Whether it is worth a place on the row's line."""
    text = str(value)
    return isinstance(value, str | int | float) and name != "payload_bytes" and 0 < len(text) < 80 and "\n" not in text


def file_name(device: str, date: str, taken: Callable[[str], bool] = lambda _: False) -> str:
    """Such as "nvidia-h200-2026-01-31.json"; with a number where that one is there already."""
    stem = f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-') or 'device'}-{date}"
    names: Iterable[str] = (f"{stem}{'' if n == 1 else f'-{n}'}.json" for n in range(1, 1000))
    return next(name for name in names if not taken(name))
