"""What the bench's files hold, made from (seed, file, page, version) and compared byte by byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
_WORDS = PAGE // 8
_STEP_PAGES = 64  # at a time: 256 KiB, which stays in a core's cache
UNKNOWN = np.uint32(0xFFFFFFFF)  # the version of a page whose write failed: nobody knows what it holds

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]


def splitmix(x: U64) -> U64:
    """SplitMix64's output for the states `x`: a bijection that spreads every bit."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Content:
    """Pages of 4096 bytes, each of them another: word w is table[w] ^ stamp(file, page, version).

    A page that went to another place, an older version of it, and words that changed places all show.
    """

    def __init__(self, seed: int) -> None:
        """`seed`: of the run, below 2**64."""
        base = splitmix(np.array([seed], dtype=np.uint64))
        self._table = splitmix(base + np.arange(1, _WORDS + 1, dtype=np.uint64))
        self._key = splitmix(base)

    def stamps(self, file: NDArray[np.int64], page: NDArray[np.int64], version: NDArray[np.uint32]) -> U64:
        """One for each page; pages below 2**40, versions and files below 2**24."""
        of_file = splitmix(self._key + file.astype(np.uint64))
        return splitmix(of_file ^ (page.astype(np.uint64) | version.astype(np.uint64) << np.uint64(40)))

    def fill(self, out: U8, stamps: U64) -> None:
        """Writes len(stamps) pages to `out`, which has just so many bytes."""
        words = out.view(np.uint64).reshape(-1, _WORDS)
        for start in range(0, len(stamps), _STEP_PAGES):
            piece = slice(start, start + _STEP_PAGES)
            np.bitwise_xor(self._table, stamps[piece, None], out=words[piece])

    def wrong_pages(self, got: U8, stamps: U64) -> NDArray[np.int64]:
        """Which of the pages are not what they must be, every byte compared."""
        words = got.view(np.uint64).reshape(-1, _WORDS)
        want = np.empty((_STEP_PAGES, _WORDS), dtype=np.uint64)
        wrong: list[NDArray[np.int64]] = []
        for start in range(0, len(stamps), _STEP_PAGES):
            piece = words[start : start + _STEP_PAGES]
            part = want[: len(piece)]
            np.bitwise_xor(self._table, stamps[start : start + _STEP_PAGES, None], out=part)
            if not np.array_equal(piece, part):
                wrong.append(start + np.flatnonzero((piece != part).any(axis=1)))
        return np.concatenate(wrong) if wrong else np.empty(0, dtype=np.int64)

    def first_wrong(self, got: U8, stamp: U64) -> tuple[int, int]:
        """Of one page that is wrong: the first byte that differs, and how many do."""
        want = np.empty(PAGE, dtype=np.uint8)
        self.fill(want, stamp.reshape(1))
        different = np.flatnonzero(want != got)
        return int(different[0]), len(different)
