"""A clock that is told the time, and bytes compared."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


class ManualClock:
    """A clock that stands still until it is told: `clock()` gives seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"seconds={seconds} must not be negative")
        self.now += seconds


def assert_bytes_equal(got: ArrayLike, want: ArrayLike, what: str = "bytes") -> None:
    """Fails naming the first byte that differs, and how many do.

    Args:
        got, want: arrays of any dtype and the same shape; compared bit for bit (NaN equals itself).
    """
    left, right = np.asarray(got), np.asarray(want)
    assert left.shape == right.shape and left.itemsize == right.itemsize, (
        f"{what}: {left.dtype} {left.shape} against {right.dtype} {right.shape}"
    )
    a = np.ascontiguousarray(left).reshape(-1).view(np.uint8)
    b = np.ascontiguousarray(right).reshape(-1).view(np.uint8)
    wrong = np.flatnonzero(a != b)
    if len(wrong):
        element = int(wrong[0]) // max(1, left.itemsize)
        place = np.unravel_index(element, left.shape) if left.ndim else ()
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(a)} bytes differ, first at {tuple(int(i) for i in place)}: "
            f"{a[wrong[0]]:#04x}, want {b[wrong[0]]:#04x}"
        )
