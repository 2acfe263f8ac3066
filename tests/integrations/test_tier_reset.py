"""A reset for new weights (reset_on_drain): whatever the drive does, old bytes are hits no more."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from kvxfer.integrations.vllm_reset import Reset
from kvxfer.testing import FaultyIO
from tests.integrations.harness import HIT, MISS, Rig

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("fault", ["fail", "hang"])
def test_a_reset_that_cannot_be_written_down_is_one_all_the_same(tmp_root: Path, fault: str) -> None:
    with Rig(tmp_root, reset_on_drain=True, drain_timeout_s=0.5) as rig:
        want = rig.fill()
        assert rig.store([0, 1, 2]).success
        with FaultyIO() as io:
            rule = io.fail("rename", errno.EIO) if fault == "fail" else io.hang("rename", times=1)
            start = time.monotonic()
            rig.tier.drain_jobs()
            assert time.monotonic() - start < 30 and rule.hits > 0
            new = rig.request("new")
            assert rig.lookups([0, 1, 2], new) == [MISS] * 3
            assert not rig.store([3], new).success
            rig.poison()
            assert not rig.load([0, 1], new).success
            rig.check(want, [])
        rig.rows[:] = want
        end = time.monotonic() + 30
        while not rig.store([3], rig.request("later")).success:
            assert time.monotonic() < end
        assert rig.lookups([0, 1, 2, 3], rig.request("last")) == [MISS] * 3 + [HIT]
        assert rig.tier._store.weight_epoch == 1


def test_what_was_computed_before_a_reset_is_not_stored_after_it(tmp_root: Path) -> None:
    with Rig(tmp_root, reset_on_drain=True) as rig:
        rig.fill()
        old = rig.request("old")
        rig.store([0], old)
        rig.tier.drain_jobs()
        assert not rig.store([0, 1], old).success  # vLLM offers all of a running request's chunks once more
        assert rig.lookups([0, 1], old) == [MISS] * 2
        new = rig.request("new")
        assert rig.lookups([0, 1], new) == [MISS] * 2
        assert rig.store([1], new).success
        assert (rig.lookups([1], new), rig.lookups([1], old)) == ([HIT], [MISS])
        rig.tier.on_request_finished(old)
        assert rig.lookups([1], rig.request("old")) == [HIT]


def test_a_drain_without_the_key_leaves_nothing_out(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        rig.fill()
        old = rig.request("old")
        rig.store([0], old)
        rig.tier.drain_jobs()
        assert rig.store([1], old).success
        assert rig.lookups([0, 1], old) == [HIT, HIT]


def test_two_resets_while_one_is_tried_are_both_done() -> None:
    done: list[int] = []
    fails = [True, True, False, False]

    def act() -> None:
        if fails.pop(0):
            raise OSError(errno.EIO, "no")
        done.append(1)

    reset = Reset(act)
    assert not reset.ask(0.0)
    assert reset.ask(30.0) and not reset.outdated
    assert 1 <= len(done) <= 2
    reset.close()
