"""What vLLM's manager may ask of any secondary tier: of KvxferTier and, beside it, of vLLM's own `fs` and `example`.

KNOWN, in kinds.py, says where the others do not hold it, and why: each of those must fail, or the table is wrong.
What they do instead is asserted at the end.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.harness import HIT, MISS, Rig, key_of, keys_of
from tests.integrations.kinds import CASES, KINDS, KNOWN, NOT_ASKED, Kind, damage, stored

pytestmark = pytest.mark.vllm

N = 12


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every tier that a test is asked of, with what is known of it."""
    if "tier" not in metafunc.fixturenames:
        return
    test, cases = metafunc.function.__name__, CASES.get(metafunc.function.__name__, ())
    params = []
    for name, kind in KINDS.items():
        if test in NOT_ASKED.get(name, ()):
            continue
        for case in cases or (None,):
            reason = KNOWN.get(name, {}).get(test if case is None else f"{test}[{case}]")
            marks = (
                [pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"{name}: {reason}")] if reason else []
            )
            values = (kind,) if case is None else (kind, case)
            params.append(pytest.param(*values, id=name if case is None else f"{name}-{case}", marks=marks))
    metafunc.parametrize("tier" if not cases else ("tier", "case"), params)


def test_the_tables_name_tests_that_there_are() -> None:
    named = {test.partition("[")[0] for table in (KNOWN, NOT_ASKED) for tests in table.values() for test in tests}
    assert {*named, *CASES} <= {name for name, value in globals().items() if callable(value)}
    assert not KNOWN["kvxfer"] and "kvxfer" not in NOT_ASKED


def arrived(result: Any, keys: Sequence[bytes]) -> list[bytes]:
    """What a load says it brought, in the order that it was asked for."""
    assert not (result.success and result.successful_keys)
    told = keys if result.success else result.successful_keys or ()
    return [key for key in keys if key in set(told)]


def answers(rig: Rig, numbers: Iterable[int], name: str) -> list[Any]:
    """What a request of its own is told."""
    request = rig.request(name)
    try:
        return rig.settled(keys_of(numbers), request)
    finally:
        rig.tier.on_request_finished(request)


