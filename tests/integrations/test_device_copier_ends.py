"""KvxferTieringSpec's jobs on a device's streams: what waits for what; one result for each job; the end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import DeviceError, EngineClosed, ForkError, LayoutError
from kvxfer.integrations.vllm_copier import MOST_PASSED
from kvxfer.integrations.vllm_device_copier import DeviceRowCopier
from tests.integrations.device_copier_rig import BLOCKS, LONG, ROWS, World, every_warning, job_of, row_job, world

__all__ = ["every_warning"]


@pytest.fixture
def plain() -> Iterable[World]:
    both = world("direct")
    yield both
    both.device.frozen = both.device.lost = False
    both.device.failing.clear()
    assert both.copier.close(LONG)


def waits(both: World) -> list[list[str]]:
    """Of each job so far, the streams whose events its own waits for."""
    found: list[list[str]] = []
    for call, stream, *what in both.device.calls:
        if call == "wait":
            found[-1].append(f"{stream} for {what[0].partition('.')[0]}")
        elif call == "record" and stream == "model":
            found.append([])
    return found


STORES, LOADS, URGENT = "123"


def test_what_waits_for_what(plain: World) -> None:
    plain.device.frozen = True
    plain.submit(job_of([1, 2], [1]), store=True)
    plain.submit(job_of([3, 4], [2]), store=False)  # meets nothing
    plain.submit(job_of([5, 6], [1]), store=False)  # the row that is being stored
    plain.submit(job_of([3, 7], [3]), store=True)  # a block that is being loaded
    plain.submit(job_of([5, 0], [4]), store=False, urgent=True)  # a block that another load fills
    plain.submit(job_of([1, 2], [5]), store=False, urgent=True)  # blocks that are being stored
    plain.submit(job_of([1, 2], [1]), store=True)  # after the first: on the same stream; and after the last load
    model = [f"{lane} for model" for lane in (STORES, LOADS, LOADS, STORES, URGENT, URGENT, STORES)]
    want: list[list[str]] = [[], [], ["2 for 1"], ["1 for 2"], ["3 for 2"], ["3 for 1"], ["1 for 2", "1 for 3"]]
    assert waits(plain) == [[first, *more] for first, more in zip(model, want, strict=True)]
    plain.device.frozen = False
    assert len(plain.settle()) == 7


def test_loads_have_more_urgent_streams_than_stores(plain: World) -> None:
    assert [stream.urgent for stream in plain.device.streams] == [False, False, True, True]


def test_looking_back_is_bounded_and_then_waits_for_all_that_is_older(plain: World) -> None:
    plain.device.frozen = True
    for _ in range(MOST_PASSED + 1):
        plain.submit(job_of([1, 2], [1]), store=True)
    plain.submit(job_of([3, 4], [2]), store=False)
    assert waits(plain)[-1] == ["2 for model", "2 for 1"]
    plain.device.frozen = False
    plain.settle()
    plain.submit(job_of([3, 4], [2]), store=False)
    assert waits(plain)[-1] == ["2 for model"]  # what has ended is not looked at
    plain.settle()


def test_submit_and_finished_wait_for_nothing(plain: World) -> None:
    plain.device.frozen = True
    for number in range(5):
        plain.submit(job_of([1, 2], [number]), store=True)
    assert plain.copier.finished() == []
    plain.device.frozen = False
    done = plain.settle()
    assert [each.job_id for each in done.values()] == list(range(5)) and plain.copier.finished() == []
    assert all(each.is_store and each.seconds > 0 for each in done.values())


def test_wait_is_for_the_jobs_named_and_leaves_their_results(plain: World) -> None:
    plain.copier.wait({7, 8})  # nobody submitted those
    plain.submit(job_of([1, 2], [1]), store=True)
    plain.submit(job_of([3, 4], [2]), store=True)
    plain.copier.wait({0})
    assert np.array_equal(plain.region.rows[1], plain.want_region.rows[1])
    assert 0 in {each.job_id for each in plain.copier.finished()}
    plain.settle()


def test_while_one_waits_others_submit(plain: World) -> None:
    plain.submit(job_of([1, 2], [1]), store=True)
    waiting, go = threading.Event(), threading.Event()
    event = plain.copier._unfinished[0].end

    def wait() -> None:
        waiting.set()
        assert go.wait(LONG)

    event.wait = wait  # type: ignore[method-assign]
    thread = threading.Thread(target=plain.copier.wait, args=({0},))
    thread.start()
    assert waiting.wait(LONG)
    plain.submit(job_of([3, 4], [2]), store=False)
    go.set()
    thread.join(LONG)
    plain.moved.pop(0)
    plain.settle()


def test_jobs_that_cannot_be_are_refused_and_put_nothing_on_a_stream(plain: World) -> None:
    calls = len(plain.device.calls)
    with pytest.raises(LayoutError, match=f"block id {BLOCKS} must be"):
        plain.submit(job_of([BLOCKS, 1], [1]), store=True)
    with pytest.raises(LayoutError, match=f"row id {ROWS} must be"):
        plain.submit(job_of([1, 2], [ROWS]), store=True)
    assert len(plain.device.calls) == calls
    made = plain.submit(job_of([1, 2], [1]), store=True)
    with pytest.raises(ValueError, match=f"job {made.job_id} is not finished yet"):
        plain.copier.submit(made)
    assert len(plain.settle()) == 1


def test_a_job_that_fails_on_its_way_ends_once_and_only_when_its_part_has(
    plain: World, caplog: pytest.LogCaptureFixture
) -> None:
    plain.device.frozen = True
    plain.device.failing["queue"] = MemoryError("no room for tables")
    job = job_of([1, 2], [1])
    plain.copier.submit(row_job(900, True, job, 2))
    del plain.device.failing["queue"]
    assert "job 900 failed: no room for tables" in caplog.text
    assert plain.copier.finished() == []  # what came before on the stream might be a part of it
    plain.device.frozen = False
    plain.submit(job_of([3, 4], [2]), store=True)
    plain.copier.wait({900, 0})
    assert [(each.job_id, each.success, each.nbytes) for each in plain.copier.finished()] == [
        (900, False, 0), (0, True, 224),
    ]  # fmt: skip


@pytest.mark.parametrize("seen_by", ["finished", "wait", "close"])
def test_a_lost_device_fails_every_job_once_and_takes_no_more(seen_by: str, caplog: pytest.LogCaptureFixture) -> None:
    both = world("direct")
    both.device.frozen = True
    both.submit(job_of([1, 2], [1]), store=True)
    both.submit(job_of([3, 4], [2]), store=False)
    both.device.lost = True
    with caplog.at_level(logging.WARNING, "kvxfer.engine"):
        if seen_by == "wait":
            both.copier.wait({0, 1})
        closed = both.copier.close(LONG) if seen_by == "close" else False
        done = both.copier.finished()
    assert sorted((each.job_id, each.success, each.nbytes) for each in done) == [(0, False, 0), (1, False, 0)]
    assert "the device was lost" in caplog.text and both.copier.finished() == []
    with pytest.raises(EngineClosed if closed else DeviceError):
        both.submit(job_of([1, 2], [1]), store=True)
    both.copier.wait({0, 1})
    assert both.copier.close(0.0) and both.plan.closed >= 1  # nothing runs there any more


def test_a_device_that_takes_nothing_refuses_the_job(plain: World) -> None:
    plain.device.failing["record"] = DeviceError("no")
    with pytest.raises(DeviceError, match="no"):
        plain.submit(job_of([1, 2], [1]), store=True)
    del plain.device.failing["record"]
    plain.submit(job_of([1, 2], [1]), store=True)
    assert list(plain.settle()) == [1]


def test_where_an_end_is_not_known_close_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is on its stream, and no event says when it is done."""
    both = world("direct")
    real = both.device.queue
    calls: list[None] = []

    def queue(stream: Any, work: Any) -> None:
        calls.append(real(stream, work))
        both.device.failing["record"] = DeviceError("no")

    monkeypatch.setattr(both.device, "queue", queue)
    with pytest.raises(DeviceError):
        both.submit(job_of([1, 2], [1]), store=True)
    assert calls and not both.copier.close(0.05) and not both.plan.closed


