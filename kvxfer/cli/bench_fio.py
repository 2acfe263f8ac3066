"""fio beside the bench: the same sizes, on files of its own in the same directory. Its bytes are not checked."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kvxfer.cli.bench_content import PAGE
from kvxfer.cli.bench_files import PREFIX, check_room
from kvxfer.cli.bench_plan import Plan
from kvxfer.errors import ConfigError

_LAYING_S = 600.0  # that fio may take to make its files, beyond the run


def find(plan: Plan) -> str | None:
    """Where fio is; None where the plan wants none.

    Raises:
        ConfigError: it is wanted, and not installed.
    """
    if plan.peer is None:
        return None
    if (path := shutil.which("fio")) is None:
        raise ConfigError("--peer fio: fio is not installed")
    return path


def run(fio: str, plan: Plan, mode: str, directory: Path, size: int) -> dict[str, Any]:
    """One size.

    Returns:
        `size`, `engine`, `parts` (each with `operation`, `gbps`, `iops`, `latency_us`), `why`: why there are none.

    Raises:
        ConfigError: there is no room for its files.
    """
    check_room(directory, plan.span_bytes)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}fio-", dir=directory))
    try:
        engine, arguments = _arguments(plan, mode, size)
        try:
            done = subprocess.run(
                [fio, *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=plan.duration_s + _LAYING_S,
            )  # fmt: skip
            parts = _parts(done.stdout) if done.returncode == 0 else []
            why = "" if parts else f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}"
        except (OSError, ValueError, KeyError, IndexError, TypeError, subprocess.TimeoutExpired) as exc:
            parts, why = [], f"{type(exc).__name__}: {exc}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"size": size, "engine": engine, "parts": parts, "why": why}


def _arguments(plan: Plan, mode: str, size: int) -> tuple[str, list[str]]:
    """In the folder where it is started, for fio splits names at colons.

    libaio with as many jobs and as deep where it does not block (direct), else a job for each request in flight.
    """
    direct = mode != "buffered"
    jobs, depth = (plan.threads, plan.depth) if direct else (plan.lanes, 1)
    engine = "libaio" if direct else "psync"
    kind = {"read": "read", "write": "write", "mixed": "rw"}[plan.operation]
    return f"{engine}, {jobs} x {depth}", [
        "--name=kvx", "--directory=.", f"--rw={'rand' if plan.layout == 'random' else ''}{kind}",
        f"--bs={size}", f"--size={max(plan.span_bytes // jobs // PAGE * PAGE, size)}", f"--numjobs={jobs}",
        f"--iodepth={depth}", f"--ioengine={engine}", f"--direct={int(direct)}", "--thread", "--time_based",
        f"--runtime={max(1, round(plan.duration_s * 1000))}ms", f"--rwmixread={plan.read_percent}", "--overwrite=1",
        "--invalidate=1", "--group_reporting", "--output-format=json",
    ]  # fmt: skip


def _parts(text: str) -> list[dict[str, Any]]:
    (job,) = json.loads(text[text.index("{") :])["jobs"]
    found = []
    for operation in ("read", "write"):
        said = job[operation]
        if not said["total_ios"]:
            continue
        percentile = said["clat_ns"]["percentile"]
        names = {"p50": "50.000000", "p90": "90.000000", "p99": "99.000000", "p99_9": "99.900000"}
        latency = {name: percentile[key] / 1e3 for name, key in names.items()} | {"max": said["clat_ns"]["max"] / 1e3}
        found.append(
            {"operation": operation, "gbps": said["bw_bytes"] / 1e9, "iops": said["iops"], "latency_us": latency}
        )
    return found
