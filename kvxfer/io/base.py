"""What a storage backend offers. The semantics are kvikio's, so that its files can stand in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self


class IOFuture(ABC):
    """A transfer under way."""

    @abstractmethod
    def get(self) -> int:
        """Waits, and returns the bytes moved: fewer than asked only where the file ended. May be called again.

        Raises:
            IOFault: the transfer failed; says how many bytes went before that.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether `get` would return at once."""


class IOFile(ABC):
    """An open file. Usable as a context manager; closing waits for nothing: transfers under way keep it open."""

    label: str  # the file's name in errors
    direct: bool  # O_DIRECT: buffers, sizes and offsets must be multiples of the alignment

    @abstractmethod
    def pread(self, buf: Any, size: int | None = None, file_offset: int = 0) -> IOFuture:
        """Starts reading `size` bytes (None: the whole of `buf`) at `file_offset` into `buf`.

        `buf` is contiguous and writable, and must live until the future is done.
        """

    @abstractmethod
    def pwrite(self, buf: Any, size: int | None = None, file_offset: int = 0) -> IOFuture:
        """Starts writing the first `size` bytes (None: all) of `buf` at `file_offset`."""

    @abstractmethod
    def close(self) -> None:
        """No further transfers; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class IOBackend(ABC):
    """A way of opening files."""

    name: str

    @abstractmethod
    def open(self, path: Path, *, direct: bool, create: bool = False) -> IOFile:
        """Opens `path` for reading and writing.

        Raises:
            IOFault: it cannot be opened.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops its threads; closing twice is fine."""
