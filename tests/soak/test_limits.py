"""What a kernel really refuses (EFBIG, EMFILE, ENOMEM, ENOSPC), and what an index that cannot be read does."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def play(scene: str, root: Path, *before: str) -> tuple[int, str]:
    """A scene of tests/soak/limits.py in a process of its own; its exit status, and what it said."""
    words = [sys.executable, "-m", "tests.soak.limits", scene, str(root)]
    done = subprocess.run([*before, *words], capture_output=True, text=True, check=False, cwd=CHECKOUT, timeout=600)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("scene", ["long_files", "descriptors_gone", "memory_gone"])
def test_what_the_kernel_refuses_costs_what_was_being_stored_and_nothing_else(scene: str, tmp_path: Path) -> None:
    status, text = play(scene, tmp_path / "root")
    assert status == 0, text


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Words before a command that give it a file system of 6 MiB at tmp_path."""
    mount = f'mount -t tmpfs -o size=6m none "{tmp_path}"'
    if shutil.which("unshare") is None:
        pytest.skip("no file system can be mounted: there is no unshare(1)")
    tried = subprocess.run([*NAMESPACE, mount], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no file system can be mounted: {tried.stderr.strip()}")
    return [*NAMESPACE, f'{mount} && exec "$@"', "sh"]


def test_a_file_system_that_is_full(small: list[str], tmp_path: Path) -> None:
    status, text = play("full_disk", tmp_path / "root", *small)
    assert status == 0, text
    assert "No space left on device" in text


def test_an_index_whose_pages_cannot_be_read_ends_the_process_and_costs_no_chunk(tmp_path: Path) -> None:
    """LMDB reads by a mapping: there is no errno for it, but a signal. docs/operations.md says so."""
    status, text = play("index_cut", tmp_path / "root")
    assert status == -signal.SIGBUS, text
    status, text = play("after_the_cut", tmp_path / "root")
    assert status == 0, text
