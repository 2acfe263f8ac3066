"""`python -m bench.gpu`: see README.md beside this file.

Exit status: 0; 1 where bytes were wrong, a test failed, or a section failed or hung; 2 where nothing could be run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.report import Report, file_name
from bench.gpu.sections import Plan, Work, run_all

__all__ = ["PLANS", "main"]

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 225.0  # of the sections together; the start and the last lines come on top

# (name, most seconds, module of bench.gpu, function), the most important first.
PLANS = (
    ("build", 60.0, "build", "build"),
    ("ceilings", 15.0, "ceilings", "run"),
    ("convert", 35.0, "convert", "run"),
    ("tests", 60.0, "build", "tests"),
    ("copies", 40.0, "copies", "run"),
    ("engine", 30.0, "engine", "run"),
    ("beside", 20.0, "beside", "run"),
    ("calibration", 5.0, "copies", "calibration"),
    ("storage", 20.0, "storage", "run"),
)


def parser() -> argparse.ArgumentParser:
    """The options."""
    out = argparse.ArgumentParser(prog="python -m bench.gpu", description="Builds, tests and measures on a GPU.")
    out.add_argument("--dir", type=Path, default=Path.cwd(), metavar="DIR", help="where the engine and GDS are tried")
    out.add_argument("--out", type=Path, default=ROOT / "bench" / "results", metavar="DIR", help="where the JSON goes")
    out.add_argument("--wheels", type=Path, metavar="DIR", help="install every wheel there first, aside, for this run")
    out.add_argument("--only", nargs="+", choices=[plan[0] for plan in PLANS], help="these sections")
    out.add_argument("--seconds", type=float, default=TOTAL_S, metavar="S", help="of all sections together")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvxfer-wheels-") as folder:
        if args.wheels is not None and (why := install(args.wheels, Path(folder))):
            return _nothing(why)
        from kvxfer import probe

        device = probe.cuda()
        if not device.ok:
            return _nothing(f"no CUDA device: {device.why}")
        facts = machine_facts(str(device.found["devices"][0]), device.why)
        path = args.out / file_name(facts["device"], facts["date"][:10], lambda name: (args.out / name).exists())
        report = Report(facts, path)
        plans = [plan_of(*plan) for plan in PLANS if not args.only or plan[0] in args.only]
        # What is measured needs libkvx, which the first section builds: modules are imported section by section.
        run_all(plans, report, total_s=args.seconds, settings=_settings(args.dir))
        return report.exit_status


def plan_of(name: str, limit_s: float, module: str, function: str) -> Plan:
    """A section whose module is imported when its turn comes."""

    def run(work: Work) -> None:
        getattr(importlib.import_module(f"bench.gpu.{module}"), function)(work)

    return Plan(name, limit_s, run)


def _settings(directory: Path) -> Any:
    from bench.gpu.settings import Settings

    return Settings(root=ROOT, directory=directory)


def install(wheels: Path, target: Path) -> str:
    """Installs every wheel of a folder into another one that imports look into; why it could not."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return f"no wheels in {wheels}"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if done.returncode:
        return f"pip: {done.stderr.strip()[-600:]}"
    sys.path.insert(1, str(target))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH", "")]))
    return ""


def machine_facts(name: str, found: str) -> dict[str, str]:
    """What a number means nothing without."""
    from kvxfer import probe

    versions = {key: value for key, value in probe.versions().items() if value}
    return {
        "device": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cuda": found,
        "versions": ", ".join(f"{key} {value}" for key, value in versions.items()),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    }


def _nothing(why: str) -> int:
    print(f"bench.gpu: {why}", file=sys.stderr)
    return 2


def leave(status: int, flush: Callable[[], object] = sys.stdout.flush) -> None:
    """Ends the process though a thread may hang in a driver."""
    flush()
    os._exit(status)


if __name__ == "__main__":
    start = time.monotonic()
    code = main()
    print(f"{time.monotonic() - start:.0f} s in all", flush=True)
    leave(code)
