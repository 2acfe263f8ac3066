"""A rank's KV-cache tensors as vLLM made them, certified: where each head's keys and values of a block are.

vLLM's attention for CPUs has, of a layer, a tensor (blocks, KV heads, tokens, 2 * head_dim), and takes what a head has
of a block as tokens * head_dim elements of keys and then as many of values. (Not as a key and a value for each token,
as the tensor's shape suggests.) Which element of a key is where is the kernel's own business and named by the
namespace; what is moved here is a head's keys of a block, as a whole, and its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.convert.pages import KVPages
from kvxfer.errors import LayoutError
from kvxfer.geometry import KVGeometry
from kvxfer.integrations.vllm_setup import Setup
from kvxfer.layout import PageLayout, kvx1_mapping, local_heads


def pages_of(setup: Setup, kv_caches: Mapping[str, Any]) -> Callable[[int], KVPages]:
    """This rank's pages, with a mapping for slots of a given alignment.

    Raises:
        LayoutError: a layer's tensor is missing, not in host memory, or not laid out as certified.
    """
    if missing := [name for name in setup.layers if name not in kv_caches]:
        raise LayoutError(f"vLLM registered no tensor for layer {missing[0]!r}")
    tensors = [kv_caches[name] for name in setup.layers]
    heads = len(local_heads(setup.geometry, setup.shard))
    layouts = {_layout(setup.geometry, heads, setup.num_blocks, name, kv_caches[name]) for name in setup.layers}
    if len(layouts) != 1:
        raise LayoutError(f"the layers' tensors are laid out in {len(layouts)} ways: {layouts}")
    (layout,) = layouts

    def make(alignment: int) -> KVPages:
        mapping = kvx1_mapping(
            setup.geometry, setup.shard, layout, blocks_per_chunk=setup.blocks_per_chunk, alignment=alignment
        )
        return KVPages(mapping, tensors, setup.num_blocks)

    return make


def _layout(geometry: KVGeometry, heads: int, num_blocks: int, name: str, tensor: Any) -> PageLayout:
    """The declared strides of one layer's tensor, which must say the same."""
    tokens, dim, size = geometry.tokens_per_block, geometry.head_dim, geometry.itemsize
    shape, strides, itemsize = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.element_size())
    head = 2 * tokens * dim  # elements that a head has of a block: those of one piece
    want = (num_blocks, heads, tokens, 2 * dim)
    due = (strides[0], head, 2 * dim, 1)
    dense = len(shape) == 4 and all(shape[axis] == 1 or strides[axis] == due[axis] for axis in range(4))
    if shape != want or itemsize != size or not dense:
        raise LayoutError(
            f"layer {name!r}: a tensor of shape {shape}, strides {strides} and {itemsize} bytes an element is not "
            f"certified; known is shape {want} with strides (any, {head}, {2 * dim}, 1) and {size} bytes"
        )
    return PageLayout(
        name="vllm-cpu",
        block_stride=strides[0] * size,
        kv_stride=tokens * dim * size,
        head_stride=head * size,
        token_stride=dim * size,
        dim_stride=size,
        page_bytes=heads * head * size,
    )
