"""Ways between a drive and memory, and which of them a plan gets: every step down has its reason.

From the top: `gds` (kvikio, GPUDirect Storage), `compat` (kvikio's own way through the host), `direct` (O_DIRECT),
`buffered` (the page cache).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvxfer import probe
from kvxfer.cli.bench_memory import Allocator, Bounce, BouncedMemory, DeviceMemory, HostMemory, Memory
from kvxfer.cli.bench_plan import DEVICE_MODES, Plan
from kvxfer.errors import ConfigError, IOFault, KvxferError
from kvxfer.io import gds, ladder, libcuda
from kvxfer.io.modes import IOMode, probe_mode
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import sys_dioalign, sys_open
from kvxfer.slot import ALIGNMENT
from kvxfer.staging import AlignedBuffer


class Opened(Protocol):
    """A file as the bench uses it: requests that are waited for."""

    def read(self, buf: Any, size: int, file_offset: int) -> int:
        """Bytes that came."""

    def write(self, buf: Any, size: int, file_offset: int) -> int:
        """Bytes that went."""

    def close(self) -> None:
        """No further requests."""


class Way(ABC):
    """How files are opened, and which memory they move."""

    mode: str
    alignment: int
    why: str  # what was found of this way
    steps: tuple[str, ...] = ()  # why not a higher one, each

    @abstractmethod
    def open(self, path: Path, *, writable: bool) -> Opened:
        """Raises IOFault where it cannot be opened."""

    @abstractmethod
    def memory(self, nbytes: int, largest: int) -> Memory:
        """Memory for requests of at most `largest` bytes.

        Raises:
            DeviceMemoryError: there is not as much.
        """

    def forget(self, file: Opened) -> None:  # noqa: B027 - most ways remember nothing
        """What the system remembers of the file's bytes goes, as far as it obeys."""

    def bus(self) -> str:
        """Where the device is whose memory is moved, of PCI; empty where it is the host's. DeviceError: not known."""
        return ""

    def close(self) -> None:  # noqa: B027 - nor hold anything
        """No further files."""


class PosixWay(Way):
    """pread and pwrite of the host's memory; with a device, through pinned memory to its own and back."""

    def __init__(self, mode: IOMode, device: Allocator | None = None) -> None:
        self.mode = "direct" if mode.direct else "buffered"
        self.alignment, self.why = mode.alignment, mode.why
        self._direct, self._device = mode.direct, device

    def open(self, path: Path, *, writable: bool) -> Opened:
        """See Way."""
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_DIRECT if self._direct else 0)
        file = PosixFile(sys_open(path, flags), path.name, self._direct)
        return file if self._device is None else _Bounced(file)

    def memory(self, nbytes: int, largest: int) -> Memory:
        """See Way."""
        if self._device is None:
            return HostMemory(nbytes, self.alignment)
        memory = BouncedMemory(self._device, nbytes, self.alignment)
        pinned = f"memory that is not pinned: {memory.unpinned}" if memory.unpinned else "pinned memory"
        self.why += f"; to the device and back through {pinned}"
        return memory

    def bus(self) -> str:
        """See Way."""
        return "" if self._device is None else self._device.bus()

    def forget(self, file: Opened) -> None:
        """See Way; direct I/O leaves nothing to remember."""
        fd = getattr(file, "fd", None)
        if not self._direct and fd is not None:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class _Bounced:
    """A file whose requests go on to a device, or come from it."""

    def __init__(self, file: PosixFile) -> None:
        self._file, self.fd = file, file.fd

    def read(self, buf: Bounce, size: int, file_offset: int) -> int:
        moved = self._file.read(buf.host, size, file_offset)
        buf.push(moved)
        return moved

    def write(self, buf: Bounce, size: int, file_offset: int) -> int:
        buf.pull(size)
        return self._file.write(buf.host, size, file_offset)

    def close(self) -> None:
        self._file.close()


class KvikioWay(Way):
    """kvikio between the drive and the device's memory."""

    alignment = ALIGNMENT

    def __init__(self, mode: str, backend: gds.GdsBackend, device: Allocator) -> None:
        """`backend` is closed with this."""
        self.mode, self._backend, self._device = mode, backend, device
        self.why = f"kvikio, requests of at most {backend.request_bytes} bytes"

    def open(self, path: Path, *, writable: bool) -> Opened:
        """See Way. kvikio opens files for both."""
        return _Waited(self._backend.open(path, direct=True))

    def memory(self, nbytes: int, largest: int) -> Memory:
        """See Way. Registered where the driver lets it."""
        memory = DeviceMemory(self._device, nbytes, gds.Window, self._backend.deregister)
        if refused := self._backend.register(memory.address, nbytes):
            self.why += f"; memory is not registered: {refused}"
        return memory

    def bus(self) -> str:
        """See Way."""
        return self._device.bus()

    def close(self) -> None:
        """See Way."""
        self._backend.close()


class _Waited:
    """A file of a backend whose transfers are futures."""

    def __init__(self, file: gds.GdsFile) -> None:
        self._file = file

    def read(self, buf: Any, size: int, file_offset: int) -> int:
        return self._file.pread(buf, size, file_offset).get()

    def write(self, buf: Any, size: int, file_offset: int) -> int:
        return self._file.pwrite(buf, size, file_offset).get()

    def close(self) -> None:
        self._file.close()


