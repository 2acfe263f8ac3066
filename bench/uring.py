"""io_uring's rows: the engine by rings beside the engine by blocking calls, on the same checked bytes, and what
fio's own io_uring does with as many bytes, jobs and requests, where fio is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

from bench.engine import EngineRun, Shape, room_needed, shapes, temporary_folder
from bench.options import Options
from bench.table import Impl, Row, Table, figure, measure
from kvxfer._native import MAX_DEPTH
from kvxfer.config import EngineConfig
from kvxfer.io.modes import filesystem_type, probe_mode
from kvxfer.io.uring import try_uring

__all__ = ["run"]

FIO_TIMEOUT_S = 120.0
WAYS = ("posix", "uring")


def run(table: Table, options: Options) -> None:
    """Adds the rows: for every directory, every shape, both ways, and fio's."""
    for place in options.dirs:
        kind = filesystem_type(place)
        if (free := shutil.disk_usage(place).free) < (need := 2 * room_needed(options)):
            table.note(f"io_uring on {kind}: left out, {free >> 20} MiB are free and {need >> 20} are needed")
            continue
        with temporary_folder(place) as folder:
            mode = probe_mode(folder)
            works, why = try_uring(folder, mode)
            if not works:
                table.note(f"io_uring on {kind} at {place}: left out, it does not work: {why}")
                continue
            table.note(
                f"io_uring on {kind} at {place}, {'direct' if mode.direct else 'buffered'}"
                + (f", {why}" if why else "")
                + f"; {options.engine_bytes >> 20} MiB a run, {options.io_threads} I/O threads"
            )
            for number, shape in enumerate(shapes(options)):
                case = folder / str(number)
                case.mkdir()
                measure_shape(table, options, shape, case, kind)
                shutil.rmtree(case)
            for row in fio_rows(table, options, folder, kind, mode.direct):
                table.add([row])


def measure_shape(table: Table, options: Options, shape: Shape, folder: Path, where: str) -> None:
    """Adds the rows of one shape in one directory."""
    config = EngineConfig(io_threads=options.io_threads, **options.engine)
    num_chunks = max(2, options.engine_bytes // shape.slot.payload_bytes)
    timing = {"nbytes": num_chunks * shape.slot.payload_bytes, "runs": options.runs}
    with ExitStack() as stack:
        runs = {way: EngineRun(stack, folder / way, shape, num_chunks, config, io=way) for way in WAYS}
        stores = [Impl(name=way, run=each.store_all, check=each.check_store) for way, each in runs.items()]
        table.add(measure(f"store {shape.name}, {where}", stores, **timing, budget_s=options.budget_s))
        loads = [
            Impl(name=way, run=each.load_all, poison=each.pool.poison, check=each.pool.check, always_check=True)
            for way, each in runs.items()
        ]
        table.add(measure(f"load {shape.name}, {where}", loads, **timing, budget_s=options.budget_s))


def fio_rows(table: Table, options: Options, folder: Path, where: str, direct: bool) -> list[Row]:
    """What fio reaches: in jobs like the engine's threads, in requests as large as its reads, its bytes unchecked."""
    if (fio := shutil.which("fio")) is None:
        table.note(f"fio, {where}: left out, it is not installed")
        return []
    piece = EngineConfig(**options.engine).read_piece_bytes
    each = max(piece, options.engine_bytes // options.io_threads // piece * piece)
    rows = []
    for trip, rw in (("store", "write"), ("load", "read")):
        command = [
            fio, "--name=kvxfer", f"--directory={folder}", f"--rw={rw}", f"--bs={piece}", f"--size={each}",
            f"--numjobs={options.io_threads}", f"--iodepth={MAX_DEPTH}", "--ioengine=io_uring",
            f"--direct={int(direct)}", "--loops=3", "--group_reporting", "--output-format=json",
        ]  # fmt: skip
        case = f"{trip} {piece >> 10} KiB requests, {where}"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_TIMEOUT_S)
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            rows.append(figure(case, "fio io_uring", job[rw]["bw_bytes"] / 1e9, "GB/s"))
        except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as exc:
            table.note(f"fio, {case}: no answer: {type(exc).__name__}: {exc}")
    return rows
