"""What vLLM's rows mean: the namespace of a tier; which weights. Knows vLLM's OffloadingConfig by its fields alone.

Rows that are *direct* are whatever the ranks' pages were, side by side in rank order, so their meaning hangs on the
exact topology, on the page layout and on the code that wrote them. (vLLM's `is_parallelism_agnostic` says otherwise of
some: with it, one rank reading what two have stored gets its bytes in the wrong order.) *Canonical* rows, where vLLM
says that all layers have them, do not depend on the topology.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer.errors import ConfigError, LayoutError
from kvxfer.hf_config import geometries_from_hf_config
from kvxfer.keys import Namespace, weights_fingerprint

PORTABLE_FORMS = ("v1-nhd", "v1-hnd")


def fingerprint_of(model: str, given: str | None, max_model_len: int | None = None) -> str:
    """Which weights.

    vLLM's offloading configuration has the model's name and no revision; so for anything but a local directory the
    operator must say it. Of a directory, config.json counts too: it changes what keys and values are; and with the rope
    factors called "longrope" so does the longest sequence that the server takes.

    Raises:
        ConfigError: it is not given and cannot be computed.
    """
    if given is not None:
        return given
    place = Path(model)
    if not place.is_dir():
        raise ConfigError(
            f"key weights_fingerprint is missing, and the model {model!r} is not a local directory that it could "
            "be computed from: give it, such as the revision of the weights; another value is another cache"
        )
    digest = hashlib.sha256(weights_fingerprint(place).encode())
    try:
        described = (place / "config.json").read_bytes()
        digest.update(described)
        if has_long_rope(json.loads(described)):
            if max_model_len is None:
                raise ConfigError(
                    f"weights_fingerprint is missing, and with this model's rope factors ({model!r}) keys hang on the "
                    "longest sequence, which this vLLM does not tell: give it, such as the revision and --max-model-len"
                )
            digest.update(f"max_model_len={max_model_len}".encode())
    except FileNotFoundError:
        digest.update(b"no config.json")
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read the model's configuration: {exc}") from exc
    return digest.hexdigest()


def check_stages(config: Any, *, partition: str | None, stated_equal: bool) -> None:
    """Refuses what would give wrong bytes under pipeline parallelism.

    Each rank finds its part of a row by the size of its own share, as if all shares were of that size: where stages
    differ, they write over one another's rows, before a tier sees them, and no checksum can tell. vLLM tells a tier of
    the first stage alone, so that stages are equal must be said; what can be known against it is looked at too.

    Args:
        config: vLLM's OffloadingConfig.
        partition: VLLM_PP_LAYER_PARTITION, where it is set.
        stated_equal: the tier key equal_pipeline_stages.

    Raises:
        ConfigError: stages differ, or nobody has said that they do not.
    """
    stages = config.parallel.pp_size
    if stages == 1:
        return
    whose = f"pipeline_parallel_size={stages}"
    if config.canonical_layout:
        raise ConfigError(f"{whose} with canonical_layout: vLLM's canonical rows are those of one stage; leave it out")
    if partition is not None and len({part.strip() for part in partition.split(",")}) > 1:
        raise ConfigError(
            f"{whose} with VLLM_PP_LAYER_PARTITION={partition!r}: vLLM's stages of different sizes write over one "
            "another's rows in host memory; give every stage as many layers, or leave the tier out"
        )
    first, model = len({name for group in config.groups for name in group.layer_names}), _layers(config.model.name)
    if model is not None and model != first * stages:
        raise ConfigError(
            f"{whose}: the first stage has {first} of the model's {model} layers; vLLM's stages of different sizes "
            "write over one another's rows in host memory; give every stage as many layers, or leave the tier out"
        )
    if not stated_equal:
        raise ConfigError(
            f"{whose}: vLLM's stages must be of one size, or they write over one another's rows in host memory, and it "
            "does not tell a tier whether they are. If every stage has as many layers of each kind, and none has a "
            "draft model's besides, set the tier key equal_pipeline_stages to true"
        )


def _layers(model: str) -> int | None:
    """How many layers of a model keep keys and values, where it is a local directory that says so."""
    try:
        return sum(each.num_layers for each in geometries_from_hf_config(model, tokens_per_block=1))
    except LayoutError:
        return None


def namespace_of(
    config: Any,
    *,
    row_bytes: int,
    weights: str,
    canonical_format: str | None,
    page_layout: str | None,
    device: str,
    release: str,
) -> Namespace:
    """The namespace of a primary tier's rows.

    Args:
        config: vLLM's OffloadingConfig.
        row_bytes: of one row of the primary view, padding included.
        weights: `fingerprint_of`.
        canonical_format: what vLLM calls the canonical rows' format; None: direct rows.
        page_layout: what vLLM calls the order of a page's axes.
        device: the kind of device that has the pages.
        release: vLLM's, such as "0.32".

    Raises:
        ConfigError: no KV group, or a field that cannot be.
    """
    groups = [
        {
            "tokens_per_block": group.tokens_per_block,
            "layer_names": list(group.layer_names),
            "group_id": getattr(group, "group_id", position),
        }
        for position, group in enumerate(config.groups)
    ]
    if not groups:
        raise ConfigError("vLLM's offloading configuration has no KV-cache group")
    parallel = config.parallel
    portable = canonical_format in PORTABLE_FORMS and bool(parallel.is_parallelism_agnostic)
    sizes = {name: getattr(parallel, f"{name}_size") for name in ("tp", "pp", "pcp", "dcp", "world")}
    extra: dict[str, Any] = {
        "server": "vllm",
        "device": device,
        "row_bytes": row_bytes,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "kv_cache_layout": page_layout,
        "replicated_layout": bool(config.replicated_layout),
    }
    if canonical_format is None:
        extra["release"] = release
        extra["worker_kv_bytes_per_block"] = config.worker_kv_bytes_per_block
    return Namespace(
        model=config.model.name,
        weights_fingerprint=weights,
        dtype=config.model.dtype,
        canonical_form=canonical_format or "vllm-direct",
        geometry=groups,
        blocks_per_chunk=1,  # a row is one block to kvxfer, whatever vLLM puts into it
        tokens_per_chunk=config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
        topology=None if portable else " ".join(f"{name}{size}" for name, size in sizes.items()),
        extra=extra,
    )


def has_long_rope(described: Any) -> bool:
    """Whether any part of a model's configuration asks for such factors, by either of their names."""
    if isinstance(described, Mapping):
        kinds = (described.get("rope_type"), described.get("type"))
        return any(kind in ("longrope", "su") for kind in kinds) or any(map(has_long_rope, described.values()))
    return isinstance(described, list | tuple) and any(map(has_long_rope, described))
