"""Which copy engine moves fragments between pages on a device and pinned memory: asked for, or by what was measured.

It is measured before a runner starts: beside transfers it would be slowed by them, and slow them. That takes BUDGET_S
at most, once for a device in a process, and is kept, so that the next start has nothing left to measure.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from importlib import import_module

from kvxfer.device.calibration import AUTO, DIRECTIONS, PACK, Calibration, WrongBytes, wanted
from kvxfer.device.host_carrier import ENGINES
from kvxfer.errors import ConfigError
from kvxfer.report import engine_reporter

__all__ = ["calibrated"]

_lock = threading.Lock()
_known: dict[tuple[str, ...], Calibration] = {}  # by device, and what was asked for


def calibrated(label: str, copy_engine: str = AUTO) -> Calibration:
    """What is known of host_carrier.ENGINES on a device; where nothing is, PACK, and the reason is said once.

    Args:
        label: of the device; one that isn't torch's ("cuda:0") is not measured.
        copy_engine: as in EngineConfig; KVXFER_COPY_ENGINE goes before it.

    Raises:
        ConfigError: none of ENGINES is wanted.
        WrongBytes: the engine that is wanted, or every one, moved wrong bytes.
    """
    asked = wanted(copy_engine)
    given = Calibration(engines=ENGINES, asked=asked, source="given")
    if AUTO not in asked.values() or not label.startswith("cuda:"):
        return given
    key = label, *(asked[direction] for direction in DIRECTIONS)
    with _lock:  # those who ask for the same device at once wait: two measurements would disturb each other
        if key not in _known:
            _known[key] = _measured(label, asked) or given
        return _known[key]


def _measured(label: str, asked: Mapping[str, str]) -> Calibration | None:
    """What is kept or can be measured; None: nothing, which was said."""
    try:
        found: Calibration = import_module("kvxfer.device.copy_bench").obtain_here(
            int(label.removeprefix("cuda:")), ENGINES, asked
        )
    except (ConfigError, WrongBytes):
        raise
    except Exception as exc:  # whatever a driver or a compiler raises: transfers work without it
        engine_reporter.failed("calibration", f"no copy engine was measured on {label}, {PACK!r} is taken", exc)
        return None
    if found.notes or not found.seconds:
        what = "" if found.seconds else f"no copy engine was measured, {found.usable[0]!r} is taken: "
        level = logging.INFO if found.seconds and not found.wrong else logging.WARNING
        engine_reporter.warn("calibration", f"{label}: {what}{'; '.join(found.notes)}", level=level)
    return found
