"""What this machine has: every answer of a driver or a library that there is, and that none of them can hold us up."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import kvxfer
from kvxfer import probe
from tests.doubles import Doubles

HANGS = "import time\nprint('busy', flush=True)\nwhile True: time.sleep(1000)"
PATIENCE_S = 20.0  # what the caller is promised is the time limit and about a second; the machine may be busy
DEVICE = probe.Probe(True, "a device")
NO_DEVICE = probe.Probe(False, "no driver")


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doubles:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    return Doubles(tmp_path, monkeypatch)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("mode", "ok", "why"),
    [
        ("works", True, "2 x Fake H200, CUDA 13.0"),
        ("no device", False, "cuInit answers CUDA_ERROR_NO_DEVICE (100)"),
        ("unheard of", False, "cuInit answers 4321"),
        ("empty", False, "the driver shows no device"),
        ("crashes", False, "libcuda.so.1: it ended the process that asked (signal 6)"),
    ],
)
def test_what_a_driver_answers(doubles: Doubles, mode: str, ok: bool, why: str) -> None:
    doubles.cuda(mode)
    found = probe.cuda()
    assert (found.ok, found.why) == (ok, why)
    if ok:
        assert found.found == {"devices": ["Fake H200", "Fake H200"], "driver": "13.0"}


def test_a_driver_that_never_answers_is_given_up(doubles: Doubles) -> None:
    doubles.cuda("hangs")
    start = time.monotonic()
    found = probe.cuda(timeout_s=0.5)
    assert time.monotonic() - start < PATIENCE_S
    assert (found.ok, found.why) == (False, "libcuda.so.1: no answer within 0.5 s")


def test_a_library_that_is_no_driver_is_named(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = probe.cuda()
    assert not found.ok
    assert "libcuda.so.1" in found.why
    assert "no driver" not in found.why


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_without_a_driver_that_is_the_reason(doubles: Doubles) -> None:
    assert probe.cuda().why == "no libcuda.so.1: no driver"


def test_without_a_device_kvikio_and_cupy_are_not_imported(doubles: Doubles) -> None:
    """Without a driver cuFile spins for ever."""
    kvikio, cupy = doubles.kvikio("OFF"), doubles.module("cupy", HANGS)
    doubles.cuda("hangs")
    found = probe.machine(timeout_s=0.5)
    assert not (found.cuda.ok or found.cupy.ok or found.gds.ok)
    assert not kvikio.exists()
    assert not cupy.exists()
    assert "no answer within 0.5 s" in found.cupy.why
    assert "no answer within 0.5 s" in found.gds.why


def test_a_library_that_hangs_is_ended_with_all_that_it_started(doubles: Doubles) -> None:
    trace = doubles.module("cupy", f"import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n{HANGS}")
    start = time.monotonic()
    found = probe.cupy(DEVICE, timeout_s=3)
    assert time.monotonic() - start < PATIENCE_S
    assert (found.ok, found.why) == (False, "no answer within 3 s")
    with pytest.raises(ProcessLookupError):
        os.kill(int(trace.read_text()), 0)


def test_cupy_that_works_and_cupy_that_does_not(doubles: Doubles) -> None:
    if find_spec("cupy") is None:
        assert probe.cupy(DEVICE).why == "cupy is not installed"
    doubles.module(
        "cupy",
        """
        print("a word of welcome")
        class cuda:
            class runtime:
                getDeviceCount = staticmethod(lambda: int(os.environ["FAKE_COUNT"]))
        """,
    )
    assert "not tried without a CUDA device: no driver" in probe.cupy(NO_DEVICE).why
    os.environ["FAKE_COUNT"] = "3"
    try:
        assert probe.cupy(DEVICE) == probe.Probe(True, "sees 3 devices", {"devices": 3})
    finally:
        del os.environ["FAKE_COUNT"]
    assert probe.cupy(DEVICE).why == "KeyError: 'FAKE_COUNT'"


def test_gds_says_every_reason(doubles: Doubles, tmp_path: Path) -> None:
    found = probe.gds(NO_DEVICE, proc=tmp_path / "nvidia-fs")
    assert not found.ok
    reasons = ["no CUDA device: no driver", "nvidia-fs is not loaded"]
    reasons += ["kvikio is not installed"] if find_spec("kvikio") is None else []
    assert [reason for reason in reasons if reason not in found.why] == []


@pytest.mark.parametrize("mode", ["ON", "AUTO"])
def test_gds_asks_kvikio_for_its_compat_mode(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    doubles.kvikio(mode)
    (tmp_path / "libcufile.so.0").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = probe.gds(DEVICE, proc=tmp_path)  # a directory that is there
    assert found.found == {"compat_mode": mode}
    assert "nvidia-fs" not in found.why
    assert ("compat mode is ON" in found.why) == (mode == "ON")
    assert "no libcufile.so.0" in found.why


def test_gds_with_all_of_it(doubles: Doubles, tmp_path: Path) -> None:
    doubles.kvikio("AUTO")
    doubles.cuda("works")
    os.link(tmp_path / "libcuda.so.1", tmp_path / "libcufile.so.0")
    found = probe.gds(DEVICE, proc=tmp_path)
    assert (found.ok, found.why) == (True, "kvikio's compat mode is AUTO")


def patience(body: str) -> float:
    """How long to wait for a library: no longer than it takes where it never answers."""
    return 2.0 if HANGS.splitlines()[0] in body else PATIENCE_S


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ImportError('libcufile.so: wrong version')", "kvikio: ImportError: libcufile.so: wrong version"),
        ("raise SystemExit(7)", "kvikio: it ended the process that asked (exit code 7)"),
        (HANGS, "kvikio: no answer within 2 s"),
    ],
)
def test_a_kvikio_that_does_not_work_is_a_reason(doubles: Doubles, tmp_path: Path, body: str, why: str) -> None:
    doubles.module("kvikio", body)
    found = probe.gds(DEVICE, timeout_s=patience(body), proc=tmp_path)
    assert (found.ok, found.why) == (False, why)


@pytest.mark.parametrize(
    ("body", "ok", "why"),
    [
        (
            "nvmlInit = lambda: None\nnvmlDeviceGetCount = lambda: 8\nnvmlSystemGetDriverVersion = lambda: b'580.1'",
            True,
            "driver 580.1, 8 devices",
        ),
        (
            "class NVMLError(Exception): pass\ndef nvmlInit(): raise NVMLError('Driver Not Loaded')",
            False,
            "NVMLError: Driver Not Loaded",
        ),
        (f"def nvmlInit():\n    {HANGS.splitlines()[0]}\n    time.sleep(1000)", False, "no answer within 2 s"),
    ],
)
def test_nvml(doubles: Doubles, body: str, ok: bool, why: str) -> None:
    if find_spec("pynvml") is None:
        assert probe.nvml().why == "nvidia-ml-py is not installed"
    doubles.module("pynvml", body)
    found = probe.nvml(timeout_s=patience(body))
    assert (found.ok, found.why) == (ok, why)


def test_a_module_in_the_working_directory_is_not_taken(
    doubles: Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ctypes.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    doubles.cuda("works")
    assert probe.cuda().ok


def test_io_uring_is_tried_and_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    found = probe.io_uring()
    assert found.ok == (found.why == "works; used where io is uring")
    assert os.listdir("/proc/self/fd") == before
    disabled = Path("/proc/sys/kernel/io_uring_disabled")
    if disabled.exists() and disabled.read_text().strip() == "2":
        assert not found.ok


def test_io_uring_that_fails_says_the_error() -> None:
    said = run_python(
        "import os, resource\nfrom kvxfer import probe\nimport ctypes\nctypes.CDLL(None)\n"
        "used = max(map(int, os.listdir('/proc/self/fd')))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))\nprint(probe.io_uring())"
    )
    assert "ok=False" in said
    assert "io_uring_setup answers E" in said


def test_limits_are_the_processs_own() -> None:
    said = run_python(
        "import resource\nfrom kvxfer import probe\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))\nprint(probe.limits()['open_files'])"
    )
    assert said == "123\n"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert probe.limits()["locked_bytes"] == (None if locked == resource.RLIM_INFINITY else locked)


def test_versions_are_read_and_nothing_is_imported() -> None:
    found = probe.versions()
    assert (found["kvxfer"], found["numpy"]) == (kvxfer.__version__, np.__version__)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(probe.PACKAGES) < set(found)
    loaded = run_python(
        "import sys\nfrom kvxfer import probe\nprobe.versions()\nprobe.machine(5)\n"
        "print(*(name for name in sys.modules if '.' not in name))"
    ).split()
    assert not {"numpy", "torch", "triton", "lmdb", "kvikio", "cupy", "pynvml", "vllm", "typer", "rich"} & set(loaded)


def test_the_library_says_where_it_is_and_what_it_uses() -> None:
    found = probe.library()
    assert found.ok
    assert Path(found.found["path"]).name == "libkvx.so"
    assert found.found["features"] in ("scalar", "avx2,sse4.2", "avx512,avx2,sse4.2")


def test_a_library_that_does_not_load_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "libkvx.so").write_text("no library")
    said = run_python("from kvxfer import probe; print(probe.library())", KVXFER_LIBRARY=str(tmp_path / "libkvx.so"))
    assert "ok=False" in said
    assert "cannot load libkvx.so" in said
    assert str(tmp_path) in said
