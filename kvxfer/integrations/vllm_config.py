"""The keys of a tier, in vLLM's `secondary_tiers`, which are the connector's too, checked. Needs no vLLM."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm_deadline import MEASURED

_STORE_KEYS = frozenset(field.name for field in fields(StoreConfig)) - {"root"}
_ENGINE_KEYS = frozenset(field.name for field in fields(EngineConfig))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One tier. Times in seconds.

    Its keys are `root_dir`, the fields below but `stores` and `engine`, and those of StoreConfig and EngineConfig.

    Raises:
        ConfigError: a value cannot work; names the value and what is allowed.
    """

    stores: tuple[StoreConfig, ...]  # one for each root
    engine: EngineConfig
    weights_fingerprint: str | None = None  # which weights; None: computed, where the model is a local directory
    deadline_s: float | None = None  # a load ends then with what has arrived
    recompute_tokens_per_s: float | str | None = None  # and no later than recomputing its tokens would; or "measured"
    reset_on_drain: bool = False  # a reset of vLLM's prefix cache makes all that is stored a miss
    drain_timeout_s: float = 60.0  # how long a drain waits for jobs before it cancels them
    equal_pipeline_stages: bool = False  # the operator's word that every pipeline stage keeps as many bytes of a block
    enable_kv_events: bool = False  # where vLLM's KV events are on
    locality: str | None = None  # LOCAL | None: what KV events say

    def __post_init__(self) -> None:
        if self.locality not in (None, "LOCAL"):
            raise ConfigError(f"tier key locality={self.locality!r} must be 'LOCAL' or left out")
        for name in ("deadline_s", "recompute_tokens_per_s", "drain_timeout_s"):
            value = getattr(self, name)
            if value is None and name != "drain_timeout_s":
                continue
            if name == "recompute_tokens_per_s" and isinstance(value, str):
                if value != MEASURED:
                    raise ConfigError(f"tier key {name}={value!r} must be a positive number or {MEASURED!r}")
                continue
            if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"tier key {name}={value!r} must be a positive number")
        for name in ("reset_on_drain", "equal_pipeline_stages", "enable_kv_events"):
            if type(value := getattr(self, name)) is not bool:
                raise ConfigError(f"tier key {name}={value!r} must be true or false")
        given = self.weights_fingerprint
        if given is not None and (not isinstance(given, str) or not given):
            raise ConfigError(f"tier key weights_fingerprint={given!r} must be text and not empty")

    @property
    def store(self) -> StoreConfig:
        """Of the only root, or the first."""
        return self.stores[0]

    @classmethod
    def from_keys(cls, raw: Mapping[str, Any]) -> Self:
        """The configuration that `secondary_tiers` gives, `type` and `module_path` taken off.

        Raises:
            ConfigError: an unknown key, no `root_dir`, or a value that cannot work.
        """
        refuse_unknown("tier", raw, TIER_KEYS)
        if "root_dir" not in raw:
            raise ConfigError("tier key 'root_dir' is missing: the directory that the tier may fill")
        given = raw["root_dir"]
        roots = list(given) if isinstance(given, list | tuple) else [given]
        if not roots or not all(isinstance(root, str) and root for root in roots):
            raise ConfigError(f"tier key root_dir={given!r} must be the path of a directory, or a list of such paths")
        _refuse_overlapping(roots)
        return cls(
            stores=tuple(StoreConfig.from_mapping({"root": root} | _those(raw, _STORE_KEYS)) for root in roots),
            engine=EngineConfig.from_mapping(_those(raw, _ENGINE_KEYS)),
            **_those(raw, _OWN_KEYS),
        )


_OWN_KEYS = frozenset(field.name for field in fields(TierConfig)) - {"stores", "engine"}
TIER_KEYS = _OWN_KEYS | _STORE_KEYS | _ENGINE_KEYS | {"root_dir"}


def refuse_unknown(whose: str, raw: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises ConfigError for keys that are not known, naming them and those that are."""
    if unknown := sorted(str(key) for key in raw if key not in known):
        raise ConfigError(f"unknown {whose} keys {unknown}; known keys are {sorted(known)}")


def _refuse_overlapping(roots: list[str]) -> None:
    """Raises ConfigError where one of the directories is, or lies in, another: both would count the same bytes."""
    real = [os.path.realpath(root) for root in roots]
    if len(set(real)) < len(real):
        raise ConfigError(f"tier key root_dir={roots!r} names a directory twice")
    for inner in real:
        for outer in real:
            if inner != outer and os.path.commonpath([inner, outer]) == outer:
                raise ConfigError(f"tier key root_dir={roots!r}: {inner!r} lies in {outer!r}")


def _those(raw: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key in names}
