"""`KvxferTieringSpec`: vLLM's TieringOffloadingSpec with kvxfer's converter as the worker, from configuration alone.

Rows are byte for byte what vLLM's own worker writes, direct and canonical, so tiers below them notice nothing. On the
CPU platform, which vLLM's own spec refuses, pages are copied by libkvx. On devices the stock worker is used until
kvxfer has a converter there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.integrations import vllm_compat as compat
from kvxfer.integrations.vllm_compat import TieringOffloadingSpec
from kvxfer.integrations.vllm_rows import make_plan
from kvxfer.integrations.vllm_tiering_worker import KvxferTieringWorker

__all__ = ["KvxferTieringSpec"]

COPY_THREADS = "kvxfer_copy_threads"
_MOST_THREADS = 64
_log = logging.getLogger("kvxfer.vllm")


class KvxferTieringSpec(TieringOffloadingSpec):
    """As the stock one; docs/vllm.md has its keys.

    Raises:
        ConfigError: a key of kvxfer's is unknown or cannot work.
    """

    _worker: Any

    def __init__(self, config: Any) -> None:
        self.copy_threads = _copy_threads(config.extra_config)
        super().__init__(config)

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker over these pages; made at the first call.

        Raises:
            ConfigError, LayoutError: what cannot work or be certified, and why.
        """
        if not self._worker:
            if _on_host(kv_caches):
                self._worker = self.create_worker(kv_caches)
            else:
                _log.warning(
                    "KvxferTieringSpec has no converter for %s pages yet: vLLM's own worker moves them, as under "
                    "TieringOffloadingSpec",
                    compat.device_type(),
                )
                _refuse_what_stock_gets_wrong(self)
                return super().get_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        """A worker over these pages: kvxfer's where they are in host memory, else the stock one."""
        if not _on_host(kv_caches):
            return super().create_worker(kv_caches)
        _refuse_what_stock_gets_wrong(self)
        if compat.num_rows(self) < 1:
            raise ConfigError(
                f"cpu_bytes_to_use={self.extra_config.get('cpu_bytes_to_use')} holds no row of "
                f"{self.kv_bytes_per_chunk} bytes"
            )
        region = compat.open_region(self)
        try:
            canonical = self.config.canonical_layout
            if canonical:
                self._validate_canonical_refs(kv_caches)
            plan = make_plan(
                kv_caches,
                region,
                self.blocks_per_chunk,
                canonical=canonical,
                lone_writer=compat.rank0_stores_alone(self),
            )
            return KvxferTieringWorker(plan, region, threads=self.copy_threads)
        except BaseException:  # whatever it is, the region must not stay behind a worker that there is not
            region.cleanup()
            raise


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


def _copy_threads(extra: Mapping[str, Any]) -> int:
    unknown = sorted(key for key in extra if key.startswith("kvxfer_") and key != COPY_THREADS)
    if unknown:
        raise ConfigError(f"unknown keys {unknown}; KvxferTieringSpec's own are {[COPY_THREADS]}")
    threads = extra.get(COPY_THREADS, 1)
    if type(threads) is not int or not 1 <= threads <= _MOST_THREADS:
        raise ConfigError(f"{COPY_THREADS}={threads!r} must be a number from 1 to {_MOST_THREADS}")
    return threads
