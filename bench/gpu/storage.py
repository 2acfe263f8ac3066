"""The way that bytes take between the directory's drive and the device: the ladder as found."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bench.gpu.sections import Skip, Work
from bench.gpu.settings import Settings

__all__ = ["run"]


def run(work: Work) -> None:
    """One row: the rung, and why not a higher one. (A rung holds where bytes were written, read back and compared.)"""
    settings: Settings = work.common.settings
    try:
        ladder = import_module("kvxfer.io.ladder")
    except ImportError as exc:
        raise Skip(f"kvxfer.io.ladder: {exc}") from exc
    found: dict[str, Any] = ladder.climb_here(settings.directory).as_json()
    work.add(f"ladder of {settings.directory}", str(found["rung"]), more=found)
