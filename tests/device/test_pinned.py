"""Host memory pinned in pieces, over a CUDA runtime that is a double, and what a TorchDevice makes of it."""

from __future__ import annotations

import gc
import logging
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.device import torch_device
from kvxfer.device.pinned import PinnedMemory, pinning_on
from kvxfer.errors import DeviceError
from tests.io.test_posix import taken_along
from tests.native.cuda_libraries import FakeRuntime, fake_runtime

torch = pytest.importorskip("torch")

PIECE = 4096


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    mine = fake_runtime()
    mine.reset()
    monkeypatch.setenv("KVXFER_CUDA_LIBRARY", str(mine.path))
    monkeypatch.delenv("KVXFER_CUDA", raising=False)
    return mine


def test_memory_is_pinned_piece_by_piece_until_it_is_freed_or_forgotten(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(runtime.cuda, 0, 10_000, piece_bytes=PIECE)
    assert runtime.pinned == 3 and memory.array.size == 10_000 and memory.array.ctypes.data % 4096 == 0
    memory.array[:] = 7
    memory.free()
    memory.free()
    assert runtime.pinned == 0
    memory = PinnedMemory(runtime.cuda, 0, 10_000, 1 << 16, piece_bytes=PIECE)
    assert memory.array.size == 10_000 and memory.array.ctypes.data % (1 << 16) == 0 and runtime.pinned == 3
    del memory
    gc.collect()
    assert runtime.pinned == 0


def test_memory_that_the_device_has_elsewhere_is_not_kept(runtime: FakeRuntime) -> None:
    runtime.shift(1 << 20)
    with pytest.raises(DeviceError, match="801"):
        PinnedMemory(runtime.cuda, 0, 10_000)
    assert runtime.pinned == 0


def test_a_forks_child_unpins_nothing(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(runtime.cuda, 0, 4096)
    calls = len(runtime.notes)
    if not (child := os.fork()):
        memory.free()
        os._exit(int(len(runtime.notes) != calls))
    assert os.waitpid(child, 0)[1] == 0
    memory.free()
    assert runtime.pinned == 0


def test_a_forks_child_keeps_what_it_has_mapped_in_the_same_place(runtime: FakeRuntime) -> None:
    """It has a copy of the object, and at its end would unmap what is there."""
    memories = [PinnedMemory(runtime.cuda, 0, 5 * 4096)]
    memories[0].array[:] = 7
    if not (child := os.fork()):
        wrong = int(memories[0].array.any())
        os._exit(wrong or taken_along(int(memories[0].array.ctypes.data), 5 * 4096, memories.clear))
    assert os.waitpid(child, 0)[1] == 0
    assert (memories[0].array == 7).all()


def test_a_refusal_is_said_and_the_next_allocator_asked(
    runtime: FakeRuntime, device: torch_device.TorchDevice, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.fail("cudaHostRegister", 2)
    with caplog.at_level(logging.WARNING):
        buffer = device.host_buffer(5000)
    assert buffer.pinned and runtime.pinned == 0
    assert "5000 bytes could not be pinned in place" in caplog.text and "(2)" in caplog.text


@pytest.fixture
def device(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> torch_device.TorchDevice:
    """One whose torch.cuda does everything at once, on the CPU; `asked`: sizes that torch's allocator pinned."""
    monkeypatch.setattr(torch_device, "torch", Torch())
    monkeypatch.setattr(PinnedMemory.__init__, "__defaults__", (4096, PIECE))
    monkeypatch.setattr(torch_device, "importlib", types.SimpleNamespace(import_module=lambda _: None))
    return torch_device.TorchDevice("cuda:0")


class Torch:
    """As much of torch as buffers and copies need."""

    def __init__(self) -> None:
        self.cuda = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def get_device_name(self, index: int) -> str:
        return "Stand-in"

    def empty(self, nbytes: int, *, dtype: Any, device: Any = None, pin_memory: bool = False) -> Any:
        return torch.empty(nbytes, dtype=dtype)

    def Stream(self, device: Any) -> Any:
        return None

    def current_stream(self, device: Any) -> Any:
        return types.SimpleNamespace(synchronize=lambda: None)

    def stream(self, stream: Any) -> Any:
        return torch.no_grad()


def test_no_copy_crosses_two_pieces(
    runtime: FakeRuntime, device: torch_device.TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other = device.host_buffer(3 * PIECE), device.host_buffer(3 * PIECE, 1 << 14)
    card, stream = device.device_buffer(3 * PIECE), device.stream()
    assert (host.pinned, other.pinned, other.address % (1 << 14)) == (True, True, 0) and runtime.pinned == 6
    copies: list[tuple[int, int, int]] = []
    copy = torch.Tensor.copy_

    def noted(to: Any, of: Any, **how: Any) -> Any:
        copies.append((to.data_ptr(), of.data_ptr(), to.numel()))
        return copy(to, of, **how)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    data = np.random.default_rng(0).integers(0, 256, 3 * PIECE, dtype=np.uint8)
    host.host()[:] = data
    device.copy(stream, card, 0, host, 0, 3 * PIECE)
    assert [size for *_, size in copies] == [PIECE] * 3
    copies.clear()
    device.copy(stream, host, 100, card, 50, 3 * PIECE - 100)
    assert [size for *_, size in copies] == [PIECE - 100, PIECE, PIECE]
    copies.clear()
    device.copy(stream, other, 1000, host, 100, 2 * PIECE)
    pieces = [(at // PIECE, (at + size - 1) // PIECE) for to, of, size in copies for at in (to, of)]
    assert all(first == last for first, last in pieces)
    assert np.array_equal(other.host()[1000 : 1000 + 2 * PIECE], data[50 : 50 + 2 * PIECE])
    for buffer in (host, other):
        buffer.free()
    assert runtime.pinned == 0


def test_without_the_library_torch_pins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVXFER_CUDA_LIBRARY", str(tmp_path / "none"))
    assert pinning_on(0) is None
