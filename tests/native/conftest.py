"""The CUDA library over its double, compiled once."""

from __future__ import annotations

import pytest

from tests.native.cuda_libraries import FakeRuntime


@pytest.fixture(scope="session")
def fake_runtime(tmp_path_factory: pytest.TempPathFactory) -> FakeRuntime:
    """csrc/cuda over the runtime of tests/native/fake_cudart."""
    return FakeRuntime(tmp_path_factory.mktemp("cuda"))
