"""What the right bytes are, found by slicing tensors. It never reads a run or a mapping, so it shares no bug with them.

    model = Model.random(geometry, num_blocks=12)            every byte of a model's cache, by its coordinates
    tensors = model.pages("hnd", tp_size=4, tp_rank=1)       one rank's tensors, padding and gaps full of POISON
    want = model.payloads([[3, 7], [-1, 2]])                 the canonical bytes of two chunks of two blocks each

A layout is one of LAYOUT_AXES: the order of axes that a page's bytes have. Heads and layers are dealt out here in the
plainest way (np.split, np.repeat), apart from kvxfer.layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.checksum import segment_checksum
from kvxfer.geometry import KVGeometry

POISON = 0xA5
Bytes = NDArray[np.uint8]

# name: axes of a page from the outermost in. Without "p", K and V are two tensors.
LAYOUT_AXES = {"nhd": "pth", "hnd": "pht", "packed": "htp", "packed-nhd": "thp", "split": "th", "split-hnd": "ht"}


@dataclass(frozen=True)
class Model:
    """A whole model's cache: `full[layer, plane, block, token, head, byte]`."""

    geometry: KVGeometry
    full: Bytes

    @classmethod
    def random(cls, geometry: KVGeometry, num_blocks: int, seed: int = 0) -> Model:
        """Random bytes in every place."""
        g = geometry
        shape = (g.num_layers, g.planes, num_blocks, g.tokens_per_block, g.num_kv_heads, g.head_bytes)
        return cls(g, np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8))

    @property
    def num_blocks(self) -> int:
        return self.full.shape[2]

    def shard(self, tp_size: int = 1, tp_rank: int = 0, pp_size: int = 1, pp_rank: int = 0) -> Bytes:
        """The part of `full` that a rank holds."""
        layers = np.split(np.arange(self.geometry.num_layers), pp_size)[pp_rank]
        return self.full[layers][..., _heads(self.geometry, tp_size, tp_rank), :]

    def segments_of(
        self, *, tp_size: int = 1, tp_rank: int = 0, pp_size: int = 1, pp_rank: int = 0, layer_groups: int = 1
    ) -> list[int]:
        """Numbers of the segments that a rank holds."""
        numbers = np.arange(layer_groups * self.geometry.num_kv_heads).reshape(layer_groups, -1)
        numbers = np.split(numbers, pp_size)[pp_rank]
        return sorted(numbers[:, _heads(self.geometry, tp_size, tp_rank)].reshape(-1).tolist())

    def pages(
        self,
        layout: str,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        pp_size: int = 1,
        pp_rank: int = 0,
        padding: int = 0,
        offset: int = 0,
        only: Sequence[int] | None = None,
    ) -> list[Bytes]:
        """A rank's tensors (one dimension of bytes each), as its engine would hold them.

        Args:
            layout: a key of LAYOUT_AXES.
            padding: bytes after each page, and `offset` bytes before the first: POISON, which nobody may touch.
            only: blocks that hold data; the others are POISON. None: all. `[]` gives pages to scatter into.
        """
        data = self.shard(tp_size, tp_rank, pp_size, pp_rank)
        if only is not None:
            data = data.copy()
            data[:, :, np.setdiff1d(np.arange(self.num_blocks), only)] = POISON
        axes = LAYOUT_AXES[layout]
        if "p" in axes:
            order = (1, *({"p": 0, "t": 2, "h": 3}[axis] for axis in axes), 4)
            arrays = [layer.transpose(order) for layer in data]
        else:
            order = (0, *({"t": 1, "h": 2}[axis] for axis in axes), 3)
            arrays = [plane.transpose(order) for layer in data for plane in layer]
        return [_lay_out(array, padding, offset) for array in arrays]

    def payloads(self, block_ids: Sequence[Sequence[int]], *, layer_groups: int = 1, alignment: int = 4096) -> Bytes:
        """The payload area of each chunk's slot [n, bytes], padding included. -1: an absent block, zeros."""
        return np.stack([np.concatenate(segments) for segments in self._segments(block_ids, layer_groups, alignment)])

    def sums(self, block_ids: Sequence[Sequence[int]], *, layer_groups: int = 1) -> NDArray[np.uint64]:
        """The checksum of every segment [n, segments]."""
        chunks = self._segments(block_ids, layer_groups, 1)
        return np.array([[segment_checksum(s) for s in segments] for segments in chunks], dtype=np.uint64)

    def _segments(self, block_ids: Sequence[Sequence[int]], layer_groups: int, alignment: int) -> list[list[Bytes]]:
        chunks = []
        for ids in block_ids:
            blocks = self.full[:, :, np.maximum(ids, 0)].copy()
            blocks[:, :, np.asarray(ids) < 0] = 0
            # [layer, plane, block, token, head, byte] -> one [layer, plane, block, token, byte] for each group and head
            segments = [
                group[..., head, :].reshape(-1)
                for group in np.split(blocks, layer_groups)
                for head in range(self.geometry.num_kv_heads)
            ]
            chunks.append([np.pad(segment, (0, -segment.size % alignment)) for segment in segments])
        return chunks


def _heads(geometry: KVGeometry, tp_size: int, tp_rank: int) -> NDArray[np.int64]:
    heads = np.arange(geometry.num_kv_heads)
    if tp_size > len(heads):
        heads = np.repeat(heads, tp_size // len(heads))
    return np.split(heads, tp_size)[tp_rank]


def _lay_out(array: Bytes, padding: int, offset: int) -> Bytes:
    """`array` [blocks, ...] as a tensor's memory: `offset`, then each block's bytes and `padding`."""
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    memory = np.full(offset + len(rows) * (rows.shape[1] + padding), POISON, dtype=np.uint8)
    memory[offset:].reshape(len(rows), -1)[:, : rows.shape[1]] = rows
    return memory
