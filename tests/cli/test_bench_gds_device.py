"""`kvxfer bench gds` with a device's memory: over doubles of the driver, of kvikio's backend and of the ladder.

A device's memory is the host's here, at addresses of its own. The doubles' signatures are those of the real modules.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer import probe
from kvxfer.cli import bench_job, bench_lanes, bench_ways
from kvxfer.cli.bench_files import PREFIX
from kvxfer.errors import ConfigError, DeviceError, DeviceMemoryError
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import sys_open
from kvxfer.nvml import Gpu, Gpus
from kvxfer.testing import FaultyIO
from kvxfer.topology import Link
from tests.cli.commands import json_of

M = 1 << 20
OPTIONS = "--span 8M --sizes 64K --depth 4 --limit 8M --repetitions 1 --duration 60".split()
INSIDE = (M, M + 1)


class LibCuda:
    """The driver: memory is numpy's, and what is freed is gone."""

    refuse: ClassVar[dict[str, Exception]] = {}  # by CudaMemory's call
    bus = "0000:3b:00.0"

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.pinned: set[int] = set()
        self.fetched = 0  # times that bytes came to where the host wants them
        cuda.append(self)


class CudaMemory:
    def __init__(self, cuda: LibCuda, ordinal: int = 0) -> None:
        self.cuda = cuda

    def alloc(self, nbytes: int) -> int:
        if "alloc" in self.cuda.refuse:
            raise self.cuda.refuse["alloc"]
        memory = np.full(nbytes, 0xDB, dtype=np.uint8)
        self.cuda.memory[int(memory.ctypes.data)] = memory
        return int(memory.ctypes.data)

    def fill(self, address: int, data: Any) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def fetch(self, address: int, nbytes: int) -> Any:
        return np.frombuffer(ctypes.string_at(address, nbytes), dtype=np.uint8)

    def fetch_into(self, address: int, data: Any) -> None:
        self.cuda.fetched += 1
        ctypes.memmove(data.ctypes.data, address, data.nbytes)

    def pin(self, data: Any) -> str:
        if not (refused := self.cuda.refuse.get("pin")):
            self.cuda.pinned.add(data.ctypes.data)
        return str(refused or "")

    def unpin(self, data: Any) -> None:
        self.cuda.pinned.remove(data.ctypes.data)

    def bus(self) -> str:
        if "bus" in self.cuda.refuse:
            raise self.cuda.refuse["bus"]
        return self.cuda.bus

    def free(self, address: int) -> None:
        del self.cuda.memory[address]


class Window:
    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


class GdsFile:
    def __init__(self, backend: GdsBackend, file: PosixFile) -> None:
        self._backend, self._file = backend, file

    def pread(self, buf: Any, size: int | None = None, file_offset: int = 0) -> Any:
        return self._future("read", buf, size, file_offset)

    def pwrite(self, buf: Any, size: int | None = None, file_offset: int = 0) -> Any:
        return self._future("write", buf, size, file_offset)

    def close(self) -> None:
        self._file.close()

    def _future(self, what: str, buf: Any, size: int | None, offset: int) -> Any:
        assert isinstance(buf, Window) and buf.address % 4096 == 0
        self._backend.requests.append((what, size))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * buf.nbytes).from_address(buf.address))
        moved = getattr(self._file, what)(array, size, offset)
        return SimpleNamespace(get=lambda: moved)


class GdsBackend:
    refuse = ""  # why memory is not registered
    lets_go = True  # of memory that is deregistered

    def __init__(
        self,
        mode: str = "direct",
        *,
        depth: int = 16,
        request_bytes: int = 16 << 20,
        io_timeout_s: float = float("inf"),
        max_lost: int = 8,
        cuda: Any = None,
    ) -> None:
        self.mode, self.depth, self.request_bytes = mode, depth, request_bytes
        self.registered: list[tuple[int, int]] = []
        self.deregistered: list[int] = []
        self.freed_before = False
        self.requests: list[tuple[str, int | None]] = []
        self.closed = False
        backends.append(self)

    def open(self, path: Path, *, direct: bool = True, create: bool = False) -> GdsFile:
        return GdsFile(self, PosixFile(sys_open(path, 2), path.name, False))

    def register(self, address: int, nbytes: int) -> str:
        self.registered.append((address, nbytes))
        return self.refuse

    def deregister(self, address: int) -> bool:
        self.deregistered.append(address)
        self.freed_before = not cuda[0].memory
        return self.lets_go

    def close(self) -> None:
        self.closed = True


backends: list[GdsBackend] = []
cuda: list[LibCuda] = []
kept_for_good: dict[int, Any] = {}
Rung = Callable[..., None]


