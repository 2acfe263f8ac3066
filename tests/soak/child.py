"""A campaign as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.native.shims import preloaded

CHECKOUT = Path(__file__).parents[2]
CAMPAIGN = "from tests.soak.campaign import main"


def run(shim: Path, *words: object, code: str = CAMPAIGN) -> tuple[int, str]:
    """A campaign in a process without threads; its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nsys.exit(main({[*map(str, words)]!r}))"], capture_output=True,
        text=True, check=False, cwd=CHECKOUT, timeout=3000, env=os.environ | preloaded(shim),
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def table(text: str, title: str) -> dict[str, int]:
    """A line of `op n, op n`."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(title + " ")]
    pairs = (pair.strip().rpartition(" ") for pair in line.strip().removeprefix(title).split(","))
    return {op: int(n) for op, _, n in pairs}
