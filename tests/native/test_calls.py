"""The table of system calls: faults do what kvx.h says, the loops move all bytes, the plain calls answer -errno."""

from __future__ import annotations

import ctypes as C
import errno
import fcntl
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvxfer import _native
from kvxfer._native import FAULT_ACTIONS, OPS, UINT64_MAX

ROOT = Path(__file__).resolve().parents[2]

TRY, DROP, TEST = _native.LOCK_TRY, _native.LOCK_DROP, _native.LOCK_TEST


def add(
    op: str, action: str, arg: int = 0, *, after: int = 0, times: int = 0, lo: int = 0, hi: int = UINT64_MAX
) -> int:
    """Adds a rule; its index."""
    rule = _native.Fault(OPS.index(op), FAULT_ACTIONS[action], arg, after, times, lo, hi)
    return int(_native.lib().kvx_fault_add(C.byref(rule)))


def hits(rule: int) -> int:
    return int(_native.lib().kvx_fault_hits(rule))


def calls(op: str) -> int:
    return int(_native.lib().kvx_op_calls(OPS.index(op)))


class OpenFile:
    """A kvx_file."""

    def __init__(self, path: Path, *, flags: int = os.O_RDWR | os.O_CREAT, direct: bool = False) -> None:
        self.lib = _native.lib()
        self.fd = self.lib.kvx_sys_open(os.fsencode(path), flags | (os.O_DIRECT if direct else 0), 0o600)
        if self.fd < 0:
            raise OSError(-self.fd, "open")
        self.handle = self.lib.kvx_file_adopt(self.fd, b"a file", int(direct))

    def pread(self, n: int, offset: int = 0) -> tuple[int, int, bytes]:
        """The answer, the bytes moved, and the buffer (page aligned)."""
        buffer = mmap.mmap(-1, max(n, 1))
        buffer.write(b"\xa5" * n)
        moved = C.c_uint64(12345)
        view = (C.c_char * max(n, 1)).from_buffer(buffer)
        answer = self.lib.kvx_file_pread(self.handle, C.addressof(view), n, offset, C.byref(moved))
        del view
        return answer, moved.value, buffer[:n]

    def pwrite(self, data: bytes, offset: int = 0) -> tuple[int, int]:
        buffer = mmap.mmap(-1, max(len(data), 1))
        buffer.write(data)
        moved = C.c_uint64(12345)
        view = (C.c_char * max(len(data), 1)).from_buffer(buffer)
        answer = self.lib.kvx_file_pwrite(self.handle, C.addressof(view), len(data), offset, C.byref(moved))
        del view
        return answer, moved.value

    def close(self) -> None:
        self.lib.kvx_file_release(self.handle)


DATA = bytes(np.random.default_rng(1).integers(0, 256, 3 * 4096, dtype=np.uint8))


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenFile]:
    (tmp_path / "data").write_bytes(DATA)
    try:
        opened = OpenFile(tmp_path / "data", direct=request.param)
    except OSError:
        pytest.skip("this file system refuses O_DIRECT")
    yield opened
    opened.close()


# ---- faults -----------------------------------------------------------------------------------------------


def test_an_errno_and_nothing_done(file: OpenFile, tmp_path: Path) -> None:
    before = calls("pwrite")
    rule = add("pwrite", "errno", errno.ENOSPC)
    assert file.pwrite(b"x" * 4096) == (-errno.ENOSPC, 0)
    assert hits(rule) == 1
    assert calls("pwrite") == before + 1
    assert (tmp_path / "data").read_bytes() == DATA


def test_an_errno_tells_what_went_before_it(file: OpenFile) -> None:
    add("pread", "short", 4096, times=2)
    add("pread", "errno", errno.EIO)
    answer, moved, buffer = file.pread(3 * 4096)
    assert (answer, moved) == (-errno.EIO, 8192)
    assert buffer == DATA[:8192] + b"\xa5" * 4096


