"""`KvxferTieringSpec`: vLLM's TieringOffloadingSpec with kvxfer's converter as the worker, from configuration alone.

Rows are byte for byte what vLLM's own worker writes, direct and canonical, so tiers below them notice nothing. On the
CPU platform, which vLLM's own spec refuses, pages are copied by libkvx; on CUDA by a kernel, on streams beside the
model's. Where neither can be, vLLM's own worker does it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.integrations import vllm_compat as compat
from kvxfer.integrations.vllm_compat import TieringOffloadingSpec
from kvxfer.integrations.vllm_copier import RowCopier
from kvxfer.integrations.vllm_device_copier import open_device_copier
from kvxfer.integrations.vllm_engines import AUTO, ENGINES
from kvxfer.integrations.vllm_rows import make_plan, plan_parts
from kvxfer.integrations.vllm_tiering_worker import KvxferTieringWorker

__all__ = ["KvxferTieringSpec"]

COPY_THREADS = "kvxfer_copy_threads"
COPY_ENGINE = "kvxfer_copy_engine"
PROGRAMS = "kvxfer_programs"
_MOST_THREADS = 64
_MOST_PROGRAMS = 65535
_KEYS = (COPY_ENGINE, COPY_THREADS, PROGRAMS)
_log = logging.getLogger("kvxfer.vllm")


class KvxferTieringSpec(TieringOffloadingSpec):
    """As the stock one; docs/vllm.md has its keys.

    Raises:
        ConfigError: a key of kvxfer's is unknown or cannot work.
    """

    _worker: Any

    def __init__(self, config: Any) -> None:
        extra = config.extra_config
        if unknown := sorted(key for key in extra if key.startswith("kvxfer_") and key not in _KEYS):
            raise ConfigError(f"unknown keys {unknown}; KvxferTieringSpec's own are {list(_KEYS)}")
        self.copy_threads = _number(extra, COPY_THREADS, _MOST_THREADS) or 1
        self.programs = _number(extra, PROGRAMS, _MOST_PROGRAMS)
        self.copy_engine = extra.get(COPY_ENGINE, AUTO)
        if self.copy_engine not in ENGINES:
            raise ConfigError(f"{COPY_ENGINE}={self.copy_engine!r} must be one of {', '.join(ENGINES)}")
        super().__init__(config)

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker over these pages; made at the first call.

        Raises:
            ConfigError, LayoutError: what cannot work or be certified, and why.
            DeviceError: the device refuses what a converter needs.
        """
        if not self._worker:
            if _on_host(kv_caches) or not (why := _no_kernel(kv_caches)):
                self._worker = self.create_worker(kv_caches)
            else:
                _refuse_what_stock_gets_wrong(self)
                _say_stock(why)
                return super().get_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        """A worker over these pages: kvxfer's, or vLLM's own where kvxfer's cannot be."""
        on_host = _on_host(kv_caches)
        if not on_host and _no_kernel(kv_caches):
            return super().create_worker(kv_caches)
        _refuse_what_stock_gets_wrong(self)
        if compat.num_rows(self) < 1:
            raise ConfigError(
                f"cpu_bytes_to_use={self.extra_config.get('cpu_bytes_to_use')} holds no row of "
                f"{self.kv_bytes_per_chunk} bytes"
            )
        region = compat.open_region(self)
        try:
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            if not on_host and not compat.pin_region(region, canonical=self.config.canonical_layout):
                # A copy to or from such memory holds up who asks for it until it is done; vLLM's worker bears that.
                _say_stock("the rows' memory could not be registered with CUDA, so no kernel reaches it")
                return compat.stock_worker(self, kv_caches, region)
            return KvxferTieringWorker(self._copier(kv_caches, region, on_host), region, self.blocks_per_chunk)
        except BaseException:  # whatever it is, the region must not stay behind a worker that there is not
            region.cleanup()
            raise

    def _copier(self, kv_caches: Any, region: Any, on_host: bool) -> Any:
        how = {"canonical": self.config.canonical_layout, "lone_writer": compat.rank0_stores_alone(self)}
        if on_host:
            return RowCopier(make_plan(kv_caches, region, self.blocks_per_chunk, **how), threads=self.copy_threads)
        parts = plan_parts(kv_caches, region, self.blocks_per_chunk, **how)
        return open_device_copier(parts, how=self.copy_engine, programs=self.programs)


def _on_host(kv_caches: Any) -> bool:
    """Whether the pages are in host memory because the model runs there.

    Raises:
        ConfigError: they are there, or some of them, and it does not.
    """
    on_host = [each.tensor.device.type == "cpu" for each in kv_caches.tensors]
    if compat.is_cpu_platform() and all(on_host):
        return True
    if any(on_host):
        raise ConfigError("KvxferTieringSpec: some KV caches are in host memory on a device's platform (hisparse?)")
    return False


def _no_kernel(kv_caches: Any) -> str:
    """Why kvxfer has no converter for these pages, which are on a device; empty where it has."""
    kinds = sorted({each.tensor.device.type for each in kv_caches.tensors})
    if kinds != ["cuda"] or not compat.is_cuda_platform():
        return f"kvxfer has no converter for {compat.device_type()} pages"
    return "" if compat.has_triton() else "there is no triton to compile kvxfer's kernels"


def _say_stock(why: str) -> None:
    _log.warning("KvxferTieringSpec: %s: vLLM's own worker moves the pages, as under TieringOffloadingSpec", why)


def _refuse_what_stock_gets_wrong(spec: Any) -> None:
    """Raises ConfigError for what vLLM lets start, and whose rows are not what they are taken for.

    All workers call this: it asks rank 0.
    """
    if spec.config.parallel.pp_size > 1:
        mine = (spec.config.worker_kv_bytes_per_block, compat.num_rows(spec))
        if mine != (first := compat.told_by_rank0(mine)):
            raise ConfigError(
                f"pipeline stages of unequal layers: a block is {first[0]} bytes on rank 0 and {mine[0]} on rank "
                f"{spec.config.parallel.rank}, and vLLM lays out the rows that they share as if these were equal: "
                "split the model into stages of equally many layers"
            )
    if compat.has_hisparse(compat.served_vllm_config()):
        raise ConfigError("KvxferTieringSpec does not know hisparse's pages: use spec_name TieringOffloadingSpec")


def _number(extra: Mapping[str, Any], name: str, most: int) -> int | None:
    value = extra.get(name)
    if name in extra and (type(value) is not int or not 1 <= value <= most):
        raise ConfigError(f"{name}={value!r} must be a number from 1 to {most}")
    return value
