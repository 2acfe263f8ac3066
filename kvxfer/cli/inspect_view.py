"""What `kvxfer inspect` shows a person."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from kvxfer.cli.output import clean, moment, screen, size
from kvxfer.store.root import FORMAT

if TYPE_CHECKING:
    from kvxfer.cli.inspect import LayoutUse
    from kvxfer.store import Finding, Survey

SHOWN = 20  # findings, and namespaces; --json has all
_FIELD_LETTERS = 200


def show(seen: Survey, layouts: Sequence[LayoutUse], scrub: dict[str, Any], console: Console | None = None) -> None:
    """Prints what is in a root; `console`: where to, None: standard output."""
    console = console or screen()
    console.print(Text(clean(seen.root), style="bold"))
    info = seen.info
    _line(console, "root", f"format {FORMAT}, alignment {info.alignment}, weight epoch {info.weight_epoch}")
    _line(console, "open in", ", ".join(f"process {pid}" if pid else "a process" for pid in seen.holders) or "none")
    _line(console, "on disk", f"{size(seen.disk_bytes)} in {seen.disk_files} files")
    if seen.leftovers:
        _line(console, "", f"{seen.leftovers} leftover files, which the next open removes")
    if seen.other_files:
        _line(console, "", f"{seen.other_files} files of {size(seen.other_bytes)} that are not the store's")
    index = seen.index
    state = f"{len(index.records):,} entries" if index.usable else f"{index.state}: {index.why}"
    _line(console, "index", f"{state}; {size(index.file_bytes)}")
    _line(console, "scrub", _scrub(scrub))
    total = sum(slab.file_bytes for slab in seen.slabs.values())
    _line(console, "slabs", f"{len(seen.slabs)}, {size(total)}")
    for use in layouts:
        used = "" if use.used is None else f": {use.used:,} used, {use.free:,} free"
        text = f"{use.slots:,} slots of {size(use.layout.slot_bytes)} in {use.slabs} slabs{used}"
        _line(console, "", f"{text} ({use.layout.blocks_per_chunk} blocks, {use.layout.num_segments} segments)")
    _line(console, "namespaces", str(len(seen.namespaces)))
    for view in seen.namespaces[:SHOWN]:
        entries = f"{view.entries:,} entries" if index.usable else "entries unknown"
        epoch = "" if view.weight_epoch in (None, info.weight_epoch) else f" (of weight epoch {view.weight_epoch})"
        fields = view.why if view.fields is None else json.dumps(view.fields, ensure_ascii=False)
        cut = clean(fields if len(fields) <= _FIELD_LETTERS else fields[:_FIELD_LETTERS] + "...")
        _line(console, "", f"{view.digest.hex()[:12]}: {entries}{epoch}; {cut}")
    show_more(console, len(seen.namespaces))
    show_findings(console, seen.findings)


def _scrub(scrub: dict[str, Any]) -> str:
    said = f"last whole pass ended: {moment(scrub['ended'])}"
    if scrub["started"] is not None:
        behind = "" if scrub["behind"] is None else f", {scrub['behind']:,} chunks are behind it"
        said += f"; one is under way, begun {moment(scrub['started'])}{behind}"
    return said


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """The first findings, a line each."""
    for finding in findings[:SHOWN]:
        where = "" if finding.slab_id is None else f"slab {finding.slab_id} "
        where += "" if finding.slot is None else f"slot {finding.slot} "
        where += "" if finding.offset is None else f"offset {finding.offset:#x} "
        key = "" if finding.record is None else f"key {finding.record.key.hex()} "
        console.print(Text(f"  {finding.what}: {where}{key}{clean(finding.detail)}", style="bold red"))
    show_more(console, len(findings))


def show_more(console: Console, number: int) -> None:
    """Says how many lines were left out."""
    if number > SHOWN:
        console.print(Text(f"  and {number - SHOWN:,} more; --json has all"))


def _line(console: Console, name: str, text: str) -> None:
    console.print(Text(f"  {name:<12} {text}"))
