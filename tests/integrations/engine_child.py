"""A process with vLLM's engine in it: runs the steps it is given, and prints what came of each as a line of JSON.

    python -m tests.integrations.engine_child '{"model": ..., "transfer": {...}, "arguments": {...}}' '[["run"], ...]'

`transfer` is vLLM's kv_transfer_config, or null; `arguments` go to `vllm.LLM` over those below; `child` names the class
whose methods are the steps ("module:Class"), which is `Child` here or one that knows more.

Steps: run [SEED [TOKENS [MORE]]] (a prompt, and MORE tokens computed after it), follow (the last run's prompt and
output, and more after it), many SEEDS [TOKENS [MORE]] (at once), fill (other prompts, until the device has no block of
it left), forget [CONNECTOR] (vLLM's prefix cache is reset, and the connector's), metrics, told (what vLLM counts as
cached, and what it answered), signal FILE, wait_for FILE. With KvxferTier (`TierChild`) also: places (of the prompt's
chunks), damage HOW NUMBERS (of these, on disk), hang (one read does not return), fault HOW OP [KEYWORDS] (any of
FaultyIO), release (all go on), counters, stats, drain, rows (vLLM's host memory).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.integrations.engines import ENVIRONMENT

os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

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
        self.cached = 0  # tokens, of all outputs so far
        self.last: list[int] = []

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def run(self, seed: int = 0, tokens: int = PROMPT_TOKENS, more: int = 8) -> dict[str, Any]:
        return self._run(prompt(seed, tokens)["prompt_token_ids"], more)

    def follow(self) -> dict[str, Any]:
        return self._run(self.last, 8)

    def _run(self, tokens: list[int], more: int) -> dict[str, Any]:
        started = time.perf_counter()
        (output,) = self._generate([{"prompt_token_ids": tokens}], more)
        self.last = [*tokens, *output.outputs[0].token_ids]
        return {
            "ids": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def many(self, seeds: list[int], tokens: int = PROMPT_TOKENS, more: int = 8) -> dict[str, Any]:
        outputs = self._generate([prompt(seed, tokens) for seed in seeds], more)
        return {
            "all": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def _generate(self, prompts: list[Any], more: int) -> list[Any]:
        how = SamplingParams(temperature=0.0, max_tokens=more, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate(prompts, how, use_tqdm=False)
        self.cached += sum(output.num_cached_tokens for output in outputs)
        return outputs

    def fill(self) -> dict[str, Any]:
        """Twice as many other blocks as the device has, or a host tier of HOST_CHUNKS rows."""
        for _ in range(7):
            self.fillers += 1
            self.run(self.fillers)
        return {}

    def forget(self, connector: bool = False) -> dict[str, Any]:
        how = {"reset_connector": True} if connector else {}
        return {"reset": bool(self.llm.reset_prefix_cache(**how))}

    def metrics(self) -> dict[str, Any]:
        time.sleep(0.5)
        self.run(99)  # vLLM is told with its steps, and not with each
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:kvxfer_") and hasattr(metric, "value"):
                labels = ",".join(v for k, v in sorted(metric.labels.items()) if k not in ("model_name", "engine"))
                found[f"{metric.name}{{{labels}}}"] = metric.value
        return found

    def told(self) -> dict[str, Any]:
        self.run(98, 40)  # vLLM counts a request's tokens with its steps
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:")
            if ("cache" in name or "preempt" in name) and hasattr(metric, "value"):
                found[name + metric.labels.get("source", "")] = metric.value
        return {"cached": self.cached, "vllm": found}

    def signal(self, path: str) -> dict[str, Any]:
        Path(path).touch()
        return {}

    def wait_for(self, path: str) -> dict[str, Any]:
        end = time.monotonic() + 300
        while not Path(path).exists():
            if time.monotonic() > end:
                raise TimeoutError(path)
            time.sleep(0.05)
        return {}

    def shutdown(self) -> dict[str, Any]:
        started = time.perf_counter()
        self.llm.llm_engine.engine_core.shutdown()
        seconds = round(time.perf_counter() - started, 2)
        return {"kvxfer": str(kvxfer.__file__), "left": "", "seconds": seconds}


class ListeningChild(Child):
    """With the tiering spec and one secondary tier: knows where this has prompt 0's chunks, and damages them."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.chain: list[bytes] = []  # prompt 0's keys, in order
        self.runs = -1  # which prompt
        self.stored: list[bytes] = []  # keys as they were handed over, in whatever order
        extra = (setup.get("transfer") or {}).get("kv_connector_extra_config", {})
        self.whole = 12 // extra.get("blocks_per_chunk", 1)  # chunks of a prompt
        self.manager = self.scheduler.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        self._load, self.tier.submit_load = self.tier.submit_load, self.submit_load
        self._store, self.tier.submit_store = self.tier.submit_store, self.submit_store

    def submit_load(self, job: Any) -> None:
        """Listens: prompt 0's first whole load has the chain."""
        if len(job.keys) == self.whole and not self.chain and not self.runs:
            self.chain = list(job.keys)
        self._load(job)

    def run(self, seed: int = 0, tokens: int = PROMPT_TOKENS, more: int = 8) -> dict[str, Any]:
        self.runs = seed
        result = super().run(seed, tokens, more)
        self.runs = -1
        return result

    def submit_store(self, job: Any) -> None:
        self.stored += job.keys
        self._store(job)

    def fill(self) -> dict[str, Any]:
        """Every store goes to the tier."""
        super().fill()
        self.tier.drain_jobs()
        return {}

    def place(self, key: bytes) -> tuple[Path, int, int]:
        """(file, offset, bytes) of what the tier has under a key."""
        raise NotImplementedError

    def places(self) -> dict[str, Any]:
        """Of the chain, which must have been loaded."""
        places = [self.place(key) for key in self.chain]
        return {"places": [(str(path), offset, size) for path, offset, size in places]}

    def damage(self, how: str, numbers: list[int]) -> dict[str, Any]:
        other = next(key for key in reversed(self.stored) if key not in self.chain) if how == "swap" else b""
        for number in numbers:
            path, offset, size = self.place(self.chain[number])
            if how == "delete":
                path.unlink()
            elif how == "truncate":
                os.truncate(path, offset + size // 2)
            else:
                old = _read((path, offset, size))
                # The highest bit of the exponent of a float32 below 2: with it, that is beyond 10^36, or no number.
                at = next(at for at in range(size // 2 + 3, len(old), 4) if not old[at] & 64)
                new = {
                    "zero": bytes(size),
                    "flip": old[:at] + bytes([old[at] ^ 64]) + old[at + 1 :],
                    "swap": _read(self.place(other)) if other else b"",
                }[how]
                _write((path, offset, size), new)
                if how == "swap":
                    _write(self.place(other), old)
        return {}

    def drain(self) -> dict[str, Any]:
        self.tier.drain_jobs()
        return {}

    def rows(self) -> dict[str, Any]:
        return {"path": str(self.manager.primary_tier._mmap_region.mmap_path)}

    def shutdown(self) -> dict[str, Any]:
        region = self.rows()["path"]
        return super().shutdown() | {"left": region if os.path.exists(region) else ""}


class FsChild(ListeningChild):
    """The tier is vLLM's own `fs`."""

    def place(self, key: bytes) -> tuple[Path, int, int]:
        path = Path(self.tier.file_mapper.get_file_name(key))
        return path, 0, path.stat().st_size

    def drop(self, numbers: list[int]) -> dict[str, Any]:
        """Files that are there are not written again."""
        for number in numbers:
            self.place(self.chain[number])[0].unlink()
        return {}


class TierChild(ListeningChild):
    """The tier is KvxferTier."""

    def fill(self) -> dict[str, Any]:
        super().fill()
        return {"entries": self.tier._store.stats().entries}

    def place(self, key: bytes) -> tuple[Path, int, int]:
        path, offset, _ = self.tier._store.locate(self.tier._engine.digest, key)
        return path, offset, self.tier._primary_kv_view.shape[1]

    def hang(self) -> dict[str, Any]:
        FaultyIO().hang("pread", after=3, times=1)
        return {}

    def fault(self, how: str, op: str, keywords: dict[str, Any]) -> dict[str, Any]:
        getattr(FaultyIO(), how)(op, **keywords)
        return {}

    def release(self) -> dict[str, Any]:
        FaultyIO().__exit__(None, None, None)
        return {}

    def counters(self) -> dict[str, Any]:
        """What loads and stores came to, and bytes read, at this moment."""
        metrics = self.tier._engine.metrics()
        loads = ("hit", "miss", "cut", "truncated", "bad_trailer", "foreign", "bad_sum", "io")
        stores = ("stored", "present", "no_space", "io", "dropped", "breaker")
        return {
            "load": {name: metrics.value("kvxfer_load_chunks_total", outcome=name) for name in loads},
            "store": {name: metrics.value("kvxfer_store_chunks_total", outcome=name) for name in stores},
            "read": metrics.value("kvxfer_device_read_bytes_total"),
        }

    def stats(self) -> dict[str, Any]:
        stats = self.tier._store.stats()
        evicted = sum(stats.evictions.values())
        return {
            "entries": stats.entries,
            "evicted": evicted,
            "epoch": stats.weight_epoch,
            "slab_errors": stats.slab_errors,
        }


def _read(place: tuple[Path, int, int]) -> bytes:
    path, offset, size = place
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)


def _write(place: tuple[Path, int, int], data: bytes) -> None:
    path, offset, _ = place
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, offset)
        os.fsync(file.fileno())


def main() -> None:
    setup, steps = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    module, _, name = setup.get("child", "tests.integrations.engine_child:Child").partition(":")
    child = getattr(importlib.import_module(module), name)(setup)
    for step, *arguments in [*steps, ["shutdown"]]:
        print("RESULT", json.dumps(getattr(child, step)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