def ends(call: Callable[[], None], tier: Kind) -> bool:
    """Whether a call ends within far more than a tier's bounds; where it has none, nobody waits for it for long."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(30.0 if tier.bounded else 3.0)
    return not thread.is_alive()


# ---- jobs and their results --------------------------------------------------------------------------------------


def test_every_job_has_one_result(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        rig.fill()
        request = rig.request("a")
        jobs = [rig.submit(range(start, start + 4), request, load=False) for start in range(0, 40, 4)]
        jobs += [
            rig.submit(range(start, start + 6), request, load=True) for start in range(0, 58, 6)
        ]  # some are not there
        jobs += [rig.submit([], request, load=load, keys=[]) for load in (False, True)]
        rig.tier.on_request_finished(request)
        for job in jobs:
            rig.wait(job)
        time.sleep(0.1)
        rig.poll()  # a second result, or one of a job that is not known, fails there
        assert sorted(rig.results) == jobs and not rig.open
        assert all(rig.results[job].success for job in jobs[:10])
        assert not rig.tier.has_pending_work()


def test_a_hit_is_what_was_stored_and_nothing_else(tier: Kind, tmp_root: Path) -> None:
    even = list(range(0, N, 2))
    with tier.rig(tmp_root) as rig:
        rig.fill()
        assert answers(rig, range(N), "before") == [MISS] * N
        assert rig.store(even).success
        assert answers(rig, range(N), "after") == [MISS if n % 2 else HIT for n in range(N)]
        other = rig.request("other group")
        assert rig.settled(keys_of(even, group=1), other) == [MISS] * len(even)


def test_a_lookup_answers_at_once(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        rig.fill()
        rig.store([0])
        assert rig.lookups([0, 1], rig.request("a")) == [HIT, MISS]


def test_lookups_of_many_keys(tier: Kind, tmp_root: Path) -> None:
    there = set(range(0, 3000, 97))
    with tier.rig(tmp_root) as rig:
        rig.fill()
        assert rig.store(sorted(there), rows=range(len(there))).success
        assert answers(rig, range(3000), "a") == [HIT if n in there else MISS for n in range(3000)]


def test_a_load_brings_what_was_stored(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        want = rig.fill()
        assert rig.store(range(N)).success
        rig.poison()
        assert rig.load(range(N), rig.request("a")).success
        rig.check(want, range(N))


def test_what_is_there_may_be_stored_again(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        rig.fill()
        assert [rig.store(range(N)).success for _ in range(2)] == [True, True]
        assert answers(rig, range(N), "a") == [HIT] * N


def test_another_process_finds_what_was_stored(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        want = rig.fill()
        assert rig.store(range(N)).success
    with tier.rig(tmp_root) as rig:
        rig.poison()
        assert answers(rig, range(N + 1), "a") == [HIT] * N + [MISS]
        assert rig.load(range(N), rig.request("b")).success
        rig.check(want, range(N))


def test_keys_of_two_groups_are_not_mixed_up(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root, vllm={"groups": 2}) as rig:
        want = rig.fill()
        assert rig.store([0, 1, 2], keys=[key_of(0, 0), key_of(0, 1), key_of(1, 1)]).success
        rig.poison()
        request = rig.request("a")
        asked = [key_of(0, 1), key_of(1, 1), key_of(1, 0)]
        assert rig.settled(asked, request) == [HIT, HIT, MISS]
        result = rig.load([1, 2, 3], request, keys=asked)
        assert arrived(result, asked) == asked[:2]
        rig.check(want, [1, 2], asked=[1, 2, 3])


def test_rows_are_the_callers_once_the_result_is_there(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        want = rig.fill()
        assert rig.store(range(N)).success
        rig.poison()  # another chunk's by now
        assert rig.load(range(N), rig.request("a")).success
        rig.check(want, range(N))
        rig.poison()
        time.sleep(0.2)
        rig.check(want, [])  # nothing comes late


def test_loads_beside_stores_of_the_same_keys(tier: Kind, tmp_root: Path) -> None:
    """Whatever a load says has arrived is right, the store done or not."""
    with tier.rig(tmp_root) as rig:
        want = rig.fill()
        request = rig.request("a")
        for start in range(0, 32, 4):
            numbers = range(start, start + 4)
            there = [n + 32 for n in numbers]
            rig.rows[there] = 0
            store = rig.submit(numbers, request, load=False)
            load = rig.submit(numbers, request, load=True, rows=there)
            keys = keys_of(numbers)
            for key in arrived(rig.wait(load), keys):
                n = start + keys.index(key)
                assert (rig.rows[n + 32] == want[n]).all()
            assert rig.wait(store).success
        assert answers(rig, range(32), "b") == [HIT] * 32


# ---- what is not there, or not right -----------------------------------------------------------------------------


def test_a_hole_costs_what_is_missing_and_nothing_else(tier: Kind, tmp_root: Path) -> None:
    there = [n for n in range(N) if n not in (3, 7)]
    with tier.rig(tmp_root) as rig:
        want = rig.fill()
        assert rig.store(there).success
        rig.poison()
        result = rig.load(range(N), rig.request("a"))
        assert not result.success and arrived(result, keys_of(range(N))) == keys_of(there)
        rig.check(want, there, asked=range(N))


def test_what_is_damaged_does_not_arrive_and_all_else_does(tier: Kind, case: str, tmp_root: Path) -> None:
    with tier.rig(tmp_root, **tier.apart) as rig:
        want = rig.fill()
        assert rig.store(range(N)).success
        places = stored(rig, tier, range(N))
    lost = damage(places, case, 5, 7)
    there = [n for n in range(N) if n not in lost]
    with tier.rig(tmp_root, **tier.apart) as rig:
        rig.poison()
        request = rig.request("a")
        rig.settled(keys_of(range(N)), request)
        result = rig.load(range(N), request)
        assert arrived(result, keys_of(range(N))) == keys_of(there)
        rig.check(want, there, asked=range(N))
        assert rig.settled(keys_of(range(N)), request) == [MISS if n in lost else HIT for n in range(N)]


def test_what_was_damaged_is_right_once_stored_again(tier: Kind, case: str, tmp_root: Path) -> None:
    with tier.rig(tmp_root, **tier.apart) as rig:
        want = rig.fill()
        assert rig.store(range(N)).success
        places = stored(rig, tier, range(N))
    damage(places, case, 5, 7)
    with tier.rig(tmp_root, **tier.apart) as rig:
        request = rig.request("a")
        rig.load(range(N), request)  # finds out
        rig.tier.on_request_finished(request)
        rig.rows[:] = want
        assert rig.store(range(N)).success
        rig.poison()
        assert answers(rig, range(N), "b") == [HIT] * N
        assert rig.load(range(N), rig.request("c")).success
        rig.check(want, range(N))


def test_what_failed_for_a_request_is_a_miss_for_it(tier: Kind, tmp_root: Path) -> None:
    """Or it would be promoted again with every step, for ever."""
    with tier.rig(tmp_root) as rig:
        rig.fill()
        rig.store([5])
        request = rig.request("a")
        assert rig.settled(keys_of([5]), request) == [HIT]
        with tier.fails("read") as fault:
            assert not rig.load([5], request).success
            assert fault.hits()
        rig.step()
        assert rig.settled(keys_of([5]), request) == [MISS]
        rig.tier.on_request_finished(request)
        assert answers(rig, [5], "b") == [HIT]  # it was the storage, not the chunk


def test_what_failed_for_a_request_is_a_hit_after_a_store(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        rig.fill()
        rig.store([5])
        request = rig.request("a")
        rig.settled(keys_of([5]), request)
        with tier.fails("read"):
            assert not rig.load([5], request).success
        assert rig.store([5]).success
        rig.step()
        assert rig.settled(keys_of([5]), request) == [HIT]


# ---- storage that fails ------------------------------------------------------------------------------------------


def test_storage_errors_do_not_raise(tier: Kind, case: str, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        want = rig.fill()
        if case == "read":
            rig.store(range(N))
            rig.poison()
        request = rig.request("a")
        with tier.fails(case, errno.EIO if case == "read" else errno.ENOSPC) as fault:
            for _ in range(5):
                result = rig.wait(rig.submit(range(N), request, load=case == "read"))
                assert not result.success and not arrived(result, keys_of(range(N)))
            assert fault.hits()
            rig.settled(keys_of(range(N)), request)
        rig.tier.on_request_finished(request)
        if case == "write":
            assert answers(rig, range(N), "b") == [MISS] * N
            deadline = time.monotonic() + 20
            while not rig.store(range(N)).success:  # it may leave a disk alone for a while
                assert time.monotonic() < deadline
                time.sleep(0.05)
            rig.poison()
        assert rig.load(range(N), rig.request("c")).success
        rig.check(want, range(N))


def test_nobody_waits_for_a_write_that_hangs(tier: Kind, tmp_root: Path) -> None:
    """Where somebody did, this would not end."""
    with tier.rig(tmp_root) as rig:
        rig.fill()
        request = rig.request("a")
        with tier.hangs("write") as fault:
            jobs = [rig.submit([n], request, load=False) for n in range(8)]
            deadline = time.monotonic() + 20
            while not fault.hits():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for _ in range(20):
                rig.poll()
                rig.step()
                rig.tier.touch(keys_of([0]), request)
                list(rig.tier.take_events())
                rig.tier.get_stats()
            assert rig.settled(keys_of(range(8)), request) == [MISS] * 8
            assert not rig.results and sorted(rig.open) == jobs
            fault.release()
            assert all(rig.wait(job).success for job in jobs)


def test_a_load_goes_ahead_of_stores_that_hang(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        rig.fill()
        rig.store([50])
        request = rig.request("a")
        with tier.hangs("write") as fault:
            stores = [rig.submit([n], request, load=False) for n in range(40)]
            before = -1
            while before != fault.hits():  # until as many hang as can
                before = fault.hits()
                time.sleep(0.5)
            try:
                assert rig.wait(rig.submit([50], request, load=True), timeout=20).success
            finally:
                fault.release()
                for job in stores:
                    rig.wait(job)


# ---- drain and shutdown ------------------------------------------------------------------------------------------


def test_a_drain_leaves_nothing_under_way(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root) as rig:
        want = rig.fill()
        rig.store(range(20, 30))
        request = rig.request("a")
        with tier.slow("write", 0.02), tier.slow("read", 0.02):
            jobs = [rig.submit([n], request, load=False) for n in range(8)]
            jobs += [rig.submit([n], request, load=True, rows=[n + 20]) for n in range(20, 30)]
            rig.tier.drain_jobs()
            rig.poll()
            assert sorted(rig.results) == [0, *jobs] and not rig.open
            assert all(result.success for result in rig.results.values())
            assert (rig.rows[40:50] == want[20:30]).all()
            rig.poison()
            time.sleep(0.2)
            rig.check(want, [])
        assert rig.load(range(8), request).success
        rig.check(want, range(8))


def test_a_drain_ends_though_a_read_does_not(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root, **tier.bounded) as rig:
        rig.fill()
        rig.store(range(N))
        rig.poison()
        with tier.hangs("read") as fault:
            job = rig.submit([0], rig.request("a"), load=True)
            try:
                assert ends(rig.tier.drain_jobs, tier), "still waiting"
                rig.poll()
                assert not rig.results[job].success
                rig.rows[:] = 0x77  # the next owner's
            finally:
                fault.release()
            time.sleep(0.2)
            assert (rig.rows == 0x77).all()


def test_a_shutdown_ends_though_a_read_does_not(tier: Kind, tmp_root: Path) -> None:
    with tier.rig(tmp_root, **tier.bounded) as rig:
        rig.fill()
        rig.store(range(N))
        with tier.hangs("read") as fault:
            rig.submit([0], rig.request("a"), load=True)
            deadline = time.monotonic() + 20
            while not fault.hits():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            try:
                assert ends(rig.tier.shutdown, tier), "still waiting"
            finally:
                fault.release()


def test_a_shutdown_lets_go_of_the_memory_and_may_come_twice(tier: Kind, tmp_root: Path) -> None:
    rig = tier.rig(tmp_root)
    rig.fill()
    rig.store(range(N))
    rig.load(range(N), rig.request("a"))
    rig.tier.shutdown()
    rig.tier.shutdown()
    rig.view.release()  # as vLLM does; raises where somebody holds the buffer
    rig.rows = np.zeros((0, 0), np.uint8)
    rig.memory.close()


# ---- configuration and metrics -----------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_by_name(tier: Kind, tmp_root: Path) -> None:
    with pytest.raises(Exception, match="no_such_key"):
        tier.rig(tmp_root, no_such_key=5)


def test_metrics_that_are_told_were_declared(tier: Kind, tmp_root: Path) -> None:
    """vLLM asserts it, with an engine's death."""
    told: set[str] = set()
    with tier.rig(tmp_root) as rig:
        declared = type(rig.tier).build_metric_definitions({})
        assert all(name.startswith("vllm:") for name in declared)
        rig.fill()
        for turn in range(4):
            rig.store(range(turn * 4, turn * 4 + 4))
            rig.load(range(turn * 4, turn * 4 + 6), rig.request(f"{turn}"))
            time.sleep(0.1)
            stats = rig.tier.get_stats()
            for name, values in stats.data["data"].items() if stats else ():
                assert all(len(labels) == len(declared[name].labelnames) for labels in values)
                told.add(name)
    assert told <= set(declared) and bool(told) == bool(declared)


