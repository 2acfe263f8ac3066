"""Which chunks of a job arrived: one bit each, in the order they were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_SHOWN = 8  # missing chunks that repr() names


@dataclass(frozen=True, slots=True, repr=False)
class CompletionBitmap:
    """`n` bits; bit i is set when chunk i arrived. Immutable, hashable, equal by value.

    `a & b` is what arrived on both of two ranks.

    Raises:
        ValueError: `bits` has a bit at or beyond `n`, or is negative.
    """

    n: int
    bits: int = 0  # bit i of this integer: chunk i

    def __post_init__(self) -> None:
        if self.n < 0 or self.bits < 0 or self.bits >> self.n:
            raise ValueError(f"bits={self.bits:#x} is not a set of n={self.n} chunks")

    @classmethod
    def full(cls, n: int) -> CompletionBitmap:
        """Every one of `n` chunks."""
        return cls(n, (1 << n) - 1)

    @classmethod
    def empty(cls, n: int) -> CompletionBitmap:
        """None of `n` chunks."""
        return cls(n)

    @classmethod
    def from_bools(cls, arrived: Iterable[Any]) -> CompletionBitmap:
        """One truth value (numpy's included) for each chunk."""
        flags = np.fromiter((bool(flag) for flag in arrived), dtype=np.bool_)
        return cls(len(flags), int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little"))

    @classmethod
    def from_status(cls, status: Any) -> CompletionBitmap:
        """One status byte for each chunk, as libkvx reports them: 0 is OK, all else did not arrive.

        Args:
            status: bytes, or an array of uint8.

        Raises:
            ValueError: an array of something else.
        """
        codes = status if isinstance(status, np.ndarray) else np.frombuffer(status, dtype=np.uint8)
        if codes.dtype != np.uint8 or codes.ndim != 1:
            raise ValueError(f"status must be one dimension of uint8, not {codes.dtype} {codes.shape}")
        ok = codes == 0
        return cls(len(ok), int.from_bytes(np.packbits(ok, bitorder="little").tobytes(), "little"))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> bool:
        if not -self.n <= index < self.n:
            raise IndexError(f"chunk {index} of {self.n}")
        return bool(self.bits >> (index % self.n) & 1)

    def __iter__(self) -> Iterator[bool]:
        bits = self.bits
        for _ in range(self.n):
            yield bool(bits & 1)
            bits >>= 1

    def __and__(self, other: CompletionBitmap) -> CompletionBitmap:
        if not isinstance(other, CompletionBitmap):
            return NotImplemented
        if other.n != self.n:
            raise ValueError(f"bitmaps of {self.n} and {other.n} chunks cannot be joined: they answer different jobs")
        return CompletionBitmap(self.n, self.bits & other.bits)

    def count(self) -> int:
        """Chunks that arrived."""
        return self.bits.bit_count()

    def leading_run(self) -> int:
        """Chunks before the first that did not arrive: the prefix."""
        lowest_gap = ~self.bits & (self.bits + 1)
        return min(lowest_gap.bit_length() - 1, self.n)

    def missing(self) -> list[int]:
        """Indices of the chunks that did not arrive, ascending."""
        return [index for index, arrived in enumerate(self) if not arrived]

    def all(self) -> bool:
        """Every chunk arrived (also when there was none to wait for)."""
        return self.count() == self.n

    def none(self) -> bool:
        """No chunk arrived."""
        return not self.bits

    def __repr__(self) -> str:
        text = f"CompletionBitmap({self.count()} of {self.n}, prefix {self.leading_run()}"
        if gaps := self.missing():
            shown = ", ".join(map(str, gaps[:_SHOWN]))
            text += f", missing {shown}" + (", ..." if len(gaps) > _SHOWN else "")
        return text + ")"
