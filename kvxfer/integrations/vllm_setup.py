"""What KvxferConnector is given, checked: its keys, and of vLLM's configuration what it cannot work with.

Everything that is refused is refused when vLLM starts, with what would help. Knows vLLM's objects by their fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from kvxfer.coordinator import AT_HAND
from kvxfer.errors import ConfigError
from kvxfer.geometry import ITEMSIZES, KVGeometry, ShardSpec
from kvxfer.integrations import vllm_compat as compat
from kvxfer.integrations.vllm_config import TIER_KEYS, TierConfig, refuse_unknown
from kvxfer.integrations.vllm_namespace import fingerprint_of, has_long_rope
from kvxfer.keys import Namespace, kvx1_namespace
from kvxfer.layout import local_heads

KEY = "kvxfer"  # in kv_connector_extra_config
CONNECTOR, SPEC = "KvxferConnector", "KvxferOffloadingSpec"
MODULE = "kvxfer.integrations.vllm_connector"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """The keys of the connector: those of a tier, and its own.

    Raises:
        ConfigError: a value cannot work; names the value and what is allowed.
    """

    tier: TierConfig
    allow_load_failures: bool = False  # run where vLLM ends a request of which a chunk does not arrive

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Self:
        """The object under "kvxfer" in `kv_connector_extra_config`.

        Raises:
            ConfigError: it is missing or no object, has an unknown key, no `root_dir`, or a value that cannot work.
        """
        raw = extra.get(KEY)
        if not isinstance(raw, Mapping):
            raise ConfigError(
                f"kv_connector_extra_config[{KEY!r}]={raw!r} must be an object with the keys of {CONNECTOR}, such as "
                '{"root_dir": "/mnt/nvme/kvxfer"}'
            )
        refuse_unknown(KEY, raw, TIER_KEYS | {"allow_load_failures"})
        allow = raw.get("allow_load_failures", False)
        if type(allow) is not bool:
            raise ConfigError(f"{KEY} key allow_load_failures={allow!r} must be true or false")
        try:
            config = TierConfig.from_keys({key: value for key, value in raw.items() if key != "allow_load_failures"})
        except ConfigError as exc:
            exc.add_note(f"a key of kv_connector_extra_config[{KEY!r}]")
            raise
        return cls(tier=config, allow_load_failures=allow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a server's cache is, as its scheduler and all its ranks know it."""

    config: ConnectorConfig
    geometry: KVGeometry
    namespace: Namespace
    layers: tuple[str, ...]  # vLLM's names, in the order of the bytes
    shard: ShardSpec  # this process's rank; the scheduler has the first one's
    num_blocks: int  # of the device
    blocks_per_chunk: int
    step_chunks: int  # that one step may compute
    events: bool  # vLLM's KV events are on
    tokens_per_chunk: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_chunk", self.geometry.tokens_per_block * self.blocks_per_chunk)


