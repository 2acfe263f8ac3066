"""No fault outlives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.testing import FaultyIO
from tests.kvikio_double import kvikio

__all__ = ["faults", "kvikio"]


@pytest.fixture(autouse=True)
def faults() -> Iterator[FaultyIO]:
    """Faults for this test."""
    with FaultyIO() as io:
        yield io
