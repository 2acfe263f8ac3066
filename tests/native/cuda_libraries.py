"""libkvx_cuda for tests: over a runtime that is a double (anywhere), and the real one (where it was built)."""

from __future__ import annotations

import atexit
import ctypes as C
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from kvxfer import _cuda

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "cuda" / "cuda_batch.cu"
DOUBLE = Path(__file__).with_name("fake_cudart")


class FakeRuntime:
    """csrc/cuda compiled as host C++ over the double: `cuda` has its calls, and the rest says what they do."""

    def __init__(self, folder: Path, version: int = 13000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"libkvx_cuda-{version}.so"
        compiler = shutil.which("g++") or "c++"
        command = [
            compiler, "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared",
            f"-DCUDART_VERSION={version}", f"-I{DOUBLE}", "-x", "c++", SOURCE, DOUBLE / "fake_cudart.cpp",
            "-o", self.path,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        self.cuda = _cuda.load(self.path)
        self._dll: Any = self.cuda._dll
        self._dll.fake_notes.restype = C.c_char_p

    def reset(self) -> None:
        """Forget faults, notes, registrations."""
        self._dll.fake_reset()

    def fail(self, call: str, error: int, after: int = 0) -> None:
        """One call answers `error`, after so many that pass."""
        self._dll.fake_fail(call.encode(), after, error)

    def shift(self, nbytes: int) -> None:
        """The device sees pinned memory so many bytes beside where the host does."""
        self._dll.fake_shift(C.c_uint64(nbytes))

    @property
    def notes(self) -> list[tuple[str, int, int]]:
        """The calls so far, with two of their arguments."""
        lines = [line.split() for line in self._dll.fake_notes().decode().splitlines()]
        return [(name, int(a), int(b)) for name, a, b in lines]

    @property
    def pinned(self) -> int:
        """Registrations that stand."""
        return int(self._dll.fake_pinned())

    @property
    def last_error(self) -> int:
        """What somebody else would find with cudaGetLastError."""
        return int(self._dll.fake_last_error())


@cache
def fake_runtime() -> FakeRuntime:
    """One for all tests of this process: `reset` before use."""
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-fake-cudart-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return FakeRuntime(folder)
