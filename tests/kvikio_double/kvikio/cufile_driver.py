"""cuFile's driver."""

from __future__ import annotations

from typing import Any

from kvikio import double

_PROPERTIES = {
    "is_gds_available": True,
    "major_version": 2,
    "minor_version": 26,
    "allow_compat_mode": True,
    "per_buffer_cache_size": 1024,
    "poll_mode": False,
    "poll_thresh_size": 4,
    "max_device_cache_size": 131072,
    "max_pinned_memory_size": 33554432,
}


def get(config_name: str) -> Any:
    return double.faults.get(config_name, _PROPERTIES[config_name])


def set(*config): ...


def libcufile_version() -> tuple[int, int]:
    return (1, 16)


def driver_open() -> None:
    double.called("driver_open")
    if message := double.faults.get("driver_open"):
        raise RuntimeError(message)


def driver_close() -> None: ...
