"""Libraries of C that tests put in front of the C library."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def compiled(name: str, place: Path) -> Path:
    """tests/native/preload_<name>.c as a library in `place`, for LD_PRELOAD."""
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "cc")
    library = place / f"preload_{name}.so"
    source = Path(__file__).with_name(f"preload_{name}.c")
    subprocess.run([*compiler.split(), "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def preloaded(library: Path) -> dict[str, str]:
    """LD_PRELOAD with this library behind those that are in it already (a sanitizer's)."""
    return {"LD_PRELOAD": " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))}
