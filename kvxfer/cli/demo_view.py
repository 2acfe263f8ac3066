"""What `kvxfer demo` shows a person: the row of blocks, what is saved, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kvxfer.cli.demo_job import Report
    from kvxfer.geometry import KVGeometry

ROW = 40  # blocks a line
# (glyph, glyph where the terminal has only ASCII, style): told apart without colour too.
USED, LOST, BEYOND = ("■", "#", "green"), ("×", "x", "bold red"), ("□", "o", "yellow")


def show(report: Report, geometry: KVGeometry, console: Console | None = None) -> None:
    """Prints the report.

    Args:
        report: what came of the demo.
        geometry: the model's.
        console: where to; None: standard output.
    """
    console = console or Console(highlight=False)
    plain = 0 if console.encoding.lower().startswith("utf") else 1
    console.print(
        f"[bold]{report.model}[/bold]: {report.requested_blocks} blocks of {geometry.tokens_per_block} tokens, "
        f"{_size(geometry.block_bytes)} each; {report.io_mode}"
    )
    console.print(f"  stored   by TP{report.store_shards} from {report.store_layout} pages")
    console.print(f"  damaged  {_numbers(report.lost_blocks)}{', on disk' if report.lost_blocks else ''}")
    console.print(f"  loaded   by TP{report.load_shards} into {report.load_layout} pages\n")
    _show_blocks(report, console, plain)
    _show_tokens(report, console, plain)
    _show_speed(report, console, plain)
    console.print(f"Checked {report.chunks_verified} chunks, refused {report.chunks_refused} of them.")
    wrong = f"[bold red]{report.bytes_wrong:,} WRONG[/bold red]" if report.bytes_wrong else "[green]0 wrong[/green]"
    console.print(f"Compared {report.bytes_checked:,} loaded bytes with the source: {wrong}.")


def _show_blocks(report: Report, console: Console, plain: int) -> None:
    kinds = [
        LOST if not arrived else USED if number < report.prefix_blocks else BEYOND
        for number, arrived in enumerate(report.arrived)
    ]
    for first in range(0, len(kinds), ROW):
        line = Text(f"  {first:>5} ")
        for offset, kind in enumerate(kinds[first : first + ROW]):
            if offset % 10 == 0:
                line.append(" ")
            line.append(kind[plain], style=kind[2])
        console.print(line)
    legend = Text("\n       ")
    for kind, count, meaning in (
        (USED, report.prefix_blocks, "prefix"),
        (LOST, report.requested_blocks - report.arrived_blocks, "lost"),
        (BEYOND, report.kept_beyond_gap, "beyond the gap, kept in the store"),
    ):
        legend.append(f" {kind[plain]}", style=kind[2])
        legend.append(f" {count} {meaning}  ")
    legend.rstrip()
    console.print(legend, end="\n\n")


def _show_tokens(report: Report, console: Console, plain: int) -> None:
    table = _table(plain, "of the prompt's tokens", "from disk", "to recompute")
    table.add_row("kvxfer", f"{report.usable_tokens}", f"{report.recompute_tokens}", style="bold")
    prompt = report.usable_tokens + report.recompute_tokens
    everything = report.all_or_nothing_recompute_tokens
    table.add_row("all or nothing", f"{prompt - everything}", f"{everything}")
    console.print(table)
    if report.arrived_blocks == report.requested_blocks:
        console.print("(One token must be computed for the model to go on, rounded up to a block.)")


def _show_speed(report: Report, console: Console, plain: int) -> None:
    table = _table(plain, "measured in this run", "GB/s")
    for name, speed in (
        ("gather, checksum included (memory)", report.gather_GBps),
        ("store, submit to result (disk)", report.store_GBps),
        ("load, submit to result (disk)", report.load_GBps),
        ("scatter, checksum included (memory)", report.scatter_GBps),
    ):
        table.add_row(name, f"{speed:.2f}")
    console.print(table)


def _table(plain: int, first: str, *columns: str) -> Table:
    table = Table(safe_box=bool(plain))
    table.add_column(first, min_width=35)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def _numbers(blocks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, blocks[:8])) + (", ..." if len(blocks) > 8 else "")
    return f"a byte of block{'s' * (len(blocks) > 1)} {shown}" if blocks else "nothing"
