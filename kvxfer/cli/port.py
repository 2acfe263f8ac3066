"""`kvxfer export` and `kvxfer import`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli import output
from kvxfer.cli.arguments import Json, Root, Yes
from kvxfer.cli.output import clean, size
from kvxfer.store import survey_root
from kvxfer.store.port import Imported, export_namespace, find_namespace, import_namespace
from kvxfer.store.transfer_file import ExportReader

EXPORT_EPILOG = (
    "Exit codes: 0 every chunk was written; 1 some were damaged and left out, or the root is damaged or of another "
    "version; 2 a bad option, no root or no such namespace there, or the file cannot be written."
)
IMPORT_EPILOG = (
    "Exit codes: 0 every chunk of the file is in the root; 1 some are not (damaged, or no room), or declined, or root "
    "or file are damaged or of another version; 2 a bad option, no root there, or the file does not fit to it."
)


def export(
    root: Root,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")],
    namespace: Annotated[str, typer.Option(metavar="DIGEST", help="Which: how its digest begins (see inspect).")],
    as_json: Json = False,
) -> None:
    """Write a namespace's chunks into a file, each verified. Servers may have the root open."""
    with output.errors(as_json, damaged=output.FAILED):
        done = export_namespace(root, find_namespace(survey_root(root), namespace), file)
        if as_json:
            output.print_json({"root": str(root), "file": str(file)} | asdict(done) | {"digest": done.digest.hex()})
        else:
            typer.echo(
                f"{clean(file)}: {done.chunks:,} chunks of {done.digest.hex()[:12]}, {size(done.nbytes)}; damaged and "
                f"left out: {done.failed}; evicted meanwhile: {done.changed}"
            )
    if done.failed:
        raise typer.Exit(output.FAILED)


def import_(
    root: Root,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What export wrote.")],
    same_weights: Annotated[
        bool, typer.Option("--same-weights", help="Also from another weight epoch: the weights are the same.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Adopt the chunks of an exported namespace, each verified. Servers may have the root open.

    Where the root has no room, what was used least makes way; it says how much comes, and asks.
    """
    with output.errors(as_json, damaged=output.FAILED):
        output.check_can_ask(yes)
        seen = survey_root(root)
        with closing(ExportReader(file)) as source:
            layout = source.heading.layout
            what = f"{source.slots:,} chunks of {size(source.slots * layout.slot_bytes)}"
            fields = source.heading.namespace
            if not as_json:
                typer.echo(f"{clean(file)}: {what}; {clean(fields.model)}, weight epoch {source.heading.weight_epoch}")
            used = f"{len(seen.index.records):,} chunks are there" if seen.index.usable else "its index is not readable"
            question = f"{what} go into {clean(root)} ({used}); where there is no room the least used make way. Go on?"
            output.must_confirm(question, yes, as_json)
            done = import_namespace(root, source, same_weights=same_weights)
        if as_json:
            output.print_json({"root": str(root), "file": str(file)} | _object(done))
        else:
            typer.echo(_words(done))
    if done.failed or done.no_room or not done.complete:
        raise typer.Exit(output.FAILED)


def _object(done: Imported) -> dict[str, Any]:
    return asdict(done) | {"digest": done.digest.hex()}


def _words(done: Imported) -> str:
    reasons = ", ".join(f"{why} {count}" for why, count in sorted(done.reasons.items()))
    end = "" if done.complete else "; the file ends early"
    return (
        f"namespace {done.digest.hex()[:12]}: {done.chunks:,} chunks adopted, {done.present:,} were there, "
        f"{done.failed:,} damaged{f' ({reasons})' if reasons else ''}, {done.no_room:,} without room{end}"
    )
