"""The measured rate of recomputing."""

from __future__ import annotations

import math

import pytest

from kvxfer.pace import ENOUGH, SAMPLES, Pace


def paced(*samples: tuple[int, float]) -> Pace:
    pace = Pace()
    for tokens, seconds in samples:
        pace.observe(tokens, seconds)
    return pace


def test_no_estimate_before_there_is_enough() -> None:
    assert Pace().tokens_per_s is None
    assert paced(*[(512, 0.1)] * (ENOUGH - 1)).tokens_per_s is None
    assert paced(*[(512, 0.1)] * ENOUGH).tokens_per_s == pytest.approx(5120)


@pytest.mark.parametrize("sample", [(0, 1.0), (-5, 1.0), (512, 0.0), (512, -1.0), (512, math.nan)])
def test_what_cannot_be_is_ignored(sample: tuple[int, float]) -> None:
    assert paced(*[sample] * 10).tokens_per_s is None
    assert paced(*[(512, 0.1)] * ENOUGH, sample).tokens_per_s == pytest.approx(5120)


def test_decoding_says_nothing_of_prefills() -> None:
    prefills = [(2048, 0.1)] * 5
    pace = paced(*prefills, *[(8, 0.02)] * (10 * SAMPLES))
    assert pace.tokens_per_s == pytest.approx(20480)
    assert paced(*[(8, 0.02)] * 20, *prefills).tokens_per_s == pytest.approx(20480)


def test_what_came_before_the_first_prefills_is_forgotten() -> None:
    assert paced(*[(400, 0.0004)] * SAMPLES, *[(2048, 0.1)] * ENOUGH).tokens_per_s == pytest.approx(20480)


def test_it_is_on_the_fast_side_but_no_outlier() -> None:
    steps = [(1000, 0.1)] * 10 + [(1000, 0.2)] * 10 + [(1000, 0.0001)]
    assert paced(*steps).tokens_per_s == pytest.approx(10_000)


def test_it_follows_a_server_that_became_slower() -> None:
    assert paced(*[(1000, 0.1)] * SAMPLES, *[(1000, 1.0)] * SAMPLES).tokens_per_s == pytest.approx(1000)
