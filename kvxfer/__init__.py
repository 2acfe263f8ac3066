"""Transfer engine for sharded, paged KV caches: pages to NVMe and back under another sharding, as far as it got.

Names are looked up when they are used, so that `import kvxfer` stays light and loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvxfer.bitmap import CompletionBitmap
    from kvxfer.config import EngineConfig, StoreConfig, staging_plan
    from kvxfer.convert.native_rows import gather_rows, scatter_rows
    from kvxfer.convert.pages import KVPages
    from kvxfer.engine import TransferEngine, TransferResult
    from kvxfer.errors import (
        ConfigError,
        DeviceError,
        DeviceMemoryError,
        EngineClosed,
        ForkError,
        FormatError,
        IOFault,
        KvxferError,
        LayoutError,
        NativeError,
        StoreError,
    )
    from kvxfer.geometry import MODELS, PRESETS, Kind, KVGeometry, ShardSpec
    from kvxfer.hf_config import geometries_from_hf_config
    from kvxfer.jobs import ChunkError, Status
    from kvxfer.keys import Namespace, kvx1_namespace, make_offload_key, weights_fingerprint
    from kvxfer.layout import LAYOUTS, PageLayout, kvx1_mapping, kvx1_slot, row_mapping
    from kvxfer.nvml import GpuMonitor
    from kvxfer.observe import Metrics, render_metrics
    from kvxfer.opaque import opaque_mapping, opaque_namespace
    from kvxfer.policy import POLICIES, ARCPolicy, CachePolicy, LRUPolicy, S3FIFOPolicy, make_policy
    from kvxfer.prefix import (
        GroupHits,
        PrefixResult,
        full_attention,
        on_all_ranks,
        sliding_window,
        state_space,
        usable_prefix,
    )
    from kvxfer.rows import RowMapping, RowPage, row_pages, vllm_v1_mapping
    from kvxfer.slot import SlotLayout
    from kvxfer.store import Store

# Where each public name lives.
_HOMES = {
    "kvxfer.bitmap": ("CompletionBitmap",),
    "kvxfer.config": ("EngineConfig", "StoreConfig", "staging_plan"),
    "kvxfer.convert.pages": ("KVPages",),
    "kvxfer.engine": ("TransferEngine", "TransferResult"),
    "kvxfer.errors": (
        "ConfigError", "DeviceError", "DeviceMemoryError", "EngineClosed", "ForkError", "FormatError", "IOFault",
        "KvxferError", "LayoutError", "NativeError", "StoreError",
    ),
    "kvxfer.convert.native_rows": ("gather_rows", "scatter_rows"),
    "kvxfer.geometry": ("MODELS", "PRESETS", "KVGeometry", "Kind", "ShardSpec"),
    "kvxfer.hf_config": ("geometries_from_hf_config",),
    "kvxfer.jobs": ("ChunkError", "Status"),
    "kvxfer.keys": ("Namespace", "kvx1_namespace", "make_offload_key", "weights_fingerprint"),
    "kvxfer.layout": ("LAYOUTS", "PageLayout", "kvx1_mapping", "kvx1_slot", "row_mapping"),
    "kvxfer.nvml": ("GpuMonitor",),
    "kvxfer.observe": ("Metrics", "render_metrics"),
    "kvxfer.opaque": ("opaque_mapping", "opaque_namespace"),
    "kvxfer.policy": ("POLICIES", "ARCPolicy", "CachePolicy", "LRUPolicy", "S3FIFOPolicy", "make_policy"),
    "kvxfer.prefix": (
        "GroupHits", "PrefixResult", "full_attention", "on_all_ranks", "sliding_window", "state_space", "usable_prefix",
    ),
    "kvxfer.rows": ("RowMapping", "RowPage", "row_pages", "vllm_v1_mapping"),
    "kvxfer.slot": ("SlotLayout",),
    "kvxfer.store": ("Store",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ARCPolicy",
    "CachePolicy",
    "ChunkError",
    "CompletionBitmap",
    "ConfigError",
    "DeviceError",
    "DeviceMemoryError",
    "EngineClosed",
    "EngineConfig",
    "ForkError",
    "FormatError",
    "GpuMonitor",
    "GroupHits",
    "IOFault",
    "KVGeometry",
    "KVPages",
    "Kind",
    "KvxferError",
    "LAYOUTS",
    "LRUPolicy",
    "LayoutError",
    "MODELS",
    "Metrics",
    "Namespace",
    "NativeError",
    "POLICIES",
    "PRESETS",
    "PageLayout",
    "PrefixResult",
    "RowMapping",
    "RowPage",
    "S3FIFOPolicy",
    "ShardSpec",
    "SlotLayout",
    "Status",
    "Store",
    "StoreConfig",
    "StoreError",
    "TransferEngine",
    "TransferResult",
    "__version__",
    "full_attention",
    "gather_rows",
    "geometries_from_hf_config",
    "kvx1_mapping",
    "kvx1_namespace",
    "kvx1_slot",
    "make_offload_key",
    "make_policy",
    "on_all_ranks",
    "opaque_mapping",
    "opaque_namespace",
    "render_metrics",
    "row_mapping",
    "row_pages",
    "scatter_rows",
    "sliding_window",
    "staging_plan",
    "state_space",
    "usable_prefix",
    "vllm_v1_mapping",
    "weights_fingerprint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
