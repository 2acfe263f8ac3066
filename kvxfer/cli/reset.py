"""`kvxfer reset` and `kvxfer rebuild-index`."""

from __future__ import annotations

import typer

from kvxfer.cli import output
from kvxfer.cli.arguments import Json, Root, Yes
from kvxfer.cli.gc import removed_object, removed_words
from kvxfer.cli.output import clean, size
from kvxfer.store import survey_root
from kvxfer.store.collect import rebuild_index
from kvxfer.store.collect import reset as reset_root

RESET_EPILOG = (
    "Exit codes: 0 everything was dropped; 1 it was not: declined, or the root is damaged or of another version; 2 a "
    "bad option, no root there, or it cannot be opened or changed."
)
REBUILD_EPILOG = (
    "Exit codes: 0 it was rebuilt; 1 it was not: declined, or the root is damaged or of another version; 2 a bad "
    "option, no root there, a process has it open, or it cannot be read or written."
)


def reset(root: Root, yes: Yes = False, as_json: Json = False) -> None:
    """Drop everything that is stored, and raise the weight epoch. Servers may have the root open, and go on with it."""
    with output.errors(as_json, damaged=output.FAILED):
        output.check_can_ask(yes)
        seen = survey_root(root)
        chunks = f"{len(seen.index.records):,} chunks" if seen.index.usable else "all chunks"
        slab_bytes = sum(slab.file_bytes for slab in seen.slabs.values())
        what = f"{chunks} of {len(seen.namespaces)} namespaces, in {len(seen.slabs)} slabs of {size(slab_bytes)},"
        if not as_json:
            typer.echo(f"{clean(root)}: {what} will be removed")
        output.must_confirm(f"Remove {what} from {clean(root)}. Go on?", yes, as_json)
        removed, epoch = reset_root(root)
        if as_json:
            output.print_json({"root": str(root), "weight_epoch": epoch, **removed_object(removed)})
        else:
            typer.echo(f"{removed_words(removed)}; weight epoch {epoch}")


def rebuild(root: Root, yes: Yes = False, as_json: Json = False) -> None:
    """Throw the index away and find it again in the slots. Not while a process has the root open.

    Chunks whose slots are whole stay. When they were used last is forgotten: they count as used now.
    """
    with output.errors(as_json, damaged=output.FAILED):
        output.check_can_ask(yes)
        seen = survey_root(root)
        before = len(seen.index.records) if seen.index.usable else None
        named = "an index that cannot be used" if before is None else f"an index of {before:,} entries"
        slots = sum(slab.whole_slots for slab in seen.slabs.values())
        what = f"{named} is removed, and {slots:,} slots of {len(seen.slabs)} slabs are read for a new one"
        if not as_json:
            typer.echo(f"{clean(root)}: {what}")
        output.must_confirm(f"{what}. Go on?", yes, as_json)
        slabs, entries = rebuild_index(root)
        if as_json:
            output.print_json({"root": str(root), "slabs": slabs, "before": before, "entries": entries})
        else:
            typer.echo(f"index rebuilt from {slabs} slabs: {entries:,} entries")
