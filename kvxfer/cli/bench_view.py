"""What `kvxfer bench gds` shows a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.cli.output import clean, screen, size

if TYPE_CHECKING:
    from kvxfer.cli.bench_job import Report, Row

_STYLES = {"ok": "green", "WRONG": "bold red", "errors": "bold red", "too few": "yellow"}
_TOOL_PERCENT = 50  # of the bench's own rate: beyond it, the bench may be what limits
_WIDTH = 140  # of the table; a narrower terminal folds its lines
_LATENCIES = ("p50", "p90", "p99", "p99_9", "max")


def show(report: Report, console: Console | None = None) -> None:
    """Prints it; `console`: where to, None: standard output."""
    console = console or screen()
    console.width = max(console.width, _WIDTH)
    plan, way = report.plan, report.way
    console.print(f"mode          {way.mode}, {report.memory} memory: {clean(way.why)}")
    for step in way.steps:
        console.print(f"              not {clean(step)}")
    console.print(
        f"requests      {plan.operation}{f' ({plan.read_percent}% reads)' if plan.operation == 'mixed' else ''}, "
        f"{plan.layout}, {plan.threads} threads x {plan.depth} in flight, {size(report.used_bytes)} of files"
    )
    console.print(f"drive         {_limit(report.drive_gbps, report.drive_why)}")
    crossed = report.memory == "device"
    link = _limit(report.link_gbps, report.link_why) if crossed else report.link_why
    console.print(f"PCIe link     {link}")
    console.print(f"checked       {clean(report.verified)}")
    console.print(f"the bench     makes {report.empty_calls_per_s:,.0f} requests/s where they take no time")
    console.print(_table(report), crop=False)
    for row in report.rows:
        _notes(console, report, row)
    for theirs in report.peer:
        if theirs["why"]:
            console.print(Text(f"{size(theirs['size'])}: no figures of fio: {clean(theirs['why'])}", style="yellow"))
    if report.peer:
        engine = report.peer[0]["engine"]
        console.print(f"fio: {engine}, files and memory of its own; its bytes are not checked")


def _limit(gbps: float | None, why: str) -> str:
    return f"unknown: {clean(why)}" if gbps is None else f"{gbps:.2f} GB/s ({clean(why)})"


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("size", "what", "", "GB/s", "IOPS", "p50 us", "p90", "p99", "p99.9", "max", "cores", "CPU s/GB",
                 "of link", "of drive"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("size", "what", "") else "right", no_wrap=True)
    theirs = {row["size"]: row for row in report.peer}
    for row in report.rows:
        for index, part in enumerate(row.parts):
            figures = [f"{part.gbps:.2f}", f"{part.iops:,.0f}", *_latency(part.latency_us)]
            figures += [_number(row.cpu_cores), _number(row.cpu_s_per_gb)] if index == 0 else ["", ""]
            whole = (_percent(row.link_percent), _percent(row.drive_percent)) if index == 0 else ("", "")
            table.add_row(size(row.size), part.operation, _status(row.status), *figures, *whole)
        if not row.parts:
            table.add_row(size(row.size), report.plan.operation, _status(row.status))
        for part in theirs.get(row.size, {"parts": ()})["parts"]:
            figures = [f"{part['gbps']:.2f}", f"{part['iops']:,.0f}", *_latency(part["latency_us"])]
            table.add_row(size(row.size), f"{part['operation']}, fio", "unchecked", *figures)
    return table


def _status(text: str) -> Text:
    return Text(text, style=_STYLES[text])


def _latency(found: dict[str, Any]) -> list[str]:
    return ["-" if found[name] is None else f"{found[name]:,.0f}" for name in _LATENCIES]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _notes(console: Console, report: Report, row: Row) -> None:
    name = size(row.size)
    if row.status != "ok":
        console.print(Text(f"{name}: {row.status}: {clean(row.why)}", style=_STYLES[row.status]))
        for text in row.wrong[1:]:
            console.print(Text(f"      {clean(text)}", style="red"))
    if row.extra_calls:
        console.print(f"{name}: {row.extra_calls} further calls after short transfers")
    if row.tool_percent is not None and row.tool_percent > _TOOL_PERCENT:
        text = f"{name}: {row.tool_percent:.0f}% of the requests that the bench can make: it may be what limits"
        console.print(Text(text, style="yellow"))
