"""What vLLM's canonical rows must hold, found by slicing tensors. It never reads a run.

A page's order is a name of ORDERS: its axes from the outermost in, of p (K, V), t (token) and h (head). The canonical
page of a block has the same axes, with all heads of the model and the tokens of all context-parallel ranks; a rank's
own page is the part of it that np.take leaves when heads and tokens are dealt out as below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry import KVGeometry
from tests.oracle import POISON

Bytes = NDArray[np.uint8]

ORDERS = {"packed-nhd": "thp", "packed": "htp", "nhd": "pth", "hnd": "pht"}
_AXES = "pthb"  # of a canonical block in memory here


@dataclass(frozen=True)
class Place:
    """A rank among tensor, decode-context and prefill-context parallel ones."""

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    rank: int = 0

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def cp(self) -> int:
        return self.dcp * self.pcp

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp * self.dcp + self.tp_rank % self.dcp


def heads_of(place: Place, heads: int) -> list[int]:
    """The model's heads, each dealt out as often as it has ranks."""
    dealt = np.repeat(np.arange(heads), max(1, place.tp // heads))
    return list(np.array_split(dealt, place.tp)[place.tp_rank])


def tokens_of(place: Place, tokens: int) -> list[int]:
    """Of a canonical page's tokens (all ranks' together) those that a rank keeps: turns of `interleave` go round."""
    everyone = np.arange(tokens * place.cp).reshape(-1, place.cp, place.interleave)
    return list(everyone[:, place.cp_rank].reshape(-1))


@dataclass(frozen=True)
class Layer:
    """One layer of a model: `full[block, plane, token, head, byte]`, tokens as a single rank would have them."""

    geometry: KVGeometry
    order: str
    full: Bytes

    @classmethod
    def random(cls, geometry: KVGeometry, order: str, num_blocks: int, cp: int = 1, seed: int = 0) -> Layer:
        g = geometry
        shape = (num_blocks, g.planes, g.tokens_per_block * cp, g.num_kv_heads, g.head_bytes)
        return cls(g, order, np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8))

    def canonical(self, block: int) -> Bytes:
        """The canonical page."""
        return self._in_order(self.full[block])

    def page(self, place: Place, block: int) -> Bytes:
        """A rank's page, without padding."""
        mine = self.full[block].take(tokens_of(place, self.geometry.tokens_per_block), axis=1)
        return self._in_order(mine.take(heads_of(place, self.geometry.num_kv_heads), axis=2))

    def tensor(self, place: Place, *, padding: int = 0, offset: int = 0, only: Sequence[int] | None = None) -> Bytes:
        """A rank's tensor in one dimension, all that is no block's (or not one of `only`) POISON."""
        pages = [self.page(place, block) for block in range(len(self.full))]
        size = pages[0].size
        memory = np.full(offset + len(pages) * (size + padding), POISON, dtype=np.uint8)
        for block, page in enumerate(pages):
            if only is None or block in only:
                start = offset + block * (size + padding)
                memory[start : start + size] = page
        return memory

    def _in_order(self, part: Bytes) -> Bytes:
        axes = ORDERS.get(self.order, "pth")  # MLA: one plane and one head
        return np.ascontiguousarray(part.transpose([_AXES.index(axis) for axis in (*axes, "b")])).reshape(-1)
