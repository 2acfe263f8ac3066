"""The configuration that people paste for KvxferConnector (docs/vllm.md), with what a test changes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODULE = "kvxfer.integrations.vllm_connector"
CHILD = "tests.integrations.connector_child:ConnectorChild"
KEYS = {"capacity_bytes": 256 << 20, "io_threads": 2}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def connector(
    root: Path, *, extra: dict[str, Any] | None = None, policy: str = "recompute", **keys: Any
) -> dict[str, Any]:
    """A kv_transfer_config."""
    return {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "spec_name": "KvxferOffloadingSpec",
            "spec_module_path": MODULE,
            "kvxfer": {"root_dir": str(root)} | KEYS | keys,
        }
        | (extra or {}),
    }


def with_connector(
    model: Path, root: Path, *, arguments: dict[str, Any] | None = None, **transfer: Any
) -> dict[str, Any]:
    """A setup for engine_child."""
    return {
        "model": str(model),
        "transfer": connector(root, **transfer),
        "child": CHILD,
        "arguments": arguments or {},
    }
