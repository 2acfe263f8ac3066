"""`kvxfer gc`: its options, what it says and its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvxfer.cli import output
from kvxfer.cli.arguments import Json, Root, Yes
from kvxfer.cli.output import clean, size
from kvxfer.errors import ConfigError
from kvxfer.store import survey_root
from kvxfer.store.collect import Part, Plan, Removed, Selection, carry_out, plan

EPILOG = (
    "Exit codes: 0 it was removed, or there is nothing to remove; 1 it was not: declined, or the root is damaged or of "
    "another version; 2 a bad option, no root there, or it cannot be opened or changed."
)
SHOWN = 20


def command(
    root: Root,
    unused_for: Annotated[
        float | None, typer.Option(parser=output.duration, metavar="TIME", help="Chunks not used for 7d, 12h, ...")
    ] = None,
    namespaces_unused_for: Annotated[
        float | None, typer.Option(parser=output.duration, metavar="TIME", help="Namespaces not used for so long.")
    ] = None,
    other_epochs: Annotated[bool, typer.Option("--other-epochs", help="Namespaces of other weight epochs.")] = False,
    unnamed: Annotated[bool, typer.Option("--unnamed", help="Namespaces of which no file says what they are.")] = False,
    namespace: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="One namespace: how its digest begins.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Namespaces of a tenant.")] = None,
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="Namespaces of an adapter.")] = None,
    salt: Annotated[str | None, typer.Option(metavar="TEXT", help="Namespaces with a salt.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove chunks that nobody wants any more: those for which everything holds that is given.

    Without options: what nobody can reach (namespaces of other weight epochs, and damaged ones without chunks). It
    says what will go, and asks. Servers may have the root open.
    """
    named = {"tenant": tenant, "adapter": adapter, "salt": salt}
    extra = {name: text for name, text in named.items() if text is not None}
    with output.errors(as_json, damaged=output.FAILED):
        if namespace == "":  # a script's variable that is not set: not every namespace is meant
            raise ConfigError("--namespace is empty: whose?")
        selection = Selection(
            unused_for_s=unused_for, namespaces_unused_for_s=namespaces_unused_for, other_epochs=other_epochs,
            unnamed=unnamed, namespace=namespace or "", extra=extra,
        )  # fmt: skip
        if not dry_run:
            output.check_can_ask(yes)
        wanted = plan(survey_root(root), selection)
        if not as_json:
            _show(root, wanted)
            if wanted.parts and dry_run:
                typer.echo(f"{_words(wanted)} would be removed; this was a dry run")
        removed: Removed | None = None
        if wanted.parts and not dry_run:
            output.must_confirm(f"{_words(wanted)} will be removed from {clean(root)}. Go on?", yes, as_json)
            removed = carry_out(root, wanted)
        if as_json:
            output.print_json({"root": str(root), "dry_run": dry_run, **_object(wanted), **removed_object(removed)})
        elif removed is not None:
            typer.echo(removed_words(removed))


def _words(wanted: Plan) -> str:
    whole = sum(part.whole for part in wanted.parts)
    return f"{wanted.chunks:,} chunks of {size(wanted.nbytes)}, {whole} namespaces as a whole,"


def _show(root: Path, wanted: Plan) -> None:
    console = output.screen()
    console.print(Text(clean(root), style="bold"))
    for part in wanted.parts[:SHOWN]:
        console.print(
            Text(f"  {part.view.digest.hex()[:12]}: {part.chunks:,} chunks, {size(part.nbytes)}; {_name(part)}")
        )
    if len(wanted.parts) > SHOWN:
        console.print(Text(f"  and {len(wanted.parts) - SHOWN:,} more; --json has all"))
    if not wanted.parts:
        console.print(Text("  nothing to remove"))


def _name(part: Part) -> str:
    view = part.view
    if view.fields is None:
        return clean(view.why)
    extra = {name: view.fields["extra"].get(name) for name in ("tenant", "adapter", "salt")}
    words = [str(view.fields["model"]), f"weight epoch {view.weight_epoch}"]
    words += [f"{name} {value}" for name, value in extra.items() if value is not None]
    return clean(", ".join(words))[:200]


def _object(wanted: Plan) -> dict[str, Any]:
    return {
        "namespaces": [
            {
                "digest": part.view.digest.hex(), "chunks": part.chunks, "bytes": part.nbytes, "whole": part.whole,
                "weight_epoch": part.view.weight_epoch, "fields": part.view.fields, "why": part.view.why,
            }
            for part in wanted.parts
        ],
        "chunks": wanted.chunks,
        "bytes": wanted.nbytes,
    }  # fmt: skip


def removed_object(removed: Removed | None) -> dict[str, Any]:
    """What has gone, for `--json`; zeros where nothing was."""
    done = removed or Removed()
    return {
        "removed": {
            "namespaces": done.namespaces, "chunks": done.chunks, "bytes": done.nbytes, "slabs": done.slabs,
            "slab_bytes": done.slab_bytes,
        }
    }  # fmt: skip


def removed_words(removed: Removed) -> str:
    """What has gone, for people."""
    return (
        f"removed {removed.chunks:,} chunks of {size(removed.nbytes)} and {removed.namespaces} namespaces; "
        f"{removed.slabs} slabs of {size(removed.slab_bytes)} were empty and are gone"
    )
