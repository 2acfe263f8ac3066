"""KvxferTier over several roots: a list as `root_dir`. What a drive does costs the chunks that lie on it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import ConfigError, KvxferError
from kvxfer.testing import FaultyIO
from tests.integrations.harness import HIT, MISS, Rig, key_of, keys_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

N = 16
LIFT = 64  # chunks of another cache on the second drive, so that its offsets are none of the first's


def drives(tmp_root: Path, count: int = 2) -> list[str]:
    return [str(tmp_root / f"drive {number}") for number in range(count)]


def rig_over(tmp_root: Path, count: int = 2, *, lift: bool = False, **keys: Any) -> Rig:
    """A rig over that many drives, in processes' usual small sizes."""
    roots = drives(tmp_root, count)
    if lift:
        with Rig(Path(roots[1]), weights_fingerprint="what lies there already") as other:
            other.fill(9)
            assert other.store(range(LIFT)).success
    return Rig(tmp_root, root_dir=roots, **keys)


def home(rig: Rig, number: int) -> int:
    """Which drive has a chunk; it is one."""
    (found,) = [n for n, engine in enumerate(rig.tier._roots._engines) if engine.contains(key_of(number))]
    return found


def those_on(rig: Rig, drive: int, numbers: Any = range(N)) -> list[int]:
    return [number for number in numbers if home(rig, number) == drive]


def extent(rig: Rig, number: int) -> tuple[Path, int, int]:
    """File and offsets of a chunk's slot."""
    drive = home(rig, number)
    found = rig.tier._roots.stores[drive].locate(rig.tier._roots._engines[drive].digest, key_of(number))
    assert found is not None
    path, offset, layout = found
    return path, offset, offset + layout.slot_bytes


def span(rig: Rig, numbers: list[int]) -> tuple[int, int]:
    """Offsets that hold these chunks' slots."""
    each = [extent(rig, number)[1:] for number in numbers]
    return min(low for low, _ in each), max(high for _, high in each)


def test_chunks_spread_and_come_back(tmp_root: Path) -> None:
    with rig_over(tmp_root) as rig:
        want, a = rig.fill(), rig.request("a")
        job = rig.submit(range(N), a, load=False)
        assert rig.wait(job).success
        assert len(those_on(rig, 0)) == len(those_on(rig, 1)) == N // 2
        assert rig.lookups(range(N + 1), a) == [HIT] * N + [MISS]
        rig.poison()
        loaded = rig.load(range(N), a)
        assert loaded.success and not loaded.successful_keys
        rig.check(want, range(N))
        for _ in range(20):  # no second result
            rig.poll()
        assert not rig.tier._jobs and not rig.tier._engine._jobs
    with rig_over(tmp_root, 3) as rig:  # a drive more: what was there is found
        assert rig.lookups(range(N), rig.request("b")) == [HIT] * N


def test_a_drive_that_fails_reads_costs_its_chunks_until_they_are_stored_again(tmp_root: Path) -> None:
    """They go to the other drive then: a drive that answers no read must not keep them from everybody."""
    with rig_over(
        tmp_root, lift=True, breaker_failures=4, breaker_cooldown_s=600.0, breaker_max_cooldown_s=600.0
    ) as rig:
        want, a = rig.fill(), rig.request("a")
        assert rig.store(range(N)).success
        lost = those_on(rig, 1)
        there = [number for number in range(N) if number not in lost]
        with FaultyIO() as io:
            io.fail("pread", errno.EIO, offset=span(rig, lost))
            rig.poison()
            loaded = rig.load(range(N), a)
            assert not loaded.success and set(loaded.successful_keys) == set(keys_of(there))
            rig.check(want, there, asked=range(N))
            b = rig.request("b")
            assert rig.lookups(lost, b) == [MISS] * len(lost)  # its breaker is open
            assert rig.lookups(there, b) == [HIT] * len(there)
            rig.rows[:] = want
            assert rig.store(lost).success
            assert rig.lookups(range(N), rig.request("c")) == [HIT] * N
            assert rig.lookups(range(N), a) == [HIT] * N
            rig.poison()
            assert rig.load(range(N), rig.request("d")).success
            rig.check(want, range(N))


def test_a_drive_that_is_full_gets_no_more(tmp_root: Path) -> None:
    with rig_over(
        tmp_root, lift=True, breaker_failures=2, breaker_cooldown_s=600.0, breaker_max_cooldown_s=600.0
    ) as rig:
        want = rig.fill()
        assert rig.store(range(N)).success
        _, high = span(rig, those_on(rig, 1))
        with FaultyIO() as io:
            io.fail("pwrite", errno.ENOSPC, offset=(high, high + (8 << 20)))
            rig.store(range(N, 2 * N))  # half of it fails
            assert rig.store(range(N, 2 * N)).success
            assert rig.store(range(2 * N, 3 * N)).success
            rig.poison()
            assert rig.load(range(3 * N), rig.request("a")).success
            rig.check(want, range(3 * N))


