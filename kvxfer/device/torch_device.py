"""A CUDA device by way of torch: its streams and events, its allocator, and the Triton converter.

Takes torch, and with the first device Triton, so it is imported where pages are torch tensors on a device, and nowhere
else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Buffer, Device, Event, Stream
from kvxfer.device.pinned import PinnedMemory, pinning_on
from kvxfer.errors import ConfigError, DeviceError, DeviceMemoryError, LayoutError
from kvxfer.mapping import CanonicalMapping

__all__ = ["TorchDevice", "torch_errors"]


class _Stream(Stream):
    def __init__(self, stream: Any) -> None:
        self.torch = stream


class _Event(Event):
    def __init__(self, event: Any) -> None:
        self.torch = event

    def done(self) -> bool:
        """cudaEventQuery."""
        with torch_errors():
            return bool(self.torch.query())


class _Buffer(Buffer):
    def __init__(
        self,
        memory: Any,
        nbytes: int,
        alignment: int,
        on_device: bool,
        why: str = "",
        pinned: PinnedMemory | None = None,
    ) -> None:
        start = -int(memory.data_ptr()) % alignment
        self.tensor: Any = memory[start : start + nbytes]
        self.address, self.nbytes, self.on_device = int(self.tensor.data_ptr()), nbytes, on_device
        self.pinned, self.why = not on_device and not why, why
        self._pinned = pinned  # whose array is aligned: the first piece begins where the buffer does

    def host(self) -> NDArray[np.uint8]:
        """[nbytes], the very memory."""
        if self.on_device:
            raise LayoutError("this is the device's memory")
        array: NDArray[np.uint8] = self.tensor.numpy()
        return array

    def in_one_copy(self, offset: int) -> int:
        """Bytes from there on that one copy may have: none crosses two pieces that were pinned by themselves."""
        if self._pinned is None:
            return self.nbytes
        return self._pinned.piece_bytes - offset % self._pinned.piece_bytes

    def free(self) -> None:
        """Back to torch's allocator, or unpinned and unmapped."""
        self.tensor = None
        if self._pinned is not None:
            self._pinned.free()


