"""A store without bytes, the slow and obvious way: one list of blocks, the least recently used first.

Shares no code with kvxfer. Of each prompt: how far its blocks are there, all of them from the first on; those that are
there count as used; those that are not are stored, the first ones first, at the cost of the least recently used ones
that the prompt has no use for and that no other block which is there follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Prompt = tuple[int, int, list[int]]  # ms, tokens, blocks


@dataclass
class Totals:
    hit_tokens: int = 0
    hit_blocks: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    peak: int = 0
    order: list[int] = field(default_factory=list)


def whole_tokens(run: int, tokens: int, block_tokens: int) -> int:
    """Counted one by one: the last token of a whole block among the first `run` of a prompt, short of its end."""
    best = 0
    for token in range(1, tokens):
        if token % block_tokens == 0 and token // block_tokens <= run:
            best = token
    return best


def least_recently_used(prompts: list[Prompt], capacity: int, block_tokens: int) -> Totals:
    totals = Totals()
    order = totals.order
    before = {block: blocks[at - 1] for _, _, blocks in prompts for at, block in enumerate(blocks) if at}
    for _, tokens, blocks in prompts:
        run = 0
        while run < len(blocks) and blocks[run] in order:
            run += 1
        totals.hit_blocks += run
        totals.hit_tokens += whole_tokens(run, tokens, block_tokens)
        used = [block for block in blocks if block in order]
        missing = [block for block in blocks if block not in order]
        order[:] = [block for block in order if block not in used] + used
        while len(order) + len(missing) > capacity:
            followed = [before.get(block) for block in order]
            if not (victims := [block for block in order if block not in used and block not in followed]):
                break
            order.remove(victims[0])
            totals.evicted += 1
        stored = missing[: capacity - len(order)]
        totals.dropped += len(missing) - len(stored)
        totals.stored += len(stored)
        order += stored
        totals.peak = max(totals.peak, len(order))
    return totals


def unreachable(order: list[int], prompts: list[Prompt]) -> int:
    """Blocks of a store that no prefix of any prompt leads to without a gap."""
    reached = set()
    for _, _, blocks in prompts:
        for block in blocks:
            if block not in order:
                break
            reached.add(block)
    return len(order) - len(reached)
