"""Counters, gauges and histograms, declared before they are used, and their text form for Prometheus.

A table of `Series` names everything that there will be: each series of it is there, at zero, from the start, and what
it does not name cannot be counted. Nothing here locks: whoever owns a `Tally` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class Kind(StrEnum):
    """What a series is."""

    COUNTER = "counter"  # never goes down
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Series:
    """A series, or one for each combination of its labels' values.

    Raises:
        ValueError: the name does not say its unit, or that it is a counter, as Prometheus wants.
    """

    name: str
    kind: Kind
    help: str
    unit: str = ""  # seconds | bytes | what is counted
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (label, all its values)
    buckets: tuple[float, ...] = ()  # histograms: upper bounds, ascending; one to infinity follows

    def __post_init__(self) -> None:
        stem = self.name.removesuffix("_total")
        if (self.kind is Kind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters end with _total, and nothing else does")
        if self.unit in ("seconds", "bytes") and not stem.endswith(f"_{self.unit}"):
            raise ValueError(f"{self.name} must say that it is in {self.unit}")
        if (self.kind is Kind.HISTOGRAM) != bool(self.buckets) or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{self.name}: buckets={self.buckets} must ascend, and belong to histograms")

    @property
    def label_values(self) -> Iterator[tuple[str, ...]]:
        """Every combination of label values."""
        return product(*(values for _, values in self.labels))


# Series and label values -> a number; for a histogram what fell into each bucket, and last the sum.
Value = float | tuple[float, ...]
Values = Mapping[tuple[str, tuple[str, ...]], Value]


class Tally:
    """What was counted so far of a table's counters and histograms. Not locked."""

    def __init__(self, table: Iterable[Series]) -> None:
        self._counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self._observed: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self._buckets: dict[str, tuple[float, ...]] = {}
        for series in table:
            self._buckets[series.name] = series.buckets
            for labels in series.label_values:
                if series.kind is Kind.HISTOGRAM:
                    self._observed[series.name, labels] = [0] * (len(series.buckets) + 2)
                else:
                    self._counts[series.name, labels] = 0

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Count `amount` more.

        Raises:
            KeyError: no such series.
            ValueError: less than nothing.
        """
        if amount < 0:
            raise ValueError(f"{name} cannot go down by {-amount}")
        self._counts[name, labels] += amount

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Count `value` in a histogram. KeyError where there is none."""
        series = self._observed[name, labels]
        series[bisect_left(self._buckets[name], value)] += 1
        series[-1] += value

    def values(self) -> dict[tuple[str, tuple[str, ...]], Value]:
        """A copy of everything, as it is now."""
        return self._counts | {key: tuple(series) for key, series in self._observed.items()}


def add_up(parts: Iterable[Values], least: Container[str] = ()) -> dict[tuple[str, tuple[str, ...]], Value]:
    """The sum of values of one table; of the series that `least` names the least instead."""
    total: dict[tuple[str, tuple[str, ...]], Value] = {}
    for part in parts:
        for key, value in part.items():
            before = total.get(key)
            if before is None:
                total[key] = value
            elif isinstance(value, tuple) and isinstance(before, tuple):
                total[key] = tuple(a + b for a, b in zip(before, value, strict=True))
            elif not isinstance(value, tuple) and not isinstance(before, tuple):
                total[key] = min(before, value) if key[0] in least else before + value
            else:
                raise ValueError(f"{key[0]} is a histogram in one part and a number in another")
    return total


def expose(table: Sequence[Series], values: Values) -> str:
    """The text format of Prometheus (version 0.0.4), in the order of the table.

    Raises:
        KeyError: a series of the table has no value.
    """
    lines: list[str] = []
    for series in table:
        lines += [f"# HELP {series.name} {_escape(series.help)}", f"# TYPE {series.name} {series.kind}"]
        names = [name for name, _ in series.labels]
        for labels in series.label_values:
            value, pairs = values[series.name, labels], list(zip(names, labels, strict=True))
            if isinstance(value, tuple):
                seen: float = 0
                for bound, count in zip([*map(repr, series.buckets), "+Inf"], value, strict=False):
                    seen += count
                    lines.append(_line(f"{series.name}_bucket", [*pairs, ("le", bound)], seen))
                lines.append(_line(f"{series.name}_sum", pairs, value[-1]))
                lines.append(_line(f"{series.name}_count", pairs, seen))
            else:
                lines.append(_line(series.name, pairs, value))
    return "\n".join(lines) + "\n"


def _line(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    inside = ",".join(f'{label}="{_escape(text, quoted=True)}"' for label, text in labels)
    number = repr(float(value)) if isinstance(value, float) else str(int(value))
    number = number.replace("inf", "+Inf")  # as the format has it
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"


def _escape(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
