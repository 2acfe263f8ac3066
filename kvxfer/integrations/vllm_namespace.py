"""What vLLM's rows mean: the namespace of a tier. Knows vLLM's OffloadingConfig by its fields, and imports nothing.

Rows that are *direct* are whatever the ranks' pages were, side by side in rank order, so their meaning hangs on the
exact topology, on the page layout and on the code that wrote them. (vLLM's `is_parallelism_agnostic` says otherwise of
some: with it, one rank reading what two have stored gets its bytes in the wrong order.) *Canonical* rows, where vLLM
says that all layers have them, do not depend on the topology.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.keys import Namespace, weights_fingerprint

PORTABLE_FORMS = ("v1-nhd", "v1-hnd")


def fingerprint_of(model: str, given: str | None) -> str:
    """Which weights.

    vLLM's offloading configuration has the model's name and no revision; so for anything but a local directory the
    operator must say it. Of a directory, config.json counts too: it changes what keys and values are.

    Raises:
        ConfigError: it is not given and cannot be computed.
    """
    if given is not None:
        return given
    place = Path(model)
    if not place.is_dir():
        raise ConfigError(
            f"tier key weights_fingerprint is missing, and the model {model!r} is not a local directory that it could "
            "be computed from: give it, such as the revision of the weights; another value is another cache"
        )
    digest = hashlib.sha256(weights_fingerprint(place).encode())
    try:
        digest.update((place / "config.json").read_bytes())
    except FileNotFoundError:
        digest.update(b"no config.json")
    except OSError as exc:
        raise ConfigError(f"cannot read the model's configuration: {exc}") from exc
    return digest.hexdigest()


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
