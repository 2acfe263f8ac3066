"""Every test here sees its own warnings, not those that an earlier one has kept back."""

from __future__ import annotations

import pytest

from kvxfer.report import Reporter


@pytest.fixture(autouse=True)
def said_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Reporter("kvxfer.engine")
    for module in ("bays", "flights", "host_carrier"):
        monkeypatch.setattr(f"kvxfer.device.{module}.engine_reporter", fresh)
