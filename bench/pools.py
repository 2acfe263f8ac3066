"""Memory that is there before the clock starts, and the truth: random pages whose canonical bytes are found by slicing.

Nothing here sees a mapping or a run.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvxfer.checksum import segment_checksum
from kvxfer.geometry import KVGeometry

__all__ = ["POISON", "Bytes", "Cache", "RankPool", "allocate", "difference"]

POISON = 0xA5
SPARE_BLOCKS = 3  # of every pool, so that block ids are not just all of it
Bytes = NDArray[np.uint8]


def allocate(nbytes: int) -> Bytes:
    """Touched anonymous memory, page-aligned, in huge pages where the system gives them: what a pool of many GB has."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array.fill(POISON)
    return array


def random_bytes(nbytes: int, seed: int) -> Bytes:
    """`nbytes` (a multiple of 8) of random bytes, as `allocate` gives them."""
    array = allocate(nbytes)
    array.view(np.uint64)[:] = np.random.default_rng(seed).integers(0, 2**64, nbytes // 8, np.uint64)
    return array


def difference(got: Bytes, want: Bytes) -> str | None:
    """None where the bytes are equal, else how many are not."""
    if np.array_equal(got, want):
        return None
    return f"{int(np.count_nonzero(got != want))} of {want.size} bytes differ"


@dataclass(frozen=True, slots=True)
class Cache:
    """Random blocks of the heads [first_head, ...) of a model: uint8 [layers, blocks, planes, tokens, heads, bytes]."""

    geometry: KVGeometry
    heads: range  # of the model
    full: Bytes

    @classmethod
    def random(cls, geometry: KVGeometry, heads: range, num_blocks: int) -> Cache:
        """Other bytes in every place."""
        g = geometry
        shape = (g.num_layers, num_blocks, g.planes, g.tokens_per_block, len(heads), g.head_bytes)
        return cls(geometry, heads, random_bytes(int(np.prod(shape)), seed=len(heads)).reshape(shape))

    @property
    def num_blocks(self) -> int:
        """Blocks that it has."""
        return int(self.full.shape[1])

    def segments(self) -> Bytes:
        """The canonical bytes, a block a chunk: uint8 [blocks, heads, segment bytes]."""
        ordered = self.full.transpose(1, 4, 0, 2, 3, 5)
        out = allocate(self.full.nbytes).reshape(ordered.shape)
        out[...] = ordered
        return out.reshape(*ordered.shape[:2], -1)


def sums_of(segments: Bytes) -> NDArray[np.uint64]:
    """The checksum of every segment [blocks, heads], by numpy."""
    rows = segments.reshape(-1, segments.shape[-1])
    return np.array([segment_checksum(row) for row in rows], np.uint64).reshape(segments.shape[:2])


@dataclass(slots=True)
class RankPool:
    """One rank's paged blocks, all layers in one piece of memory; blocks 0, 1, ... of a cache are at `ids`."""

    cache: Cache
    heads: range  # of the model; within the cache's
    layout: str  # nhd | hnd
    ids: NDArray[np.int64]
    num_blocks: int
    tensors: list[Bytes] = field(init=False)  # one a layer, flat
    pages: Bytes = field(init=False)  # a view: [layers, num_blocks, planes, tokens, heads, bytes]

    def __post_init__(self) -> None:
        g, heads = self.cache.geometry, len(self.heads)
        inner = (g.tokens_per_block, heads) if self.layout == "nhd" else (heads, g.tokens_per_block)
        shape = (g.num_layers, self.num_blocks, g.planes, *inner, g.head_bytes)
        memory = allocate(int(np.prod(shape)))
        self.tensors = list(memory.reshape(g.num_layers, -1))
        pages = memory.reshape(shape)
        self.pages = pages if self.layout == "nhd" else pages.swapaxes(3, 4)
        self.fill()

    @property
    def share(self) -> Bytes:
        """This rank's part of the cache."""
        first = self.heads.start - self.cache.heads.start
        return self.cache.full[..., first : first + len(self.heads), :]

    def fill(self) -> None:
        """Puts the cache's blocks in their places."""
        self.pages[:, self.ids] = self.share

    def poison(self) -> None:
        """Overwrites all of it."""
        for tensor in self.tensors:
            tensor.fill(POISON)

    def check(self) -> str | None:
        """Compares the blocks at `ids` with the cache, and everything else with poison."""
        for layer, want in zip(self.pages, self.share, strict=True):
            if why := difference(layer[self.ids], want):
                return why
        others = np.setdiff1d(np.arange(self.num_blocks), self.ids)
        return "a block was touched that was not asked for" if (self.pages[:, others] != POISON).any() else None


def shuffled(num_blocks: int, seed: int) -> NDArray[np.int64]:
    """Places for `num_blocks` blocks in a pool of SPARE_BLOCKS more."""
    return np.random.default_rng(seed).permutation(num_blocks + SPARE_BLOCKS)[:num_blocks].astype(np.int64)
