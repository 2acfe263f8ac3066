"""What must hold of every variant on every target."""

from __future__ import annotations

from collections.abc import Sequence

from bench.kernels.code import Compiled

__all__ = ["INSTRUCTION_CAPS", "REGISTER_CAPS", "TARGETS", "faults", "missing_caps"]

# 128 registers leave room for four programs of four warps on a multiprocessor; on gfx942 for four waves on a SIMD.
REGISTER_CAPS = {"sm_80": 128, "sm_90": 128, "sm_100": 128, "gfx942": 128}
TARGETS = tuple(REGISTER_CAPS)
# Loop instructions for 16 bytes, on sm_90 alone: compilers count differently. With the sum, 45 is what is promised.
INSTRUCTION_CAPS = {
    "planes-nhd-256-gather": 30.0,
    "planes-nhd-256-gather+sum": 45.0,
    "planes-nhd-256-scatter": 30.0,
    "planes-nhd-256-scatter+sum": 45.0,
    "rows-16-gather": 30.0,
    "rows-16-scatter": 30.0,
}
WIDEST = 16


def faults(one: Compiled) -> tuple[str, ...]:
    """What is wrong with it.

    Stores are of pages, rows and staging alone, so all must be of the full width. Loads are of tables too, so there
    must be as many full ones as the data takes; a side whose loads are narrow has narrow stores where the other way is
    compiled.
    """
    code, found = one.code, []
    if code.spills or code.local_bytes:
        found.append(f"{code.spills} spills and {code.local_bytes} bytes of local memory")
    if code.registers > (cap := REGISTER_CAPS[one.target]):
        found.append(f"{code.registers} registers, over {cap}")
    if narrow := {width: count for width, count in code.stores.items() if width not in (one.width, WIDEST)}:
        found.append(f"stores of {narrow} (bytes: count), where {one.width} divides everything")
    stores, loads = code.stores.get(one.width, 0), code.loads.get(one.width, 0)
    if code.loop and (one.per_turn < 1 or stores % one.per_turn):
        found.append(f"{stores} stores of {one.width} bytes in the loop, want a multiple of {one.per_turn:g}")
    if code.loop and loads < max(stores, one.per_turn):
        found.append(f"{loads} loads of {one.width} bytes in the loop, want {max(stores, one.per_turn):g}")
    if not stores and not loads:
        found.append(f"no access of {one.width} bytes")
    cap_16 = INSTRUCTION_CAPS.get(one.name) if one.target == "sm_90" else None
    if cap_16 is not None and (one.per_16_bytes is None or one.per_16_bytes > cap_16):
        found.append(f"{one.per_16_bytes} instructions for 16 bytes, over {cap_16:g}")
    if cap_16 is not None and code.calls:
        found.append(f"{code.calls} calls in the loop, whose instructions are not among those for 16 bytes")
    return tuple(found)


def missing_caps(names: Sequence[str]) -> list[str]:
    """Variants that have a cap, and are not there: a cap on nothing holds nothing."""
    return sorted(INSTRUCTION_CAPS.keys() - set(names))