# ---- which


@dataclass(frozen=True, slots=True)
class Place:
    """Where a way is tried."""

    directory: Path  # in which files may be made, where `sample` is None
    sample: Path | None  # a file that is only read


def choose(plan: Plan, place: Place, timeout_s: float = probe.TIMEOUT_S) -> Way:
    """The way that the plan asks for; with `auto` the highest that works.

    Raises:
        ConfigError: what was asked for does not work here; says why.
        IOFault: nothing works in the directory.
    """
    steps: list[str] = []
    device: Allocator | None = None
    if plan.memory == "device" or (plan.memory == "auto" and plan.mode in (*DEVICE_MODES, "auto")):
        cuda = _cuda(timeout_s)
        if isinstance(cuda, str):
            if plan.memory == "device" or plan.mode in DEVICE_MODES:
                option = f"--memory {plan.memory}" if plan.memory == "device" else f"--mode {plan.mode}"
                raise ConfigError(f"{option}: {cuda}")
            steps.append(f"gds and compat: {cuda}")
        else:
            device = libcuda.CudaMemory(cuda)
            if plan.mode in (*DEVICE_MODES, "auto"):
                kvikio = _kvikio(plan, place, cuda, device, timeout_s, steps)
                if kvikio is not None:
                    kvikio.steps = tuple(steps)
                    return kvikio
    elif plan.mode == "auto":
        steps.append("gds and compat: they move the device's memory, and --memory host was said")
    way = PosixWay(_posix(plan, place), device if plan.memory == "device" else None)
    if plan.mode == "auto" and way.mode == "buffered":
        steps.append(f"direct: {way.why.partition(';')[0].removeprefix('direct I/O off: ')}")
    way.steps = tuple(steps)
    return way


def _cuda(timeout_s: float) -> libcuda.LibCuda | str:
    """The driver, or why there is none: it is only touched here where a child has had an answer."""
    if not (found := probe.cuda(timeout_s)).ok:
        return f"no CUDA device: {found.why}"
    try:
        return libcuda.LibCuda()
    except KvxferError as exc:
        return str(exc)


def _kvikio(
    plan: Plan, place: Place, cuda: libcuda.LibCuda, device: Allocator, timeout_s: float, steps: list[str]
) -> KvikioWay | None:
    """kvikio's way, which a test by reading back has shown to work in the directory; None, and `steps`, where not."""
    if place.sample is not None:
        why = "kvikio opens files for writing, and those given are only read"
        if plan.mode != "auto":
            raise ConfigError(f"--mode {plan.mode}: {why}")
        steps.append(f"gds and compat: {why}")
        return None
    try:
        rung = ladder.climb(place.directory, device, want=plan.mode, timeout_s=timeout_s, cuda=cuda)
        steps += [_in_our_words(step) for step in rung.steps]
        if rung.name == "host":
            return None
        backend = gds.GdsBackend(
            gds.DIRECT if rung.name == "direct" else gds.COMPAT,
            depth=plan.lanes,
            request_bytes=rung.request_bytes,
            cuda=cuda,
        )
    except KvxferError as exc:
        if plan.mode != "auto":
            raise ConfigError(f"--mode {plan.mode}: {exc}") from exc
        steps.append(f"gds and compat: {exc}")
        return None
    return KvikioWay("gds" if rung.name == "direct" else "compat", backend, device)


def _in_our_words(step: str) -> str:
    """A step of the ladder's: its rung `direct` is the mode `gds`, and `direct` is O_DIRECT here."""
    return step.replace("direct", "gds", 1) if step.startswith("direct") else step


def _posix(plan: Plan, place: Place) -> IOMode:
    asked = {"direct": "on", "buffered": "off"}.get(plan.mode, "auto")
    mode = probe_mode(place.directory, asked) if place.sample is None else _sampled(place.sample, asked)
    uneven = [size for size in plan.sizes if size % mode.alignment]
    if mode.direct and uneven:
        why = f"--sizes {uneven[0]} is no multiple of {mode.alignment}, as direct I/O needs here"
        if asked == "on":
            raise ConfigError(why)
        return IOMode(False, mode.alignment, f"direct I/O off: {why}")
    return mode


def _sampled(path: Path, asked: str) -> IOMode:
    """`probe_mode` with a file that may only be read."""
    if asked == "off":
        return IOMode(False, ALIGNMENT, "direct I/O off: asked for")
    try:
        fd = sys_open(path, os.O_RDONLY | os.O_DIRECT)
        alignment = max(ALIGNMENT, sys_dioalign(fd) or 0)
        with PosixFile(fd, path.name, True) as file:
            file.read(AlignedBuffer(alignment, alignment).array)
    except IOFault as exc:
        if asked == "on":
            raise ConfigError(f"--mode direct: {exc}") from None
        return IOMode(False, ALIGNMENT, f"direct I/O off: {exc}")
    return IOMode(True, alignment, f"direct I/O reads {path.name}, aligned to {alignment}")
