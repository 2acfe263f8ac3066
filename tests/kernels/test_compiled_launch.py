"""Launches as they are where kernels are compiled, up to the launch itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {
    "move_planes": "planes-nhd-256-gather+sum",
    "move_tiles": "tiles-16-gather+sum",
    "sum_segments": "sum-16",
    "clear_sums": "clear",
}


def test_what_is_launched_is_compiled_once_and_as_the_variants_say(tmp_path: Path) -> None:
    """Triton takes the arguments, whatever their values it needs no second binary, and accesses are 16 bytes wide."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.kernels.compiled_child"],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    launches = said["launches"]
    assert [each["kernel"] for each in launches] == [
        *["clear_sums", "move_planes", "clear_sums", "sum_segments"] * 3,
        *["clear_sums", "move_tiles", "clear_sums", "sum_segments"] * 3,
    ]
    assert len({(each["kernel"], each["binary"]) for each in launches}) == 4
    for each in launches:
        assert each["signature"] == said["variants"][VARIANTS[each["kernel"]]]
        assert each["wide"] or each["kernel"] == "clear_sums"
