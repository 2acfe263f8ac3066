"""csrc/cuda over a runtime that is a double: what it asks of CUDA, and what becomes of every refusal."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvxfer import _cuda
from kvxfer._cuda import CudaRuntime, Registration
from kvxfer.errors import DeviceError, DeviceMemoryError
from tests.native.cuda_libraries import FakeRuntime

BASE, PIECE = 0x7F0000000000, 1 << 20
STREAM = 0x5000


@pytest.fixture
def runtime(fake_runtime: FakeRuntime) -> Iterator[FakeRuntime]:
    fake_runtime.reset()
    yield fake_runtime
    assert fake_runtime.last_error == 0  # whatever failed, nothing was left for others to find
    fake_runtime.reset()


class Fragments:
    """Three pieces of one array that go, in another order, into another; what must come of it."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(3).integers(0, 256, 1000, dtype=np.uint8)
        self.target = np.full(1000, 0xEE, np.uint8)
        self.want = self.target.copy()
        pieces = [(0, 500, 100), (700, 0, 1), (10, 901, 99)]  # from, to, bytes
        for begin, to, size in pieces:
            self.want[to : to + size] = self.source[begin : begin + size]
        at, to_at = self.source.ctypes.data, self.target.ctypes.data
        self.targets = np.array([to_at + to for _, to, _ in pieces], np.uint64)
        self.sources = np.array([at + begin for begin, _, _ in pieces], np.uint64)
        self.sizes = np.array([size for _, _, size in pieces], np.uint64)

    def copy(self, cuda: CudaRuntime, stream: int = STREAM) -> str:
        return cuda.copy_batch(self.targets, self.sources, self.sizes, stream)


def names(runtime: FakeRuntime) -> list[str]:
    return [name for name, _, _ in runtime.notes]


# ---- copies


def test_a_batch_is_one_call_on_the_stream_that_was_given(runtime: FakeRuntime) -> None:
    work = Fragments()
    assert work.copy(runtime.cuda) == "batch"
    assert np.array_equal(work.target, work.want)
    assert runtime.notes == [("cudaMemcpyBatchAsync", 3, STREAM)]


@pytest.mark.parametrize("error", [801, 36])  # cudaErrorNotSupported, cudaErrorCallRequiresNewerDriver
def test_a_driver_without_batches_gets_the_fragments_one_by_one(runtime: FakeRuntime, error: int) -> None:
    runtime.fail("cudaMemcpyBatchAsync", error)
    work = Fragments()
    assert work.copy(runtime.cuda) == "loop"
    assert np.array_equal(work.target, work.want)
    assert runtime.notes[1:] == [("cudaMemcpyAsync", int(size), STREAM) for size in work.sizes]


@pytest.mark.parametrize(("version", "how"), [(12040, "loop"), (12080, "batch")])
def test_older_runtimes(tmp_path: Path, version: int, how: str) -> None:
    runtime, work = FakeRuntime(tmp_path, version), Fragments()
    assert runtime.cuda.versions() == (f"12.{version // 10 % 100}", "13.1")
    assert work.copy(runtime.cuda) == how
    assert np.array_equal(work.target, work.want)
    assert names(runtime).count("cudaMemcpyBatchAsync") == (how == "batch")


def test_a_batch_that_is_refused_is_not_tried_again_in_pieces(runtime: FakeRuntime) -> None:
    runtime.fail("cudaMemcpyBatchAsync", 1)
    with pytest.raises(DeviceError, match=r"copy_batch: fake \(1\): an error of the fake"):
        Fragments().copy(runtime.cuda)
    assert names(runtime) == ["cudaMemcpyBatchAsync"]


def test_a_loop_ends_at_the_first_refusal(runtime: FakeRuntime) -> None:
    runtime.fail("cudaMemcpyBatchAsync", 801)
    runtime.fail("cudaMemcpyAsync", 999, after=1)
    with pytest.raises(DeviceError, match="999"):
        Fragments().copy(runtime.cuda)
    assert names(runtime).count("cudaMemcpyAsync") == 2


def test_batches_that_cannot_be(runtime: FakeRuntime) -> None:
    work, none = Fragments(), np.zeros(0, np.uint64)
    with pytest.raises(DeviceError, match="400"):
        work.copy(runtime.cuda, stream=0)
    assert runtime.cuda.copy_batch(none, none, none, STREAM) == "nothing"
    with pytest.raises(ValueError, match="same"):
        runtime.cuda.copy_batch(work.targets, work.sources[:2], work.sizes, STREAM)
    assert runtime.notes == []


