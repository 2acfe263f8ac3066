"""For the tests that start real engines: skipped where there is no vLLM; the model and its output are made once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integrations.engines import run_engine

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_VLLM:
        skip = pytest.mark.skip(reason="vLLM is not installed here: make test-vllm")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def where(request: pytest.FixtureRequest) -> Path:
    """The folder that has `tests`."""
    return request.config.rootpath


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama's folder."""
    from tests.integrations.tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def plain(where: Path, model: Path) -> list[int]:
    """The output for prompt 0 of an engine without offloading."""
    (result,) = run_engine(where, {"model": str(model)}, ["run"])
    assert result["cached"] == 0
    return list(result["ids"])
