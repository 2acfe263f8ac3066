"""Sizes of a KV cache and a rank's place among the ranks. Nothing here says who holds which bytes: see layout.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Self

from kvxfer.errors import LayoutError

# Bytes of one element. The bytes are moved and never computed on, so the name only fixes the size and the namespace.
ITEMSIZES = MappingProxyType(
    {
        "float32": 4,
        "int32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
)


class Kind(StrEnum):
    """What a layer's cache holds for a token."""

    ATTENTION = "attention"  # a key and a value for each KV head (MHA, GQA, MQA)
    MLA = "mla"  # one latent, the same on every tensor-parallel rank
    SLIDING_WINDOW = "sliding_window"  # as attention, of which only the last `window` tokens are looked at
    OPAQUE = "opaque"  # pages without a structure that is known here, such as the states of state-space layers


def check_positive(owner: object, *names: str) -> None:
    """Raises LayoutError unless each named attribute is an integer of at least 1."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < 1:
            raise LayoutError(f"{name}={value!r} must be an integer of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """One KV-cache group of a whole model, whatever the sharding. Sizes in bytes.

    Raises:
        LayoutError: a field is out of bounds, or has no meaning for this kind.
    """

    num_layers: int
    num_kv_heads: int  # of the model, not of a rank; 1 for MLA and opaque pages
    head_dim: int  # elements; for MLA those of the latent, rotary part included; 1 for opaque pages
    dtype: str  # a key of ITEMSIZES
    tokens_per_block: int
    kind: Kind = Kind.ATTENTION
    window: int | None = None  # sliding window: tokens that a token looks at, itself included
    # MLA: what a layer keeps for a token beside its latent, in a tensor of its own (an indexer's keys); one number for
    # all layers, or one for each. 0: no such tensor.
    extra_bytes: int | tuple[int, ...] = 0
    # Opaque: a layer's page of a block on one rank, which depends on the sharding; one number, or one for each layer.
    page_bytes: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "num_kv_heads", "head_dim", "tokens_per_block")
        if self.dtype not in ITEMSIZES:
            raise LayoutError(f"dtype={self.dtype!r} must be one of {', '.join(ITEMSIZES)}")
        try:
            object.__setattr__(self, "kind", Kind(self.kind))
        except ValueError:
            raise LayoutError(f"kind={self.kind!r} must be one of {', '.join(Kind)}") from None
        if self.kind is Kind.MLA and self.num_kv_heads != 1:
            raise LayoutError(
                f"num_kv_heads={self.num_kv_heads} must be 1 for kind={self.kind}: the latent has no heads"
            )
        if self.kind is Kind.OPAQUE and (self.num_kv_heads, self.head_dim, self.itemsize) != (1, 1, 1):
            raise LayoutError(
                f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim} and dtype={self.dtype} must be 1, 1 and "
                f"of one byte for kind={self.kind}: page_bytes says all (see KVGeometry.opaque)"
            )
        if self.kind is Kind.SLIDING_WINDOW:
            check_positive(self, "window")
        elif self.window is not None:
            raise LayoutError(f"window={self.window} has no meaning for kind={self.kind}")
        for name, kind, least in (("extra_bytes", Kind.MLA, 0), ("page_bytes", Kind.OPAQUE, 1)):
            self._check_layers(name, least if self.kind is kind else 0)
            if self.kind is not kind and getattr(self, name) != 0:
                raise LayoutError(f"{name}={getattr(self, name)} has no meaning for kind={self.kind}")

    def _check_layers(self, name: str, least: int) -> None:
        """Checks a field that is one number or one for each layer, and makes a tuple of a sequence."""
        value = getattr(self, name)
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = tuple(value)
            object.__setattr__(self, name, value)
            if len(value) != self.num_layers:
                raise LayoutError(f"{name} has {len(value)} numbers for num_layers={self.num_layers}")
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) is not int or number < least:
                raise LayoutError(f"{name}={number!r} must be an integer of at least {least}")

    @classmethod
    def opaque(cls, page_bytes: Sequence[int], *, tokens_per_block: int) -> Self:
        """Layers whose pages have no structure here, one number for each: the bytes of its page on one rank.

        `tokens_per_block` is what a block stands for: a state-space layer's page holds the state after so many tokens.
        """
        return cls(
            num_layers=len(page_bytes),
            num_kv_heads=1,
            head_dim=1,
            dtype="uint8",
            tokens_per_block=tokens_per_block,
            kind=Kind.OPAQUE,
            page_bytes=tuple(page_bytes),
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZES[self.dtype]

    @property
    def planes(self) -> int:
        """Vectors that a layer keeps for a head and token: K and V, or the one latent."""
        return 1 if self.kind in (Kind.MLA, Kind.OPAQUE) else 2

    @property
    def head_bytes(self) -> int:
        """One vector: a head's K (or V, or the latent) of one token in one layer."""
        return self.head_dim * self.itemsize

    @property
    def layer_extra_bytes(self) -> tuple[int, ...]:
        """`extra_bytes` of each layer."""
        return self.extra_bytes if isinstance(self.extra_bytes, tuple) else (self.extra_bytes,) * self.num_layers

    @property
    def layer_page_bytes(self) -> tuple[int, ...]:
        """`page_bytes` of each layer."""
        return self.page_bytes if isinstance(self.page_bytes, tuple) else (self.page_bytes,) * self.num_layers

    @property
    def block_bytes(self) -> int:
        """One block of the whole model: all layers, planes, heads and tokens. Of opaque pages, those of one rank."""
        if self.kind is Kind.OPAQUE:
            return sum(self.layer_page_bytes)
        heads = self.num_layers * self.planes * self.num_kv_heads * self.tokens_per_block * self.head_bytes
        return heads + self.tokens_per_block * sum(self.layer_extra_bytes)

    @property
    def tensors(self) -> tuple[KVGeometry, ...]:
        """A geometry of one layer for each tensor that a rank with all layers has, in order.

        That is one a layer, or two where it keeps extra bytes: the latent, and then those bytes as a latent of their
        own. (Whether K and V are two tensors is a question of the page layout.)
        """
        if self.kind is Kind.OPAQUE:
            return tuple(replace(self, num_layers=1, page_bytes=size) for size in self.layer_page_bytes)
        plain = replace(self, num_layers=1, extra_bytes=0)
        return tuple(
            tensor
            for extra in self.layer_extra_bytes
            for tensor in ((plain, replace(plain, head_dim=extra, dtype="uint8")) if extra else (plain,))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A rank's place: tensor, pipeline, decode-context and prefill-context parallelism.

    Decode-context ranks are among the tensor-parallel ones, the other axes multiply.

    Raises:
        LayoutError: a size is below 1, or a rank is not below its size.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0
    pcp_size: int = 1
    pcp_rank: int = 0
    interleave: int = 1  # consecutive tokens that a context-parallel rank keeps before the next one's

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dcp", "pcp"):
            check_positive(self, f"{axis}_size")
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if type(rank) is not int or not 0 <= rank < size:
                raise LayoutError(f"{axis}_rank={rank!r} must be an integer in 0..{size - 1} ({axis}_size={size})")
        check_positive(self, "interleave")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.pp_size * self.pcp_size

    @property
    def rank(self) -> int:
        """This rank's number among all: tensor-parallel ranks are neighbours, then prefill-context, then stages."""
        return (self.pp_rank * self.pcp_size + self.pcp_rank) * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> tuple[ShardSpec, ...]:
        """The places of all ranks of these sizes, by `rank`; decode-context groups are of neighbours, as vLLM's.

        Raises:
            LayoutError: the groups do not divide the tensor-parallel ranks.
        """
        if self.tp_size % self.dcp_size:
            raise LayoutError(f"dcp_size={self.dcp_size} must divide tp_size={self.tp_size}")
        return tuple(
            replace(self, pp_rank=pp, pcp_rank=pcp, tp_rank=tp, dcp_rank=tp % self.dcp_size)
            for pp in range(self.pp_size)
            for pcp in range(self.pcp_size)
            for tp in range(self.tp_size)
        )

    @property
    def topology(self) -> str:
        """The sizes of all axes as text: for the namespace of bytes that depend on them."""
        return f"tp{self.tp_size} pp{self.pp_size} dcp{self.dcp_size} pcp{self.pcp_size} interleave{self.interleave}"


def _attention(layers: int, heads: int, head_dim: int, window: int | None = None) -> KVGeometry:
    """Layers of a preset."""
    return KVGeometry(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype="bfloat16",
        tokens_per_block=16,
        kind=Kind.ATTENTION if window is None else Kind.SLIDING_WINDOW,
        window=window,
    )


MODELS: Mapping[str, tuple[KVGeometry, ...]] = MappingProxyType(
    {
        "llama-3.1-8b": (_attention(32, 8, 128),),
        "llama-3.1-70b": (_attention(80, 8, 128),),
        "qwen3-32b": (_attention(64, 8, 128),),
        "gpt-oss-120b": (_attention(18, 8, 64, window=128), _attention(18, 8, 64)),
        "deepseek-v3": (
            KVGeometry(
                num_layers=61, num_kv_heads=1, head_dim=576, dtype="bfloat16", tokens_per_block=16, kind=Kind.MLA
            ),
        ),
    }
)
"""Known models by name: their KV-cache groups in the order of each group's first layer, bfloat16, blocks of 16 tokens.

Sizes are those of the config.json that each was published with:

    llama-3.1-8b    meta-llama/Llama-3.1-8B   32 layers, 8 KV heads of 4096 / 32 elements; 128 KiB a token
    llama-3.1-70b   meta-llama/Llama-3.1-70B  80 layers, 8 KV heads of 8192 / 64 elements; 320 KiB a token
    qwen3-32b       Qwen/Qwen3-32B            64 layers, 8 KV heads, head_dim 128; 256 KiB a token
    gpt-oss-120b    openai/gpt-oss-120b       36 layers, 8 KV heads, head_dim 64, every other one from the first on with
                                              sliding_window 128; 72 KiB a token, half of it in each group
    deepseek-v3     deepseek-ai/DeepSeek-V3   61 layers, kv_lora_rank 512 + qk_rope_head_dim 64; 68.625 KiB a token
"""

# Those of one group.
PRESETS: Mapping[str, KVGeometry] = MappingProxyType(
    {name: groups[0] for name, groups in MODELS.items() if len(groups) == 1}
)
