"""A runner over pages that a simulated device has: one file of slots, no store; and a server with two of them.

Traps are set round every job: what must come before it is queued on the device just before the submit, and what may
come after it happens at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.config import EngineConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device.host_carrier import HostCarrier
from kvxfer.device.runner import DeviceRunner
from kvxfer.jobs import LOAD, STORE, JobOutcome
from kvxfer.testing import FakeDevice
from tests.jobs.rig import DIGEST, GEOMETRY, Rig, expect, ranks
from tests.jobs.test_faults import until
from tests.oracle import POISON, Bytes, Model

MODEL = Model.random(GEOMETRY, 24)
JUNK = 0x3C  # what nobody may ever find stored, or keep in a block that was loaded


def chunks_of(blocks_per_chunk: int, blocks: int = MODEL.num_blocks) -> list[list[int]]:
    """Block ids of all chunks: chunk i has the i-th blocks_per_chunk of them; the last may lack some."""
    padded = [*range(blocks), *[-1] * (-blocks % blocks_per_chunk)]
    return [padded[i : i + blocks_per_chunk] for i in range(0, len(padded), blocks_per_chunk)]


class Card(Rig):
    """A DeviceRunner whose bays hold a few chunks, so that jobs are of several batches."""

    runner: Any  # a DeviceRunner

    def __init__(
        self,
        path: Path,
        pages: Sequence[KVPages],
        *,
        device: Any = None,
        seed: int = 0,
        chunks_per_bay: int = 3,
        choose: Callable[[str, int, int], str] | None = None,
        **config: Any,
    ) -> None:
        super().__init__(path, pages, threads=1)
        self.runner.shutdown(1.0)
        self.device = device or FakeDevice(seed=seed)
        options = {"io_threads": 2, "bays": 3, "io_timeout_s": 20.0, "bay_bytes": chunks_per_bay * chunk_bytes(pages)}
        self.config = EngineConfig(**(options | config))
        carrier = HostCarrier(self.device, self.config, self.slot, memory=False, choose=choose)
        try:
            self.runner = DeviceRunner(self.device, carrier, pages, self.config)
        except BaseException:
            carrier.shutdown(0)
            raise
        self.started = len(self.device.calls)

    def __exit__(self, *exc: object) -> None:
        self.device.faults.release()
        super().__exit__(*exc)
        if exc[0] is None:
            assert self.device.defects == []

    def submit(
        self,
        direction: int,
        pages: Sequence[KVPages],
        block_ids: Sequence[Sequence[int]],
        *,
        chunks: Sequence[int] | None = None,
        records: Sequence[bytes] | None = None,
        digest: bytes = DIGEST,
        deadline_s: float | None = None,
        part_writes: object = None,
    ) -> int:
        """As Rig.submit."""
        self.next_id += 1
        chunks = range(len(block_ids)) if chunks is None else chunks
        self.runner.submit(
            self.next_id,
            direction,
            [self.runner.part(mine) for mine in pages],
            b"".join(records or [self.record(i) for i in chunks]),
            np.array(block_ids, dtype=np.int64),
            digest,
            deadline_ns=0 if deadline_s is None else max(1, time.monotonic_ns() + int(deadline_s * 1e9)),
            after=self.runner.mark(),
        )
        return self.next_id

    def wait_gathered(self, job: int, timeout_s: float = 20.0) -> None:
        """Until a store's blocks may be reused."""
        assert self.runner.wait_gathered(job, timeout_s) is not False

    def store_trapped(
        self, model: Model, layout: str, pages: Sequence[KVPages], block_ids: Sequence[Sequence[int]], **how: Any
    ) -> JobOutcome:
        """Stores pages that the computation fills just before, and spoils as soon as they may be reused."""
        filled = [_copy(mine) for mine in ranks(model, layout, len(pages), self.slot.blocks_per_chunk, filled=True)]
        self.device.launch(lambda: _put(pages, filled))
        job = self.submit(STORE, pages, block_ids, **how)
        self.wait_gathered(job)
        _spoil(pages, [b for ids in block_ids for b in ids if b >= 0])
        return self.finish(STORE)

    def load_trapped(self, pages: Sequence[KVPages], block_ids: Sequence[Sequence[int]], **how: Any) -> JobOutcome:
        """Loads blocks that the computation still writes to just before."""
        blocks = [b for ids in block_ids for b in ids if b >= 0]
        self.device.launch(lambda: _spoil(pages, blocks))
        self.submit(LOAD, pages, block_ids, **how)
        return self.finish(LOAD)

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        """What the device was asked since the runner started."""
        return self.device.calls[self.started :]


def chunk_bytes(pages: Sequence[KVPages]) -> int:
    """Bytes of a chunk's place in a bay."""
    slot = pages[0].mapping.slot
    held = {segment for mine in pages for segment in mine.mapping.segments}
    return len(held) * slot.segment_stride


def junk(model: Model, layout: str, pages: Sequence[KVPages], blocks: Sequence[int]) -> Iterator[bool]:
    """Whether each of these blocks holds only JUNK, on every rank."""
    for block in blocks:
        yield all(bool((view == JUNK).all()) for mine in pages for view in _views(mine, [block]))


def expect_but(
    model: Model, layout: str, pages: Sequence[KVPages], loaded: Sequence[int], spoiled: Sequence[int]
) -> None:
    """Asserts that `loaded` blocks hold the model's bytes, `spoiled` ones JUNK, and all else POISON."""
    assert all(junk(model, layout, pages, spoiled)), "a block that was not loaded was written"
    kept = [[tensor.copy() for tensor in mine.tensors] for mine in pages]
    _spoil(pages, spoiled, POISON)
    expect(model, layout, pages, loaded)
    for mine, tensors in zip(pages, kept, strict=True):
        for tensor, was in zip(mine.tensors, tensors, strict=True):
            tensor[:] = was


def device_threads() -> list[str]:
    """Names of the runner's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name == "kvxfer-device"]


@contextlib.contextmanager
def card(tmp_path: Path, pages: Sequence[KVPages], **how: Any) -> Iterator[Card]:
    """A card over a fresh file, and nothing of it left afterwards."""
    with Card(tmp_path / "slots", pages, **how) as mine:
        yield mine
    until(lambda: not device_threads(), "no thread is left")


def _views(pages: KVPages, blocks: Sequence[int]) -> Iterator[Bytes]:
    for tensor, local in zip(pages.tensors, pages.mapping.tensors, strict=True):
        for block in blocks:
            start = local.offset + block * local.block_stride
            yield tensor[start : start + local.page_bytes]


def _spoil(pages: Sequence[KVPages], blocks: Sequence[int], what: int = JUNK) -> None:
    for mine in pages:
        for view in _views(mine, blocks):
            view[:] = what


def _copy(pages: KVPages) -> list[Bytes]:
    return [tensor.copy() for tensor in pages.tensors]


def _put(pages: Sequence[KVPages], contents: Sequence[Sequence[Bytes]]) -> None:
    for mine, tensors in zip(pages, contents, strict=True):
        for tensor, data in zip(mine.tensors, tensors, strict=True):
            tensor[:] = data
