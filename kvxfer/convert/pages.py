"""The live tensors of one rank, checked against its mapping, and what a transfer over them must satisfy."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import LayoutError
from kvxfer.keys import Namespace
from kvxfer.mapping import CanonicalMapping, LocalTensor
from kvxfer.slot import SlotLayout


class KVPages:
    """One rank's KV-cache tensors as memory: addresses and strides, kept alive as long as this object.

    The tensors' shapes and dtypes are not looked at: `mapping` declares where blocks are. Only the memory that a tensor
    spans, from its first element to its last, is ever touched, and within it only pages.

    `device` is "cpu", or torch's label of the device whose memory they are in, "cuda:0": those are moved by launch.py.

    Args:
        mapping: made for these tensors; other mappings of the same local layout can be used with this object too.
        tensors: numpy arrays, CPU torch tensors, or torch tensors of one CUDA device, in the mapping's order.
        num_blocks: blocks that each of them has.

    Raises:
        LayoutError: a tensor is too small for `num_blocks`, in memory of another kind than the first, or shares pages
            with another.
    """

    __slots__ = (
        "__weakref__",
        "addresses",
        "device",
        "handles",
        "lock",
        "mapping",
        "num_blocks",
        "plans",
        "tensors",
        "writable",
    )

    def __init__(self, mapping: CanonicalMapping, tensors: Sequence[Any], num_blocks: int) -> None:
        if len(tensors) != mapping.num_tensors:
            raise LayoutError(f"{len(tensors)} tensors were given, the mapping has {mapping.num_tensors}")
        num_blocks = operator.index(num_blocks)
        if num_blocks < 1:
            raise LayoutError(f"num_blocks={num_blocks} must be at least 1")
        addresses: list[int] = []
        devices: list[str] = []
        writable = True
        for index, (tensor, local) in enumerate(zip(tensors, mapping.tensors, strict=True)):
            device, address, available, may_write = device_memory_of(tensor, index)
            devices.append(device)
            if device != devices[0]:
                raise LayoutError(f"tensor {index} is on {device} and tensor 0 on {devices[0]}: want one device")
            if available < (wanted := span_of(local, num_blocks)):
                raise LayoutError(
                    f"tensor {index} spans {available} bytes, but {num_blocks} blocks of stride {local.block_stride} "
                    f"that begin at {local.offset} and use {local.page_bytes} each end at {wanted}"
                )
            addresses.append(address)
            writable = writable and may_write
        self.mapping = mapping
        self.tensors = tuple(tensors)
        self.num_blocks = num_blocks
        self.addresses = tuple(addresses)
        self.device = devices[0]
        self.writable = writable
        self.lock = threading.Lock()
        self.handles: dict[tuple[int, bool], Any] = {}  # native.py's
        self.plans: dict[int, Any] = {}  # launch.py's
        _refuse_shared_pages(mapping.tensors, self.addresses, num_blocks)

    def flat(self, tensor: int) -> NDArray[np.uint8]:
        """Bytes of one tensor from its address to the end of its last block; writable where the tensor is.

        Raises:
            LayoutError: they are not in host memory.
        """
        check_host(self)
        return np.asarray(_Window(self, tensor))


class _Window:
    """Memory of one tensor for numpy, which keeps this object, and through it the tensors, alive."""

    def __init__(self, pages: KVPages, tensor: int) -> None:
        self.pages = pages
        size = span_of(pages.mapping.tensors[tensor], pages.num_blocks)
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (pages.addresses[tensor], not pages.writable),
        }


def span_of(tensor: LocalTensor, num_blocks: int) -> int:
    """Bytes from a tensor's address to the end of its last block's page."""
    return tensor.offset + (num_blocks - 1) * tensor.block_stride + tensor.page_bytes


def memory_of(tensor: Any, index: int) -> tuple[int, int, bool]:
    """A tensor's address, the bytes from there to the end of its last element, and whether they may be written.

    Raises:
        LayoutError: it is not in host memory, or its first element is not its lowest address.
    """
    device, address, available, writable = device_memory_of(tensor, index)
    if device != "cpu":
        raise LayoutError(f"tensor {index} is on {device}: it must be in host memory")
    return address, available, writable


def device_memory_of(tensor: Any, index: int) -> tuple[str, int, int, bool]:
    """A tensor's device, "cpu" or a CUDA one's label, and what `memory_of` says.

    Raises:
        LayoutError: its memory is of another kind, or its first element is not its lowest address.
    """
    device = "cpu"
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise LayoutError(f"tensor {index} holds Python objects")
        address, writable = int(tensor.ctypes.data), bool(tensor.flags.writeable)
        strides, itemsize = tensor.strides, tensor.itemsize
    elif hasattr(tensor, "data_ptr") and hasattr(tensor, "untyped_storage"):  # torch, without importing it
        if tensor.device.type not in ("cpu", "cuda"):
            raise LayoutError(f"tensor {index} is on {tensor.device}: want host memory, or a CUDA device's")
        device = str(tensor.device)
        address, itemsize, writable = int(tensor.data_ptr()), int(tensor.element_size()), True
        strides = tuple(stride * itemsize for stride in tensor.stride())
    else:
        raise LayoutError(f"tensor {index} is a {type(tensor).__name__}: want a numpy array or a torch tensor")
    if any(stride < 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True)):
        raise LayoutError(f"tensor {index} has a negative stride: its first element is not its lowest address")
    empty = 0 in tensor.shape
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return device, address, 0 if empty else last + itemsize, writable


def _refuse_shared_pages(tensors: Sequence[LocalTensor], addresses: Sequence[int], num_blocks: int) -> None:
    """Raises LayoutError unless no byte is in pages of two tensors.

    Tensors may lie interleaved (the layers of a block side by side), where they have one block stride.
    """
    order = sorted(range(len(tensors)), key=lambda i: addresses[i] + tensors[i].offset)
    begin = [address + tensor.offset for address, tensor in zip(addresses, tensors, strict=True)]
    end = [address + span_of(tensor, num_blocks) for address, tensor in zip(addresses, tensors, strict=True)]
    cluster: list[int] = []
    reach = 0
    for here in [*order, None]:
        if here is not None and (not cluster or begin[here] < reach):
            cluster.append(here)
            reach = max(reach, end[here])
            continue
        _check_interleaved(cluster, tensors, begin)
        if here is not None:
            cluster, reach = [here], end[here]


def _check_interleaved(cluster: Sequence[int], tensors: Sequence[LocalTensor], begin: Sequence[int]) -> None:
    """Raises LayoutError unless tensors whose memory overlaps have one block stride and disjoint pages within it."""
    if len(cluster) < 2:
        return
    stride = tensors[cluster[0]].block_stride
    for index in cluster:
        if tensors[index].block_stride != stride:
            raise LayoutError(f"tensors {cluster[0]} and {index} overlap in memory and have different block strides")
    placed = sorted((begin[index] % stride, index) for index in cluster)
    placed.append((placed[0][0] + stride, placed[0][1]))  # the page that may wrap round
    for (low, index), (high, other) in pairwise(placed):
        if low + tensors[index].page_bytes > high:
            raise LayoutError(f"pages of tensors {min(index, other)} and {max(index, other)} overlap in memory")


def check_gather(
    pages: KVPages, block_ids: Any, mapping: CanonicalMapping, out: Any, sums: NDArray[np.uint64] | None
) -> None:
    """Everything that a gather needs of its arguments: see `reference.gather`.

    Raises:
        LayoutError: an argument does not fit; nothing was written.
    """
    _check_call(pages, block_ids, mapping, out, sums)
    if not out.flags.writeable:
        raise LayoutError("out is read-only")


def check_scatter(
    pages: KVPages, block_ids: Any, mapping: CanonicalMapping, src: Any, sums: NDArray[np.uint64] | None
) -> None:
    """Everything that a scatter needs of its arguments: see `reference.scatter`.

    Raises:
        LayoutError: an argument does not fit; nothing was written.
    """
    _check_call(pages, block_ids, mapping, src, sums)
    if not pages.writable:
        raise LayoutError("a tensor of these pages is read-only")
    check_distinct(block_ids)


def check_block_ids(pages: KVPages, mapping: CanonicalMapping, block_ids: Any) -> None:
    """Raises LayoutError unless `block_ids` [n, blocks_per_chunk] are blocks of these pages, or -1."""
    per_chunk = mapping.blocks_per_chunk
    _check_array("block_ids", block_ids, np.int64)
    if block_ids.ndim != 2 or block_ids.shape[1] != per_chunk:
        raise LayoutError(f"block_ids has shape {block_ids.shape}, want (n, {per_chunk})")
    wrong = np.flatnonzero((block_ids < -1) | (block_ids >= pages.num_blocks))
    if wrong.size:
        chunk, position = divmod(int(wrong[0]), per_chunk)
        raise LayoutError(
            f"block_ids[{chunk}, {position}]={block_ids[chunk, position]} must be in 0..{pages.num_blocks - 1}, "
            "or -1 for an absent block"
        )


def check_distinct(block_ids: NDArray[np.int64]) -> None:
    """Raises LayoutError where a block is named twice, as those to be written must not be."""
    present = np.sort(block_ids[block_ids >= 0])
    if (twice := np.flatnonzero(present[1:] == present[:-1])).size:
        raise LayoutError(f"block {present[twice[0]]} is named twice: which of its bytes stay would be left to chance")


def check_mapping(pages: KVPages, mapping: CanonicalMapping) -> None:
    """Raises LayoutError unless `mapping` describes the tensors that `pages` was made of."""
    if mapping is not pages.mapping and mapping.tensors != pages.mapping.tensors:
        raise LayoutError("the mapping was made for tensors of another layout than these pages")


def check_host(pages: KVPages) -> None:
    """Raises LayoutError where the pages are in a device's memory, which no host converter reaches."""
    if pages.device != "cpu":
        raise LayoutError(f"these pages are on {pages.device}: want host memory")


