"""What `kvxfer verify` shows a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvxfer.cli.inspect_view import show_findings
from kvxfer.cli.output import clean, screen, size

if TYPE_CHECKING:
    from kvxfer.store import Finding, Verification
    from kvxfer.store.audit import Progress as Report


@contextmanager
def bar(console: Console | None = None) -> Iterator[Report | None]:
    """Slots looked at, on standard error; nothing (None) where that is no terminal."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TextColumn("slots"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("slots", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def show(result: Verification, console: Console | None = None) -> None:
    """Prints the counts and the first findings; `console`: where to, None: standard output."""
    console = console or screen()
    seen = result.survey
    console.print(Text(clean(seen.root), style="bold"))
    stale = f", no longer named by the index: {result.stale:,}" if result.stale else ""
    console.print(Text(f"  slots: {result.slots:,} in {len(seen.slabs)} slabs; free: {result.free:,}{stale}"))
    console.print(Text(f"  entries verified: {result.verified:,}, {size(result.verified_bytes)}"))
    if not seen.index.usable and (seen.slabs or seen.index.file_bytes):
        console.print(Text(f"  not compared with the index, {seen.index.state}: {clean(seen.index.why)}"))
    if seen.holders:
        console.print(Text(f"  the root is in use; given to another chunk meanwhile: {result.changed:,} slots"))
    if not result.findings:
        console.print(Text("  nothing failed", style="green"))
        return
    failed = f"  entries that fail: {result.entries_failed:,}; findings: {len(result.findings):,}"
    console.print(Text(failed, style="bold red"))
    show_findings(console, result.findings)


def show_repair(removed: int, left: Sequence[Finding], console: Console | None = None) -> None:
    """Prints what came of a repair; `console`: where to, None: standard output."""
    console = console or screen()
    console.print(Text(f"  entries removed: {removed:,}"))
    if left:
        console.print(Text(f"  left: {len(left):,}", style="bold red"))
        show_findings(console, left)
