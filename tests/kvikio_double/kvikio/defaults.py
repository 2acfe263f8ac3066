"""kvikio's settings."""

from __future__ import annotations

import enum
import os
from typing import Any


class CompatMode(enum.IntEnum):
    OFF = 0
    ON = 1
    AUTO = 2


_FIRST = {
    "compat_mode": CompatMode[os.environ.get("KVIKIO_COMPAT_MODE", "AUTO")],
    "num_threads": 1,
    "task_size": 4 << 20,
    "gds_threshold": 16 << 10,
    "bounce_buffer_size": 16 << 20,
    "auto_direct_io_read": False,
    "auto_direct_io_write": True,
}
_now = dict(_FIRST)


def reset() -> None:
    _now.update(_FIRST)


class ConfigContextManager:
    def __init__(self, config: dict[str, str]):
        self._old = {key: _now[key] for key in config}
        _now.update(config)

    def __enter__(self):
        return None

    def __exit__(self, type_unused, value, traceback_unused):
        _now.update(self._old)


def set(*config) -> ConfigContextManager | None:
    if len(config) == 1 and isinstance(config[0], dict):
        return ConfigContextManager(config[0])
    key, value = config
    return ConfigContextManager({key: value})


def get(config_name: str) -> Any:
    return _now[config_name]


def is_compat_mode_preferred() -> bool:
    return _now["compat_mode"] == CompatMode.ON
