"""Every test here sees its own warnings, not those that an earlier one has kept back."""

from __future__ import annotations

import pytest

from kvxfer.report import Reporter


@pytest.fixture(autouse=True)
def said_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVXFER_COPY_ENGINE", raising=False)
    monkeypatch.setattr("kvxfer.device.engines._known", {})
    fresh = Reporter("kvxfer.engine")
    for module in ("bays", "engines", "flights", "host_carrier", "pinned"):
        monkeypatch.setattr(f"kvxfer.device.{module}.engine_reporter", fresh)
