"""How much of a prompt a partial load saves, in tokens: exact, for every kind of KV-cache group and several together.

A *cut* is a number of leading tokens that need not be computed again. Whether a cut can be used is a question to each
group of the model, and the answer of a group depends on what arrived on all of its ranks:

    attention, MLA    every token before the cut, for each token looks at all before it
    sliding window    the tokens that the first one after the cut still looks at: the last `window - 1` before the cut
    opaque states     the state after exactly the last token before the cut; one is kept at the end of each chunk

A cut lies between whole blocks of every group, and at least one token of the prompt is left to compute, since its
output is what was asked for. Zero can always be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import lcm
from operator import and_
from typing import Self

from kvxfer.bitmap import CompletionBitmap
from kvxfer.geometry import Kind, KVGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixResult:
    """What can be used of a prompt's cache. `usable_tokens + recompute_tokens` is the prompt.

    Chunks are those of all groups together.
    """

    usable_tokens: int  # whole blocks, always fewer than the prompt's tokens
    recompute_tokens: int
    prefix_chunks: int  # chunks that arrived and begin before the first gap that mattered, used or not
    kept_beyond_gap: int  # chunks that arrived after it: useless now, still in the store


def on_all_ranks(bitmaps: Iterable[CompletionBitmap]) -> CompletionBitmap:
    """What arrived on every one of a model's ranks, whose bitmaps these are.

    Raises:
        ValueError: no bitmap, or of different jobs.
    """
    ranks = list(bitmaps)
    if not ranks:
        raise ValueError("no rank's bitmap was given")
    return reduce(and_, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHits:
    """What arrived of one KV-cache group.

    Raises:
        ValueError: a size that cannot be, or a window for another kind than sliding window.
    """

    bitmap: CompletionBitmap  # the prompt's chunks in order, the first holding its first token; of all ranks
    tokens_per_block: int
    blocks_per_chunk: int = 1  # the prompt's last chunk may hold fewer
    kind: Kind = Kind.ATTENTION
    window: int | None = None  # tokens that a token looks at, itself included

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1 or self.blocks_per_chunk < 1:
            raise ValueError(
                f"tokens_per_block={self.tokens_per_block} and blocks_per_chunk={self.blocks_per_chunk} of a prompt's "
                "group must be at least 1"
            )
        if (self.window is not None) != (self.kind is Kind.SLIDING_WINDOW) or (
            self.window is not None and self.window < 1
        ):
            raise ValueError(f"window={self.window} does not fit kind={self.kind} of a prompt's group")

    @classmethod
    def of(cls, geometry: KVGeometry, ranks: Iterable[CompletionBitmap], *, blocks_per_chunk: int = 1) -> Self:
        """The group of a geometry, of what arrived on each of its ranks."""
        return cls(
            bitmap=on_all_ranks(ranks),
            tokens_per_block=geometry.tokens_per_block,
            blocks_per_chunk=blocks_per_chunk,
            kind=geometry.kind,
            window=geometry.window,
        )

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens of a whole chunk."""
        return self.tokens_per_block * self.blocks_per_chunk

    def cut_at_most(self, limit: int, prompt_tokens: int) -> int:
        """The greatest cut of at most `limit` tokens that this group can use."""
        if self.kind is Kind.OPAQUE:
            return self._state(limit, prompt_tokens)
        if self.kind is Kind.SLIDING_WINDOW:
            return self._window(limit)
        most = min(limit, self.bitmap.leading_run() * self.tokens_per_chunk)
        return most - most % self.tokens_per_block

    def _window(self, limit: int) -> int:
        chunk, before = self.tokens_per_chunk, (self.window or 1) - 1
        cut = limit - limit % self.tokens_per_block
        if not before:  # a token looks at itself alone
            return cut
        cut = min(cut, len(self.bitmap) * chunk)
        arrived = f"{self.bitmap.bits:0{max(1, len(self.bitmap))}b}"[::-1]  # searched within the window only
        while cut > 0:
            gap = arrived.rfind("0", max(0, cut - before) // chunk, (cut - 1) // chunk + 1)
            if gap < 0:
                break
            cut = gap * chunk
        return cut

    def _state(self, limit: int, prompt_tokens: int) -> int:
        chunk = self.tokens_per_chunk
        end = prompt_tokens - prompt_tokens % self.tokens_per_block  # of the last chunk's last whole block
        ended = limit // chunk if limit < end else -(-end // chunk)
        present = self.bitmap.bits & ((1 << ended) - 1)
        return min(present.bit_length() * chunk, end)


def usable_prefix(groups: Sequence[GroupHits], *, prompt_tokens: int) -> PrefixResult:
    """The greatest cut that every group of a model can use.

    Args:
        groups: all of the model's.
        prompt_tokens: length of the prompt.

    Raises:
        ValueError: no group, or a bitmap with chunks wholly beyond the prompt.
    """
    if prompt_tokens < 0 or not groups:
        raise ValueError(
            f"prompt_tokens={prompt_tokens} must be at least 0, and a prompt needs a group ({len(groups)})"
        )
    for group in groups:
        if len(group.bitmap) and (len(group.bitmap) - 1) * group.tokens_per_chunk >= prompt_tokens:
            raise ValueError(
                f"{len(group.bitmap)} chunks of {group.tokens_per_chunk} tokens are too many for a prompt of "
                f"{prompt_tokens} tokens"
            )
    usable = _greatest_cut(groups, max(prompt_tokens - 1, 0), prompt_tokens)
    arrived = sum(group.bitmap.count() for group in groups)
    reach = _greatest_cut(groups, prompt_tokens, prompt_tokens)
    unit = lcm(*(group.tokens_per_block for group in groups))
    before = arrived
    if reach < prompt_tokens // unit * unit:  # with more chunks it would have been more
        begun = [(group.bitmap.bits, -(-reach // group.tokens_per_chunk)) for group in groups]
        before = sum((bits & ((1 << chunks) - 1)).bit_count() for bits, chunks in begun)
    return PrefixResult(
        usable_tokens=usable,
        recompute_tokens=prompt_tokens - usable,
        prefix_chunks=before,
        kept_beyond_gap=arrived - before,
    )


def _greatest_cut(groups: Sequence[GroupHits], limit: int, prompt_tokens: int) -> int:
    """Each group in turn lowers the cut to its own greatest one below; what none lowers is the greatest common one."""
    cut, lowered = limit, True
    while lowered:
        lowered = False
        for group in groups:
            lower = group.cut_at_most(cut, prompt_tokens)
            cut, lowered = lower, lowered or lower < cut
    return cut


def full_attention(
    bitmap: CompletionBitmap, *, prompt_tokens: int, tokens_per_block: int, blocks_per_chunk: int = 1
) -> PrefixResult:
    """The answer of one group where every token looks at all before it: nothing beyond the first gap can be used.

    With whole blocks, the token that is left to compute can be a whole block: 640 tokens in blocks of 16, all of them
    loaded, use 624.

    Args:
        bitmap: the chunks of this prompt in order, the first one holding its first token.
        prompt_tokens: length of the prompt.
        tokens_per_block: tokens of a block.
        blocks_per_chunk: blocks of a chunk; the prompt's last chunk may hold fewer.

    Raises:
        ValueError: a size that cannot be, or a bitmap with chunks wholly beyond the prompt.
    """
    group = GroupHits(bitmap=bitmap, tokens_per_block=tokens_per_block, blocks_per_chunk=blocks_per_chunk)
    return usable_prefix((group,), prompt_tokens=prompt_tokens)


def sliding_window(
    bitmap: CompletionBitmap, *, window: int, prompt_tokens: int, tokens_per_block: int, blocks_per_chunk: int = 1
) -> PrefixResult:
    """The answer of one group whose tokens look at `window` tokens, themselves included; else as `full_attention`."""
    group = GroupHits(
        bitmap=bitmap,
        tokens_per_block=tokens_per_block,
        blocks_per_chunk=blocks_per_chunk,
        kind=Kind.SLIDING_WINDOW,
        window=window,
    )
    return usable_prefix((group,), prompt_tokens=prompt_tokens)


def state_space(
    bitmap: CompletionBitmap, *, prompt_tokens: int, tokens_per_block: int, blocks_per_chunk: int = 1
) -> PrefixResult:
    """The answer of one group of states, of which each chunk keeps that after its last token; else as `full_attention`.

    A state after the whole prompt is of no use: the prompt's last token could not be computed from it.
    """
    group = GroupHits(
        bitmap=bitmap, tokens_per_block=tokens_per_block, blocks_per_chunk=blocks_per_chunk, kind=Kind.OPAQUE
    )
    return usable_prefix((group,), prompt_tokens=prompt_tokens)
