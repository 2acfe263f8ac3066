"""The two sides of most tests of jobs: two ranks that store, four of another layout that load; and both ways in which
their bytes get to the file: every test here is of each."""

from __future__ import annotations

import pytest

from kvxfer.convert.pages import KVPages
from tests.jobs.rig import BACKEND, MODEL, ranks
from tests.native.uring import needs_uring


@pytest.fixture(params=["posix", "uring"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory) -> str:
    """By which every Rig moves bytes."""
    if request.param == "uring":
        needs_uring(tmp_path_factory.getbasetemp())
    monkeypatch.setenv(BACKEND, request.param)
    return request.param


@pytest.fixture
def source() -> list[KVPages]:
    """TP2, nhd, with the model's bytes."""
    return ranks(MODEL, "nhd", 2, filled=True)


@pytest.fixture
def target() -> list[KVPages]:
    """TP4, hnd, empty."""
    return ranks(MODEL, "hnd", 4, filled=False)
