"""For all that plays campaigns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.shims import compiled


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What makes LMDB's own calls fail."""
    return compiled("lmdb", tmp_path_factory.mktemp("shim"))
