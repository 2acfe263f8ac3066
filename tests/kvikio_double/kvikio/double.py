"""What tests say to the double, and what it tells them. The real kvikio has nothing of this."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from typing import Any

# import: "broken" | "hangs"            version: what it says it is
# driver_open: a message | "hangs"       is_gds_available, max_device..: driver properties
# refuse_files: a message                register: a message, register_most: bytes that can be registered
# short: most bytes a request moves      hang: "raw_read" | "raw_write" | "CuFile" | "memory_register" never return
# hang_from: only requests at this offset of the file or beyond it hang
# fail: {call: message}                  flip: {call: n}: one byte of every nth request is wrong
faults: dict[str, Any] = json.loads(os.environ.get("KVIKIO_DOUBLE", "{}"))
if faults.pop("not_in", None) == os.getpid():
    faults.clear()
calls: list[tuple[Any, ...]] = []  # (name, ...) in the order they were made
registered: dict[int, int] = {}  # address -> bytes
here = threading.local()  # .context: what the test's Cuda made current in the thread
release = threading.Event()  # lets calls that hang go on
lock = threading.Lock()


def reset() -> None:
    """As after an import without faults."""
    from kvikio import defaults

    release.set()  # those of the test before
    with lock:
        faults.clear()
        calls.clear()
        registered.clear()
    globals()["release"] = threading.Event()
    defaults.reset()


def imported() -> None:
    """At import."""
    if faults.get("import") == "broken":
        raise ImportError("libcufile.so.0: undefined symbol: cuFileNoSuchThing")
    if faults.get("import") == "hangs":
        time.sleep(1000)


def called(name: str, *arguments: Any, at: int = 0) -> int:
    """Notes a call, and does to it what was asked for. Which call of its name it is, from 1."""
    with lock:
        calls.append((name, *arguments))
        number = sum(call[0] == name for call in calls)
    if name in (faults.get("hang") or ()) and at >= faults.get("hang_from", 0):
        release.wait(1000)
    if message := (faults.get("fail") or {}).get(name):
        raise RuntimeError(message)
    return number


def memory(address: int, nbytes: int) -> Any:
    """Bytes of this process's memory, writable."""
    return (ctypes.c_ubyte * nbytes).from_address(address)


def check_context() -> None:
    """kvikio synchronises the default stream before a raw request: that of whatever context is current."""
    if "FAKE_CUDA" in os.environ:
        context = ctypes.c_void_p()
        ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
        known = bool(context.value)
    else:
        known = getattr(here, "context", None) is not None
    if not known:
        raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT: cuStreamSynchronize")
