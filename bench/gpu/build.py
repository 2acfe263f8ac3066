"""Builds csrc and csrc/cuda where they are, and runs the tests that need a GPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.sections import Work
from bench.gpu.settings import Settings

__all__ = ["build", "gpu_test_files", "portable_ini", "tests"]

NOT_EVERYWHERE = {"timeout": "pytest_timeout"}  # option of pytest: the plugin that it is of


def build(work: Work) -> None:
    """`setup.py build_ext --inplace`; fails without libkvx, and says why there is no libkvx_cuda."""
    root: Path = work.common.settings.root
    code, said = call(work, root, "setup.py", "-q", "build_ext", "--inplace")
    built = {name: (root / "kvxfer" / f"{name}.so").is_file() for name in ("libkvx", "libkvx_cuda")}
    if code or not built["libkvx"]:
        work.fail(f"setup.py: exit status {code}: {said[-600:]}")
    work.add("build", "setup.py", more={**{name: str(there) for name, there in built.items()}, "said": said[-600:]})


def tests(work: Work) -> None:
    """pytest over the files that have tests marked gpu or gds."""
    settings: Settings = work.common.settings
    files = gpu_test_files(settings.root)
    with tempfile.TemporaryDirectory() as folder:
        ini = Path(folder) / "pytest.ini"
        ini.write_text(portable_ini((settings.root / "pyproject.toml").read_text(), settings.root))
        code, said = call(
            work, settings.root, "-m", "pytest", "-c", str(ini), "--rootdir", str(settings.root), "-q", "-rs",
            "-p", "no:cacheprovider", "-m", "gpu or gds", *files,
        )  # fmt: skip
    last = next((line for line in reversed(said.splitlines()) if re.search(r"\d+ (passed|failed|error)", line)), "")
    if code:
        work.fail(f"pytest: exit status {code}: {last or said[-600:]}")
    work.add("gpu tests", "pytest", more={"result": last, "files": len(files), "said": said[-4000:] if code else ""})


def gpu_test_files(root: Path) -> list[str]:
    """Those with tests marked gpu or gds, or cases of the compiled kernels; others may import what is not here."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(root))
        for path in files
        if re.search(r"mark\.(gpu|gds)\b|\bwith_kernels\b", path.read_text())
    ]


def portable_ini(pyproject: str, root: Path) -> str:
    """pyproject's options of pytest without those of plugins that are not installed, nor the least version."""
    options = tomllib.loads(pyproject)["tool"]["pytest"]["ini_options"]
    lines = ["[pytest]"]
    for name, value in options.items():
        if name == "minversion" or (name in NOT_EVERYWHERE and find_spec(NOT_EVERYWHERE[name]) is None):
            continue
        if name == "pythonpath":
            value = [str(root / part) for part in value]
        lines.append(f"{name} =" if isinstance(value, list) else f"{name} = {value}")
        if isinstance(value, list):
            lines += [f"    {part}" for part in value]
    return "\n".join(lines) + "\n"


def call(work: Work, root: Path, *arguments: str) -> tuple[int, str]:
    """Runs Python in the checkout within the section's time: (exit status, what it printed); -9: it was ended."""
    child = subprocess.Popen(
        [sys.executable, *arguments], cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        env=os.environ | {"PYTHONPATH": _paths(root), "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    try:
        said, _ = child.communicate(timeout=max(work.left, 1.0))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        return -9, f"{said}\nended after the section's time"
    return child.returncode, said


def _paths(root: Path) -> str:
    kept: Sequence[str] = [path for path in sys.path if path and Path(path) != root]
    return os.pathsep.join([str(root), *kept])
