"""The demo's truth: a random cache of the whole model, and ranks' pages cut out of it by slicing.

Nothing here sees a mapping or a run. A rank's bytes are found by the declared strides of its pages and by the heads it
holds, so a mapping that is wrong both ways cannot hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvxfer.geometry import KVGeometry
from kvxfer.layout import PageLayout

POISON = 0xA5
Bytes = NDArray[np.uint8]


def random_cache(geometry: KVGeometry, num_blocks: int, seed: int) -> Bytes:
    """A cache of random bytes: uint8 [layers, planes, blocks, tokens, heads, head_bytes]."""
    shape = (
        geometry.num_layers, geometry.planes, num_blocks, geometry.tokens_per_block, geometry.num_kv_heads,
        geometry.head_bytes,
    )  # fmt: skip
    flat = np.random.default_rng(seed).integers(0, 2**64, -(-int(np.prod(shape)) // 8), dtype=np.uint64)
    return flat.view(np.uint8)[: int(np.prod(shape))].reshape(shape)


def rank_heads(geometry: KVGeometry, tp_size: int, tp_rank: int) -> slice:
    """The model's KV heads that a tensor-parallel rank holds."""
    first = tp_rank * geometry.num_kv_heads // tp_size
    return slice(first, first + max(1, geometry.num_kv_heads // tp_size))


@dataclass(slots=True)
class RankPages:
    """One rank's pool of paged blocks, poisoned at the start.

    `tensors` are flat uint8 buffers, one a layer, or K and V a layer where the layout splits them.
    """

    geometry: KVGeometry
    layout: PageLayout
    heads: slice  # of the model
    num_blocks: int  # of the pool
    tensors: list[Bytes] = field(init=False)

    def __post_init__(self) -> None:
        per_layer = self.geometry.planes if self.layout.kv_stride is None else 1
        size = self.layout.offset + self.num_blocks * self.layout.block_stride
        self.tensors = [np.empty(size, np.uint8) for _ in range(self.geometry.num_layers * per_layer)]
        self.poison()

    def poison(self) -> None:
        """Overwrites the whole pool, padding included."""
        for tensor in self.tensors:
            tensor.fill(POISON)

    def plane(self, layer: int, plane: int) -> Bytes:
        """A view of one layer's K or V: uint8 [num_blocks, tokens, heads, head_bytes]."""
        layout, geometry = self.layout, self.geometry
        if layout.kv_stride is None:
            tensor, start = self.tensors[layer * geometry.planes + plane], layout.offset
        else:
            tensor, start = self.tensors[layer], layout.offset + plane * layout.kv_stride
        return as_strided(
            tensor[start:],
            (self.num_blocks, geometry.tokens_per_block, self.heads.stop - self.heads.start, geometry.head_bytes),
            (layout.block_stride, layout.token_stride, layout.head_stride, 1),
        )

    def fill(self, cache: Bytes, block_ids: Sequence[int]) -> None:
        """Puts this rank's part of `cache`'s blocks 0, 1, ... into the blocks `block_ids` of the pool."""
        for layer in range(cache.shape[0]):
            for plane in range(cache.shape[1]):
                self.plane(layer, plane)[list(block_ids)] = cache[layer, plane, :, :, self.heads]

    def compare(self, cache: Bytes, block_ids: Sequence[int], arrived: Sequence[bool]) -> tuple[int, int]:
        """Compares the blocks `block_ids` of the pool with `cache`'s blocks 0, 1, ... as far as they arrived.

        All else in the pool must still be poison.

        Returns:
            Bytes compared with the cache, and wrong bytes anywhere in the pool.
        """
        there = [index for index, flag in enumerate(arrived) if flag]
        pool_ids = [block_ids[index] for index in there]
        checked = wrong = 0
        for layer in range(cache.shape[0]):
            for plane in range(cache.shape[1]):
                got, want = self.plane(layer, plane), cache[layer, plane][there][:, :, self.heads]
                wrong += int(np.count_nonzero(got[pool_ids] != want))
                checked += want.size
        return checked, wrong + self.touched(pool_ids)

    def touched(self, except_blocks: Sequence[int]) -> int:
        """Bytes of the pool that are not poison any more, outside of the pages of these blocks."""
        page, stride, offset = self.layout.page_bytes, self.layout.block_stride, self.layout.offset
        outside = np.ones(self.num_blocks, np.bool_)
        outside[list(except_blocks)] = False
        count = 0
        for tensor in self.tensors:
            blocks = tensor[offset:].reshape(self.num_blocks, stride)
            count += int(np.count_nonzero(tensor[:offset] != POISON))
            count += int(np.count_nonzero(blocks[outside] != POISON))
            count += int(np.count_nonzero(blocks[~outside, page:] != POISON))
        return count
