from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from kvxfer.errors import LayoutError
from kvxfer.geometry import ITEMSIZES, PRESETS, Kind, KVGeometry, ShardSpec

LLAMA = PRESETS["llama-3.1-8b"]
DEEPSEEK = PRESETS["deepseek-v3"]


def test_sizes_of_a_known_model() -> None:
    assert (LLAMA.itemsize, LLAMA.planes, LLAMA.head_bytes) == (2, 2, 256)
    assert LLAMA.block_bytes == 32 * 2 * 8 * 16 * 256 == 2 << 20


def test_mla_has_one_plane() -> None:
    assert (DEEPSEEK.kind, DEEPSEEK.planes, DEEPSEEK.head_bytes) == (Kind.MLA, 1, 1152)
    assert DEEPSEEK.block_bytes == 61 * 16 * 1152


@pytest.mark.parametrize("dtype", ITEMSIZES)
def test_every_dtype_has_the_size_that_torch_gives_it(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with torch's own sizes")
    assert ITEMSIZES[dtype] == getattr(torch, dtype).itemsize
    assert replace(LLAMA, dtype=dtype).head_bytes == 128 * ITEMSIZES[dtype]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_kv_heads": -1}, "num_kv_heads=-1"),
        ({"head_dim": 1.5}, "head_dim=1.5"),
        ({"tokens_per_block": True}, "tokens_per_block=True"),
        ({"dtype": "float17"}, "dtype='float17' must be one of float32"),
        ({"kind": "mamba"}, "kind='mamba' must be one of attention, mla"),
        ({"kind": Kind.MLA}, "num_kv_heads=8 must be 1"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(LLAMA, **change)


def test_a_kind_may_be_given_by_its_name() -> None:
    kind: Any = "mla"
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, dtype="uint8", tokens_per_block=1, kind=kind)
    assert geometry.kind is Kind.MLA


def test_geometries_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        LLAMA.num_layers = 1  # type: ignore[misc]


@pytest.mark.parametrize("axis", ["tp", "pp", "dcp", "pcp"])
@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1), (2, 1.0), (1, True)])
def test_a_place_outside_its_axis_is_refused(axis: str, size: int, rank: Any) -> None:
    with pytest.raises(LayoutError, match=f"{axis}_"):
        ShardSpec(**{f"{axis}_size": size, f"{axis}_rank": rank})


def test_interleave_is_positive() -> None:
    with pytest.raises(LayoutError, match="interleave=0"):
        ShardSpec(interleave=0)
    assert ShardSpec(tp_size=2, tp_rank=1, interleave=4).tp_rank == 1
