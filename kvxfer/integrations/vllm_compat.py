"""What differs between vLLM 0.28 and 0.33 as far as kvxfer sees it: the only module that knows.

| what | 0.28 | 0.32, 0.33 |
| --- | --- | --- |
| rows of a job | `TransferJob.block_ids` | `chunk_ids` |
| back-pressure detector | none | an argument of the tier's constructor |
| bytes of a finished job | not told | `JobResult.transfer_bytes` |
| order of a page's axes | the process's `get_kv_cache_layout()` | `OffloadingConfig.kv_cache_layout` |
| name of the canonical row format | `canonical_format_id()` | `canonical_format_id(kv_cache_layout)` |
| which tier an event is from | not told | `OffloadingEvent.ownership`, `removal_expected` |
| rows of the primary tier | `spec.num_blocks` | `num_chunks` |
| names of `SharedOffloadRegion`'s arguments | `num_blocks`, `kv_bytes_per_block` | `num_chunks`, `kv_bytes_per_chunk` |
| replicated pages (MLA) in canonical rows | rank 0 alone is told to store | every rank is |
| a load that is waited for | not told | 0.33: `submit_load(..., expedited=)` |
| where cached tokens came from | not asked | `OffloadingManager.get_load_source` |
| sparse attention with pages in host memory | none | `AttentionConfig.hisparse_config` |
| the axes of a layer's pages on GPUs | `AttentionBackend.get_kv_cache_shape` | the same for all: `KVCacheSpec` |
| whose part of a direct row is which, on GPUs | by the index of its device | by its rank: kvxfer, always |
| registering rows with CUDA | in one piece | in pieces; 0.33: `pin_mmap_region(..., worker_slot_only=)` |

Each difference is found by looking at what is there, not at a version number.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ConfigError

try:
    import vllm
    from vllm import envs
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_offload.base import (
        LoadStoreSpec,
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        OffloadPolicy,
        PrepareStoreOutput,
        RequestOffloadingContext,
        TransferResult,
    )
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
except ImportError as exc:
    raise ImportError(f"kvxfer's adapters need vLLM 0.28 to 0.33: {exc}", name=exc.name, path=exc.path) from exc

__all__ = [
    "attention_backends",
    "FullAttentionSpec",
    "JobResult",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadPolicy",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "OffloadingWorkerMetadata",
    "PrepareStoreOutput",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "TieringOffloadingSpec",
    "TransferResult",
    "canonical_format",
    "cpu_kernel",
    "detector_argument",
    "device_type",
    "disk_source",
    "empty_histogram",
    "event",
    "has_hisparse",
    "has_triton",
    "is_cpu_platform",
    "is_cuda_platform",
    "job_result",
    "job_rows",
    "key_positions",
    "logical_page",
    "max_model_len",
    "num_rows",
    "open_region",
    "page_layout",
    "pin_region",
    "pipeline_partition",
    "rank0_stores_alone",
    "served_vllm_config",
    "stock_worker",
    "tell_cached",
    "told_by_rank0",
    "vllm_release",
]


def _fields(cls: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls))


_ROWS = next((name for name in ("chunk_ids", "block_ids") if name in _fields(TransferJob)), None)
if _ROWS is None:
    raise ImportError("kvxfer's adapters need vLLM 0.28 to 0.33: its TransferJob names neither chunk_ids nor block_ids")
_RESULT_FIELDS, _EVENT_FIELDS = _fields(JobResult), _fields(OffloadingEvent)
_TAKES_DETECTOR = "backpressure_detector" in inspect.signature(SecondaryTierManager.__init__).parameters


def job_rows(job: Any) -> NDArray[np.int64]:
    """The rows of the primary view that a TransferJob moves, one for each of its keys."""
    return np.asarray(getattr(job, str(_ROWS)), dtype=np.int64)


def key_positions(req_context: Any) -> Callable[[bytes], int | None] | None:
    """Where in the request a key ends, as vLLM knows it; None: this vLLM does not, and keys are in prefix order."""
    found: Callable[[bytes], int | None] | None = getattr(req_context, "get_offload_key_position", None)
    return found


def job_result(
    job_id: int, success: bool, successful_keys: Sequence[bytes] | None, seconds: float | None, nbytes: int | None
) -> Any:
    """A JobResult, with as much as this vLLM can be told."""
    told = {"transfer_time": seconds, "transfer_bytes": nbytes}
    return JobResult(
        job_id=job_id,
        success=success,
        successful_keys=successful_keys,
        **{name: value for name, value in told.items() if name in _RESULT_FIELDS},
    )


def event(keys: Sequence[bytes], *, removed: bool, owner: str, locality: Any) -> Any:
    """An OffloadingEvent of storage; a store promises that its removal will be told too."""
    told = {"ownership": owner, "removal_expected": not removed}
    return OffloadingEvent(
        keys=list(keys),
        medium=Medium.STORAGE,
        removed=removed,
        locality=locality,
        **{name: value for name, value in told.items() if name in _EVENT_FIELDS},
    )


def empty_histogram(stats: Any, name: str, labels: tuple[str, ...]) -> None:
    """Tells of a histogram in which nothing has been observed, so that /metrics has it.

    (The methods of vLLM's stats tell observations alone; this is what they make of them, with none.)
    """
    stats.aggregate(OffloadingConnectorStats(data={"types": {name: "histogram"}, "data": {name: {labels: []}}}))


def detector_argument(detector: Any) -> dict[str, Any]:
    """How SecondaryTierManager's constructor is given the detector that vLLM made, if it made one.

    From then on vLLM itself feeds it, with `JobResult.transfer_bytes` of each store that succeeded.
    """
    return {"backpressure_detector": detector} if _TAKES_DETECTOR else {}


def canonical_format(config: Any) -> str | None:
    """The name of the canonical rows' byte format, such as "v1-hnd"; None where rows are direct."""
    if not config.canonical_layout:
        return None
    if inspect.signature(canonical_format_id).parameters:
        return str(canonical_format_id(config.kv_cache_layout))
    try:
        return str(canonical_format_id())
    except AssertionError as exc:  # it asks for the process's configuration, which is not set everywhere
        raise ConfigError("vLLM does not say which layout canonical rows have: set VLLM_KV_CACHE_LAYOUT") from exc


def page_layout(config: Any) -> str | None:
    """The order of a page's axes, such as "LBHNC" (0.28: "HND"); None where vLLM does not say."""
    if hasattr(config, "kv_cache_layout"):
        return None if config.kv_cache_layout is None else str(config.kv_cache_layout)
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    try:
        return str(get_kv_cache_layout())
    except AssertionError:
        return None


def pipeline_partition() -> str | None:
    """How many layers each pipeline stage has, such as "3,1", where the operator has said it."""
    return None if envs.VLLM_PP_LAYER_PARTITION is None else str(envs.VLLM_PP_LAYER_PARTITION)


def max_model_len(config: Any) -> int | None:
    """The longest sequence that the server takes, of an OffloadingConfig; None where vLLM does not tell a tier."""
    return getattr(config.model, "max_model_len", 0) or None


def device_type() -> str:
    """The kind of device whose attention kernels lay out the pages: "cuda", "cpu", ..."""
    return str(current_platform.device_type)


def vllm_release() -> str:
    """Such as "0.32": direct rows have no format of their own that could be named."""
    return ".".join(str(vllm.__version__).split(".")[:2])


# ---- KvxferTieringSpec and its worker


def num_rows(spec: Any) -> int:
    """Rows of a TieringOffloadingSpec's primary tier."""
    return int(spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks)


def open_region(spec: Any) -> Any:
    """This rank's SharedOffloadRegion of a TieringOffloadingSpec's rows."""
    rank = 0 if spec.replicated_layout else spec.config.parallel.rank
    # By position: keywords differ. (engine_id, rows, rank, bytes of a row, bytes of a row's part that is the rank's)
    return SharedOffloadRegion(
        spec.config.engine_id, num_rows(spec), rank, spec.kv_bytes_per_chunk, spec.cpu_page_size_per_worker
    )


def rank0_stores_alone(spec: Any) -> bool:
    """Whether only rank 0 is told to store what every rank has, and so must write what others would have in turn."""
    return bool(spec.replicated_layout) and (_ROWS == "block_ids" or not spec.config.canonical_layout)


def is_cpu_platform() -> bool:
    """Whether vLLM runs its kernels on the CPU."""
    return bool(current_platform.is_cpu())


def is_cuda_platform() -> bool:
    """Whether vLLM runs its kernels on NVIDIA's GPUs. (On AMD's no kernel reaches registered host memory in place.)"""
    return bool(current_platform.is_cuda())


def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def pin_region(region: Any, *, canonical: bool) -> bool:
    """Registers rows with CUDA, by vLLM's own function, as its own worker does; the region's `cleanup` takes it back.

    Returns:
        Whether the device reaches them: what failed is in vLLM's log, and nothing is registered then.
    """
    from vllm.utils.torch_utils import PIN_MEMORY
    from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region

    if not PIN_MEMORY:
        return False
    slots = "worker_slot_only" in inspect.signature(pin_mmap_region).parameters
    pin_mmap_region(region, **({"worker_slot_only": not canonical} if slots else {}))
    return bool(region.is_pinned)


def stock_worker(spec: Any, kv_caches: Any, region: Any) -> Any:
    """vLLM's own worker over these pages and a region of which no view was taken yet: the worker's own from then on."""
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

    # By position: keywords differ.
    return CPUOffloadingWorker(kv_caches, spec.blocks_per_chunk, num_rows(spec), region, spec.config.canonical_layout)


def told_by_rank0(value: Any) -> Any:
    """`value` as rank 0 of this server's workers gave it. All of them must call this, and wait for it."""
    from vllm.distributed import parallel_state

    try:
        group = parallel_state.get_inner_dp_world_group()
    except AssertionError:
        group = parallel_state.get_world_group()
    return group.broadcast_object(value, src=0)


def has_hisparse(vllm_config: Any) -> bool:
    """Whether a server keeps some of its pages in host memory; `vllm_config` may be None, where nobody says."""
    attention = getattr(vllm_config, "attention_config", None)
    return getattr(attention, "hisparse_config", None) is not None


def served_vllm_config() -> Any:
    """vLLM's whole configuration where it says (in a worker, at start), else None."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


# ---- the connector: vllm_connector.py and its parts -----------------------------------------------------------------


def disk_source() -> Any:
    """What vLLM calls a hit that came from the drive; None where it does not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.DISK


def tell_cached(request: Any) -> None:
    """Corrects what vLLM will say of a request's cached tokens, once it knows that some were not loaded.

    It takes the number down before a load, from the lookup, and leaves it at that.
    """
    stats = request.prefill_stats
    if stats is not None and request.num_computed_tokens < stats.num_cached_tokens:
        local = min(stats.num_local_cached_tokens, request.num_computed_tokens)
        stats.set(stats.num_prompt_tokens, local, request.num_computed_tokens - local)


def cpu_kernel(dtype: Any, tokens_per_block: int, head_dim: int) -> str:
    """Which of vLLM's attention kernels for CPUs fills the pages here: each orders the elements of a key its own way.

    Raises:
        ConfigError: this vLLM does not say.
    """
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(dtype, tokens_per_block, head_dim))
    except (ImportError, TypeError) as exc:
        raise ConfigError(f"this vLLM does not say which kernel orders the pages' elements: {exc}") from exc


def attention_backends(vllm_config: Any, layers: Sequence[str]) -> dict[str, Any]:
    """The class of each layer's attention backend, in a worker that has its model; none of layers that it has not."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layers))
    return {name: layer.get_attn_backend() for name, layer in found.items()}


def logical_page(backend: Any, dtype: Any, blocks: int, heads: int, tokens: int, dim: int) -> tuple[int, ...]:
    """The shape of such a layer's tensor, in elements, whatever its strides: as the backend says, or, where backends
    are not asked any more, vLLM for all of them. `dtype`: torch's.
    """
    if hasattr(backend, "get_kv_cache_shape"):
        return tuple(map(int, backend.get_kv_cache_shape(blocks, tokens, heads, dim)))
    from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes

    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=dim, dtype=dtype)
    *axes, nbytes = map(int, compute_layer_kv_cache_shape_bytes(spec, blocks))
    return *axes, nbytes // int(dtype.itemsize)
