"""R14: offsets beyond 2^31 elements and 2^32 bytes, over memory that is reserved and hardly used."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvxfer.convert.pages import KVPages
from kvxfer.geometry import ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping, row_mapping
from tests.convert.common import CONVERTERS, assert_same, attention
from tests.oracle import Model

GiB = 1 << 30
MAP_NORESERVE = 0x4000  # Linux's; Python 3.11's mmap does not name it


# On a GPU these would copy 16 GiB to and fro: tests/kernels has one that lets the memory be there.
pytestmark = pytest.mark.parametrize("converter", [*CONVERTERS, "triton"], indirect=True)


def reserve(size: int) -> NDArray[np.uint8]:
    """Zeros of which only those written take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint8)


def test_blocks_beyond_4_gib_of_a_sparse_file(converter: Any, tmp_path: Path) -> None:
    """Blocks 1.5 GiB apart in a file with holes; offset and head strides are within the page as ever."""
    geometry = attention(20, "uint8", 3, layers=1, heads=2)
    model = Model.random(geometry, 4)
    page = PageLayout.nhd(geometry, 2)
    far = PageLayout(
        name="far",
        block_stride=3 * GiB // 2 + 8,
        kv_stride=page.kv_stride,
        head_stride=page.head_stride,
        token_stride=page.token_stride,
        dim_stride=1,
        page_bytes=page.page_bytes,
        offset=24,
    )
    path = tmp_path / "sparse"
    memory = np.memmap(path, dtype=np.uint8, mode="w+", shape=(24 + 3 * far.block_stride + far.page_bytes,))
    assert memory.size > 2**32
    source = model.pages("nhd")[0].reshape(4, -1)
    for block in range(4):
        at = 24 + block * far.block_stride
        memory[at : at + far.page_bytes] = source[block]
    mapping = kvx1_mapping(geometry, ShardSpec(), far, blocks_per_chunk=2)
    pages = KVPages(mapping, [memory], 4)
    ids = np.array([[3, 0], [-1, 2]])
    out = np.empty((2, mapping.slot.payload_stride), np.uint8)
    sums = np.zeros((2, 2), np.uint64)
    converter.gather(pages, ids, mapping, out, sums)
    assert_same(out, model.payloads(ids))
    assert_same(sums, model.sums(ids))
    swapped = np.array([[0, 3], [2, 1]])
    converter.scatter(model.payloads([[3, 0], [1, 2]]), swapped, mapping, pages)
    for block, expected in ((0, 3), (3, 0), (2, 1), (1, 2)):
        at = 24 + block * far.block_stride
        assert_same(np.asarray(memory[at : at + far.page_bytes]), source[expected])
        assert not memory[at + far.page_bytes : at + far.page_bytes + 4096].any()
    assert path.stat().st_blocks * 512 < 1 << 20


def test_more_blocks_than_32_bits_count(converter: Any) -> None:
    """Ids that lose their upper half would fall on a neighbour: 2^32 + 3 must not be block 3."""
    blocks = 2**32 + 16
    memory = reserve(2 * blocks)
    mapping = row_mapping(2)
    pages = KVPages(mapping, [memory], blocks)
    far = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 3]
    for value, block in enumerate(far):
        memory[2 * block : 2 * block + 2] = value + 1
    ids = np.array(far, dtype=np.int64).reshape(-1, 1)
    out = np.empty((5, 4096), np.uint8)
    converter.gather(pages, ids, mapping, out)
    assert out[:, :3].tolist() == [[v, v, 0] for v in range(1, 6)]
    converter.scatter(out[::-1].copy(), ids, mapping, pages)
    assert [memory[2 * block : 2 * block + 2].tolist() for block in far] == [[v, v] for v in (5, 4, 3, 2, 1)]
    assert not memory[:64].any()


def test_chunks_far_apart_in_the_canonical_buffer(converter: Any) -> None:
    rows = np.arange(300, dtype=np.uint16).view(np.uint8).reshape(3, 200)
    mapping = row_mapping(200)
    buffer = as_strided(reserve(7 * GiB), (3, 4096), (3 * GiB, 1))
    sums = np.zeros((3, 1), np.uint64)
    ids = np.array([[2], [0], [1]])
    converter.gather(KVPages(mapping, [rows], 3), ids, mapping, buffer, sums)
    assert_same(buffer[:, :200], rows[[2, 0, 1]])
    assert not buffer[:, 200:].any()
    target = np.zeros_like(rows)
    converter.scatter(buffer, ids, mapping, KVPages(mapping, [target], 3), sums)
    assert_same(target, rows)
