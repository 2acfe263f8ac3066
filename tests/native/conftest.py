"""The CUDA library over its double."""

from __future__ import annotations

import pytest

from tests.native import cuda_libraries
from tests.native.cuda_libraries import FakeRuntime


@pytest.fixture
def fake_runtime() -> FakeRuntime:
    """csrc/cuda over the runtime of tests/native/fake_cudart, as if nothing had been asked of it."""
    runtime = cuda_libraries.fake_runtime()
    runtime.reset()
    return runtime
