"""What docs/vllm.md says: KvxferTieringSpec's configuration that people paste, and all keys. Needs no vLLM."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.integrations.vllm_config import TierConfig
from kvxfer.integrations.vllm_engines import ENGINES, LEAST_COPY, ZERO_PROGRAMS

ROOT = Path(__file__).resolve().parents[2]


def section(name: str = "KvxferTieringSpec") -> str:
    text = (ROOT / "docs" / "vllm.md").read_text()
    (found,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return str(found)


def pasted() -> dict[str, Any]:
    """vLLM's kv_transfer_config, as it is printed."""
    (text,) = re.findall(r"```json\n(.*?)```", section(), re.DOTALL)
    return dict(json.loads(text))


def test_the_pasted_configuration_is_one() -> None:
    config = pasted()
    assert (config["kv_connector"], config["kv_role"]) == ("OffloadingConnector", "kv_both")
    extra = config["kv_connector_extra_config"]
    found = importlib.util.find_spec(extra["spec_module_path"])
    assert found and found.origin and f"class {extra['spec_name']}(" in Path(found.origin).read_text()
    (tier,) = extra["secondary_tiers"]
    keys = {key: value for key, value in tier.items() if key not in ("type", "module_path")}
    assert TierConfig.from_keys(keys).store.capacity_bytes == tier["capacity_bytes"]


def test_its_own_keys_are_named() -> None:
    source = (ROOT / "kvxfer" / "integrations" / "vllm_tiering.py").read_text()
    (key,) = re.findall(r'^COPY_THREADS = "(\w+)"', source, re.MULTILINE)
    (most,) = re.findall(r"^_MOST_THREADS = (\d+)", source, re.MULTILINE)
    assert f"`{key}`, threads that share a job's copies (1 to {most}; 1 unless given)" in section()
    (programs,) = re.findall(r"^_MOST_PROGRAMS = (\d+)", source, re.MULTILINE)
    assert f"of a kernel at once (1 to {programs})" in section()
    assert f"Unless given {ZERO_PROGRAMS} for kernels" in section()
    assert f"one piece of {LEAST_COPY >> 10} KiB or more" in section()
    named = set(re.findall(r'^\w+ = "(kvxfer_\w+)"', source, re.MULTILINE))
    assert set(re.findall(r"`(kvxfer_\w+)`", section())) == named and len(named) == 3
    assert set(re.findall(r'`"(\w+)"`', section())) >= set(ENGINES)


def test_every_key_of_the_tier_is_named() -> None:
    tier = fields(TierConfig), fields(StoreConfig), fields(EngineConfig)
    keys = {field.name for each in tier for field in each} - {"stores", "engine", "root"}
    assert keys - set(re.findall(r"`(\w+)`", section("KvxferTier"))) == set()
