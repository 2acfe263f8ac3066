"""The command line. `kvxfer --help` lists what there is; docs/cli.md says what each command prints and answers.

Exit codes: 0 all is well, 1 a command found what it looks for (wrong bytes, damage, something that does not work), 2 a
bad option, configuration or environment (one line says which).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import kvxfer
from kvxfer.cli import bench, demo, doctor, epoch, gc, inspect, port, quota, reset, scrub, simulate, verify
from kvxfer.cli.output import BAD_INPUT, FAILED

WRONG_BYTES = FAILED  # what the demo finds

app = typer.Typer(
    name="kvxfer",
    help="Sharded, paged KV caches to NVMe and back, as far as they got.",
    epilog="Exit codes: 0 all is well; 1 wrong bytes, damage, or something that does not work, was found; 2 a bad "
    "option, configuration or environment. Each command's help has its own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="demo", epilog=demo.EPILOG)(demo.command)
app.command(name="doctor", epilog=doctor.EPILOG)(doctor.command)
app.command(name="inspect", epilog=inspect.EPILOG)(inspect.command)
app.command(name="verify", epilog=verify.EPILOG)(verify.command)
app.command(name="gc", epilog=gc.EPILOG)(gc.command)
app.command(name="scrub", epilog=scrub.EPILOG)(scrub.command)
app.command(name="export", epilog=port.EXPORT_EPILOG)(port.export)
app.command(name="import", epilog=port.IMPORT_EPILOG)(port.import_)
app.command(name="quota", epilog=quota.EPILOG)(quota.command)
app.command(name="reset", epilog=reset.RESET_EPILOG)(reset.reset)
app.command(name="rebuild-index", epilog=reset.REBUILD_EPILOG)(reset.rebuild)
app.command(name="simulate", epilog=simulate.EPILOG)(simulate.command)
app.add_typer(epoch.app, name="epoch")
app.add_typer(bench.app, name="bench")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal has no letters for is still printed
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kvxfer")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return 0


__all__ = ["BAD_INPUT", "FAILED", "WRONG_BYTES", "app", "main"]
