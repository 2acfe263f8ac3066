"""Pipeline stages that may differ in size are refused by name. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm_namespace import check_stages

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_size": 256,
    "torch_dtype": "float32",
}


def told(model: str | Path, first: int, stages: int = 2, *, canonical: bool = False) -> Any:
    """What vLLM tells a tier: of the first stage alone."""
    return SimpleNamespace(
        parallel=SimpleNamespace(pp_size=stages),
        canonical_layout=canonical,
        model=SimpleNamespace(name=str(model)),
        groups=(SimpleNamespace(layer_names=tuple(f"layers.{number}" for number in range(first))),),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("partition", [None, "2,2", "2, 2"])
def test_equal_stages_pass_where_somebody_says_so(model: Path, partition: str | None) -> None:
    check_stages(told(model, 2), partition=partition, stated_equal=True)
    check_stages(told("org/name", 2), partition=partition, stated_equal=True)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2.*equal_pipeline_stages to true"):
        check_stages(told(model, 2), partition=partition, stated_equal=False)


def test_without_a_pipeline_nothing_is_asked(model: Path) -> None:
    check_stages(told(model, 4, stages=1, canonical=True), partition=None, stated_equal=False)


@pytest.mark.parametrize(
    ("first", "partition", "message"),
    [
        (3, "3,1", "VLLM_PP_LAYER_PARTITION='3,1'"),
        (3, None, "the first stage has 3 of the model's 4 layers"),
        (1, None, "the first stage has 1 of the model's 4 layers"),
    ],
)
def test_stages_that_differ_are_refused_whatever_is_said(
    model: Path, first: int, partition: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_stages(told(model, first), partition=partition, stated_equal=True)


def test_canonical_rows_have_no_stages(model: Path) -> None:
    with pytest.raises(ConfigError, match="canonical_layout"):
        check_stages(told(model, 2, canonical=True), partition=None, stated_equal=True)
