"""cuda_batch.h, its ctypes mirror and the library that was built agree; it loads without a driver and is left alone."""

from __future__ import annotations

import ctypes as C
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer import _cuda, probe
from kvxfer.errors import DeviceError, NativeError
from kvxfer.probe import Probe
from tests.native.cuda_double import FakeCuda
from tests.native.cuda_libraries import ROOT, SOURCE, FakeRuntime

CODE = re.sub(r"/\*.*?\*/", "", SOURCE.with_suffix(".h").read_text(), flags=re.DOTALL)
DEVICE = Probe(True, "1 x Fake H200, CUDA 13.0")
NO_NVCC = shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as setup.py builds it, without the folders of this checkout."""
    if NO_NVCC:
        pytest.skip("no nvcc here: libkvx_cuda is not built")
    folder = tmp_path_factory.mktemp("project")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "kvxfer/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "csrc" / "cuda", folder / "csrc" / "cuda")
    (folder / "csrc" / "abi.cpp").write_text("int unused_here = 1;\n")
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # nvcc does not live under ASan
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder, env=env, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    return folder / "kvxfer" / "libkvx_cuda.so"


def functions() -> dict[str, int]:
    """The functions that the header declares, with their number of arguments."""
    found = {}
    for name, arguments in re.findall(r"KVX_CUDA_API [^;(]*?(kvx_cuda_\w+)\(([^)]*)\);", CODE):
        found[name] = 0 if arguments.strip() == "void" else arguments.count(",") + 1
    assert len(found) == CODE.count("KVX_CUDA_API ") - 1  # its own #define
    return found


def enum(name: str) -> list[tuple[str, int]]:
    body = re.search(rf"enum {name} \{{(.*?)\}};", CODE, flags=re.DOTALL)
    assert body, name
    return [(member, int(value)) for member, value in re.findall(r"(\w+) = (\d+)", body[1])]


def test_every_function_is_mirrored_with_as_many_arguments() -> None:
    assert {name: len(arguments) for name, (_, arguments) in _cuda._SIGNATURES.items()} == functions()


def test_structs_and_enums_are_those_of_the_header(fake_runtime: FakeRuntime) -> None:
    sizes = {name: C.sizeof(struct) for name, struct in _cuda.STRUCTS.items()}
    assert set(sizes) == set(re.findall(r"typedef struct (\w+) \{", CODE))
    for name, size in sizes.items():
        assert fake_runtime._dll.kvx_cuda_struct_size(name.encode()) == size, name
    assert fake_runtime._dll.kvx_cuda_struct_size(b"kvx_cuda_nothing") == 0
    assert enum("kvx_cuda_how") == [("KVX_CUDA_BATCH", _cuda.BATCH), ("KVX_CUDA_LOOP", _cuda.LOOP)]
    assert enum("kvx_cuda_memory") == [(f"KVX_CUDA_{name.upper()}", i) for i, name in enumerate(_cuda.MEMORY)]


def test_the_library_exports_its_functions_and_nothing_of_the_runtime(real: Path) -> None:
    """Another copy of the runtime, torch's, must not get in between, nor this one there."""
    listing = subprocess.run(["nm", "-D", str(real)], capture_output=True, text=True, check=True).stdout
    defined = {line.split()[-1] for line in listing.splitlines() if line.split()[-2] in "TWVBD"}
    assert defined == set(functions())
    assert not [line for line in listing.splitlines() if " U cu" in line]


def test_it_loads_and_answers_where_there_is_no_driver(real: Path) -> None:
    if (found := probe.cuda()).ok:
        pytest.skip(f"a device answers here: {found.why}")
    cuda = _cuda.load(real)
    assert cuda.versions()[0] == f"{_nvcc_version()}"
    one, at = np.ones(1, np.uint64), 1 << 40
    for call in (
        cuda.device_count, lambda: cuda.set_device(0), lambda: cuda.describe(0), cuda.stream_new,
        lambda: cuda.stream_done(0), lambda: cuda.stream_wait(0), lambda: cuda.stream_free(at),
        lambda: cuda.copy(at, at, 8, 0), lambda: cuda.copy_batch(one, one, one, at),
        lambda: cuda.register(at, 8192, 4096), lambda: cuda.unregister(at, 8192, 4096),
        lambda: cuda.host_alloc(4096), lambda: cuda.host_free(at), lambda: cuda.where(at),
    ):  # fmt: skip
        with pytest.raises(DeviceError, match=r"cudaErrorInsufficientDriver \(35\): CUDA driver version"):
            call()


