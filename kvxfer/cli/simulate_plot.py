"""Hit ratio over capacity, as a picture. matplotlib is needed for this alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.cli.output import size as size_text

if TYPE_CHECKING:
    from kvxfer.cli.simulate_job import Report


def draw(report: Report, path: Path) -> None:
    """A line for each policy, admission and budget, and the one that no store is above.

    Raises:
        OSError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    lines: dict[str, list[tuple[int, float]]] = {}
    several = len(report.plan.admissions) > 1, len(report.plan.budgets) > 1
    for row in report.rows:
        run = row.run
        names = (run.admission, f"budget {run.budget.text}")
        label = ", ".join([run.setup.policy, *(name for name, shown in zip(names, several, strict=True) if shown)])
        point = run.setup.capacity_blocks * report.plan.block_bytes, 100 * row.outcome.token_hit_ratio
        lines.setdefault(label, []).append(point)
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    best = 100 * report.survey.hit_tokens / report.survey.prompt_tokens
    axes.axhline(best, color="grey", linewidth=0.8, label="no bound")
    sizes = sorted({point for points in lines.values() for point, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(each) for each in sizes], rotation=30)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("capacity")
    axes.set_ylabel("% of the prompts' tokens that need not be computed")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{report.plan.trace.name}: {report.survey.requests:,} requests", parse_math=False)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
