"""vLLM's API server with the tier, as its users see it: over HTTP, in /metrics, in KV events, when it is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.metrics import Kind
from kvxfer.observe import SERIES
from tests.integrations.engines import ENVIRONMENT, KEYS, ROW_BYTES, TIER, WHOLE, environment, tiering

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

START_S = 400  # 40 on a quiet machine
CAPACITY = 120 * ROW_BYTES  # some more than a hundred chunks
ARGUMENTS = (
    "--served-model-name tiny --dtype float32 --block-size 32 --enforce-eager --skip-tokenizer-init --host 127.0.0.1 "
    "--num-gpu-blocks-override 40 --max-model-len 1024 --enable-prefix-caching --enable-prompt-tokens-details "
    "--shutdown-timeout 10"
).split()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One API server, and all that it starts, in a session of its own."""

    def __init__(self, where: Path, model: Path, log: Path, events_to: str, **keys: Any) -> None:
        self.url, self.log = f"http://127.0.0.1:{free_port()}", log
        transfer = tiering(TIER | KEYS | {"capacity_bytes": CAPACITY, "enable_kv_events": True} | keys)
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events_to, "topic": "kv"}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *ARGUMENTS]
        command += ["--port", self.url.rpartition(":")[2]]
        command += ["--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(events)]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                cwd=where,
                env=environment(where) | ENVIRONMENT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-6000:])

    def get(self, path: str, body: Any = None) -> str:
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(answer.read().decode())

    def complete(self, seed: int) -> tuple[list[int], int]:
        """The output for the prompt that a Child's `run` has with this seed, and how much of it was cached."""
        prompt = np.random.default_rng(seed).integers(3, 512, 400).tolist()
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        answer = json.loads(self.get("/v1/completions", asked | {"return_token_ids": True}))
        details = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["token_ids"], (details or {}).get("cached_tokens") or 0

    def scrape(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Samples by name and values of labels (in the order of their names), those that vLLM adds taken off."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if match := re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line):
                labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")
                values = tuple(value for name, value in sorted(labels) if name not in ("engine", "model_name"))
                found[match[1], values] = float(match[3])
        return found

    def settled(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """A scrape when no job is open any more."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.5)
            if not (found := self.scrape())["vllm:kvxfer_open_jobs", ()]:
                return found
        raise AssertionError("jobs stay open")

    def processes(self) -> list[int]:
        """All that are left of its session."""
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                except OSError:
                    continue
                if int(session) == self.process.pid and state != "Z":
                    alive.append(int(entry.name))
        return alive

    def shared_files(self) -> set[Path]:
        """vLLM's files for rows that its processes have mapped."""
        files: set[Path] = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                files.update(
                    map(Path, re.findall(r"(/dev/shm/vllm_offload_\S+)", Path(f"/proc/{pid}/maps").read_text()))
                )
        return files

    def kill(self) -> None:
        """Whatever is left: gently first, or vLLM's shared memory stays behind."""
        files = self.shared_files()
        for sign, patience in ((signal.SIGTERM, 60), (signal.SIGKILL, 30)):
            deadline = time.monotonic() + patience
            if self.processes():
                os.killpg(self.process.pid, sign)
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.2)
                self.process.poll()
        for path in files:
            path.unlink(missing_ok=True)


class Events:
    """KV events of storage, as they were published. It listens all the time: an idle socket subscribes to nothing."""

    def __init__(self) -> None:
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # The end that is bound: vLLM's connects, but to an address with a star in it.
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        import msgspec

        while not self._ended.is_set():
            if self._socket.poll(200):
                _, _, payload = self._socket.recv_multipart()
                for event in msgspec.msgpack.decode(payload)[1]:
                    if event.get("medium") == "STORAGE":
                        (self.stored if event["type"] == "BlockStored" else self.removed).extend(event["block_hashes"])
        self._socket.close(linger=0)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(30)


@pytest.fixture
def events() -> Iterator[Events]:
    events = Events()
    yield events
    events.close()


@pytest.fixture
def server(where: Path, model: Path, tmp_path: Path, events: Events) -> Iterator[Server]:
    server = Server(where, model, tmp_path / "log", events.endpoint, root_dir=str(tmp_path / "root"))
    try:
        yield server
    finally:
        server.kill()


def total(metrics: dict[tuple[str, tuple[str, ...]], float], name: str) -> float:
    """Over all labels."""
    return sum(value for (found, _), value in metrics.items() if found == name)


def test_what_an_operator_sees(server: Server, events: Events, plain: list[int]) -> None:
    server.wait()
    before = server.scrape()
    for series in SERIES:
        for labels in series.label_values:
            values = tuple(value for _, value in sorted(zip(dict(series.labels), labels, strict=True)))
            name = f"vllm:{series.name}"
            names = [name] if series.kind is not Kind.HISTOGRAM else [f"{name}_count", f"{name}_sum"]
            for each in names:
                assert (each, values) in before, "a series is not there before the first request"
                assert series.kind is Kind.GAUGE or before[each, values] == 0, each
    assert server.complete(0) == (plain, 0)
    for seed in range(101, 106):  # more than the device has blocks, and the host rows
        server.complete(seed)
    cold = server.settled()
    assert cold["vllm:kvxfer_entries", ()] == 6 * 12
    assert server.complete(0) == (plain, WHOLE)
    check_a_hit(cold, server.settled())
    for seed in range(106, 112):  # more than the root holds
        server.complete(seed)
    full = server.settled()
    stored, evicted = total(full, "vllm:kvxfer_store_chunks_total"), total(full, "vllm:kvxfer_evicted_chunks_total")
    deadline = time.monotonic() + 60  # they are published by a thread of their own
    while (len(events.stored) < stored or len(events.removed) < evicted) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert stored == full["vllm:kvxfer_store_chunks_total", ("stored",)] == 12 * 12
    assert evicted > 0 and full["vllm:kvxfer_entries", ()] == stored - evicted
    assert len(events.stored) == len(set(events.stored)) == stored
    assert len(events.removed) == evicted and set(events.removed) < set(events.stored)

    files = server.shared_files()
    assert files and len(server.processes()) > 1
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(120)
    deadline = time.monotonic() + 30
    while server.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.processes() == []
    assert [path for path in files if path.exists()] == []


def check_a_hit(cold: dict[tuple[str, tuple[str, ...]], float], hit: dict[tuple[str, tuple[str, ...]], float]) -> None:
    """One prompt of 12 chunks came from the drive between two scrapes, and everybody counts it so."""

    def grew(name: str, *labels: str) -> float:
        return hit[name, labels] - cold[name, labels]

    assert grew("vllm:external_prefix_cache_hits_total") == WHOLE
    if ("vllm:prompt_tokens_cached_by_source_total", ("disk",)) in hit:  # 0.28 does not say the source
        assert grew("vllm:prompt_tokens_cached_by_source_total", "disk") == WHOLE
        assert grew("vllm:prompt_tokens_cached_by_source_total", "device") == 0
    assert grew("vllm:kvxfer_lookup_hit_keys_total") >= 12
    assert grew("vllm:kvxfer_load_chunks_total", "hit") == 12
    assert total(hit, "vllm:kvxfer_load_chunks_total") - total(cold, "vllm:kvxfer_load_chunks_total") == 12
    for name in ("load_bytes_total", "load_seconds_count"):
        gained = total(hit, f"vllm:kvxfer_{name}") - total(cold, f"vllm:kvxfer_{name}")
        assert gained == (12 * ROW_BYTES if name == "load_bytes_total" else 1), name
    assert grew("vllm:kvxfer_verified_segments_total") >= 12
    assert grew("vllm:kvxfer_store_chunks_total", "stored") == 0