def test_close_is_bounded_and_waits_for_the_last_copy() -> None:
    both = world("direct")
    both.device.frozen = True
    both.submit(job_of([1, 2], [1]), store=True)
    started = time.monotonic()
    assert not both.copier.close(0.05) and both.plan.closed == 0
    assert time.monotonic() - started < LONG / 2
    with pytest.raises(EngineClosed):
        both.submit(job_of([1, 2], [1]), store=True)
    both.device.frozen = False
    assert both.copier.close(LONG)
    both.same()
    assert [each.job_id for each in both.copier.finished()] == [0]
    assert both.copier._engine.parts is None  # nothing here refers to vLLM's memory any more


def test_a_forks_child_is_told_and_closes_nothing(plain: World) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            plain.copier.submit(row_job(1, True, job_of([1, 2], [1]), 2))
            answer = b"accepted"
        except ForkError:
            answer = b"closed" if plain.copier.close(0.0) or plain.plan.closed else b"told"
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"told"
    os.waitpid(child, 0)
    os.close(reading)


def test_who_forgets_close_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *what: kept.append(what))
    both = world("direct")
    ((close, patience),) = kept
    both.submit(job_of([1, 2], [1]), store=True)
    assert close(patience) and both.plan.closed == 1
    both.same()


def test_it_has_the_native_copiers_face() -> None:
    from kvxfer.integrations.vllm_copier import RowCopier

    for name in ("submit", "finished", "wait", "close"):
        assert callable(getattr(RowCopier, name)) and callable(getattr(DeviceRowCopier, name))
