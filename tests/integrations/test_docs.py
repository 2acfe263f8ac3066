"""docs/vllm.md names every key that there is. Needs no vLLM."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm_config import TierConfig

# What is said of the connector has tests of its own.
TEXT = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text().partition("\n## KvxferConnector\n")[0]


def test_every_key_is_there() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", TEXT, re.MULTILINE))
    own = {field.name: field.default for field in fields(TierConfig) if field.name not in ("stores", "engine")}
    assert set(rows) == {*own, "root_dir", "capacity_bytes"}
    for name, default in own.items():
        said = rows[name].strip().strip("`").strip('"')
        if default is None:
            assert said in ("none", ""), name
        else:
            assert said == (json.dumps(default).strip('"') if not isinstance(default, float) else f"{default:g}"), name
    others = {field.name for cls in (StoreConfig, EngineConfig) for field in fields(cls)} - {"root", "capacity_bytes"}
    assert others <= set(re.findall(r"`(\w+)`", TEXT))


def test_the_pasted_configuration_is_one() -> None:
    (text,) = re.findall(r"--kv-transfer-config '(.*?)'\n```", TEXT, re.DOTALL)
    (tier,) = json.loads(text)["kv_connector_extra_config"]["secondary_tiers"]
    config = TierConfig.from_keys({key: value for key, value in tier.items() if key not in ("type", "module_path")})
    assert config.store.capacity_bytes == tier["capacity_bytes"] and tier["type"] == "KvxferTier"


def test_the_readme_pastes_the_same() -> None:
    pasted = [
        re.findall(r"--kv-transfer-config '(.*?)'\n```", text, re.DOTALL)
        for text in (TEXT, (Path(__file__).resolve().parents[2] / "README.md").read_text())
    ]
    assert len(pasted[0]) == 1 and pasted[0] == pasted[1]


def test_several_roots_are_a_list() -> None:
    config = TierConfig.from_keys({"root_dir": ["/a", "/b"], "capacity_bytes": 1 << 30, "durability": "power"})
    assert {store.durability for store in config.stores} == {"power"}
    assert [str(store.root) for store in config.stores] == ["/a", "/b"]
    assert {store.capacity_bytes for store in config.stores} == {1 << 30}
    for wrong, why in (([], "a list of such paths"), (["/a", 5], "a list of such paths"), (["/a", "/a/"], "twice")):
        with pytest.raises(ConfigError, match=why):
            TierConfig.from_keys({"root_dir": wrong})


def test_a_path_is_a_path() -> None:
    with pytest.raises(ConfigError, match="root_dir=5 must be the path"):
        TierConfig.from_keys({"root_dir": 5})
