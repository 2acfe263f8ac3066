"""Starts processes with the real vLLM engine in them (engine_child.py), and has the configurations they start with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROW_BYTES = 2 * 4 * 4 * 32 * 32 * 4  # of the tiny model: K and V, layers, heads, head_dim, tokens, float32
# Some prompts: rows whose chunks are on their way to a tier cannot be had; a prompt that gets no rows is not stored.
HOST_CHUNKS = 40
TIER = {"type": "KvxferTier", "module_path": "kvxfer.integrations.vllm_tier"}
KEYS = {"capacity_bytes": 256 << 20, "io_threads": 2}
WHOLE = 12 * 32  # tokens of the prompt's full blocks
SLOT_BYTES = ROW_BYTES + 4096
APART = {"slab_bytes": 4096 + SLOT_BYTES}  # every chunk has a file of its own
ENVIRONMENT = {  # of every process with an engine in it, before it imports vLLM
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def tiering(*tiers: dict[str, Any], chunks: int = HOST_CHUNKS, **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config as people paste it, with the spec swapped for one whose worker copies on a CPU."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.integrations.cpu_spec",
            "cpu_bytes_to_use": chunks * ROW_BYTES,
            "secondary_tiers": list(tiers),
        }
        | extra,
    }


def with_tier(
    model: Path, *, extra: dict[str, Any] | None = None, arguments: dict[str, Any] | None = None, **keys: Any
) -> dict[str, Any]:
    """A setup for engine_child: KvxferTier alone, with these keys over KEYS.

    `extra`: over the connector's configuration, but `chunks` for those of the host tier. `arguments`: for vllm.LLM.
    """
    child = "tests.integrations.engine_child:TierChild"
    transfer = tiering(TIER | KEYS | keys, **(extra or {}))
    return {"model": str(model), "transfer": transfer, "child": child, "arguments": arguments or {}}


def with_fs(model: Path, root: Path) -> dict[str, Any]:
    """The same with vLLM's own tier for file systems."""
    child = "tests.integrations.engine_child:FsChild"
    return {"model": str(model), "transfer": tiering({"type": "fs", "root_dir": str(root)}), "child": child}


def run_engine(where: Path, setup: dict[str, Any], *steps: Any, timeout: float = 500) -> list[dict[str, Any]]:
    """What each step gave, in a process of its own. `where`: the folder that has `tests`."""
    (results,) = run_engines(where, (setup, steps), timeout=timeout)
    return results


def run_engines(where: Path, *engines: tuple[dict[str, Any], Any], timeout: float = 500) -> list[list[dict[str, Any]]]:
    """Several at once, each (setup, steps) in a process of its own."""
    processes = [start(where, setup, *steps) for setup, steps in engines]
    try:
        with ThreadPoolExecutor() as pool:  # or one waits for another's pipe to be read
            outputs = list(pool.map(lambda process: process.communicate(timeout=timeout), processes))
    finally:
        for process in processes:
            process.kill()
    found = []
    for process, (out, err), (_, steps) in zip(processes, outputs, engines, strict=True):
        results = results_in(out)
        assert process.returncode == 0 and len(results) == len(steps) + 1, out[-3000:] + err[-6000:]
        end = results.pop()
        assert "site-packages" in end["kvxfer"]
        assert not end["left"]  # vLLM could unmap its memory
        assert end.get("seconds", 0) < 60  # whatever hangs
        found.append(results)
    return found


def start(where: Path, setup: dict[str, Any], *steps: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.engine_child", json.dumps(setup), json.dumps(steps)],
        cwd=where,
        env=environment(where),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results_in(out: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("RESULT ")) for line in out.splitlines() if line.startswith("RESULT ")]


def environment(where: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(where), "PYTHONHASHSEED": "0"}  # 0.28 hashes blocks with it
