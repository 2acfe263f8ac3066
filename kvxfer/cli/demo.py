"""`kvxfer demo`: its options and what it prints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli import demo_view, output
from kvxfer.cli.arguments import Json
from kvxfer.cli.demo_job import MAX_BLOCKS, Plan, run
from kvxfer.errors import ConfigError
from kvxfer.geometry import PRESETS
from kvxfer.layout import LAYOUTS


def parse_blocks(option: str, text: str) -> tuple[int, ...]:
    """Block numbers as a command line gives them, `28,30`; `none` for none. Sorted, each once.

    Raises:
        ConfigError: anything else.
    """
    if text == "none":
        return ()
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"{option} {text!r}: allowed are block numbers parted by commas, or none") from None


EPILOG = "Exit codes: 0 all is well; 1 wrong bytes were found; 2 a bad option, configuration or environment."


def command(
    model: Annotated[str, typer.Option(help=f"Whose geometry: {', '.join(PRESETS)}.")] = "llama-3.1-8b",
    blocks: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help=f"Blocks of the prompt, 1 to {MAX_BLOCKS}.")
    ] = 40,
    lose: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Blocks to damage on disk, from 0; none for none.",
            show_default="28 of 40; 70 % in",
        ),
    ] = None,
    store_tp: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="Tensor-parallel ranks that store.")
    ] = 2,
    load_tp: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="Tensor-parallel ranks that load.")
    ] = 4,
    store_layout: Annotated[str, typer.Option(help=f"Their pages: {', '.join(LAYOUTS)}.")] = "nhd",
    load_layout: Annotated[str, typer.Option(help=f"Their pages: {', '.join(LAYOUTS)}.")] = "hnd",
    blocks_per_chunk: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="Blocks stored under one key, 1 to 256.")
    ] = 1,
    root: Annotated[
        Path | None, typer.Option(help="Keep the store in this folder.", show_default="a temporary folder, removed")
    ] = None,
    as_json: Json = False,
) -> None:
    """Store a cache from one sharding, lose a block on disk, load it under another: see how far it gets.

    The bytes are random; every byte that comes back is compared with slices of the source.
    """
    with output.errors(as_json):
        plan = Plan(
            model=model,
            blocks=blocks,
            lose=(blocks * 7 // 10,) if lose is None else parse_blocks("--lose", lose),
            store_tp=store_tp,
            load_tp=load_tp,
            store_layout=store_layout,
            load_layout=load_layout,
            blocks_per_chunk=blocks_per_chunk,
        )
        with _root(root) as folder:
            report = run(plan, folder)
        if as_json:
            output.print_json(asdict(report))
        else:
            demo_view.show(report, plan.geometry)
    if report.bytes_wrong:
        raise typer.Exit(output.FAILED)


@contextmanager
def _root(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="kvxfer-demo-") as folder:
        yield Path(folder) / "root"
