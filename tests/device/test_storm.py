"""Jobs, cancels, deadlines and faults by chance, all at once: what must hold whatever comes of it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.convert.pages import KVPages
from kvxfer.jobs import LOAD, STORE, JobOutcome, Status
from kvxfer.testing import FakeDevice, FaultyIO
from tests.device.rig import MODEL, Card, card, chunks_of, device_threads
from tests.jobs.rig import ranks
from tests.jobs.test_faults import until
from tests.oracle import POISON

N = MODEL.num_blocks
MAY_BE = {  # what may become of a chunk, beside OK
    STORE: {Status.CANCELLED, Status.LOST, Status.DEVICE, Status.IO},
    LOAD: {Status.CANCELLED, Status.CUT, Status.DEVICE, Status.IO},
}


@pytest.mark.parametrize("seed", range(12))
def test_a_storm(tmp_path: Path, seed: int) -> None:
    storm(tmp_path, seed)


def storm(tmp_path: Path, seed: int) -> None:
    """Slots 0..N-1 are loaded from, slots N..2N-1 are stored to; every block is in one job of each direction."""
    rng = random.Random(seed)
    source, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "hnd", 4, filled=False)
    with card(tmp_path, source) as before:
        assert not before.store(source, chunks_of(1)).errors
    device = FakeDevice(seed=seed, most_steps=rng.choice((2, 4, 16)))
    how: dict[str, Any] = {"choose": lambda *_: rng.choice(("pack", "zero"))} if seed % 2 else {}
    how |= {"bays": rng.randint(1, 4), "chunks_per_bay": rng.randint(1, 4), "io_threads": rng.randint(1, 3)}
    with Card(tmp_path / "slots", [*source], device=device, **how) as both, FaultyIO() as io:
        disturb(rng, both, io)
        jobs = submit_all(rng, both, source, target)
        outcomes: dict[int, JobOutcome] = {}
        end = time.monotonic() + 60
        while len(outcomes) < len(jobs):
            assert time.monotonic() < end, f"jobs without an answer: {jobs.keys() - outcomes.keys()}"
            both.runner.wait([LOAD, STORE], 0.01)
            for direction in (LOAD, STORE):
                while (outcome := both.runner.poll(direction)) is not None:
                    assert outcome.job_id not in outcomes, "two answers"
                    outcomes[outcome.job_id] = outcome
            if rng.random() < 0.1:
                both.runner.cancel(rng.choice(list(jobs)))
        seen = [tensor.copy() for mine in target for tensor in mine.tensors]
        device.run()
        for tensor, was in zip((t for mine in target for t in mine.tensors), seen, strict=True):
            assert np.array_equal(tensor, was), "written after the result"
        for job_id, outcome in outcomes.items():
            direction, blocks = jobs[job_id]
            statuses = [Status(code) for code in outcome.status]
            assert outcome.direction == direction and set(statuses) <= MAY_BE[direction] | {Status.OK}
            assert [(e.chunk, e.status) for e in outcome.errors] == [(c, s) for c, s in enumerate(statuses) if s]
            for block, status in zip(blocks, statuses, strict=True):
                if direction == LOAD:
                    check_block(target, block, status)
                elif status is Status.OK:
                    size = both.slot.payload_stride
                    assert np.array_equal(both.bytes_of(N + block)[:size], MODEL.payloads([[block]])[0])
        until(lambda: both.runner.stats()["device_bays_in_use"] == 0, "every bay is back, or left behind")
        assert both.runner.shutdown(10.0) == 0
    until(lambda: not device_threads(), "the thread has ended")


def disturb(rng: random.Random, both: Card, io: FaultyIO) -> None:
    """Some of: slow or failing I/O, a call of the device that fails, a device that is lost."""
    if rng.random() < 0.5:
        io.delay(rng.choice(("pread", "pwrite")), 0.01, after=rng.randrange(20))
    if rng.random() < 0.3:
        io.fail(rng.choice(("pread", "pwrite")), 5, after=rng.randrange(20), times=2)
    if rng.random() < 0.5:
        fault = rng.choice((both.device.faults.fail, both.device.faults.lose))
        fault(rng.choice(("copy", "record", "wait", "gather", "scatter", "done", "mark", "*")), after=rng.randrange(60))


def submit_all(
    rng: random.Random, both: Card, source: list[KVPages], target: list[KVPages]
) -> dict[int, tuple[int, list[int]]]:
    """All blocks in jobs of a few, in both directions: job -> (direction, its blocks)."""
    jobs: dict[int, tuple[int, list[int]]] = {}
    work = []
    for direction in (STORE, LOAD):
        blocks = rng.sample(range(N), N)
        while blocks:
            take = rng.randint(1, 9)
            work.append((direction, blocks[:take]))
            blocks = blocks[take:]
    rng.shuffle(work)
    for direction, blocks in work:
        deadline = rng.choice((None, None, 0.02, 0.1)) if direction == LOAD else None
        chunks = blocks if direction == LOAD else [N + block for block in blocks]
        job = both.submit(
            direction,
            source if direction == STORE else target,
            [[block] for block in blocks],
            chunks=chunks,
            records=[both.record(block, slot) for block, slot in zip(blocks, chunks, strict=True)],
            deadline_s=deadline,
        )
        jobs[job] = direction, blocks
        if rng.random() < 0.15:
            both.runner.cancel(job)
    return jobs


def check_block(target: list[KVPages], block: int, status: Status) -> None:
    """OK: the model's bytes, on every rank. Where the device was not to blame for a failure: nothing was written."""
    for rank, mine in enumerate(target):
        want = MODEL.pages("hnd", tp_size=len(target), tp_rank=rank, padding=24, offset=8)
        for tensor, right, local in zip(mine.tensors, want, mine.mapping.tensors, strict=True):
            at = slice(
                local.offset + block * local.block_stride, local.offset + block * local.block_stride + local.page_bytes
            )
            if status is Status.OK:
                assert np.array_equal(tensor[at], right[at]), f"block {block}"
            elif status is not Status.DEVICE:
                assert (tensor[at] == POISON).all(), f"block {block} was written: {status}"
