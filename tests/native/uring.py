"""Whether io_uring works here, asked of the library itself."""

from __future__ import annotations

import ctypes as C
import os
from functools import cache
from pathlib import Path

import pytest

from kvxfer import _native

UNIT = 4096


def try_uring(path: Path, nbytes: int = 4 * UNIT, *, direct: bool = False) -> tuple[int, str]:
    """What kvx_uring_try answers for a new file, and why."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    os.ftruncate(descriptor, max(nbytes, UNIT))
    file = _native.lib().kvx_file_adopt(descriptor, b"try", int(direct))
    why = C.create_string_buffer(_native.WHY_BYTES)
    try:
        return int(_native.lib().kvx_uring_try(file, nbytes, why)), why.value.decode()
    finally:
        _native.lib().kvx_file_release(file)
        path.unlink()


@cache
def _works(folder: Path) -> tuple[int, str]:
    return try_uring(folder / "uring-works")


def needs_uring(folder: Path) -> None:
    """Skips a test where io_uring does not work."""
    answer, why = _works(folder)
    if answer:
        pytest.skip(f"io_uring does not work here: {why}")