@pytest.fixture
def rung(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts the doubles in place; what the ladder answers is said with a call."""
    monkeypatch.setattr(probe, "cuda", lambda *_: probe.Probe(True, "a device"))
    monkeypatch.setattr(bench_lanes, "EMPTY_S", 0.01)
    other = Gpu(index=0, bus="00000000:19:00.0", link=Link(1, 8), link_max=Link(4, 8))
    used = Gpu(index=1, bus="00000000:3B:00.0", link=Link(1, 16), link_max=Link(5, 16))
    monkeypatch.setattr(bench_job, "ask_gpus", lambda: Gpus((other, used), "580.1"))
    backends.clear()
    cuda.clear()

    def module(name: str, **what: Any) -> None:
        monkeypatch.setattr(bench_ways, name, SimpleNamespace(**what))

    module("libcuda", LibCuda=LibCuda, CudaMemory=CudaMemory)
    module("gds", GdsBackend=GdsBackend, Window=Window, DIRECT="direct", COMPAT="compat")

    def answer(name: str, *steps: str) -> None:
        def climb(
            directory: Path, memory: Any, *, want: str = "auto", timeout_s: float = 20.0, cuda: Any = None
        ) -> Any:
            wanted = {"gds": "direct", "compat": "compat"}.get(want, name)
            if wanted != name:
                raise ConfigError(f"gds={want!r} does not work in {directory}: {'; '.join(steps)}; use 'auto'")
            address = memory.alloc(4096)
            memory.free(address)
            return SimpleNamespace(name=name, steps=steps, request_bytes=8 << 20)

        module("ladder", climb=climb)

    answer("direct")
    yield answer
    assert list(tmp_path.glob(f"{PREFIX}*")) == []
    assert all(backend.closed for backend in backends)
    for driver in cuda:
        assert (driver.memory, driver.pinned) == ({}, set())


def test_the_doubles_have_the_signatures_of_what_they_stand_for() -> None:
    real = {name: importlib.import_module(f"kvxfer.io.{name}") for name in ("gds", "ladder", "libcuda")}

    def names(function: Any) -> list[tuple[str, Any]]:
        return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]

    for double, of in (
        (GdsBackend, real["gds"].GdsBackend),
        (GdsFile, real["gds"].GdsFile),
        (Window, real["gds"].Window),
        (CudaMemory, real["libcuda"].CudaMemory),
        (LibCuda, real["libcuda"].LibCuda),
    ):
        for name, function in vars(double).items():
            if callable(function) and (name == "__init__" or name[0] != "_") and double is not GdsFile:
                assert names(function) == names(getattr(of, name)), f"{of.__name__}.{name}"
    for name in ("pread", "pwrite", "close"):
        assert names(getattr(GdsFile, name)) == names(getattr(real["gds"].GdsFile, name))
    assert {"directory", "memory", "want", "timeout_s", "cuda"} <= set(
        inspect.signature(real["ladder"].climb).parameters
    )
    assert (real["gds"].DIRECT, real["gds"].COMPAT) == ("direct", "compat")
    assert {"name", "steps", "request_bytes"} <= set(dir(real["ladder"].Rung))


@pytest.mark.parametrize("operation", ["read", "write", "mixed"])
@pytest.mark.parametrize(("found", "mode"), [("direct", "gds"), ("compat", "compat")])
@pytest.mark.parametrize("asked", [True, False])
def test_kvikio_moves_the_devices_memory(
    tmp_path: Path, capsys: Any, rung: Rung, operation: str, found: str, mode: str, asked: bool
) -> None:
    rung(found, *([] if found == "direct" else ["direct off: no nvidia-fs"]))
    options = ["--mode", mode] if asked else []
    code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, "--operation", operation, *options)
    assert (code, report["mode"], report["memory"]) == (0, mode, "device"), report
    assert report["steps"] == ([] if found == "direct" else ["gds off: no nvidia-fs"])
    (row,) = report["rows"]
    assert (row["status"], row["errors"]) == ("ok", {})
    assert report["link"] == {"gbps": pytest.approx(63.0, rel=1e-3), "why": "PCIe 5 x16 of GPU 1"}
    assert row["link_percent"] > 0
    (backend,) = backends
    assert (backend.mode, backend.depth, backend.request_bytes) == (found, 4, 8 << 20)
    assert [address for address, _ in backend.registered] == backend.deregistered
    assert not backend.freed_before
    kinds = {what for what, size in backend.requests if size == 64 << 10}
    assert kinds == ({"read"} if operation == "read" else {"read", "write"})


def test_memory_that_is_not_registered_is_said(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GdsBackend, "refuse", "BAR1 is full")
    _, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS)
    assert "memory is not registered: BAR1 is full" in report["why"]


@pytest.mark.parametrize("mode", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("operation", ["read", "mixed"])
def test_a_devices_memory_through_the_hosts(tmp_path: Path, capsys: Any, rung: Rung, mode: str, operation: str) -> None:
    rung("host", "direct off: no nvidia-fs", "compat off: kvikio broke")
    arguments = ["--memory", "device", "--mode", mode, "--operation", operation]
    code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, *arguments)
    assert (code, report["memory"], report["rows"][0]["status"]) == (0, "device", "ok"), report
    assert report["mode"] in ({"auto": ("direct", "buffered")}.get(mode, (mode,)))
    assert "to the device and back through pinned memory" in report["why"]
    if mode == "auto":
        assert report["steps"][:2] == ["gds off: no nvidia-fs", "compat off: kvikio broke"]
    assert backends == []
    copies = cuda[0].fetched  # one to fill the file
    assert copies > 10 if operation == "mixed" else copies == 1


def test_memory_that_cannot_be_pinned_is_said(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LibCuda, "refuse", {"pin": DeviceError("the limit of locked memory")})
    arguments = ["--memory", "device", "--mode", "direct"]
    code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, *arguments)
    assert code == 0
    assert "memory that is not pinned: the limit of locked memory" in report["why"]


def test_auto_goes_to_the_hosts_memory_where_kvikio_does_not_work(tmp_path: Path, capsys: Any, rung: Rung) -> None:
    rung("host", "direct and compat off: kvikio is not installed")
    code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS)
    assert (code, report["memory"]) == (0, "host")
    assert report["steps"][0] == "gds and compat off: kvikio is not installed"


@pytest.mark.parametrize("mode", ["gds", "compat"])
def test_a_mode_that_does_not_hold_is_an_error(tmp_path: Path, capsys: Any, rung: Rung, mode: str) -> None:
    rung("host", "direct off: no nvidia-fs")
    code, said = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, "--mode", mode)
    assert (code, said["error"]["type"]) == (2, "ConfigError")
    assert said["error"]["message"].startswith(f"--mode {mode}: ")
    assert "no nvidia-fs" in said["error"]["message"]


def test_a_driver_that_refuses_is_a_reason(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise DeviceError("cuInit answers CUDA_ERROR_UNKNOWN (999)")

    monkeypatch.setattr(LibCuda, "__init__", refuse)
    code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS)
    assert (code, report["steps"][0]) == (0, "gds and compat: cuInit answers CUDA_ERROR_UNKNOWN (999)")
    code, said = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, "--memory", "device")
    assert (code, said["error"]["message"]) == (2, "--memory device: cuInit answers CUDA_ERROR_UNKNOWN (999)")


def test_too_little_memory_is_one_line(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LibCuda, "refuse", {"alloc": DeviceMemoryError("cuMemAlloc_v2 answers 2")})
    arguments = ["--memory", "device", "--mode", "direct"]
    code, said = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, *arguments)
    assert (code, said["error"]["type"]) == (2, "DeviceMemoryError")


def test_files_given_are_not_opened_by_kvikio(tmp_path: Path, capsys: Any, rung: Rung) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\7" * (8 << 20))
    code, report = json_of(capsys, "bench", "gds", path, *OPTIONS)
    assert (code, report["memory"], "those given are only read" in report["steps"][0]) == (0, "host", True)
    code, said = json_of(capsys, "bench", "gds", path, *OPTIONS, "--mode", "gds")
    assert (code, "those given are only read" in said["error"]["message"]) == (2, True)
    code, report = json_of(capsys, "bench", "gds", path, *OPTIONS, "--memory", "device", "--mode", "direct")
    assert (code, report["rows"][0]["status"], report["memory"]) == (0, "ok", "device")


@pytest.mark.parametrize("arguments", [[], ["--memory", "device", "--mode", "direct"]])
def test_one_wrong_bit_takes_the_speed_away(tmp_path: Path, capsys: Any, rung: Rung, arguments: list[str]) -> None:
    with FaultyIO() as io:
        io.flip(4321, offset=INSIDE)
        code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, *arguments)
    (row,) = report["rows"]
    assert (code, row["status"], row["parts"], row["link_percent"]) == (1, "WRONG", [], None)


def test_a_copy_that_does_not_happen_is_noticed(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the host's pinned memory to the device: of requests alone, not of what prepares them."""
    plain = CudaMemory.fill

    def fill(self: Any, address: int, data: Any) -> None:
        if data.nbytes != 64 << 10:
            plain(self, address, data)

    monkeypatch.setattr(CudaMemory, "fill", fill)
    arguments = ["--memory", "device", "--mode", "direct"]
    code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, *arguments)
    assert (code, report["rows"][0]["status"]) == (1, "WRONG")


