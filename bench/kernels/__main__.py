"""`python -m bench.kernels`: compiles, prints the table, and exits with 1 where a rule is broken."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.kernels import page, rules
from bench.kernels.code import Compiled, UnreadableError
from bench.kernels.compiling import compiled

PROCESSES = min(4, os.cpu_count() or 1)  # four minutes of one core in all, half of them the disassembler's start


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description="What compilers make of the kernels.")
    parser.add_argument(
        "--target", action="append", choices=rules.TARGETS, help="only these; docs/kernels.md is let be"
    )
    parser.add_argument("--write", action="store_true", help="write docs/kernels.md")
    options = parser.parse_args(arguments)
    if options.write and options.target:
        parser.error("--write needs every target")
    try:
        found = compile_all(options.target or rules.TARGETS)
        problems = wrong(found)
        if options.write:
            page.PAGE.write_text(page.text(found))
        elif not options.target and (why := page.stale(found)):
            problems.append(f"{why}: run make kernels ARGS=--write")
    except UnreadableError as exc:
        print(f"make kernels: {exc}", file=sys.stderr)
        return 1
    print(page.table(found))
    for problem in problems:
        print(f"make kernels: {problem}", file=sys.stderr)
    print(f"{len(found)} compiled, {len(problems)} problems", file=sys.stderr)
    return 1 if problems else 0


def compile_all(targets: Sequence[str]) -> list[Compiled]:
    """Every variant for every target, in their order."""
    with ThreadPoolExecutor(PROCESSES) as pool:  # each starts a process of its own
        return [one for found in pool.map(compiled, targets) for one in found]


def wrong(found: Sequence[Compiled]) -> list[str]:
    """Every broken rule, with whose it is."""
    problems = [f"{one.name} for {one.target}: {fault}" for one in found for fault in one.faults]
    return problems + [
        f"no variant {name}, which has a cap" for name in rules.missing_caps([one.name for one in found])
    ]


if __name__ == "__main__":
    sys.exit(main())
