"""What kvxfer is measured against: memcpy, plain pread and pwrite, and torch's indexing."""

from __future__ import annotations

import ctypes as C
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.pools import Bytes, RankPool
from kvxfer.errors import ConfigError

__all__ = ["Place", "PlainFiles", "TorchIndexing", "has_torch", "memcpy"]

COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra")
CALL_DTYPE = np.dtype([("fd", "<i8"), ("offset", "<u8"), ("address", "<u8"), ("bytes", "<u8")])  # peer_call


@cache
def _lib() -> Any:
    """peers.cpp, built.

    Raises:
        ConfigError: there is no compiler, or it does not take the file.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    found = wanted or [name for name in COMPILERS if shutil.which(name)][:1]
    if not found:
        raise ConfigError(f"the peers are built when the bench runs, and none of {', '.join(COMPILERS)} is installed")
    with tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as folder:
        library = Path(folder) / "peers.so"
        command = [*found, *FLAGS, str(Path(__file__).with_name("peers.cpp")), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as exc:
            raise ConfigError(f"cannot run the compiler {found[0]!r}: {exc}") from exc
        if done.returncode:
            raise ConfigError(f"the compiler refused the peers: {shlex.join(command)}\n{done.stderr}")
        lib = C.CDLL(str(library))
    lib.peer_memcpy.argtypes = [C.c_void_p, C.c_void_p, C.c_uint64, C.c_int]
    lib.peer_memcpy.restype = None
    lib.peer_transfer.argtypes = [C.c_void_p, C.c_uint64, C.c_int, C.c_int, C.c_void_p, C.c_uint64]
    lib.peer_transfer.restype = C.c_int
    return lib


def memcpy(to: Bytes, source: Bytes, threads: int) -> None:
    """One memcpy for each of `threads` threads."""
    assert to.nbytes == source.nbytes and to.flags.c_contiguous and source.flags.c_contiguous
    _lib().peer_memcpy(to.ctypes.data, source.ctypes.data, to.nbytes, threads)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's bytes are: which file, and from which offset."""

    file: int
    offset: int


class PlainFiles:
    """Preallocated files, and their bytes moved by pread and pwrite alone.

    Args:
        directory: an existing one; the files are removed by `close`.
        sizes: bytes of each file.
        places: of each chunk.
        chunk_bytes: bytes of a chunk.
        direct: open them with O_DIRECT.
    """

    def __init__(
        self, directory: Path, sizes: Sequence[int], places: Sequence[Place], chunk_bytes: int, *, direct: bool
    ) -> None:
        self._paths = [directory / f"plain-{number}" for number in range(len(sizes))]
        self._fds: list[int] = []
        self._places, self._chunk_bytes = places, chunk_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        for path, size in zip(self._paths, sizes, strict=True):
            self._fds.append(os.open(path, flags, 0o600))
            os.posix_fallocate(self._fds[-1], 0, size)

    def calls(self, memory: Bytes, call_bytes: int) -> NDArray[np.void]:
        """The calls that move every chunk in order, at most `call_bytes` each.

        Args:
            memory: [chunks, chunk_bytes], rows aligned for direct I/O.
        """
        pieces = range(0, self._chunk_bytes, call_bytes)
        calls = np.zeros((len(self._places), len(pieces)), CALL_DTYPE)
        start = np.array(pieces, np.uint64)
        calls["fd"] = np.array([self._fds[place.file] for place in self._places])[:, None]
        calls["offset"] = np.array([place.offset for place in self._places], np.uint64)[:, None] + start
        rows = memory.ctypes.data + np.arange(len(self._places), dtype=np.uint64) * np.uint64(memory.strides[0])
        calls["address"] = rows[:, None] + start
        calls["bytes"] = np.minimum(call_bytes, self._chunk_bytes - start)
        return calls.reshape(-1)

    @staticmethod
    def move(calls: NDArray[np.void], threads: int, *, write: bool, staging: Bytes | None = None) -> str | None:
        """Makes the calls on so many threads; what failed, if any did.

        Args:
            staging: [threads, bytes of the largest call], for bytes that go by way of a thread's own buffer.
        """
        where, stride = (None, 0) if staging is None else (staging.ctypes.data, staging.strides[0])
        assert staging is None or (len(staging) >= threads and staging.shape[1] >= calls["bytes"].max())
        error = int(_lib().peer_transfer(calls.ctypes.data, len(calls), threads, int(write), where, stride))
        return os.strerror(error) if error else None

    def close(self) -> None:
        """Removes the files."""
        for fd in self._fds:
            os.close(fd)
        for path in self._paths:
            path.unlink(missing_ok=True)


@cache
def has_torch() -> bool:
    """Whether torch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


class TorchIndexing:
    """Gather and scatter as one writes them with torch, a layer at a time, in int16: pages
    [pool, planes, tokens, heads, dim] <-> [blocks, heads, layers, planes, tokens, dim].

    Args:
        pools: of the ranks.
        canonical: uint8 [blocks, heads of the model, segment bytes].
    """

    def __init__(self, pools: Sequence[RankPool], canonical: Bytes) -> None:
        import torch

        geometry = pools[0].cache.geometry
        shape = (geometry.num_layers, geometry.planes, geometry.tokens_per_block, -1)
        whole = torch.from_numpy(canonical.view(np.int16)).view(*canonical.shape[:2], *shape)
        self._layers = [
            (kv, whole[:, pool.heads.start : pool.heads.stop, layer])
            for pool in pools
            for layer, kv in enumerate(torch.from_numpy(pool.pages.view(np.int16)))
        ]
        self._ids = torch.from_numpy(pools[0].ids)
        self._torch = torch

    def gather(self, threads: int) -> None:
        """By advanced indexing."""
        self._torch.set_num_threads(threads)
        for kv, canonical in self._layers:
            canonical[...] = kv[self._ids].permute(0, 3, 1, 2, 4)

    def scatter(self, threads: int) -> None:
        """By advanced indexing."""
        self._torch.set_num_threads(threads)
        for kv, canonical in self._layers:
            kv[self._ids] = canonical.permute(0, 2, 3, 1, 4)

    def gather_selected(self, threads: int) -> None:
        """By index_select of whole pages; the fastest way found that takes the layers as they are."""
        self._torch.set_num_threads(threads)
        for kv, canonical in self._layers:
            canonical[...] = self._torch.index_select(kv, 0, self._ids).permute(0, 3, 1, 2, 4)

    def scatter_selected(self, threads: int) -> None:
        """By index_copy_ of whole pages."""
        self._torch.set_num_threads(threads)
        for kv, canonical in self._layers:
            kv.index_copy_(0, self._ids, canonical.permute(0, 2, 3, 1, 4))
