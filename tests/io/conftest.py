"""No fault outlives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer import probe
from kvxfer.io import gds
from kvxfer.testing import FaultyIO
from tests.kvikio_double import Kvikio


@pytest.fixture(autouse=True)
def faults() -> Iterator[FaultyIO]:
    """Faults for this test."""
    with FaultyIO() as io:
        yield io


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kvikio]:
    """A double of kvikio, and a device that answers."""
    double = Kvikio(monkeypatch)
    monkeypatch.setattr(gds, "_asked", [])
    monkeypatch.setattr(probe, "cuda", lambda timeout_s: probe.Probe(True, "1 x Fake H200, CUDA 13.0"))
    yield double
    double.close()
