"""The simulator's rows: how many block operations it does a second, and which policy wins on a trace.

`--trace FILE` says which trace; else it is the sample of 500 requests that the tests have. Where vLLM is installed
(`make bench-vllm`), its own host cache runs beside kvxfer's policies, driven as its scheduler drives it.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from bench.options import Options
from bench.table import Row, Table, figure
from kvxfer.policy import POLICIES
from kvxfer.simulate import BLOCK_TOKENS, Outcome, Request, Setup, Survey, read_trace, replay, survey, usable_tokens

__all__ = ["run"]

SAMPLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "conversation-500.jsonl"
SHARES = (1, 5, 20)  # capacities, in % of the footprint
SPEED_SHARE = 5
MOST_US = 5.0  # for one block operation: 200,000 a second on one core
BLOCK_BYTES = 64 << 20  # says nothing here: no budget is in the rows
VLLM_POLICIES = ("lru", "arc")
STEP_BLOCKS = 16  # that vLLM offers for storing at once: what it computes of a prompt in a step, 8,192 tokens


def wrong_with(outcome: Outcome, found: Survey) -> str | None:
    """What cannot be true of an outcome."""
    counts = outcome.counts
    if (counts.requests, counts.blocks, counts.prompt_tokens) != (found.requests, found.blocks, found.prompt_tokens):
        return "not all of the trace was replayed"
    if counts.hit_tokens > found.hit_tokens:
        return f"{counts.hit_tokens} tokens were hit, of {found.hit_tokens} that a store without a bound has"
    if outcome.held_blocks != counts.stored_blocks - counts.evicted_blocks:
        return f"{outcome.held_blocks} blocks are held: {counts.stored_blocks} stored, {counts.evicted_blocks} evicted"
    if counts.peak_blocks > outcome.setup.capacity_blocks:
        return f"{counts.peak_blocks} blocks were held at once, over {outcome.setup.capacity_blocks}"
    return None


def setup_of(policy: str, found: Survey, share: int) -> Setup:
    """A store of a share of the footprint."""
    return Setup(policy=policy, capacity_blocks=max(1, found.distinct_blocks * share // 100), block_bytes=BLOCK_BYTES)


def speed_rows(trace: Path, found: Survey, options: Options) -> list[Row]:
    """Reading, checking and replaying, in time of the process's own: others' work on the machine does not count."""
    rows = []
    for policy in POLICIES:
        setup, took, operations, why = setup_of(policy, found, SPEED_SHARE), [], 0, None
        for number in range(options.runs + 1):
            start = time.process_time()
            outcome = replay(read_trace(trace), setup)
            if number:  # the first is the warm-up
                took.append(time.process_time() - start)
            operations, why = outcome.counts.operations, why or wrong_with(outcome, found)
        found_us = statistics.median(took) / operations * 1e6
        case = f"replay, {SPEED_SHARE} % of the footprint"
        rows.append(figure(case, policy, found_us, "us a block operation", most=MOST_US, why=why, runs=len(took)))
    return rows


def hit_rows(trace: Path, found: Survey) -> tuple[list[Row], list[str]]:
    """(token hits of every policy at every share, which one wins)."""
    rows, winners = [], []
    best = 100 * found.hit_tokens / found.prompt_tokens
    rows.append(figure("token hits", "no bound", best, "% of tokens"))
    others = list(read_trace(trace)) if whats_missing() is None else None
    for share in SHARES:
        hits: dict[str, float] = {}
        for policy in POLICIES:
            outcome = replay(read_trace(trace), setup_of(policy, found, share))
            why = wrong_with(outcome, found)
            hits[policy] = 100 * outcome.token_hit_ratio
            lost = outcome.unreachable_blocks / max(1, outcome.held_blocks)
            case = f"token hits, {share} % of the footprint"
            rows.append(figure(case, policy, hits[policy], "% of tokens", why=why))
            rows.append(figure(f"unreachable, {share} % of the footprint", policy, 100 * lost, "% of held", why=why))
        for policy in VLLM_POLICIES if others is not None else ():
            tokens, why = vllm_hits(others or (), policy, setup_of(policy, found, share).capacity_blocks)
            hits[f"vLLM {policy}"] = 100 * tokens / found.prompt_tokens
            case = f"token hits, {share} % of the footprint"
            rows.append(figure(case, f"vLLM {policy}", hits[f"vLLM {policy}"], "% of tokens", why=why))
        order = sorted(hits, key=lambda name: -hits[name])
        first = " and ".join(name for name in order if hits[name] == hits[order[0]])
        winners.append(f"at {share} % {first} ({', '.join(f'{name} {hits[name]:.2f}' for name in order)})")
    return rows, winners


def whats_missing() -> str | None:
    """Why there can be no rows of vLLM's here; None where there can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed in this environment"
    from vllm.v1.kv_offload.base import ReqContext

    if not hasattr(ReqContext, "set_offload_key_position"):
        return "this vLLM's host cache does not know the order of a request's blocks: 0.32 and later do"
    return None


def vllm_hits(requests: Sequence[Request], policy: str, capacity: int) -> tuple[int, str | None]:
    """(tokens that vLLM's host cache hits, what was wrong), each transfer over before the next call."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(num_chunks=capacity, cache_policy=policy)
    hit_tokens, why = 0, None
    held: set[bytes] = set()
    for number, request in enumerate(requests):
        context = ReqContext(req_id=str(number))
        keys = [make_offload_key(block.to_bytes(32, "big"), 0) for block in request.blocks]
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * BLOCK_TOKENS)
        manager.on_new_request(context)
        run = 0
        while run < len(keys) and manager.lookup(keys[run], context) is LookupResult.HIT:
            run += 1
        if run:
            manager.prepare_load(keys[:run], context)
            manager.complete_load(keys[:run], context)
        for start in range(run, len(keys), STEP_BLOCKS):
            output = manager.prepare_store(keys[start : start + STEP_BLOCKS], context)
            if output is not None:
                manager.complete_store(output.keys_to_store, context)
                held -= set(output.evicted_keys)
                held |= set(output.keys_to_store)
        manager.on_request_finished(context)
        hit_tokens += usable_tokens(run, request.tokens, BLOCK_TOKENS)
        if len(held) > capacity:
            why = f"{len(held)} blocks are held, over {capacity}"
    return hit_tokens, why


def run(table: Table, options: Options) -> None:
    """Adds the simulator's rows."""
    trace = options.trace or SAMPLE
    found = survey(trace)
    table.note(
        f"simulate: {trace.name}, {found.requests:,} requests, {found.blocks:,} blocks of {BLOCK_TOKENS} tokens, "
        f"{found.distinct_blocks:,} different ones; everything is admitted; --trace says another"
    )
    if (missing := whats_missing()) is not None:
        table.note(f"simulate: no rows of vLLM's own policies: {missing}")
    table.add(speed_rows(trace, found, options))
    rows, winners = hit_rows(trace, found)
    table.add(rows)
    table.note(f"simulate: most token hits: {'; '.join(winners)}")
