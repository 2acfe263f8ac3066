"""What only a device can show: streams, pinned memory, graphs, offsets beyond 4 GiB, a cache of real size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.convert import launch, native
from kvxfer.convert.pages import KVPages
from kvxfer.errors import DeviceError, LayoutError
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping, row_mapping
from kvxfer.mapping import CanonicalMapping, LocalTensor
from kvxfer.opaque import opaque_mapping
from tests.convert.common import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
    pytest.mark.skipif(launch.INTERPRETED, reason="kernels are interpreted in this run (TRITON_INTERPRET=1)"),
]
DEVICE = "cuda:0"
GiB = 1 << 30
BLOCKS = 40
LLAMA = KVGeometry(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=16)


def both(mapping: CanonicalMapping, num_blocks: int = BLOCKS) -> tuple[KVPages, KVPages]:
    """The same random pages in host memory and on the device."""
    rng = np.random.default_rng(7)
    sizes = [t.offset + num_blocks * t.block_stride for t in mapping.tensors]
    host = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    return (
        KVPages(mapping, host, num_blocks),
        KVPages(mapping, [torch.from_numpy(memory).to(DEVICE) for memory in host], num_blocks),
    )


def ids_of(mapping: CanonicalMapping, chunks: int = 9, seed: int = 1) -> np.ndarray:
    """Distinct blocks, two of them absent."""
    ids = np.random.default_rng(seed).permutation(BLOCKS)[: chunks * mapping.blocks_per_chunk]
    ids = ids.reshape(chunks, -1).astype(np.int64)
    ids[0, 0] = ids[-1, -1] = -1
    return ids


def native_gather(pages: KVPages, ids: np.ndarray, mapping: CanonicalMapping) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((len(ids), mapping.slot.payload_stride), np.uint8)
    sums = np.zeros((len(ids), mapping.slot.num_segments), np.uint64)
    native.gather(pages, ids, mapping, out, sums)
    return out, sums


def mapping_named(name: str) -> CanonicalMapping:
    if name == "opaque":
        tensors = [LocalTensor(block_stride=n, page_bytes=n) for n in (8192, 40_000, 528)]
        return opaque_mapping(tensors, ShardSpec(), blocks_per_chunk=2)
    layout, per_chunk = {"nhd": (PageLayout.nhd, 1), "hnd": (PageLayout.hnd, 2), "packed": (PageLayout.packed, 4)}[name]
    return kvx1_mapping(LLAMA, ShardSpec(), layout(LLAMA, 8, padding=64), blocks_per_chunk=per_chunk)


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
@pytest.mark.parametrize("programs", [None, 5])
@pytest.mark.parametrize("name", ["nhd", "hnd", "packed", "opaque"])
def test_a_cache_of_real_size_goes_both_ways(name: str, programs: int | None, pinned: bool) -> None:
    mapping = mapping_named(name)
    host, pages = both(mapping)
    ids = ids_of(mapping)
    want, want_sums = native_gather(host, ids, mapping)
    where: dict[str, Any] = {"pin_memory": True} if pinned else {"device": DEVICE}
    out = torch.full(want.shape, 0xA5, dtype=torch.uint8, **where)
    sums = torch.full(want_sums.shape, 99, dtype=torch.int64, **where)
    there = torch.from_numpy(ids).to(DEVICE)
    launch.gather(pages, there, mapping, out, sums, programs=programs)
    torch.cuda.synchronize()
    assert_same(out.cpu().numpy(), want)
    assert_same(sums.cpu().numpy().view(np.uint64), want_sums, "sums")
    again = torch.full_like(sums, 5)
    launch.checksum(out, mapping, again, programs=programs)
    torch.cuda.synchronize()
    assert_same(again.cpu().numpy().view(np.uint64), want_sums, "sums alone")
    for memory in pages.tensors:
        memory.fill_(0xA5)
    again.fill_(5)
    launch.scatter(out, there, mapping, pages, again, programs=programs)
    torch.cuda.synchronize()
    assert_same(again.cpu().numpy().view(np.uint64), want_sums, "sums of the scatter")
    for memory in host.tensors:
        memory.fill(0xA5)
    native.scatter(want, ids, mapping, host)
    for number, memory in enumerate(host.tensors):
        assert_same(pages.tensors[number].cpu().numpy(), memory, f"tensor {number}")


@pytest.mark.parametrize("at", [0, 8, 4, 2, 1])
def test_no_access_is_wider_than_it_is_aligned(at: int) -> None:
    """A misaligned address is an error of the whole context."""
    mapping = mapping_named("nhd")
    host, pages = both(mapping)
    ids = ids_of(mapping)
    want, want_sums = native_gather(host, ids, mapping)
    row = want.shape[1] + at
    out = torch.zeros(len(ids) * row + at, dtype=torch.uint8, device=DEVICE)[at:].view(len(ids), row)[
        :, : want.shape[1]
    ]
    sums = torch.zeros(want_sums.shape, dtype=torch.int64, device=DEVICE)
    launch.gather(pages, torch.from_numpy(ids).to(DEVICE), mapping, out, sums)
    torch.cuda.synchronize()
    assert_same(out.cpu().numpy(), want)
    assert_same(sums.cpu().numpy().view(np.uint64), want_sums, "sums")


def test_a_captured_graph_moves_what_is_there_when_it_is_replayed() -> None:
    mapping = mapping_named("hnd")
    host, pages = both(mapping)
    ids = ids_of(mapping)
    there = torch.from_numpy(ids).to(DEVICE)
    out = torch.zeros((len(ids), mapping.slot.payload_stride), dtype=torch.uint8, device=DEVICE)
    sums = torch.zeros((len(ids), mapping.slot.num_segments), dtype=torch.int64, device=DEVICE)
    launch.gather(pages, there, mapping, out, sums)  # compiles, and makes the tables
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.gather(pages, there, mapping, out, sums)
    other = ids_of(mapping, seed=2)
    there.copy_(torch.from_numpy(other))
    out.fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    want, want_sums = native_gather(host, other, mapping)
    assert_same(out.cpu().numpy(), want)
    assert_same(sums.cpu().numpy().view(np.uint64), want_sums, "sums")


def test_a_capture_without_tables_is_refused() -> None:
    mapping = row_mapping(64)
    pages = KVPages(mapping, [torch.zeros(640, dtype=torch.uint8, device=DEVICE)], 10)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=DEVICE)
    out = torch.zeros((1, 4096), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(DeviceError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        launch.gather(pages, ids, mapping, out)


def test_offsets_beyond_4_gib() -> None:
    """Blocks 1.5 GiB apart, chunks 3 GiB apart: R14."""
    step = 3 * GiB // 2 + 64
    mapping = row_mapping(4096, row_stride=step)
    memory = torch.zeros(4 * step, dtype=torch.uint8, device=DEVICE)
    rows = torch.randint(256, (4, 4096), dtype=torch.uint8)
    for block, row in enumerate(rows):
        memory[block * step : block * step + 4096] = row.to(DEVICE)
    pages = KVPages(mapping, [memory], 4)
    out = torch.zeros(7 * GiB, dtype=torch.uint8, device=DEVICE).as_strided((3, 4096), (3 * GiB, 1))
    sums = torch.zeros((3, 1), dtype=torch.int64, device=DEVICE)
    launch.gather(pages, torch.tensor([[3], [0], [2]], device=DEVICE), mapping, out, sums)
    assert torch.equal(out.cpu(), rows[[3, 0, 2]])
    launch.scatter(out, torch.tensor([[0], [3], [1]], device=DEVICE), mapping, pages)
    for block, row in ((0, 3), (3, 0), (1, 2), (2, 2)):
        assert torch.equal(memory[block * step : block * step + 4096].cpu(), rows[row])


def test_a_segment_beyond_4_gib() -> None:
    """Three pages of 1.5 GiB in a segment: bytes of it need 33 bits, vectors do not."""
    size = 3 * GiB // 2
    mapping = opaque_mapping([LocalTensor(block_stride=size, page_bytes=size)] * 3, ShardSpec())
    tensors = [torch.randint(-(2**62), 2**62, (size // 8,), device=DEVICE) for _ in range(3)]
    pages = KVPages(mapping, tensors, 1)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=DEVICE)
    out = torch.zeros((1, mapping.slot.payload_stride), dtype=torch.uint8, device=DEVICE)
    sums, alone = torch.zeros((2, 1, 1), dtype=torch.int64, device=DEVICE)
    launch.gather(pages, ids, mapping, out, sums)
    launch.checksum(out, mapping, alone)
    for part, tensor in zip(out.view(torch.int64).view(3, -1), tensors, strict=True):
        assert torch.equal(part, tensor)
        tensor.zero_()
    assert torch.equal(sums, alone)
    launch.scatter(out, ids, mapping, pages)
    for part, tensor in zip(out.view(torch.int64).view(3, -1), tensors, strict=True):
        assert torch.equal(part, tensor)


def test_ordinary_host_memory_is_refused() -> None:
    mapping = row_mapping(64)
    pages = KVPages(mapping, [torch.zeros(640, dtype=torch.uint8, device=DEVICE)], 10)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=DEVICE)
    with pytest.raises(LayoutError, match="is on cpu: want cuda:0, or pinned host memory"):
        launch.gather(pages, ids, mapping, torch.zeros((1, 4096), dtype=torch.uint8))
