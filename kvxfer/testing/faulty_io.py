"""Faults under a store's system calls, at the lowest place there is: the table in libkvx."""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass
from types import TracebackType

from kvxfer import _native


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault that was asked for."""

    index: int

    @property
    def hits(self) -> int:
        """Calls that it has hit so far."""
        return int(_native.lib().kvx_fault_hits(self.index))


class FaultyIO:
    """Makes chosen system calls of this process's stores fail. Leaving the `with` block ends all faults.

    Every method takes the call (`open`, `pread`, `pwrite`, `fallocate`, `ftruncate`, `fsync`, `rename`, ... see
    `kvxfer._native.OPS`), lets the first `after` matching calls pass and hits the next `times` (None: all). With
    `offset=(lo, hi)` only preads and pwrites that touch those bytes of their file match. What goes by io_uring is a
    pread or pwrite too, and besides it can be had at `uring_setup`, `uring_register`, `uring_submit` (a refusal to take
    requests; counts, like `short`'s, are requests) and `uring_complete` (what a request answers).

        with FaultyIO() as io:
            rule = io.fail("pwrite", errno.ENOSPC, after=3, times=1)
            ...
            assert rule.hits == 1
    """

    def __enter__(self) -> FaultyIO:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _native.lib().kvx_fault_clear()

    def fail(
        self,
        op: str,
        errno: int,
        *,
        after: int = 0,
        times: int | None = None,
        offset: tuple[int, int] | None = None,
    ) -> Rule:
        """The call does nothing and answers `errno`."""
        return self._add(op, "errno", errno, after, times, offset)

    def short(
        self,
        op: str,
        nbytes: int,
        *,
        after: int = 0,
        times: int | None = None,
        offset: tuple[int, int] | None = None,
    ) -> Rule:
        """The call moves at most `nbytes`; 0 reads as the end of the file."""
        return self._add(op, "short", nbytes, after, times, offset)

    def delay(
        self,
        op: str,
        seconds: float,
        *,
        after: int = 0,
        times: int | None = None,
        offset: tuple[int, int] | None = None,
    ) -> Rule:
        """The call is made after a pause."""
        return self._add(op, "delay", int(seconds * 1000), after, times, offset)

    def hang(self, op: str, *, after: int = 0, times: int | None = None, offset: tuple[int, int] | None = None) -> Rule:
        """The call does not return before `release()`, or the end of the `with` block."""
        return self._add(op, "hang", 0, after, times, offset)

    def flip(
        self,
        nbyte: int = 0,
        *,
        op: str = "pread",
        after: int = 0,
        times: int | None = None,
        offset: tuple[int, int] | None = None,
    ) -> Rule:
        """A pread (or `op` uring_complete) answers with bit 0 of byte `nbyte` of what it moved inverted."""
        return self._add(op, "flip", nbyte, after, times, offset)

    def kill(
        self,
        op: str,
        *,
        before: bool = False,
        nbytes: int = 0,
        after: int = 0,
        offset: tuple[int, int] | None = None,
    ) -> Rule:
        """SIGKILL for this process instead of the call, or after it (and after at most `nbytes` of it, if given)."""
        return self._add(op, "kill_before" if before else "kill_after", nbytes, after, 1, offset)

    def release(self) -> None:
        """Let every hanging call go on."""
        _native.lib().kvx_fault_release()

    @staticmethod
    def calls(op: str) -> int:
        """Calls of `op` since the process started."""
        return int(_native.lib().kvx_op_calls(_native.OPS.index(op)))

    @staticmethod
    def _add(op: str, action: str, arg: int, after: int, times: int | None, offset: tuple[int, int] | None) -> Rule:
        if op not in _native.OPS:
            raise ValueError(f"op={op!r} must be one of {_native.OPS}")
        low, high = offset or (0, _native.UINT64_MAX)
        fault = _native.Fault(_native.OPS.index(op), _native.FAULT_ACTIONS[action], arg, after, times or 0, low, high)
        index = int(_native.lib().kvx_fault_add(C.byref(fault)))
        if index < 0:
            raise OSError(-index, "kvx_fault_add")
        return Rule(index)
