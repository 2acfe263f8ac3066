"""Rows of the bench: implementations of one case, timed in turns on checked bytes, beside the bars of the project.

A ratio is the median, over the rounds, of the first implementation's time in a round by this one's in the same round:
a machine that is slow for a while is slow for both. A wrong answer gets no speed. What is counted, or measured
otherwise than beside a peer, is a figure with a bar that it must not exceed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import kvxfer
from kvxfer import _native
from kvxfer.errors import KvxferError

__all__ = ["Impl", "Row", "Table", "exit_status", "figure", "machine_facts", "measure"]

OK, WRONG = "ok", "WRONG"
LEAST_RUNS = 3


def _nothing() -> None:
    """For implementations that need no preparation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One way to do a case's work."""

    name: str
    run: Callable[[], str | None]  # does the work once; a text says what went wrong
    check: Callable[[], str | None]  # compares the bytes; a text says what differs
    poison: Callable[[], None] = _nothing  # overwrites what the work must write
    bar: float | None = None  # the least ratio to the case's first implementation
    always_check: bool = False  # poison and check around every timed run, not only before the first and after the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one implementation came to. Without numbers where its answer was wrong."""

    case: str
    impl: str
    ok: str  # OK | WRONG
    why: str = ""  # what was wrong
    p50_ms: float | None = None
    p90_ms: float | None = None
    GBps: float | None = None  # 1e9 payload bytes a second, at the median
    ratio: float | None = None  # to the first implementation; above 1 is faster
    bar: float | None = None
    met: bool | None = None  # the bar; None where there is none, or nothing to compare with
    nbytes: int = 0  # payload of one run
    runs: int = 0
    figure: float | None = None  # of rows that are no times: what was found, in `unit`
    unit: str = ""
    most: float | None = None  # its bar

    def verdict(self) -> str:
        """The last column."""
        if self.ok == WRONG:
            return self.why
        if self.bar is None and self.most is None:
            return ""
        word = "?" if self.met is None else "met" if self.met else "short"
        return f"{word} >= {self.bar:.2f}" if self.bar is not None else f"{word} <= {self.most:.2f}"


def measure(case: str, impls: Sequence[Impl], *, nbytes: int, runs: int, budget_s: float = math.inf) -> list[Row]:
    """Check every implementation, time them in turns, check them again.

    Args:
        case: its name in the table.
        impls: the first is what the others are compared with.
        nbytes: payload of one run.
        runs: rounds that are timed; the checked runs before them are the warm-up.
        budget_s: after so many seconds no round begins beyond the third.
    """
    wrong: dict[str, str] = {}
    seconds: dict[str, list[float]] = {impl.name: [] for impl in impls}

    def attempt(impl: Impl, checked: bool) -> float:
        if checked:
            impl.poison()
        start = time.perf_counter()
        try:
            why = impl.run()
        except (KvxferError, OSError) as exc:
            why = f"{type(exc).__name__}: {exc}"
        took = time.perf_counter() - start
        if why is None and checked:
            why = impl.check()
        if why is not None:
            wrong.setdefault(impl.name, why)
        return took

    def those_right() -> list[Impl]:
        return [impl for impl in impls if impl.name not in wrong]

    for impl in impls:
        attempt(impl, True)
    end = time.perf_counter() + budget_s
    for done in range(runs):
        if done >= LEAST_RUNS and time.perf_counter() > end:
            break
        for impl in those_right():
            seconds[impl.name].append(attempt(impl, impl.always_check))
    for impl in those_right():
        attempt(impl, True)
    first = impls[0].name
    return [_row(case, impl, wrong, seconds, None if first in wrong else first, nbytes) for impl in impls]


