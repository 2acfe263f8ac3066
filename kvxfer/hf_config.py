"""The KV-cache groups of a model, read from the config.json that it was published with.

What a field means is what the public `transformers` documentation says of it. Nothing is guessed: a field that speaks
of the cache and is not known here makes the whole file refused, by that field's name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvxfer.errors import LayoutError
from kvxfer.geometry import Kind, KVGeometry

__all__ = ["geometries_from_hf_config"]

Config = Mapping[str, Any]

# Where a multimodal model keeps the fields of its language model. Such a part leaves out what equals its family's
# defaults, so that there a missing field says nothing, but in these families: full attention, width / heads elements.
_INNER = ("text_config", "llm_config", "language_config")
_PLAIN = frozenset({"llama", "qwen2"})
# One quantity, by whichever of these names a family gives it.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")

# Families whose servers keep the latent of kv_lora_rank + qk_rope_head_dim elements, and not keys and values.
_LATENT = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "kimi_k2"})
# Families whose files carry `sliding_window` and no pattern: every layer has the window ...
_ALL_SLIDE = frozenset({"ministral", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
# ... or all but each n-th.
_EACH_NTH_FULL = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}

# Words in a field's name that speak of what a layer keeps. A field with such a name that is set, and not listed below,
# is one that this reader does not know the meaning of.
_SPEAKS = re.compile(
    r"(^|_)(attention_layers?|attn|block|blocks|chunk|chunked|cla|compress|conv|cross|delta|gla|global|head|heads|hybrid|"
    r"idxs?|index|indexer|kv|latent|linear|local|lora|lru|mamba|pattern|query|recurrent|retention|shared|sliding|ssm|state|"
    r"swa|types?|v|window)(_|$)|per_layer"
)
_OTHER = re.compile(r"^(audio|expert|image|lm_head|mlp|mm|moe|router|summary|video|vision)_|(_bias|_prob|dropout)$")
_KNOWN = frozenset(
    {
        *_LAYERS,
        *_HEADS,
        "head_dim",
        "index_head_dim",
        "index_n_heads",
        "index_topk",
        "indexer_types",
        "kv_lora_rank",
        "layer_types",
        "max_window_layers",
        "model_type",
        "multi_query",
        "num_key_value_heads",
        "num_kv_heads",
        "num_kv_shared_layers",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "use_sliding_window",
        "v_head_dim",
        # Speak of other things: masks and scales, experts and MLPs, vocabularies, the transformers library itself.
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "activation_sparsity_pattern",
        "attn_logit_softcapping",
        "attn_pdrop",
        "attn_temperature_tuning",
        "chunk_size_feed_forward",
        "global_attn_every_n_layers",
        "hidden_size_per_layer_input",
        "n_shared_experts",
        "num_ln_in_parallel_attn",
        "num_local_experts",
        "num_shared_experts",
        "parallel_attn",
        "query_pre_attn_scalar",
        "reorder_and_upcast_attn",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "type_vocab_size",
        "vocab_size_per_layer_input",
    }
)


def geometries_from_hf_config(
    source: str | os.PathLike[str] | Config,
    *,
    tokens_per_block: int,
    dtype: str | None = None,
    indexer_bytes: int | None = None,
) -> tuple[KVGeometry, ...]:
    """The KV-cache groups of a model, in the order of each group's first layer.

    Args:
        source: a config.json, the directory it lies in, or what it says.
        tokens_per_block: the server's.
        dtype: of the cache; None: the one the file names.
        indexer_bytes: what a layer keeps for a token for its sparse-attention indexer; None: `index_head_dim` one-byte
            elements and a scale of four bytes for each 128 of them.

    Raises:
        LayoutError: the file cannot be read, or speaks of a cache that is not understood here; names the field.
    """
    config = _language_part(_load(source))
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise LayoutError("the config is of an encoder-decoder: what its cross-attention keeps has no blocks of tokens")
    _refuse_unknown(config)
    kinds = _layer_kinds(config)
    element = _dtype(config, dtype)
    if config.get("kv_lora_rank") or config.get("model_type") in _LATENT:
        return (_latent(config, kinds, element, tokens_per_block, indexer_bytes),)
    for field in ("index_head_dim", "index_topk", "index_n_heads"):
        if config.get(field):
            raise LayoutError(f"{field}={config[field]} without kv_lora_rank: an indexer is known beside a latent only")
    heads, head_dim = _heads(config)
    return tuple(
        KVGeometry(
            num_layers=kinds.count(window),
            num_kv_heads=heads,
            head_dim=head_dim,
            dtype=element,
            tokens_per_block=tokens_per_block,
            kind=Kind.ATTENTION if window is None else Kind.SLIDING_WINDOW,
            window=window,
        )
        for window in dict.fromkeys(kinds)
    )


# ---- the file


def _load(source: str | os.PathLike[str] | Config) -> Config:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise LayoutError(f"cannot read a model's config.json: {path}: {exc}") from exc
    if not isinstance(config, dict):
        raise LayoutError(f"{path} is no model's config.json: it holds a {type(config).__name__}")
    return config


def _language_part(config: Config) -> Config:
    """The language model's fields, which a multimodal model keeps apart."""
    inner = [name for name in _INNER if isinstance(config.get(name), Mapping)]
    if not inner:
        return config
    part = dict(config[inner[0]])
    for name in ("dtype", "torch_dtype"):
        if part.get(name) is None:
            part[name] = config.get(name)
    family = part.get("model_type")
    wanted: list[tuple[str, ...]] = [("num_key_value_heads", "kv_lora_rank")]
    if family not in _PLAIN | _LATENT:
        wanted += [("head_dim",), ("sliding_window", "layer_types")]
    for names in wanted:
        if not any(name in part for name in names):
            raise LayoutError(
                f"{inner[0]} of model_type={family!r} has no {' or '.join(names)}: it leaves out what equals its "
                "family's defaults, which are not known here"
            )
    return part


