"""`kvxfer bench`: microbenchmarks for operators, on checked bytes. `gds`: a drive, as transfers will use it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from kvxfer.cli import bench_job, bench_plot, bench_view, output
from kvxfer.cli.arguments import Json, Yes
from kvxfer.cli.bench_files import PREFIX
from kvxfer.cli.bench_plan import LAYOUTS, MEMORIES, MODES, OPERATIONS, PEERS, Plan, parse_size, parse_sizes

EPILOG = (
    "Exit codes: 0 it was measured, and every byte was right; 1 wrong bytes, or requests that failed; 2 a bad option, "
    "or what was asked for does not work here; 129, 130 or 143 interrupted, its files removed."
)

app = typer.Typer(help="Microbenchmarks for operators, on checked bytes.", no_args_is_help=True)


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@app.command(name="gds", epilog=EPILOG)
def gds(
    targets: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR | FILE...]", help="Where.", show_default=".")
    ] = None,
    operation: Annotated[str, typer.Option(help=f"One of {', '.join(OPERATIONS)}.")] = "read",
    read_percent: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="Reads among the requests of mixed.")
    ] = 70,
    sizes: Annotated[str, typer.Option(metavar="SIZE,...", help="Of a request, each by itself.")] = "64K,512K,2M",
    threads: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="Each with files of its own.")
    ] = 1,
    depth: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="Requests in flight for each thread.")
    ] = 8,
    duration: Annotated[float, typer.Option(metavar="S", help="Seconds of timed requests for each size.")] = 3.0,
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes moved for each size, at most.", show_default="none")
    ] = None,
    span: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the files made, or of the files given: what is used, in all.")
    ] = "1G",
    memory: Annotated[str, typer.Option(help=f"One of {', '.join(MEMORIES)}.")] = "auto",
    mode: Annotated[str, typer.Option(help=f"One of {', '.join(MODES)}.")] = "auto",
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")] = "random",
    repetitions: Annotated[
        int, typer.Option(parser=output.whole_number, metavar="N", help="The figure is their median.")
    ] = 3,
    drive_gbps: Annotated[
        float | None,
        typer.Option(
            metavar="G", help="What the drive can do, in 1e9 bytes a second.", show_default="its link, if known"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            parser=output.whole_number, metavar="N", help="Of the content and the order.", show_default="random"
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write to the files given: DESTROYS what they hold; asks first.")
    ] = False,
    yes: Yes = False,
    peer: Annotated[str | None, typer.Option(help=f"Run beside it: {', '.join(PEERS)}.", show_default="none")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Throughput over size, as a picture (needs matplotlib).", show_default="none"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure reads and writes of a drive, into host memory or a GPU's, and check every byte.

    In a DIR files are made, and removed however it ends; FILEs are only read, unless --overwrite is said.
    """
    with output.errors(as_json):
        plan = Plan(
            targets=tuple(targets or [Path()]),
            operation=operation,
            read_percent=read_percent,
            sizes=parse_sizes(sizes),
            threads=threads,
            depth=depth,
            duration_s=duration,
            limit_bytes=None if limit is None else parse_size(limit),
            span_bytes=parse_size(span),
            memory=memory,
            mode=mode,
            layout=layout,
            repetitions=repetitions,
            drive_gbps=drive_gbps,
            seed=seed,
            overwrite=overwrite,
            peer=peer,
            plot=plot,
        )
        if plot is not None:
            bench_plot.check(plot)
        if overwrite and not _may_overwrite(plan, yes):
            typer.echo("kvxfer: nothing was changed", err=True)
            raise typer.Exit(output.FAILED)
        report = _run(plan, as_json)
        if plot is not None:
            bench_plot.draw(report, plot)
        if as_json:
            output.print_json(report.as_json())
        else:
            bench_view.show(report)
    if not report.ok:
        raise typer.Exit(output.FAILED)


def _may_overwrite(plan: Plan, yes: bool) -> bool:
    names = ", ".join(str(each) for each in plan.targets)
    return output.confirmed(f"What {names} hold will be DESTROYED. Go on?", yes)


def _run(plan: Plan, as_json: bool) -> bench_job.Report:
    try:
        with _signals():
            return bench_job.run(plan, None if as_json else _tell)
    except KeyboardInterrupt as exc:
        number = exc.number if isinstance(exc, Stopped) else int(signal.SIGINT)
        typer.echo(f"kvxfer: interrupted by signal {number}; files named {PREFIX}* are removed", err=True)
        raise typer.Exit(128 + number) from None


def _tell(report: bench_job.Report, row: bench_job.Row) -> None:
    """A line on standard error as each size ends: it may take minutes."""
    figure = f"{row.gbps:.2f} GB/s" if row.parts else row.status
    typer.echo(f"{output.size(row.size)}: {figure} ({len(report.rows)} of {len(report.plan.sizes)} sizes)", err=True)


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the run as an exception, so that what it made goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:  # one is enough: the next must not end the clean-up
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[each] = signal.signal(each, stop)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
