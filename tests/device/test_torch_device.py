"""TorchDevice: over a stand-in for torch.cuda, what it does with errors and views; on a GPU, the same transfers.

The stand-in does everything at once and on the CPU, with the native converter in the place of the Triton one. It shows
that arguments and errors go where they should; that CUDA does as asked, only a GPU can.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.convert import native
from kvxfer.convert.pages import KVPages
from kvxfer.device import torch_device
from kvxfer.device.torch_device import TorchDevice
from kvxfer.errors import ConfigError, DeviceError, DeviceMemoryError, LayoutError
from kvxfer.jobs import Status
from tests.device.rig import MODEL, card, chunks_of
from tests.jobs.rig import expect, ranks

torch = pytest.importorskip("torch")


class StandIn:
    """torch.cuda, and torch with its device memory on the CPU. `fails` names calls and what they raise."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.pinned = True
        self.launched: list[dict[str, Any]] = []
        self.cuda = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def meet(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def empty(self, nbytes: int, *, dtype: Any, device: Any = None, pin_memory: bool = False) -> Any:
        self.meet("pin" if pin_memory else "empty" if device is None else f"empty on {device}")
        if pin_memory and not self.pinned:
            raise RuntimeError("CUDA error: no pinned memory\nfor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
        return torch.full((nbytes,), 0xDB, dtype=dtype)

    # torch.cuda

    def current_device(self) -> int:
        self.meet("current_device")
        return 3

    def get_device_name(self, index: int) -> str:
        self.meet("name")
        return f"Stand-in {index}"

    def Stream(self, device: Any) -> Any:
        self.meet("Stream")
        return Line(self)

    def current_stream(self, device: Any) -> Any:
        return Line(self)

    @contextlib.contextmanager
    def stream(self, line: Any) -> Iterator[None]:
        self.meet("stream")
        yield

    # kvxfer.convert.launch

    def gather(self, pages: KVPages, ids: Any, mapping: Any, out: Any, sums: Any = None, *, programs: Any) -> None:
        self.meet("gather")
        self.launched.append({"sums": sums, "programs": programs})
        native.gather(pages, ids.numpy(), mapping, out.numpy(), _numbers(sums))

    def scatter(self, src: Any, ids: Any, mapping: Any, pages: KVPages, sums: Any = None, *, programs: Any) -> None:
        self.meet("scatter")
        native.scatter(src.numpy(), ids.numpy(), mapping, pages, _numbers(sums))

    def checksum(self, src: Any, mapping: Any, sums: Any, *, programs: Any) -> None:
        self.meet("checksum")
        scratch = [np.zeros(t.block_stride + t.offset, np.uint8) for t in mapping.tensors]
        nowhere = np.full((len(src), mapping.blocks_per_chunk), -1)
        native.scatter(src.numpy(), nowhere, mapping, KVPages(mapping, scratch, 1), _numbers(sums))


class Line:
    """A stream, or an event on it: all is done already."""

    def __init__(self, owner: StandIn) -> None:
        self.owner = owner

    def record_event(self) -> Line:
        self.owner.meet("record_event")
        return self

    def wait_event(self, event: Line) -> None:
        self.owner.meet("wait_event")

    def synchronize(self) -> None:
        self.owner.meet("synchronize")

    def query(self) -> bool:
        self.owner.meet("query")
        return True


def _numbers(sums: Any) -> Any:
    return None if sums is None else sums.numpy().view(np.uint64)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    mine = StandIn()
    monkeypatch.setattr(torch_device, "torch", mine)
    imports = importlib.import_module

    def launch_is_mine(name: str) -> Any:
        return mine if name == "kvxfer.convert.launch" else imports(name)

    monkeypatch.setattr("kvxfer.device.torch_device.importlib.import_module", launch_is_mine)
    return mine


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_transfers(tmp_path: Path, stand_in: StandIn, blocks_per_chunk: int) -> None:
    ids = chunks_of(blocks_per_chunk, 22)
    pages, target = (ranks(MODEL, x, 2, blocks_per_chunk, filled=x == "nhd") for x in ("nhd", "hnd"))
    with card(tmp_path, pages, device=Recording(programs=24)) as writer:
        assert not writer.store(pages, ids).errors
        assert {launch["programs"] for launch in stand_in.launched} == {24}
    with card(tmp_path, target, device=Recording()) as reader:
        assert not reader.load(target, ids).errors
    expect(MODEL, "hnd", target, range(22))


def test_transfers_by_the_triton_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the real launcher, interpreted: all ranks together, and one of two alone, whose bays are packed."""
    launch = pytest.importorskip("kvxfer.convert.launch")
    if not launch.INTERPRETED:
        pytest.skip("kernels are compiled in this run")
    monkeypatch.setattr(torch_device, "torch", StandIn())
    ids = chunks_of(2, 5)
    source, target = (ranks(MODEL, layout, 2, 2, filled=layout == "nhd") for layout in ("nhd", "hnd"))
    with card(tmp_path, pages := in_torch(source), device=Recording()) as writer:
        assert not writer.store(pages, ids).errors
    for mine in in_torch(target):
        with card(tmp_path, [mine], device=Recording()) as reader:
            assert not reader.load([mine], ids).errors
    expect(MODEL, "hnd", target, range(5))


def in_torch(pages: list[KVPages]) -> list[KVPages]:
    """The same memory as torch tensors."""
    return [KVPages(mine.mapping, [torch.from_numpy(t) for t in mine.tensors], mine.num_blocks) for mine in pages]


class Recording(TorchDevice):
    """What tests.device.rig asks of a device beyond its contract."""

    def __init__(self, label: str = "cuda:0", *, programs: int | None = None) -> None:
        super().__init__(label, programs=programs)
        self.calls: list[Any] = []
        self.defects: list[str] = []
        self.faults = types.SimpleNamespace(release=lambda: None)


def test_its_names(stand_in: StandIn) -> None:
    assert TorchDevice("cuda:1").label == "cuda:1"
    device = TorchDevice("cuda")
    assert (device.label, device.name) == ("cuda:3", "Stand-in 3")
    with pytest.raises(ConfigError, match="cpu"):
        TorchDevice("cpu")


def test_buffers(stand_in: StandIn) -> None:
    device = TorchDevice()
    mine, theirs = device.host_buffer(10_000), device.device_buffer(8192, 1 << 16)
    assert (mine.pinned, mine.why, mine.on_device, mine.address % 4096) == (True, "", False, 0)
    assert (theirs.pinned, theirs.on_device, theirs.address % (1 << 16)) == (False, True, 0)
    assert "synchronize" in stand_in.calls, "memory that the current stream still uses would be taken"
    assert mine.host().shape == (10_000,) and mine.host().ctypes.data == mine.address
    with pytest.raises(LayoutError):
        theirs.host()
    mine.host()[:] = np.arange(10_000) % 251
    device.copy(device.stream(), theirs, 100, mine, 1000, 5000)
    device.copy(device.stream(), mine, 0, theirs, 100, 5000)
    assert np.array_equal(mine.host()[:5000], np.arange(1000, 6000) % 251)
    mine.free()
    mine.free()
    with pytest.raises(DeviceError, match="freed"):
        device.copy(device.stream(), theirs, 0, mine, 0, 1)


def test_memory_that_cannot_be_pinned_says_why(stand_in: StandIn) -> None:
    stand_in.pinned = False
    buffer = TorchDevice().host_buffer(100)
    assert (buffer.pinned, buffer.why) == (False, "CUDA error: no pinned memory") and buffer.host().size == 100


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda d, b: d.mark(), "record_event"),
        (lambda d, b: d.stream(), "Stream"),
        (lambda d, b: d.record(b["stream"]), "record_event"),
        (lambda d, b: d.wait(b["stream"], b["event"]), "wait_event"),
        (lambda d, b: b["event"].done(), "query"),
        (lambda d, b: d.device_buffer(10), "empty on cuda:0"),
        (lambda d, b: d.copy(b["stream"], b["host"], 0, b["host"], 50, 10), "stream"),
        (lambda d, b: d.gather(b["stream"], *b["job"]), "gather"),
        (lambda d, b: d.scatter(b["stream"], *b["job"]), "scatter"),
        (lambda d, b: d.checksum(b["stream"], *b["sums"]), "checksum"),
        (lambda d, b: TorchDevice(), "name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_torch_are_kvxfers(stand_in: StandIn, call: Any, name: str) -> None:
    device, (pages,) = TorchDevice(), ranks(MODEL, "nhd", 1, filled=True)
    size = pages.mapping.slot.payload_stride
    host, stream = device.host_buffer(2 * size), device.stream()
    have = {"stream": stream, "event": device.record(stream), "host": host}
    have["job"] = (pages, pages.mapping, device.host_buffer(16), 2, host, size)
    have["sums"] = (pages.mapping, 2, host, size, device.host_buffer(64))
    raised: list[tuple[BaseException, type[BaseException]]] = [
        (RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA"), DeviceError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), DeviceMemoryError),
    ]
    for error, wanted in raised:
        stand_in.fails = {name: error}
        with pytest.raises(wanted) as caught:
            call(device, have)
        assert type(caught.value) is wanted and "\n" not in str(caught.value) and str(caught.value) in str(error)


def test_sums_come_with_the_bytes(stand_in: StandIn) -> None:
    device, (pages,) = TorchDevice(), ranks(MODEL, "nhd", 1, filled=True)
    slot, ids, stream = pages.mapping.slot, device.host_buffer(16), device.stream()
    ids.host().view(np.int64)[:] = [3, 5]
    stage, sums, again = device.host_buffer(3 * slot.payload_stride), device.host_buffer(64), device.host_buffer(64)
    device.gather(stream, pages, pages.mapping, ids, 2, stage, 2 * slot.payload_stride, sums)
    device.checksum(stream, pages.mapping, 2, stage, 2 * slot.payload_stride, again)
    want = MODEL.sums([[3], [5]])
    assert np.array_equal(sums.host().view(np.uint64).reshape(2, -1), want)
    assert np.array_equal(again.host().view(np.uint64).reshape(2, -1), want)
    assert np.array_equal(stage.host()[2 * slot.payload_stride :], MODEL.payloads([[5]])[0])


def test_a_device_that_fails_is_lost(tmp_path: Path, stand_in: StandIn) -> None:
    pages = ranks(MODEL, "nhd", 1, filled=True)
    with card(tmp_path, pages, device=Recording()) as writer:
        stand_in.fails = {"gather": RuntimeError("CUDA error: unspecified launch failure")}
        assert {error.status for error in writer.store(pages, chunks_of(1)).errors} == {Status.DEVICE}
        assert writer.runner.reason == "CUDA error: unspecified launch failure"


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(pages: list[KVPages]) -> list[KVPages]:
    """The same pages in the device's memory."""
    return [
        KVPages(mine.mapping, [torch.from_numpy(t).cuda() for t in mine.tensors], mine.num_blocks) for mine in pages
    ]


@pytest.fixture
def gpu() -> TorchDevice:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Recording("cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["pack", "zero"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("source, source_tp, target, target_tp", [("nhd", 1, "hnd", 4), ("hnd", 4, "nhd", 2)])
def test_a_cache_comes_back_on_a_gpu(
    tmp_path: Path,
    gpu: Any,
    source: str,
    source_tp: int,
    target: str,
    target_tp: int,
    blocks_per_chunk: int,
    engine: str,
) -> None:
    choose = lambda *_: engine  # noqa: E731
    ids = chunks_of(blocks_per_chunk, 22)
    pages = on_gpu(ranks(MODEL, source, source_tp, blocks_per_chunk, filled=True))
    with card(tmp_path, pages, device=gpu, choose=choose) as writer:
        assert not writer.store(pages, ids).errors
        assert writer.runner.stats()[f"copies_store_{engine}"] > 0, "host memory could not be pinned"
        want, payload = MODEL.payloads(ids), pages[0].mapping.slot.payload_stride
        for chunk in range(len(ids)):
            assert np.array_equal(writer.bytes_of(chunk)[:payload], want[chunk]), f"slot {chunk}"
        writer.flip(3, 100)
    host = ranks(MODEL, target, target_tp, blocks_per_chunk, filled=False)
    pages = on_gpu(host)
    with card(tmp_path, pages, device=gpu, choose=choose) as reader:
        outcome = reader.load(pages, ids)
        assert [(error.chunk, error.status) for error in outcome.errors] == [(3, Status.BAD_SUM)]
        for mine, copy in zip(pages, host, strict=True):
            for tensor, array in zip(mine.tensors, copy.tensors, strict=True):
                array[:] = tensor.cpu().numpy()
        expect(MODEL, target, host, [b for c, blocks in enumerate(ids) if c != 3 for b in blocks if b >= 0])


@pytest.mark.gpu
def test_work_that_was_queued_before_a_job_comes_before_it(tmp_path: Path, gpu: Any) -> None:
    """Pages that a long queue of kernels fills are stored as they are at its end."""
    host = ranks(MODEL, "nhd", 1, filled=True)
    pages = on_gpu(ranks(MODEL, "nhd", 1, filled=False))
    filled = [torch.from_numpy(tensor).cuda() for tensor in host[0].tensors]
    with card(tmp_path, pages, device=gpu) as writer:
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(50):
            busy = busy @ busy * 1e-4
        for tensor, right in zip(pages[0].tensors, filled, strict=True):
            tensor.copy_(right)
        assert not writer.store(pages, chunks_of(1)).errors
        want, payload = MODEL.payloads(chunks_of(1)), pages[0].mapping.slot.payload_stride
        assert np.array_equal(writer.bytes_of(23)[:payload], want[23])
