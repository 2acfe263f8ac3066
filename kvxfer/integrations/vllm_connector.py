"""`KvxferConnector` and `KvxferOffloadingSpec`: pages of vLLM's device <-> `kvx1` slots on a drive, with no host tier.

Chosen from configuration alone (docs/vllm.md). vLLM's own OffloadingConnector decides which chunks to load and store,
when, and into which blocks. The spec gives it a manager, which owns the store, and a worker for each rank, which moves
its own part of every chunk. What this connector adds is what a drive needs and host memory does not: chunks that do not
arrive go back to vLLM as invalid blocks and are recomputed, and the ranks' reports reach the manager before vLLM counts
its jobs as done.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

from kvxfer.errors import ConfigError, KvxferError, LayoutError
from kvxfer.integrations import vllm_compat as compat
from kvxfer.integrations.vllm_compat import (
    OffloadingConnector,
    OffloadingSpec,
    OffloadingWorkerMetadata,
)
from kvxfer.integrations.vllm_manager import KvxferManager
from kvxfer.integrations.vllm_metrics import definitions
from kvxfer.integrations.vllm_pages import pages_of
from kvxfer.integrations.vllm_rank import KvxferWorker
from kvxfer.integrations.vllm_setup import CONNECTOR, SPEC, refuse, setup_of
from kvxfer.ranks import Rank
from kvxfer.spread_ranks import SpreadRank
from kvxfer.tickets import Report

__all__ = ["KvxferConnector", "KvxferOffloadingSpec", "KvxferWorkerMetadata"]

IN_FLIGHT = 2  # steps that a scheduler may have given out before the first one's output is back

# vLLM makes the spec from its offloading configuration alone, inside of the connector's constructor.
_making: ContextVar[tuple[Any, Any] | None] = ContextVar("kvxfer_making", default=None)


@dataclass
class KvxferWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's word from a rank to the scheduler, and ours. Of several ranks, a chunk that failed on any has failed."""

    report: Report = field(default_factory=Report)

    @classmethod
    def of(cls, stock: Any, report: Report) -> KvxferWorkerMetadata:
        """Both together; `stock` may be None."""
        base = OffloadingWorkerMetadata() if stock is None else stock
        given = {each.name: getattr(base, each.name) for each in fields(OffloadingWorkerMetadata)}
        return cls(**given, report=report)

    def aggregate(self, other: Any) -> KvxferWorkerMetadata:
        """This and another rank's, of the same step."""
        report = Report()
        report.merge(self.report)
        report.merge(other.report)
        return KvxferWorkerMetadata.of(super().aggregate(other), report)


class KvxferOffloadingSpec(OffloadingSpec):
    """What vLLM's offloading needs of KvxferConnector, which makes it.

    Raises:
        ConfigError: another connector makes it, or this server cannot run with it; says what would help.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if (making := _making.get()) is None:
            raise ConfigError(
                f'{SPEC} works with its own connector: give kv_transfer_config "kv_connector": "{CONNECTOR}" and '
                '"kv_connector_module_path": "kvxfer.integrations.vllm_connector"'
            )
        self.setup = setup_of(config, *making)
        self.pages: Any = None  # of this rank, once vLLM has made its tensors
        self._manager: KvxferManager | None = None
        self._worker: KvxferWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """All kvxfer_* series, declared for vLLM's /metrics."""
        return definitions()

    def get_manager(self) -> KvxferManager:
        """The scheduler's half; opens the roots."""
        if self._manager is None:
            self._manager = KvxferManager(self.setup)
        return self._manager

    def get_worker(self, kv_caches: Any) -> KvxferWorker:
        """A rank's half."""
        if self._worker is None:
            if self.pages is None:
                raise LayoutError("vLLM asked for a worker without KvxferConnector.register_kv_caches")
            self._worker = KvxferWorker(self._rank(), self.setup.blocks_per_chunk)
        return self._worker

    def _rank(self) -> Rank | SpreadRank:
        """Over the one root, or one over each of several."""
        tier, number = self.setup.config.tier, self.setup.shard.tp_rank
        with ExitStack() as undo:
            ranks: list[Rank] = []
            for store in tier.stores:
                rank = Rank(store.root, self.pages, config=tier.engine, number=number, io=store.io, direct=store.direct)
                undo.callback(rank.shutdown)
                ranks.append(rank)
            undo.pop_all()
        return ranks[0] if len(ranks) == 1 else SpreadRank(ranks)


