"""Starts processes with the real vLLM engine in them (engine_child.py), and has the configurations they start with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROW_BYTES = 2 * 4 * 4 * 32 * 32 * 4  # of the tiny model: K and V, layers, heads, head_dim, tokens, float32
HOST_CHUNKS = 14  # at least one whole prompt
TIER = {"type": "KvxferTier", "module_path": "kvxfer.integrations.vllm_tier"}
KEYS = {"capacity_bytes": 256 << 20, "io_threads": 2}
WHOLE = 12 * 32  # tokens of the prompt's full blocks


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


def with_tier(model: Path, **keys: Any) -> dict[str, Any]:
    """A setup for engine_child: KvxferTier alone, with these keys over KEYS."""
    child = "tests.integrations.engine_child:TierChild"
    return {"model": str(model), "transfer": tiering(TIER | KEYS | keys), "child": child}


def run_engine(where: Path, setup: dict[str, Any], *steps: Any, timeout: float = 500) -> list[dict[str, Any]]:
    """What each step gave, in a process of its own. `where`: the folder that has `tests`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.engine_child", json.dumps(setup), json.dumps(steps)],
        cwd=where,
        env=environment(where),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and len(lines) == len(steps) + 1, done.stdout[-3000:] + done.stderr[-6000:]
    results = [json.loads(line) for line in lines]
    assert "site-packages" in results[-1]["kvxfer"]
    assert not results[-1]["left"]  # vLLM could unmap its memory
    return results[:-1]


def environment(where: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(where), "PYTHONHASHSEED": "0"}  # 0.28 hashes blocks with it
