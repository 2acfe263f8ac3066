"""How much of a prompt a partial load saves: the leading run of what arrived, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.bitmap import CompletionBitmap


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixResult:
    """What can be used of a prompt's cache. `usable_tokens + recompute_tokens` is the prompt."""

    usable_tokens: int  # whole blocks, always fewer than the prompt's tokens
    recompute_tokens: int
    prefix_chunks: int  # chunks that arrived before the first gap
    kept_beyond_gap: int  # chunks that arrived after it: useless now, still in the store


def full_attention(
    bitmap: CompletionBitmap, *, prompt_tokens: int, tokens_per_block: int, blocks_per_chunk: int = 1
) -> PrefixResult:
    """The answer where every token attends to all before it: nothing beyond the first gap can be used.

    At least one token of the prompt is left to compute, since its output is what was asked for; with whole blocks that
    can be a whole block. 640 tokens in blocks of 16, all of them loaded, use 624.

    Args:
        bitmap: the chunks of this prompt in order, the first one holding its first token.
        prompt_tokens: length of the prompt.
        tokens_per_block: tokens of a block.
        blocks_per_chunk: blocks of a chunk; the prompt's last chunk may hold fewer.

    Raises:
        ValueError: a size that cannot be, or a bitmap with chunks wholly beyond the prompt.
    """
    if prompt_tokens < 0 or tokens_per_block < 1 or blocks_per_chunk < 1:
        raise ValueError(
            f"prompt_tokens={prompt_tokens} must be at least 0, tokens_per_block={tokens_per_block} and "
            f"blocks_per_chunk={blocks_per_chunk} at least 1"
        )
    tokens_per_chunk = tokens_per_block * blocks_per_chunk
    if (len(bitmap) - 1) * tokens_per_chunk >= prompt_tokens and len(bitmap):
        raise ValueError(
            f"{len(bitmap)} chunks of {tokens_per_chunk} tokens are too many for a prompt of {prompt_tokens} tokens"
        )
    run = bitmap.leading_run()
    most = max(prompt_tokens - 1, 0) // tokens_per_block * tokens_per_block
    usable = min(run * tokens_per_chunk, most)
    return PrefixResult(
        usable_tokens=usable,
        recompute_tokens=prompt_tokens - usable,
        prefix_chunks=run,
        kept_beyond_gap=bitmap.count() - run,
    )
