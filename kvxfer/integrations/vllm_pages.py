"""A rank's KV-cache tensors as vLLM made them, certified: where each head's keys and values of a block are.

vLLM's attention for CPUs has, of a layer, a tensor (blocks, KV heads, tokens, 2 * head_dim), and takes what a head has
of a block as tokens * head_dim elements of keys and then as many of values. (Not as a key and a value for each token,
as the tensor's shape suggests.) Which element of a key is where is the kernel's own business and named by the
namespace; what is moved here is a head's keys of a block, as a whole, and its values.

On CUDA a layer's tensor is (blocks, KV heads, tokens, 2 * head_dim) too, of all backends in BACKENDS: for each token
and head its key and then its value, their elements in order. Whether heads or tokens come first in memory is the
server's choice, and shows in the strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.convert.pages import KVPages
from kvxfer.errors import ConfigError, LayoutError
from kvxfer.geometry import KVGeometry
from kvxfer.integrations import vllm_compat as compat
from kvxfer.integrations.vllm_setup import Setup
from kvxfer.layout import PageLayout, kvx1_mapping, local_heads

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")  # whose pages are certified, of vLLM 0.28 to 0.33, on CUDA
_MARKERS = (7, 5, 48, 20)  # blocks, heads, tokens, elements of a head: no two axes alike


def pages_of(
    setup: Setup, kv_caches: Mapping[str, Any], backends: Mapping[str, Any] | None = None
) -> Callable[[int], KVPages]:
    """This rank's pages, with a mapping for slots of a given alignment.

    Args:
        backends: of each layer, on devices: vLLM's attention backend. None: vLLM's for CPUs.

    Raises:
        LayoutError: a layer's tensor is missing, not where it was expected, or not laid out as certified.
        ConfigError: an attention backend whose pages are not certified.
    """
    if missing := [name for name in setup.layers if name not in kv_caches]:
        raise LayoutError(f"vLLM registered no tensor for layer {missing[0]!r}")
    tensors = [kv_caches[name] for name in setup.layers]
    heads = len(local_heads(setup.geometry, setup.shard))
    if backends is not None:
        for name in setup.layers:
            _check_backend(name, backends.get(name), kv_caches[name].dtype)
    of = _cpu_layout if backends is None else _cuda_layout
    layouts = {of(setup.geometry, heads, setup.num_blocks, name, kv_caches[name]) for name in setup.layers}
    if len(layouts) != 1:
        raise LayoutError(f"the layers' tensors are laid out in {len(layouts)} ways: {layouts}")
    (layout,) = layouts

    def make(alignment: int) -> KVPages:
        mapping = kvx1_mapping(
            setup.geometry, setup.shard, layout, blocks_per_chunk=setup.blocks_per_chunk, alignment=alignment
        )
        pages = KVPages(mapping, tensors, setup.num_blocks)
        _check_place(pages, backends is not None)
        return pages

    return make


def _check_place(pages: KVPages, on_device: bool) -> None:
    """Raises LayoutError unless the pages are where the model runs: only there it is known what waits for what."""
    if (pages.device != "cpu") != on_device:
        raise LayoutError(f"the KV caches are on {pages.device}, which is not where this server's model runs")


def _check_backend(layer: str, backend: Any, dtype: Any) -> None:
    """Raises ConfigError unless a layer's pages mean what is certified."""
    name = str(backend.get_name()) if backend is not None else "none that vLLM names"
    if name not in BACKENDS:
        raise ConfigError(
            f"layer {layer!r} has attention backend {name}, whose pages are not certified for KvxferConnector: give "
            f"--attention-backend {' or '.join(BACKENDS)}, or use KvxferTier"
        )
    blocks, heads, tokens, dim = _MARKERS
    if (shape := compat.logical_page(backend, dtype, blocks, heads, tokens, dim)) != (blocks, heads, tokens, 2 * dim):
        raise ConfigError(
            f"attention backend {name} of this vLLM has pages of shape {shape} for {blocks} blocks of {tokens} tokens, "
            f"{heads} heads of {dim} elements: certified is {(blocks, heads, tokens, 2 * dim)}. Use KvxferTier"
        )


def _cuda_layout(geometry: KVGeometry, heads: int, num_blocks: int, name: str, tensor: Any) -> PageLayout:
    """The declared strides of one layer's tensor: a page is of one piece, its heads or its tokens outermost."""
    tokens, dim, size = geometry.tokens_per_block, geometry.head_dim, geometry.itemsize
    shape, strides, itemsize = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.element_size())
    page = heads * tokens * 2 * dim
    if shape == (num_blocks, heads, tokens, 2 * dim) and itemsize == size and (strides[0] >= page or num_blocks == 1):
        padding = (strides[0] - page) * size if num_blocks > 1 else 0
        for make, due in (
            (PageLayout.packed, (tokens * 2 * dim, 2 * dim, 1)),
            (PageLayout.packed_nhd, (2 * dim, heads * 2 * dim, 1)),
        ):
            if all(shape[axis + 1] == 1 or strides[axis + 1] == due[axis] for axis in range(3)):
                return make(geometry, heads, padding=padding)
    raise LayoutError(
        f"layer {name!r}: a tensor of shape {shape}, strides {strides} and {itemsize} bytes an element is not "
        f"certified; known is shape {(num_blocks, heads, tokens, 2 * dim)} of {size} bytes, each page in one piece, "
        "heads or tokens outermost. Blocks may be split for a kernel (give --block-size what it takes), or heads lie "
        "outside of blocks or layers (give VLLM_KV_CACHE_LAYOUT=NHD)"
    )


def _cpu_layout(geometry: KVGeometry, heads: int, num_blocks: int, name: str, tensor: Any) -> PageLayout:
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
