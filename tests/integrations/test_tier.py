"""KvxferTier through vLLM's own interface: what arrives, what fails, and what is said of it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.testing import FaultyIO
from tests.integrations.harness import HIT, MISS, Rig, key_of, keys_of, says_bytes
from tests.jobs.test_faults import until

pytestmark = pytest.mark.vllm

N = 12


def test_kvxfer_is_installed_and_not_the_checkout() -> None:
    import kvxfer

    assert "site-packages" in str(kvxfer.__file__)


def test_a_trip(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        want = rig.fill()
        request = rig.request("a")
        assert rig.lookups(range(N), request) == [MISS] * N
        stored = rig.store(range(N))
        assert stored.success and says_bytes(stored, N * rig.row_bytes)
        assert rig.lookups(range(N + 1), request) == [HIT] * N + [MISS]
        rig.poison()
        loaded = rig.load(range(N), request)
        assert loaded.success and loaded.successful_keys is None and says_bytes(loaded, N * rig.row_bytes)
        rig.check(want, range(N))
        assert not rig.tier.has_pending_work()


def test_rows_may_be_any_and_of_any_size(tmp_root: Path) -> None:
    with Rig(tmp_root, row_bytes=4096 * 67, chunks=40) as rig:  # several segments, the last one short
        want = rig.fill()
        assert rig.store([3, 1, 39]).success
        rig.poison()
        assert rig.load([1, 39, 3], rig.request("a"), rows=[0, 20, 5]).success
        for row, chunk in ((0, 1), (20, 39), (5, 3)):
            assert (rig.rows[row] == want[chunk]).all()
        rig.check(want, [], asked=[0, 20, 5])


def test_what_is_there_is_not_written_again(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        rig.fill()
        rig.store(range(N))
        again = rig.store(range(N))
        assert again.success and says_bytes(again, 0)  # vLLM's detector takes nothing from it


def test_another_process_finds_what_was_stored(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        want = rig.fill()
        rig.store(range(N))
    with Rig(tmp_root) as rig:
        rig.poison()
        request = rig.request("a")
        assert rig.lookups(range(N), request) == [HIT] * N
        assert rig.load(range(N), request).success
        rig.check(want, range(N))


@pytest.mark.parametrize("missing", [[0], [3], [N - 1], [2, 5, 7], list(range(N))], ids=str)
def test_holes(tmp_root: Path, missing: list[int]) -> None:
    there = [n for n in range(N) if n not in missing]
    with Rig(tmp_root) as rig:
        want = rig.fill()
        if there:
            rig.store(there)
        rig.poison()
        request = rig.request("a")
        result = rig.load(range(N), request)
        assert not result.success
        assert list(result.successful_keys or ()) == keys_of(there)
        rig.check(want, there, asked=range(N))
        assert rig.lookups(range(N), request) == [MISS if n in missing else HIT for n in range(N)]


def _flip(rig: Rig) -> None:
    rig.overwrite(5, bytes([rig.slot(5)[1000] ^ 1]), at=1000)


def _zero(rig: Rig) -> None:
    rig.overwrite(5, bytes(len(rig.slot(5))))


def _zero_payload(rig: Rig) -> None:
    rig.overwrite(5, bytes(rig.row_bytes))


def _swap(rig: Rig) -> None:
    five, seven = rig.slot(5), rig.slot(7)
    rig.overwrite(5, seven)
    rig.overwrite(7, five)


def _copied(rig: Rig) -> None:
    rig.overwrite(5, rig.slot(7))


@pytest.mark.parametrize(
    ("damage", "lost"), [(_flip, {5}), (_zero, {5}), (_zero_payload, {5}), (_swap, {5, 7}), (_copied, {5})]
)
def test_damage(tmp_root: Path, damage: Callable[[Rig], None], lost: set[int]) -> None:
    """What is damaged does not arrive, all else does; a miss from now on, and a hit after the next store."""
    there = [n for n in range(N) if n not in lost]
    with Rig(tmp_root) as rig:
        want = rig.fill()
        rig.store(range(N))
        damage(rig)
        rig.poison()
        one, other = rig.request("one"), rig.request("other")
        assert rig.lookups(range(N), one) == [HIT] * N  # a claim
        result = rig.load(range(N), one)
        assert not result.success and list(result.successful_keys or ()) == keys_of(there)
        rig.check(want, there, asked=range(N))
        for request in (one, other):
            assert rig.lookups(range(N), request) == [MISS if n in lost else HIT for n in range(N)]
        rig.rows[:] = want
        assert rig.store(range(N)).success
        for request in (one, other):
            assert rig.lookups(range(N), request) == [HIT] * N
        rig.poison()
        assert rig.load(range(N), one).success
        rig.check(want, range(N))


def check_lost(rig: Rig, want: NDArray[np.uint8], lost: set[int]) -> None:
    """A load of everything brings all but these, with the right bytes; the request that saw it misses them."""
    rig.poison()
    request = rig.request("a")
    result = rig.load(range(N), request)
    there = [n for n in range(N) if n not in lost]
    assert not result.success and list(result.successful_keys or ()) == keys_of(there)
    rig.check(want, there, asked=range(N))
    assert rig.lookups(range(N), request) == [MISS if n in lost else HIT for n in range(N)]


@pytest.mark.parametrize("how", ["truncated", "deleted"])
def test_files_that_were_cut_or_are_gone(tmp_root: Path, how: str) -> None:
    with Rig(tmp_root) as rig:
        want = rig.fill()
        rig.store(range(N))
        path, offset, _ = rig.where(5)
        lost = {n for n in range(N) if rig.where(n)[0] == path and (how == "deleted" or rig.where(n)[1] >= offset)}
    if how == "truncated":
        os.truncate(path, offset + 100)
    else:
        path.unlink()
    with Rig(tmp_root) as rig:
        check_lost(rig, want, lost)


def test_truncated_while_open(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        want = rig.fill()
        rig.store(range(N))
        path, offset, _ = rig.where(5)
        lost = {n for n in range(N) if rig.where(n)[0] == path and rig.where(n)[1] >= offset}
        os.truncate(path, offset + 100)
        check_lost(rig, want, lost)


def test_an_errno_is_a_miss_for_the_request_that_saw_it(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        want = rig.fill()
        rig.store(range(N))
        rig.poison()
        one, other = rig.request("one"), rig.request("other")
        with FaultyIO() as io:
            rule = io.fail("pread", errno.EIO)
            result = rig.load([5], one)
            assert rule.hits
        assert not result.success and result.successful_keys is None
        rig.step(preempted=["one"])
        assert rig.lookups([4, 5, 6], one) == [HIT, MISS, HIT]
        assert rig.lookups([4, 5, 6], other) == [HIT] * 3
        rig.rows[:] = want
        assert rig.store([5]).success  # it is there
        assert rig.lookups([5], one) == [HIT]
        rig.tier.on_request_finished(one)
        rig.tier.on_request_finished(other)
        assert not any(rig.tier._failed.values())


def test_a_request_that_is_over_leaves_nothing_behind(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        request = rig.request("a")
        with FaultyIO() as io:
            io.delay("pread", 0.05)
            job = rig.submit(range(N), request, load=True)
            rig.tier.on_request_finished(request)
            assert not rig.wait(job).success
        assert rig.tier._failed == {}


def test_nothing_is_kept_of_keys_that_a_store_found_there(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        rig.fill()
        rig.store([0, 1])
        a = rig.request("a")
        with FaultyIO() as io:
            io.fail("pread", errno.EIO, offset=rig.extent(0))
            assert not rig.load([0, 1], a).success
        assert rig.store([0, 1], a).success  # nothing was damaged, so nothing is written
        assert rig.lookups([0, 1], a) == [HIT, HIT]
        rig.tier.on_request_finished(a)
        assert not rig.tier._journal._awaited and not any(rig.tier._failed.values())


def test_another_process_s_store_is_a_hit_again(tmp_root: Path) -> None:
    """The journal hears of stores whoever made them: what the table takes in is what the policy is told."""
    with Rig(tmp_root) as rig:
        rig.fill()
        request = rig.request("a")
        assert not rig.load([1], request).success
        digest, tier = rig.tier._engine.digest, rig.tier
        slot = tier._engine._slot
        (taken,) = tier._store.reserve(digest, slot, 1)  # beside the tier's own jobs
        assert tier._store.commit(digest, [(key_of(1), taken, 1)]) == [True]
        rig.step()
        assert rig.lookups([1], request) == [HIT]


@pytest.mark.parametrize("call", ["pwrite", "fallocate"])
def test_a_full_disk(tmp_root: Path, call: str) -> None:
    with Rig(tmp_root, breaker_failures=0) as rig:
        want = rig.fill()
        request = rig.request("a")
        with FaultyIO() as io:
            rule = io.fail(call, errno.ENOSPC)
            result = rig.store(range(N))
            assert rule.hits
        assert not result.success and says_bytes(result, 0)
        assert rig.lookups(range(N), request) == [MISS] * N
        deadline = time.monotonic() + 10
        while not rig.store(range(N)).success:  # a slab that could not be made is not tried again at once
            assert time.monotonic() < deadline
        rig.poison()
        assert rig.load(range(N), request).success
        rig.check(want, range(N))


@pytest.mark.parametrize("keys", [{"deadline_s": 3.0}, {"recompute_tokens_per_s": N * 16 / 3.0}], ids=str)
def test_a_read_that_hangs_ends_at_the_deadline(tmp_root: Path, keys: dict[str, float]) -> None:
    with Rig(tmp_root, **keys) as rig:
        want = rig.fill()
        rig.store(range(N))
        rig.poison()
        request = rig.request("a")
        with FaultyIO() as io:
            io.hang("pread", after=5, times=1)  # one of the two threads; the other goes on
            started = time.monotonic()
            result = rig.load(range(N), request)
            assert 2.9 < time.monotonic() - started < 30
            arrived = set(result.successful_keys or ())
            (late,) = (n for n in range(N) if key_of(n) not in arrived)
            there = [n for n in range(N) if n != late]
            rig.check(want, there, asked=range(N))
            rig.rows[late] = 0x77  # its next owner's
            io.release()
            time.sleep(0.2)
        assert (rig.rows[late] == 0x77).all()
        assert rig.lookups([late], request) == [MISS]
        assert rig.lookups([late], rig.request("b")) == [HIT]


def test_stores_are_bounded_and_what_is_too_much_is_counted(tmp_root: Path) -> None:
    with Rig(tmp_root, max_queued_store_chunks=8) as rig, FaultyIO() as io:
        rig.fill()
        request = rig.request("a")
        io.delay("pwrite", 0.5)
        started = time.perf_counter()
        jobs = [rig.submit([n], request, load=False) for n in range(60)]
        assert time.perf_counter() - started < 10  # the writes of all would take 15 s and more
        results = [rig.wait(job) for job in jobs]
        dropped = [not result.success for result in results]
        assert dropped[:8] == [False] * 8 and sum(dropped) > 30
        assert rig.metric("kvxfer_store_chunks_total", outcome="dropped") == sum(dropped)
        assert rig.lookups(range(60), request) == [MISS if lost else HIT for lost in dropped]


def test_eviction_leaves_a_load_under_way_alone(tmp_root: Path) -> None:
    with Rig(tmp_root, chunks=200, capacity_bytes=8 << 20, slab_bytes=1 << 20, index_map_bytes=1 << 20) as rig:
        want = rig.fill()
        request = rig.request("a")
        assert rig.store(range(N)).success
        rig.poison()
        with FaultyIO() as io:
            io.delay("pread", 0.4, times=2)
            job = rig.submit(range(N), request, load=True)
            rig.rows[N:] = want[N:]
            for start in range(N, 180, 24):
                rig.store(range(start, start + 24))
            rig.rows[N:] = 0x5C
            assert rig.metric("kvxfer_evicted_chunks_total", reason="capacity") > 0
            assert rig.wait(job).success
        for n in range(N):
            assert (rig.rows[n] == want[n]).all()


def test_drain_leaves_every_result(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig, FaultyIO() as io:
        rig.fill()
        request = rig.request("a")
        io.delay("pwrite", 0.02)
        jobs = [rig.submit([n], request, load=False) for n in range(20)] + [rig.submit([50], request, load=True)]
        rig.tier.drain_jobs()
        rig.poll()
        assert set(rig.results) == set(jobs) and not rig.open
        assert [rig.results[job].success for job in jobs] == [True] * 20 + [False]


def test_drain_is_bounded_where_a_read_never_returns(tmp_root: Path) -> None:
    with Rig(tmp_root, drain_timeout_s=0.3) as rig, FaultyIO() as io:
        rig.fill()
        rig.store(range(N))
        rig.poison()
        request = rig.request("a")
        io.hang("pread", offset=rig.extent(5))
        job = rig.submit(range(N), request, load=True)
        started = time.monotonic()
        rig.tier.drain_jobs()
        assert time.monotonic() - started < 10
        rig.poll()
        assert key_of(5) not in (rig.results[job].successful_keys or ())
        rig.poison()
        io.release()
        time.sleep(0.2)
        rig.check(rig.rows, [])  # what was late touched nothing
        rig.poll()


def test_drain_waits_for_a_read_straight_into_a_row(tmp_root: Path) -> None:
    with Rig(tmp_root, drain_timeout_s=0.2, rows="straight") as rig, FaultyIO() as io:
        rig.fill()
        rig.store(range(N))
        rig.poison()
        rule = io.hang("pread", offset=rig.extent(5), times=1)
        job = rig.submit(range(N), rig.request("a"), load=True)
        until(lambda: rule.hits == 1, "a read hangs")  # a drain cancels what has not begun
        drain = threading.Thread(target=rig.tier.drain_jobs)
        drain.start()
        drain.join(1.0)
        assert drain.is_alive(), "the row may still be written"
        io.release()
        drain.join(20)
        assert not drain.is_alive()
        after = rig.rows.copy()
        rig.poll()
        assert not rig.results[job].success
        time.sleep(0.2)
        assert (rig.rows == after).all(), "no row is touched after a drain"


def test_memory_stays_where_a_read_was_left_behind(tmp_root: Path) -> None:
    rig = Rig(tmp_root, rows="straight")
    rig.fill()
    rig.store([0])
    with FaultyIO() as io:
        rule = io.hang("pread", offset=rig.extent(0), times=1)
        rig.submit([0], rig.request("a"), load=True)
        while not rule.hits:
            time.sleep(0.01)
        started = time.monotonic()
        rig.tier.shutdown()
        assert time.monotonic() - started < 20
        rig.view.release()  # as vLLM does
        rig.rows = np.zeros((0, 0), np.uint8)
        with pytest.raises(BufferError):
            rig.memory.close()


def test_drain_is_bounded_where_a_slab_is_never_made(tmp_root: Path) -> None:
    with Rig(tmp_root, drain_timeout_s=0.2) as rig, FaultyIO() as io:
        rig.fill()
        request = rig.request("a")
        rule = io.hang("fallocate")
        job = rig.submit(range(N), request, load=False)
        while not rule.hits:
            time.sleep(0.01)
        rig.tier.drain_jobs()
        rig.poll()
        assert not rig.results[job].success
        rig.rows[:] = 0  # other chunks' by now: stored under these keys they would be wrong
        io.release()
        time.sleep(0.5)
        rig.poll()
        assert rig.lookups(range(N), request) == [MISS] * N


def test_drain_forgets_only_where_asked(tmp_root: Path) -> None:
    for reset, answer in ((False, HIT), (True, MISS)):
        with Rig(tmp_root, reset_on_drain=reset) as rig:
            rig.fill()
            rig.store([0])
            rig.tier.drain_jobs()
            time.sleep(0.3)
            assert rig.lookups([0], rig.request("a")) == [answer]
            assert rig.store([1], rig.request("after")).success
            assert rig.lookups([1], rig.request("b")) == [HIT]


def test_shutdown_lets_go_of_memory_and_root(tmp_root: Path) -> None:
    rig = Rig(tmp_root)
    rig.fill()
    request = rig.request("a")
    rig.store([0])
    with FaultyIO() as io:
        io.hang("pread", offset=rig.extent(0))
        rig.submit([0], request, load=True)
        rig.submit([1, 2, 3], request, load=False)
        started = time.monotonic()
        rig.tier.shutdown()
        rig.tier.shutdown()
        assert time.monotonic() - started < 10
    assert rig.lookups([0], request) == [MISS]
    job = rig.submit([0], request, load=True)
    rig.poll()
    assert not rig.results[job].success
    rig.tier.drain_jobs()
    rig.tier.touch([key_of(0)], request)
    assert list(rig.tier.take_events()) == [] and rig.tier.get_stats() is None
    rig.view.release()  # as vLLM does; raises where somebody holds the buffer
    rig.rows = np.zeros((0, 0), np.uint8)
    rig.memory.close()
    with Rig(tmp_root) as again:
        assert again.lookups([0], again.request("b")) == [HIT]


def test_lookup_never_raises(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        request = rig.request("a")
        for key in (b"", b"x" * 200, key_of(0)):
            assert rig.tier.lookup(key, request) is MISS
        job = rig.submit([0], request, load=False, keys=[b"x" * 200])
        assert not rig.wait(job).success
        rig.tier._store.close()
        assert rig.lookups([0], request) == [MISS]
        job = rig.submit([0, 1], request, load=True)
        assert not rig.wait(job).success


def test_groups_have_rows_of_their_own(tmp_root: Path) -> None:
    with Rig(tmp_root, vllm={"groups": 2}) as rig:
        want = rig.fill()
        request = rig.request("a")
        keys = [key_of(0, 0), key_of(0, 1), key_of(1, 1)]
        assert rig.store([0, 1, 2], keys=keys).success
        rig.poison()
        result = rig.load([1, 2, 3], request, keys=[key_of(0, 1), key_of(1, 1), key_of(1, 0)])
        assert list(result.successful_keys or ()) == [key_of(0, 1), key_of(1, 1)]
        rig.check(want, [1, 2], asked=[1, 2, 3])
