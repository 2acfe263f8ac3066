"""A runner whose carrier is kvikio's double, beside a native one over the same file of slots, and what they say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import probe
from kvxfer.config import EngineConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device import gds_carrier
from kvxfer.device.base import Buffer
from kvxfer.device.gds_carrier import GdsCarrier
from kvxfer.device.runner import DeviceRunner
from kvxfer.errors import DeviceError
from kvxfer.io import kvikio_door
from kvxfer.io.gds import DIRECT, GdsBackend
from kvxfer.jobs import LOAD, STORE, ChunkError, JobOutcome, Status
from kvxfer.report import Reporter
from kvxfer.testing import FakeDevice
from tests.jobs.rig import DIGEST, Rig
from tests.kvikio_double import Kvikio


class Cuda:
    """`libcuda.Cuda` over the memory of a FakeDevice: each of its buffers is an allocation."""

    def __init__(self, kvikio: Kvikio) -> None:
        self._kvikio = kvikio
        self.made: list[Buffer] = []

    def enter(self, address: int) -> None:
        """See Cuda."""
        self.locate(address)
        self._kvikio.double.here.context = self

    def locate(self, address: int) -> tuple[int, int]:
        """See Cuda."""
        for buffer in self.made:
            if buffer.address <= address < buffer.address + buffer.nbytes:
                return buffer.address, buffer.nbytes
        raise DeviceError(f"{address:#x} is not the device's")


class TrackedDevice(FakeDevice):
    """A FakeDevice that says which memory it has."""

    def __init__(self, cuda: Cuda, **options: Any) -> None:
        super().__init__(**options)
        self._cuda = cuda

    def device_buffer(self, nbytes: int, alignment: int = 4096) -> Buffer:
        """See Device."""
        buffer = super().device_buffer(nbytes, alignment)
        self._cuda.made.append(buffer)
        return buffer


class GdsRig(Rig):
    """A Rig whose jobs can also go by a device and kvikio. Both move the same slots."""

    def __init__(
        self,
        kvikio: Kvikio,
        path: Path,
        pages: Sequence[KVPages],
        *,
        mode: str = DIRECT,
        seed: int = 0,
        bays: int = 3,
        bay_chunks: int = 3,
        depth: int = 4,
        io_timeout_s: float = 20.0,
        max_lost: int = 4,
        request_bytes: int = 16 << 20,
        **native: Any,
    ) -> None:
        super().__init__(path, pages, **native)
        self.kvikio, self.cuda = kvikio, Cuda(kvikio)
        self.device = TrackedDevice(self.cuda, seed=seed)
        self.backend = GdsBackend(
            mode, depth=depth, io_timeout_s=io_timeout_s, max_lost=max_lost, cuda=self.cuda, request_bytes=request_bytes
        )
        bay_bytes = max(4096, bay_chunks * self.slot.payload_stride)
        self.config = EngineConfig(io_timeout_s=io_timeout_s, bays=bays, bay_bytes=bay_bytes)
        self.carrier = GdsCarrier(self.device, self.backend, self.config)
        self.gds = DeviceRunner(self.device, self.carrier, pages, self.config)

    def __exit__(self, *_: object) -> None:
        self.kvikio.double.release.set()
        self.gds.shutdown(5.0)
        assert self.device.defects == []
        super().__exit__()

    def start(
        self,
        direction: int,
        pages: Sequence[KVPages],
        block_ids: Sequence[Sequence[int]],
        *,
        chunks: Sequence[int] | None = None,
        records: Sequence[bytes] | None = None,
        digest: bytes = DIGEST,
        deadline_s: float | None = None,
    ) -> int:
        """As `submit`, by the device."""
        self.next_id += 1
        chunks = range(len(block_ids)) if chunks is None else chunks
        deadline_ns = 0 if deadline_s is None else time.monotonic_ns() + int(deadline_s * 1e9)
        made = b"".join(records or [self.record(i) for i in chunks])
        ids = np.array(block_ids, dtype=np.int64)
        self.gds.submit(self.next_id, direction, pages, made, ids, digest, deadline_ns=deadline_ns)
        return self.next_id

    def end(self, direction: int, timeout_s: float = 30.0) -> JobOutcome:
        """As `finish`, by the device."""
        stop = time.monotonic() + timeout_s
        while (outcome := self.gds.poll(direction)) is None:
            assert time.monotonic() < stop, "no job ended"
            self.gds.wait([direction], 0.05)
        return outcome

    def put(self, pages: Sequence[KVPages], block_ids: Sequence[Sequence[int]], **how: Any) -> JobOutcome:
        """A store by the device."""
        self.start(STORE, pages, block_ids, **how)
        return self.end(STORE)

    def get(self, pages: Sequence[KVPages], block_ids: Sequence[Sequence[int]], **how: Any) -> JobOutcome:
        """A load by the device."""
        self.start(LOAD, pages, block_ids, **how)
        return self.end(LOAD)

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        """What kvikio was asked."""
        return [call for call in self.kvikio.double.calls if call[0] == name]


Make = Callable[..., GdsRig]


@pytest.fixture
def make(kvikio: Kvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Rigs, over one file unless another is named. What kvikio and the machine answer is tested elsewhere."""
    monkeypatch.setattr(kvikio_door, "_asked", [probe.Probe(True, "kvikio", {"compat_mode": "AUTO"})])
    monkeypatch.setattr(gds_carrier, "engine_reporter", Reporter("kvxfer.engine"))
    made: list[GdsRig] = []

    def rig(pages: list[KVPages], name: str = "slots", **options: Any) -> GdsRig:
        made.append(GdsRig(kvikio, tmp_path / name, pages, **options))
        return made[-1]

    yield rig
    for each in made:
        each.__exit__()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.002)


def ok(outcome: JobOutcome) -> None:
    assert (outcome.status.tolist(), outcome.errors) == ([0] * len(outcome.status), ())


def found(outcome: JobOutcome) -> list[ChunkError]:
    assert [error.chunk for error in outcome.errors] == np.flatnonzero(outcome.status).tolist()
    assert [error.status for error in outcome.errors] == [Status(s) for s in outcome.status if s]
    return list(outcome.errors)
