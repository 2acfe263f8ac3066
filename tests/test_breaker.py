"""The circuit breaker by itself, on a clock that the test winds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.breaker import JITTER, Breaker, BreakerState, Permit
from kvxfer.testing import ManualClock


def breaker_of(clock: ManualClock, **changed: Any) -> Breaker:
    fields = {"failures": 3, "cooldown_s": 1.0, "max_cooldown_s": 8.0, "probes": 2, "uniform": lambda: 0.0}
    return Breaker(clock=clock, **(fields | changed))


def run(breaker: Breaker, answered: int, failed: int, last: int | None = None) -> int:
    """A job of these chunks; how many passed."""
    permit = breaker.admit(answered + failed)
    if permit.chunks:
        breaker.settle(permit, answered, failed, failed if last is None and not answered else last or 0)
    return permit.chunks


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def test_it_opens_after_so_many_failures_in_a_row(clock: ManualClock) -> None:
    breaker = breaker_of(clock)
    run(breaker, 0, 2)
    run(breaker, 1, 2, last=0)  # an answer after them starts anew
    assert breaker.state() is BreakerState.CLOSED
    run(breaker, 5, 2, last=2)
    assert breaker.state() is BreakerState.CLOSED
    run(breaker, 0, 1)
    assert breaker.state() is BreakerState.OPEN and breaker.opened == 1
    assert breaker.admit(10).chunks == breaker.room(10) == 0


def test_nothing_said_is_no_failure(clock: ManualClock) -> None:
    breaker = breaker_of(clock)
    for _ in range(100):
        breaker.settle(breaker.admit(5), 0, 0, 0)
        breaker.fail(0)
    assert breaker.state() is BreakerState.CLOSED


def test_it_probes_with_few_and_closes_on_an_answer(clock: ManualClock) -> None:
    breaker = breaker_of(clock)
    run(breaker, 0, 3)
    clock.advance(0.999)
    assert breaker.state() is BreakerState.OPEN and 0 < breaker.again_in_s <= 0.0011
    clock.advance(0.001)
    assert breaker.state() is BreakerState.HALF_OPEN and breaker.room(10) == 2
    probe = breaker.admit(10)
    assert probe.chunks == 2 and breaker.admit(10).chunks == 0
    breaker.settle(probe, 2, 0, 0)
    assert breaker.state() is BreakerState.CLOSED and breaker.admit(10).chunks == 10


def test_a_probe_that_fails_doubles_the_cooldown_up_to_its_cap(clock: ManualClock) -> None:
    breaker = breaker_of(clock)
    run(breaker, 0, 3)
    waits = []
    for _ in range(6):
        waits.append(breaker.again_in_s)
        clock.advance(waits[-1])
        breaker.settle(breaker.admit(1), 0, 1, 1)
        assert breaker.state() is BreakerState.OPEN
    assert waits == pytest.approx([1, 2, 4, 8, 8, 8]) and breaker.opened == 7
    clock.advance(8)
    breaker.settle(breaker.admit(1), 1, 0, 0)
    run(breaker, 0, 3)
    assert breaker.again_in_s == pytest.approx(1), "it starts again from the first"


def test_a_probe_that_tells_nothing_lets_another_try(clock: ManualClock) -> None:
    breaker = breaker_of(clock)
    run(breaker, 0, 3)
    clock.advance(1)
    for _ in range(5):
        probe = breaker.admit(2)
        assert probe.chunks == 2
        breaker.settle(probe, 0, 0, 0)  # its deadline came first, say
    assert breaker.state() is BreakerState.HALF_OPEN


def test_probes_that_never_come_back_do_not_block_it_for_ever(clock: ManualClock) -> None:
    breaker = breaker_of(clock)
    run(breaker, 0, 3)
    clock.advance(1)
    lost = breaker.admit(2)
    assert breaker.room(1) == 0
    clock.advance(8)
    assert breaker.room(1) == 1
    breaker.settle(lost, 0, 2, 2)
    assert breaker.state() is BreakerState.HALF_OPEN, "it is of another time"


def test_what_was_let_through_before_decides_nothing_later(clock: ManualClock) -> None:
    breaker = breaker_of(clock)
    early = breaker.admit(5)
    run(breaker, 0, 3)
    breaker.settle(early, 5, 0, 0)
    assert breaker.state() is BreakerState.OPEN
    clock.advance(1)
    breaker.settle(early, 0, 5, 5)
    assert breaker.state() is BreakerState.HALF_OPEN
    assert breaker.admit(5).chunks == 2


def test_calls_that_never_returned_count_without_a_permit(clock: ManualClock) -> None:
    breaker = breaker_of(clock)
    breaker.fail(2)
    assert breaker.state() is BreakerState.CLOSED
    breaker.fail(1)
    assert breaker.state() is BreakerState.OPEN
    clock.advance(1)
    assert breaker.state() is BreakerState.HALF_OPEN
    breaker.fail(1)
    assert breaker.state() is BreakerState.OPEN and breaker.opened == 2


def test_none_opens_it_where_failures_is_0(clock: ManualClock) -> None:
    breaker = breaker_of(clock, failures=0)
    run(breaker, 0, 10_000)
    breaker.fail(10_000)
    assert breaker.state() is BreakerState.CLOSED


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_the_cooldown_has_jitter(clock: ManualClock, draw: float) -> None:
    breaker = breaker_of(clock, uniform=lambda: draw)
    run(breaker, 0, 3)
    assert breaker.again_in_s == pytest.approx(1 + JITTER * draw)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 9)),
        st.tuples(st.just("settle"), st.sampled_from(["answered", "failed", "nothing"])),
        st.tuples(st.just("advance"), st.floats(0, 10)),
        st.tuples(st.just("fail"), st.integers(0, 3)),
    ),
    max_size=80,
)


@given(STEPS)
def test_whatever_happens_it_lets_probes_through_again(steps: list[tuple[str, Any]]) -> None:
    clock = ManualClock()
    breaker = breaker_of(clock)
    under_way: list[Permit] = []
    opened = [0]
    for what, argument in steps:
        state = breaker.state()
        if what == "admit":
            permit = breaker.admit(argument)
            limit = {BreakerState.CLOSED: argument, BreakerState.HALF_OPEN: 2, BreakerState.OPEN: 0}[state]
            assert permit.chunks <= limit and (state is not BreakerState.CLOSED or permit.chunks == argument)
            if permit.chunks:
                under_way.append(permit)
        elif what == "settle" and under_way:
            permit = under_way.pop(0)
            chunks = permit.chunks
            counts = {"answered": (chunks, 0, 0), "failed": (0, chunks, chunks), "nothing": (0, 0, 0)}[argument]
            breaker.settle(permit, *counts)
        elif what == "advance":
            clock.advance(argument)
        elif what == "fail":
            breaker.fail(argument)
        opened.append(breaker.opened)
    assert all(a <= b <= a + 1 for a, b in pairwise(opened))
    clock.advance(8)
    assert breaker.admit(1).chunks == 1, "after the longest cool-down something always passes"
