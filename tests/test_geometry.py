from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest

from kvxfer.errors import LayoutError
from kvxfer.geometry import ITEMSIZES, MODELS, PRESETS, Kind, KVGeometry, ShardSpec

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
        ({"kind": "mamba"}, "kind='mamba' must be one of attention, mla, sliding_window, opaque"),
        ({"kind": Kind.MLA}, "num_kv_heads=8 must be 1"),
        ({"kind": Kind.SLIDING_WINDOW}, "window=None must be an integer of at least 1"),
        ({"kind": Kind.SLIDING_WINDOW, "window": 0}, "window=0"),
        ({"window": 128}, "window=128 has no meaning for kind=attention"),
        ({"extra_bytes": 4}, "extra_bytes=4 has no meaning for kind=attention"),
        ({"page_bytes": 4}, "page_bytes=4 has no meaning for kind=attention"),
        ({"extra_bytes": -1}, "extra_bytes=-1 must be an integer of at least 0"),
        ({"extra_bytes": True}, "extra_bytes=True"),
        ({"page_bytes": "12"}, "page_bytes='12'"),
        ({"kind": Kind.OPAQUE, "page_bytes": 4}, "num_kv_heads=8, head_dim=128 and dtype=bfloat16 must be 1, 1"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(LLAMA, **change)


def test_a_kind_may_be_given_by_its_name() -> None:
    kind: Any = "mla"
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, dtype="uint8", tokens_per_block=1, kind=kind)
    assert geometry.kind is Kind.MLA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra_bytes": (132,) * 60}, "extra_bytes has 60 numbers for num_layers=61"),
        ({"extra_bytes": (*(132,) * 60, -1)}, "extra_bytes=-1"),
        ({"extra_bytes": (*(132,) * 60, 1.0)}, "extra_bytes=1.0"),
        ({"page_bytes": (1,) * 61}, "has no meaning for kind=mla"),
        ({"window": 4}, "window=4 has no meaning"),
    ],
)
def test_a_latent_that_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(DEEPSEEK, **change)


def test_extra_bytes_count_for_every_token() -> None:
    for extra in (132, (132,) * 61, [132] * 61):
        geometry = replace(DEEPSEEK, extra_bytes=extra)
        assert geometry.layer_extra_bytes == (132,) * 61
        assert geometry.block_bytes == 61 * 16 * (1152 + 132)
        assert len(geometry.tensors) == 122
    uneven = replace(DEEPSEEK, num_layers=3, extra_bytes=[0, 7, 0])
    assert uneven.extra_bytes == (0, 7, 0)
    assert uneven.block_bytes == 16 * (3 * 1152 + 7)
    assert [(one.num_layers, one.head_bytes, one.kind) for one in uneven.tensors] == [
        (1, 1152, Kind.MLA),
        (1, 1152, Kind.MLA),
        (1, 7, Kind.MLA),
        (1, 1152, Kind.MLA),
    ]


def test_opaque_pages_have_bytes_and_no_structure() -> None:
    geometry = KVGeometry.opaque([4096, 100], tokens_per_block=512)
    assert (geometry.kind, geometry.num_layers, geometry.planes, geometry.tokens_per_block) == (Kind.OPAQUE, 2, 1, 512)
    assert geometry.layer_page_bytes == (4096, 100)
    assert geometry.block_bytes == 4196
    assert [one.block_bytes for one in geometry.tensors] == [4096, 100]
    assert KVGeometry.opaque((1,), tokens_per_block=1).block_bytes == 1
    for sizes, message in (((), "num_layers=0"), ((0,), "page_bytes=0"), ((5, -1), "page_bytes=-1")):
        with pytest.raises(LayoutError, match=message):
            KVGeometry.opaque(sizes, tokens_per_block=1)


def test_a_window_changes_no_size() -> None:
    sliding = replace(LLAMA, kind=Kind.SLIDING_WINDOW, window=128)
    assert (sliding.planes, sliding.block_bytes) == (LLAMA.planes, LLAMA.block_bytes)
    assert [one.window for one in sliding.tensors] == [128] * 32


@pytest.mark.parametrize(
    ("name", "kib_a_token"),
    [
        ("llama-3.1-8b", 128),
        ("llama-3.1-70b", 320),
        ("qwen3-32b", 256),
        ("gpt-oss-120b", 72),
        ("deepseek-v3", 68.625),
    ],
)
def test_models_take_what_their_configuration_says(name: str, kib_a_token: float) -> None:
    assert sum(group.block_bytes / group.tokens_per_block for group in MODELS[name]) == kib_a_token * 1024
    assert {group.dtype for group in MODELS[name]} == {"bfloat16"}


def test_presets_are_the_models_of_one_group() -> None:
    assert MODELS.keys() - PRESETS.keys() == {"gpt-oss-120b"}
    assert all(MODELS[name] == (geometry,) for name, geometry in PRESETS.items())
    assert [(group.kind, group.window) for group in MODELS["gpt-oss-120b"]] == [
        (Kind.SLIDING_WINDOW, 128),
        (Kind.ATTENTION, None),
    ]


def test_geometries_survive_json() -> None:
    """As the fields that a namespace names."""
    for geometry in (
        *MODELS["gpt-oss-120b"],
        replace(DEEPSEEK, num_layers=2, extra_bytes=(0, 132)),
        KVGeometry.opaque((5, 7), tokens_per_block=3),
    ):
        assert KVGeometry(**json.loads(json.dumps(asdict(geometry)))) == geometry


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


def test_ranks_are_numbered_as_vllm_numbers_them() -> None:
    sizes = ShardSpec(tp_size=4, pp_size=2, pcp_size=2, dcp_size=2, interleave=3)
    ranks = sizes.ranks
    assert [shard.rank for shard in ranks] == list(range(sizes.world_size)) == list(range(16))
    assert [shard.dcp_rank for shard in ranks] == [0, 1] * 8
    assert (ranks[13].tp_rank, ranks[13].pcp_rank, ranks[13].pp_rank, ranks[13].interleave) == (1, 1, 1, 3)
    assert {shard.topology for shard in ranks} == {"tp4 pp2 dcp2 pcp2 interleave3"}
    with pytest.raises(LayoutError, match="dcp_size=3 must divide tp_size=4"):
        _ = ShardSpec(tp_size=4, dcp_size=3).ranks


@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "pcp_size", "dcp_size", "interleave"])
def test_every_axis_shows_in_the_topology(axis: str) -> None:
    assert ShardSpec(**{axis: 2}).topology != ShardSpec().topology
