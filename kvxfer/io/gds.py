"""Files through kvikio: between a drive and a device's memory, by GPUDirect Storage, or kvikio's way through the host.

Its thread pool is not used. A call that never returns would hold up the interpreter's exit there, and it runs one
request at a time by default; here `depth` daemon threads make one blocking request each (`raw_read`, `raw_write`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.errors import ConfigError, DeviceError, IOFault, StoreError
from kvxfer.io.base import IOBackend, IOFile
from kvxfer.io.kvikio_door import held, import_kvikio
from kvxfer.io.libcuda import Cuda, LibCuda
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import PRIVATE_FILE, sys_open
from kvxfer.io.workers import Call, Workers
from kvxfer.slot import ALIGNMENT

REQUEST_BYTES = 16 << 20  # cuFile moves at most so much a request
DEPTH = 16
DIRECT, COMPAT = "direct", "compat"
_KEPT_FILES = 64
_SWEEP_S = 1.0

_DEREGISTER_S = 2.0


class Window:
    """Device memory as kvikio takes it. Nothing looks at what is there."""

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}


class GdsFile(IOFile):
    """A file of a `GdsBackend`. kvikio opens it with the first transfer of device memory, and keeps it open.

    Takes over `fd`. Buffers are device memory (`Window`, a device's Buffer, or whatever has __cuda_array_interface__),
    whose sizes and offsets are multiples of 4096, or the host's: those go by pread and pwrite.
    """

    def __init__(self, backend: GdsBackend, fd: int, label: str, direct: bool) -> None:
        self.label, self.direct = label, direct
        self._backend = backend
        self._posix = PosixFile(fd, label, direct)
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._running, self._open = 1, True  # this object; each transfer adds one
        self._handle: Any = None

    @property
    def fd(self) -> int:
        """Its descriptor, until it is closed."""
        return self._posix.fd

    def pread(self, buf: Any, size: int | None = None, file_offset: int = 0) -> Call:
        """See IOFile. A read that was given up may still write to `buf`, until the call has `returned`."""
        return self._start("read", buf, size, file_offset)

    def pwrite(self, buf: Any, size: int | None = None, file_offset: int = 0) -> Call:
        """See IOFile. A write that was given up may still read `buf`, until the call has `returned`."""
        return self._start("write", buf, size, file_offset)

    def start(self, work: Callable[[], int]) -> Call:
        """Runs several transfers, made by `move`, on one of the backend's threads."""
        with self._lock:
            if not self._open:
                raise StoreError(f"{self.label} is closed")
            self._running += 1

        def and_leave() -> int:
            try:
                return work()
            finally:
                self._leave(on_thread=True)

        try:
            call = self._backend.workers.submit(and_leave, self.label)
        except BaseException:
            self._leave()
            raise
        call.then(lambda: self._leave() if call.stalled else None)
        return call

    def move(self, what: str, buf: Any, size: int | None = None, file_offset: int = 0) -> int:
        """A "read" or "write" in the calling thread, which must be one of the backend's for device memory."""
        address, most = _device_place(buf) or (None, 0)
        if address is None:
            n = self._host(what, buf, size, file_offset)
        else:
            n = most if size is None else size
            if not 0 <= n <= most or file_offset < 0:
                raise ConfigError(f"{self.label}: {what} of {n} bytes at {file_offset}: the buffer has {most}")
            n = self._device(what, address, n, file_offset)
        self._backend.count(what, n)
        return n

    def close(self) -> None:
        """No further transfers; those under way keep it open."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._leave()

    def _start(self, what: str, buf: Any, size: int | None, offset: int) -> Call:
        return self.start(lambda: self.move(what, buf, size, offset))

    def _leave(self, on_thread: bool = False) -> None:
        """`on_thread`: the calling thread is one of the backend's, where a call may hang."""
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            handle, self._handle = self._handle, None
            self._posix.close()
            if handle is not None and on_thread:
                handle.close()
            elif handle is not None:
                with suppress(IOFault):  # without a thread for it, it stays open
                    self._backend.apart(handle.close, "closing")

    def _host(self, what: str, buf: Any, size: int | None, offset: int) -> int:
        return self._posix.read(buf, size, offset) if what == "read" else self._posix.write(buf, size, offset)

    def _device(self, what: str, address: int, n: int, offset: int) -> int:
        """Requests of at most `request_bytes`, until all is moved, or the file ended."""
        base, span = self._backend.region(address, n)
        moved = start = 0
        try:
            self._backend.cuda.enter(address)
            handle = self._opened()
            request = handle.raw_read if what == "read" else handle.raw_write
            if what == "read":  # past the end kvikio raises what could be anything
                n = max(0, min(n, os.fstat(self.fd).st_size - offset))
            while moved < n:
                want = min(n - start, self._backend.request_bytes)
                got = request(Window(base, span), want, offset + start, address - base + start)
                if not 0 <= got <= want:
                    raise IOFault(errno.EIO, f"{got} of {want} bytes", self.label)
                if start + got <= moved:
                    break
                moved = start + got
                # A request goes on from the page that the one before ended in.
                start = moved if moved >= n else max(0, (offset + moved) // ALIGNMENT * ALIGNMENT - offset)
        except BaseException as exc:  # of whatever kind kvikio makes it
            raise self._fault(exc, f"{what}: {moved} of {n} bytes at offset {offset:#x}") from exc
        if what == "write" and moved < n:
            raise IOFault(errno.EIO, f"{what}: {moved} of {n} bytes at offset {offset:#x}: no progress", self.label)
        return moved

    def _opened(self) -> Any:
        with self._opening:
            if self._handle is None:
                self._handle = self._backend.kvikio_open(self.fd)
            return self._handle

    def _fault(self, exc: BaseException, what: str) -> IOFault:
        return IOFault(errno_of(exc), f"{what}: {type(exc).__name__}: {exc}", self.label)


class GdsBackend(IOBackend):
    """kvikio on threads of its own. Thread-safe; not usable in a forked child.

    Args:
        mode: DIRECT, where a file that GPUDirect Storage cannot do is an error; COMPAT, kvikio's way through the host.
        depth: requests in flight.
        request_bytes: the most that one of them moves.
        io_timeout_s, max_lost: see Workers.
        cuda: for tests.

    Raises:
        DeviceError: kvikio cannot be used; says why.
    """

    name = "gds"

    def __init__(
        self,
        mode: str = DIRECT,
        *,
        depth: int = DEPTH,
        request_bytes: int = REQUEST_BYTES,
        io_timeout_s: float = float("inf"),
        max_lost: int = 8,
        cuda: Cuda | None = None,
    ) -> None:
        if mode not in (DIRECT, COMPAT):
            raise ConfigError(f"mode={mode!r} must be {DIRECT} or {COMPAT}")
        if request_bytes < ALIGNMENT or request_bytes % ALIGNMENT:
            raise ConfigError(f"request_bytes={request_bytes} must be a multiple of {ALIGNMENT}")
        self.mode, self.depth, self.request_bytes = mode, depth, request_bytes
        self.workers = Workers("gds", depth, io_timeout_s=io_timeout_s, max_lost=max_lost)
        self._timeout_s = io_timeout_s
        self._apart: list[Call] = []
        self._kvikio = import_kvikio()
        self.cuda: Cuda = LibCuda() if cuda is None else cuda
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], GdsFile] = OrderedDict()
        self._swept = time.monotonic()
        self._regions: dict[int, list[int]] = {}  # base -> [bytes, how many were registered in it]
        self._refused: dict[int, str] = {}  # address -> why it is not registered
        self._moved = {"read": 0, "write": 0}
        self.settings = self._raise_defaults()

    # ---- files

    def open(self, path: Path, *, direct: bool = True, create: bool = False) -> GdsFile:
        """See IOBackend. `direct` is of host memory: what kvikio moves is, where the file system lets it."""
        flags = os.O_RDWR | (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0)
        return GdsFile(self, sys_open(Path(path), flags, PRIVATE_FILE), Path(path).name, direct)

    def adopt(self, fd: int) -> GdsFile:
        """The file that `fd`, which stays the caller's, is open on: made once, and kept until it was unlinked.

        Of more than 64 the one that rested longest goes, so what is given is to be used before the next is asked for.
        It must not be closed.

        Raises:
            OSError: it is not open, or there are no more descriptors.
        """
        self.workers.check_process()
        info = os.fstat(fd)
        key = info.st_dev, info.st_ino
        gone: list[GdsFile] = []
        with self._lock:
            now = time.monotonic()
            if now - self._swept >= _SWEEP_S:  # an open file holds the room of one that was removed
                self._swept = now
                unlinked = [known for known, file in self._kept.items() if os.fstat(file.fd).st_nlink == 0]
                gone = [self._kept.pop(known) for known in unlinked]
            if (file := self._kept.get(key)) is None:
                name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
                direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
                file = self._kept[key] = GdsFile(self, os.dup(fd), name, direct)
                if len(self._kept) > _KEPT_FILES:
                    gone.append(self._kept.popitem(last=False)[1])
            self._kept.move_to_end(key)
        for each in gone:
            each.close()
        return file

    def kvikio_open(self, fd: int) -> Any:
        """A CuFile of its own on the file that `fd` is open on. Raises whatever kvikio makes of a refusal."""
        with self._compat_mode():
            return self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")

    # ---- memory

    def register(self, address: int, nbytes: int) -> str:
        """Pins device memory for the drive, once for its allocation: empty, or why it is not.

        What is not registered can be moved all the same, through buffers of cuFile's own. kvikio registers the whole
        allocation that the memory is in; requests name its start, since cuFile takes any other for not registered.
        """
        if self.mode == COMPAT:
            return "compat mode registers nothing"
        with self._lock:
            hung = any(call.lost for call in self._apart)
        if hung:
            why = "not tried: an earlier registration has not returned"
        else:
            try:
                self.workers.check_process()
                self.apart(lambda: self._register(address, nbytes), "registration").get()
                return ""
            except (IOFault, DeviceError) as exc:
                why = str(exc.strerror if isinstance(exc, IOFault) else exc)
        with self._lock:
            self._refused[address] = why
        return why

    def deregister(self, address: int) -> bool:
        """Undoes `register`, as well as it can. Nothing may be moving there.

        Returns:
            Whether the memory may be freed: nothing of kvikio's is under way there any more.
        """
        with self._lock:
            if self._refused.pop(address, None) is not None:
                return True
            base = next((base for base, (span, _) in self._regions.items() if base <= address < base + span), None)
            if base is None:
                return True
            self._regions[base][1] -= 1
            if self._regions[base][1]:
                return True
            span, _ = self._regions.pop(base)
        try:
            call = self.apart(lambda: self._deregister(base, span), "deregistration")
        except IOFault:  # no thread for it
            return False
        with suppress(BaseException):  # kvikio's, of another thread
            call.get(_DEREGISTER_S)
        return call.returned()

    def region(self, address: int, nbytes: int) -> tuple[int, int]:
        """Start and size of the registered allocation that memory is in; its own where it is in none."""
        with self._lock:
            for base, (span, _) in self._regions.items():
                if base <= address and address + nbytes <= base + span:
                    return base, span
        return address, nbytes

    # ---- all of it

    def describe(self) -> dict[str, Any]:
        """What it works with, beside kvikio's own settings before and after."""
        with self._lock:
            refused = sorted(set(self._refused.values()))
            registered = sum(span for span, _ in self._regions.values())
            count = len(self._refused)
        return {
            "mode": self.mode,
            "kvikio": self._kvikio.__version__,
            "requests_in_flight": self.depth,
            "request_bytes": self.request_bytes,
            "registered_bytes": registered,
            "unregistered_buffers": count,
            "unregistered_why": refused,
            "settings": {name: {"was": was, "is": now} for name, (was, now) in self.settings.items()},
        }

    def stats(self) -> dict[str, int]:
        """Those of Workers; bytes_read, bytes_written, registered_bytes, files. lost_threads: those apart, too."""
        with self._lock:
            lost = sum(call.lost for call in self._apart)
            mine = {"bytes_read": self._moved["read"], "bytes_written": self._moved["write"], "files": len(self._kept)}
            mine["registered_bytes"] = sum(span for span, _ in self._regions.values())
        of_workers = self.workers.stats()
        return of_workers | mine | {"lost_threads": of_workers["lost_threads"] + lost}

    def close(self) -> None:
        """See IOBackend. What is registered stays so until the process ends, or `deregister`."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), OrderedDict()
        for file in kept:
            file.close()
        self.workers.close()

    def apart(self, work: Callable[[], Any], label: str) -> Call:
        """Runs what is no transfer on a thread of its own, which ends with it: also after `close`."""

        def answered() -> int:
            work()
            return 0

        one = Workers("gds-apart", 1, io_timeout_s=self._timeout_s, max_lost=0)
        call = one.submit(answered, label)
        one.close()
        with self._lock:
            self._apart = [known for known in self._apart if not known.returned()] + [call]
        return call

    def count(self, what: str, nbytes: int) -> None:
        """Bytes that were moved."""
        with self._lock:
            self._moved[what] += nbytes

    def _register(self, address: int, nbytes: int) -> int:
        self.cuda.enter(address)
        base, span = self.cuda.locate(address)
        with self._lock:
            if (known := self._regions.get(base)) is not None:
                known[1] += 1
                return 0
        try:
            with self._compat_mode():  # under AUTO kvikio may decide that there is nothing to do, and not say so
                self._kvikio.memory_register(Window(address, nbytes))
        except BaseException as exc:
            raise IOFault(errno_of(exc), f"{type(exc).__name__}: {exc}") from exc
        with self._lock:
            self._regions[base] = [span, 1]
        return 0

    def _deregister(self, base: int, span: int) -> None:
        self.cuda.enter(base)
        with self._compat_mode():
            self._kvikio.memory_deregister(Window(base, span))

    @contextmanager
    def _compat_mode(self) -> Iterator[None]:
        wanted = self._kvikio.CompatMode.OFF if self.mode == DIRECT else self._kvikio.CompatMode.ON
        with held(), self._kvikio.defaults.set("compat_mode", wanted):
            yield

    def _raise_defaults(self) -> dict[str, tuple[Any, Any]]:
        """kvikio's settings that matter to what it is asked here, (before, after). They are the process's.

        Direct reads are off by default. Its threads and their task size are not touched: nothing here uses them.
        """
        wanted = {"auto_direct_io_read": True, "auto_direct_io_write": True}
        before = {name: self._kvikio.defaults.get(name) for name in wanted}
        with held():
            self._kvikio.defaults.set(wanted)
        return {name: (before[name], self._kvikio.defaults.get(name)) for name in wanted}


def _device_place(buf: Any) -> tuple[int, int] | None:
    """Address and size of contiguous device memory; None for the host's."""
    if getattr(buf, "on_device", False):
        return int(buf.address), int(buf.nbytes)
    interface = getattr(buf, "__cuda_array_interface__", None)
    if interface is None:
        return None
    if interface.get("strides") is not None:
        raise ConfigError("a buffer of device memory must be contiguous")
    return int(interface["data"][0]), int(np.prod(interface["shape"])) * np.dtype(interface["typestr"]).itemsize


def errno_of(exc: BaseException) -> int:
    """The errno of an exception of kvikio's: its own, or the one whose text it ends with; EIO where there is none."""
    if isinstance(exc, OSError) and exc.errno:
        return exc.errno
    text = str(exc)
    return next((number for number in _CODES if text.endswith(os.strerror(number))), errno.EIO)


_CODES = sorted(errno.errorcode)