def refuse(vllm_config: Any, kv_cache_config: Any) -> ConnectorConfig:
    """The connector's keys; raises where this server cannot run with it.

    Raises:
        ConfigError: says what stands in the way, and what would help.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    extra = transfer.kv_connector_extra_config
    config = ConnectorConfig.from_extra(extra)
    if (extra.get("spec_name"), extra.get("spec_module_path")) != (SPEC, MODULE):
        raise ConfigError(
            f"{CONNECTOR} works with its own spec: give kv_connector_extra_config spec_name={SPEC!r} and "
            f"spec_module_path={MODULE!r}"
        )
    policy = getattr(transfer, "kv_load_failure_policy", None)
    if policy != "recompute" and not config.allow_load_failures:
        raise ConfigError(
            f"kv_load_failure_policy={policy!r} ends a request of which a chunk does not arrive, or is damaged: "
            'give kv_transfer_config "kv_load_failure_policy": "recompute" (or, to have such requests fail, the key '
            "allow_load_failures: true)"
        )
    for name, value, why in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, "stages whose layers a scheduler is not told"),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, "tokens of a block on several ranks"),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, "tokens of a block on several ranks"),
    ):
        if value != 1:
            raise ConfigError(f"{name}={value} means {why}, which {CONNECTOR} does not describe yet: it must be 1")
    for name in ("sync_load_budget_bytes", "self_describing_kv_events", "canonical_layout"):
        if extra.get(name):
            raise ConfigError(f"kv_connector_extra_config {name}={extra[name]!r}: {_UNSUPPORTED[name]}; leave it out")
    attention = getattr(vllm_config, "attention_config", None)
    sparse = getattr(attention, "hisparse_config", None), getattr(kv_cache_config, "hisparse_host_num_blocks", None)
    if sparse != (None, None):
        raise ConfigError(f"hisparse keeps blocks in host memory that {CONNECTOR} knows nothing of: turn it off")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            f"speculative decoding adds layers of a draft model whose weights {CONNECTOR} cannot name yet: leave "
            "speculative_config out"
        )
    if compat.is_cuda_platform():
        dtype = str(getattr(getattr(vllm_config, "cache_config", None), "cache_dtype", None))
        if dtype not in ("auto", "float16", "bfloat16"):
            raise ConfigError(
                f"kv_cache_dtype={dtype!r}: what such pages mean hangs on scales that {CONNECTOR} does not store: it "
                'must be "auto", "float16" or "bfloat16"'
            )
    elif not compat.is_cpu_platform():
        raise ConfigError(
            f"{CONNECTOR} has no converter for pages of device type {compat.device_type()!r} here: it knows host "
            "memory and CUDA. KvxferTier under the stock TieringOffloadingSpec works there"
        )
    return config


_NO_MATTER = ("_name_or_path", "transformers_version")  # of a model's configuration

_UNSUPPORTED = {
    "sync_load_budget_bytes": "loads within a step would make every request wait for the drive",
    "self_describing_kv_events": "vLLM keeps what such events say until a tier in host memory lets go of it, and there "
    "is none",
    "canonical_layout": "it orders rows in host memory, and there are none",
}


def setup_of(offloading_config: Any, vllm_config: Any, kv_cache_config: Any) -> Setup:
    """What this server's cache is.

    Args:
        offloading_config: vLLM's OffloadingConfig of it.

    Raises:
        ConfigError: it is of a kind that cannot be certified; says why.
    """
    config = refuse(vllm_config, kv_cache_config)
    group, spec = _one_group(kv_cache_config)
    model = vllm_config.model_config
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZES:
        raise ConfigError(f"the cache's dtype {dtype!r} must be one of {', '.join(ITEMSIZES)}")
    layers = tuple(group.layer_names)
    geometry = KVGeometry(
        num_layers=len(layers),
        num_kv_heads=int(model.get_total_num_kv_heads()),
        head_dim=spec.head_size,
        dtype=dtype,
        tokens_per_block=spec.block_size,
    )
    parallel = vllm_config.parallel_config
    shard = ShardSpec(tp_size=parallel.tensor_parallel_size, tp_rank=offloading_config.parallel.rank)
    if (mine := len(local_heads(geometry, shard))) != spec.num_kv_heads:
        raise ConfigError(f"vLLM keeps {spec.num_kv_heads} KV heads on a rank, where {mine} are expected")
    blocks = offloading_config.cache.blocks_per_chunk
    step_tokens = getattr(getattr(vllm_config, "scheduler_config", None), "max_num_batched_tokens", None) or 0
    return Setup(
        config=config,
        geometry=geometry,
        namespace=_namespace(config, geometry, layers, offloading_config, vllm_config, spec),
        layers=layers,
        shard=shard,
        num_blocks=kv_cache_config.num_blocks,
        blocks_per_chunk=blocks,
        step_chunks=max(AT_HAND, -(-step_tokens // (blocks * spec.block_size))),
        events=bool(offloading_config.enable_kv_cache_events),
    )


def _one_group(kv_cache_config: Any) -> tuple[Any, Any]:
    """The one group of layers, all of one kind, and its spec."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ConfigError(
            f"the model has {len(groups)} KV-cache groups ({', '.join(kinds)}), and {CONNECTOR} stores one: vLLM could "
            "not be told which blocks of which group failed. KvxferTier stores such models; or give "
            "--disable-hybrid-kv-cache-manager where the model allows it"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) is not compat.FullAttentionSpec:
        raise ConfigError(
            f"pages of kind {type(spec).__name__} (such as MLA's, or of layers that differ) are not certified yet for "
            f"{CONNECTOR}: it stores full attention. KvxferTier stores such models"
        )
    plain = {
        "head_size_v": spec.head_size,
        "num_head_slots": None,
        "state_content_bytes": None,
        "tokens_per_state": 1,
        "kv_quant_mode": 0,
        "non_causal": False,
    }
    for name, value in plain.items():
        if (found := getattr(spec, name, value)) != value:
            raise ConfigError(
                f"pages with {name}={found!r} are not certified yet for {CONNECTOR} (it takes {value!r}); quantized "
                'caches need kv_cache_dtype="auto"'
            )
    return groups[0], spec


