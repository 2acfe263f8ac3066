"""Registration: kept account of, and refused where a test says so."""

from __future__ import annotations

from typing import Any

from kvikio import defaults, double


def place(buf: Any, host: bool) -> tuple[int, int]:
    """Address and size of a buffer, as kvikio reads them."""
    interface = getattr(buf, "__cuda_array_interface__", None)
    if interface is None:
        raise ValueError("Non-CUDA buffers not supported")
    address, readonly = interface["data"]
    assert isinstance(address, int) and isinstance(readonly, bool) and interface["typestr"] == "|u1"
    assert interface.get("mask") is None and interface.get("strides") is None
    (nbytes,) = interface["shape"]
    return address, nbytes


def memory_register(buf) -> None:
    address, nbytes = place(buf, host=False)
    double.called("memory_register", address, nbytes)
    if defaults.get("compat_mode") != defaults.CompatMode.OFF:
        return  # as the real one under AUTO may: without a word
    base, span = double.faults.get("allocation", (address, nbytes))
    if message := double.faults.get("register"):
        raise RuntimeError(message)
    if base in double.registered:
        raise RuntimeError("cuFile error 5023: device pointer already registered")
    if sum(double.registered.values()) + span > double.faults.get("register_most", 1 << 62):
        raise RuntimeError("cuFile error 5030: internal error: BAR1 is exhausted")
    double.registered[base] = span


def memory_deregister(buf) -> None:
    address, _ = place(buf, host=False)
    double.called("memory_deregister", address)
    if address not in double.registered:
        raise RuntimeError("cuFile error 5017: device pointer is not registered")
    del double.registered[address]


def bounce_buffer_free() -> int:
    return 0
