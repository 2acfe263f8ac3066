"""`kvxfer doctor`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli import doctor_view, output
from kvxfer.cli.arguments import Json
from kvxfer.cli.doctor_job import Plan, examine
from kvxfer.config import EngineConfig
from kvxfer.geometry import PRESETS
from kvxfer.probe import TIMEOUT_S

EPILOG = (
    "Exit codes: 0 all that this version needs works; 1 something that it needs does not (the library, a DIR, the "
    "limit of open files; with --calibrate, a device whose copy engines could be measured); 2 a bad option."
)


def command(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="Where roots are, or may be made.", show_default="."),
    ] = None,
    io_threads: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="The engine's io_threads.")
    ] = EngineConfig().io_threads,
    chunk_bytes: Annotated[
        int | None, typer.Option(parser=output.whole_number, metavar="N", help="Chunks are host rows of N bytes.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=f"Chunks are of a model: {', '.join(PRESETS)}.")] = None,
    blocks_per_chunk: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="Blocks of the preset's chunks, 1 to 256.")
    ] = 1,
    capacity_bytes: Annotated[
        int | None,
        typer.Option(
            parser=output.whole_number, metavar="N", help="The store's capacity_bytes.", show_default="64 GiB"
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds that a driver or a library may take to answer.")
    ] = TIMEOUT_S,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Show which copy engine suits the GPU here; measure what is not known yet."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what works here and why not: versions, devices, I/O mode of directories, memory of a configuration."""
    with output.errors(as_json):
        plan = Plan(
            directories=tuple(directories or [Path()]),
            io_threads=io_threads,
            chunk_bytes=chunk_bytes,
            preset=preset,
            blocks_per_chunk=blocks_per_chunk,
            capacity_bytes=capacity_bytes,
            timeout_s=timeout,
            calibrate=calibrate,
        )
        report = examine(plan)
        if as_json:
            output.print_json(report.as_json())
        else:
            doctor_view.show(report)
    if not report.ok:
        raise typer.Exit(output.FAILED)
