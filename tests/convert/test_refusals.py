"""What a converter refuses, and that it refuses before it has written a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.convert.pages import KVPages
from kvxfer.errors import LayoutError
from kvxfer.layout import row_mapping
from tests.convert.common import EVERY_CONVERTER, NUM_BLOCKS, UNTOUCHED_SUM, assert_same, attention, buffers, rank_pages
from tests.oracle import POISON, Model

MODEL = Model.random(attention(8, "uint8", 2), NUM_BLOCKS)
GOOD = np.array([[0, 1], [2, 3], [4, -1]])


@pytest.fixture
def pages() -> KVPages:
    return rank_pages(MODEL, "nhd", blocks_per_chunk=2, only=[])


def with_id(value: int) -> np.ndarray:
    """The wrong id stands last, behind chunks that could have been moved."""
    ids = GOOD.copy()
    ids[2, 1] = value
    return ids


BAD_IDS = {
    "one too many": (with_id(NUM_BLOCKS), rf"block_ids\[2, 1\]={NUM_BLOCKS} must be in 0..{NUM_BLOCKS - 1}, or -1"),
    "far too many": (with_id(2**63 - 1), "must be in"),
    "beyond 32 bits": (with_id(2**32), "must be in"),
    "below absent": (with_id(-2), r"block_ids\[2, 1\]=-2"),
    "most negative": (with_id(-(2**63)), "must be in"),
    "int32": (GOOD.astype(np.int32), "block_ids must be a numpy array of int64, not int32"),
    "a list": (GOOD.tolist(), "block_ids must be a numpy array of int64, not list"),
    "flat": (GOOD.reshape(-1), r"block_ids has shape \(6,\), want \(n, 2\)"),
    "one a chunk": (GOOD.reshape(-1, 1), r"block_ids has shape \(6, 1\)"),
    "another number of chunks": (GOOD[:2], "the canonical buffer has shape"),
}


@pytest.mark.parametrize(("ids", "message"), BAD_IDS.values(), ids=BAD_IDS)
def test_block_ids(converter: Any, pages: KVPages, ids: Any, message: str) -> None:
    buffer, sums = buffers(pages, 3)
    with pytest.raises(LayoutError, match=message):
        converter.gather(pages, ids, pages.mapping, buffer, sums)
    assert np.all(buffer == POISON)
    with pytest.raises(LayoutError, match=message):
        converter.scatter(np.zeros_like(buffer), ids, pages.mapping, pages, sums)
    assert np.all(sums == UNTOUCHED_SUM)
    for tensor in pages.tensors:
        assert np.all(tensor == POISON)


def test_a_block_twice_in_a_scatter(converter: Any, pages: KVPages) -> None:
    buffer, _ = buffers(pages, 3)
    converter.gather(pages, with_id(0), pages.mapping, buffer)  # reading a block twice is nobody's harm
    with pytest.raises(LayoutError, match="block 0 is named twice"):
        converter.scatter(np.zeros_like(buffer), with_id(0), pages.mapping, pages)
    assert np.all(pages.tensors[0] == POISON)


STRIDE = 4 * 4096
BAD_BUFFERS = {
    "too short": (np.zeros((3, STRIDE - 1), np.uint8), "want .3, 16384."),
    "too long": (np.zeros((3, STRIDE + 4096), np.uint8), "want .3, 16384."),
    "int8": (np.zeros((3, STRIDE), np.int8), "must be a numpy array of uint8, not int8"),
    "bytes": (b"", "not bytes"),
    "every other byte": (np.zeros((3, 2 * STRIDE), np.uint8)[:, ::2], "side by side"),
    "overlapping": (
        np.lib.stride_tricks.as_strided(np.zeros(2 * STRIDE, np.uint8), (3, STRIDE), (8, 1)),
        "overlapping",
    ),
    "backwards": (np.zeros((3, STRIDE), np.uint8)[::-1], "overlapping"),
}


@pytest.mark.parametrize(("buffer", "message"), BAD_BUFFERS.values(), ids=BAD_BUFFERS)
def test_buffers(converter: Any, pages: KVPages, buffer: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        converter.gather(pages, GOOD, pages.mapping, buffer)
    with pytest.raises(LayoutError, match=message):
        converter.scatter(buffer, GOOD, pages.mapping, pages)
    assert np.all(pages.tensors[0] == POISON)


def test_a_read_only_buffer_can_be_scattered_from(converter: Any, pages: KVPages) -> None:
    buffer = MODEL.payloads(GOOD)
    buffer.flags.writeable = False
    with pytest.raises(LayoutError, match="out is read-only"):
        converter.gather(pages, GOOD, pages.mapping, buffer)
    converter.scatter(buffer, GOOD, pages.mapping, pages)
    for tensor, memory in enumerate(MODEL.pages("nhd", only=GOOD[GOOD >= 0].tolist())):
        assert_same(pages.tensors[tensor], memory)


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (np.zeros((3, 4), np.int64), "sums must be a numpy array of uint64"),
        (np.zeros((3, 5), np.uint64), r"want \(3, 4\)"),
        (np.zeros((2, 4), np.uint64), r"want \(3, 4\)"),
        (np.zeros((4, 3), np.uint64).T, "contiguous"),
        (np.broadcast_to(np.uint64(0), (3, 4)), "contiguous"),
    ],
)
def test_sums(converter: Any, pages: KVPages, sums: Any, message: str) -> None:
    buffer, _ = buffers(pages, 3)
    with pytest.raises(LayoutError, match=message):
        converter.gather(pages, GOOD, pages.mapping, buffer, sums)
    assert np.all(buffer == POISON)
    with pytest.raises(LayoutError, match=message):
        converter.scatter(np.zeros_like(buffer), GOOD, pages.mapping, pages, sums)
    assert np.all(pages.tensors[0] == POISON)


def test_a_mapping_of_other_pages(converter: Any, pages: KVPages) -> None:
    buffer, _ = buffers(pages, 3)
    for other in (row_mapping(64), rank_pages(MODEL, "nhd", blocks_per_chunk=2, padding=8).mapping):
        with pytest.raises(LayoutError, match="another layout"):
            converter.gather(pages, GOOD, other, buffer)


@pytest.mark.parametrize("converter", EVERY_CONVERTER, indirect=True)
def test_a_mapping_of_the_same_pages_and_other_chunks(converter: Any, pages: KVPages) -> None:
    other = rank_pages(MODEL, "nhd", blocks_per_chunk=1).mapping
    source = rank_pages(MODEL, "nhd", blocks_per_chunk=2)
    out = np.zeros((2, other.slot.payload_stride), np.uint8)
    converter.gather(source, np.array([[5], [3]]), other, out)
    assert_same(out, MODEL.payloads([[5], [3]]))


@pytest.mark.parametrize("converter", EVERY_CONVERTER, indirect=True)
def test_no_chunks_at_all(converter: Any, pages: KVPages) -> None:
    buffer, sums = buffers(pages, 0)
    converter.gather(pages, GOOD[:0], pages.mapping, buffer, sums)
    converter.scatter(buffer, GOOD[:0], pages.mapping, pages, sums)
    assert np.all(pages.tensors[0] == POISON)


@pytest.mark.parametrize("converter", EVERY_CONVERTER, indirect=True)
def test_views_of_buffers_and_ids(converter: Any, pages: KVPages) -> None:
    """Rows may be apart, ids may be a view."""
    source = rank_pages(MODEL, "nhd", blocks_per_chunk=2)
    ids = np.stack([GOOD, np.full_like(GOOD, 99)], axis=1)[:, 0]
    wide = np.full((3, STRIDE + 64), POISON, np.uint8)
    converter.gather(source, ids, source.mapping, wide[:, :STRIDE])
    assert_same(wide[:, :STRIDE], MODEL.payloads(GOOD))
    assert np.all(wide[:, STRIDE:] == POISON)
    one = np.full((4, STRIDE), POISON, np.uint8)[1:2]
    converter.gather(source, ids[1:2], source.mapping, one)
    assert_same(one, MODEL.payloads(GOOD[1:2]))
