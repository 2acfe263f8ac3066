"""`kvxfer doctor --calibrate`: which copy engine suits the device here, asked in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvxfer import probe
from kvxfer.cli.output import size

_CALIBRATE = "from kvxfer.device.copy_bench import measure_here; answer(measure_here())"


def calibration(cuda: probe.Probe, timeout_s: float) -> probe.Probe:
    """What `device.copy_bench.measure_here` finds, or why it cannot; never waits for longer than that.

    Args:
        cuda: what `probe.cuda` answered: without a device nothing is tried.
    """
    if not cuda.ok:
        return probe.Probe(False, f"not measured without a CUDA device: {cuda.why}")
    answer = probe.ask(_CALIBRATE, timeout_s)
    if answer.said is None:
        return probe.Probe(False, answer.why)
    found = answer.said
    if not found["points"]:
        return probe.Probe(False, "; ".join([found["source"], *found["notes"]]), found)
    return probe.Probe(True, f"{found['source']}, {len(found['points'])} points on {found['device']}", found)


def lines(calibration: probe.Probe) -> Iterator[tuple[str, str]]:
    """For people: of each direction and fragment size, how many fragments go by which engine."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in calibration.found.get("points", ()):
        rows.setdefault((point["direction"], point["fragment_bytes"]), []).append(point)
    for (direction, fragment), points in rows.items():
        yield f"{direction}, {size(fragment)}", ", ".join(f"{one['fragments']:,}: {one['engine']}" for one in points)
    if file := calibration.found.get("file"):
        yield "kept in", str(file)
