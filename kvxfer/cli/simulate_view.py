"""What `kvxfer simulate` shows a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvxfer.cli.output import clean, screen, size

if TYPE_CHECKING:
    from kvxfer.cli.simulate_job import Report

_WIDTH = 190  # of the table; a narrower terminal folds its lines
_LEFT = ("policy", "capacity", "admission", "budget")


def show(report: Report, console: Console | None = None) -> None:
    """Prints it; `console`: where to, None: standard output."""
    console = console or screen()
    console.width = max(console.width, _WIDTH)
    found, plan = report.survey, report.plan
    console.print(
        f"{clean(plan.trace)}: {found.requests:,} requests in {found.seconds:,.0f} s, {found.prompt_tokens:,} prompt "
        f"tokens in {found.blocks:,} blocks"
    )
    console.print(
        f"footprint     {size(report.footprint_bytes)}: {found.distinct_blocks:,} different blocks of "
        f"{plan.block_tokens} tokens, {size(plan.block_bytes)} each"
    )
    console.print(_table(report), crop=False)
    dropped: dict[str, int] = {}
    for row in report.rows:
        for reason, blocks in row.outcome.counts.dropped_blocks.items():
            dropped[reason] = dropped.get(reason, 0) + blocks
    if dropped.get("no_room"):
        console.print("no_room: blocks of prompts that are longer than the store; all but their beginning is dropped")
    if not plan.drive.endurance_bytes:
        console.print("life: unknown without --tbw, or --dwpd and --drive")
    elif not found.seconds:
        console.print("life: unknown, all requests came at once")


def _table(report: Report) -> Table:
    whole = report.as_json()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*_LEFT, "token hits", "block hits", "recomputed", "written", "evicted", "unreachable", "dropped",
                 "DWPD", "life"):  # fmt: skip
        table.add_column(name, justify="left" if name in (*_LEFT, "dropped") else "right", no_wrap=True)
    best = whole["unbounded"]
    table.add_row("(no bound)", "-", "always", "none", *_figures(best), "-", "-", "-", *_wear(best))
    for row in whole["rows"]:
        names = (row["policy"], f"{row['capacity']} {_also(row)}".strip(), row["admission"], row["budget"])
        why = ", ".join(f"{reason} {blocks:,}" for reason, blocks in row["dropped_blocks"].items() if blocks)
        rest = (size(row["evicted_bytes"]), _percent(row["unreachable_share"]), why or "-")
        table.add_row(*names, *_figures(row), *rest, *_wear(row))
    return table


def _also(row: dict[str, Any]) -> str:
    return f"({size(row['capacity_bytes'])})" if row["capacity"].endswith("%") else ""


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    hits = (_percent(row["token_hit_ratio"]), _percent(row["block_hit_ratio"]))
    return *hits, f"{row['recomputed_tokens']:,}", size(row["written_bytes"])


def _wear(row: dict[str, Any]) -> tuple[str, str]:
    day, years = row["drive_writes_per_day"], row["drive_life_years"]
    return "-" if day is None else f"{day:.2f}", "-" if years is None else f"{years:,.2f} y"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2f}%"
