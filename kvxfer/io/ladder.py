"""Which way a directory's bytes take between the drive and a device's memory: found out by trying, one rung at a time.

    direct   GPUDirect Storage: cuFile moves them without the host's memory
    compat   kvikio's compat mode: pread and pwrite into buffers of kvikio's, and copies
    host     kvxfer's own engine and pinned memory

A rung holds where device memory was written to a file of the directory, the file read back by pread with O_DIRECT and
compared, and the other way round. That a library imports, or a call succeeds, says nothing: cuFile goes through the
host's memory by itself where it must. So the driver is asked, and it is asked in another process first, since without
what it needs its open spins for ever.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer import probe
from kvxfer.config import GDS_MODES
from kvxfer.errors import ConfigError, IOFault, KvxferError
from kvxfer.io import gds, kvikio_door
from kvxfer.io.gds import GdsBackend, GdsFile, Window
from kvxfer.io.libcuda import Cuda, CudaMemory, LibCuda
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import TEMPORARY, sys_close, sys_fallocate, sys_open, sys_unlink
from kvxfer.io.workers import Call
from kvxfer.report import engine_reporter
from kvxfer.slot import ALIGNMENT
from kvxfer.staging import AlignedBuffer

RUNGS = ("direct", "compat", "host")
# Why a rung was left: what a metric counts.
REASONS = (
    "configured", "no_device", "no_kvikio", "kvikio_broken", "kvikio_version", "driver", "compat", "file", "full",
    "memory", "wrong_bytes", "hung", "failed",
)  # fmt: skip
_TEST_BYTES = (2 << 20) + ALIGNMENT  # more than one of cuFile's own buffers holds
_FILE_OFFSET, _SHIFT = 2 * ALIGNMENT, ALIGNMENT  # in the file, and in the memory


class Step(str):
    """Why a rung was left: the text of it, and its `kind`, one of REASONS."""

    __slots__ = ("kind",)
    kind: str

    def __new__(cls, kind: str, text: str) -> Step:
        """`text`, with its `kind`."""
        step = super().__new__(cls, text)
        step.kind = kind
        return step


@dataclass(frozen=True, slots=True)
class Rung:
    """The way that was chosen for a directory."""

    name: str  # direct | compat | host
    steps: tuple[Step, ...] = ()  # why not a higher one, in order
    found: Mapping[str, Any] = field(default_factory=dict)  # what cuFile's driver says of itself
    settings: Mapping[str, Any] = field(default_factory=dict)  # GdsBackend.describe(), of the test that passed

    @property
    def why(self) -> str:
        """The steps in one line; empty where there were none."""
        return "; ".join(self.steps)

    @property
    def request_bytes(self) -> int:
        """The most that a request may move, by the driver's own word where it gives one."""
        return min(gds.REQUEST_BYTES, int(self.found.get("max_direct_io_bytes") or gds.REQUEST_BYTES))

    def stats(self) -> dict[str, int]:
        """As counters by name: `rung_direct` .. of which one is 1, `step_driver` .. how often it was the reason."""
        kinds = [step.kind for step in self.steps]
        return {f"rung_{name}": int(name == self.name) for name in RUNGS} | {
            f"step_{kind}": kinds.count(kind) for kind in REASONS
        }

    def as_json(self) -> dict[str, Any]:
        """For a report."""
        steps = [{"reason": step.kind, "why": str(step)} for step in self.steps]
        return {"rung": self.name, "steps": steps, "driver": dict(self.found), "settings": dict(self.settings)}


