"""The backend over kvikio's double: right bytes and counts whatever a request moves, registration, refusals, hangs.

What cuFile does on a GPU none of this can say."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError, IOFault, StoreError
from kvxfer.io import gds
from kvxfer.io.gds import COMPAT, DIRECT, Window, errno_of
from kvxfer.testing import FaultyIO, assert_bytes_equal
from tests.io.gds_rig import KIB, Machine, machine, random, until

__all__ = ["machine"]


# ---- bytes


@pytest.mark.parametrize("mode", [DIRECT, COMPAT])
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("short", [None, 5000, 4096, 12288, 1000])
def test_what_is_written_is_on_the_drive_and_what_is_read_in_the_device(
    machine: Machine, mode: str, registered: bool, short: int | None
) -> None:
    """Short requests end anywhere; the next goes on from the page before, and requests have a cap."""
    if short is not None and short < 4096 and mode == DIRECT:
        short += 4096  # one that never gets past a page makes no progress: below
    backend = machine.backend(mode, request_bytes=16 * KIB)
    data, other = random(100 * KIB), random(100 * KIB, 2)
    window = machine.device(np.zeros(120 * KIB, np.uint8))
    if registered:
        assert backend.register(window.address, window.nbytes) == (
            "" if mode == DIRECT else "compat mode registers nothing"
        )
    machine.kvikio.double.faults["short"] = short
    part = Window(window.address + 8 * KIB, 100 * KIB)
    machine.bytes_at(part)[:] = data
    machine.path.write_bytes(bytes(300 * KIB))
    with backend.open(machine.path, direct=True) as file:
        if short is None or short >= 4096:
            assert file.pwrite(part, file_offset=64 * KIB).get() == 100 * KIB
            want = np.zeros(300 * KIB, np.uint8)
            want[64 * KIB : 164 * KIB] = data
            assert_bytes_equal(np.fromfile(machine.path, np.uint8), want)
            machine.path.write_bytes(bytes(4 * KIB) + other.tobytes() + bytes(4 * KIB))
            machine.bytes_at(window)[:] = 0x77
            assert file.pread(part, 100 * KIB, 4 * KIB).get() == 100 * KIB
            assert_bytes_equal(machine.bytes_at(part), other)
            assert (machine.bytes_at(window)[: 8 * KIB] == 0x77).all()
            assert (machine.bytes_at(window)[108 * KIB :] == 0x77).all()
        else:
            with pytest.raises(IOFault, match="no progress"):
                file.pwrite(part, file_offset=64 * KIB).get()
    for size, offset, _, straight in machine.requests("raw_write") + machine.requests("raw_read"):
        assert 0 < size <= 16 * KIB
        assert offset % 4096 == 0
        assert straight == (registered and mode == DIRECT)


def test_a_request_names_the_start_of_the_allocation_that_is_registered(machine: Machine) -> None:
    """A bay inside a larger allocation: cuFile takes any other start for memory that is not registered."""
    backend = machine.backend()
    whole = machine.cuda.alloc(64 * KIB)
    machine.kvikio.double.faults["allocation"] = (whole.address, 64 * KIB)  # kvikio registers all of it
    bays = [Window(whole.address + n * 16 * KIB, 16 * KIB) for n in (1, 2)]
    assert [backend.register(bay.address, bay.nbytes) for bay in bays] == ["", ""]
    assert len(machine.requests("memory_register")) == 1
    assert backend.stats()["registered_bytes"] == 64 * KIB
    data = random(16 * KIB)
    with backend.open(machine.path, create=True) as file:
        machine.bytes_at(bays[1])[:] = data
        assert file.pwrite(bays[1]).get() == 16 * KIB
    assert machine.requests("raw_write") == [(16 * KIB, 0, 32 * KIB, True)]
    assert_bytes_equal(np.fromfile(machine.path, np.uint8), data)
    assert backend.deregister(bays[0].address)
    assert machine.requests("memory_deregister") == []
    assert backend.deregister(bays[1].address)
    assert machine.requests("memory_deregister") == [(whole.address,)]


def test_a_read_is_short_at_the_end_of_the_file_only(machine: Machine) -> None:
    backend = machine.backend()
    data = random(10 * KIB)
    machine.path.write_bytes(data.tobytes())
    window = machine.device(np.full(16 * KIB, 9, np.uint8))
    with backend.open(machine.path) as file:
        assert file.pread(window, 16 * KIB, 4 * KIB).get() == 6 * KIB
        assert_bytes_equal(machine.bytes_at(window)[: 6 * KIB], data[4 * KIB :])
        assert (machine.bytes_at(window)[6 * KIB :] == 9).all()
        assert file.pread(window, 16 * KIB, 12 * KIB).get() == 0
        assert file.pread(window, 0, 0).get() == 0
    assert backend.stats()["bytes_read"] == 6 * KIB


@pytest.mark.parametrize("direct", [False, True])
def test_host_memory_goes_by_pread_and_pwrite(machine: Machine, direct: bool) -> None:
    from kvxfer.staging import AlignedBuffer

    backend = machine.backend()
    out, back = AlignedBuffer(8 * KIB), AlignedBuffer(8 * KIB)
    out.array[:] = random(8 * KIB)
    with backend.open(machine.path, direct=direct, create=True) as file:
        assert (file.label, file.direct) == ("slab-0", direct)
        assert file.pwrite(out.array).get() == 8 * KIB
        assert file.pread(back.array, 4 * KIB, 4 * KIB).get() == 4 * KIB
    assert_bytes_equal(back.array[: 4 * KIB], out.array[4 * KIB :])
    assert machine.requests("CuFile") == []


def test_many_requests_are_in_flight_at_once(machine: Machine) -> None:
    backend = machine.backend(depth=4)
    machine.kvikio.double.faults["hang"] = ["raw_read"]
    machine.path.write_bytes(random(64 * KIB).tobytes())
    windows = [machine.device(np.zeros(4 * KIB, np.uint8)) for _ in range(6)]
    with backend.open(machine.path) as file:
        calls = [file.pread(window, file_offset=n * 4 * KIB) for n, window in enumerate(windows)]
        until(lambda: len(machine.requests("raw_read")) == 4)
        assert backend.stats()["busy_threads"] == 4
        assert backend.stats()["queued"] == 2
        machine.kvikio.double.release.set()
        assert [call.get() for call in calls] == [4 * KIB] * 6
    for n, window in enumerate(windows):
        assert_bytes_equal(machine.bytes_at(window), np.fromfile(machine.path, np.uint8)[n * 4 * KIB :][: 4 * KIB])


@pytest.mark.parametrize(
    ("arguments", "names"),
    [((8193, 0), "8193 bytes at 0: the buffer has 8192"), ((-1, 0), "-1 bytes"), ((4096, -4096), "at -4096")],
)
def test_buffers_are_checked(machine: Machine, arguments: tuple[int, int], names: str) -> None:
    window = machine.device(np.zeros(8 * KIB, np.uint8))
    with machine.backend().open(machine.path, create=True) as file, pytest.raises(ConfigError, match=names):
        file.pread(window, *arguments).get()


def test_arrays_and_buffers_of_a_device_are_taken_as_they_are(machine: Machine) -> None:
    class Array:  # as torch and cupy have it
        def __init__(self, window: Window, strides: Any = None) -> None:
            data = (window.address, False)
            shape = (2, window.nbytes // 8)
            self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i4", "data": data, "strides": strides}

    class Buffer:  # kvxfer.device.base's
        on_device = True

        def __init__(self, window: Window) -> None:
            self.address, self.nbytes = window.address, window.nbytes

    window = machine.device(random(8 * KIB))
    with machine.backend().open(machine.path, create=True) as file:
        for buffer in (Array(window), Buffer(window)):
            machine.path.write_bytes(b"")
            assert file.pwrite(buffer).get() == 8 * KIB
            assert_bytes_equal(np.fromfile(machine.path, np.uint8), random(8 * KIB))
        with pytest.raises(ConfigError, match="contiguous"):
            file.pwrite(Array(window, strides=(8, 4))).get()


# ---- files


def test_a_file_is_opened_once_and_by_its_descriptor(machine: Machine) -> None:
    backend = machine.backend()
    machine.path.write_bytes(random(8 * KIB).tobytes())
    fd = os.open(machine.path, os.O_RDWR)
    window = machine.device(np.zeros(4 * KIB, np.uint8))
    machine.path.unlink()  # the name is of no use; what is open is
    for _ in range(3):
        file = backend.adopt(fd)
        assert file.pread(window, file_offset=4 * KIB).get() == 4 * KIB
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # the same file by another descriptor
    assert backend.adopt(other) is file
    os.close(fd)
    os.close(other)
    assert file.pread(window, file_offset=0).get() == 4 * KIB
    assert_bytes_equal(machine.bytes_at(window), random(8 * KIB)[: 4 * KIB])
    ((path, flags, compat),) = machine.requests("CuFile")
    assert (path, flags, compat) == (f"/proc/self/fd/{file.fd}", "r+", False)


def test_removed_files_are_let_go_and_so_are_those_that_rest(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gds, "_KEPT_FILES", 3)
    monkeypatch.setattr(gds, "_SWEEP_S", 0.0)
    backend = machine.backend()
    window = machine.device(random(4 * KIB))

    def use(number: int) -> None:
        path = tmp_path / f"slab-{number}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        assert backend.adopt(fd).pwrite(window).get() == 4 * KIB
        os.close(fd)

    for number in range(3):
        use(number)
    held = len(os.listdir("/proc/self/fd"))
    (tmp_path / "slab-1").unlink()
    use(0)
    until(lambda: len(machine.requests("close")) == 1)
    until(lambda: len(os.listdir("/proc/self/fd")) == held - 3)  # ours, and kvikio's two
    use(3)
    use(4)  # the fourth: slab-2 rested longest
    until(lambda: len(machine.requests("close")) == 2)
    assert backend.stats()["files"] == 3
    before = len(machine.requests("CuFile"))
    use(0)
    assert len(machine.requests("CuFile")) == before
    use(2)
    assert len(machine.requests("CuFile")) == before + 1


def test_a_file_that_is_closed_ends_what_runs_and_takes_no_more(machine: Machine) -> None:
    backend = machine.backend(depth=1)
    machine.kvikio.double.faults["hang"] = ["raw_write"]
    window = machine.device(random(4 * KIB))
    file = backend.open(machine.path, create=True)
    calls = [file.pwrite(window), file.pwrite(window, file_offset=4 * KIB)]
    file.close()
    file.close()
    with pytest.raises(StoreError, match="slab-0 is closed"):
        file.pwrite(window)
    machine.kvikio.double.release.set()
    assert [call.get() for call in calls] == [4 * KIB, 4 * KIB]
    until(lambda: len(machine.requests("close")) == 1)
    assert_bytes_equal(np.fromfile(machine.path, np.uint8), np.tile(random(4 * KIB), 2))
    backend.close()
    backend.close()
    with pytest.raises(StoreError, match="gds backend is closed"):
        backend.open(machine.path).pwrite(window)


def test_opening_what_is_not_there(machine: Machine) -> None:
    with pytest.raises(IOFault, match="No such file"):
        machine.backend().open(machine.path)


# ---- failures


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("POSIX error on pwrite: No space left on device", errno.ENOSPC),
        ("System error at: file_handle.cpp:112: Unable to write file: Input/output error", errno.EIO),
        ("cuFile error: GPUDirect Storage not supported on current file", errno.EIO),
    ],
)
def test_a_failure_says_how_much_went_before_and_why(machine: Machine, message: str, code: int) -> None:
    backend = machine.backend(request_bytes=4 * KIB)
    window = machine.device(random(12 * KIB))
    with backend.open(machine.path, create=True) as file:
        assert file.pwrite(window).get() == 12 * KIB
        machine.kvikio.double.faults["fail"] = {"raw_write": message}
        with pytest.raises(IOFault) as info:
            file.pwrite(window, file_offset=4 * KIB).get()
    assert (info.value.errno, info.value.filename) == (code, "slab-0")
    assert str(info.value.strerror).startswith("write: 0 of 12288 bytes at offset 0x1000: RuntimeError: ")
    assert message in str(info.value)


def test_a_file_that_cufile_refuses_is_an_error_and_is_tried_again(machine: Machine) -> None:
    backend = machine.backend()
    machine.kvikio.double.faults["refuse_files"] = "cuFile error: unsupported file system"
    window = machine.device(random(4 * KIB))
    with backend.open(machine.path, create=True) as file:
        with pytest.raises(IOFault, match="write: 0 of 4096 bytes at offset 0x0: .*unsupported file system"):
            file.pwrite(window).get()
        del machine.kvikio.double.faults["refuse_files"]
        assert file.pwrite(window).get() == 4 * KIB


def test_memory_that_is_no_devices_is_an_error(machine: Machine) -> None:
    with (
        machine.backend().open(machine.path, create=True) as file,
        pytest.raises(IOFault, match="CUDA_ERROR_INVALID_VALUE"),
    ):
        file.pwrite(Window(4096, 4096)).get()
    assert machine.requests("raw_write") == []


def test_more_than_was_asked_for_is_not_believed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = machine.backend()
    window = machine.device(random(4 * KIB))
    with backend.open(machine.path, create=True) as file:
        assert file.pwrite(window).get() == 4 * KIB
        import kvikio

        for answer in (4097, -5):
            monkeypatch.setattr(kvikio.CuFile, "raw_read", lambda *_, answer=answer: answer)
            with pytest.raises(IOFault, match=f"{answer} of 4096 bytes"):
                file.pread(window).get()


@pytest.mark.parametrize("what", ["CuFile", "raw_write"])
def test_a_call_that_never_returns_is_given_up_and_others_go_on(machine: Machine, what: str) -> None:
    backend = machine.backend(depth=1, io_timeout_s=0.5, max_lost=1)
    double = machine.kvikio.double
    double.faults["hang"] = [what]
    window = machine.device(random(4 * KIB))
    file, other = backend.open(machine.path, create=True), backend.open(machine.path.with_name("b"), create=True)
    call = file.pwrite(window)
    with pytest.raises(IOFault, match="given up") as info:
        call.get()
    assert info.value.errno == errno.ETIMEDOUT
    assert call.lost and not call.returned()
    file.close()  # what hangs keeps it open
    assert os.fstat(file.fd).st_size == 0
    double.faults["hang"] = []
    if what == "raw_write":
        assert other.pwrite(window).get() == 4 * KIB
    double.release.set()
    until(call.returned)
    until(lambda: backend.stats()["late_returns"] == 1)
    until(lambda: len(machine.requests("close")) == 1)
    assert machine.path.stat().st_size == 4 * KIB


def test_where_no_thread_is_left_everything_fails_at_once(machine: Machine) -> None:
    backend = machine.backend(depth=1, io_timeout_s=0.3, max_lost=0)
    machine.kvikio.double.faults["hang"] = ["raw_write"]
    window = machine.device(random(4 * KIB))
    with backend.open(machine.path, create=True) as file:
        calls = [file.pwrite(window) for _ in range(4)]
        codes = []
        for call in calls:
            with pytest.raises(IOFault) as info:
                call.get()
            codes.append(info.value.errno)
    assert codes == [errno.ETIMEDOUT, errno.ENOBUFS, errno.ENOBUFS, errno.ENOBUFS]
    machine.kvikio.double.release.set()
    until(lambda: len(machine.requests("close")) == 1)  # those that never ran let go of the file, too


# ---- registration


def test_a_refused_registration_is_said_and_bytes_move_all_the_same(machine: Machine) -> None:
    backend = machine.backend()
    machine.kvikio.double.faults["register"] = "cuFile error 5012: device memory type not supported"
    window = machine.device(random(8 * KIB))
    why = backend.register(window.address, window.nbytes)
    assert "device memory type not supported" in why
    described = backend.describe()
    assert (described["registered_bytes"], described["unregistered_buffers"]) == (0, 1)
    assert described["unregistered_why"] == [why]
    with backend.open(machine.path, create=True) as file:
        assert file.pwrite(window).get() == 8 * KIB
    assert [request[3] for request in machine.requests("raw_write")] == [False]
    assert_bytes_equal(np.fromfile(machine.path, np.uint8), random(8 * KIB))
    assert backend.deregister(window.address)
    assert backend.describe()["unregistered_buffers"] == 0
    assert machine.requests("memory_deregister") == []


def test_where_bar1_is_exhausted_later_buffers_stay_unregistered(machine: Machine) -> None:
    backend = machine.backend()
    machine.kvikio.double.faults["register_most"] = 20 * KIB
    windows = [machine.device(random(8 * KIB, n)) for n in range(4)]
    whys = [backend.register(window.address, window.nbytes) for window in windows]
    assert [bool(why) for why in whys] == [False, False, True, True]
    assert "BAR1" in whys[2]
    assert backend.describe()["registered_bytes"] == 16 * KIB
    assert backend.describe()["unregistered_buffers"] == 2
    with backend.open(machine.path, create=True) as file:
        for n, window in enumerate(windows):
            assert file.pwrite(window, file_offset=n * 8 * KIB).get() == 8 * KIB
    assert [request[3] for request in machine.requests("raw_write")] == [True, True, False, False]
    want = np.concatenate([random(8 * KIB, n) for n in range(4)])
    assert_bytes_equal(np.fromfile(machine.path, np.uint8), want)


def test_a_registration_that_hangs_is_given_up(machine: Machine) -> None:
    backend = machine.backend(io_timeout_s=0.05)
    machine.kvikio.double.faults["hang"] = ["memory_register"]
    window = machine.device(random(4 * KIB))
    assert "given up" in backend.register(window.address, window.nbytes)
    machine.kvikio.double.release.set()
    until(lambda: backend.stats()["lost_threads"] == 0)


def test_memory_may_not_be_freed_where_its_deregistration_hangs(machine: Machine) -> None:
    backend = machine.backend(io_timeout_s=0.5)
    window = machine.device(random(4 * KIB))
    assert backend.register(window.address, window.nbytes) == ""
    machine.kvikio.double.faults["hang"] = ["memory_deregister"]
    assert not backend.deregister(window.address)
    machine.kvikio.double.release.set()
    until(lambda: backend.stats()["lost_threads"] == 0)
    assert backend.deregister(window.address)


# ---- what else there is


def test_the_errno_of_what_kvikio_raises() -> None:
    assert errno_of(OSError(errno.EDQUOT, "x")) == errno.EDQUOT
    assert errno_of(RuntimeError(f"cannot: {os.strerror(errno.ENOSPC)}")) == errno.ENOSPC
    assert errno_of(ValueError("whatever")) == errno.EIO
    assert errno_of(OSError("no number")) == errno.EIO


def test_faults_of_the_drive_reach_host_memory_too(machine: Machine, faults: FaultyIO) -> None:
    faults.fail("pwrite", errno.ENOSPC)
    with machine.backend().open(machine.path, direct=False, create=True) as file, pytest.raises(IOFault) as info:
        file.pwrite(bytes(10)).get()
    assert info.value.errno == errno.ENOSPC


def test_threads_of_one_backend_do_not_mix_their_bytes(machine: Machine) -> None:
    backend = machine.backend(depth=4)
    with backend.open(machine.path, create=True) as file:

        def work(number: int) -> None:
            window = machine.device(np.zeros(4 * KIB, np.uint8))
            for turn in range(10):
                place = (number * 10 + turn) * 4 * KIB
                machine.bytes_at(window)[:] = number * 10 + turn
                assert file.pwrite(window, file_offset=place).get() == 4 * KIB
                machine.bytes_at(window)[:] = 255
                assert file.pread(window, file_offset=place).get() == 4 * KIB
                assert (machine.bytes_at(window) == number * 10 + turn).all()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(machine.requests("CuFile")) == 1
