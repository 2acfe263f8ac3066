"""The posix backend and the wrappers for small files: kvikio's semantics, short transfers, errors that say what and how
much."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvxfer import staging
from kvxfer.errors import ConfigError, IOFault, StoreError
from kvxfer.io import system
from kvxfer.io.posix import PosixBackend
from kvxfer.staging import AlignedBuffer
from kvxfer.testing import FaultyIO


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_written_comes_back(path: Path, direct: bool) -> None:
    out, back = AlignedBuffer(3 * 4096), AlignedBuffer(3 * 4096)
    out.array[:] = np.random.default_rng(1).integers(256, size=len(out), dtype=np.uint8)
    backend = PosixBackend(2)
    with backend.open(path, direct=direct, create=True) as file:
        assert (file.label, file.direct) == ("file", direct)
        writes = [file.pwrite(out.array[i * 4096 :], 4096, i * 4096) for i in (2, 0, 1)]
        assert [write.get() for write in writes] == [4096] * 3
        read = file.pread(back.array)
        assert read.get() == read.get() == len(back)
        assert read.done()
    backend.close()
    backend.close()
    assert np.array_equal(out.array, back.array)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_read_is_short_at_the_end_of_the_file_only(path: Path) -> None:
    path.write_bytes(bytes(range(100)))
    with PosixBackend().open(path, direct=False) as file:
        buffer = bytearray(50)
        assert file.pread(buffer, file_offset=80).get() == 20
        assert buffer[:20] == bytes(range(80, 100))
        assert file.pread(buffer, file_offset=500).get() == 0
        assert file.pread(buffer, 0).get() == 0


def test_short_calls_are_looped(path: Path, faults: FaultyIO) -> None:
    data = np.random.default_rng(2).integers(256, size=10_000, dtype=np.uint8)
    back = np.zeros_like(data)
    faults.short("pwrite", 999)
    faults.short("pread", 777)
    with PosixBackend().open(path, direct=False, create=True) as file:
        assert file.pwrite(data).get() == 10_000
        assert file.pread(back).get() == 10_000
    assert np.array_equal(data, back)
    assert faults.calls("pread") >= 12


def test_an_error_says_how_much_went_before(path: Path, faults: FaultyIO) -> None:
    path.write_bytes(bytes(10_000))
    faults.short("pread", 4096, times=1)
    faults.fail("pread", errno.EIO)
    with PosixBackend().open(path, direct=False) as file:
        message = "read: 4096 of 10000 bytes at offset 0x0: Input/output error: 'file'"
        with pytest.raises(IOFault, match=message) as info:
            file.pread(bytearray(10_000), file_offset=0).get()
    assert info.value.errno == errno.EIO
    assert info.value.filename == "file"


def test_a_closed_file_takes_no_more_and_lets_what_runs_end(path: Path, faults: FaultyIO) -> None:
    path.write_bytes(b"x" * 100)
    faults.hang("pread", times=1)
    backend = PosixBackend()
    file = backend.open(path, direct=False)
    buffer = bytearray(100)
    running = file.pread(buffer)
    file.close()
    file.close()
    assert not running.done()
    with pytest.raises(StoreError, match="file is closed"):
        file.pread(buffer)
    with pytest.raises(StoreError, match="file is closed"):
        _ = file.handle
    faults.release()
    assert running.get() == 100
    backend.close()
    with pytest.raises(StoreError, match="backend is closed"):
        backend.open(path, direct=False).pread(buffer)


def test_buffers_are_checked(path: Path) -> None:
    path.write_bytes(b"x" * 100)
    with PosixBackend().open(path, direct=False) as file:
        for call in (
            lambda: file.pread(b"constant"),
            lambda: file.pread(bytearray(10), 11),
            lambda: file.pwrite(b"abc", -1),
            lambda: file.pwrite(b"abc", 3, -4096),
            lambda: file.pwrite(np.zeros((4, 4), dtype=np.uint8)[:, 1]),
        ):
            with pytest.raises(ConfigError):
                call()
    with pytest.raises(ConfigError, match="threads=0"):
        PosixBackend(0)


def test_opening_what_is_not_there(path: Path) -> None:
    with pytest.raises(IOFault, match="No such file") as info:
        PosixBackend().open(path, direct=False)
    assert info.value.errno == errno.ENOENT


def test_many_threads_move_their_own_bytes(path: Path) -> None:
    backend = PosixBackend(4)
    with backend.open(path, direct=False, create=True) as file:

        def work(number: int) -> None:
            for turn in range(20):
                place = (number * 20 + turn) * 512
                data = np.full(512, number * 20 + turn, dtype=np.uint8)
                back = np.zeros(512, dtype=np.uint8)
                assert file.pwrite(data, file_offset=place).get() == 512
                assert file.pread(back, file_offset=place).get() == 512
                assert np.array_equal(data, back)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    backend.close()


# ---- small files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["open", "pwrite", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_replacement_that_fails_leaves_the_old_file(path: Path, faults: FaultyIO, op: str, code: int) -> None:
    system.replace_file(path, b"old")
    faults.fail(op, code, times=1)
    with pytest.raises(IOFault) as info:
        system.replace_file(path, b"new")
    assert info.value.errno == code
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["file"]
    system.replace_file(path, b"new")
    assert system.read_small(path) == b"new"


def test_small_files_move_over_short_and_interrupted_calls(path: Path, faults: FaultyIO) -> None:
    faults.fail("pwrite", errno.EINTR, times=2)
    faults.short("pwrite", 7)
    faults.fail("pread", errno.EINTR, times=2)
    faults.short("pread", 5, times=3)
    data = bytes(range(256)) * 3
    system.replace_file(path, data)
    assert system.read_small(path) == data
    assert system.read_small(path, 10) == data[:10]
    assert system.read_small(path.with_name("none")) is None


def test_a_write_without_progress_is_an_error(path: Path, faults: FaultyIO) -> None:
    faults.short("pwrite", 0)
    with pytest.raises(IOFault, match="write: 0 of 3 bytes") as info:
        system.replace_file(path, b"new")
    assert info.value.errno == errno.EIO


def test_directories_are_the_owners_and_may_be_there(tmp_path: Path, faults: FaultyIO) -> None:
    place = tmp_path / "made"
    system.sys_mkdir(place)
    system.sys_mkdir(place)
    assert place.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IOFault):
        system.sys_mkdir(tmp_path / "file")
    faults.fail("unlink", errno.EROFS, times=1)
    assert system.try_unlink(tmp_path / "file") is not None
    assert system.try_unlink(tmp_path / "file") is None
    assert system.try_unlink(tmp_path / "file") is None  # gone is gone


# ---- aligned buffers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, 512, 4096, 65536])
def test_buffers_are_aligned_and_outlive_their_owner(alignment: int) -> None:
    buffer = AlignedBuffer(10_000, alignment)
    assert buffer.address % alignment == 0
    assert len(buffer) == 10_000
    assert not buffer.array.any()
    view = buffer.array[5000:]
    del buffer
    view[:] = 7
    assert view.sum() == 35_000


@pytest.mark.parametrize(("nbytes", "alignment"), [(0, 4096), (10, 3), (10, 0)])
def test_buffers_that_cannot_be(nbytes: int, alignment: int) -> None:
    with pytest.raises(ConfigError):
        AlignedBuffer(nbytes, alignment)


def taken_along(address: int, nbytes: int, drop: Callable[[], object]) -> int:
    """In a fork's child: whether `drop` takes away what the child has mapped at `address` itself, if that is free."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    mine = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    drop()
    gc.collect()
    ctypes.memset(mine, 1, nbytes)  # SIGSEGV where it is gone
    return int(mine == address)


def test_a_forks_child_has_zeros_of_its_own() -> None:
    """No page is shared, and the end of the child's buffer takes nothing else along."""
    buffers = [AlignedBuffer(5 * 4096)]
    buffers[0].array[:] = 7
    if not (child := os.fork()):
        wrong = 8
        with suppress(BaseException):
            zeros = not buffers[0].array.any()
            buffers[0].array[:] = 9
            wrong = taken_along(buffers[0].address, 5 * 4096, buffers.clear) + (0 if zeros else 2)
        os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    assert (buffers[0].array == 7).all()


def test_a_kernel_that_does_not_wipe_gives_a_forks_child_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_WIPE_ON_FORK", 9999)
    buffer = AlignedBuffer(5 * 4096)
    buffer.array[:] = 7
    if not (child := os.fork()):
        os._exit(2 - taken_along(buffer.address, 5 * 4096, lambda: None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert (buffer.array == 7).all()
