"""What every test gets: no faults left over, room on disk, one torch thread, hypothesis without a clock."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch: a float32 result must not depend on how many cores a machine has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from kvxfer import _native

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    """Triton reads this where a kernel is made: compiled where a GPU's tests run on a GPU, else interpreted."""
    gpu = Path("/dev/nvidia0").exists() and "not gpu" not in config.option.markexpr
    os.environ.setdefault("TRITON_INTERPRET", "0" if gpu else "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first, so that of several processes none works at a last long file while others are done.

    (pytest-xdist's own order knows how many tests a file has, and not that a campaign is one.)
    """
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: ("/soak/" not in str(item.path), -tests[item.path], str(item.path)))


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    """Removes every fault rule after a test, and lets hanging calls go. Loads nothing by itself."""
    yield
    if _native.lib.cache_info().currsize:
        _native.lib().kvx_fault_clear()


@pytest.fixture
def tmp_root(tmp_path: Path) -> Path:
    """Where a store's root can be made; it does not exist yet."""
    return tmp_path / "root"
