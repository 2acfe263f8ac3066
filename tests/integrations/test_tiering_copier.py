"""The thread that does KvxferTieringSpec's jobs: nothing waits that need not, order where it matters, one result."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.convert.native_rows import RowMemory, RowPlan
from kvxfer.errors import EngineClosed, ForkError, LayoutError
from kvxfer.integrations.vllm_copier import MOST_PASSED, RowCopier, RowJob
from kvxfer.mapping import CopyRun, LocalTensor
from kvxfer.rows import PageMapping, RowCell, RowMapping

ROOT = Path(__file__).resolve().parents[2]
LONG = 60.0  # nothing takes so long


class Plan:
    """Writes down what it was told to copy, and copies only when it may."""

    def __init__(self) -> None:
        self.copied: list[tuple[str, list[int]]] = []
        self.may_copy, self.copying = threading.Event(), threading.Event()
        self.fails: set[int] = set()
        self.closed = 0

    def check(self, block_ids: Any, pages: Any, group_pages: Any) -> None:
        if block_ids.min(initial=0) < 0:
            raise LayoutError("no such block")

    def gather(self, block_ids: Any, pages: Any, group_pages: Any, *, threads: int) -> int:
        return self._copy("gather", block_ids)

    def scatter(self, block_ids: Any, pages: Any, group_pages: Any, *, threads: int) -> int:
        return self._copy("scatter", block_ids)

    def _copy(self, what: str, block_ids: Any) -> int:
        self.copying.set()
        assert self.may_copy.wait(LONG)
        self.copied.append((what, block_ids.tolist()))
        if self.fails & set(block_ids.tolist()):
            raise MemoryError("none left")
        return 100 * len(block_ids)

    def close(self) -> None:
        self.closed += 1


def job(number: int, blocks: list[int], rows: list[int], *, store: bool = False, urgent: bool = False) -> RowJob:
    ids = np.array(blocks, dtype=np.int64)
    return RowJob(number, store, ids, np.array(rows, dtype=np.int64), np.array([len(ids)]), urgent)


def store(number: int, blocks: list[int], rows: list[int]) -> RowJob:
    return job(number, blocks, rows, store=True)


def load(number: int, blocks: list[int], rows: list[int], *, urgent: bool = False) -> RowJob:
    return job(number, blocks, rows, urgent=urgent)


@pytest.fixture
def plan() -> Plan:
    return Plan()


@pytest.fixture
def copier(plan: Plan) -> Iterator[RowCopier]:
    copier = RowCopier(plan)
    yield copier
    plan.may_copy.set()
    assert copier.close(LONG)


def order_of(plan: Plan, copier: RowCopier, *jobs: RowJob) -> list[int]:
    """The first of their blocks, in the sequence in which jobs behind a slow one were done."""
    copier.submit(store(1000, [1000], [1000]))
    assert plan.copying.wait(LONG)
    for each in jobs:
        copier.submit(each)
    plan.may_copy.set()
    copier.wait({each.job_id for each in jobs})
    return [blocks[0] for _, blocks in plan.copied[1:]]


def test_submit_and_finished_do_not_wait_for_copies(plan: Plan, copier: RowCopier) -> None:
    for number in range(20):
        copier.submit(store(number, [number], [number]))
    assert plan.copying.wait(LONG)
    assert copier.finished() == [] and plan.copied == []  # the thread is in the first one
    plan.may_copy.set()
    copier.wait(set(range(20)))
    done = copier.finished()
    assert [each.job_id for each in done] == list(range(20))
    assert all(each.success and each.is_store and each.nbytes == 100 and each.seconds >= 0 for each in done)
    assert copier.finished() == []


def test_wait_is_for_the_jobs_named_and_leaves_their_results(plan: Plan, copier: RowCopier) -> None:
    copier.submit(store(1, [1], [1]))
    copier.wait({5, 6})  # nobody submitted those
    waiting = threading.Thread(target=copier.wait, args=({1},))
    waiting.start()
    assert plan.copying.wait(LONG)
    assert waiting.is_alive()
    plan.may_copy.set()
    waiting.join(LONG)
    assert not waiting.is_alive()
    assert [each.job_id for each in copier.finished()] == [1]
    copier.wait({1})


def test_loads_pass_stores_of_other_blocks_and_rows(plan: Plan, copier: RowCopier) -> None:
    jobs = [store(1, [1], [1]), store(2, [2], [2]), load(3, [3], [3]), load(4, [4], [4]), store(5, [5], [5])]
    assert order_of(plan, copier, *jobs) == [3, 4, 1, 2, 5]


@pytest.mark.parametrize(
    "second",
    [load(2, [7, 9], [7, 1]), load(2, [7, 1], [7, 9])],
    ids=["a row that is being stored", "a block that is being stored"],
)
def test_a_load_does_not_pass_a_store_that_it_meets(plan: Plan, copier: RowCopier, second: RowJob) -> None:
    assert order_of(plan, copier, store(1, [8, 1], [8, 1]), second) == [8, 7]


def test_a_load_behind_one_that_must_wait_does_not_pass_it(plan: Plan, copier: RowCopier) -> None:
    assert order_of(plan, copier, store(1, [1], [1]), load(2, [2], [1]), load(3, [3], [3])) == [1, 2, 3]


def test_stores_pass_nothing(plan: Plan, copier: RowCopier) -> None:
    jobs = [store(1, [1], [1]), load(2, [2], [2]), store(3, [3], [3]), store(4, [4], [4])]
    assert order_of(plan, copier, *jobs) == [2, 1, 3, 4]


def test_a_load_that_is_waited_for_passes_the_others(plan: Plan, copier: RowCopier) -> None:
    jobs = [
        load(1, [1], [1]),
        load(2, [2], [2]),
        store(3, [3], [3]),
        load(4, [4], [4], urgent=True),
        load(5, [5], [5], urgent=True),
        load(6, [6, 1], [6, 7], urgent=True),  # into the same block as the first
    ]
    assert order_of(plan, copier, *jobs) == [4, 5, 1, 6, 2, 3]


def test_looking_back_is_bounded(plan: Plan, copier: RowCopier) -> None:
    stores = [store(n, [n], [n]) for n in range(MOST_PASSED + 5)]
    order = order_of(plan, copier, *stores, load(999, [999], [999]))
    assert order.index(999) == 5


def test_any_order_leaves_the_bytes_that_one_after_the_other_would(plan: Plan) -> None:
    """Random jobs over few blocks and rows, with the real plan."""
    rng = np.random.default_rng(11)
    for _ in range(30):
        tensor, rows = (rng.integers(0, 256, size=(6, 8), dtype=np.uint8) for _ in range(2))
        want_tensor, want_rows = tensor.copy(), rows.copy()
        page = PageMapping(
            canonical_bytes=8,
            local_bytes=8,
            runs=(
                CopyRun(
                    local_offset=0,
                    canonical_offset=0,
                    fragment_size=8,
                    num_fragments=1,
                    local_stride=8,
                    canonical_stride=8,
                ),
            ),
        )
        cell = RowCell(tensor=LocalTensor(block_stride=8, page_bytes=8), offset=0, block_stride=8, page=page)
        mapping = RowMapping(cells=(cell,), blocks_per_chunk=1, row_bytes=8, topology=None)
        copier = RowCopier(RowPlan([mapping], [[tensor]], RowMemory.of(rows)))
        for number in range(40):
            count = int(rng.integers(1, 4))
            blocks, places = (rng.permutation(6)[:count].tolist() for _ in range(2))
            each = job(number, blocks, places, store=bool(rng.integers(2)), urgent=bool(rng.integers(2)))
            copier.submit(each)
            if each.is_store:
                want_rows[places] = want_tensor[blocks]
            else:
                want_tensor[blocks] = want_rows[places]
        copier.wait(set(range(40)))
        assert len(copier.finished()) == 40
        assert copier.close(LONG)
        assert np.array_equal(tensor, want_tensor) and np.array_equal(rows, want_rows)


def test_a_job_that_fails_says_so_and_the_next_one_is_done(
    plan: Plan, copier: RowCopier, caplog: pytest.LogCaptureFixture
) -> None:
    plan.fails.add(3)
    plan.may_copy.set()
    with caplog.at_level(logging.WARNING, "kvxfer.engine"):
        copier.submit(store(1, [3], [3]))
        copier.submit(store(2, [4], [4]))
        copier.wait({1, 2})
    assert [(done.job_id, done.success, done.nbytes) for done in copier.finished()] == [(1, False, 0), (2, True, 100)]
    assert "job 1 failed: none left" in caplog.text


def test_jobs_that_cannot_be_are_refused_before_they_are_accepted(plan: Plan, copier: RowCopier) -> None:
    with pytest.raises(LayoutError, match="no such block"):
        copier.submit(store(1, [-4], [1]))
    copier.submit(store(1, [1], [1]))
    with pytest.raises(ValueError, match="job 1 is not finished yet"):
        copier.submit(store(1, [2], [2]))
    plan.may_copy.set()
    copier.wait({1})
    assert [done.job_id for done in copier.finished()] == [1]


def test_close_ends_the_job_under_way_and_fails_those_not_begun(plan: Plan) -> None:
    copier = RowCopier(plan)
    for number in range(3):
        copier.submit(store(number, [number], [number]))
    assert plan.copying.wait(LONG)
    started = time.monotonic()
    assert not copier.close(0.05)  # the copy hangs
    assert time.monotonic() - started < LONG / 2 and plan.closed == 0
    with pytest.raises(EngineClosed):
        copier.submit(store(7, [7], [7]))
    copier.wait({1, 2})  # they have ended
    plan.may_copy.set()
    assert copier.close(LONG) and plan.closed == 1
    done = {each.job_id: each.success for each in copier.finished()}
    assert done == {0: True, 1: False, 2: False} and plan.copied == [("gather", [0])]


def test_a_forks_child_is_told(copier: RowCopier) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            copier.submit(store(1, [1], [1]))
            answer = b"accepted"
        except ForkError:
            answer = b"told"
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"told"
    os.waitpid(child, 0)
    os.close(reading)


def test_a_process_that_ends_without_close_ends() -> None:
    """With a job under way, and more in the queue."""
    code = (
        "import numpy as np, sys; sys.path.insert(0, '.')\n"
        "from tests.integrations.test_tiering_copier import *\n"
        "import time\n"
        "class Slow(Plan):\n"
        "    def _copy(self, what, ids): self.copying.set(); time.sleep(0.5); return 0\n"
        "    def close(self): print('closed', flush=True)\n"
        "plan = Slow(); copier = RowCopier(plan)\n"
        "for n in range(1000): copier.submit(store(n, [n], [n]))\n"
        "assert plan.copying.wait(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
