"""The copy engines on a real device, on checked bytes: what a calibration measures with, and `python -m bench.gpu`.

Imports torch and Triton: only where a CUDA device has answered (or Triton's interpreter stands in, for tests).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import kvxfer
from kvxfer import _cuda, probe
from kvxfer.convert import launch
from kvxfer.convert.pages import KVPages
from kvxfer.device.calibration import BUDGET_S, ENGINES, Calibration, Identity, WrongBytes, obtain
from kvxfer.errors import DeviceError
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping
from kvxfer.mapping import CanonicalMapping

__all__ = ["CopyBench", "Lane", "Workload", "engines_of", "identity_of", "measure_here", "obtain_here"]

POISON = 0xA5
HEADS, PLANES, TOKENS = 2, 2, 4
BLOCK_FRAGMENTS = HEADS * PLANES * TOKENS
SPARE_BLOCKS = 3
MOST_BLOCKS_PER_CHUNK = 64
LINGER_S = 10.0  # for a kernel that is being compiled; `doctor` waits for 20 s
REPEAT_S, MOST_REPEATS = 4e-3, 8  # of one timing
_DRIVER = Path("/proc/driver/nvidia/version")

Bytes = NDArray[np.uint8]


class Workload:
    """Blocks of NHD pages in a device's memory, and the canonical bytes that they are, found by slicing.

    One layer, two heads, four tokens a block: a fragment is one head of one token, `fragments` a multiple of 16.
    """

    def __init__(self, device: str, fragment_bytes: int, fragments: int) -> None:
        if fragments < 1 or fragments % BLOCK_FRAGMENTS:
            raise ValueError(f"fragments={fragments} must be a multiple of {BLOCK_FRAGMENTS}")
        self.nbytes = fragment_bytes * fragments
        blocks = fragments // BLOCK_FRAGMENTS
        per_chunk = next(n for n in range(MOST_BLOCKS_PER_CHUNK, 0, -1) if blocks % n == 0)
        geometry = KVGeometry(
            num_layers=1, num_kv_heads=HEADS, head_dim=fragment_bytes, dtype="uint8", tokens_per_block=TOKENS
        )
        self.mapping: CanonicalMapping = kvx1_mapping(
            geometry, ShardSpec(), PageLayout.nhd(geometry, HEADS), blocks_per_chunk=per_chunk
        )
        random = np.random.default_rng(fragments + fragment_bytes)
        # [block, plane, token, head, byte]: what is moved; the pool has it at `ids`, and poison elsewhere.
        data = np.frombuffer(random.bytes(self.nbytes), np.uint8)
        data = data.reshape(blocks, PLANES, TOKENS, HEADS, fragment_bytes)
        ids = random.permutation(blocks + SPARE_BLOCKS)[:blocks]
        self.pool: Bytes = np.full((blocks + SPARE_BLOCKS, *data.shape[1:]), POISON, np.uint8)
        self.pool[ids] = data
        # A chunk has, for each head, [plane, block, token, byte].
        chunks = data.reshape(-1, per_chunk, PLANES, TOKENS, HEADS, fragment_bytes)
        segments = chunks.transpose(0, 4, 2, 1, 3, 5).reshape(len(chunks), HEADS, -1)
        slot = self.mapping.slot
        self.payload: Bytes = np.full((len(chunks), slot.payload_stride), POISON, np.uint8)
        for head in range(HEADS):
            at = head * slot.segment_stride
            self.payload[:, at : at + slot.segment_bytes] = segments[:, head]
        self.moved = np.zeros(slot.payload_stride, bool)  # the padding of segments is no part of it
        for head in range(HEADS):
            self.moved[head * slot.segment_stride :][: slot.segment_bytes] = True
        self.block_ids = torch.from_numpy(ids.astype(np.int64).reshape(len(chunks), per_chunk)).to(device)
        self.tensor = torch.from_numpy(self.pool.reshape(-1)).to(device, copy=True)
        self.pages = KVPages(self.mapping, [self.tensor], len(self.pool))
        self.fragment_places = self._places(ids.reshape(len(chunks), per_chunk))

    def _places(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Offsets of every fragment in the pool, and in the chunks, by the axes of both."""
        _, planes, tokens, heads, size = self.pool.shape
        chunks, per_chunk = ids.shape
        slot = self.mapping.slot
        chunk, head, plane, block, token = np.ix_(*map(np.arange, (chunks, heads, planes, per_chunk, tokens)))
        local = (((ids[:, None, None, :, None] * planes + plane) * tokens + token) * heads + head) * size
        canonical = ((plane * per_chunk + block) * tokens + token) * size
        canonical = chunk * slot.payload_stride + head * slot.segment_stride + canonical
        return local.astype(np.uint64).reshape(-1), canonical.astype(np.uint64).reshape(-1)