def test_a_drive_that_hangs_ends_its_chunks_with_the_timeout(tmp_root: Path) -> None:
    with rig_over(tmp_root, lift=True, io_timeout_s=0.5) as rig:
        want, a = rig.fill(), rig.request("a")
        assert rig.store(range(N)).success
        lost = those_on(rig, 1)
        there = [number for number in range(N) if number not in lost]
        with FaultyIO() as io:
            io.hang("pread", offset=span(rig, lost))
            rig.poison()
            loaded = rig.load(range(N), a)
            assert not loaded.success and set(loaded.successful_keys) == set(keys_of(there))
            assert rig.lookups(range(N), a) == [MISS if number in lost else HIT for number in range(N)]
            rig.check(want, there, asked=range(N))
            start = time.monotonic()
            rig.tier.drain_jobs()
            rig.tier.shutdown()
            assert time.monotonic() - start < 30


def test_a_drive_that_is_damaged_costs_its_chunks_once(tmp_root: Path) -> None:
    with rig_over(tmp_root) as rig:
        want, a = rig.fill(), rig.request("a")
        assert rig.store(range(N)).success
        lost = those_on(rig, 1)
        for number in lost:
            path, low, _ = extent(rig, number)
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), b"\x00" * 4096, low)
        rig.poison()
        loaded = rig.load(range(N), a)
        there = [number for number in range(N) if number not in lost]
        assert set(loaded.successful_keys) == set(keys_of(there))
        rig.check(want, there, asked=range(N))
        assert rig.lookups(lost, rig.request("b")) == [MISS] * len(lost)
        rig.rows[:] = want
        assert rig.store(range(N), a).success
        assert rig.lookups(range(N), a) == [HIT] * N


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_root_that_cannot_be_opened_gives_the_others_back(tmp_root: Path, bad: int) -> None:
    tmp_root.mkdir()
    Path(drives(tmp_root, 3)[bad]).write_text("a file")
    for _ in range(2):
        with pytest.raises(KvxferError) as caught:
            rig_over(tmp_root, 3)
        assert f"drive {bad}" in str(caught.value) and "cannot start" in "".join(caught.value.__notes__)
    Path(drives(tmp_root, 3)[bad]).unlink()
    with rig_over(tmp_root, 3) as rig:
        rig.fill()
        assert rig.store(range(N)).success


def test_whatever_stops_the_start_gives_the_roots_back(tmp_root: Path) -> None:
    """Not errors of kvxfer's alone."""
    with rig_over(tmp_root) as rig:
        spec = rig.spec
    events, spec.kv_events_config = spec.kv_events_config, None  # of a vLLM to come, say
    with pytest.raises(AttributeError):
        rig_over(tmp_root, spec=spec, enable_kv_events=True)
    spec.kv_events_config = events
    with rig_over(tmp_root, spec=spec) as rig:
        rig.fill()
        assert rig.store(range(N)).success


def test_a_directory_by_two_names_is_refused(tmp_root: Path) -> None:
    tmp_root.mkdir()
    (tmp_root / "there").mkdir()
    (tmp_root / "link").symlink_to("there")
    for second in ("there", "link", "there/", "x/../there"):
        with pytest.raises(ConfigError, match="names a directory twice"):
            Rig(tmp_root, root_dir=[str(tmp_root / "there"), str(tmp_root / second)])
    with pytest.raises(ConfigError, match="lies in"):
        Rig(tmp_root, root_dir=[str(tmp_root / "there"), str(tmp_root / "there" / "in")])
    with pytest.raises(ConfigError, match="lies in"):
        Rig(tmp_root, root_dir=[str(tmp_root / "link" / "in"), str(tmp_root / "there")])


def test_two_stores_of_a_key_at_once_take_one_place(tmp_root: Path) -> None:
    with rig_over(tmp_root) as rig:
        want, a = rig.fill(), rig.request("a")
        with FaultyIO() as io:
            io.delay("pwrite", 0.2, times=2)
            jobs = [rig.submit(range(4), a, load=False), rig.submit([3, 1, 2, 0], a, load=False)]
            jobs += [rig.submit([5, 5, 5], a, load=False)]
            assert all(rig.wait(job).success for job in jobs)
        assert {home(rig, number) for number in range(4)} == {0, 1}
        assert rig.metric("kvxfer_entries") == 5
        rig.poison()
        assert rig.load([0, 1, 2, 3, 5], a).success
        rig.check(want, [0, 1, 2, 3, 5])


def test_a_key_that_repeats_arrives_where_all_its_rows_do(tmp_root: Path) -> None:
    """vLLM takes a key of `successful_keys` for every row that was to have it."""
    with rig_over(tmp_root) as rig:
        rig.fill()
        assert rig.store([0, 1]).success
        with FaultyIO() as io:
            io.fail("pread", errno.EIO, times=1, offset=extent(rig, 0)[1:])
            rig.poison()
            job = rig.submit([0, 0, 0], rig.request("a"), load=True, rows=[0, 2, 4])
            result = rig.wait(job)
        assert not result.success and not result.successful_keys