# ---- what the others do instead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["zeroed", "flipped", "swapped"])
def test_fs_gives_wrong_bytes_and_calls_it_a_success(tmp_root: Path, how: str) -> None:
    kind = KINDS["fs"]
    with kind.rig(tmp_root) as rig:
        want = rig.fill()
        rig.store(range(N))
        lost = damage(stored(rig, kind, range(N)), how, 5, 7)
        rig.poison()
        assert rig.load(range(N), rig.request("a")).success
        assert {n for n in range(N) if (rig.rows[n] != want[n]).any()} == lost


@pytest.mark.parametrize("how", ["deleted", "truncated"])
def test_fs_keeps_what_came_before_the_first_bad_chunk(tmp_root: Path, how: str) -> None:
    kind = KINDS["fs"]
    with kind.rig(tmp_root) as rig:
        want = rig.fill()
        rig.store(range(N))
        damage(stored(rig, kind, range(N)), how, 5, 7)
        rig.poison()
        result = rig.load(range(N), rig.request("a"))
        assert list(result.successful_keys) == keys_of(range(5))
        rig.check(want, range(5), asked=range(N))


def test_example_calls_it_a_success_and_moves_nothing(tmp_root: Path) -> None:
    with KINDS["example"].rig(tmp_root) as rig:
        rig.fill()
        rig.store(range(N))
        rig.poison()
        assert rig.load(range(N), rig.request("a")).success
        rig.check(rig.rows, [])
