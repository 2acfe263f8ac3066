"""A Llama of 4 layers with seeded random weights: the same in every process, for no hub is reachable from a test."""

from __future__ import annotations

import json
from pathlib import Path

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


def write_model(folder: Path, seed: int = 1234) -> Path:
    """Writes the model; no tokenizer: tests speak in token ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, std=1.0),
        "lm_head.weight": normal(VOCAB, HIDDEN, std=0.3),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, std in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, 0.12),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN, 0.12),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN, 0.12),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, 0.12),
            ("mlp.gate_proj", FFN, HIDDEN, 0.08),
            ("mlp.up_proj", FFN, HIDDEN, 0.08),
            ("mlp.down_proj", HIDDEN, FFN, 0.08),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, std=std)
        weights[prefix + "input_layernorm.weight"] = ones.clone()
        weights[prefix + "post_attention_layernorm.weight"] = ones.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
