"""What `kvxfer doctor` shows a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kvxfer.admission import dwpd_to_bytes_per_s
from kvxfer.cli.doctor_calibration import lines
from kvxfer.cli.output import clean, screen, size
from kvxfer.drive_wear import warnings

if TYPE_CHECKING:
    from kvxfer.cli.doctor_job import Directory, Memory, Report
    from kvxfer.drive_wear import DriveWear, Wear
    from kvxfer.drive_writes import DriveWrites
    from kvxfer.nvml import Gpu
    from kvxfer.topology import Drive

# What is not needed by this version may be missing.
WORKS, ABSENT, FAILS = ("ok", "green"), ("--", "yellow"), ("NO", "bold red")
NAMES = {"cuda": "CUDA", "cupy": "cupy", "gds": "GPUDirect Storage", "nvml": "NVML", "io_uring": "io_uring"}


def show(report: Report, console: Console | None = None) -> None:
    """Prints the report; `console`: where to, None: standard output."""
    console = console or screen()
    _heading(console, "Versions")
    for name, version in report.versions.items():
        _line(console, WORKS if version else ABSENT, name, version or "not installed")
    _heading(console, "Machine")
    library = report.machine.library
    _line(console, WORKS if library.ok else FAILS, "libkvx", f"{library.why} ({library.found['path']})")
    for field, name in NAMES.items():
        found = getattr(report.machine, field)
        _line(console, WORKS if found.ok else ABSENT, name, found.why)
        if field == "nvml":
            for gpu in report.gpus.gpus:
                _show_gpu(console, gpu)
            if report.gpus.why and found.ok:
                _more(console, report.gpus.why)
    for name, limit in report.limits.items():
        _line(console, WORKS, f"limit of {name.replace('_', ' ')}", "none" if limit is None else f"{limit:,}")
    _show_memory(console, report.memory)
    _heading(console, "Directories")
    for place in report.directories:
        _show_directory(console, place)
    if report.calibration is not None:
        _heading(console, "Copy engines")
        _line(console, WORKS if report.calibration.ok else FAILS, "calibration", report.calibration.why)
        for name, text in lines(report.calibration):
            _line(console, WORKS, name, text)
        for note in report.calibration.found.get("notes", ()):
            _more(console, note)
    console.print()
    for problem in report.problems:
        console.print(Text(f"Does not work: {clean(problem)}", style="bold red"))
    if report.ok:
        console.print("All that this version needs works. No GPU is needed: host memory is moved without one.")


def _show_memory(console: Console, memory: Memory) -> None:
    _heading(console, "What the configuration takes")
    if memory.slot_bytes is None or memory.staging_bytes_per_thread is None or memory.staging_bytes is None:
        _line(console, ABSENT, "staging", "--preset or --chunk-bytes says how large a chunk is")
    else:
        each = size(memory.staging_bytes_per_thread)
        text = f"{each} a thread, at most {size(memory.staging_bytes)}: slots of {size(memory.slot_bytes)}, "
        _line(console, WORKS, "staging", f"{text}{memory.io_threads} threads and those that replace lost ones")
    _line(console, WORKS, "index, mapped", f"at most {size(memory.index_map_bytes)}")
    allowed = "no limit" if memory.descriptors_allowed is None else f"{memory.descriptors_allowed:,} allowed"
    slabs = f"slabs of {size(memory.slab_bytes)} in {size(memory.capacity_bytes)}"
    state = FAILS if memory.problem else WORKS
    _line(console, state, "open files", f"{memory.descriptors:,} of {allowed}: {slabs}")


def _show_gpu(console: Console, gpu: Gpu) -> None:
    """What NVML tells of one; what it does not tell follows with its reason."""

    def room(free: int | None, total: int | None) -> str:
        return "" if free is None or total is None else f"{size(free)} of {size(total)} free"

    _more(console, f"GPU {gpu.index}: {gpu.name or 'no name'} {gpu.uuid or ''}".rstrip())
    link = "" if gpu.link is None else f"{gpu.link}, the card can do {gpu.link_card or gpu.link_max or 'unknown'}"
    rates = ((gpu.rx, "in"), (gpu.tx, "out"))
    traffic = ", ".join(f"{rate / 1e9:.2f} GB/s {way}" for rate, way in rates if rate is not None)
    for name, text in (
        ("memory", room(gpu.memory_free, gpu.memory_total)),
        ("BAR1", room(gpu.bar1_free, gpu.bar1_total)),
        ("link", "; ".join(part for part in (link, traffic, gpu.link_why) if part)),
        ("NUMA node", "" if gpu.numa_node is None else str(gpu.numa_node)),
    ):
        if text:
            _more(console, f"  {name}: {text}")
    for name, why in gpu.missing.items():
        _more(console, f"  {name} unknown: {why}")


def _drive(drive: Drive) -> str:
    if not drive.disks:
        return drive.why
    parts = [f"drive {', '.join(drive.disks)}"]
    parts += [] if drive.numa_node is None else [f"NUMA node {drive.numa_node}"]
    if drive.link_bytes_per_s is not None:
        parts.append(f"{', '.join(map(str, drive.links))}: {drive.link_bytes_per_s / 1e9:.1f} GB/s at most")
    return ", ".join(parts) + (f" ({drive.why})" if drive.why else "")


def _writes(writes: DriveWrites) -> list[str]:
    """A line for each drive: what it has taken, and what a budget of a drive-write-per-day would be."""
    lines = [
        f"{disk}: {size(nbytes)}, write_dwpd=1 is {dwpd_to_bytes_per_s(1, nbytes) / 1e6:.1f} MB/s"
        for disk, nbytes in writes.sizes.items()
    ]
    lines += [
        f"{disk}: the kernel wrote {size(nbytes)} to it since the system started, for everybody"
        for disk, nbytes in writes.written.items()
    ]
    return lines if lines else [f"no bytes written are known, nor a size for write_dwpd: {writes.why}"]


def _wear(wear: Wear) -> list[str]:
    """A line for each drive, and one for all."""
    lines = [f"{drive.controller}: {_wear_of(drive)}" for drive in wear.drives]
    if len(wear.drives) > 1 and wear.amplification is not None:
        lines.append(f"together: amplification {wear.amplification:.2f} since they were made")
    return lines + ([f"wear is not known: {wear.why}"] if wear.why else [])


def _wear_of(drive: DriveWear) -> str:
    if drive.host_written_bytes is None:
        return f"wear is not known: {drive.why}"
    said = f"{drive.percentage_used} % of its rated life is used, {drive.available_spare} % of its spare is left"
    said += f" (least {drive.spare_threshold} %), {drive.media_errors:,} media errors; hosts wrote "
    said += f"{size(drive.host_written_bytes)} to it since it was made"
    if drive.media_written_bytes is not None:
        said += f", and it {size(drive.media_written_bytes)} inside"
    if drive.amplification is not None:
        said += f": amplification {drive.amplification:.2f}"
    warned = warnings(drive.critical_warning or 0)
    return "; ".join([said, *(f"IT WARNS: {text}" for text in warned), *([drive.why] if drive.why else [])])


def _show_directory(console: Console, place: Directory) -> None:
    kind = place.filesystem + (", a network's" if place.network else "")
    _line(console, FAILS if place.problem else WORKS, clean(place.path), place.problem or f"{place.io_mode} on {kind}")
    if place.why:
        _more(console, place.why)
    if place.uring is not None:
        said = 'io_uring works, where io="uring" asks for it' if place.uring else "io_uring does not work"
        _more(console, said + (f": {place.uring_why}" if place.uring_why else ""))
    if place.tried and place.tried != place.path and not place.problem:
        _more(console, f"tried in {place.tried}")
    if place.rung is not None:
        why = "; ".join(step["why"] for step in place.rung["steps"])
        _more(console, f"a device's memory goes by {place.rung['rung']}" + (f": {why}" if why else ""))
        if unregistered := place.rung["settings"].get("unregistered_why"):
            _more(console, f"its memory is not registered with the drive: {'; '.join(unregistered)}")
    if place.free_bytes is not None:
        inodes = "any number of" if place.free_inodes is None else f"{place.free_inodes:,}"
        _more(console, f"{size(place.free_bytes)} and {inodes} inodes free")
    if place.drive is not None:
        _more(console, _drive(place.drive))
    if place.writes is not None:
        for line in _writes(place.writes):
            _more(console, line)
    if place.wear is not None:
        for line in _wear(place.wear):
            _more(console, line)
    if place.root is not None:
        said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in place.root.items())
        _more(console, f"a kvxfer root: {said}")


def _heading(console: Console, text: str) -> None:
    console.print(Text(f"{text}", style="bold"))


def _line(console: Console, state: tuple[str, str], name: str, text: str) -> None:
    line = Text("  ")
    line.append(state[0], style=state[1])
    line.append(f"  {name:<24} {clean(text)}")
    console.print(line)


def _more(console: Console, text: str) -> None:
    console.print(Text(f"      {'':<24} {clean(text)}"))
