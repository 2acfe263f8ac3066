"""The CUDA library, the copy engines and their calibration on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import _cuda, probe
from kvxfer.device.calibration import BUDGET_S, DIRECTIONS, ENGINES, calibrate, obtain, points
from kvxfer.errors import DeviceError

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture(scope="module")
def device() -> probe.Probe:
    found = probe.cuda()
    if not found.ok:
        pytest.skip(f"no CUDA device: {found.why}")
    return found


@pytest.fixture
def cuda(device: probe.Probe) -> _cuda.CudaRuntime:
    found = _cuda.available(device)
    if not found.ok:
        pytest.skip(f"no libkvx_cuda: {found.why}")
    cuda = _cuda.load(_cuda.library_path())
    cuda.set_device(0)
    torch.cuda.set_device(0)
    return cuda


@pytest.fixture
def stream(cuda: _cuda.CudaRuntime) -> Iterator[int]:
    stream = cuda.stream_new()
    yield stream
    cuda.stream_wait(stream)
    cuda.stream_free(stream)


def random_bytes(count: int, seed: int = 1) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def test_it_describes_the_device_that_torch_has(cuda: _cuda.CudaRuntime) -> None:
    found, other = cuda.describe(0), torch.cuda.get_device_properties(0)
    assert (found.name, found.multiprocessors) == (other.name, other.multi_processor_count)
    assert found.uuid.removeprefix("GPU-") == str(other.uuid).removeprefix("GPU-")
    assert found.total_bytes == other.total_memory


@pytest.mark.parametrize("way", ["to host", "from host"])
def test_a_batch_moves_its_fragments_and_nothing_else(cuda: _cuda.CudaRuntime, stream: int, way: str) -> None:
    count, size = 1000, 257
    source, want = random_bytes(2 * count * size), np.full(2 * count * size, 0xEE, np.uint8)
    order = np.random.default_rng(2).permutation(2 * count)[:count]
    places = np.random.default_rng(3).permutation(2 * count)[:count]
    for begin, to in zip(order, places, strict=True):
        want[to * size : (to + 1) * size] = source.numpy()[begin * size : (begin + 1) * size]
    target = torch.full((len(want),), 0xEE, dtype=torch.uint8)
    a, b = (source.cuda(), target.pin_memory()) if way == "to host" else (source.pin_memory(), target.cuda())
    torch.cuda.synchronize()
    sizes = np.full(count, size, np.uint64)
    targets, sources = (places * size + b.data_ptr(), order * size + a.data_ptr())
    assert cuda.copy_batch(targets.astype(np.uint64), sources.astype(np.uint64), sizes, stream) in ("batch", "loop")
    cuda.stream_wait(stream)
    assert cuda.stream_done(stream)
    assert np.array_equal(b.cpu().numpy(), want)


def test_a_copy(cuda: _cuda.CudaRuntime, stream: int) -> None:
    source = random_bytes(4 * MIB).cuda()
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    cuda.copy(target.data_ptr(), source.data_ptr(), source.numel(), stream)
    cuda.stream_wait(stream)
    assert torch.equal(source, target)


def test_memory_is_pinned_in_pieces_and_copied_across_them(cuda: _cuda.CudaRuntime, stream: int) -> None:
    memory = np.empty(9 * MIB + 4096, np.uint8)
    base = -(-memory.ctypes.data // 4096) * 4096
    view = memory[base - memory.ctypes.data :][: 9 * MIB]
    view[:] = random_bytes(9 * MIB).numpy()
    held = _cuda.Registration(cuda, base, 9 * MIB, 4 * MIB)
    if not held.pinned:
        pytest.skip(f"this system pins no such memory: {held.why}")
    for offset in (0, 4 * MIB, 9 * MIB - 1):
        assert cuda.where(base + offset).memory == "pinned"
        assert cuda.where(base + offset).device_address == base + offset
    target = torch.zeros(9 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    cuda.copy(target.data_ptr(), base, 9 * MIB, stream)
    cuda.stream_wait(stream)
    assert np.array_equal(target.cpu().numpy(), view)
    with pytest.raises(DeviceError):
        cuda.register(base, 9 * MIB, 4 * MIB)  # it is, already
    assert cuda.where(base).memory == "pinned"  # and that took nothing of it away
    held.release()
    assert cuda.where(base).memory == "pageable"


def test_where_addresses_are(cuda: _cuda.CudaRuntime) -> None:
    tensor, plain, address = torch.zeros(10, device="cuda"), torch.zeros(10), cuda.host_alloc(MIB)
    assert cuda.where(tensor.data_ptr()).memory == "device"
    assert cuda.where(plain.data_ptr()).memory == "pageable"
    assert (cuda.where(address).memory, cuda.where(address).device_address) == ("pinned", address)
    cuda.host_free(address)


def test_an_error_leaves_the_device_usable(cuda: _cuda.CudaRuntime, stream: int) -> None:
    with pytest.raises(DeviceError):
        cuda.set_device(1000)
    with pytest.raises(DeviceError):
        cuda.host_free(4096)
    assert torch.equal(torch.ones(10, device="cuda").cpu(), torch.ones(10))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_moves_the_right_bytes(device: probe.Probe, engine: str, direction: str) -> None:
    from kvxfer.device.copy_bench import CopyBench, engines_of

    engines, cuda, why = engines_of(device)
    if engine not in engines:
        pytest.skip(why)
    bench = CopyBench("cuda:0", cuda)
    for fragment, fragments in ((256, 16), (256, 4096), (24, 48), (65536, 256)):
        assert bench.timed(engine, direction, fragment, fragments) > 0
    bench.close()


def test_a_calibration_ends_in_its_budget_and_trusts_every_engine(device: probe.Probe, tmp_path: Any) -> None:
    from kvxfer.device.copy_bench import CopyBench, engines_of, identity_of

    engines, cuda, _ = engines_of(device)
    found = calibrate(lambda: CopyBench("cuda:0", cuda), list(points()), engines, BUDGET_S)
    assert found.wrong == {}
    assert found.seconds
    known = obtain(lambda: CopyBench("cuda:0", cuda), identity_of(device), engines, folder=tmp_path)
    assert known.choose("store", 256, 4096) in engines
