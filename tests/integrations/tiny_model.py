"""Small models with seeded random weights: the same in every process, for no hub is reachable from a test.

A Llama of 4 layers; one with sliding windows beside full attention; one with latent attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 4, 8, 4, 32, 512, 512

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
}


SLIDING = CONFIG | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": HEAD_DIM,
    "tie_word_embeddings": True,
}

LATENT, ROPE, NOPE = 512, 64, 32  # vLLM's kernel for CPUs knows this latent

LATENT_CONFIG = CONFIG | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "head_dim": ROPE,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": HEAD_DIM,
    "n_routed_experts": 4,  # which no layer has: the first LAYERS are dense
    "first_k_dense_replace": LAYERS,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
}

_MLP = (("mlp.gate_proj", FFN, HIDDEN, 0.08), ("mlp.up_proj", FFN, HIDDEN, 0.08), ("mlp.down_proj", HIDDEN, FFN, 0.08))
_HEADS = (
    ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, 0.12),
    ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN, 0.12),
    ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN, 0.12),
    ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, 0.12),
)
_LATENTS = (
    ("self_attn.q_proj", HEADS * (NOPE + ROPE), HIDDEN, 0.12),
    ("self_attn.kv_a_proj_with_mqa", LATENT + ROPE, HIDDEN, 0.12),
    ("self_attn.kv_b_proj", HEADS * (NOPE + HEAD_DIM), LATENT, 0.08),
    ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, 0.12),
)
_NORMS = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}


def write_model(folder: Path, seed: int = 1234) -> Path:
    """Writes the Llama; no tokenizer: tests speak in token ids."""
    return _write(folder, CONFIG, _HEADS + _MLP, _NORMS, seed)


def write_sliding_model(folder: Path, seed: int = 1234) -> Path:
    """Writes a Gemma 3: four layers that see 64 tokens, and two that see all."""
    norms = _NORMS | {"pre_feedforward_layernorm": HIDDEN, "post_feedforward_layernorm": HIDDEN}
    return _write(
        folder, SLIDING, _HEADS + _MLP, norms | {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}, seed
    )


def write_latent_model(folder: Path, seed: int = 1234) -> Path:
    """Writes a DeepSeek V2 without experts."""
    return _write(folder, LATENT_CONFIG, _LATENTS + _MLP, _NORMS | {"self_attn.kv_a_layernorm": LATENT}, seed)


def _write(
    folder: Path,
    config: dict[str, Any],
    matrices: tuple[tuple[str, int, int, float], ...],
    norms: dict[str, int],
    seed: int,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, std=1.0)}
    head = normal(VOCAB, HIDDEN, std=0.3)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = head
    weights["model.norm.weight"] = ones(HIDDEN)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, std in matrices:
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, std=std)
        for name, size in norms.items():
            weights[f"{prefix}{name}.weight"] = ones(size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
