"""Streams, events and memory of the device that has vLLM's pages: what `DeviceRowCopier` needs of it, and torch's.

Imports torch. Knows no vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from kvxfer.device.torch_device import torch_errors

__all__ = ["RowDevice", "RowEvent", "TorchRowDevice"]


class RowEvent(ABC):
    """A point on a stream. Every call raises DeviceError where the device was lost, or work before the point failed."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all before it has ended. Never waits."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until all before it has ended."""

    @abstractmethod
    def seconds_after(self, earlier: RowEvent) -> float:
        """Between two events of one stream that are done."""


class RowDevice(ABC):
    """One device. No call but `allocate` waits for it; every call raises DeviceError where it was lost.

    Streams are whatever `stream` gives: opaque to all others.
    """

    @abstractmethod
    def mark(self) -> RowEvent:
        """On the calling thread's current stream: all that the model has queued so far comes before it."""

    @abstractmethod
    def stream(self, *, urgent: bool) -> Any:
        """A new stream beside the model's; `urgent`: its work goes first where both want the same processors."""

    @abstractmethod
    def record(self, stream: Any) -> RowEvent:
        """After all that is on the stream now."""

    @abstractmethod
    def wait(self, stream: Any, event: RowEvent) -> None:
        """What comes onto the stream from now on begins after the event."""

    @abstractmethod
    def queue(self, stream: Any, work: Callable[[], None]) -> None:
        """Puts onto the stream what `work` puts onto torch's current stream, and lets through what it raises."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Device memory as an int8 tensor [nbytes], whose address is a multiple of 16.

        Raises:
            DeviceMemoryError: there is not as much.
        """


class TorchRowDevice(RowDevice):
    """A CUDA device by way of torch. `device`: such as a tensor's."""

    def __init__(self, device: Any) -> None:
        self._device = torch.device(device)

    def mark(self) -> RowEvent:
        """On torch's current stream of the device."""
        return self.record(_call(torch.cuda.current_stream, self._device))

    def stream(self, *, urgent: bool) -> Any:
        """Of a priority above the model's where urgent; none is below it."""
        return _call(torch.cuda.Stream, device=self._device, priority=-1 if urgent else 0)

    def record(self, stream: Any) -> RowEvent:
        """An event that knows its time."""
        event = _call(torch.cuda.Event, enable_timing=True)
        _call(event.record, stream)
        return _TorchEvent(event)

    def wait(self, stream: Any, event: RowEvent) -> None:
        """On the device, not here."""
        assert isinstance(event, _TorchEvent)
        _call(stream.wait_event, event.event)

    def queue(self, stream: Any, work: Callable[[], None]) -> None:
        """Calls `work` at once, with the stream current."""
        with torch.cuda.stream(stream):
            work()

    def allocate(self, nbytes: int) -> Any:
        """From torch's own allocator."""
        return _call(torch.empty, nbytes, dtype=torch.int8, device=self._device)


class _TorchEvent(RowEvent):
    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(_call(self.event.query))

    def wait(self) -> None:
        _call(self.event.synchronize)

    def seconds_after(self, earlier: RowEvent) -> float:
        assert isinstance(earlier, _TorchEvent)
        return float(_call(earlier.event.elapsed_time, self.event)) * 1e-3


def _call(what: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with torch_errors():
        return what(*arguments, **named)
