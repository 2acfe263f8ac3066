"""A device for DeviceRowCopier whose work happens late, and in any order that its streams and events allow.

Memory is torch's on the CPU. Work is queued, and done while somebody asks or waits for an event: a seeded generator
chooses among the streams whose next piece waits for nothing. A wait that was forgotten gives wrong bytes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvxfer.convert.native_rows import RowMemory, RowPlan
from kvxfer.errors import DeviceError, DeviceMemoryError
from kvxfer.integrations.vllm_device import RowDevice, RowEvent
from kvxfer.integrations.vllm_rows import Parts
from kvxfer.rows import RowMapping


class LazyEvent(RowEvent):
    def __init__(self, device: LazyDevice, name: str) -> None:
        self._device, self.name, self.at = device, name, 0  # the number of the piece that it happened as

    def done(self) -> bool:
        self._device.check("done")
        for _ in range(self._device.random.randrange(4)):
            self._device.step()
        return self.at > 0

    def wait(self) -> None:
        self._device.check("wait for")
        while not self.at:
            assert self._device.step(), "this event never happens"

    def seconds_after(self, earlier: RowEvent) -> float:
        assert isinstance(earlier, LazyEvent) and 0 < earlier.at <= self.at
        return float(self.at - earlier.at)


class LazyStream:
    def __init__(self, name: str, urgent: bool) -> None:
        self.name, self.urgent = name, urgent
        self.pieces: deque[tuple[LazyEvent | None, Callable[[], None] | None]] = deque()


class LazyDevice(RowDevice):
    """`calls` are written down; a name in `failing` raises that; `frozen`: no work is done; `lost`: all calls raise."""

    def __init__(self, seed: int = 0, memory: int = 1 << 30) -> None:
        self.random = random.Random(seed)
        self.calls: list[tuple[str, ...]] = []
        self.failing: dict[str, Exception] = {}
        self.frozen = self.lost = False
        self.left = memory
        self.model = LazyStream("model", False)
        self.streams = [self.model]
        self.number = 0

    # ---- for tests

    def compute(self, work: Callable[[], None]) -> None:
        """Something that the model does, on its own stream."""
        self.model.pieces.append((None, work))

    def step(self) -> bool:
        """The next piece of a stream that can go on."""
        ready = [each for each in self.streams if each.pieces and not ((on := each.pieces[0][0]) and not on.at)]
        if not ready or self.frozen or self.lost:
            return False
        _, work = self.random.choice(ready).pieces.popleft()
        self.number += 1
        if work is not None:
            work()
        return True

    def run(self) -> None:
        while self.step():
            pass

    def check(self, call: str) -> None:
        if self.lost:
            raise DeviceError("the device was lost")
        if error := self.failing.get(call):
            raise error

    # ---- a device's face

    def mark(self) -> RowEvent:
        return self.record(self.model)

    def stream(self, *, urgent: bool) -> Any:
        self.check("stream")
        self.streams.append(LazyStream(f"{len(self.streams)}", urgent))
        return self.streams[-1]

    def record(self, stream: Any) -> RowEvent:
        self.check("record")
        event = LazyEvent(self, f"{stream.name}.{len(self.calls)}")

        def happen() -> None:
            event.at = self.number

        stream.pieces.append((None, happen))
        self.calls.append(("record", stream.name, event.name))
        return event

    def wait(self, stream: Any, event: RowEvent) -> None:
        self.check("wait")
        assert isinstance(event, LazyEvent)
        stream.pieces.append((event, None))
        self.calls.append(("wait", stream.name, event.name))

    def queue(self, stream: Any, work: Callable[[], None]) -> None:
        self.check("queue")
        stream.pieces.append((None, work))
        self.calls.append(("queue", stream.name))

    def allocate(self, nbytes: int) -> Any:
        self.check("allocate")
        if nbytes > self.left:
            raise DeviceMemoryError(f"{self.left} bytes are left")
        self.left -= nbytes
        flat = torch.full((nbytes + 16,), -37, dtype=torch.int8)
        start = -flat.data_ptr() % 16
        return flat[start : start + nbytes]


class LazyPlan:
    """DeviceRowPlan's face over libkvx, which has no staging of its own."""

    def __init__(self, parts: Parts) -> None:
        self.groups, self.tensors = parts.groups, parts.tensors  # and not the rows' memory, which is vLLM's to unmap
        self.blocks_per_chunk = parts.groups[0].blocks_per_chunk
        self._own = RowPlan(parts.groups, parts.tensors, parts.memory)
        self.launches: list[tuple[str, int, bool, int | None]] = []  # what, pages, in staging, programs
        self.closed = 0

    def check(self, *ids: Any) -> None:
        self._own.check(*ids)

    def gather(self, *ids: Any, **how: Any) -> int:
        return self._move("gather", *ids, **how)

    def scatter(self, *ids: Any, **how: Any) -> int:
        return self._move("scatter", *ids, **how)

    def _move(
        self, what: str, block_ids: Any, pages: Any, group_pages: Any, *, rows: RowMemory | None = None,
        places: Any = None, programs: int | None = None,
    ) -> int:  # fmt: skip
        assert not self.closed
        self.launches.append((what, len(pages), rows is not None, programs))
        if rows is None:
            return int(getattr(self._own, what)(block_ids, pages, group_pages))
        # The numbers of pages in the rows say whose turn it is, and not where they lie in staging.
        if what == "gather":
            group = np.repeat(np.arange(len(group_pages)), group_pages)
            cells = [self.groups[number].cells for number in group]
            turns = [all(cell.page.is_writer(page) for cell in mine) for mine, page in zip(cells, pages, strict=True)]
            block_ids, places = block_ids[turns], places[turns]
            group_pages = np.bincount(group[turns], minlength=len(group_pages))
        plan = RowPlan([alone(group) for group in self.groups], self.tensors, rows)
        return int(getattr(plan, what)(block_ids, places, group_pages))

    def close(self) -> None:
        self.closed += 1
        self._own.close()


def alone(group: RowMapping) -> RowMapping:
    """The same, of a rank that writes every page."""
    cells = [replace(cell, page=replace(cell.page, num_writers=1, writer_index=0)) for cell in group.cells]
    return replace(group, cells=tuple(cells))
