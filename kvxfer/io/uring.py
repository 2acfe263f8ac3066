"""Whether an engine's jobs go by io_uring in a directory: found out by trying, with the reason where they do not."""

from __future__ import annotations

import ctypes as C
import os
import secrets
import threading
from dataclasses import replace
from pathlib import Path

from kvxfer import _native
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.io.modes import PROBE_TIMEOUT_S, IOMode
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import TEMPORARY, sys_close, sys_fallocate, sys_open, sys_unlink
from kvxfer.report import engine_reporter

__all__ = ["choose_backend", "try_uring"]

_PARTS = 4  # requests of the test, of a page each


def choose_backend(mode: IOMode, directory: Path, io: str, timeout_s: float = PROBE_TIMEOUT_S) -> IOMode:
    """The mode with its backend, and why that one. What is missing is said in the log, too: once for a directory.

    Args:
        mode: how files of the directory are opened.
        io: posix, uring (it must work) or auto.

    Raises:
        ConfigError: io is uring, which does not work here; says why.
    """
    if io != "uring":
        return mode  # auto is posix, which is at least as fast: docs/adr/0010 has what was measured
    works, why = try_uring(directory, mode, timeout_s)
    if not works:
        raise ConfigError(f"io='uring', but io_uring does not work in {directory}: {why}; use auto or posix")
    said = "io_uring works" + (f", but {why}" if why else "")
    if why:
        _say(directory, said)
    return replace(mode, backend="uring", why=f"{mode.why}; {said}")


def try_uring(directory: Path, mode: IOMode, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[bool, str]:
    """Writes a file of the directory by a ring, reads it back both ways and compares.

    Returns:
        Whether it works, and why not; or what is missing of it, such as registered buffers.
    """
    answer: list[tuple[bool, str]] = []

    def attempt() -> None:
        try:
            answer.append(_try(directory, mode))
        except (KvxferError, OSError) as exc:
            answer.append((False, str(exc)))

    thread = threading.Thread(target=attempt, name="kvx-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)  # it is left behind if it does not come back
    return answer[0] if answer else (False, f"no answer within {timeout_s:g} s")


def _try(directory: Path, mode: IOMode) -> tuple[bool, str]:
    path = directory / f".kvx-probe-{secrets.token_hex(8)}{TEMPORARY}"
    fd = sys_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if mode.direct else 0))
    try:
        sys_unlink(path)  # nothing is left behind, however this ends
        sys_fallocate(fd, _PARTS * mode.alignment, path)
    except BaseException:
        sys_close(fd)
        raise
    why = C.create_string_buffer(_native.WHY_BYTES)
    with PosixFile(fd, path.name, mode.direct) as file:
        failed = int(_native.lib().kvx_uring_try(file.handle, _PARTS * mode.alignment, why))
    text = why.value.decode(errors="replace")
    return not failed, text or (os.strerror(-failed) if failed else "")


_said: set[str] = set()
_saying = threading.Lock()


def _say(directory: Path, said: str) -> None:
    place = f"{directory.absolute()}: {said}"
    with _saying:
        if place in _said:
            return
        _said.add(place)
    engine_reporter.warn(f"io_uring {directory}", f"{directory}: {said}", path=str(directory))
