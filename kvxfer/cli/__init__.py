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
from kvxfer.cli.late import At, group
from kvxfer.cli.output import BAD_INPUT, FAILED

WRONG_BYTES = FAILED  # what the demo finds

COMMANDS = {
    "demo": At(
        "demo", "Store a cache from one sharding, lose a block on disk, load it under another: see how far it gets."
    ),
    "doctor": At(
        "doctor",
        "Say what works here and why not: versions, devices, I/O mode of directories, memory of a configuration.",
    ),
    "inspect": At(
        "inspect", "Say what is in a root: slabs, slots, entries of each namespace, the index, who has it open."
    ),
    "verify": At("verify", "Read every slot of a root, and check every entry's every byte against its sums."),
    "gc": At("gc", "Remove chunks that nobody wants any more: those for which everything holds that is given."),
    "scrub": At(
        "scrub",
        "Read and check what is stored, at a bounded rate, while servers serve it. What is damaged becomes a miss.",
    ),
    "export": At(
        "port",
        "Write a namespace's chunks into a file, each verified. Servers may have the root open.",
        "export",
        "EXPORT_EPILOG",
    ),
    "import": At(
        "port",
        "Adopt the chunks of an exported namespace, each verified. Servers may have the root open.",
        "import_",
        "IMPORT_EPILOG",
    ),
    "quota": At(
        "quota", "Show quotas, or set those of one namespace. Servers that have the root open follow within 100 ms."
    ),
    "reset": At(
        "reset",
        "Drop everything that is stored, and raise the weight epoch. Servers may have the root open, and go on with "
        "it.",
        "reset",
        "RESET_EPILOG",
    ),
    "rebuild-index": At(
        "reset",
        "Throw the index away and find it again in the slots. Not while a process has the root open.",
        "rebuild",
        "REBUILD_EPILOG",
    ),
    "simulate": At(
        "simulate",
        "Replay a trace of requests against policies, capacities, admission and write budgets, without moving bytes.",
    ),
    "epoch": At("epoch", "The weight epoch of a root.", "app"),
    "bench": At("bench", "Microbenchmarks for operators, on checked bytes.", "app"),
}

app = typer.Typer(
    name="kvxfer",
    cls=group(COMMANDS),
    help="Sharded, paged KV caches to NVMe and back, as far as they got.",
    epilog="Exit codes: 0 all is well; 1 wrong bytes, damage, or something that does not work, was found; 2 a bad "
    "option, configuration or environment. Each command's help has its own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


__all__ = ["BAD_INPUT", "COMMANDS", "FAILED", "WRONG_BYTES", "app", "main"]
