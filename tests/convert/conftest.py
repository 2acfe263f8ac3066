"""The converters by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.convert.common import CONVERTERS


@pytest.fixture(params=CONVERTERS)
def converter(request: pytest.FixtureRequest) -> Any:
    """Those on the host; `parametrize("converter", EVERY_CONVERTER, indirect=True)` for the kernels too."""
    if request.param in CONVERTERS:
        return CONVERTERS[request.param]
    from tests.convert.on_triton import on_triton

    return on_triton(request.param)
