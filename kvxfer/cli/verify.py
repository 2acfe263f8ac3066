"""`kvxfer verify`: its options, and what is removed with `--repair`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli import output, verify_view
from kvxfer.cli.arguments import Json, Root, Yes
from kvxfer.cli.inspect import finding_object
from kvxfer.store import Finding, Store, Verification, verify_root
from kvxfer.store.audit import MAX_THREADS, Progress

EPILOG = (
    "Exit codes: 0 everything was verified, or all that failed was removed; 1 something failed, or it is of another "
    "version; 2 a bad option, or no root there."
)


def command(
    root: Root,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what fails; asks first.")] = False,
    yes: Yes = False,
    threads: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help=f"That read, 1 to {MAX_THREADS}.")
    ] = min(8, os.cpu_count() or 1),
    as_json: Json = False,
) -> None:
    """Read every slot of a root, and check every entry's every byte against its sums.

    Nothing is changed without --repair. Where a server has the root open, what fails is looked at a second time.
    """
    with output.errors(as_json, damaged=output.FAILED):
        if repair:
            output.check_can_ask(yes)  # before the long work, not after
        with _progress(as_json) as progress:
            result = verify_root(root, threads=threads, progress=progress)
        left, removed = result.findings, 0
        if not as_json:
            verify_view.show(result)
        if repair and result.findings:
            question = _announce(result.findings)
            if output.confirmed(question, yes):
                left = mend(root, result.findings, threads)
                removed = result.entries_failed - sum(finding.record is not None for finding in left)
                if not as_json:
                    verify_view.show_repair(removed, left)
        if as_json:
            output.print_json(as_object(result) | {"removed": removed, "left": [finding_object(each) for each in left]})
    if left:
        raise typer.Exit(output.FAILED)


@contextmanager
def _progress(as_json: bool) -> Iterator[Progress | None]:
    if as_json:
        yield None
        return
    with verify_view.bar() as progress:
        yield progress


def _announce(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.what for finding in findings)
    entries = sum(finding.record is not None for finding in findings)
    steps = [f"entries to be removed: {entries}"] if entries else []
    words = {
        "index": "the index is rebuilt",
        "slab_header": "files without a header to be removed: {}",
        "slab_short": "slabs to be extended: {}",
        "slab_long": "slabs to be cut: {}",
    }
    steps += [text.format(counts[what]) for what, text in words.items() if counts[what]]
    if not steps:
        return "Nothing here can be removed; open the root all the same?"
    return "; ".join(steps) + ". Go on?"


def mend(root: Path, findings: Sequence[Finding], threads: int) -> list[Finding]:
    """Removes entries that failed, if they are still the same, and lets an open mend the rest.

    Returns:
        What fails now, of that which failed.

    Raises:
        KvxferError: the root cannot be opened.
    """
    with Store.open_existing(root) as store:
        for finding in findings:
            if (record := finding.record) is not None:
                store.invalidate_record(
                    record.digest, record.key, record.slab_id, record.slot, record.generation, finding.what
                )
        store.maintain()
    places = {(finding.slab_id, finding.slot) for finding in findings}
    only = [(slab_id, slot) for slab_id, slot in places if slab_id is not None and slot is not None]
    return verify_root(root, threads=threads, only=only).findings


def as_object(result: Verification) -> dict[str, Any]:
    """For `--json`."""
    seen = result.survey
    return {
        "root": str(seen.root),
        "open_in": list(seen.holders),
        "slabs": len(seen.slabs),
        "slots": result.slots,
        "free": result.free,
        "stale": result.stale,
        "changed": result.changed,
        "entries_verified": result.verified,
        "verified_bytes": result.verified_bytes,
        "entries_failed": result.entries_failed,
        "index": {"state": seen.index.state, "why": seen.index.why},
        "findings": [finding_object(finding) for finding in result.findings],
    }
