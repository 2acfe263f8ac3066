from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer import _native, checksum
from kvxfer.checksum import MAX_ROWS, ROW_WORDS, k1_table, k2, segment_checksum

FORMAT = Path(__file__).parents[1] / "docs" / "format.md"
M64 = 2**64 - 1


def splitmix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & M64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def perm(x: int, n: int) -> int:
    h = (n + 1) // 2
    x = x * 0x9E3779B1 % 2**n
    x ^= x >> h
    x = x * 0x85EBCA6B % 2**n
    return x ^ x >> h


def plain(data: bytes, first_word: int = 0) -> int:
    """The formula of docs/format.md in integers, word by word."""
    total = 0
    for at in range(0, len(data), 4):
        row, column = divmod(first_word + at // 4, 1024)
        one = (splitmix(column) & 0xFFFFF800) | (2 * perm(column, 10) + 1)
        two = (splitmix(1024 + row) & ~(2**33 - 1)) | (perm(row, 22) << 11) | 1
        total += int.from_bytes(data[at : at + 4], "little") * one * two
    return total & M64


def vectors() -> list[tuple[int, str, int, int]]:
    """(bytes, rule, first word, sum) of every row of the table in docs/format.md."""
    section = FORMAT.read_text().split("## Vectors")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([\d,]+) \| `([^`]+)` \| ([\d,]+) \| `0x([0-9a-f]{16})` \|$", section, re.MULTILINE)
    return [(int(n.replace(",", "")), rule, int(w.replace(",", "")), int(s, 16)) for n, rule, w, s in rows]


def bytes_of(length: int, rule: str) -> NDArray[np.uint8]:
    values = eval(rule, {"__builtins__": {}}, {"i": np.arange(length, dtype=np.uint64)})
    return np.broadcast_to(np.asarray(values), length).astype(np.uint8)


@pytest.mark.parametrize(("length", "rule", "first_word", "want"), vectors())
def test_published_vectors(length: int, rule: str, first_word: int, want: int) -> None:
    data = bytes_of(length, rule)
    assert segment_checksum(data, first_word) == want
    assert _native.lib().kvx_checksum(_native.address(data), length, first_word) == want
    if length <= 20_000:
        assert plain(data.tobytes(), first_word) == want


def test_the_table_has_rows_of_every_kind() -> None:
    lengths = [length for length, *_ in vectors()]
    assert len(lengths) >= 5
    assert any(length % 4 for length in lengths)
    assert max(lengths) > 1 << 20


@given(st.binary(max_size=300), st.integers(0, 5000))
def test_equals_the_plain_formula(data: bytes, first_word: int) -> None:
    assert segment_checksum(data, first_word) == plain(data, first_word)


def test_first_and_last_rows_of_a_segment() -> None:
    last = (MAX_ROWS - 1) * ROW_WORDS
    for row in (0, 1, 1023, 1024, MAX_ROWS - 1):
        assert segment_checksum(b"\x01", row * ROW_WORDS + 7) == plain(b"\x01", row * ROW_WORDS + 7)
    assert segment_checksum(b"abcd" * ROW_WORDS, last) == plain(b"abcd" * ROW_WORDS, last)
    for data, first_word in ((b"abcd" * ROW_WORDS, last + 1), (b"a", MAX_ROWS * ROW_WORDS), (b"a", -1)):
        with pytest.raises(ValueError, match="segment"):
            segment_checksum(data, first_word)


def test_k1_tells_columns_apart_modulo_2_11() -> None:
    table = k1_table()
    assert np.unique(table % 2**11).size == ROW_WORDS
    assert np.all(table % 2 == 1)
    assert int(table.max()) < 2**32
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 0


def test_k2_is_1_modulo_2_11_and_tells_rows_apart_modulo_2_33() -> None:
    table = k2(np.arange(MAX_ROWS, dtype=np.uint64))
    assert np.all(table % 2**11 == 1)
    assert np.bincount((table % 2**33 >> 11).astype(np.int64)).max() == 1  # sorting them would take seconds


SEGMENT = np.random.default_rng(1).integers(0, 2**32, size=12 * ROW_WORDS, dtype=np.uint32)
SEGMENT_SUM = segment_checksum(SEGMENT)
WORDS = st.integers(0, SEGMENT.size - 1)


@given(WORDS, st.integers(1, 2**32 - 1) | st.sampled_from([1, 1 << 31, (1 << 32) - 1]))
def test_a_changed_word_shows(word: int, change: int) -> None:
    damaged = SEGMENT.copy()
    damaged[word] ^= np.uint32(change)
    assert segment_checksum(damaged) != SEGMENT_SUM


@given(WORDS, WORDS, st.sampled_from([1, 1 << 16, 1 << 31]))
def test_two_swapped_words_show(one: int, other: int, difference: int) -> None:
    segment = SEGMENT.copy()
    segment[other] = segment[one] ^ np.uint32(difference)  # as alike as can be: one bit
    swapped = segment.copy()
    swapped[[one, other]] = swapped[[other, one]]
    assert (segment_checksum(swapped) == segment_checksum(segment)) == (one == other)


def test_swaps_of_a_sign_bit_show_at_any_distance() -> None:
    """The swap random coefficients would miss: words that differ in bit 31, in columns and rows that agree a lot."""
    coefficients = [
        int(k1_table()[column]) * int(two) & M64
        for column in (0, 1, 511, 512, 1023)
        for two in k2(np.array([0, 1, 2**10, 2**21, 2**21 + 1, 2**22 - 1], dtype=np.uint64))
    ]
    for i, one in enumerate(coefficients):
        for other in coefficients[:i]:
            assert (one - other) * 2**31 & M64


def test_swapped_pages_and_zeroed_pages_show() -> None:
    swapped = SEGMENT.reshape(12, ROW_WORDS)[[0, 1, 7, 3, 4, 5, 6, 2, 8, 9, 10, 11]]
    zeroed = SEGMENT.copy()
    zeroed[ROW_WORDS : 2 * ROW_WORDS] = 0
    assert len({SEGMENT_SUM, segment_checksum(swapped), segment_checksum(zeroed), segment_checksum(SEGMENT[1:])}) == 4


@given(st.lists(WORDS, max_size=6))
def test_pieces_add_up_in_any_order(cuts: list[int]) -> None:
    edges = sorted({0, *cuts, SEGMENT.size})
    total = 0
    for start, end in reversed(list(pairwise(edges))):
        total += segment_checksum(SEGMENT[start:end], start)
    assert total % 2**64 == SEGMENT_SUM


def test_long_segments_are_summed_in_pieces() -> None:
    long = np.arange(700 * ROW_WORDS + 5, dtype=np.uint32)
    whole = segment_checksum(long)
    assert whole == sum(segment_checksum(long[at : at + 999], at) for at in range(0, long.size, 999)) % 2**64


def test_what_it_takes() -> None:
    data = bytes(range(250))
    want = segment_checksum(data)
    array = np.frombuffer(data, np.uint8)
    assert segment_checksum(bytearray(data)) == segment_checksum(memoryview(data)) == segment_checksum(array) == want
    assert segment_checksum(np.repeat(array, 2)[::2]) == want
    assert segment_checksum(array.reshape(25, 10)) == want
    assert segment_checksum(data + b"\0\0") == want  # the short last word is padded with zeros
    assert segment_checksum(b"") == segment_checksum(np.empty(0, np.uint8)) == 0


def test_tables_are_kept() -> None:
    assert checksum.k1_table() is k1_table()
