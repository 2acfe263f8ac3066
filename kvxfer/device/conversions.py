"""Gathers and scatters: what is queued on a device for a batch.

All of them are on one stream, in the order in which their batches came to it. So no load writes a block whose earlier
write is under way, and no store reads one; and each waits for what its caller had queued on the device when the job was
accepted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Device, Event
from kvxfer.device.bays import Bay
from kvxfer.device.form import Form
from kvxfer.device.job import Flight, LivedTime
from kvxfer.errors import DeviceError
from kvxfer.jobs import Status

__all__ = ["Conversions"]

REHEARSAL_S = 120.0  # a device may have to compile first


class Conversions:
    """One thread's. Every call may raise DeviceError, and may have queued a part of its work then."""

    def __init__(self, device: Device, clock: LivedTime) -> None:
        self._device, self._stream, self._clock = device, device.stream(), clock

    def gather(self, flight: Flight) -> None:
        """Queues: what the caller queued, block ids -> gather -> the flight's event."""
        device, stream, job, batch, bay = self._device, self._stream, flight.job, flight.batch, flight.batch.bay
        if job.after is not None:
            device.wait(stream, job.after)
        self._put_ids(bay, batch.block_ids)
        form, to = batch.form, batch.memory
        for part in form.gathers:
            pages, mapping = job.parts[part], form.mappings[part]
            device.gather(stream, pages, mapping, bay.device_ids, batch.chunks, to, form.chunk_bytes, bay.sums)
        flight.event, flight.since = device.record(stream), self._clock()

    def scatter(self, flight: Flight, brought: Event | None) -> None:
        """Queues: what is brought, what the caller queued, block ids -> scatter -> the flight's event."""
        device, stream, job, batch, bay = self._device, self._stream, flight.job, flight.batch, flight.batch.bay
        if brought is not None:
            device.wait(stream, brought)
        if job.after is not None:
            device.wait(stream, job.after)
        assert flight.good is not None  # it has landed
        self._put_ids(bay, np.where((flight.good == Status.OK)[:, None], batch.block_ids, -1))
        form, of = batch.form, batch.memory
        for pages, mapping in zip(job.parts, form.mappings, strict=True):
            device.scatter(stream, pages, mapping, bay.device_ids, batch.chunks, of, form.chunk_bytes)
        flight.event, flight.since = device.record(stream), self._clock()

    def record(self) -> Event:
        """An event after all gathers and scatters so far."""
        return self._device.record(self._stream)

    def rehearse(self, form: Form, pages: Sequence[KVPages], bay: Bay) -> None:
        """Converts a chunk without blocks, both ways, and waits: what is compiled at first use is compiled here.

        Raises:
            DeviceError: it fails, or takes more than REHEARSAL_S.
        """
        device, stream = self._device, self._stream
        self._put_ids(bay, np.full((1, form.slot.blocks_per_chunk), -1, np.int64))
        for mine, mapping in zip(pages, form.mappings, strict=True):
            device.gather(stream, mine, mapping, bay.device_ids, 1, bay.device, form.chunk_bytes, bay.sums)
            device.scatter(stream, mine, mapping, bay.device_ids, 1, bay.device, form.chunk_bytes)
        event, end = device.record(stream), time.monotonic() + REHEARSAL_S
        while not event.done():
            if time.monotonic() > end:
                raise DeviceError(f"{device.label} did not convert an empty chunk within {REHEARSAL_S} s")
            time.sleep(0.0005)

    def _put_ids(self, bay: Bay, block_ids: NDArray[np.int64]) -> None:
        """Sends block ids to the device, on the stream of the converter, which reads them there."""
        flat = np.ascontiguousarray(block_ids).reshape(-1).view(np.uint8)
        bay.ids.host()[: flat.size] = flat
        self._device.copy(self._stream, bay.device_ids, 0, bay.ids, 0, flat.size)