def test_interrupted_calls_are_made_again(file: OpenFile) -> None:
    rules = [add("pread", "errno", errno.EINTR, times=3), add("pwrite", "errno", errno.EINTR, times=2)]
    assert file.pread(3 * 4096) == (len(DATA), len(DATA), DATA)
    assert file.pwrite(DATA) == (len(DATA), len(DATA))
    assert [hits(rule) for rule in rules] == [3, 2]


@pytest.mark.parametrize("step", [4096, 8192])
def test_short_transfers_are_looped_to_the_full_count(file: OpenFile, step: int) -> None:
    reads, writes = add("pread", "short", step), add("pwrite", "short", step)
    assert file.pread(3 * 4096) == (len(DATA), len(DATA), DATA)
    assert file.pwrite(DATA[::-1]) == (len(DATA), len(DATA))
    _native.lib().kvx_fault_clear()
    assert file.pread(3 * 4096)[2] == DATA[::-1]
    assert hits(reads) == hits(writes) == 0  # rules are gone with their counts


@pytest.mark.parametrize("step", [1, 100, 5000])
def test_a_transfer_may_stop_at_any_byte(file: OpenFile, tmp_path: Path, step: int) -> None:
    """Once, as with O_DIRECT it goes on from the boundary before the stop."""
    rules = add("pread", "short", step, times=1), add("pwrite", "short", step, times=1)
    assert file.pwrite(DATA[::-1]) == (len(DATA), len(DATA))
    assert file.pread(3 * 4096) == (len(DATA), len(DATA), DATA[::-1])
    assert [hits(rule) for rule in rules] == [1, 1]
    assert (tmp_path / "data").read_bytes() == DATA[::-1]


def test_a_short_transfer_touches_no_byte_beyond(file: OpenFile, tmp_path: Path) -> None:
    add("pread", "short", 100, times=1)
    add("pread", "errno", errno.EIO)
    assert file.pread(4096) == (-errno.EIO, 100, DATA[:100] + b"\xa5" * 3996)
    add("pwrite", "short", 100, times=1)
    add("pwrite", "errno", errno.EIO)
    assert file.pwrite(b"x" * 4096) == (-errno.EIO, 100)
    assert (tmp_path / "data").read_bytes() == b"x" * 100 + DATA[100:]


