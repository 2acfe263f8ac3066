"""Threads for calls that may never return: each call ends once, and nothing waits for one that does not."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from kvxfer.errors import ConfigError, ForkError, IOFault, StoreError
from kvxfer.io.workers import Call, Workers


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.002)


def test_calls_run_side_by_side_and_answer() -> None:
    workers = Workers("test", 3)
    meet = threading.Barrier(3, timeout=20)
    calls = [workers.submit(lambda n=n: meet.wait() * 0 + n, "call") for n in range(3)]  # type: ignore[misc]
    assert [call.get() for call in calls] == [0, 1, 2]
    assert calls[0].get() == 0
    until(lambda: workers.stats()["busy_threads"] == 0)
    assert all(call.done() and call.returned() and not call.lost for call in calls)
    assert workers.stats()["threads"] == 3
    assert workers.submit(lambda: 7, "call").get() == 7
    assert workers.stats()["threads"] == 3


def test_no_more_threads_than_calls_need() -> None:
    workers = Workers("test", 8)
    for _ in range(20):
        call = workers.submit(lambda: 1, "call")
        assert call.get() == 1
        until(lambda: workers.stats()["busy_threads"] == 0)
    assert workers.stats()["threads"] <= 2


def test_an_exception_is_the_callers() -> None:
    workers = Workers("test", 1)

    def fails() -> int:
        raise IOFault(errno.EIO, "no", "file")

    call = workers.submit(fails, "call")
    for _ in range(2):
        with pytest.raises(IOFault, match="no"):
            call.get()
    assert call.returned()
    assert workers.submit(lambda: 1, "call").get() == 1


def test_what_is_to_be_called_then_is_called_once() -> None:
    workers, go, seen = Workers("test", 1), threading.Event(), []
    call = workers.submit(lambda: int(go.wait(20)), "call")
    call.then(lambda: seen.append("before"))
    go.set()
    call.get()
    until(lambda: seen == ["before"])
    call.then(lambda: seen.append("after"))
    assert seen == ["before", "after"]


def hung(workers: Workers, go: threading.Event) -> Call:
    call = workers.submit(lambda: int(go.wait(60)), "the call")
    with pytest.raises(IOFault, match="the call: no answer within 0.3 s: given up") as info:
        call.get()
    assert info.value.errno == errno.ETIMEDOUT
    return call


def test_a_call_that_does_not_return_is_given_up_and_its_thread_replaced() -> None:
    workers, go = Workers("test", 1, io_timeout_s=0.3, max_lost=1), threading.Event()
    seen: list[bool] = []
    first = workers.submit(lambda: int(go.wait(60)), "the call")
    first.then(lambda: seen.append(first.lost))
    second = workers.submit(lambda: 5, "next")
    assert second.get() == 5
    with pytest.raises(IOFault, match="given up"):
        first.get()
    assert first.lost and first.done() and not first.returned()
    assert (workers.stats()["lost_calls"], workers.stats()["lost_threads"], seen) == (1, 1, [True])
    go.set()
    until(first.returned)
    until(lambda: workers.stats()["late_returns"] == 1)
    assert (workers.stats()["lost_threads"], first.lost) == (0, False)
    with pytest.raises(IOFault, match="given up"):  # its answer comes too late
        first.get()
    assert workers.submit(lambda: 6, "next").get() == 6
    assert workers.stats()["threads"] == 1


def test_where_no_thread_is_left_calls_fail_at_once_and_one_that_returns_helps() -> None:
    workers, go = Workers("test", 1, io_timeout_s=0.3, max_lost=0), threading.Event()
    first = workers.submit(lambda: int(go.wait(60)), "the call")
    queued = workers.submit(lambda: 1, "queued")
    for call in (queued, workers.submit(lambda: 1, "after")):
        with pytest.raises(IOFault, match="no thread left: 1 calls never returned") as info:
            call.get()
        assert info.value.errno == errno.ENOBUFS
        assert call.stalled and call.returned()
    assert not first.stalled
    assert workers.stats()["threads"] == 0
    go.set()
    until(lambda: workers.stats()["lost_threads"] == 0)
    assert workers.submit(lambda: 2, "again").get() == 2


def test_fewer_threads_where_not_all_may_be_replaced() -> None:
    workers, go = Workers("test", 2, io_timeout_s=0.3, max_lost=0), threading.Event()
    hung(workers, go)
    assert workers.submit(lambda: 1, "call").get() == 1
    assert workers.stats()["threads"] == 1
    hung(workers, go)
    with pytest.raises(IOFault, match="no thread left: 2"):
        workers.submit(lambda: 1, "call").get()
    go.set()
    until(lambda: workers.stats()["late_returns"] == 2)


def test_time_runs_from_the_start_of_a_call_and_not_from_its_place_in_the_queue() -> None:
    workers = Workers("test", 1, io_timeout_s=1.5, max_lost=0)
    calls = [workers.submit(lambda: time.sleep(0.1) or 1, "call") for _ in range(16)]
    assert sum(call.get() for call in calls) == 16


def test_closed_means_no_more_and_what_was_queued_ends() -> None:
    workers, go = Workers("test", 1), threading.Event()
    calls = [workers.submit(lambda: int(go.wait(20)), "call") for _ in range(3)]
    workers.close()
    workers.close()
    with pytest.raises(StoreError, match="test backend is closed"):
        workers.submit(lambda: 1, "call")
    go.set()
    assert [call.get() for call in calls] == [1, 1, 1]
    until(lambda: workers.stats()["threads"] == 0)


def test_a_wait_has_an_end() -> None:
    workers, go = Workers("test", 1), threading.Event()
    call = workers.submit(lambda: int(go.wait(20)), "the call")
    with pytest.raises(IOFault, match="no answer within 0.01 s"):
        call.get(0.01)
    assert not call.done()
    go.set()
    assert call.get(20) == 1


def test_not_in_a_fork() -> None:
    workers = Workers("test", 1)
    assert workers.submit(lambda: 1, "call").get() == 1
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 3
        try:
            workers.submit(lambda: 1, "call")
        except ForkError as exc:
            code = 0 if "is a fork of it" in str(exc) else 4
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_interpreter_ends_though_calls_hang() -> None:
    code = (
        "import time\nfrom kvxfer.io.workers import Workers\n"
        "workers = Workers('test', 2, io_timeout_s=0.05, max_lost=1)\n"
        "call = workers.submit(lambda: time.sleep(1000) or 0, 'call')\n"
        "workers.submit(lambda: time.sleep(1000) or 0, 'call')\n"
        "try: call.get()\nexcept OSError: print('given up')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "given up\n", "")


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"threads": True}, {"io_timeout_s": 0}, {"io_timeout_s": float("nan")}, {"max_lost": -1}],
)
def test_what_cannot_be(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Workers("test", **({"threads": 1} | options))


def test_a_thread_that_cannot_be_started_is_an_error_or_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers("t", 1, io_timeout_s=0.1, max_lost=1)
    start, none = threading.Thread.start, threading.Event()

    def limited(thread: threading.Thread) -> None:
        if none.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    none.set()
    with pytest.raises(IOFault, match="no thread can be started"):
        workers.submit(lambda: 1, "first")
    none.clear()
    held = threading.Event()
    first = workers.submit(lambda: int(held.wait()), "hangs")
    none.set()
    second = workers.submit(lambda: 2, "waits")
    with pytest.raises(IOFault, match="given up"):
        first.get(5)
    with pytest.raises(IOFault, match="no answer"):
        second.get(0.15)
    none.clear()
    assert second.get(5) == 2
    held.set()
    workers.close()
