"""The command line. `kvxfer --help` lists what there is.

Exit codes: 0 all is well, 1 wrong bytes were found, 2 a bad option, configuration or environment (one line says which).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import kvxfer
from kvxfer.cli import demo
from kvxfer.errors import KvxferError

WRONG_BYTES = 1
BAD_INPUT = 2

app = typer.Typer(
    name="kvxfer",
    help="Sharded, paged KV caches to NVMe and back, as far as they got.",
    epilog="Exit codes: 0 all is well; 1 wrong bytes were found; 2 a bad option, configuration or environment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="demo")(demo.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvxfer {kvxfer.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of kvxfer itself; the commands have their own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kvxfer")
    except KvxferError as exc:
        print(f"kvxfer: {type(exc).__name__}: {exc}", file=sys.stderr)
        return BAD_INPUT
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return 0