def test_reads_that_bring_nothing_prove_nothing(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even of writes: what is read back passes through the host's memory, which is written over, too."""

    class Idle(PosixFile):
        def read(self, buf: Any, size: int | None = None, file_offset: int = 0) -> int:
            return buf.nbytes if size is None else size

    monkeypatch.setattr("kvxfer.cli.bench_ways.PosixFile", Idle)
    arguments = ["--memory", "device", "--mode", "direct", "--operation", "write"]
    code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, *arguments)
    assert (code, report["rows"][0]["status"]) == (1, "WRONG")


def test_memory_that_kvikio_does_not_let_go_of_is_not_freed(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GdsBackend, "lets_go", False)
    code, _ = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS)
    assert (code, len(cuda[0].memory)) == (0, 1)
    cuda[0].memory.clear()


@pytest.mark.parametrize("arguments", [[], ["--memory", "device", "--mode", "direct"]])
def test_memory_under_a_request_that_never_returns_is_not_freed(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    for name, seconds in (("STALL_S", 0.3), ("PATIENCE_S", 0.3), ("CLOSE_S", 0.1)):
        monkeypatch.setattr(bench_lanes, name, seconds)
    with FaultyIO() as io:
        io.hang("pread", offset=INSIDE)
        code, said = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, "--duration", "0.1", *arguments)
        driver = cuda[0]
        kept = len(driver.memory), len(driver.pinned), sum(len(each.deregistered) for each in backends)
    assert (code, said["error"]["type"]) == (2, "IOFault")
    assert kept == (1, len(arguments) // 4, 0)
    kept_for_good.update(driver.memory)  # the request goes on now
    driver.memory.clear()
    driver.pinned.clear()


@pytest.mark.parametrize("refused", [True, False])
def test_the_link_of_another_gpu_is_not_taken(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    if refused:
        monkeypatch.setattr(LibCuda, "refuse", {"bus": DeviceError("cuDeviceGetPCIBusId answers 1")})
    else:
        monkeypatch.setattr(LibCuda, "bus", "0000:99:00.0")
    _, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS)
    assert report["link"]["gbps"] is None
    assert ("cuDeviceGetPCIBusId answers 1" if refused else "0000:99:00.0") in report["link"]["why"]


def test_a_link_that_nobody_knows_is_not_guessed(
    tmp_path: Path, capsys: Any, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_job, "ask_gpus", lambda: Gpus(why="nvidia-ml-py is not installed"))
    _, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS)
    assert report["link"] == {"gbps": None, "why": "nvidia-ml-py is not installed"}
    assert report["rows"][0]["link_percent"] is None


