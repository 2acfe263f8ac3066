"""A tiny real Llama in float32 with seeded weights: 4 layers, 8 query and 4 KV heads of 32, a vocabulary of 512.

No hub and no file: the weights are drawn here, so every process has the same model. Greedy float32 output does not
depend on how the prompt was cut into forward passes, as long as no runner-up token is close: the test holds the margin.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 8, 4, 32, 512
# Spread of the random weights by the end of their names; norms are ones.
SPREAD = {"embed_tokens": 1.0, "lm_head": 0.3, "q_proj": 0.12, "k_proj": 0.12, "v_proj": 0.12, "o_proj": 0.12}
FEED_FORWARD_SPREAD = 0.08


def build() -> Any:
    """The model, for inference."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HEADS * HEAD_DIM, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=8192,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            owner = name.removesuffix(".weight").rpartition(".")[2]
            if "norm" in owner:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD.get(owner, FEED_FORWARD_SPREAD))
    return model


def prompt(tokens: int) -> Any:
    """Random token ids, int64 [tokens]."""
    return torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(7))


def forward(model: Any, tokens: Any, cache: DynamicCache) -> Any:
    """Runs `tokens` [n] after what `cache` holds, which grows by them. Returns the last one's logits [vocabulary]."""
    start = cache.get_seq_length()
    with torch.inference_mode():
        positions = torch.arange(start, start + len(tokens))[None]
        return model(input_ids=tokens[None], past_key_values=cache, position_ids=positions).logits[0, -1]


def greedy(model: Any, logits: Any, cache: DynamicCache, count: int) -> tuple[list[int], float]:
    """The next `count` tokens, and the smallest lead of a chosen token over its runner-up, in logits."""
    chosen: list[int] = []
    margin = float("inf")
    for _ in range(count):
        best = torch.topk(logits, 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        chosen.append(int(best.indices[0]))
        logits = forward(model, best.indices[:1], cache)
    return chosen, margin


def keys_and_values(cache: DynamicCache) -> Any:
    """What the cache holds: float32 [layers, 2, kv_heads, tokens, head_dim]."""
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])


def cache_of(keys_values: Any) -> DynamicCache:
    """The cache that holds this: the inverse of `keys_and_values`."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(keys_values):
        cache.update(keys[None].clone(), values[None].clone(), index)
    return cache
