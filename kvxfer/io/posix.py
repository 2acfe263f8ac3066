"""pread and pwrite over libkvx's counted files."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer import _native
from kvxfer.errors import ConfigError, IOFault, StoreError
from kvxfer.io.base import IOBackend, IOFile, IOFuture
from kvxfer.io.system import PRIVATE_FILE, sys_close, sys_open


class PosixFuture(IOFuture):
    """A transfer on a thread of the backend."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def get(self) -> int:
        """Bytes moved."""
        return self._future.result()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()


class PosixFile(IOFile):
    """A file whose descriptor closes when the last transfer on it has returned, jobs' in csrc included.

    Takes over `fd`: where a file cannot be made of it, it is closed.

    `handle` is the address of its kvx_file, for kvx_chunk records, `fd` its descriptor: both are valid until `close`.
    """

    def __init__(self, fd: int, label: str, direct: bool, pool: Callable[[], ThreadPoolExecutor] | None = None) -> None:
        self.label, self.direct, self.fd = label, direct, fd
        self._pool = pool
        self._users = threading.Lock()
        self._running = 1  # this object; each transfer of its own adds one
        try:
            handle = _native.lib().kvx_file_adopt(fd, os.fsencode(label), int(direct))
            if not handle:
                raise IOFault(errno.ENOMEM, "no memory for an open file", label)
        except BaseException:
            sys_close(fd)
            raise
        self._handle: int = handle
        self._open = True

    @property
    def handle(self) -> int:
        """Address of the kvx_file.

        Raises:
            StoreError: the file is closed.
        """
        if not self._open:
            raise StoreError(f"{self.label} is closed")
        return self._handle

    def pread(self, buf: Any, size: int | None = None, file_offset: int = 0) -> IOFuture:
        """See IOFile."""
        return self._start("read", buf, size, file_offset)

    def pwrite(self, buf: Any, size: int | None = None, file_offset: int = 0) -> IOFuture:
        """See IOFile."""
        return self._start("write", buf, size, file_offset)

    def read(self, buf: Any, size: int | None = None, file_offset: int = 0) -> int:
        """`pread` in the calling thread."""
        return self._run("read", buf, size, file_offset)

    def write(self, buf: Any, size: int | None = None, file_offset: int = 0) -> int:
        """`pwrite` in the calling thread."""
        return self._run("write", buf, size, file_offset)

    def close(self) -> None:
        """No further transfers; those under way keep the descriptor."""
        with self._users:
            if not self._open:
                return
            self._open = False
        self._leave()

    def _start(self, what: str, buf: Any, size: int | None, offset: int) -> IOFuture:
        if self._pool is None:
            raise StoreError(f"{self.label} was opened without a backend: it has no threads")
        self._enter()
        try:
            array, n = self._checked(what, buf, size, offset)
            return PosixFuture(self._pool().submit(self._move_and_leave, what, array, n, offset))
        except BaseException:
            self._leave()
            raise

    def _run(self, what: str, buf: Any, size: int | None, offset: int) -> int:
        self._enter()
        try:
            array, n = self._checked(what, buf, size, offset)
            return self._move(what, array, n, offset)
        finally:
            self._leave()

    def _move_and_leave(self, what: str, array: Any, n: int, offset: int) -> int:
        try:
            return self._move(what, array, n, offset)
        finally:
            self._leave()

    def _move(self, what: str, array: Any, n: int, offset: int) -> int:
        moved = ctypes.c_uint64()
        function = _native.lib().kvx_file_pread if what == "read" else _native.lib().kvx_file_pwrite
        result = int(function(self._handle, array.ctypes.data, n, offset, ctypes.byref(moved)))
        if result < 0:
            text = f"{what}: {moved.value} of {n} bytes at offset {offset:#x}: {os.strerror(-result)}"
            raise IOFault(-result, text, self.label)
        return result

    def _checked(self, what: str, buf: Any, size: int | None, offset: int) -> tuple[Any, int]:
        array = np.frombuffer(buf, dtype=np.uint8) if not isinstance(buf, np.ndarray) else buf
        if not array.flags.c_contiguous or (what == "read" and not array.flags.writeable):
            raise ConfigError(f"{self.label}: a buffer to {what} must be contiguous, and writable for a read")
        n = array.nbytes if size is None else size
        if not 0 <= n <= array.nbytes or offset < 0:
            raise ConfigError(f"{self.label}: {what} of {n} bytes at {offset}: the buffer has {array.nbytes}")
        return array, n

    def _enter(self) -> None:
        with self._users:
            if not self._open:
                raise StoreError(f"{self.label} is closed")
            self._running += 1

    def _leave(self) -> None:
        with self._users:
            self._running -= 1
            last = self._running == 0
        if last:
            _native.lib().kvx_file_release(self._handle)


class PosixBackend(IOBackend):
    """The C library's calls on a few threads. The threads start with the first future."""

    name = "posix"

    def __init__(self, threads: int = 4) -> None:
        if type(threads) is not int or threads < 1:
            raise ConfigError(f"threads={threads!r} must be an integer of at least 1")
        self._threads = threads
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    def open(self, path: Path, *, direct: bool, create: bool = False) -> PosixFile:
        """See IOBackend. A new file is the owner's alone."""
        flags = os.O_RDWR | (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0)
        return PosixFile(sys_open(Path(path), flags, PRIVATE_FILE), Path(path).name, direct, self._pool)

    def close(self) -> None:
        """Waits for nothing: what was started runs to its end."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise StoreError("the posix backend is closed")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="kvx-posix")
            return self._executor
