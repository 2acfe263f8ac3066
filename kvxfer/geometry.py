"""Sizes of a KV cache and a rank's place among the ranks. Nothing here says who holds which bytes: see layout.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

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
        LayoutError: a field is out of bounds.
    """

    num_layers: int
    num_kv_heads: int  # of the model, not of a rank; 1 for MLA
    head_dim: int  # elements; for MLA those of the latent, rotary part included
    dtype: str  # a key of ITEMSIZES
    tokens_per_block: int
    kind: Kind = Kind.ATTENTION

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

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZES[self.dtype]

    @property
    def planes(self) -> int:
        """Vectors that a layer keeps for a head and token: K and V, or the one latent."""
        return 1 if self.kind is Kind.MLA else 2

    @property
    def head_bytes(self) -> int:
        """One vector: a head's K (or V, or the latent) of one token in one layer."""
        return self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """One block of the whole model: all layers, planes, heads and tokens."""
        return self.num_layers * self.planes * self.num_kv_heads * self.tokens_per_block * self.head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A rank's place: tensor, pipeline, decode-context and prefill-context parallelism.

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


PRESETS = MappingProxyType(
    {
        "llama-3.1-8b": KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=16),
        "deepseek-v3": KVGeometry(
            num_layers=61, num_kv_heads=1, head_dim=576, dtype="bfloat16", tokens_per_block=16, kind=Kind.MLA
        ),
    }
)
