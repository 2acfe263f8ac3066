"""engine_child's process with KvxferTieringSpec, or another spec of its kind, whatever tiers are below it.

Steps, besides those of `Child`: together SEEDS [TOKENS [MORE]] (prompts at once, each so long, and so many tokens after
it), fill (as Child's; then what every tier has under way is done), worker (which class moves the rows; of an engine in
one process), moved (bytes that it moved, and requests that were preempted, as vLLM counts them).
"""

from __future__ import annotations

import os
from typing import Any

from vllm import SamplingParams

from tests.integrations.engine_child import PROMPT_TOKENS, Child, prompt


class TogetherChild(Child):
    """Prompts at once, with or without offloading."""

    def together(self, seeds: list[int], tokens: int = PROMPT_TOKENS, more: int = 8) -> dict[str, Any]:
        outputs = self.llm.generate(
            [prompt(seed, tokens) for seed in seeds],
            SamplingParams(temperature=0.0, max_tokens=more, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return {
            "all": [list(output.outputs[0].token_ids) for output in outputs],
            "hits": [output.num_cached_tokens for output in outputs],
        }


class TieringChild(TogetherChild):
    """With the tiering spec."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.manager = self.scheduler.connector.connector_scheduler.manager

    def fill(self) -> dict[str, Any]:
        super().fill()
        for tier in self.manager.secondary_tiers:
            tier.drain_jobs()
        return {}

    def worker(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker.worker
        return {"worker": f"{type(worker).__module__}.{type(worker).__name__}"}

    def moved(self) -> dict[str, Any]:
        self.run(99)  # vLLM is told with its steps
        names = {"load": "kv_offload_load_bytes", "store": "kv_offload_store_bytes", "preempted": "num_preemptions"}
        found = self.llm.get_metrics()
        return {key: sum(m.value for m in found if m.name == f"vllm:{name}") for key, name in names.items()}

    def shutdown(self) -> dict[str, Any]:
        region = self.manager.primary_tier._mmap_region.mmap_path
        return super().shutdown() | {"left": region if os.path.exists(region) else ""}
