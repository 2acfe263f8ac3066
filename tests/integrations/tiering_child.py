"""engine_child's process with KvxferTieringSpec, whatever tiers are below it. Steps, besides those of `Child`:

together SEEDS (all prompts at once), fill (as Child's; then what every tier has under way is done), worker (what moves
the rows), loaded and stored (bytes and jobs of this server's workers so far).
"""

from __future__ import annotations

import os
from typing import Any

from vllm import SamplingParams

from tests.integrations.engine_child import Child, prompt


class TieringChild(Child):
    """With the tiering spec."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.manager = self.scheduler.connector.connector_scheduler.manager

    def together(self, seeds: list[int]) -> dict[str, Any]:
        outputs = self.llm.generate(
            [prompt(seed) for seed in seeds],
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return {
            "all": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def fill(self) -> dict[str, Any]:
        super().fill()
        for tier in self.manager.secondary_tiers:
            tier.drain_jobs()
        return {}

    def worker(self) -> dict[str, Any]:
        """Of an engine in one process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker.worker
        return {"module": type(worker).__module__, "name": type(worker).__name__}

    def moved(self) -> dict[str, Any]:
        """Bytes by direction, as vLLM counts what its worker says."""
        self.run(99)  # vLLM is told with its steps
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if "kv_offload" in metric.name and hasattr(metric, "value"):
                labels = ",".join(v for k, v in sorted(metric.labels.items()) if k not in ("model_name", "engine"))
                found[f"{metric.name}{{{labels}}}"] = metric.value
        return found

    def shutdown(self) -> dict[str, Any]:
        region = self.manager.primary_tier._mmap_region.mmap_path
        return super().shutdown() | {"left": region if os.path.exists(region) else ""}
