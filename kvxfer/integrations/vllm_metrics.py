"""kvxfer's series in vLLM's own `/metrics`, as `vllm:kvxfer_*`."""

from __future__ import annotations

from typing import Any

from kvxfer.drive_writes import DRIVE_WRITTEN
from kvxfer.integrations import vllm_compat as compat
from kvxfer.metrics import Kind, Series, Value
from kvxfer.observe import SERIES, Metrics

PREFIX = "vllm:"  # vLLM asks for it
_KINDS = {Kind.COUNTER: compat.OffloadingCounterMetadata, Kind.GAUGE: compat.OffloadingGaugeMetadata}


def definitions() -> dict[str, Any]:
    """Every series, as vLLM wants them declared."""
    return {PREFIX + series.name: _declared(series) for series in (*SERIES, DRIVE_WRITTEN)}


def _declared(series: Series) -> Any:
    labels = tuple(label for label, _ in series.labels)
    if series.kind is Kind.HISTOGRAM:
        return compat.OffloadingHistogramMetadata(
            documentation=series.help, labelnames=labels, buckets=tuple(series.buckets)
        )
    return _KINDS[series.kind](documentation=series.help, labelnames=labels)


class Told:
    """What vLLM has been told so far: it wants counters as what has come since, and histograms as observations."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}
        self._seconds: list[tuple[str, str, float]] = []

    def observe(self, direction: str, path: str, seconds: float) -> None:
        """A job that reached the storage took this long."""
        self._seconds.append((f"{PREFIX}kvxfer_{direction}_seconds", path, seconds))

    def news(self, metrics: Metrics) -> Any | None:
        """What has changed since the last call; the first time everything, zeros too. None: nothing."""
        stats = compat.OffloadingConnectorStats()
        if not self._last:
            for series in SERIES:
                for labels in series.label_values if series.kind is Kind.HISTOGRAM else ():
                    compat.empty_histogram(stats, PREFIX + series.name, labels)
        observed, self._seconds = self._seconds, []
        for name, path, seconds in observed:
            stats.observe_histogram(name, seconds, (path,))
        for series in SERIES:
            if series.kind is Kind.HISTOGRAM:
                continue
            values = metrics.engine if (series.name, next(series.label_values)) in metrics.engine else metrics.store
            for labels in series.label_values:
                self._tell(stats, series, labels, values[series.name, labels])
        for (_, labels), value in metrics.drives.items():
            self._tell(stats, DRIVE_WRITTEN, labels, value)
        return None if stats.is_empty() else stats

    def _tell(self, stats: Any, series: Series, labels: tuple[str, ...], value: Value) -> None:
        assert not isinstance(value, tuple), series.name
        key, name = (series.name, labels), PREFIX + series.name
        last = self._last.get(key)
        if last == value:
            return
        self._last[key] = value
        if series.kind is Kind.GAUGE:
            stats.set_gauge(name, value, labels)
        else:
            stats.increase_counter(name, value - (last or 0), labels)