def test_a_copy(runtime: FakeRuntime) -> None:
    work = Fragments()
    runtime.cuda.copy(work.target.ctypes.data + 7, work.source.ctypes.data, 900, STREAM)
    assert np.array_equal(work.target[7:907], work.source[:900])
    assert set(work.target[:7]) == set(work.target[907:]) == {0xEE}
    runtime.cuda.copy(0, 0, 0, STREAM)
    assert runtime.notes == [("cudaMemcpyAsync", 900, STREAM)]


# ---- host memory


@pytest.mark.parametrize(
    ("nbytes", "pieces"),
    [(PIECE, [PIECE]), (3 * PIECE, [PIECE] * 3), (2 * PIECE + 5, [PIECE, PIECE, 5]), (17, [17])],
)
def test_memory_is_pinned_in_pieces_that_tile_it(runtime: FakeRuntime, nbytes: int, pieces: list[int]) -> None:
    runtime.cuda.register(BASE, nbytes, PIECE)
    registered = [(at, size) for name, at, size in runtime.notes if name == "cudaHostRegister"]
    assert registered == [(BASE + i * PIECE, size) for i, size in enumerate(pieces)]
    assert runtime.pinned == len(pieces)
    runtime.cuda.unregister(BASE, nbytes, PIECE)
    assert runtime.pinned == 0


@pytest.mark.parametrize("nbytes", [17, PIECE, 3 * PIECE, 3 * PIECE + 4000])
def test_no_page_is_in_two_pieces(runtime: FakeRuntime, nbytes: int) -> None:
    """A driver pins whole pages: one that is pinned already it may refuse."""
    base = BASE + 100
    runtime.cuda.register(base, nbytes, PIECE)
    registered = [(at, at + size) for name, at, size in runtime.notes if name == "cudaHostRegister"]
    assert (registered[0][0], registered[-1][1]) == (base, base + nbytes)
    for (_, end), (start, _) in pairwise(registered):
        assert end == start and start % 4096 == 0
    runtime.cuda.unregister(base, nbytes, PIECE)
    assert runtime.pinned == 0
    runtime.fail("cudaHostRegister", 712, after=len(registered) - 1)
    with pytest.raises(DeviceError, match=f"at offset {registered[-1][0] - base}: "):
        runtime.cuda.register(base, nbytes, PIECE)
    assert runtime.pinned == 0


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostGetDevicePointer"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_piece_that_is_refused_unpins_the_others(runtime: FakeRuntime, call: str, after: int) -> None:
    runtime.fail(call, 712, after=after)
    with pytest.raises(DeviceError, match=f"at offset {after * PIECE}: cudaErrorHostMemoryAlreadyRegistered"):
        runtime.cuda.register(BASE, 4 * PIECE, PIECE)
    assert runtime.pinned == 0
    assert names(runtime).count("cudaHostRegister") == after + 1


def test_memory_that_the_device_sees_elsewhere_is_refused(runtime: FakeRuntime) -> None:
    """A kernel that is given the host's address would fault."""
    runtime.shift(1 << 30)
    with pytest.raises(DeviceError, match="801"):
        runtime.cuda.register(BASE, 2 * PIECE, PIECE)
    assert runtime.pinned == 0


def test_what_is_registered_twice_is_left_as_it_was(runtime: FakeRuntime) -> None:
    runtime.cuda.register(BASE + 2 * PIECE, PIECE, PIECE)
    with pytest.raises(DeviceError, match=f"offset {2 * PIECE}"):
        runtime.cuda.register(BASE, 3 * PIECE, PIECE)
    assert runtime.pinned == 1


def test_every_piece_is_unpinned_whatever_the_others_answer(runtime: FakeRuntime) -> None:
    runtime.cuda.register(BASE, 4 * PIECE, PIECE)
    runtime.fail("cudaHostUnregister", 999, after=1)
    with pytest.raises(DeviceError, match="999"):
        runtime.cuda.unregister(BASE, 4 * PIECE, PIECE)
    assert runtime.pinned == 1


@pytest.mark.parametrize(
    ("base", "nbytes", "piece"),
    [(0, 10, PIECE), (BASE, 0, PIECE), (BASE, 10, 0), (BASE, 10, 4097), (2**64 - 10, 20, PIECE)],
)
def test_ranges_that_cannot_be(runtime: FakeRuntime, base: int, nbytes: int, piece: int) -> None:
    for call in (runtime.cuda.register, runtime.cuda.unregister):
        with pytest.raises(DeviceError, match=r"\(1\)"):
            call(base, nbytes, piece)
    assert runtime.notes == []


