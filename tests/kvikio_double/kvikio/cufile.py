"""CuFile over pread and pwrite."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from kvikio import defaults, double
from kvikio.buffer import place


class IOFuture:
    __slots__ = ("_answer", "_handle")

    def __init__(self, handle):
        self._handle = handle

    def get(self) -> int:
        return self._handle()

    def done(self) -> bool:
        return True


class CuFile:
    def __init__(self, file: pathlib.Path | str, flags: str = "r"):
        self.compat = defaults.get("compat_mode") != defaults.CompatMode.OFF  # as the real one under AUTO may choose
        double.called("CuFile", os.fspath(file), flags, self.compat)
        if not self.compat and (message := double.faults.get("refuse_files")):
            raise RuntimeError(message)
        mode = {"r": os.O_RDONLY, "r+": os.O_RDWR, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}[flags]
        self._fd = os.open(file, mode | os.O_CLOEXEC)
        self._direct = -1 if self.compat else os.open(file, mode | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        double.called("close")
        for fd in {self._fd, self._direct} - {-1}:
            os.close(fd)
        self._fd = self._direct = -1

    @property
    def closed(self) -> bool:
        return self._fd == -1

    def fileno(self) -> int:
        return self._fd

    def open_flags(self) -> int:
        import fcntl

        return fcntl.fcntl(self._fd, fcntl.F_GETFL)

    def __enter__(self) -> CuFile:
        return self

    def __exit__(self, exc_type, exc_val, exc_tb) -> None:
        self.close()

    def pread(
        self,
        buf,
        size: int | None = None,
        file_offset: int = 0,
        task_size: int | None = None,
    ) -> IOFuture:
        raise AssertionError("kvikio's thread pool would hold up the interpreter's exit")

    def pwrite(
        self,
        buf,
        size: int | None = None,
        file_offset: int = 0,
        task_size: int | None = None,
    ) -> IOFuture:
        raise AssertionError("kvikio's thread pool would hold up the interpreter's exit")

    def raw_read(self, buf, size: int | None = None, file_offset: int = 0, dev_offset: int = 0) -> int:
        return self._move("raw_read", buf, size, file_offset, dev_offset)

    def raw_write(self, buf, size: int | None = None, file_offset: int = 0, dev_offset: int = 0) -> int:
        return self._move("raw_write", buf, size, file_offset, dev_offset)

    def is_direct_io_supported(self) -> bool:
        return self._direct != -1

    def _move(self, name: str, buf: Any, size: int | None, file_offset: int, dev_offset: int) -> int:
        base, nbytes = place(buf, host=False)
        assert size is not None and size <= nbytes, "Size is greater than the size of the buffer"
        straight = not self.compat and base in double.registered  # any other start is taken for not registered
        number = double.called(name, size, file_offset, dev_offset, straight, at=file_offset)
        most = double.faults.get("short")
        size = min(size, most) if most is not None else size
        assert self.compat or size <= 16 << 20
        double.check_context()
        memory = double.memory(base + dev_offset, size)
        if name == "raw_write":
            data = bytearray(memory)
            self._flip(name, number, data)
            return os.pwrite(self._fd, data, file_offset) if size else 0
        data = bytearray(os.pread(self._fd, size, file_offset))
        if size and not data:
            raise RuntimeError("POSIX error on pread: EOF")
        self._flip(name, number, data)
        memory[: len(data)] = data
        return len(data)

    @staticmethod
    def _flip(name: str, number: int, data: bytearray) -> None:
        every = (double.faults.get("flip") or {}).get(name)
        if every and number % every == 0 and data:
            data[len(data) // 2] ^= 1