class DeviceMemory(Protocol):
    """What the test needs of a device. Every call may wait for it; they come from several threads, one at a time."""

    def alloc(self, nbytes: int) -> int:
        """The address of new memory, aligned to 4096. DeviceMemoryError where there is not as much."""

    def fill(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copies host bytes there; they are there when this returns."""

    def fetch(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of what is there."""

    def free(self, address: int) -> None:
        """Gives it back."""


class _Refused(Exception):
    """A rung does not hold."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.step = Step(kind, text)


def climb(
    directory: Path,
    memory: DeviceMemory | None,
    *,
    want: str = "auto",
    timeout_s: float = probe.TIMEOUT_S,
    cuda: Cuda | None = None,
) -> Rung:
    """Tries the rungs from the top, and says why each was left: once a directory in the log, too.

    Args:
        directory: an existing one; a temporary file is made there, and removed at once.
        memory: of the device; None where there is none.
        want: auto; gds and compat: that rung, or an error; host: nothing is tried.
        timeout_s: of each thing that may not come back. Whatever does not is left behind.
        cuda: for tests.

    Raises:
        ConfigError: `want` is unknown, or does not hold; says why.
    """
    if want not in GDS_MODES:
        raise ConfigError(f"gds={want!r} must be one of {', '.join(GDS_MODES)}")
    rung = _climb(directory, memory, want, timeout_s, cuda)
    wanted = {"gds": "direct", "compat": "compat"}.get(want, rung.name)
    if rung.name != wanted:
        raise ConfigError(f"gds={want!r} does not work in {directory}: {rung.why}; use 'auto'")
    _say(directory, rung)
    return rung


def climb_here(directory: Path, *, timeout_s: float = probe.TIMEOUT_S) -> Rung:
    """`climb` with memory of the first device by the driver's own calls: for a process that has no framework."""
    memory: CudaMemory | None = None
    cuda: LibCuda | None = None
    if kvikio_door.available(timeout_s).ok:
        cuda = LibCuda()
        memory = CudaMemory(cuda)
    return climb(directory, memory, timeout_s=timeout_s, cuda=cuda)


def _climb(directory: Path, memory: DeviceMemory | None, want: str, timeout_s: float, cuda: Cuda | None) -> Rung:
    steps: list[Step] = []
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {}

    def left(rung: str, refused: _Refused) -> None:
        steps.append(Step(refused.step.kind, f"{rung} off: {refused.step}"))

    if want == "host":
        return Rung("host", (Step("configured", "direct and compat off: configured"),))
    try:
        before = _ask_kvikio(memory, timeout_s)
    except _Refused as refused:
        left("direct and compat", refused)
        return Rung("host", tuple(steps))
    assert memory is not None
    try:
        if want == "compat" or before == "ON":
            how = "configured" if want == "compat" else "KVIKIO_COMPAT_MODE is ON"
            raise _Refused("configured", how)
        found = _ask_driver(directory, timeout_s)
        settings = _test(directory, memory, gds.DIRECT, timeout_s, cuda)
        return Rung("direct", tuple(steps), found, settings)
    except _Refused as refused:
        left("direct", refused)
    if want == "gds":
        return Rung("host", tuple(steps), found)
    try:
        settings = _test(directory, memory, gds.COMPAT, timeout_s, cuda)
        return Rung("compat", tuple(steps), found, settings)
    except _Refused as refused:
        left("compat", refused)
    return Rung("host", tuple(steps), found)


# ---- asked in a child


def _ask_kvikio(memory: DeviceMemory | None, timeout_s: float) -> str:
    """What kvikio's compat mode is set to, where kvikio can be used at all."""
    if not (kvikio := kvikio_door.available(timeout_s)).ok:
        raise _Refused(kvikio.found["kind"], kvikio.why)
    if memory is None:
        raise _Refused("no_device", "no device's memory was given")
    return str(kvikio.found["compat_mode"])


# The first touch of cuFile's driver: its open, and a file of the directory. `properties` are CUfileDrvProps_t's.
_DRIVER = """
import ctypes, os, sys
import kvikio, kvikio.cufile_driver as driver, kvikio.defaults
stage = "driver"
try:
    driver.driver_open()
    names = ("is_gds_available", "major_version", "minor_version", "allow_compat_mode", "max_pinned_memory_size")
    found = {{name: int(driver.get(name)) for name in names}}
    found["libcufile"] = list(driver.libcufile_version())
    class Properties(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint * 2), ("poll", ctypes.c_size_t), ("max_direct_io_kb", ctypes.c_size_t),
                    ("rest", ctypes.c_uint * 16)]
    class Answer(ctypes.Structure):
        _fields_ = [("error", ctypes.c_int), ("cuda", ctypes.c_int)]
    try:
        get = ctypes.CDLL("libcufile.so.0").cuFileDriverGetProperties
        get.restype, properties = Answer, Properties()
        if get(ctypes.byref(properties)).error == 0:
            found["max_direct_io_bytes"] = properties.max_direct_io_kb << 10
    except (OSError, AttributeError):
        pass
    stage = "file"
    path = {path!r}
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    os.truncate(fd, 4096)
    with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
        kvikio.CuFile(f"/proc/self/fd/{{fd}}", "r+").close()
    answer(found)
except Exception as exc:
    answer({{"stage": stage, "why": f"{{type(exc).__name__}}: {{exc}}"}})
"""


def _ask_driver(directory: Path, timeout_s: float) -> dict[str, Any]:
    """What cuFile's driver says of itself, once it took a file of the directory."""
    path = _path(directory)
    answer = probe.ask(_DRIVER.format(path=str(path)), timeout_s)
    if answer.said is None:
        sys_unlink(path)
        hung = answer.why.startswith("no answer")
        raise _Refused("hung" if hung else "driver", f"cuFile's driver: {answer.why}")
    if "stage" in answer.said:
        where = "cuFile's driver" if answer.said["stage"] == "driver" else f"cuFile refuses files of {directory}"
        raise _Refused(answer.said["stage"], f"{where}: {answer.said['why']}")
    if not answer.said["is_gds_available"]:
        what = "cuFile's own compat mode: it finds no driver module nvidia-fs, and bytes would go through host memory"
        raise _Refused("compat", what)
    return answer.said


# ---- tried here


def _test(directory: Path, memory: DeviceMemory, mode: str, timeout_s: float, cuda: Cuda | None) -> dict[str, Any]:
    """Device memory to a file and back by kvikio, each time against pread and pwrite. What it was done with."""
    answer: list[dict[str, Any] | BaseException] = []

    def attempt() -> None:
        try:
            answer.append(_both_ways(directory, memory, mode, timeout_s, cuda))
        except BaseException as exc:  # it belongs to the caller and not to this thread
            answer.append(exc)

    thread = threading.Thread(target=attempt, name="kvx-ladder", daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        raise _Refused("failed", str(exc)) from exc
    thread.join(2 * timeout_s)  # its calls have `timeout_s` themselves; the device's have none
    if not answer:
        raise _Refused("hung", f"the test did not end within {2 * timeout_s:g} s")
    if isinstance(outcome := answer[0], dict):
        return outcome
    if isinstance(outcome, _Refused):
        raise outcome
    if isinstance(outcome, MemoryError):
        raise _Refused("memory", str(outcome) or "out of memory")
    if isinstance(outcome, IOFault) and outcome.errno == errno.ETIMEDOUT:
        raise _Refused("hung", str(outcome.strerror))
    if isinstance(outcome, OSError) and outcome.errno in (errno.ENOSPC, errno.EDQUOT):
        raise _Refused("full", f"not tried: {outcome.strerror}")
    if isinstance(outcome, KvxferError | OSError):
        raise _Refused("failed", str(outcome))
    raise _Refused("failed", f"{type(outcome).__name__}: {outcome}") from outcome  # kvikio's, or a framework's


def _both_ways(directory: Path, memory: DeviceMemory, mode: str, timeout_s: float, cuda: Cuda | None) -> dict[str, Any]:
    with _posix_file(directory, _FILE_OFFSET + _TEST_BYTES) as posix:
        backend = GdsBackend(mode, depth=1, io_timeout_s=timeout_s, max_lost=0, cuda=cuda)
        address = memory.alloc(_SHIFT + _TEST_BYTES)
        try:
            why = backend.register(address, _SHIFT + _TEST_BYTES)
            if backend.stats()["lost_threads"]:
                raise _Refused("hung", f"registration of memory: {why}")
            file = backend.adopt(posix.fd)
            _compare_both(memory, address + _SHIFT, posix, file)
            return backend.describe()
        finally:
            # What a call that was given up may yet touch stays.
            free = backend.deregister(address) and not backend.stats()["lost_threads"]
            backend.close()
            if free:
                memory.free(address)


def _compare_both(memory: DeviceMemory, address: int, posix: PosixFile, file: GdsFile) -> None:
    place, back = Window(address, _TEST_BYTES), AlignedBuffer(_TEST_BYTES)

    def wait(start: Callable[..., Call]) -> None:
        if (moved := start(place, _TEST_BYTES, _FILE_OFFSET).get()) != _TEST_BYTES:
            raise _Refused("wrong_bytes", f"{moved} of {_TEST_BYTES} bytes were moved")

    written, read = _random(), _random()
    memory.fill(address, written)
    wait(file.pwrite)
    posix.read(back.array, file_offset=_FILE_OFFSET)
    _compare(back.array, written, "written")
    back.array[:] = read
    posix.write(back.array, file_offset=_FILE_OFFSET)
    wait(file.pread)
    _compare(memory.fetch(address, _TEST_BYTES), read, "read")


def _random() -> NDArray[np.uint8]:
    return np.frombuffer(secrets.token_bytes(_TEST_BYTES), dtype=np.uint8)


def _compare(got: NDArray[np.uint8], want: NDArray[np.uint8], what: str) -> None:
    if (wrong := int(np.count_nonzero(got != want))) != 0:
        raise _Refused("wrong_bytes", f"{wrong} of {len(want)} bytes were {what} otherwise")


def _posix_file(directory: Path, nbytes: int) -> PosixFile:
    """A file that has no name any more; by O_DIRECT where that can be."""
    path = _path(directory)
    fd, direct = -1, True
    try:
        fd = sys_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    except IOFault as exc:
        if exc.errno != errno.EINVAL:
            raise
        sys_unlink(path)  # an open that refuses the flag may have made the file
        fd, direct = sys_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), False
    try:
        sys_unlink(path)
        sys_fallocate(fd, nbytes, path)
    except BaseException:
        sys_close(fd)
        raise
    return PosixFile(fd, path.name, direct)


def _path(directory: Path) -> Path:
    return directory.absolute() / f".kvx-probe-{secrets.token_hex(8)}{TEMPORARY}"


# ---- said


_said: set[str] = set()
_saying = threading.Lock()


def _say(directory: Path, rung: Rung) -> None:
    """The steps down in the log, once for a directory and what was found there."""
    if not rung.steps or all(step.kind == "configured" for step in rung.steps):
        return
    place = f"{directory.absolute()}: {rung.name}: {rung.why}"
    with _saying:
        if place in _said:
            return
        _said.add(place)
    engine_reporter.warn(
        f"io rung {directory}", f"{directory}: bytes go by {rung.name}: {rung.why}", path=str(directory), rung=rung.name
    )