def _nvcc_version() -> str:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return said.split("release ")[1].split(",")[0]


def test_the_double_in_python_has_the_same_face() -> None:
    def face(kind: type) -> dict[str, list[tuple[str, object]]]:
        methods = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        return {
            name: [(one.name, one.default) for one in inspect.signature(method).parameters.values()]
            for name, method in methods.items()
        }

    assert face(FakeCuda) == face(_cuda.CudaRuntime)


def test_the_double_in_python_holds_what_it_is_told() -> None:
    cuda, memory = FakeCuda(), np.arange(100, dtype=np.uint8)
    at, numbers = memory.ctypes.data, np.array([10], np.uint64)
    assert cuda.copy_batch(numbers + np.uint64(at), numbers * 0 + np.uint64(at + 50), numbers, 1) == "batch"
    assert memory[9:21].tolist() == [9, *range(50, 60), 20]
    held = _cuda.Registration(cuda, at, 100)
    assert (held.pinned, cuda.where(at + 99).memory) == (True, "pinned")
    again = _cuda.Registration(cuda, at, 100)
    assert (again.pinned, again.why) == (False, "cudaErrorHostMemoryAlreadyRegistered (712)")
    held.release()
    assert cuda.where(at).memory == "pageable"
    cuda.fail["copy"] = DeviceError("lost")
    with pytest.raises(DeviceError, match="lost"):
        cuda.copy(at, at, 1, 1)


# ---- whether it may be used


@pytest.fixture
def library(fake_runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake_runtime.reset()
    monkeypatch.setenv("KVXFER_CUDA_LIBRARY", str(fake_runtime.path))
    monkeypatch.delenv("KVXFER_CUDA", raising=False)
    return fake_runtime


def test_it_is_used_where_a_device_answered(library: FakeRuntime) -> None:
    found = _cuda.available(DEVICE)
    assert (found.ok, found.why) == (True, "runtime 13.0, driver 13.1")
    assert found.found == {"path": str(library.path), "runtime": "13.0", "driver": "13.1", "devices": 2}


def test_without_a_device_it_is_not_even_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "load", lambda _: pytest.fail("loaded"))
    found = _cuda.available(Probe(False, "no libcuda.so.1: no driver"))
    assert (found.ok, found.why) == (False, "not tried without a CUDA device: no libcuda.so.1: no driver")


def test_it_can_be_turned_off(library: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CUDA", "0")
    assert (_cuda.available(DEVICE).ok, _cuda.available(DEVICE).why) == (False, "turned off: KVXFER_CUDA=0")
    assert library.notes == []


def test_what_its_runtime_refuses_is_the_reason(library: FakeRuntime) -> None:
    library.fail("cudaGetDeviceCount", 35)
    found = _cuda.available(DEVICE)
    assert not found.ok
    assert "device_count: fake (35)" in found.why


@pytest.mark.parametrize("kind", ["missing", "garbage", "foreign"])
def test_a_library_that_cannot_be_loaded(
    kind: str, fake_runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"lib{kind}.so"
    if kind == "garbage":
        path.write_bytes(b"\x7fELF garbage")
    if kind == "foreign":
        shutil.copy(fake_runtime.path, path)
        monkeypatch.setattr(_cuda, "ABI_VERSION", 99)
    monkeypatch.setenv("KVXFER_CUDA_LIBRARY", str(path))
    found = _cuda.available(DEVICE)
    words = {"missing": "it is built where nvcc is found", "garbage": "cannot load", "foreign": "ABI version 1"}
    assert not found.ok
    assert words[kind] in found.why
    if kind != "missing":
        with pytest.raises(NativeError):
            _cuda.load(path)
