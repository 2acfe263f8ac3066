"""Warnings that a failing disk cannot turn into a flood, and that machines can read."""

from __future__ import annotations

import errno
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import StoreError
from kvxfer.report import INTERVAL_S, Reporter
from kvxfer.testing import ManualClock


class Lines(logging.Handler):
    """What a logger of its own is told."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.records: list[Any] = []  # LogRecords, with fields of their own
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(5.0)


@pytest.fixture
def lines() -> Lines:
    return Lines("kvxfer.test")


@pytest.fixture
def reporter(clock: ManualClock) -> Reporter:
    return Reporter("kvxfer.test", clock)


def test_the_first_of_a_kind_shows_at_once(reporter: Reporter, lines: Lines) -> None:
    reporter.warn("read", "no", errno=errno.EIO, path="slab-1", count=3, job=7)
    reporter.warn("write", "neither")
    assert lines.texts == ["no", "neither"]
    read, write = lines.records
    assert (read.event, read.errno, read.path, read.count, read.kept_back, read.job) == (
        "read",
        errno.EIO,
        "slab-1",
        3,
        0,
        7,
    )
    assert (write.event, write.errno, write.path, write.count, write.kept_back) == ("write", None, None, 1, 0)
    assert read.levelno == logging.WARNING


def test_only_what_is_not_of_our_own_leaves_its_trace(reporter: Reporter, lines: Lines) -> None:
    reporter.failed("expected", "no store", StoreError("it is closed"), job=7)
    reporter.failed("defect", "no store", defect := KeyError("x"))
    assert lines.texts == ["no store: it is closed", "no store: 'x'"]
    said, traced = lines.records
    assert not said.exc_info and said.job == 7
    assert traced.exc_info[1] is defect


def test_a_thousand_in_a_row_are_two_lines_with_the_right_total(
    reporter: Reporter, lines: Lines, clock: ManualClock
) -> None:
    for number in range(1000):
        reporter.warn("read", f"error {number}", errno=errno.EIO, path=f"slab-{number % 7}")
    assert lines.texts == ["error 0"]
    reporter.flush()
    assert len(lines.records) == 1, "not yet"
    clock.advance(INTERVAL_S)
    reporter.flush()
    reporter.flush()
    assert lines.texts == ["error 0", "error 999 (999 like this since the last line)"]
    assert sum(record.count for record in lines.records) == 1000
    assert lines.records[1].errno == errno.EIO and lines.records[1].path == "slab-5"


def test_what_was_kept_back_shows_with_the_next(reporter: Reporter, lines: Lines, clock: ManualClock) -> None:
    for count in (1, 10, 100):
        reporter.warn("read", "no", count=count)
    clock.advance(INTERVAL_S)
    reporter.warn("read", "again", count=1000)
    assert lines.texts == ["no", "again (2 more like this before)"]
    assert [record.count for record in lines.records] == [1, 1110]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(1, 100)),
            st.floats(0, 2 * INTERVAL_S),
            st.just("flush"),
        ),
        max_size=60,
    )
)
def test_counts_always_add_up_and_lines_are_bounded(steps: list[object]) -> None:
    clock, lines = ManualClock(), Lines("kvxfer.test")
    reporter, warned = Reporter("kvxfer.test", clock), dict.fromkeys("abc", 0)
    for step in steps:
        if isinstance(step, tuple):
            reporter.warn(step[0], "text", count=step[1])
            warned[step[0]] += step[1]
        elif isinstance(step, float):
            clock.advance(step)
        else:
            reporter.flush()
    for kind in "abc":
        assert sum(record.event == kind for record in lines.records) <= 1 + clock() / INTERVAL_S
    reporter.flush(everything=True)
    for kind, total in warned.items():
        assert sum(record.count for record in lines.records if record.event == kind) == total


def test_kinds_that_fell_silent_are_forgotten(reporter: Reporter, lines: Lines, clock: ManualClock) -> None:
    for number in range(5000):
        clock.advance(0.001)
        reporter.warn(f"slab {number}", "gone")
    assert len(lines.records) == 5000 and len(reporter._kinds) <= 512


def test_a_defect_has_its_trace(reporter: Reporter, lines: Lines) -> None:
    try:
        raise ZeroDivisionError("x")
    except ZeroDivisionError as exc:
        reporter.warn("defect", "broken", exc_info=exc)
    assert lines.records[0].exc_info is not None and lines.records[0].exc_info[0] is ZeroDivisionError


def test_a_field_cannot_overwrite_what_every_record_has(reporter: Reporter, lines: Lines) -> None:
    with pytest.raises(KeyError, match="name"):
        reporter.warn("read", "no", name="x")


def test_an_error_gives_its_number_and_its_file(reporter: Reporter, lines: Lines) -> None:
    reporter.warn("slab", "cannot be made", error=OSError(errno.ENOSPC, "no space", "slab-00000001.kvx"))
    reporter.warn("index", "failed", error=ValueError("no number"))
    assert [(line.errno, line.path) for line in lines.records] == [(errno.ENOSPC, "slab-00000001.kvx"), (None, None)]