def _row(
    case: str,
    impl: Impl,
    wrong: Mapping[str, str],
    seconds: Mapping[str, Sequence[float]],
    first: str | None,
    nbytes: int,
) -> Row:
    if impl.name in wrong:
        return Row(case=case, impl=impl.name, ok=WRONG, why=wrong[impl.name], bar=impl.bar, nbytes=nbytes)
    mine = seconds[impl.name]
    p50, p90 = np.percentile(mine, [50, 90]).tolist()
    ratio = None
    if first is not None:
        ratio = statistics.median(theirs / own for theirs, own in zip(seconds[first], mine, strict=True))
    return Row(
        case=case,
        impl=impl.name,
        ok=OK,
        p50_ms=p50 * 1e3,
        p90_ms=p90 * 1e3,
        GBps=nbytes / p50 / 1e9,
        ratio=ratio,
        bar=impl.bar,
        met=None if impl.bar is None or ratio is None else ratio >= impl.bar,
        nbytes=nbytes,
        runs=len(mine),
    )


def figure(
    case: str, impl: str, found: float, unit: str, *, most: float | None = None, why: str | None = None, runs: int = 1
) -> Row:
    """The row of something counted, or measured by itself.

    Args:
        most: what it may be at most.
        why: what was wrong with the answers that came with it: then there is no figure.
        runs: of which it is the median.
    """
    if why is not None:
        return Row(case=case, impl=impl, ok=WRONG, why=why, unit=unit, most=most)
    met = None if most is None else found <= most
    return Row(case=case, impl=impl, ok=OK, figure=found, unit=unit, most=most, met=met, runs=runs)


def exit_status(rows: Iterable[Row]) -> int:
    """1 where any answer was wrong. A bar that is missed is a fact and no failure: machines are noisy."""
    return int(any(row.ok == WRONG for row in rows))


class Table:
    """Prints rows as they come and keeps them for the JSON.

    Args:
        facts: of the machine; printed above the rows.
        out: where to; None prints nothing.
    """

    WIDTHS = (46, 20)

    def __init__(self, facts: Mapping[str, Any], out: TextIO | None = sys.stdout) -> None:
        self.facts = dict(facts)
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._out = out
        self._headed = False
        for name, value in facts.items():
            self._print(f"{name + ':':<10} {value}")

    def note(self, text: str) -> None:
        """A line among the rows, such as what is left out and why."""
        self.notes.append(text)
        self._print(f"\n{text}")
        self._headed = False

    def add(self, rows: Iterable[Row]) -> None:
        """The rows of one case."""
        case, impl = self.WIDTHS
        if not self._headed:
            self._print(
                f"\n{'case':<{case}} {'impl':<{impl}} {'ok':<5} {'p50 ms':>9} {'p90 ms':>9} {'GB/s':>7} "
                f"{'vs first':>8}  bar"
            )
            self._headed = True
        for row in rows:
            self.rows.append(row)
            numbers = " " * 36
            if row.p50_ms is not None and row.p90_ms is not None and row.GBps is not None:
                ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
                numbers = f"{row.p50_ms:>9.3f} {row.p90_ms:>9.3f} {row.GBps:>7.2f} {ratio:>8}"
            elif row.figure is not None:
                numbers = f"{f'{row.figure:.3f} {row.unit}':>36}"
            self._print(f"{row.case:<{case}} {row.impl:<{impl}} {row.ok:<5} {numbers}  {row.verdict()}".rstrip())

    def close(self) -> None:
        """The last lines: which bars are short."""
        barred = [row for row in self.rows if row.bar is not None or row.most is not None]
        wrong = sum(row.ok == WRONG for row in self.rows)
        self._print(f"\n{sum(row.met is True for row in barred)} of {len(barred)} bars met, {wrong} wrong answers")
        for row in barred:
            if row.met is False:
                found = row.ratio if row.bar is not None else row.figure
                bar = row.bar if row.bar is not None else row.most
                self._print(f"  short: {row.case}, {row.impl}: {found:.2f} of {bar:.2f}")

    def as_json(self) -> dict[str, Any]:
        """Everything: {"facts", "notes", "rows"}."""
        return {"facts": self.facts, "notes": self.notes, "rows": [asdict(row) for row in self.rows]}

    def write_json(self, path: Path) -> None:
        """`as_json` to a file."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def _print(self, line: str) -> None:
        if self._out is not None:
            print(line, file=self._out, flush=True)


def machine_facts() -> dict[str, Any]:
    """What a number means nothing without."""
    return {
        "kvxfer": kvxfer.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "features": _native.lib().kvx_features().decode(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_version()}, numpy {np.__version__}, torch {_version('torch')}",
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