def test_small_steps_all_the_way(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    file = OpenFile(tmp_path / "data")
    rule = add("pread", "short", 7)
    assert file.pread(1000, 3) == (1000, 1000, DATA[3:1003])
    assert hits(rule) == -(-1000 // 7)
    file.close()


def test_short_of_nothing_is_the_end_of_the_file(file: OpenFile) -> None:
    add("pread", "short", 4096, times=1)
    add("pread", "short", 0)
    assert file.pread(8192) == (4096, 4096, DATA[:4096] + b"\xa5" * 4096)


def test_a_write_without_progress_is_an_error(file: OpenFile) -> None:
    add("pwrite", "short", 4096, times=1)
    add("pwrite", "short", 0)
    assert file.pwrite(DATA) == (-errno.EIO, 4096)


def test_the_end_of_the_file(file: OpenFile) -> None:
    answer, moved, buffer = file.pread(2 * 4096, 2 * 4096)
    assert (answer, moved, buffer[:4096]) == (4096, 4096, DATA[8192:])  # O_DIRECT may touch what follows
    assert file.pread(4096, 3 * 4096)[:2] == (0, 0)
    assert file.pread(0) == (0, 0, b"")


@pytest.mark.parametrize("length", [1, 511, 4097, 10_000])
def test_a_file_that_ends_off_the_alignment(file: OpenFile, length: int) -> None:
    assert _native.lib().kvx_sys_ftruncate(file.fd, length) == 0
    answer, moved, buffer = file.pread(3 * 4096)
    assert (answer, moved) == (length, length)
    assert buffer[:length] == DATA[:length]


def test_a_delay(file: OpenFile) -> None:
    rule = add("pread", "delay", 30)
    start = time.monotonic()
    assert file.pread(4096)[0] == 4096
    assert time.monotonic() - start >= 0.03
    assert hits(rule) == 1


def wait_for_hits(rule: int, count: int) -> None:
    deadline = time.monotonic() + 30
    while hits(rule) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("end", ["release", "clear"])
def test_a_hanging_call_goes_on_when_released(file: OpenFile, end: str) -> None:
    rule = add("pread", "hang")
    answers: list[tuple[int, int, bytes]] = []
    threads = [threading.Thread(target=lambda: answers.append(file.pread(4096)), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for_hits(rule, 3)
    time.sleep(0.02)
    assert answers == []
    getattr(_native.lib(), f"kvx_fault_{end}")()
    for thread in threads:
        thread.join(30)
    assert answers == [(4096, 4096, DATA[:4096])] * 3
    assert file.pread(4096)[0] == 4096  # a release holds until the next add


def test_a_rule_added_after_a_release_hangs_again(file: OpenFile) -> None:
    add("pread", "hang", times=1)
    _native.lib().kvx_fault_release()
    assert file.pread(4096)[0] == 4096
    rule = add("pread", "hang")
    thread = threading.Thread(target=file.pread, args=(4096,), daemon=True)
    thread.start()
    wait_for_hits(rule, 1)
    thread.join(0.02)
    assert thread.is_alive()
    _native.lib().kvx_fault_release()
    thread.join(30)
    assert not thread.is_alive()


def test_a_flipped_bit(file: OpenFile) -> None:
    rule = add("pread", "flip", 4100, times=1)
    answer, _, buffer = file.pread(2 * 4096)
    assert answer == 8192
    assert [i for i in range(8192) if buffer[i] != DATA[i]] == [4100]
    assert buffer[4100] == DATA[4100] ^ 1
    assert file.pread(2 * 4096)[2] == DATA[:8192]
    assert hits(rule) == 1


def test_a_flip_beyond_what_was_read_changes_nothing(file: OpenFile) -> None:
    add("pread", "flip", 4096)
    assert file.pread(4096)[2] == DATA[:4096]


@pytest.mark.parametrize(
    ("action", "arg", "kept"), [("kill_before", 0, 0), ("kill_after", 0, 4096), ("kill_after", 100, 100)]
)
@pytest.mark.parametrize("direct", [False, True])
def test_a_killed_process(tmp_path: Path, action: str, arg: int, kept: int, direct: bool) -> None:
    (tmp_path / "data").write_bytes(DATA)
    code = (
        "import sys; from pathlib import Path; from tests.native.test_calls import OpenFile, add\n"
        f"file = OpenFile(Path({str(tmp_path / 'data')!r}), direct={direct})\n"
        f"add('pwrite', {action!r}, {arg}, after=1)\n"
        "assert file.pwrite(b'a' * 4096, 0) == (4096, 4096)\n"
        "print('first', flush=True); file.pwrite(b'b' * 4096, 4096); print('second', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    if direct and "OSError" in done.stderr:
        pytest.skip("this file system refuses O_DIRECT")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "first\n"), done.stderr
    want = b"a" * 4096 + b"b" * kept + DATA[4096 + kept :]
    assert (tmp_path / "data").read_bytes() == want


def test_after_and_times(file: OpenFile) -> None:
    rule = add("pread", "errno", errno.EIO, after=2, times=2)
    assert [file.pread(4096)[0] for _ in range(6)] == [4096, 4096, -errno.EIO, -errno.EIO, 4096, 4096]
    assert hits(rule) == 2


def test_the_first_rule_that_hits_decides(file: OpenFile) -> None:
    first = add("pread", "errno", errno.EIO, times=1)
    second = add("pread", "errno", errno.ESTALE, after=1, times=1)
    assert (first, second) == (0, 1)
    # The first call does not reach the second rule, so that its `after` counts from the second one.
    assert [file.pread(4096)[0] for _ in range(4)] == [-errno.EIO, 4096, -errno.ESTALE, 4096]


@pytest.mark.parametrize(
    ("lo", "hi", "met"),
    [(0, 1, {0}), (4095, 4096, {0}), (4096, 4097, {1}), (4095, 4097, {0, 1}), (8192, UINT64_MAX, {2}), (5, 5, set())],
)
def test_ranges(file: OpenFile, lo: int, hi: int, met: set[int]) -> None:
    add("pread", "errno", errno.EIO, lo=lo, hi=hi)
    assert {i for i in range(3) if file.pread(4096, i * 4096)[0] < 0} == met


@pytest.mark.parametrize(
    ("op", "action", "arg"),
    [("open", "short", 1), ("pwrite", "flip", 0), ("open", "flip", 0), ("pread", "errno", 0), ("pread", "errno", 4096)],
)
def test_rules_without_a_meaning_are_refused(op: str, action: str, arg: int) -> None:
    assert add(op, action, arg) == -errno.EINVAL
    assert _native.lib().kvx_fault_add(None) == -errno.EINVAL


def test_unknown_numbers_are_refused() -> None:
    for op, action in [(-1, 1), (len(OPS), 1), (2, 0), (2, 8)]:
        rule = _native.Fault(op, action, 5, 0, 0, 0, UINT64_MAX)
        assert _native.lib().kvx_fault_add(C.byref(rule)) == -errno.EINVAL
    assert hits(-1) == hits(99) == 0
    assert _native.lib().kvx_op_calls(-1) == _native.lib().kvx_op_calls(len(OPS)) == 0


# ---- plain calls ------------------------------------------------------------------------------------------


NO_PLAIN_CALL = ("mmap", "uring_setup", "uring_register", "uring_submit", "uring_complete")


def test_plain_calls_do_what_they_say_and_are_counted(tmp_path: Path) -> None:
    lib = _native.lib()
    path, other, folder = (os.fsencode(tmp_path / name) for name in ("a", "b", "folder"))
    before = [calls(op) for op in OPS]
    fd = lib.kvx_sys_open(path, os.O_RDWR | os.O_CREAT, 0o600)
    assert fd >= 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert lib.kvx_sys_fallocate(fd, 8192) == 0
    assert lib.kvx_sys_size(fd) == 8192
    assert lib.kvx_sys_pwrite(fd, b"hello", 5, 8190) == 5
    buffer = C.create_string_buffer(16)
    assert lib.kvx_sys_pread(fd, buffer, 16, 8189) == 6
    assert buffer.raw[:6] == b"\0hello"
    assert lib.kvx_sys_ftruncate(fd, 100) == 0
    assert lib.kvx_sys_fsync(fd) == 0
    second = lib.kvx_sys_open(path, os.O_RDWR, 0)
    assert lib.kvx_sys_lock(fd, 5, TRY) == lib.kvx_sys_lock(second, 6, TRY) == lib.kvx_sys_lock(fd, 5, TEST) == 0
    assert lib.kvx_sys_lock(second, 5, TRY) == lib.kvx_sys_lock(second, 5, TEST) == -errno.EWOULDBLOCK
    assert lib.kvx_sys_lock(fd, 5, DROP) == lib.kvx_sys_lock(second, 5, TRY) == 0
    assert lib.kvx_sys_rename(path, other) == 0
    assert lib.kvx_sys_mkdir(folder, 0o700) == 0
    assert lib.kvx_sys_mkdir(folder, 0o700) == -errno.EEXIST
    assert lib.kvx_sys_unlink(other) == 0
    assert lib.kvx_sys_close(fd) == lib.kvx_sys_close(second) == 0
    counted = dict(zip(OPS, [calls(op) - old for op, old in zip(OPS, before, strict=True)], strict=True))
    assert counted == {
        **dict.fromkeys(OPS, 1),
        "open": 2,
        "close": 2,
        "lock": 7,
        "mkdir": 2,
        **dict.fromkeys(NO_PLAIN_CALL, 0),
    }


def test_plain_calls_answer_minus_errno(tmp_path: Path) -> None:
    lib, gone = _native.lib(), os.fsencode(tmp_path / "gone")
    buffer = C.create_string_buffer(16)
    assert lib.kvx_sys_open(gone, os.O_RDONLY, 0) == -errno.ENOENT
    assert lib.kvx_sys_unlink(gone) == lib.kvx_sys_rename(gone, gone) == -errno.ENOENT
    assert lib.kvx_sys_mkdir(gone + b"/gone", 0o700) == -errno.ENOENT
    for answer in (
        lib.kvx_sys_close(-1), lib.kvx_sys_pread(-1, buffer, 1, 0), lib.kvx_sys_pwrite(-1, buffer, 1, 0),
        lib.kvx_sys_fallocate(-1, 1), lib.kvx_sys_ftruncate(-1, 1), lib.kvx_sys_fsync(-1), lib.kvx_sys_size(-1),
        lib.kvx_sys_lock(-1, 0, TRY), lib.kvx_sys_dioalign(-1, C.byref(C.c_uint32()), C.byref(C.c_uint32())),
    ):  # fmt: skip
        assert answer == -errno.EBADF


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("pread", "pwrite", *NO_PLAIN_CALL)])
def test_every_plain_call_can_fail(tmp_path: Path, op: str) -> None:
    lib, path = _native.lib(), os.fsencode(tmp_path / "a")
    fd = lib.kvx_sys_open(path, os.O_RDWR | os.O_CREAT, 0o600)
    make = {
        "open": lambda: lib.kvx_sys_open(path, os.O_RDONLY, 0),
        "close": lambda: lib.kvx_sys_close(fd),
        "fallocate": lambda: lib.kvx_sys_fallocate(fd, 1),
        "ftruncate": lambda: lib.kvx_sys_ftruncate(fd, 1),
        "fsync": lambda: lib.kvx_sys_fsync(fd),
        "fstat": lambda: lib.kvx_sys_size(fd),
        "unlink": lambda: lib.kvx_sys_unlink(path),
        "rename": lambda: lib.kvx_sys_rename(path, path),
        "mkdir": lambda: lib.kvx_sys_mkdir(path, 0o700),
        "lock": lambda: lib.kvx_sys_lock(fd, 0, TRY),
    }[op]
    rule = add(op, "errno", errno.EDQUOT, times=1)
    assert make() == -errno.EDQUOT
    assert make() != -errno.EDQUOT
    assert hits(rule) == 1
    _native.lib().kvx_fault_clear()
    if op == "close":  # Linux closes a descriptor, whatever it answers
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    else:
        os.close(fd)


def test_direct_alignment_is_what_statx_says(tmp_path: Path) -> None:
    memory, offset = C.c_uint32(), C.c_uint32()
    lib, path = _native.lib(), os.fsencode(tmp_path / "a")
    fd = lib.kvx_sys_open(path, os.O_RDWR | os.O_CREAT, 0o600)
    answer = lib.kvx_sys_dioalign(fd, C.byref(memory), C.byref(offset))
    assert answer in (0, -errno.EOPNOTSUPP)
    if answer == 0:
        for value in (memory.value, offset.value):
            assert value >= 1
            assert value & (value - 1) == 0
    os.close(fd)


# ---- counted files ----------------------------------------------------------------------------------------


def test_the_last_release_closes_through_the_table(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    file = OpenFile(tmp_path / "data")
    before = calls("close")
    file.close()
    assert calls("close") == before + 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)
    _native.lib().kvx_file_release(None)


def test_faults_come_and_go_under_traffic(tmp_path: Path) -> None:
    """Rules added and cleared while others read: every answer is either the bytes or the errno."""
    (tmp_path / "data").write_bytes(DATA)
    file = OpenFile(tmp_path / "data")
    stop = threading.Event()
    wrong: list[tuple[int, int]] = []

    def read() -> None:
        while not stop.is_set():
            answer, moved, buffer = file.pread(4096)
            if (answer, buffer) not in [(4096, DATA[:4096]), (-errno.EIO, b"\xa5" * 4096)]:
                wrong.append((answer, moved))

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in itertools.count():
        add("pread", ["errno", "hang", "delay"][i % 3], [errno.EIO, 0, 1][i % 3], times=5)
        _native.lib().kvx_fault_release() if i % 2 else _native.lib().kvx_fault_clear()
        if i >= 300:
            break
    _native.lib().kvx_fault_clear()
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    file.close()
