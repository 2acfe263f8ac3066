"""Throughput over request size, as a picture. matplotlib is needed for this alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.cli.output import size as size_text
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from kvxfer.cli.bench_job import Report

ENDINGS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Before the long work: raises ConfigError where no picture could be written there."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"--plot {path}: allowed endings are {', '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: {path.absolute().parent} is no directory")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'kvxfer[plot]'")


def draw(report: Report, path: Path) -> None:
    """Median throughput of each size with the range of its repetitions; a size without a result has no point.

    Raises:
        OSError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for operation in ("read", "write"):
        points = [(row.size, part) for row in report.rows for part in row.parts if part.operation == operation]
        if points:
            middle = [part.gbps for _, part in points]
            low = [part.gbps - min(part.gbps_runs) for _, part in points]
            high = [max(part.gbps_runs) - part.gbps for _, part in points]
            label = f"{operation}, {report.way.mode}, {report.memory} memory"
            axes.errorbar([size for size, _ in points], middle, yerr=[low, high], marker="o", capsize=3, label=label)
        theirs = [(row["size"], part["gbps"]) for row in report.peer for part in row["parts"]
                  if part["operation"] == operation]  # fmt: skip
        if theirs:
            axes.plot(*zip(*theirs, strict=True), marker="x", linestyle="--", label=f"{operation}, fio")
    if report.drive_gbps is not None:
        axes.axhline(report.drive_gbps, color="grey", linewidth=0.8, label=f"drive ({report.drive_why})")
    sizes = sorted(row.size for row in report.rows)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(each) for each in sizes])
    axes.set_xlabel("bytes of a request")
    axes.set_ylabel("GB/s, median of the repetitions and their range")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{report.plan.operation}, {report.plan.layout}, {report.plan.threads} x {report.plan.depth} in flight"
    )
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