@pytest.mark.parametrize("end", ["drain", "shutdown"])
def test_every_job_has_a_result_whatever_ends_it(tmp_root: Path, end: str) -> None:
    with rig_over(tmp_root, lift=True, drain_timeout_s=0.3) as rig:
        rig.fill()
        assert rig.store(range(N)).success
        lost = those_on(rig, 1)
        with FaultyIO() as io:
            io.hang("pread", offset=span(rig, lost))
            a = rig.request("a")
            jobs = [rig.submit([number], a, load=True) for number in range(N)]
            jobs += [rig.submit([N + number], a, load=False) for number in range(N)]
            rig.tier.on_request_finished(a)
            (rig.tier.drain_jobs if end == "drain" else rig.tier.shutdown)()
            rig.poll()
            assert set(jobs) <= set(rig.results)
            assert not rig.tier.has_pending_work()
            for job in jobs:
                assert rig.results[job].success or job - jobs[0] in lost or end == "shutdown" or job - jobs[0] >= N
            rig.poll()
        assert not rig.tier._failed.get("a")


def test_a_reset_reaches_every_root_and_every_event(tmp_root: Path) -> None:

    with rig_over(tmp_root, reset_on_drain=True, enable_kv_events=True) as rig:
        rig.fill()
        assert rig.store(range(N)).success
        rig.tier.drain_jobs()
        end = time.monotonic() + 20
        while rig.lookups(range(N), rig.request("b")) != [MISS] * N:
            assert time.monotonic() < end
            rig.step()
        later = rig.request("later")  # those that were there at the reset are left out
        for _ in range(200):
            if rig.store(range(N), later).success and rig.lookups(range(N), rig.request("c")) == [HIT] * N:
                break
            time.sleep(0.02)
        else:
            raise AssertionError("nothing is stored after a reset")


def test_events_say_what_is_there_though_one_drive_forgets(tmp_root: Path) -> None:
    """Another process raises the weight epoch of one of the roots."""
    there: set[bytes] = set()
    small = {"capacity_bytes": 8 << 20, "slab_bytes": 1 << 20, "index_map_bytes": 1 << 20, "chunks": 400}
    with rig_over(tmp_root, enable_kv_events=True, vllm={"events": True}, **small) as rig:
        rig.fill()
        first, second = rig.tier._roots._engines

        def take() -> None:
            for event in rig.tier.take_events():
                if event.removed:
                    assert set(event.keys) <= there
                    there.difference_update(event.keys)
                else:
                    assert not set(event.keys) & there
                    there.update(event.keys)

        for start in [*range(0, 384, 48), 0, 48]:  # more than fits, and some again
            assert rig.store(range(start, start + 48)).success
            take()
            assert there == {key for key in keys_of(range(400)) if rig.tier._engine.contains(key)}
        kept = {key for key in keys_of(range(400)) if first.contains(key)}
        assert kept and there - kept
        before = second.digest
        bump = [sys.executable, "-m", "kvxfer.cli", "epoch", "bump", "--yes", drives(tmp_root)[1]]
        subprocess.run(bump, check=True, capture_output=True)
        end = time.monotonic() + 60
        while second.digest == before or there != kept:
            assert time.monotonic() < end
            rig.step()
            take()
            time.sleep(0.01)


def test_a_forks_child_gets_misses_and_failed_jobs_and_its_parent_goes_on(tmp_root: Path) -> None:
    with rig_over(tmp_root, enable_kv_events=True, vllm={"events": True}) as rig:
        rig.fill()
        a = rig.request("a")
        assert rig.store(range(4), a).success
        if not (child := os.fork()):
            wrong = 1
            try:
                signal.alarm(60)
                jobs = {rig.submit([0], a, load=True), rig.submit([9], a, load=False)}
                rig.tier.touch(keys_of([0]), a)
                rig.poll()
                rig.step()
                list(rig.tier.take_events())
                rig.tier.get_stats()
                missed = rig.lookups([0], a) == [MISS]
                rig.tier.drain_jobs()
                rig.tier.shutdown()
                failed = not any(rig.results[job].success for job in jobs)
                wrong = not (missed and failed)
            finally:
                os._exit(wrong)
        assert os.waitpid(child, 0)[1] == 0
        assert rig.lookups(range(4), a) == [HIT] * 4
        assert rig.store(range(8), a).success


class Broken:
    """An engine with a defect wherever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_no_defect_reaches_vllm(tmp_root: Path) -> None:
    keys = {"recompute_tokens_per_s": "measured", "reset_on_drain": True, "enable_kv_events": True}
    with rig_over(tmp_root, vllm={"events": True}, **keys) as rig:
        rig.fill()
        a, tier, engine = rig.request("a"), rig.tier, rig.tier._engine
        assert rig.store(range(4), a).success
        tier._engine = Broken()
        try:
            assert rig.lookups([0, 1], a) == [MISS, MISS]
            tier.touch(keys_of([0]), a)
            jobs = {rig.submit([0], a, load=True), rig.submit([1], a, load=False)}
            rig.poll()
            rig.step()
            list(tier.take_events())
            assert tier.get_stats() is None
            tier.drain_jobs()
            rig.poll()
            assert not any(rig.results[job].success for job in jobs)
            tier.on_request_finished(a)
            tier.shutdown()
            assert not tier.has_pending_work()
        finally:
            engine.shutdown()
