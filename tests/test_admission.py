"""Second touch, the write budget and the queue's length by themselves, on a clock that the test winds."""

from __future__ import annotations

import math
import threading
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.admission import (
    Backlog,
    SecondTouch,
    WriteBudget,
    dwpd_to_bytes_per_s,
    dwpd_to_endurance_bytes,
    life_years,
)
from kvxfer.errors import ConfigError
from kvxfer.testing import ManualClock

# ---- second touch ------------------------------------------------------------------------------------------------


def test_the_second_offer_is_admitted_and_so_is_every_later_one() -> None:
    touch = SecondTouch(100)
    assert [touch.offer(name) for name in (b"a", b"b", b"a", b"a", b"b", b"c")] == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]


@given(st.integers(1, 6), st.lists(st.integers(0, 15), max_size=200))
def test_what_is_remembered_against_the_list_of_all_offers(names: int, offers: list[int]) -> None:
    """Fewer than `names` other names never push one out, and 2 * names always do."""
    touch, history = SecondTouch(names), list[int]()
    for name in offers:
        answer = touch.offer(name)
        since = None
        if name in history:
            since = len(set(history[len(history) - history[::-1].index(name) :]))  # others, after its last offer
        if since is None:
            assert not answer, "never offered, and taken for known"
        elif since < names:
            assert answer, f"{since} others came between, and it was forgotten"
        elif since >= 2 * names:
            assert not answer, f"{since} others came between, and memory is for {2 * names}"
        history.append(name)


def test_memory_is_bounded_whatever_is_offered() -> None:
    touch = SecondTouch(10)
    for name in range(10_000):
        assert not touch.offer(name)
        assert len(touch._young) <= 10 and len(touch._old) <= 10
    assert touch.offer(9999) and not touch.offer(0)


def test_a_hundred_thousand_strangers_are_strangers() -> None:
    touch = SecondTouch(1 << 20)
    assert not any(touch.offer(b"%d" % number) for number in range(100_000))
    assert all(touch.offer(b"%d" % number) for number in range(100_000))


@pytest.mark.parametrize("names", [0, -1, 1.5, True, "8", None])
def test_a_filter_of_nothing_is_refused(names: object) -> None:
    with pytest.raises(ConfigError, match="names="):
        SecondTouch(names)


# ---- the budget --------------------------------------------------------------------------------------------------


class Bucket(RuleBasedStateMachine):
    """Takes, gives back and lets time pass, in exact arithmetic beside it. Time may jump, and go back."""

    RATE, BURST = 7, 1000

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(50.0)
        self.bucket = WriteBudget(self.RATE, self.BURST, self.clock)
        self.model, self.seen = Fraction(self.BURST), Fraction(50)
        self.taken: list[tuple[Fraction, int]] = []  # when, and how much

    def fill(self) -> Fraction:
        now = Fraction(self.clock.now)
        if now > self.seen:
            self.model = min(Fraction(self.BURST), self.model + (now - self.seen) * self.RATE)
            self.seen = now
        return self.model

    @rule(seconds=st.integers(0, 64).map(lambda n: n / 8))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([3600.0, 1e6]))
    def is_suspended(self, seconds: float) -> None:
        self.clock.advance(seconds)
        assert self.bucket.available() == self.BURST

    @rule(seconds=st.integers(1, 40).map(lambda n: n / 4))
    def goes_back(self, seconds: float) -> None:
        self.clock.now -= seconds

    @rule(nbytes=st.integers(1, 1200))
    def take(self, nbytes: int) -> None:
        there = self.fill()
        assert self.bucket.take(nbytes) is (nbytes <= there)
        if nbytes <= there:
            self.model -= nbytes
            self.taken.append((self.seen, nbytes))

    @rule(nbytes=st.integers(1, 300), most=st.integers(0, 9))
    def take_some(self, nbytes: int, most: int) -> None:
        there = self.fill()
        got = self.bucket.take_some(nbytes, most)
        assert got == min(most, there // nbytes)
        self.model -= got * nbytes
        if got:
            self.taken.append((self.seen, got * nbytes))

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self) -> None:
        _, nbytes = self.taken.pop()
        self.bucket.give_back(nbytes)
        self.model = min(Fraction(self.BURST), self.fill() + nbytes)

    @invariant()
    def is_as_the_model(self) -> None:
        assert self.bucket.available() == self.fill()

    @invariant()
    def no_window_has_more_than_its_share(self) -> None:
        for first, (since, _) in enumerate(self.taken):
            total = 0
            for until, nbytes in self.taken[first:]:
                total += nbytes
                assert total <= self.RATE * (until - since) + self.BURST


