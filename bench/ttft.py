"""Time to first token in the real vLLM engine on a CPU: a prompt from the drive beside recomputing it.

Every implementation is an engine in a process of its own; they answer the same prompts in turns. The model is small, so
the times say how the implementations compare, not what a GPU would gain. Needs vLLM: `make bench-vllm`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from bench.options import Options
from bench.table import Impl, Table, measure

__all__ = ["run"]

PROMPTS = 6  # served in turn: when one comes again, the device and the host tier have none of it
HOST_PROMPTS = 3
CHILD = "bench.ttft_child"
ENVIRONMENT = {  # of an engine: not of the bench, whose other rows have the machine's threads
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Server:
    """A process with an engine."""

    def __init__(self, name: str, model: Path, transfer: dict[str, Any] | None) -> None:
        self.name = name
        setup = json.dumps({"model": str(model), "transfer": transfer})
        self._process = subprocess.Popen(
            [sys.executable, "-m", CHILD, setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env=os.environ | ENVIRONMENT,
        )

    def ready(self) -> None:
        """Waits until it can be asked."""
        self._line("READY")

    def ask(self, prompt: int) -> dict[str, Any]:
        """Serves a prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{prompt}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line("RESULT"))
        return answer

    def _line(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise OSError(f"the engine of {self.name} has ended with {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._process.communicate(timeout=60)  # its input ends, and so does it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


class Case:
    """One server's share of the rounds: the next prompt each time, and what it must answer."""

    def __init__(self, server: Server, cached: int, truth: dict[int, list[int]]) -> None:
        self._server, self._cached, self._truth, self._next = server, cached, truth, 0

    def run(self) -> str | None:
        """Serves the next prompt; what was wrong."""
        prompt, self._next = self._next % PROMPTS, self._next + 1
        answer = self._server.ask(prompt)
        if answer["ids"] != self._truth[prompt]:
            return f"prompt {prompt} got token {answer['ids']}, not {self._truth[prompt]}"
        if answer["cached"] != self._cached:
            return f"{answer['cached']} tokens of prompt {prompt} came from the cache, not {self._cached}"
        return None


def transfers(root: Path, host_bytes: int) -> dict[str, dict[str, Any]]:
    """The configurations, as an operator would paste them."""
    base: dict[str, Any] = {"kv_role": "kv_both"}
    tiering = base | {"kv_connector": "OffloadingConnector"}
    spec = {
        "spec_name": "KvxferTieringSpec",
        "spec_module_path": "kvxfer.integrations.vllm_tiering",
        "cpu_bytes_to_use": host_bytes,
    }
    fs = {"type": "fs", "root_dir": str(root / "fs")}
    tier = {
        "type": "KvxferTier",
        "module_path": "kvxfer.integrations.vllm_tier",
        "root_dir": str(root / "tier"),
        "capacity_bytes": 1 << 30,
    }
    connector = {"root_dir": str(root / "connector"), "capacity_bytes": 1 << 30}
    return {
        "fs": tiering | {"kv_connector_extra_config": spec | {"secondary_tiers": [fs]}},
        "KvxferTier": tiering | {"kv_connector_extra_config": spec | {"secondary_tiers": [tier]}},
        "KvxferConnector": base
        | {
            "kv_connector": "KvxferConnector",
            "kv_connector_module_path": "kvxfer.integrations.vllm_connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "KvxferOffloadingSpec",
                "spec_module_path": "kvxfer.integrations.vllm_connector",
                "kvxfer": connector,
            },
        },
    }


def run(table: Table, options: Options) -> None:
    """Adds the rows: one case for each directory."""
    if importlib.util.find_spec("vllm") is None:
        table.note("ttft: left out, vLLM is not installed here: make bench-vllm")
        return
    from bench.ttft_child import BLOCK, BLOCKS, ROW_BYTES, write_model

    table.note("ttft: a prompt whose blocks are on the drive only; each engine on one core, with a random model")
    for directory in options.dirs:
        with tempfile.TemporaryDirectory(prefix="kvxfer-bench-", dir=directory) as folder, ExitStack() as stack:
            root = Path(folder)
            write_model(root / "model")
            plans = transfers(root, HOST_PROMPTS * (BLOCKS + 2) * ROW_BYTES) | {"recompute": None}
            servers = {
                name: stack.enter_context(Server(name, root / "model", transfer)) for name, transfer in plans.items()
            }
            for server in servers.values():
                server.ready()
            truth = {prompt: servers["recompute"].ask(prompt)["ids"] for prompt in range(PROMPTS)}
            impls = []
            for name, server in servers.items():
                for prompt in [*range(PROMPTS)] * 2:  # stored while the next are served
                    server.ask(prompt)
                case = Case(server, 0 if name == "recompute" else BLOCKS * BLOCK, truth)
                bar = 1.0 if name.startswith("Kvxfer") else None
                impls.append(Impl(name=name, run=case.run, check=lambda: None, bar=bar))
            where = f"{BLOCKS} blocks of {ROW_BYTES >> 10} KiB, {directory}"
            table.add(measure(f"first token, {where}", impls, nbytes=BLOCKS * ROW_BYTES, runs=options.runs))
