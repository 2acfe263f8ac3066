"""One vLLM engine for the bench: answers each prompt number on a line with {"ids", "cached", "seconds"}.

    python -m bench.ttft_child '{"model": FOLDER, "transfer": {...} or null}'

Prompts are long enough, and the device and the host tier small enough, that a prompt's blocks are gone once another
was served.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 1024, 4, 16, 8, 64, 2816, 512
BLOCK = 32
BLOCKS = 30  # whole ones of a prompt
ROW_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * BLOCK * 4  # float32


def write_model(folder: Path) -> None:
    """A Llama of seeded random weights, 45 million of them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
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
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "mlp.gate_proj": (FFN, HIDDEN),
                "mlp.up_proj": (FFN, HIDDEN),
                "mlp.down_proj": (HIDDEN, FFN),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    weights = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(*shape, generator=generator) * 0.06
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Serves until its input ends."""
    from vllm import LLM, SamplingParams

    setup: dict[str, Any] = json.loads(sys.argv[1])
    llm = LLM(
        model=setup["model"],
        kv_transfer_config=setup["transfer"],
        dtype="float32",
        block_size=BLOCK,
        enforce_eager=True,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=BLOCKS + 8,
        max_model_len=1024,
        enable_prefix_caching=setup["transfer"] is not None,
        disable_log_stats=False,
        distributed_executor_backend="uni",
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    print("READY", flush=True)
    for line in sys.stdin:
        ids = np.random.default_rng(int(line)).integers(3, VOCAB, BLOCKS * BLOCK + BLOCK // 2).tolist()
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        answer = {
            "ids": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens or 0,
            "seconds": time.perf_counter() - start,
        }
        print("RESULT", json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