TestBucket = pytest.mark.filterwarnings("default")(Bucket.TestCase)
TestBucket.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_processes_share_the_rate_and_each_has_the_burst() -> None:
    clock, sharers = ManualClock(), [2]
    bucket = WriteBudget(100, 1000, clock, sharers=lambda: sharers[0])
    assert bucket.take(1000) and not bucket.take(1)
    clock.advance(2)
    assert bucket.available() == 100
    sharers[0] = 0  # nobody has counted yet
    clock.advance(1)
    assert bucket.available() == 200


def test_threads_take_no_more_than_there_is() -> None:
    bucket = WriteBudget(1, 1000, ManualClock())
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(sum(bucket.take(7) for _ in range(100)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(got) == 1000 // 7 and bucket.available() == 1000 % 7


@pytest.mark.parametrize("rate, burst", [(0, 1), (-1, 1), (math.inf, 1), (math.nan, 1), (1, 0), (1, -5), (1, math.inf)])
def test_a_budget_that_cannot_be_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(ConfigError, match=r"bytes_per_s=|burst_bytes="):
        WriteBudget(rate, burst)


# ---- the queue's length ------------------------------------------------------------------------------------------


def test_a_queue_is_as_long_as_its_bytes_at_the_speed_of_late() -> None:
    clock = ManualClock()
    backlog = Backlog(clock)
    assert (backlog.seconds(), backlog.bytes_per_s) == (0, None)
    backlog.add(1000)
    assert backlog.seconds() == 0, "nothing is known yet"
    clock.advance(2)
    assert backlog.seconds() == 2, "it has waited for so long"
    backlog.wrote(200)
    backlog.add(-200)
    assert backlog.bytes_per_s == 100 and backlog.seconds() == 8
    backlog.add(-800)
    assert backlog.seconds() == 0
    clock.advance(1e6)  # idle: no time at all
    backlog.add(500)
    assert backlog.seconds() == 5 and backlog.bytes_per_s == 100


def test_a_device_that_hangs_gets_slow() -> None:
    clock = ManualClock()
    backlog = Backlog(clock)
    backlog.add(300)
    clock.advance(1)
    backlog.wrote(100)
    backlog.add(-100)
    assert backlog.seconds() == 2
    clock.advance(9)
    assert backlog.seconds() == 20  # 100 bytes in ten seconds
    backlog.wrote(0)  # one failed: the device answers, and took nothing
    assert backlog.seconds() == 2


def test_what_was_long_ago_fades() -> None:
    clock = ManualClock()
    backlog = Backlog(clock)
    backlog.add(1 << 40)
    for rate in (1000, 10):
        for _ in range(100):
            clock.advance(1)
            backlog.wrote(rate)
        assert backlog.bytes_per_s == pytest.approx(rate, rel=0.02)


# ---- a drive's life ----------------------------------------------------------------------------------------------


def test_a_drives_life() -> None:
    drive = 3_840_000_000_000
    assert dwpd_to_bytes_per_s(1, drive) == pytest.approx(44_444_444.4)
    assert dwpd_to_endurance_bytes(1, drive, 5) == pytest.approx(7.0128e15)  # a data sheet says 7,008 TB: 365 days
    assert life_years(dwpd_to_bytes_per_s(1, drive), dwpd_to_endurance_bytes(1, drive, 5)) == pytest.approx(5)
    assert life_years(100e6, 7008e12) == pytest.approx(7008e12 / 100e6 / 86400 / 365.25)
    assert life_years(0, 1) == math.inf


def test_asking_what_was_offered_is_no_offer() -> None:
    touch = SecondTouch(2)
    assert not touch.knows("a") and not touch.knows("a") and not touch.offer("a")
    assert touch.knows("a")
    for name in "bc":  # now "a" is among the old
        touch.offer(name)
    assert touch.knows("a") and touch.knows("c") and not touch.knows("d")
