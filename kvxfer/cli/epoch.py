"""`kvxfer epoch`: the weight epoch of a root."""

from __future__ import annotations

from contextlib import suppress

import typer

from kvxfer.cli import output
from kvxfer.cli.arguments import Json, Root, Yes
from kvxfer.errors import ConfigError
from kvxfer.store import Store
from kvxfer.store.root import ROOT_FILE

EPILOG = (
    "Exit codes: 0 it was raised; 1 it was not: declined, or the root is damaged or of another version; 2 a bad "
    "option, no root there, or it cannot be written."
)

app = typer.Typer(help="The weight epoch of a root.", no_args_is_help=True, epilog=EPILOG)


@app.callback()
def options() -> None:
    """The weight epoch of a root: a part of every namespace's digest."""


@app.command(epilog=EPILOG)
def bump(
    root: Root,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make everything stored so far a miss: for weights that changed under the same name.

    It cannot be taken back. What is stored stays on disk until its room is needed.
    """
    with output.errors(as_json, damaged=output.FAILED):
        if not (root / ROOT_FILE).exists():
            raise ConfigError(f"{root} is no kvxfer root: it has no {ROOT_FILE}")
        output.must_confirm(f"Everything stored in {output.clean(root)} will be a miss. Go on?", yes, as_json)
        old, new = Store.bump_epoch_of(root)
        with suppress(OSError):  # it is raised, whoever may not hear of it
            if as_json:
                output.print_json({"root": str(root), "old": old, "new": new})
            else:
                typer.echo(f"weight epoch of {output.clean(root)}: {old} -> {new}")