class KvxferConnector(OffloadingConnector):
    """vLLM's OffloadingConnector over slots on a drive. docs/vllm.md has its keys.

    Raises:
        ConfigError: a key is unknown, missing or cannot work, or this server cannot run with it.
        FormatError, StoreError, IOFault: a root cannot be opened; says why.
    """

    # 0.28 asks whether it may make one tensor of all layers: heads would not be certified in it.
    prefer_cross_layer_blocks = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        token = _making.set((vllm_config, kv_cache_config))
        try:
            refuse(vllm_config, kv_cache_config)
            super().__init__(vllm_config, role, kv_cache_config)
        except KvxferError as exc:
            exc.add_note(f"{CONNECTOR} cannot start")
            raise
        finally:
            _making.reset(token)
        self._steps: deque[tuple[float, int]] = deque(maxlen=IN_FLIGHT)  # begun, tokens
        self._stepped = 0.0
        self._requests: dict[str, Any] = {}

    # ---- a rank's side ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Any) -> None:
        """vLLM has made this rank's tensors.

        Raises:
            LayoutError: they are not laid out as was certified; says where.
            ConfigError: the attention backend is none that is certified, or there is no triton for kvxfer's kernels.
        """
        spec = self.connector_worker.spec
        backends = None
        if compat.is_cuda_platform():
            if not compat.has_triton():
                raise ConfigError(
                    f"{CONNECTOR} compiles its kernels with triton, which is not installed or has no driver"
                )
            backends = compat.attention_backends(self._vllm_config, spec.setup.layers)
        spec.pages = pages_of(spec.setup, kv_caches, backends)
        super().register_kv_caches(kv_caches)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were to be loaded and were not, of loads that ended in this pass."""
        worker = None if self.connector_worker is None else self.connector_worker.worker
        return set() if worker is None else worker.take_invalid()

    def build_connector_worker_meta(self) -> KvxferWorkerMetadata | None:
        """What this rank has to say to the scheduler, of the same pass."""
        stock = super().build_connector_worker_meta()
        worker = None if self.connector_worker is None else self.connector_worker.worker
        report = Report() if worker is None else worker.take_report()
        return KvxferWorkerMetadata.of(stock, report) if stock is not None or report else None

    # ---- the scheduler's side --------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request is there.

        One with an adapter is left alone: vLLM's hash has the adapter's name and path (0.28: its name, as it has a
        salt), and neither says which weights it has when its blocks are loaded, by whatever server, some day.
        """
        self._requests[request.request_id] = request
        super().on_new_request(request)
        if getattr(request, "lora_request", None) is not None:
            self.connector_scheduler.manager.leave_out(request.request_id)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """It is not any more."""
        self._requests.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """It is not any more."""
        self._requests.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """A step begins."""
        self._steps.append((time.monotonic(), int(scheduler_output.total_num_scheduled_tokens)))
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """A step has ended. The manager hears of it first: then vLLM may look up at once."""
        now = time.monotonic()
        if self._steps:
            began, tokens = self._steps.popleft()
            self.connector_scheduler.manager.pace.observe(tokens, now - max(began, self._stepped))
        self._stepped = now
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvxferWorkerMetadata):
            for name in self.connector_scheduler.manager.settle(meta.report):
                if (request := self._requests.get(name)) is not None:
                    compat.tell_cached(request)
        super().update_connector_output(connector_output)