class Lane:
    """A stream of a device, and how long things take on it. It belongs to the thread that made it.

    Args:
        device: torch's label of it; "cpu", where steps are done when they return, for tests.
    """

    def __init__(self, device: str) -> None:
        self.device, self.on_device = device, device != "cpu"
        self.handle = 1  # cudaStream_t
        if self.on_device:
            torch.cuda.set_device(device)
            self.stream = torch.cuda.Stream(device)
            self.handle = int(self.stream.cuda_stream)

    def current(self) -> Any:
        """A context in which it is torch's current stream."""
        return torch.cuda.stream(self.stream) if self.on_device else nullcontext()

    def synchronize(self) -> None:
        """Waits for all that the device has to do."""
        if self.on_device:
            torch.cuda.synchronize(self.device)

    def pinned(self, *shape: int) -> Any:
        """Host memory that the device reaches: uint8."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.on_device)

    def empty(self, *shape: int) -> Any:
        """Memory of the device: uint8."""
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def once(self, step: Callable[[], None]) -> None:
        """Does it, to its end."""
        with self.current():
            step()
        self.synchronize()

    def seconds(self, step: Callable[[], None], repeats: int = 1) -> float:
        """What a step takes, of several one after the other."""
        self.synchronize()
        if not self.on_device:
            start = time.perf_counter()
            for _ in range(repeats):
                step()
            return (time.perf_counter() - start) / repeats
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self.current():
            begin.record()
            for _ in range(repeats):
                step()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats


class CopyBench:
    """A `calibration.Bench` on a device. It belongs to the thread that made it.

    Args:
        device: torch's label of it; "cpu" under Triton's interpreter.
        cuda: for "batch".
    """

    def __init__(self, device: str, cuda: _cuda.CudaRuntime | None = None) -> None:
        self.lane, self.cuda = Lane(device), cuda
        self.work: Workload | None = None
        self.host: Any = None  # chunks in pinned memory
        self.stage: Any = None  # chunks on the device
        self._made: tuple[int, int] | None = None
        if self.lane.on_device and cuda is not None:
            cuda.set_device(torch.device(device).index or 0)

    def close(self) -> None:
        """Gives its memory back."""
        self.work = self.host = self.stage = self._made = None  # to torch: freeing device memory breaks graph captures

    def timed(self, engine: str, direction: str, fragment_bytes: int, fragments: int) -> float:
        """See `calibration.Bench`."""
        self.prepare(fragment_bytes, fragments)
        step = self.step(engine, direction)
        self.poison(direction)
        self.lane.once(step)  # compiles, and warms up
        self.check(direction)
        self.poison(direction)
        once = self.lane.seconds(step)
        taken = self.lane.seconds(step, max(1, min(MOST_REPEATS, int(REPEAT_S / max(once, 1e-6)))))
        self.check(direction)
        return taken

    def prepare(self, fragment_bytes: int, fragments: int) -> None:
        """Makes the pages, the pinned memory and the staging, unless they are there."""
        if self._made == (fragment_bytes, fragments):
            return
        self.close()
        self.work = Workload(self.lane.device, fragment_bytes, fragments)
        shape = self.work.payload.shape
        self.host, self.stage = self.lane.pinned(*shape), self.lane.empty(*shape)
        launch.prepare(self.work.pages, self.work.mapping)
        self._made = (fragment_bytes, fragments)

    def step(self, engine: str, direction: str, programs: int | None = None) -> Callable[[], None]:
        """What moves all fragments once, on the current stream."""
        work, host, stage = self.work, self.host, self.stage
        assert work is not None and host is not None and stage is not None
        store = direction == "store"

        def convert(chunks: Any) -> None:
            if store:
                launch.gather(work.pages, work.block_ids, work.mapping, chunks, programs=programs)
            else:
                launch.scatter(chunks, work.block_ids, work.mapping, work.pages, programs=programs)

        def pack() -> None:
            if store:
                convert(stage)
                host.copy_(stage, non_blocking=True)
            else:
                stage.copy_(host, non_blocking=True)
                convert(stage)

        if engine == "batch":
            return self._batch(store)
        return {"pack": pack, "zero": lambda: convert(host)}[engine]

    def _batch(self, store: bool) -> Callable[[], None]:
        cuda, work, host = self.cuda, self.work, self.host
        assert work is not None and host is not None
        if cuda is None:
            raise DeviceError("libkvx_cuda cannot be used here")
        local, canonical = work.fragment_places
        pages, chunks = local + np.uint64(work.tensor.data_ptr()), canonical + np.uint64(host.data_ptr())
        targets, sources = (chunks, pages) if store else (pages, chunks)
        sizes = np.full(len(local), work.nbytes // len(local), np.uint64)

        def copy() -> None:
            if (how := cuda.copy_batch(targets, sources, sizes, self.lane.handle)) != "batch":
                raise DeviceError(f"this driver has no cudaMemcpyBatchAsync: it was a {how}")

        return copy

    def poison(self, direction: str) -> None:
        """Overwrites what a step in that direction must write; puts in place what it reads."""
        work, host = self.work, self.host
        assert work is not None and host is not None and self.stage is not None
        self.stage.fill_(POISON)
        if direction == "store":
            host.fill_(POISON)
            work.tensor.copy_(torch.from_numpy(work.pool.reshape(-1)))
        else:
            host.copy_(torch.from_numpy(work.payload))
            work.tensor.fill_(POISON)
        self.lane.synchronize()

    def check(self, direction: str) -> None:
        """Raises WrongBytes unless what a step has written is what it must be, and nothing beside it was touched."""
        work, host = self.work, self.host
        assert work is not None and host is not None
        self.lane.synchronize()
        if direction == "store":
            got, want = host.numpy()[:, work.moved], work.payload[:, work.moved]
        else:
            got, want = work.tensor.cpu().numpy().reshape(work.pool.shape), work.pool
        if not np.array_equal(got, want):
            raise WrongBytes(f"{np.count_nonzero(got != want)} of {want.size} bytes differ")


def identity_of(device: probe.Probe, index: int = 0) -> Identity:
    """What a measurement on this device holds for. `device`: what `probe.cuda()` answered."""
    found = torch.cuda.get_device_properties(index)
    versions = probe.versions()
    return Identity(
        device=str(found.name),
        uuid=str(getattr(found, "uuid", "")),
        driver=driver_version(str(device.found.get("driver", "")), _DRIVER),
        kvxfer=kvxfer.__version__,
        triton=str(versions["triton"]),
    )


def driver_version(supports: str, proc: Path) -> str:
    """The newest CUDA that the driver supports, and, where the kernel module tells it, its own version."""
    try:
        own = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", proc.read_text())
    except OSError:
        own = None
    return f"CUDA {supports}" + (f", {own[1]}" if own else "")


def engines_of(device: probe.Probe) -> tuple[tuple[str, ...], _cuda.CudaRuntime | None, str]:
    """Engines that can be tried on this machine, what "batch" needs, and why it cannot be tried."""
    library = _cuda.available(device)
    if library.ok:
        return ENGINES, _cuda.load(_cuda.library_path()), ""
    return tuple(engine for engine in ENGINES if engine != "batch"), None, f"no batches: {library.why}"


def measure_here(budget_s: float = BUDGET_S, index: int = 0) -> dict[str, object]:
    """What `kvxfer doctor --calibrate` shows of device `index`: `Calibration.as_json`, with "device".

    Raises:
        DeviceError: no CUDA device answers, or torch does not see it.
    """
    device = _answering()
    engines, cuda, why = engines_of(device)
    identity = identity_of(device, index)
    found: Calibration = obtain(
        lambda: CopyBench(f"cuda:{index}", cuda), identity, engines, budget_s=budget_s, linger_s=LINGER_S
    )
    shown = found.as_json()
    return shown | {"device": identity.device, "notes": [*shown["notes"], *([why] if why else [])]}


def obtain_here(
    index: int, engines: Sequence[str], asked: Mapping[str, str], budget_s: float = BUDGET_S
) -> Calibration:
    """`calibration.obtain` on device `index`, of these engines, none of which is "batch".

    Raises:
        ConfigError, WrongBytes: see `obtain`.
        DeviceError: no CUDA device answers, or torch does not see it.
    """
    device = _answering()
    return obtain(
        lambda: CopyBench(f"cuda:{index}"), identity_of(device, index), engines, config=asked, budget_s=budget_s
    )


def _answering() -> probe.Probe:
    device = probe.cuda()
    if not device.ok:
        raise DeviceError(f"no CUDA device: {device.why}")
    if not torch.cuda.is_available():
        raise DeviceError(f"torch {torch.__version__} does not see the device")
    return device
