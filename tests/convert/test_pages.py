"""KVPages: what memory it takes and what it refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.convert import native, reference
from kvxfer.convert.pages import KVPages, memory_of
from kvxfer.errors import LayoutError
from kvxfer.geometry import ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping, row_mapping
from tests.convert.common import assert_same, attention, rank_pages
from tests.oracle import Model

GEOMETRY = attention(8, "uint8", 2)  # pages of 2 * 2 * 4 * 8 = 128 bytes
MAPPING = kvx1_mapping(GEOMETRY, ShardSpec(), PageLayout.nhd(GEOMETRY, 4, padding=32, offset=16))
SPAN = 16 + 4 * 160 + 128  # five blocks


def test_the_last_block_needs_no_padding() -> None:
    exact = [np.zeros(SPAN, np.uint8) for _ in range(2)]
    pages = KVPages(MAPPING, exact, 5)
    assert pages.addresses == tuple(tensor.ctypes.data for tensor in exact)
    assert pages.flat(1).size == SPAN
    with pytest.raises(LayoutError, match=r"tensor 1 spans 783 bytes, but 5 blocks of stride 160 .* end at 784"):
        KVPages(MAPPING, [exact[0], exact[1][1:]], 5)
    with pytest.raises(LayoutError, match="tensor 0 spans 784 bytes, but 6 blocks"):
        KVPages(MAPPING, exact, 6)


def test_shapes_and_dtypes_are_not_looked_at() -> None:
    for tensor in (np.zeros((SPAN // 8, 2, 2), np.float16), np.zeros((2, SPAN // 2), np.int8)):
        KVPages(MAPPING, [tensor, tensor.copy()], 5)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([np.zeros(SPAN, np.uint8)], "1 tensors were given, the mapping has 2"),
        ([np.zeros(SPAN, np.uint8), b"x" * SPAN], "tensor 1 is a bytes"),
        ([np.zeros(SPAN, object), np.zeros(SPAN, np.uint8)], "tensor 0 holds Python objects"),
        ([np.zeros(SPAN, np.uint8)[::-1], np.zeros(SPAN, np.uint8)], "tensor 0 has a negative stride"),
        ([np.zeros((0, SPAN), np.uint8), np.zeros(SPAN, np.uint8)], "tensor 0 spans 0 bytes"),
        ([np.broadcast_to(np.uint8(0), SPAN), np.zeros(SPAN, np.uint8)], "tensor 0 spans 1 bytes"),
    ],
)
def test_what_is_not_memory_of_these_blocks_is_refused(tensors: list[Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KVPages(MAPPING, tensors, 5)


def test_no_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match="num_blocks=0"):
        KVPages(row_mapping(8), [np.zeros(8, np.uint8)], 0)


class OnDevice:
    """A torch tensor of bytes somewhere, as far as KVPages looks at one."""

    shape = (5, 160)

    def __init__(self, address: int, device: str = "cuda:0") -> None:
        self.address = address
        self.device = Place(device)

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return (160, 1)

    def untyped_storage(self) -> None:
        raise AssertionError("nobody asks for it")


class Place(str):
    """A torch.device."""

    @property
    def type(self) -> str:
        return self.split(":")[0]


DEVICE_MAPPING = row_mapping(128, row_stride=160)


def test_pages_may_be_a_devices() -> None:
    tensors = [OnDevice(1 << 40), OnDevice(2 << 40)]
    pages = KVPages(kvx1_mapping(GEOMETRY, ShardSpec(), PageLayout.nhd(GEOMETRY, 4, padding=32)), tensors, 5)
    assert pages.device == "cuda:0"
    assert pages.addresses == (1 << 40, 2 << 40)
    assert pages.writable
    assert KVPages(DEVICE_MAPPING, [OnDevice(4096, "cuda:3")], 5).device == "cuda:3"
    assert KVPages(DEVICE_MAPPING, [np.zeros(800, np.uint8)], 5).device == "cpu"
    with pytest.raises(LayoutError, match="tensor 0 spans 800 bytes, but 6 blocks"):
        KVPages(DEVICE_MAPPING, [OnDevice(4096)], 6)
    with pytest.raises(LayoutError, match="pages of tensors 0 and 1 overlap"):
        KVPages(pages.mapping, [tensors[0], tensors[0]], 5)


def test_pages_are_of_one_memory() -> None:
    mapping = kvx1_mapping(GEOMETRY, ShardSpec(), PageLayout.nhd(GEOMETRY, 4, padding=32))
    here, there = np.zeros(800, np.uint8), OnDevice(1 << 40)
    for tensors, message in (
        ([here, there], "tensor 1 is on cuda:0 and tensor 0 on cpu: want one device"),
        ([there, here], "tensor 1 is on cpu and tensor 0 on cuda:0"),
        ([there, OnDevice(2 << 40, "cuda:1")], "tensor 1 is on cuda:1 and tensor 0 on cuda:0"),
        ([OnDevice(0, "meta"), there], "tensor 0 is on meta: want host memory, or a CUDA device's"),
        ([there, OnDevice(0, "mps:0")], "tensor 1 is on mps:0"),
    ):
        with pytest.raises(LayoutError, match=message):
            KVPages(mapping, tensors, 5)


def test_no_host_converter_takes_a_devices_pages() -> None:
    """Their addresses are numbers like any other: what is let through here would read memory that is not there."""
    pages = KVPages(DEVICE_MAPPING, [OnDevice(1 << 40)], 5)
    out, ids = np.ones((1, 4096), np.uint8), np.array([[1]])
    calls: tuple[Callable[[], Any], ...] = (
        lambda: pages.flat(0),
        lambda: native.mapping_handle(pages, DEVICE_MAPPING),
        lambda: memory_of(OnDevice(1 << 40), 0),
        *(partial(converter.gather, pages, ids, DEVICE_MAPPING, out) for converter in (reference, native)),
        *(partial(converter.scatter, out, ids, DEVICE_MAPPING, pages) for converter in (reference, native)),
    )
    for call in calls:
        with pytest.raises(LayoutError, match="on cuda:0.* host memory"):
            call()
    assert out.all()


def test_views_bound_what_is_touched() -> None:
    """The memory around a view is somebody else's, also where the storage goes on."""
    storage = np.zeros((7, 64), np.uint8)
    mapping = row_mapping(48, row_stride=64)
    pages = KVPages(mapping, [storage[1:6, 8:56]], 5)
    assert pages.addresses == (storage.ctypes.data + 72,)
    with pytest.raises(LayoutError, match="spans 304 bytes"):
        KVPages(mapping, [storage[1:6, 8:56]], 6)


