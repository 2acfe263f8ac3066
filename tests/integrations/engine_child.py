"""A process with vLLM's engine in it: runs the steps it is given, and prints what came of each as a line of JSON.

    python -m tests.integrations.engine_child MODEL '{"root_dir": ...}' '[["run"], ["damage", "zero", [5]], ...]'

The tier's keys may be null: no offloading.

Steps: run (the prompt), fill (other prompts, until neither the device nor the host tier has a block of it), damage HOW
NUMBERS (of the prompt's chunks, on disk), hang (one read does not return), release (it does), metrics.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import numpy as np
from vllm import LLM, SamplingParams

import kvxfer
from kvxfer.testing import FaultyIO

HOST_CHUNKS = 14  # at least one whole prompt
PROMPT_TOKENS = 400  # 12 full blocks of 32, and some
ROW_BYTES = 2 * 4 * 4 * 32 * 32 * 4  # K and V, layers, heads, head_dim, tokens, float32


def prompt(seed: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": np.random.default_rng(seed).integers(3, 512, PROMPT_TOKENS).tolist()}


class Child:
    """One engine, with the tier or without."""

    def __init__(self, model: str, keys: dict[str, Any] | None) -> None:
        transfer = None
        if keys is not None:
            transfer = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "CpuTieringSpec",
                    "spec_module_path": "tests.integrations.cpu_spec",
                    "cpu_bytes_to_use": HOST_CHUNKS * ROW_BYTES,
                    "secondary_tiers": [
                        {"type": "KvxferTier", "module_path": "kvxfer.integrations.vllm_tier"} | keys,
                    ],
                },
            }
        self.llm = LLM(
            model=model,
            dtype="float32",
            block_size=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            num_gpu_blocks_override=40,
            max_model_len=1024,
            enable_prefix_caching=True,
            disable_log_stats=False,
            distributed_executor_backend="uni",
            kv_transfer_config=transfer,
        )
        self.fillers = 100
        self.chain: list[bytes] = []  # the prompt's keys, in order
        self.tier: Any = None
        if keys is not None:
            core = self.llm.llm_engine.engine_core.engine_core
            self.manager = core.scheduler.connector.connector_scheduler.manager
            (self.tier,) = self.manager.secondary_tiers
            assert self.tier._primary_kv_view.shape == (HOST_CHUNKS, ROW_BYTES)
            self._submit, self.tier.submit_load = self.tier.submit_load, self.submit_load

    def submit_load(self, job: Any) -> None:
        """Listens: the first whole load has the chain."""
        if len(job.keys) == 12 and not self.chain:
            self.chain = list(job.keys)
        self._submit(job)

    def run(self, seed: int = 0) -> dict[str, Any]:
        started = time.perf_counter()
        (output,) = self.llm.generate(
            [prompt(seed)],
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return {
            "ids": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def fill(self) -> dict[str, Any]:
        """Twice as many other blocks as the device and the host tier have; every store of theirs goes to the tier."""
        for _ in range(7):
            self.fillers += 1
            self.run(self.fillers)
        self.tier.drain_jobs()
        return {"entries": self.tier._store.stats().entries}

    def damage(self, how: str, numbers: list[int]) -> dict[str, Any]:
        store, digest = self.tier._store, self.tier._engine.digest
        for number in numbers:
            path, offset, layout = store.locate(digest, self.chain[number])
            with path.open("r+b") as file:
                old = os.pread(file.fileno(), layout.slot_bytes, offset)
                at = ROW_BYTES // 2
                new = bytes(ROW_BYTES) if how == "zero" else old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]
                os.pwrite(file.fileno(), new, offset)
                os.fsync(file.fileno())
        return {}

    def hang(self) -> dict[str, Any]:
        FaultyIO().hang("pread", after=3, times=1)
        return {}

    def release(self) -> dict[str, Any]:
        FaultyIO().__exit__(None, None, None)
        return {}

    def metrics(self) -> dict[str, Any]:
        time.sleep(0.5)
        self.run(99)  # vLLM is told with its steps, and not with each
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:kvxfer_") and hasattr(metric, "value"):
                labels = ",".join(v for k, v in sorted(metric.labels.items()) if k not in ("model_name", "engine"))
                found[f"{metric.name}{{{labels}}}"] = metric.value
        return found

    def shutdown(self) -> dict[str, Any]:
        region = self.manager.primary_tier._mmap_region.mmap_path if self.tier else ""
        self.llm.llm_engine.engine_core.shutdown()
        return {"kvxfer": str(kvxfer.__file__), "left": os.path.exists(region)}


def main() -> None:
    model, keys, steps = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    child = Child(model, keys)
    for name, *arguments in [*steps, ["shutdown"]]:
        print("RESULT", json.dumps(getattr(child, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
