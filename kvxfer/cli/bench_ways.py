"""Ways between a drive and memory, and which of them a plan gets: every step down has its reason.

From the top: `gds` (kvikio, GPUDirect Storage), `compat` (kvikio's own way through the host), `direct` (O_DIRECT),
`buffered` (the page cache).
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvxfer import probe
from kvxfer.cli.bench_memory import Bounce, BouncedMemory, DeviceMemory, HostMemory, Memory
from kvxfer.cli.bench_plan import DEVICE_MODES, Plan
from kvxfer.device.base import Device
from kvxfer.errors import ConfigError, IOFault, KvxferError
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

    def close(self) -> None:  # noqa: B027 - nor hold anything
        """No further files."""


class PosixWay(Way):
    """pread and pwrite of the host's memory; with a device, through pinned memory to its own and back."""

    def __init__(self, mode: IOMode, device: Device | None = None) -> None:
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
        return BouncedMemory(self._device, nbytes, self.alignment, largest)

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
        moved = self._file.read(buf.array, size, file_offset)
        buf.push(moved)
        return moved

    def write(self, buf: Bounce, size: int, file_offset: int) -> int:
        buf.pull(size)
        return self._file.write(buf.array, size, file_offset)

    def close(self) -> None:
        self._file.close()


class KvikioWay(Way):
    """kvikio between the drive and the device's memory."""

    alignment = ALIGNMENT

    def __init__(self, mode: str, gds: Any, backend: Any, device: Device) -> None:
        """`gds`: the module kvxfer.io.gds; `backend`: one of its GdsBackend, which is closed with this."""
        self.mode, self._gds, self._backend, self._device = mode, gds, backend, device
        self.why = f"kvikio in mode {backend.mode}"

    def open(self, path: Path, *, writable: bool) -> Opened:
        """See Way. kvikio opens files for both."""
        return _Waited(self._backend.open(path, direct=True))

    def memory(self, nbytes: int, largest: int) -> Memory:
        """See Way. Registered where the driver lets it."""
        memory = DeviceMemory(self._device, nbytes, self.alignment, self._gds.Window, largest)
        if refused := self._backend.register(memory.buffer.address, nbytes):
            self.why += f"; memory is not registered: {refused}"
        return memory

    def close(self) -> None:
        """See Way."""
        self._backend.close()


class _Waited:
    """A file of a backend whose transfers are futures."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, buf: Any, size: int, file_offset: int) -> int:
        return int(self._file.pread(buf, size, file_offset).get())

    def write(self, buf: Any, size: int, file_offset: int) -> int:
        return int(self._file.pwrite(buf, size, file_offset).get())

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
    device: Device | None = None
    wanted = DEVICE_MODES if plan.mode == "auto" else (plan.mode,)
    if plan.memory == "device" or (plan.memory == "auto" and plan.mode in (*DEVICE_MODES, "auto")):
        found = _device(timeout_s)
        device = None if isinstance(found, str) else found
        if isinstance(found, str):
            if plan.memory == "device":
                raise ConfigError(f"--memory device: {found}")
            if plan.mode in DEVICE_MODES:
                raise ConfigError(f"--mode {plan.mode}: {found}")
            steps.append(f"gds and compat: {found}")
        else:
            for mode in (mode for mode in wanted if mode in DEVICE_MODES):
                way = _kvikio(mode, plan, place, found)
                if not isinstance(way, str):
                    way.steps = tuple(steps)
                    return way
                if plan.mode == mode:
                    raise ConfigError(f"--mode {mode}: {way}")
                steps.append(f"{mode}: {way}")
    elif plan.mode == "auto":
        steps.append("gds and compat: they move the device's memory, and --memory host was said")
    way = PosixWay(_posix(plan, place), device if plan.memory == "device" else None)
    if plan.mode == "auto" and way.mode == "buffered":
        steps.append(f"direct: {way.why.partition(';')[0].removeprefix('direct I/O off: ')}")
    way.steps = tuple(steps)
    return way


def _device(timeout_s: float) -> Device | str:
    """The device, or why there is none. torch is imported where a device has answered."""
    if not (found := probe.cuda(timeout_s)).ok:
        return f"no CUDA device: {found.why}"
    try:
        module = importlib.import_module("kvxfer.device.torch_device")
        device: Device = module.TorchDevice()
    except (ImportError, KvxferError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return device


def _kvikio(mode: str, plan: Plan, place: Place, device: Device) -> Way | str:
    """kvikio's way, shown to work by reading back what was written, or why it is not."""
    if place.sample is not None:
        return "kvikio opens files for writing, and those given are only read"
    try:
        gds = importlib.import_module("kvxfer.io.gds")
    except ImportError as exc:
        return str(exc)
    if not (found := gds.available()).ok:
        return str(found.why)
    try:
        backend = gds.GdsBackend(gds.DIRECT if mode == "gds" else gds.COMPAT, depth=plan.lanes)
    except KvxferError as exc:
        return str(exc)
    way = KvikioWay(mode, gds, backend, device)
    try:
        _try(way, place.directory)
    except (KvxferError, OSError) as exc:
        way.close()
        return str(exc)
    return way


def _try(way: Way, directory: Path) -> None:
    """Writes a page from the device, reads it back into another, compares."""
    from kvxfer.cli.bench_files import made  # files are made above this

    memory = way.memory(2 * ALIGNMENT, ALIGNMENT)
    try:
        with made(directory, 1, ALIGNMENT, margin=False) as paths:
            file = way.open(paths[0], writable=True)
            try:
                data = np.random.default_rng().integers(256, size=ALIGNMENT, dtype=np.uint8)
                memory.put(0, data)
                memory.poison(ALIGNMENT, ALIGNMENT)
                file.write(memory.place(0, ALIGNMENT), ALIGNMENT, 0)
                moved = file.read(memory.place(ALIGNMENT, ALIGNMENT), ALIGNMENT, 0)
                if moved != ALIGNMENT or not np.array_equal(memory.get(ALIGNMENT, ALIGNMENT), data):
                    raise ConfigError("a page came back otherwise than it was written")
            finally:
                file.close()
    finally:
        memory.close()


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
