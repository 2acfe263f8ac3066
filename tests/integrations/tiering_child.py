"""engine_child's process with KvxferTieringSpec, or another spec of its kind, whatever tiers are below it.

Steps beside Child's: worker (which class moves the rows; of an engine in one process), moved (bytes that it moved, and
requests that were preempted, as vLLM counts them).
"""

from __future__ import annotations

from typing import Any

from tests.integrations.parallel_child import TiersChild


class TieringChild(TiersChild):
    """With the tiering spec."""

    def worker(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker.worker
        return {"worker": f"{type(worker).__module__}.{type(worker).__name__}"}

    def moved(self) -> dict[str, Any]:
        self.run(99)  # vLLM is told with its steps
        names = {"load": "kv_offload_load_bytes", "store": "kv_offload_store_bytes", "preempted": "num_preemptions"}
        found = self.llm.get_metrics()
        return {key: sum(m.value for m in found if m.name == f"vllm:{name}") for key, name in names.items()}
