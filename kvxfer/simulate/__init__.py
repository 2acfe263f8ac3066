"""What a store would have done for a trace of requests, without moving a byte: `kvxfer simulate`, and in Python.

    plan = Setup(policy="arc", capacity_blocks=20_000, block_bytes=64 << 20)
    replay(read_trace(path), plan).token_hit_ratio

Needs neither a device nor a drive: nothing here loads torch, LMDB or native code.
"""

from kvxfer.simulate.replay import REASONS, Counts, Outcome, Replay, Setup, replay
from kvxfer.simulate.trace import BLOCK_TOKENS, Request, Survey, read_trace, survey, usable_tokens

__all__ = [
    "BLOCK_TOKENS",
    "Counts",
    "Outcome",
    "REASONS",
    "Replay",
    "Request",
    "Setup",
    "Survey",
    "read_trace",
    "replay",
    "survey",
    "usable_tokens",
]
