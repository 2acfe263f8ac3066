"""docs/kernels.md: the table of what the compilers made, and whether the page has the variants that there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench.kernels.code import Compiled, UnreadableError
from bench.kernels.rules import INSTRUCTION_CAPS, REGISTER_CAPS, TARGETS

__all__ = ["PAGE", "stale", "table", "text"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"

_INTRODUCTION = f"""# Kernels, as compiled

What Triton's compiler makes of every kernel variant for {", ".join(TARGETS)}. Written by
`make kernels ARGS=--write` and checked by `make kernels`, with no device: this says that widths, registers, spills and
instructions are as wanted, not that a device runs it, nor how fast. (For that see [gpu.md](gpu.md).)

What must hold of every variant, or `make kernels` fails:

- stores of pages, rows and staging have the full width: 16 bytes wherever addresses, strides and fragments share that
  factor, else as many bytes as they do share (`rows-8` to `rows-1` move by 16 what can be, beside cells that cannot);
  so have the loads of them;
- nothing is spilled, and no local memory is used;
- at most {max(REGISTER_CAPS.values())} registers a thread;
- on sm_90, loop instructions for 16 bytes that a thread moves are at most:
  {", ".join(f"{cap:g} of `{name}`" for name, cap in INSTRUCTION_CAPS.items())}.

A name is the kernel, the case, and the way. `planes` and `tiles` are of canonical slots (`kvx1`; the first where all
fragments are alike), `rows` of vLLM's host rows, `sum` is the checksum alone; `+sum` has it in the same pass. Figures
vary with the compiler's version; what this page must have in common with the code is the variants' names.
"""
_LEGEND = """For each target: registers, loop instructions for 16 bytes (`+`: and those of a routine that is called).
Loads and stores: those of the loop on sm_90, count×bytes, tables included. Spilled: bytes, all targets together."""


def table(found: Sequence[Compiled]) -> str:
    """A line for each variant: for each target registers and loop instructions for 16 bytes; sm_90's accesses."""
    by_name: dict[str, dict[str, Compiled]] = {}
    for one in found:
        by_name.setdefault(one.name, {})[one.target] = one
    titles = ["variant", "bytes", *TARGETS, "loads", "stores", "spilled"]
    lines = ["| " + " | ".join(titles) + " |", "| --- | --: |" + " --: |" * len(TARGETS) + " --- | --- | --: |"]
    for name, each in by_name.items():
        first = each.get("sm_90") or next(iter(each.values()))
        spilled = sum(one.code.local_bytes or one.code.spills for one in each.values())
        cells = [f"`{name}`", str(first.width), *(_figures(each.get(target)) for target in TARGETS)]
        cells += [_widths(first.code.loads), _widths(first.code.stores), str(spilled)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _figures(one: Compiled | None) -> str:
    if one is None:
        return ""
    per_16 = "" if one.per_16_bytes is None else f", {one.per_16_bytes:.1f}"
    return f"{one.code.registers}{per_16}{'+' if one.code.calls else ''}"


def _widths(counts: dict[int, int]) -> str:
    return " ".join(f"{count}×{width}" for width, count in sorted(counts.items(), reverse=True)) or "none"


def text(found: Sequence[Compiled]) -> str:
    """The page."""
    (version,) = {one.triton for one in found}
    return f"{_INTRODUCTION}\n## Triton {version}\n\n{_LEGEND}\n\n{table(found)}\n"


def stale(found: Sequence[Compiled]) -> str:
    """Why the page must be written anew; empty: its variants are those that there are.

    Raises:
        UnreadableError: the page has no table.
    """
    if not PAGE.exists():
        return f"{PAGE.name} is not there"
    named = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    if not named:
        raise UnreadableError(f"no variant in {PAGE}")
    there = {one.name for one in found}
    if there == set(named):
        return ""
    return f"{PAGE.name} lacks {sorted(there - set(named))} and has {sorted(set(named) - there)}, which are not there"