class TorchDevice(Device):
    """See the module.

    Device memory comes from torch's caching allocator, so that it counts where the server's does. It is used on streams
    of its own; that a buffer is freed only when nothing uses it is what makes `record_stream` needless.

    Args:
        label: "cuda:0".
        programs: the most programs of a gather or scatter at once: what they take of the SMs; None: as many as are of
            use.

    Raises:
        ConfigError: not a CUDA device.
        DeviceError: it does not answer.
    """

    def __init__(self, label: str = "cuda:0", *, programs: int | None = None) -> None:
        device = torch.device(label)
        if device.type != "cuda":
            raise ConfigError(f"label={label!r} must be a CUDA device, such as cuda:0")
        with torch_errors():
            index = torch.cuda.current_device() if device.index is None else device.index
            self._device = torch.device("cuda", index)
            self.label, self.name = f"cuda:{index}", str(torch.cuda.get_device_name(index))
        self.programs = programs
        self._pinning = pinning_on(index)
        self._launch = importlib.import_module("kvxfer.convert.launch")  # takes Triton

    def mark(self) -> Event:
        """On the calling thread's current stream of this device."""
        with torch_errors():
            return _Event(torch.cuda.current_stream(self._device).record_event())

    def stream(self) -> Stream:
        """From torch's pool."""
        with torch_errors():
            return _Stream(torch.cuda.Stream(self._device))

    def record(self, stream: Stream) -> Event:
        """cudaEventRecord, without timing."""
        with torch_errors():
            return _Event(_of(stream).record_event())

    def wait(self, stream: Stream, event: Event) -> None:
        """cudaStreamWaitEvent."""
        assert isinstance(event, _Event)
        with torch_errors():
            _of(stream).wait_event(event.torch)

    def device_buffer(self, nbytes: int, alignment: int = 4096) -> Buffer:
        """Waits for what is queued on the current stream: memory that it has freed may still be in use there."""
        with torch_errors():
            memory = _aligned(lambda n: torch.empty(n, dtype=torch.uint8, device=self._device), nbytes, alignment)
            torch.cuda.current_stream(self._device).synchronize()
        return _Buffer(memory, nbytes, alignment, True)

    def host_buffer(self, nbytes: int, alignment: int = 4096) -> Buffer:
        """Pinned by libkvx_cuda where that is there, else by torch's allocator; else ordinary."""
        why = ""
        if self._pinning is not None and (mine := self._pinning(nbytes, alignment)) is not None:
            return _Buffer(torch.from_numpy(mine.array), nbytes, alignment, False, pinned=mine)
        try:
            memory = _aligned(lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True), nbytes, alignment)
        except RuntimeError as exc:
            why = _first_line(exc)
            memory = _aligned(lambda n: torch.empty(n, dtype=torch.uint8), nbytes, alignment)
        return _Buffer(memory, nbytes, alignment, False, why)

    def copy(
        self, stream: Stream, target: Buffer, target_offset: int, source: Buffer, source_offset: int, nbytes: int
    ) -> None:
        """cudaMemcpyAsync; several where host memory was pinned in pieces."""
        to, of, done = _tensor(target), _tensor(source), 0
        assert isinstance(target, _Buffer) and isinstance(source, _Buffer)
        with torch_errors(), torch.cuda.stream(_of(stream)):
            while done < nbytes:
                at, whence = target_offset + done, source_offset + done
                size = min(nbytes - done, target.in_one_copy(at), source.in_one_copy(whence))
                to[at : at + size].copy_(of[whence : whence + size], non_blocking=True)
                done += size

    def gather(
        self,
        stream: Stream,
        pages: KVPages,
        mapping: CanonicalMapping,
        block_ids: Buffer,
        chunks: int,
        out: Buffer,
        out_stride: int,
        sums: Buffer | None = None,
    ) -> None:
        """`convert.launch.gather`."""
        ids, to, into = self._arguments(mapping, block_ids, chunks, out, out_stride, sums)
        with torch_errors(), torch.cuda.stream(_of(stream)):
            self._launch.gather(pages, ids, mapping, to, into, programs=self.programs)

    def scatter(
        self,
        stream: Stream,
        pages: KVPages,
        mapping: CanonicalMapping,
        block_ids: Buffer,
        chunks: int,
        source: Buffer,
        source_stride: int,
        sums: Buffer | None = None,
    ) -> None:
        """`convert.launch.scatter`."""
        ids, of, into = self._arguments(mapping, block_ids, chunks, source, source_stride, sums)
        with torch_errors(), torch.cuda.stream(_of(stream)):
            self._launch.scatter(of, ids, mapping, pages, into, programs=self.programs)

    def checksum(
        self,
        stream: Stream,
        mapping: CanonicalMapping,
        chunks: int,
        source: Buffer,
        source_stride: int,
        sums: Buffer,
    ) -> None:
        """`convert.launch.checksum`."""
        of = _chunks(mapping, source, chunks, source_stride)
        with torch_errors(), torch.cuda.stream(_of(stream)):
            self._launch.checksum(of, mapping, _sums(mapping, sums, chunks), programs=self.programs)

    @staticmethod
    def _arguments(
        mapping: CanonicalMapping, block_ids: Buffer, chunks: int, buffer: Buffer, stride: int, sums: Buffer | None
    ) -> tuple[Any, Any, Any]:
        nbytes = chunks * mapping.blocks_per_chunk * 8
        ids = _tensor(block_ids)[:nbytes].view(torch.int64).view(chunks, mapping.blocks_per_chunk)
        into = None if sums is None else _sums(mapping, sums, chunks)
        return ids, _chunks(mapping, buffer, chunks, stride), into


def _aligned(make: Callable[[int], Any], nbytes: int, alignment: int) -> Any:
    """Memory with room for nbytes that are aligned; no more than these where it is aligned already, as it mostly is.

    torch's allocators round sizes up, some to a power of two.
    """
    memory = make(nbytes)
    return memory if int(memory.data_ptr()) % alignment == 0 else make(nbytes + alignment)


def _chunks(mapping: CanonicalMapping, buffer: Buffer, chunks: int, stride: int) -> Any:
    """uint8 [chunks, payload_stride] over a buffer."""
    width = mapping.slot.payload_stride
    return _tensor(buffer)[: (chunks - 1) * stride + width].as_strided((chunks, width), (stride, 1))


def _sums(mapping: CanonicalMapping, buffer: Buffer, chunks: int) -> Any:
    """int64 [chunks, num_segments] over a buffer: the sums' bits."""
    nbytes = chunks * mapping.slot.num_segments * 8
    return _tensor(buffer)[:nbytes].view(torch.int64).view(chunks, mapping.slot.num_segments)


@contextmanager
def torch_errors() -> Iterator[None]:
    """torch's errors as kvxfer's: DeviceMemoryError, DeviceError."""
    try:
        yield
    except torch.OutOfMemoryError as exc:
        raise DeviceMemoryError(_first_line(exc)) from exc
    except RuntimeError as exc:  # an error of the driver's, or of a launch
        raise DeviceError(_first_line(exc)) from exc


def _first_line(exc: BaseException) -> str:
    """Without torch's advice on how to debug kernels."""
    return str(exc).partition("\n")[0] or type(exc).__name__


def _of(stream: Stream) -> Any:
    assert isinstance(stream, _Stream)
    return stream.torch


def _tensor(buffer: Buffer) -> Any:
    assert isinstance(buffer, _Buffer)
    if buffer.tensor is None:
        raise DeviceError("a buffer was used after it was freed")
    return buffer.tensor