def _refuse_unknown(config: Config) -> None:
    for name, value in config.items():
        if value and name not in _KNOWN and _SPEAKS.search(name) and not _OTHER.search(name):
            shown = repr(value)
            raise LayoutError(
                f"{name}={shown if len(shown) < 60 else shown[:57] + '...'} (model_type={config.get('model_type')!r}) "
                "speaks of a cache that is not understood here: build the KVGeometry by hand"
            )


def _number(config: Config, *names: str) -> int | None:
    """The first of these fields that is set.

    Raises:
        LayoutError: it is no positive integer, such as a list with a number for each layer.
    """
    for name in names:
        if (value := config.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise LayoutError(f"{name}={value!r} must be a positive integer")
            return value
    return None


def _needed(config: Config, *names: str) -> int:
    if (value := _number(config, *names)) is None:
        raise LayoutError(f"the config has none of {', '.join(names)} (model_type={config.get('model_type')!r})")
    return value


def _dtype(config: Config, given: str | None) -> str:
    name = given or config.get("dtype") or config.get("torch_dtype")
    if not isinstance(name, str):
        raise LayoutError("the config names no dtype: say what the cache holds")
    return name.removeprefix("torch.")


# ---- what a layer keeps


def _heads(config: Config) -> tuple[int, int]:
    """KV heads of the model, and elements of a head."""
    queries = _needed(config, *_HEADS)
    if config.get("model_type") == "falcon":
        one = bool(config.get("multi_query", True)) and not config.get("new_decoder_architecture")
        heads = 1 if one else _number(config, "num_kv_heads") or queries
    elif config.get("model_type") == "gpt_bigcode":
        heads = 1 if config.get("multi_query", True) else queries
    elif config.get("multi_query") or config.get("num_kv_heads"):
        raise LayoutError(f"multi_query and num_kv_heads are known of other families than {config.get('model_type')!r}")
    else:
        heads = _number(config, "num_key_value_heads") or queries
    head_dim = _number(config, "head_dim")
    if head_dim is None:
        width = _needed(config, *_WIDTH)
        if width % queries:
            raise LayoutError(f"{queries} attention heads do not divide the width {width}, and head_dim is not given")
        head_dim = width // queries
    if config.get("v_head_dim") not in (None, head_dim):
        raise LayoutError(
            f"keys of {head_dim} and values of v_head_dim={config['v_head_dim']} elements: a layer's planes must be of "
            "one size"
        )
    return heads, head_dim


def _latent(config: Config, kinds: Sequence[int | None], dtype: str, tokens: int, indexer: int | None) -> KVGeometry:
    """Multi-head latent attention: one latent for all heads, and perhaps an indexer's keys."""
    family = config.get("model_type")
    rank = _needed(config, "kv_lora_rank")
    if family not in _LATENT:
        raise LayoutError(
            f"kv_lora_rank={rank} in a config of model_type={family!r}: whether its servers keep the "
            f"latent is known of {', '.join(sorted(_LATENT))}"
        )
    if any(window is not None for window in kinds):
        raise LayoutError("a latent with a sliding window is not understood here")
    extra = 0
    if (dim := _number(config, "index_head_dim")) is not None:
        if set(config.get("indexer_types") or ["full"]) != {"full"}:
            raise LayoutError(
                "indexer_types: some layers share another's indexer, and servers differ in whether those keep keys: "
                "build the KVGeometry by hand, with extra_bytes for each layer"
            )
        extra = dim + dim // 128 * 4 if indexer is None else indexer
    return KVGeometry(
        num_layers=len(kinds),
        num_kv_heads=1,
        head_dim=rank + _needed(config, "qk_rope_head_dim"),
        dtype=dtype,
        tokens_per_block=tokens,
        kind=Kind.MLA,
        extra_bytes=extra,
    )


def _layer_kinds(config: Config) -> list[int | None]:
    """For each layer that keeps a cache of its own its window, or None where it looks at all tokens."""
    count = _needed(config, *_LAYERS)
    types = config.get("layer_types")
    kinds = list(_windows(config, count)) if types is None else [_window_of(config, name) for name in types]
    if len(kinds) != count:
        raise LayoutError(f"layer_types names {len(kinds)} layers of {count}")
    if str(config.get("model_type")).startswith("gemma3n") and "num_kv_shared_layers" not in config:
        raise LayoutError(
            "the config has no num_kv_shared_layers: how many of the last layers keep nothing is not said"
        )
    shared = _number(config, "num_kv_shared_layers") if config.get("num_kv_shared_layers") else None
    if shared is None:
        return kinds
    if shared >= count:
        raise LayoutError(f"num_kv_shared_layers={shared} leaves none of {count} layers a cache")
    return kinds[: count - shared]


def _window_of(config: Config, layer_type: Any) -> int | None:
    if layer_type in ("full_attention", "indexed_attention"):
        return None
    if layer_type == "sliding_attention":
        return _needed(config, "sliding_window")
    raise LayoutError(
        f"layer_types has a layer of {layer_type!r}: full_attention and sliding_attention are understood (for a "
        "state-space layer's pages see KVGeometry.opaque)"
    )


def _windows(config: Config, count: int) -> Iterator[int | None]:
    """The windows of layers whose types are not listed."""
    family = config.get("model_type")
    pattern = _number(config, "sliding_window_pattern", "_sliding_window_pattern")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        yield from [None] * count
    elif config.get("use_sliding_window"):
        first = config.get("max_window_layers", count)
        if type(first) is not int:
            raise LayoutError(f"max_window_layers={first!r} must be an integer")
        window = _needed(config, "sliding_window")
        yield from (window if layer >= first else None for layer in range(count))
    elif family in _ALL_SLIDE and pattern is None:
        yield from [_needed(config, "sliding_window")] * count
    elif nth := pattern or _EACH_NTH_FULL.get(str(family)):
        window = _needed(config, "sliding_window")
        yield from (None if (layer + 1) % nth == 0 else window for layer in range(count))
    else:
        raise LayoutError(
            f"sliding_window={config['sliding_window']} without layer_types: which layers of a {family!r} have it is "
            "not known here"
        )