def test_over_kvxfers_own_ladder_and_backend(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing doubled but kvikio and the driver, by the doubles that the backend's own tests have."""
    door, ladder, rig, there = (
        importlib.import_module(name)
        for name in ("kvxfer.io.kvikio_door", "kvxfer.io.ladder", "tests.io.gds_rig", "tests.kvikio_double")
    )
    kvikio = there.Kvikio(monkeypatch)
    driver = rig.FakeCuda(kvikio)
    monkeypatch.setattr(probe, "cuda", lambda *_: probe.Probe(True, "a device"))
    monkeypatch.setattr(door, "_asked", [probe.Probe(True, "kvikio", {"compat_mode": "AUTO"})])
    monkeypatch.setattr(ladder, "_ask_driver", lambda *_: {"is_gds_available": 1})
    monkeypatch.setattr(bench_job, "ask_gpus", lambda: Gpus(why="none"))
    monkeypatch.setattr(bench_lanes, "EMPTY_S", 0.01)
    monkeypatch.setattr("kvxfer.io.libcuda.LibCuda", lambda: driver)
    monkeypatch.setattr("kvxfer.io.libcuda.CudaMemory", rig.FakeMemory)
    try:
        for mode in ("auto", "compat"):
            arguments = ["--mode", mode, "--operation", "mixed"]
            code, report = json_of(capsys, "bench", "gds", tmp_path, *OPTIONS, *arguments)
            assert (code, report["mode"]) == (0, "compat" if mode == "compat" else "gds"), report
            assert (report["memory"], report["rows"][0]["status"]) == ("device", "ok")
    finally:
        kvikio.close()
    assert list(tmp_path.iterdir()) == []
    assert driver.made == {}