def test_a_registration_holds_or_says_why_not(runtime: FakeRuntime) -> None:
    held = Registration(runtime.cuda, BASE, 2 * PIECE, PIECE)
    assert (held.pinned, held.why, runtime.pinned) == (True, "", 2)
    held.release()
    held.release()
    assert (held.pinned, held.why, runtime.pinned) == (False, "released", 0)
    runtime.fail("cudaHostRegister", 2, after=1)  # of those from here on
    refused = Registration(runtime.cuda, BASE, 2 * PIECE, PIECE)
    assert (refused.pinned, runtime.pinned) == (False, 0)
    assert f"at offset {PIECE}" in refused.why
    refused.release()
    assert names(runtime).count("cudaHostUnregister") == 3


def test_pinned_memory(runtime: FakeRuntime) -> None:
    address = runtime.cuda.host_alloc(100)
    assert address
    runtime.cuda.host_free(address)
    runtime.cuda.host_free(0)
    assert names(runtime) == ["cudaHostAlloc", "cudaFreeHost"]
    runtime.fail("cudaHostAlloc", 2)
    with pytest.raises(DeviceMemoryError):
        runtime.cuda.host_alloc(100)


def test_where_an_address_is(runtime: FakeRuntime) -> None:
    for at, memory in enumerate(_cuda.MEMORY):
        assert runtime.cuda.where(4096 + at) == _cuda.Where(memory, 1, 4096 + at)


# ---- devices


def test_a_device_is_described(runtime: FakeRuntime) -> None:
    found = runtime.cuda.describe(1)
    assert found.name == "Fake H200"
    assert found.uuid == "GPU-00112233-4455-6677-8899-aabbccddeeff"
    assert (found.total_bytes, found.multiprocessors, found.copy_engines) == (141 << 30, 132, 3)
    assert runtime.notes == [("cudaGetDeviceProperties", 1, 0)]


def test_a_count_that_failed_is_none(runtime: FakeRuntime) -> None:
    assert runtime.cuda.device_count() == 2
    runtime.fail("cudaGetDeviceCount", 35)  # and leaves nonsense in its output
    with pytest.raises(DeviceError, match="35"):
        runtime.cuda.device_count()
    runtime.fail("cudaGetDeviceCount", 35)
    count = C.c_int32(5)
    assert (runtime._dll.kvx_cuda_device_count(C.byref(count)), count.value) == (-35, 0)


def test_streams(runtime: FakeRuntime) -> None:
    stream = runtime.cuda.stream_new()
    assert stream == STREAM
    runtime.fail("cudaStreamQuery", 600)  # not ready
    assert not runtime.cuda.stream_done(stream)
    assert runtime.last_error == 0
    assert runtime.cuda.stream_done(stream)
    runtime.fail("cudaStreamQuery", 700)
    with pytest.raises(DeviceError, match="700"):
        runtime.cuda.stream_done(stream)
    runtime.cuda.stream_wait(stream)
    runtime.cuda.stream_free(stream)
    runtime.cuda.stream_free(0)
    assert runtime.notes == [
        ("cudaStreamCreateWithFlags", 1, 0),
        *[("cudaStreamQuery", STREAM, 0)] * 3,
        ("cudaStreamSynchronize", STREAM, 0),
        ("cudaStreamDestroy", STREAM, 0),
    ]


CALLS: dict[str, Callable[[CudaRuntime], object]] = {
    "cudaRuntimeGetVersion": lambda cuda: cuda.versions(),
    "cudaDriverGetVersion": lambda cuda: cuda.versions(),
    "cudaGetDeviceCount": lambda cuda: cuda.device_count(),
    "cudaSetDevice": lambda cuda: cuda.set_device(3),
    "cudaGetDeviceProperties": lambda cuda: cuda.describe(0),
    "cudaStreamCreateWithFlags": lambda cuda: cuda.stream_new(),
    "cudaStreamQuery": lambda cuda: cuda.stream_done(STREAM),
    "cudaStreamSynchronize": lambda cuda: cuda.stream_wait(STREAM),
    "cudaStreamDestroy": lambda cuda: cuda.stream_free(STREAM),
    "cudaMemcpyAsync": lambda cuda: cuda.copy(1, 2, 3, STREAM),
    "cudaMemcpyBatchAsync": lambda cuda: Fragments().copy(cuda),
    "cudaHostRegister": lambda cuda: cuda.register(BASE, 10, PIECE),
    "cudaHostUnregister": lambda cuda: cuda.unregister(BASE, 10, PIECE),
    "cudaHostAlloc": lambda cuda: cuda.host_alloc(10),
    "cudaFreeHost": lambda cuda: cuda.host_free(10),
    "cudaPointerGetAttributes": lambda cuda: cuda.where(10),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_error_comes_back_as_itself(runtime: FakeRuntime, call: str) -> None:
    runtime.fail(call, 719)  # cudaErrorLaunchFailure: the device is lost
    with pytest.raises(DeviceError, match=r"\(719\)"):
        CALLS[call](runtime.cuda)
