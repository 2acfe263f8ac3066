"""No fault outlives a test; a store that is opened is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.store import Store
from kvxfer.testing import FaultyIO
from tests.store import rig
from tests.store.sharing import Group


@pytest.fixture(autouse=True)
def faults() -> Iterator[FaultyIO]:
    """Faults for this test."""
    with FaultyIO() as io:
        yield io


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the test's store goes; not made yet."""
    return tmp_path / "root"


@pytest.fixture
def opened(root: Path, faults: FaultyIO) -> Iterator[Callable[..., Store]]:
    """opened(**config): a store at `root`; closed at the end of the test, after the faults are gone."""
    stores: list[Store] = []

    def make(writers: int = 4, **config: Any) -> Store:
        stores.append(Store.open(rig.config(root, **config), writers=writers, housekeeping=False))
        return stores[-1]

    yield make
    faults.__exit__(None, None, None)
    for store in stores:
        store.close()


@pytest.fixture
def group(root: Path) -> Iterator[Group]:
    """Processes on one root; none outlives the test."""
    peers = Group(root)
    yield peers
    peers.end()