def _check_call(
    pages: KVPages, block_ids: Any, mapping: CanonicalMapping, buffer: Any, sums: NDArray[np.uint64] | None
) -> None:
    check_host(pages)
    check_mapping(pages, mapping)
    check_block_ids(pages, mapping, block_ids)
    chunks, stride = len(block_ids), mapping.slot.payload_stride
    _check_array("the canonical buffer", buffer, np.uint8)
    row, byte = buffer.strides if buffer.ndim == 2 and buffer.size else (stride, 1)  # of nothing, strides mean nothing
    if buffer.shape != (chunks, stride) or byte != 1 or (chunks > 1 and row < stride):
        raise LayoutError(
            f"the canonical buffer has shape {buffer.shape} and strides {buffer.strides}, want ({chunks}, {stride}) "
            "with the bytes of a chunk side by side and chunks not overlapping"
        )
    if sums is not None:
        _check_array("sums", sums, np.uint64)
        want = (chunks, mapping.slot.num_segments)
        if sums.shape != want or not sums.flags.c_contiguous or not sums.flags.writeable:
            raise LayoutError(f"sums has shape {sums.shape}, want {want}, contiguous and writable")


def _check_array(name: str, array: Any, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise LayoutError(f"{name} must be a numpy array of {np.dtype(dtype)}, not {found}")


def slot_of(namespace: Namespace, pages: Sequence[KVPages]) -> SlotLayout:
    """The one slot layout of pages that are to be moved together.

    Raises:
        LayoutError: there are none, they are of several layouts, or the namespace says something else.
    """
    if not pages:
        raise LayoutError("an engine needs the pages of at least one rank")
    slots = {p.mapping.slot for p in pages}
    if len(slots) != 1:
        raise LayoutError(f"the ranks' mappings are of {len(slots)} slot layouts, want one: {slots}")
    slot = slots.pop()
    if namespace.blocks_per_chunk != slot.blocks_per_chunk:
        raise LayoutError(
            f"the namespace has blocks_per_chunk={namespace.blocks_per_chunk}, the mappings {slot.blocks_per_chunk}"
        )
    for p in pages:
        if p.mapping.topology is not None and p.mapping.topology != namespace.topology:
            raise LayoutError(
                f"the bytes depend on the mappings' topology {p.mapping.topology!r}; the namespace has "
                f"topology={namespace.topology!r}"
            )
    return slot
