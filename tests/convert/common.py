"""Ranks over the oracle's tensors, and the converters under one face."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.convert import native, reference
from kvxfer.convert.pages import KVPages
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.layout import LAYOUTS, kvx1_mapping, local_heads
from tests.oracle import POISON, Model

# Each has gather(pages, block_ids, mapping, out, sums) and scatter(src, block_ids, mapping, pages, sums).
CONVERTERS: dict[str, Any] = {"reference": reference, "native": native}
# The kernels under the same face (tests/convert/on_triton.py), interpreted, and compiled on a GPU. The interpreter
# takes 10 to 30 ms for 4 KiB, so they get few cases, chosen.
ON_TRITON = [pytest.param("triton"), pytest.param("triton-gpu", marks=pytest.mark.gpu)]
EVERY_CONVERTER = [*CONVERTERS, *ON_TRITON]
NUM_BLOCKS = 9
UNTOUCHED_SUM = 0xDEAD


def with_kernels(*few: tuple[Any, ...], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """(converter, ...): `every` case for the host's converters, a few for the kernels."""
    hosts, kernels = ([pytest.param(name) for name in CONVERTERS], every), (ON_TRITON, few)
    params = []
    for converter, case in (pair for converters, cases in (hosts, kernels) for pair in product(converters, cases)):
        (name,) = converter.values
        told = [name, *(str(part) for part in case if isinstance(part, str | int | tuple))]
        params.append(pytest.param(name, *case, id="-".join(told), marks=list(converter.marks)))
    return params


def attention(head_dim: int, dtype: str, tokens: int, *, layers: int = 2, heads: int = 4) -> KVGeometry:
    return KVGeometry(num_layers=layers, num_kv_heads=heads, head_dim=head_dim, dtype=dtype, tokens_per_block=tokens)


def latent(head_dim: int, dtype: str, tokens: int) -> KVGeometry:
    return KVGeometry(
        num_layers=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype, tokens_per_block=tokens, kind=Kind.MLA
    )


def block_ids(blocks_per_chunk: int) -> NDArray[np.int64]:
    """Three chunks of scattered blocks, the first and the last partial where a chunk has several blocks."""
    rows = {
        1: [[5], [0], [8]],
        2: [[-1, 5], [8, 0], [3, -1]],
        4: [[-1, -1, 5, 2], [8, 0, 1, 3], [6, -1, -1, -1]],
    }
    return np.array(rows[blocks_per_chunk], dtype=np.int64)


def rank_pages(
    model: Model,
    layout: str,
    *,
    padding: int = 0,
    offset: int = 0,
    blocks_per_chunk: int = 1,
    layer_groups: int = 1,
    only: Sequence[int] | None = None,
    **place: int,
) -> KVPages:
    """One rank's KVPages over tensors that the oracle laid out; `place` is tp_size, tp_rank, pp_size, pp_rank."""
    shard = ShardSpec(**place)
    page = LAYOUTS[layout](model.geometry, len(local_heads(model.geometry, shard)), padding=padding, offset=offset)
    mapping = kvx1_mapping(model.geometry, shard, page, blocks_per_chunk=blocks_per_chunk, layer_groups=layer_groups)
    tensors = model.pages(layout, padding=padding, offset=offset, only=only, **place)
    return KVPages(mapping, tensors, model.num_blocks)


def buffers(pages: KVPages, chunks: int) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """A canonical buffer and sums in which every untouched place can be told."""
    slot = pages.mapping.slot
    out = np.full((chunks, slot.payload_stride), POISON, dtype=np.uint8)
    return out, np.full((chunks, slot.num_segments), UNTOUCHED_SUM, dtype=np.uint64)


def assert_same(found: NDArray[Any], want: NDArray[Any], what: str = "") -> None:
    """Equal, else the first differing coordinate."""
    assert found.shape == want.shape, f"{what}: shape {found.shape}, want {want.shape}"
    wrong = np.argwhere(found != want)
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(f"{what}: {len(wrong)} differ, first at {at}: {found[at]:#x}, want {want[at]:#x}")