def _namespace(
    config: ConnectorConfig, geometry: KVGeometry, layers: tuple[str, ...], offloading: Any, vllm: Any, spec: Any
) -> Namespace:
    """Everything that changes the bytes' meaning but the sharding, which does not show in them."""
    model = vllm.model_config
    described = {key: value for key, value in model.hf_config.to_dict().items() if key not in _NO_MATTER}
    text = json.dumps(described, sort_keys=True, default=str)
    return kvx1_namespace(
        geometry,
        model=model.model,
        weights_fingerprint=fingerprint_of(
            model.model, config.tier.weights_fingerprint, 0
        ),  # the length is named apart
        blocks_per_chunk=offloading.cache.blocks_per_chunk,
        extra={
            "server": "vllm",
            "layers": list(layers),
            "tokens_per_hash": offloading.cache.tokens_per_hash,
            "model_dtype": str(model.dtype).removeprefix("torch."),
            "quantization": None if model.quantization is None else str(model.quantization),
            "hf_config": hashlib.sha256(text.encode()).hexdigest(),  # with --hf-overrides in it
            "kernel": _kernel(spec),
        }
        | _unusual(described, vllm),
    )


def _kernel(spec: Any) -> str:
    """Whose order a head's keys of a block have: on CPUs each kernel has one of its own; on CUDA a key's elements are
    in order, whatever the backend (see vllm_pages), so that its name says nothing.

    Raises:
        ConfigError: elements of a kind that is not certified, or this vLLM does not say which kernel it is.
    """
    if not compat.is_cuda_platform():
        return f"cpu {compat.cpu_kernel(spec.dtype, spec.block_size, spec.head_size)}"
    if (dtype := str(spec.dtype).removeprefix("torch.")) not in ("float32", "float16", "bfloat16"):
        raise ConfigError(
            f"pages of {dtype} are not certified yet for {CONNECTOR} on CUDA: give --kv-cache-dtype bfloat16"
        )
    return "in order"


def _unusual(described: Mapping[str, Any], vllm: Any) -> dict[str, Any]:
    """What else changes keys and values, of servers that are told to; empty for all others."""
    model, media = vllm.model_config, getattr(vllm.model_config, "multimodal_config", None)
    found = {
        # Rows of "longrope" are long or short for all tokens, by the longest sequence that the server takes.
        "max_model_len": getattr(model, "max_model_len", None) if has_long_rope(described) else None,
        "dummy_weights": str(getattr(getattr(vllm, "load_config", None), "load_format", "")) == "dummy" or None,
        "quantized_online": getattr(model, "quantization_config", None),
        "mm_processor_kwargs": getattr(media, "mm_processor_kwargs", None) or None,
        "video_pruning_rate": getattr(media, "video_pruning_rate", None),
    }
    given = {name: value for name, value in found.items() if value is not None}
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in given.items()}
