"""The two sides of most tests of jobs: two ranks that store, four of another layout that load."""

from __future__ import annotations

import pytest

from kvxfer.convert.pages import KVPages
from tests.jobs.rig import MODEL, ranks


@pytest.fixture
def source() -> list[KVPages]:
    """TP2, nhd, with the model's bytes."""
    return ranks(MODEL, "nhd", 2, filled=True)


@pytest.fixture
def target() -> list[KVPages]:
    """TP4, hnd, empty."""
    return ranks(MODEL, "hnd", 4, filled=False)
