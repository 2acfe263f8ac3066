"""Geometries read from config.json files: known models', what transformers makes of the same fields, and refusals."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import LayoutError
from kvxfer.geometry import MODELS, Kind, KVGeometry
from kvxfer.hf_config import geometries_from_hf_config

# What the models' own files say, of the fields that matter.
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_32B = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_window_layers": 64,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
GPT_OSS_120B = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
MISTRAL_7B = {
    "hidden_size": 4096,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}


def shape(geometry: KVGeometry) -> tuple[Any, ...]:
    return (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.kind.value, geometry.window)


def read(config: dict[str, Any], **changed: Any) -> list[tuple[Any, ...]]:
    config = {name: value for name, value in (config | changed).items() if value is not ...}
    return [shape(g) for g in geometries_from_hf_config(config, tokens_per_block=16, dtype="bfloat16")]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama-3.1-70b", LLAMA_70B),
        ("qwen3-32b", QWEN3_32B),
        ("gpt-oss-120b", GPT_OSS_120B),
        ("deepseek-v3", DEEPSEEK_V3),
    ],
)
def test_the_models_known_by_name(name: str, config: dict[str, Any]) -> None:
    assert geometries_from_hf_config(config, tokens_per_block=16) == MODELS[name]


def test_windows_of_families_without_layer_types() -> None:
    assert read(MISTRAL_7B) == [(32, 8, 128, "sliding_window", 4096)]
    assert read(MISTRAL_7B, sliding_window=None) == [(32, 8, 128, "attention", None)]
    assert read(GEMMA3_27B) == [(52, 16, 128, "sliding_window", 1024), (10, 16, 128, "attention", None)]
    gemma2 = {**MISTRAL_7B, "model_type": "gemma2", "num_hidden_layers": 5}
    assert read(gemma2) == [(3, 8, 128, "sliding_window", 4096), (2, 8, 128, "attention", None)]
    assert read(gemma2, sliding_window_pattern=5) == [
        (4, 8, 128, "sliding_window", 4096),
        (1, 8, 128, "attention", None),
    ]
    qwen = {**QWEN3_32B, "sliding_window": 4096}
    assert read(qwen) == [(64, 8, 128, "attention", None)]
    assert read(qwen, use_sliding_window=True, max_window_layers=60) == [
        (60, 8, 128, "attention", None),
        (4, 8, 128, "sliding_window", 4096),
    ]
    assert read(qwen, use_sliding_window=True) == [(64, 8, 128, "attention", None)]


def test_layer_types_go_before_a_pattern() -> None:
    types = ["full_attention"] * 3 + ["sliding_attention"]
    assert read({**GPT_OSS_120B, "layer_types": types, "num_hidden_layers": 4}) == [
        (3, 8, 64, "attention", None),
        (1, 8, 64, "sliding_window", 128),
    ]
    # A window that no layer has.
    assert read(GPT_OSS_120B, layer_types=["full_attention"] * 36) == [(36, 8, 64, "attention", None)]


def test_layers_that_use_anothers_cache_have_none() -> None:
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 6
    assert read(
        {**MISTRAL_7B, "num_hidden_layers": 30, "layer_types": types, "sliding_window": 512}, num_kv_shared_layers=10
    ) == [(16, 8, 128, "sliding_window", 512), (4, 8, 128, "attention", None)]


def test_heads_of_older_families() -> None:
    falcon = {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
    }
    assert read(falcon) == read(falcon, multi_query=True) == [(32, 1, 64, "attention", None)]
    assert read(falcon, multi_query=False, num_kv_heads=71) == [(32, 71, 64, "attention", None)]
    assert read(falcon, new_decoder_architecture=True, multi_query=True, num_attention_heads=128, num_kv_heads=8,
                hidden_size=8192) == [(32, 8, 64, "attention", None)]  # fmt: skip
    assert read({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 6}) == [(6, 12, 64, "attention", None)]
    bigcode = {"model_type": "gpt_bigcode", "n_embd": 768, "n_head": 12, "n_layer": 6}
    assert read(bigcode) == read(bigcode, multi_query=True) == [(6, 1, 64, "attention", None)]
    assert read(LLAMA_70B, num_key_value_heads=1) == [(80, 1, 128, "attention", None)]
    assert read(bigcode, multi_query=False) == [(6, 12, 64, "attention", None)]


def test_an_indexers_keys_lie_beside_the_latent() -> None:
    config = {
        **DEEPSEEK_V3,
        "model_type": "deepseek_v32",
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
    }
    (geometry,) = geometries_from_hf_config(config, tokens_per_block=64)
    assert geometry == replace(MODELS["deepseek-v3"][0], tokens_per_block=64, extra_bytes=132)
    (other,) = geometries_from_hf_config(config, tokens_per_block=64, indexer_bytes=256)
    assert other.extra_bytes == 256
    assert read({**config, "indexer_types": ["full"] * 61}) == [(61, 1, 576, "mla", None)]
    with pytest.raises(LayoutError, match="a latent with a sliding window"):
        read({**config, "layer_types": ["indexed_attention"] * 60 + ["sliding_attention"], "sliding_window": 128})
    with pytest.raises(LayoutError, match="indexer_types: some layers share another's"):
        read({**config, "indexer_types": ["full", "shared"]})


def test_the_dtype_is_the_files_unless_it_is_said() -> None:
    def dtype(config: dict[str, Any], given: str | None = None) -> str:
        return geometries_from_hf_config(config, tokens_per_block=16, dtype=given)[0].dtype

    assert dtype(LLAMA_70B) == "bfloat16"
    assert dtype({**LLAMA_70B, "torch_dtype": None, "dtype": "torch.float16"}) == "float16"
    assert dtype(LLAMA_70B, "float8_e4m3fn") == "float8_e4m3fn"
    assert dtype(GEMMA3_27B) == "bfloat16"  # of the outer part
    with pytest.raises(LayoutError, match="names no dtype"):
        dtype({**LLAMA_70B, "torch_dtype": None})
    with pytest.raises(LayoutError, match="dtype='int4' must be one of"):
        dtype(LLAMA_70B, "int4")


def test_a_file_or_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for broken in (b"", b"{", b"\xff\xfe", b"[]"):
        path.write_bytes(broken)
        with pytest.raises(LayoutError, match="config.json"):
            geometries_from_hf_config(path, tokens_per_block=16)
    path.write_text(json.dumps(LLAMA_70B))
    for source in (path, tmp_path, str(tmp_path)):
        assert geometries_from_hf_config(source, tokens_per_block=16) == MODELS["llama-3.1-70b"]
    with pytest.raises(LayoutError, match=r"cannot read a model's config.json: .*absent"):
        geometries_from_hf_config(tmp_path / "absent.json", tokens_per_block=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # No number where one must be.
        ({"num_hidden_layers": ...}, "none of num_hidden_layers, n_layer, n_layers .*'llama'"),
        ({"num_attention_heads": ...}, "none of num_attention_heads"),
        ({"hidden_size": ...}, "none of hidden_size"),
        ({"num_key_value_heads": [8] * 80}, r"num_key_value_heads=\[8, .* must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": 8190}, "64 attention heads do not divide the width 8190"),
        ({"head_dim": 12.5}, "head_dim=12.5"),
        # Another structure than one kind of attention layers.
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"add_cross_attention": True}, "encoder-decoder"),
        ({"v_head_dim": 64}, "keys of 128 and values of v_head_dim=64"),
        ({"layer_types": ["full_attention"] * 79}, "layer_types names 79 layers of 80"),
        ({"layer_types": ["full_attention"] * 79 + ["linear_attention"]}, "a layer of 'linear_attention'.*opaque"),
        ({"layer_types": ["chunked_attention"] * 80}, "a layer of 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 80}, "none of sliding_window"),
        ({"sliding_window": 4096}, "sliding_window=4096 without layer_types: which layers of a 'llama'"),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": "8"}, "max_window_layers='8'"),
        ({"num_kv_shared_layers": 80}, "num_kv_shared_layers=80 leaves none of 80 layers"),
        ({"model_type": "gemma3n_text", "head_dim": 128}, "has no num_kv_shared_layers"),
        ({"multi_query": True}, "known of other families"),
        ({"num_kv_heads": 4}, "known of other families"),
        ({"index_topk": 2048}, "index_topk=2048 without kv_lora_rank"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512 in a config of model_type='llama'"),
        ({"model_type": "deepseek_v3"}, "none of kv_lora_rank"),
        # Fields of other architectures: each is refused by its name.
        ({"mamba_d_state": 128}, "mamba_d_state=128 .*'llama'.* build the KVGeometry by hand"),
        ({"ssm_state_size": 128}, "ssm_state_size"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"cross_attention_layers": [3, 8]}, "cross_attention_layers"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads"),
        ({"layers_block_type": ["mamba"]}, "layers_block_type"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"block_configs": [{}]}, "block_configs"),
        ({"swa_head_dim": 64}, "swa_head_dim"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"num_global_key_value_heads": 4}, "num_global_key_value_heads"),
        ({"per_layer_config": {"05": {}}}, "per_layer_config"),
        ({"compress_ratios": [4]}, "compress_ratios"),
        ({"conv_kernel": 4}, "conv_kernel"),
        ({"attn_config": {"kv_n_heads": 8}}, r"attn_config=\{'kv_n_heads': 8\}"),
        ({"keep_window_size": 2048}, "keep_window_size"),
        ({"index_topk_freq": 4}, "index_topk_freq"),
        ({"use_cla": True}, "use_cla"),
        ({"attention_layers": ["global", "local"]}, "attention_layers"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        read(LLAMA_70B, **change)


def test_empty_and_foreign_fields_do_not_matter() -> None:
    same = read(LLAMA_70B)
    assert read(LLAMA_70B, mamba_d_state=None, cross_attention_layers=[], attention_chunk_size=0) == same
    assert (
        read(
            LLAMA_70B,
            vision_feature_layer=-2,
            moe_layer_freq=1,
            attn_pdrop=0.1,
            expert_kv_bias=True,
            attn_implementation="eager",
        )
        == same
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": ...}, "text_config of model_type='gemma3_text' has no num_key_value_heads or kv_lora"),
        ({"head_dim": ...}, "has no head_dim: it leaves out what equals its family's defaults"),
        ({"sliding_window": ...}, "has no sliding_window or layer_types"),
        ({"model_type": "mistral", "head_dim": ...}, "has no head_dim"),
        ({"num_attention_heads": ...}, "none of num_attention_heads"),
    ],
)
def test_a_part_that_leaves_out_its_familys_defaults_is_refused(change: dict[str, Any], message: str) -> None:
    inner = {name: v for name, v in (GEMMA3_27B["text_config"] | change).items() if v is not ...}  # type: ignore[operator]
    with pytest.raises(LayoutError, match=message):
        read(GEMMA3_27B, text_config=inner)


def test_a_plain_familys_part_may_be_short() -> None:
    inner = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
    outer = {"model_type": "llava", "text_config": {**inner, "num_key_value_heads": 8}}
    assert read(outer) == [(32, 8, 128, "attention", None)]
    with pytest.raises(LayoutError, match="has no num_key_value_heads"):
        read({**outer, "text_config": inner})


# ---- what transformers keeps for the same fields


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "qwen2": {"num_key_value_heads": 8, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 32},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 24},
    "mistral": {"sliding_window": 32},
    "phi3": {"num_key_value_heads": 2, "sliding_window": 16},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 16},
    "cohere2": {"sliding_window": 16},
    "olmo3": {"sliding_window": 16},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 8},
    "gpt2": {},
    "falcon": {"multi_query": True},
    "starcoder2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_keeps_the_same(family: str) -> None:
    """A model of the family on torch's meta device, and the shapes of what its cache holds after one pass."""
    torch = pytest.importorskip("torch", reason="runs models' forward passes without weights")
    transformers = pytest.importorskip("transformers", reason="its models are what config.json files describe")
    small = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_hidden_layers": 8,
        "vocab_size": 99,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = transformers.AutoConfig.for_model(family, **(small | FAMILIES[family]))
    with torch.device("meta"), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        cache = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values
    kept = Counter(
        (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], getattr(layer, "sliding_window", None))
        for layer in cache.layers
    )
    published = json.loads(config.to_json_string(use_diff=False))
    geometries = geometries_from_hf_config(published, tokens_per_block=16, dtype="bfloat16")
    assert {g.kind for g in geometries} <= {Kind.ATTENTION, Kind.SLIDING_WINDOW}
    assert Counter({(g.num_kv_heads, g.head_dim, g.head_dim, g.window): g.num_layers for g in geometries}) == kept
    published.pop("layer_types", None)  # which older files lack; of some families their pattern is known
    if family != "olmo3":
        assert geometries_from_hf_config(published, tokens_per_block=16, dtype="bfloat16") == geometries
