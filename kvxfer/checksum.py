"""The segment checksum in numpy: the definition of docs/format.md, written down plainly. csrc has the fast one."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW_WORDS = 1024  # words of a row: one coefficient K1 for each
ROW_BYTES = 4 * ROW_WORDS
MAX_ROWS = 1 << 22  # 16 GiB; beyond it row coefficients would repeat
_PIECE_ROWS = 256  # rows summed at a time: bounds the memory a call takes


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output for the state `x`."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _permute(x: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """A bijection of the numbers below 2**bits: odd multipliers and right shifts, both invertible."""
    mask, shift = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    for multiplier in (0x9E3779B1, 0x85EBCA6B):
        x = x * np.uint64(multiplier) & mask
        x = x ^ (x >> shift)
    return x


@cache
def k1_table() -> NDArray[np.uint64]:
    """The coefficients of the 1024 columns (32 bits each). Read-only."""
    column = np.arange(ROW_WORDS, dtype=np.uint64)
    high = _splitmix(column) & np.uint64(0xFFFFF800)
    table = high | (np.uint64(2) * _permute(column, 10) + np.uint64(1))
    table.flags.writeable = False
    return table


def k2(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The coefficients of the rows with these numbers, each below 2**22."""
    high = _splitmix(rows + np.uint64(ROW_WORDS)) & np.uint64(2**64 - 2**33)
    return high | (_permute(rows, 22) << np.uint64(11)) | np.uint64(1)


def segment_checksum(data: Any, first_word: int = 0) -> int:
    """The checksum of `data` as the part of a segment that begins at 32-bit word `first_word`.

    Parts that end on a whole word may be summed apart, in any order, and added modulo 2**64.

    Args:
        data: bytes, or anything with the buffer protocol; an array counts as its bytes in C order.
        first_word: index of the first word within the segment.

    Raises:
        ValueError: the part does not lie in the 2**32 words of a segment.
    """
    array = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    octets = array.reshape(-1).view(np.uint8)
    if first_word < 0 or 4 * first_word + octets.size > MAX_ROWS * ROW_BYTES:
        raise ValueError(f"{octets.size} bytes from word {first_word} do not fit a segment of {MAX_ROWS} rows")
    total = 0
    # The piece that starts inside a row ends with it, so that all others hold whole rows.
    row, column = divmod(first_word, ROW_WORDS)
    start = 0
    while start < octets.size:
        room = ROW_BYTES - 4 * column if column else _PIECE_ROWS * ROW_BYTES
        piece = octets[start : start + room]
        total += _sum_rows(piece, row, column)
        start, row, column = start + piece.size, row + (1 if column else _PIECE_ROWS), 0
    return total % 2**64


def _sum_rows(piece: NDArray[np.uint8], row: int, column: int) -> int:
    """The sum of bytes that begin at `column` of `row`; missing words of the first and last row count as zero."""
    rows = -(-(4 * column + piece.size) // ROW_BYTES)
    padded = np.zeros(rows * ROW_BYTES, dtype=np.uint8)
    padded[4 * column : 4 * column + piece.size] = piece
    words = padded.view("<u4").reshape(rows, ROW_WORDS).astype(np.uint64)
    per_row = (words * k1_table()).sum(axis=1, dtype=np.uint64)
    return int((per_row * k2(np.arange(row, row + rows, dtype=np.uint64))).sum(dtype=np.uint64))
