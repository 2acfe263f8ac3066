"""By way of host memory: bays have a pinned twin, which the native runner moves to the drive and back.

Trailers, sums, timeouts, calls that never return and errnos are all its work. To it a bay is host rows: memory that a
load's result makes live, so that it is filled while it is checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.config import EngineConfig
from kvxfer.convert.native import mapping_handle
from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Buffer, Device, Event
from kvxfer.device.bays import Bay
from kvxfer.device.calibration import PACK, ZERO
from kvxfer.device.carrier import Batch, Carrier, Landing, all_failed
from kvxfer.device.form import Form
from kvxfer.device.job import LivedTime
from kvxfer.errors import DeviceError, KvxferError
from kvxfer.jobs import LOAD, STORE, JobOutcome, Status, runner_of
from kvxfer.mapping import RUN_DTYPE, CanonicalMapping, LocalTensor
from kvxfer.report import engine_reporter
from kvxfer.slot import SlotLayout

__all__ = ["ENGINES", "HostCarrier"]

# Of those that a calibration knows. Not "batch": its fragments would have to be listed for each batch, by the host.
ENGINES = (PACK, ZERO)
_NAMES = {STORE: "store", LOAD: "load"}


@dataclass(slots=True)
class _Copy:
    """A store on its way to host memory: by a copy from the bay, or (zero) by the gather itself."""

    down: Event
    since: float
    cancelled: bool = False


class HostCarrier(Carrier):
    """See the module.

    Stores go straight from the bay where a chunk can (one block, segments without padding), unless config.rows says
    "staged"; then a write that was given up keeps its bay. Loads are always staged by the native runner: a read that
    never returns must hold up neither its job nor a bay.

    Args:
        slot: of the chunks that it will move.
        memory: whether files are pages of memory.
        choose: which of ENGINES takes a batch, by direction ("store", "load"), bytes of a fragment and number of these;
            asked for each. None: always PACK. So it is, whatever is chosen, of bays whose host memory is not pinned.
        backend: between host memory and files: posix or uring.

    Raises:
        ConfigError: staging_bytes holds no buffer for such a slot.
        DeviceError
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        slot: SlotLayout,
        *,
        memory: bool,
        choose: Callable[[str, int, int], str] | None = None,
        backend: str = "posix",
    ) -> None:
        self._choose = choose
        self._copied: Counter[tuple[int, str]] = Counter()  # batches, by direction and engine
        self._device, self._timeout, self._clock = device, config.io_timeout_s, LivedTime(config.io_timeout_s / 8)
        self._up, self._down = device.stream(), device.stream()  # a card has an engine for each way
        self._straight = config.rows != "staged"
        straight = (STORE,) if self._straight else ()
        self._runner, self.staging_limit = runner_of(config, slot, memory=memory, straight=straight, backend=backend)
        self._copies: dict[Batch, _Copy] = {}
        self._flights: dict[int, Batch] = {}  # by the native job's id
        self._numbers: dict[Batch, int] = {}
        self._next = 1
        self._lost: dict[tuple[int, int], Batch] = {}  # (native id, chunk) of writes that have not returned
        self._early: set[tuple[int, int]] = set()  # such that have, before their job ended
        self._late: list[tuple[Batch, int]] = []
        self._held: Counter[Bay] = Counter()  # lost writes that read a bay
        self._returned: list[Bay] = []
        self._views: dict[tuple[int, int], tuple[Form, KVPages]] = {}  # by bay and form

    def make_bay(self, number: int, nbytes: int, ids_bytes: int, sums_bytes: int) -> Bay:
        """See Carrier."""
        device, made = self._device, []
        try:
            for on_device, size in ((True, nbytes), (False, ids_bytes), (True, ids_bytes), (False, nbytes)):
                made.append(device.device_buffer(size) if on_device else device.host_buffer(size))
        except BaseException:
            for buffer in made:
                buffer.free()
            raise
        return Bay(number, nbytes, *made)

    def engine(self, direction: int, bay: Bay, form: Form, blocks: int) -> str:
        """As `choose` has it."""
        if self._choose is None or not _twin(bay).pinned:  # no kernel reaches memory that is not
            return PACK
        return self._choose(_NAMES[direction], form.fragment_bytes, blocks * form.block_fragments)

    def begin_store(self, batch: Batch, filled: Event) -> None:
        """One large copy to the twin, unless it was gathered there, then a native job."""
        self._copied[batch.direction, batch.engine] += 1
        if batch.engine == ZERO:
            self._copies[batch] = _Copy(filled, self._clock())
            return
        host = _twin(batch.bay)
        self._device.wait(self._down, filled)
        self._device.copy(self._down, host, 0, batch.bay.device, 0, batch.chunks * batch.form.chunk_bytes)
        self._copies[batch] = _Copy(self._device.record(self._down), self._clock())

    def begin_load(self, batch: Batch) -> None:
        """A native job."""
        self._fly(batch)

    def bring(self, batch: Batch) -> Event | None:
        """One large copy from the twin, unless it is scattered from there."""
        self._copied[batch.direction, batch.engine] += 1
        if batch.engine == ZERO:
            return None
        host = _twin(batch.bay)
        self._device.copy(self._up, batch.bay.device, 0, host, 0, batch.chunks * batch.form.chunk_bytes)
        return self._device.record(self._up)

    def cancel(self, batch: Batch) -> None:
        """See Carrier."""
        if (copy := self._copies.get(batch)) is not None:
            copy.cancelled = True
        elif (number := self._numbers.get(batch)) is not None:
            self._runner.cancel(number)

    def poll(self) -> list[Landing]:
        """See Carrier."""
        landings = [landing for batch in list(self._copies) if (landing := self._look(batch)) is not None]
        for direction in (LOAD, STORE):
            while (outcome := self._runner.poll(direction)) is not None:
                landings.append(self._land(outcome))
        return landings

    def late(self) -> list[tuple[Batch, int]]:
        """See Carrier."""
        for which in self._runner.late():
            self._come_back(which)
        late, self._late = self._late, []
        return late

    def returned(self) -> list[Bay]:
        """See Carrier."""
        returned, self._returned = self._returned, []
        return returned

    def forsake(self) -> list[Batch]:
        """What is on its way to the twin."""
        forsaken = list(self._copies)
        self._copies.clear()
        return forsaken

    def stats(self) -> dict[str, int]:
        """The native runner's, and batches by direction and copy engine."""
        copied = {
            f"copies_{name}_{engine}": self._copied[direction, engine]
            for direction, name in _NAMES.items()
            for engine in ENGINES
        }
        return self._runner.stats() | copied

    def shutdown(self, timeout_s: float) -> int:
        """See Carrier."""
        return self._runner.shutdown(timeout_s)

    def abandon(self) -> None:
        """See Carrier."""
        self._runner.abandon()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _look(self, batch: Batch) -> Landing | None:
        """At what is on its way to the twin: when it is there it goes on to the drive."""
        copy = self._copies[batch]
        try:
            done = copy.down.done()
            if not done and self._clock() - copy.since > self._timeout:
                raise DeviceError(f"a copy took longer than io_timeout_s={self._timeout}")
        except DeviceError as exc:
            del self._copies[batch]
            return all_failed(batch, Status.DEVICE, exc)
        if not done:
            return None
        del self._copies[batch]
        if copy.cancelled:
            return all_failed(batch, Status.CANCELLED)
        try:
            self._fly(batch)
        except (KvxferError, MemoryError) as exc:  # the runner was shut down: nothing was begun
            engine_reporter.failed("carrier", "a store could not be started", exc)
            return all_failed(batch, Status.CANCELLED)
        return None

    def _fly(self, batch: Batch) -> None:
        number, self._next = self._next, self._next + 1
        form, pages = self._view(batch.bay, batch.form)
        self._runner.submit(
            number,
            batch.direction,
            [mapping_handle(pages, pages.mapping, live=False)],
            batch.records,
            _places(form, batch.block_ids),
            batch.digest,
            deadline_ns=batch.deadline_ns,
        )
        self._flights[number], self._numbers[batch] = batch, number

    def _land(self, outcome: JobOutcome) -> Landing:
        number = outcome.job_id
        batch = self._flights.pop(number)
        del self._numbers[batch]
        lost = [chunk for chunk in np.flatnonzero(outcome.status == Status.LOST).tolist() if batch.direction == STORE]
        for chunk in lost:
            self._lost[number, chunk] = batch
        if lost and self._straight:
            self._held[batch.bay] += len(lost)
        for which in [which for which in self._early if which in self._lost]:
            self._come_back(which)
        held = batch.bay in self._held
        if lost and not held and self._straight:  # all are back already
            self._returned.remove(batch.bay)
        return Landing(batch, outcome.status, outcome.errors, holds_bay=held)

    def _come_back(self, which: tuple[int, int]) -> None:
        """A write that was given up has returned."""
        batch = self._lost.pop(which, None)
        if batch is None:
            self._early.add(which)
            return
        self._early.discard(which)
        self._late.append((batch, which[1]))
        if batch.bay in self._held:
            self._held[batch.bay] -= 1
            if not self._held[batch.bay]:
                del self._held[batch.bay]
                self._returned.append(batch.bay)

    def _view(self, bay: Bay, form: Form) -> tuple[Form, KVPages]:
        """The bay's host memory as pages of the native runner's."""
        key = bay.number, id(form)
        if key not in self._views:
            mapping = _bay_mapping(form)
            blocks = _blocks(form, bay.nbytes // form.chunk_bytes)
            self._views[key] = form, KVPages(mapping, [_twin(bay).host()], blocks)
        return self._views[key]


def _twin(bay: Bay) -> Buffer:
    assert bay.host is not None  # made so
    return bay.host


# A chunk's bytes for its block i begin i * canonical_block_stride behind those for block 0, and chunks are
# form.chunk_bytes apart. So to the native runner a bay is one tensor whose blocks begin at every common divisor of the
# two, and it is told those that are really there. That their pages overlap does not matter: it moves runs, and those of
# a chunk tile its segments.


def _unit(form: Form) -> int:
    """Bytes between two blocks of the tensor that a bay is."""
    one_block = form.slot.blocks_per_chunk == 1
    return form.chunk_bytes if one_block else math.gcd(form.chunk_bytes, form.sources[0].canonical_block_stride)


def _places(form: Form, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in a bay the blocks of a batch are, as block ids for the native runner; -1 where there is none."""
    chunks, blocks = block_ids.shape
    stride = form.sources[0].canonical_block_stride
    bytes_at = np.arange(chunks)[:, None] * form.chunk_bytes + np.arange(blocks)[None, :] * stride
    return np.ascontiguousarray(np.where(block_ids < 0, -1, bytes_at // _unit(form)))


def _blocks(form: Form, chunks: int) -> int:
    """One more than the largest of `_places`."""
    last = (chunks - 1) * form.chunk_bytes + (form.slot.blocks_per_chunk - 1) * form.sources[0].canonical_block_stride
    return last // _unit(form) + 1


def _bay_mapping(form: Form) -> CanonicalMapping:
    """Slots <-> a bay, in which the canonical bytes lie as they are."""
    slot, rows, found = form.slot, [], set[int]()
    for source in form.sources:
        wanted = [segment for segment in source.segments if segment not in found]
        if slot.blocks_per_chunk == 1:
            rows += [(segment, 0, slot.segment_length(segment)) for segment in wanted]
        else:
            mine = source.runs[np.isin(source.runs["segment"], wanted)]
            sizes = mine["fragment_size"] * mine["num_fragments"]
            rows += zip(mine["segment"].tolist(), mine["canonical_offset"].tolist(), sizes.tolist(), strict=True)
        found.update(wanted)
    rows.sort()
    runs = np.zeros(len(rows), RUN_DTYPE)
    runs["segment"], runs["canonical_offset"], runs["fragment_size"] = zip(*rows, strict=True)
    runs["local_offset"] = np.searchsorted(form.segments, runs["segment"]) * slot.segment_stride
    runs["local_offset"] += runs["canonical_offset"]
    runs["num_fragments"], runs["local_stride"] = 1, runs["fragment_size"]
    end = int((runs["local_offset"] + runs["fragment_size"]).max())
    return CanonicalMapping(
        slot=slot,
        runs=runs,
        segments=form.segments,
        canonical_block_stride=form.sources[0].canonical_block_stride,
        tensors=(LocalTensor(block_stride=_unit(form), page_bytes=end),),
    )
