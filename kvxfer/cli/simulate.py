"""`kvxfer simulate`: its options. What a store would have done for a trace, without moving a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli import bench_plot, output, simulate_job, simulate_plot, simulate_view
from kvxfer.cli.arguments import Json
from kvxfer.cli.simulate_plan import ADMISSIONS, Drive, Plan, block_bytes_of
from kvxfer.geometry import PRESETS
from kvxfer.policy import POLICIES
from kvxfer.simulate import BLOCK_TOKENS

EPILOG = (
    "Exit codes: 0 it was simulated; 2 a bad option, or a trace that cannot be read or is none: the message names the "
    "line."
)


def command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="One JSON object a line; see docs/cli.md.")],
    policy: Annotated[
        list[str], typer.Option(metavar="NAME,...", help=f"Of {', '.join(POLICIES)}; or all. May be repeated.")
    ] = ["all"],  # noqa: B006 - typer copies it
    capacity: Annotated[
        list[str],
        typer.Option(metavar="SIZE,...", help="Of the store: 100GiB, or 5% of the footprint. May be repeated."),
    ] = ["1%,5%,20%"],  # noqa: B006
    admission: Annotated[
        list[str], typer.Option(metavar="NAME,...", help=f"Of {', '.join(ADMISSIONS)}. May be repeated.")
    ] = ["always"],  # noqa: B006
    second_touch_names: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="Keys that second-touch remembers.")
    ] = 1 << 20,
    budget: Annotated[
        list[str],
        typer.Option(metavar="RATE,...", help="Of writes: none, 50MB/s, or 1dwpd with --drive. May be repeated."),
    ] = ["none"],  # noqa: B006
    model: Annotated[
        str, typer.Option(help=f"Whose bytes: {', '.join(PRESETS)}, or a config.json or its directory.")
    ] = "llama-3.1-8b",
    dtype: Annotated[str | None, typer.Option(help="Of its cache.", show_default="the model's")] = None,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(parser=output.whole_number, metavar="N", help="Instead of a model.", show_default="the model's"),
    ] = None,
    block_tokens: Annotated[
        int,
        typer.Option(parser=output.whole_number, metavar="N", help="Tokens that one of the trace's ids stands for."),
    ] = BLOCK_TOKENS,
    drive: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of the drive, as it is sold: 3.84TB.", show_default="not said")
    ] = None,
    tbw: Annotated[
        float | None,
        typer.Option(metavar="TB", help="Its rated endurance, in 1e12 bytes.", show_default="not said"),
    ] = None,
    dwpd: Annotated[
        float | None,
        typer.Option(metavar="N", help="Or: in drive-writes-per-day over its warranty.", show_default="not said"),
    ] = None,
    warranty_years: Annotated[float, typer.Option(metavar="Y", help="For --dwpd.")] = 5.0,
    write_amplification: Annotated[
        float, typer.Option(metavar="F", help="Bytes that reach the flash, for each that is written.")
    ] = 1.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Hit ratio over capacity, as a picture (needs matplotlib).", show_default="none"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace of requests against policies, capacities, admission and write budgets, without moving bytes.

    Every policy is combined with every capacity, admission and budget.
    """
    with output.errors(as_json):
        plan = Plan.parse(
            trace=trace,
            policy=policy,
            capacity=capacity,
            admission=admission,
            budget=budget,
            second_touch_names=second_touch_names,
            drive=Drive.parse(drive, tbw, dwpd, warranty_years, write_amplification),
            block_bytes=block_bytes_of(model, dtype, bytes_per_token, block_tokens),
            block_tokens=block_tokens,
        )
        if plot is not None:
            bench_plot.check(plot)
        report = simulate_job.run(plan)
        if plot is not None:
            simulate_plot.draw(report, plot)
        if as_json:
            output.print_json(report.as_json())
        else:
            simulate_view.show(report)
