"""LMDB environments that a fork's parent has open: this process neither touches them nor counts on closing them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

_INHERITED: list[Any] = []


def leave_alone(env: Any) -> None:
    """In the child of a fork: closing waits for calls that other threads of the parent were in, and would never end."""
    _INHERITED.append(env)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))  # nor is it closed at the interpreter's end


def close_inherited() -> None:
    """LMDB opens a file once in a process: closes them, in a thread that is left behind where that never ends."""
    while _INHERITED:
        closing = threading.Thread(target=_INHERITED.pop().close, name="kvxfer-inherited", daemon=True)
        closing.start()
        closing.join(1.0)
