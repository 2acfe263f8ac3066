"""What engine_child.py needs with several ranks: any tiers under the tiering spec, and a worker for pipeline stages."""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.integrations.engine_child import Child


class TiersChild(Child):
    """With the tiering spec over whatever secondary tiers."""

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    def fill(self) -> dict[str, Any]:
        """Every store goes to every tier."""
        super().fill()
        for tier in self.manager.secondary_tiers:
            tier.drain_jobs()
        return {}

    def shutdown(self) -> dict[str, Any]:
        region = self.manager.primary_tier._mmap_region.mmap_path
        return super().shutdown() | {"left": region if os.path.exists(region) else ""}


class StageWorker(CPUWorker):
    """Without compilation vLLM's own makes no room for what comes from the stage before."""

    def compile_or_warm_up_model(self) -> Any:
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return super().compile_or_warm_up_model()
