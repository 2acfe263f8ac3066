"""The command line: `python -m bench`. Prints a table; the exit status is 1 where any answer was wrong."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from bench import converter, durability, engine, lookup, policy, resident, rows, sharing, simulate, tier, ttft, uring
from bench.options import MIB, Options
from bench.table import Table, exit_status, machine_facts
from kvxfer.errors import KvxferError

MEMORY_DIRECTORY = Path("/dev/shm")
QUICK_RUNS, FULL_RUNS = 5, 15
ROOMS = {
    "converter": converter.run,
    "rows": rows.run,
    "engine": engine.run,
    "uring": uring.run,
    "policy": policy.run,
    "lookup": lookup.run,
    "resident": resident.run,
    "sharing": sharing.run,
    "durability": durability.run,
    "simulate": simulate.run,
    "tier": tier.run,
    "ttft": ttft.run,
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    out = argparse.ArgumentParser(prog="python -m bench", description="kvxfer beside its peers, on checked bytes.")
    out.add_argument(
        "--dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="where to measure the engine, in a folder of its own that is removed; may be given several times "
        f"(default: the working directory). {MEMORY_DIRECTORY} comes after them, where there is room",
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine's facts there too")
    out.add_argument("--quick", action="store_true", help="fewer cases and rounds: about a minute")
    out.add_argument("--only", choices=tuple(ROOMS), help="the rows of one part")
    out.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="threads of the converter, I/O threads of the engine, and as many for their peers "
        "(default: 1 and 2, and 8 for I/O)",
    )
    out.add_argument("--runs", type=_positive, metavar="N", help=f"timed rounds of a case (default: {FULL_RUNS})")
    out.add_argument("--trace", type=Path, metavar="FILE", help="what to simulate (default: a sample of 500 requests)")
    return out


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def options_of(args: argparse.Namespace) -> Options:
    """What the arguments ask for."""
    cores = len(os.sched_getaffinity(0))
    threads: tuple[int, ...] = (args.threads,) if args.threads else tuple(sorted({1, min(2, cores)}))
    defaults = Options()
    directories = args.dir or [Path.cwd()]
    if MEMORY_DIRECTORY.is_dir() and MEMORY_DIRECTORY not in directories:
        directories = [*directories, MEMORY_DIRECTORY]
    lighter: dict[str, Any] = {}
    if args.quick:
        lighter = {"budget_s": 1.5, "engine_bytes": 64 * MIB, "tp_sizes": (1, 4), "keys": 100_000, "jobs": 1000}
    return Options(
        only=args.only,
        trace=args.trace,
        dirs=tuple(directories),
        quick=args.quick,
        runs=args.runs or (QUICK_RUNS if args.quick else FULL_RUNS),
        threads=threads[-1:] if args.quick else threads,
        io_threads=args.threads or defaults.io_threads,
        **lighter,
    )


def run(options: Options, out: TextIO | None = sys.stdout) -> Table:
    """Measure everything that the options ask for."""
    settings = {
        "runs": options.runs,
        "threads": options.threads,
        "io_threads": options.io_threads,
        "converter_bytes": options.converter_bytes,
        "engine_bytes": options.engine_bytes,
    }
    facts = machine_facts() | {"settings": ", ".join(f"{name}={value}" for name, value in settings.items())}
    table = Table(facts, out)
    for name, room in ROOMS.items():
        if options.only in (None, name):
            room(table, options)
    table.close()
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 for a wrong answer, 2 where it could not be measured."""
    args = parser().parse_args(argv)
    try:
        table = run(options_of(args))
    except (KvxferError, OSError) as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 2
    if args.json:
        table.write_json(args.json)
    return exit_status(table.rows)


if __name__ == "__main__":
    sys.exit(main())
