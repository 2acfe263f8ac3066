"""The way that bytes take between the directory's drive and the device: the ladder as found."""

from __future__ import annotations

from typing import Any

from bench.gpu.sections import Work
from bench.gpu.settings import Settings
from kvxfer.io.ladder import climb_here

__all__ = ["run"]


def run(work: Work) -> None:
    """One row: the rung, and why not a higher one. (A rung holds where bytes were written, read back and compared.)"""
    settings: Settings = work.common.settings
    found: dict[str, Any] = climb_here(settings.directory).as_json()
    work.add(f"ladder of {settings.directory}", str(found["rung"]), more=found)
