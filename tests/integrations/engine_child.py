"""A process with vLLM's engine in it: runs the steps it is given, and prints what came of each as a line of JSON.

    python -m tests.integrations.engine_child '{"model": ..., "transfer": {...}, "arguments": {...}}' '[["run"], ...]'

`transfer` is vLLM's kv_transfer_config, or null; `arguments` go to `vllm.LLM` over those below; `child` names the class
whose methods are the steps ("module:Class"), which is `Child` here or one that knows more.

Steps: run [SEED] (a prompt), fill (other prompts, until the device has no block of it left), forget (vLLM's prefix
cache is reset), metrics. With KvxferTier (`TierChild`) also: damage HOW NUMBERS (of the prompt's chunks, on disk), hang
(one read does not return), release (it does).
"""

from __future__ import annotations

import importlib
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

PROMPT_TOKENS = 400  # 12 full blocks of 32, and some
ARGUMENTS = {
    "dtype": "float32",
    "block_size": 32,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 40,
    "max_model_len": 1024,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "distributed_executor_backend": "uni",
}


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> dict[str, list[int]]:
    return {"prompt_token_ids": np.random.default_rng(seed).integers(3, 512, tokens).tolist()}


class Child:
    """One engine, in this process."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.llm = LLM(
            model=setup["model"], kv_transfer_config=setup.get("transfer"), **(ARGUMENTS | setup.get("arguments", {}))
        )
        self.fillers = 100

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

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
        """Twice as many other blocks as the device (and a host tier of 14 rows) has."""
        for _ in range(7):
            self.fillers += 1
            self.run(self.fillers)
        return {}

    def forget(self) -> dict[str, Any]:
        return {"reset": bool(self.llm.reset_prefix_cache())}

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
        self.llm.llm_engine.engine_core.shutdown()
        return {"kvxfer": str(kvxfer.__file__), "left": ""}


class TierChild(Child):
    """With the tiering spec and KvxferTier as its only secondary tier."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.chain: list[bytes] = []  # the prompt's keys, in order
        self.manager = self.scheduler.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        self._submit, self.tier.submit_load = self.tier.submit_load, self.submit_load

    def submit_load(self, job: Any) -> None:
        """Listens: the first whole load has the chain."""
        if len(job.keys) == 12 and not self.chain:
            self.chain = list(job.keys)
        self._submit(job)

    def fill(self) -> dict[str, Any]:
        """Every store goes to the tier."""
        super().fill()
        self.tier.drain_jobs()
        return {"entries": self.tier._store.stats().entries}

    def damage(self, how: str, numbers: list[int]) -> dict[str, Any]:
        store, digest = self.tier._store, self.tier._engine.digest
        for number in numbers:
            path, offset, layout = store.locate(digest, self.chain[number])
            with path.open("r+b") as file:
                old = os.pread(file.fileno(), layout.slot_bytes, offset)
                size = self.tier._primary_kv_view.shape[1]
                at = size // 2
                new = bytes(size) if how == "zero" else old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]
                os.pwrite(file.fileno(), new, offset)
                os.fsync(file.fileno())
        return {}

    def hang(self) -> dict[str, Any]:
        FaultyIO().hang("pread", after=3, times=1)
        return {}

    def release(self) -> dict[str, Any]:
        FaultyIO().__exit__(None, None, None)
        return {}

    def shutdown(self) -> dict[str, Any]:
        region = self.manager.primary_tier._mmap_region.mmap_path
        return super().shutdown() | {"left": region if os.path.exists(region) else ""}


def main() -> None:
    setup, steps = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    module, _, name = setup.get("child", "tests.integrations.engine_child:Child").partition(":")
    child = getattr(importlib.import_module(module), name)(setup)
    for step, *arguments in [*steps, ["shutdown"]]:
        print("RESULT", json.dumps(getattr(child, step)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
