"""How much a root's configuration lets this process write."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvxfer.admission import WriteBudget, dwpd_to_bytes_per_s, usual_burst
from kvxfer.config import StoreConfig
from kvxfer.drive_writes import drive_bytes
from kvxfer.errors import ConfigError
from kvxfer.slot import SlotLayout


def write_rate(config: StoreConfig, size_of: Callable[[Path], tuple[int | None, str]] = drive_bytes) -> float | None:
    """Bytes a second that the processes of a root may write together; None: as many as they like.

    Args:
        size_of: size of the drive under a directory, or None and why.

    Raises:
        ConfigError: drive-writes-per-day of a drive whose size is not known; says why.
    """
    if config.write_dwpd is None:
        return config.write_bytes_per_s
    size, why = config.drive_bytes, ""
    if size is None:
        size, why = size_of(_nearest(config.root))
    if size is None:
        raise ConfigError(
            f"write_dwpd={config.write_dwpd} needs the size of the drive under {config.root}, which is not known: "
            f"{why}. Give drive_bytes, or write_bytes_per_s instead"
        )
    return dwpd_to_bytes_per_s(config.write_dwpd, size)


def budget_of(
    config: StoreConfig, rate: float | None, sharers: Callable[[], int], clock: Callable[[], float] = time.monotonic
) -> WriteBudget | None:
    """The bucket of this process; None: there is no budget.

    Args:
        rate: what `write_rate` says.
        sharers: processes that have the root open and write for requests.
    """
    if rate is None:
        return None
    burst = config.write_burst_bytes or usual_burst(rate)
    return WriteBudget(rate, burst, clock, sharers=sharers)


def check_burst(budget: WriteBudget | None, slot: SlotLayout) -> None:
    """Raises ConfigError where not even one slot could ever be written."""
    if budget is not None and slot.slot_bytes > budget.burst_bytes:
        raise ConfigError(
            f"write_burst_bytes={budget.burst_bytes} is less than a slot of {slot.slot_bytes} bytes: nothing could "
            "ever be stored"
        )


def _nearest(path: Path) -> Path:
    """The directory itself, or where it would be made."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