def test_torch_tensors_with_a_storage_offset() -> None:
    torch = pytest.importorskip("torch", reason="torch's tensors as pages need torch")
    model = Model.random(attention(26, "float16", 3), 4)
    want = model.payloads([[2]])
    memory = model.pages("hnd", padding=16)
    wide = torch.full((len(memory) * 2, memory[0].size // 2 + 8), 7, dtype=torch.float16)
    tensors = list(wide[::2, 8:])
    for tensor, source in zip(tensors, memory, strict=True):
        tensor.copy_(torch.from_numpy(source).view(torch.float16))
        assert tensor.storage_offset() >= 8
    pages = KVPages(rank_pages(model, "hnd", padding=16).mapping, tensors, 4)
    out = np.zeros_like(want)
    ids = np.array([[2]])
    for converter in (reference, native):
        converter.gather(pages, ids, pages.mapping, out)
        assert_same(out, want)
        for tensor in tensors:
            tensor.zero_()
        converter.scatter(want, ids, pages.mapping, pages)
        assert bool((wide[1::2] == 7).all())
        assert bool((wide[:, :8] == 7).all())
    with pytest.raises(LayoutError, match=r"tensor 0 spans .* but 5 blocks"):
        KVPages(pages.mapping, tensors, 5)


def test_the_same_tensor_twice_is_refused() -> None:
    one = np.zeros(SPAN, np.uint8)
    with pytest.raises(LayoutError, match="pages of tensors 0 and 1 overlap"):
        KVPages(MAPPING, [one, one], 5)


def test_layers_may_lie_interleaved_in_one_pool() -> None:
    """Two layers' pages side by side in every block: 2 * 160 bytes a block."""
    page = replace(PageLayout.nhd(GEOMETRY, 4, padding=192))
    mapping = kvx1_mapping(GEOMETRY, ShardSpec(), page)
    pool = np.zeros(5 * 320, np.uint8)
    KVPages(mapping, [pool, pool[128:]], 5)
    KVPages(mapping, [pool[160:], pool], 5)
    for other in (pool[127:], pool[64:]):
        with pytest.raises(LayoutError, match="pages of tensors 0 and 1 overlap"):
            KVPages(mapping, [pool, other], 5)
    with pytest.raises(LayoutError, match="pages of tensors 0 and 1 overlap"):  # the page wraps into the next block
        KVPages(mapping, [pool, pool[193:]], 4)


def test_interleaved_pools_have_one_stride() -> None:
    mapping = kvx1_mapping(GEOMETRY, ShardSpec(), PageLayout.nhd(GEOMETRY, 4, padding=192))
    tensors = (mapping.tensors[0], replace(mapping.tensors[1], block_stride=640))
    pool = np.zeros(5 * 640, np.uint8)
    with pytest.raises(LayoutError, match="different block strides"):
        KVPages(replace(mapping, tensors=tensors), [pool, pool[128:]], 3)


def test_read_only_pages_can_be_gathered_and_not_written() -> None:
    rows = np.arange(16, dtype=np.uint8)
    rows.flags.writeable = False
    mapping = row_mapping(8)
    pages = KVPages(mapping, [rows], 2)
    out = np.zeros((1, 4096), np.uint8)
    assert not pages.writable
    assert not pages.flat(0).flags.writeable
    for converter in (reference, native):
        converter.gather(pages, np.array([[1]]), mapping, out)
        assert out[0, :8].tolist() == list(range(8, 16))
        with pytest.raises(LayoutError, match="read-only"):
            converter.scatter(out, np.array([[0]]), mapping, pages)


def test_a_byte_view_keeps_the_tensors_alive() -> None:
    tensor = np.arange(64, dtype=np.uint8).view(np.recarray)
    alive = weakref.ref(tensor)
    view = KVPages(row_mapping(64), [tensor], 1).flat(0)
    del tensor
    gc.collect()
    assert alive() is not None
    assert view.tolist() == list(range(64))
    view[0] = 9
    del view
    gc.collect()
    assert alive() is None


class _CountingLib:
    """libkvx with a list of what was made and released."""

    def __init__(self) -> None:
        self.made = 0
        self.released: list[int] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(_REAL(), name)
        if name == "kvx_mapping_new":
            self.made += 1
        if name == "kvx_mapping_release":
            return lambda handle: (self.released.append(handle), function(handle))
        return function


_REAL = _native.lib


def test_handles_are_made_once_and_released_with_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = _CountingLib()
    monkeypatch.setattr(_native, "lib", lambda: counting)
    mapping, other = row_mapping(64), row_mapping(64, alignment=8192)
    pages = KVPages(mapping, [np.zeros(64, np.uint8)], 1)
    handles = [native.mapping_handle(pages, m, live) for m in (mapping, other) for live in (True, False, True)]
    assert counting.made == len(set(handles)) == 4
    assert handles[0] == handles[2]
    assert not counting.released
    kept = weakref.ref(other)
    del other
    gc.collect()
    assert kept() is not None  # or another mapping could get its id, and with it its handle
    del pages
    gc.collect()
    assert sorted(counting.released) == sorted(set(handles))


def test_a_mapping_of_other_tensors_is_refused() -> None:
    pages = KVPages(row_mapping(64), [np.zeros(128, np.uint8)], 2)
    with pytest.raises(LayoutError, match="another layout"):
        native.mapping_handle(pages, row_mapping(64, row_stride=65))
