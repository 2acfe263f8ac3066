"""Forks, exits, kills, and several threads at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvxfer.convert.pages import KVPages
from kvxfer.errors import ForkError
from kvxfer.jobs import LOAD, Status
from kvxfer.layout import row_mapping
from tests.jobs.rig import EACH, MODEL, Rig, expect


def test_a_fork_says_so(tmp_path: Path, source, target) -> None:
    with Rig(tmp_path / "slots", source) as rig:
        rig.store(source, EACH)
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                rig.submit(LOAD, target, EACH)
                os.write(writer, b"submitted")
            except ForkError as exc:
                os.write(writer, str(exc).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reader, 4096).decode()
        assert f"process {child} is a fork" in said
        assert not rig.load(target, EACH).status.any()


def test_exit_without_close_ends_the_process(tmp_path: Path) -> None:
    """Threads in a call that never returns do not keep a process from ending."""
    script = textwrap.dedent(
        f"""
        import sys, pathlib, time
        from tests.jobs import rig as r
        from kvxfer.testing import FaultyIO
        model = r.Model.random(r.GEOMETRY, 4)
        pages = r.ranks(model, "nhd", 1, filled=True)
        rig = r.Rig(pathlib.Path({str(tmp_path / "slots")!r}), pages)
        rig.store(pages, [[0], [1]])
        rule = FaultyIO().hang("pread")
        rig.submit(r.LOAD, pages, [[0], [1]])
        while rule.hits < 2: time.sleep(0.01)
        print("hanging", flush=True)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "hanging\n" and done.returncode == 0, done.stderr


STOPPED_S = 3.0  # what a call may take, of the process that is stopped for longer


@pytest.mark.parametrize("returns", [True, False])
def test_a_process_that_was_stopped_takes_no_call_for_one_that_hangs(tmp_path: Path, returns: bool) -> None:
    """SIGSTOP, a machine that was suspended: a call is as old as what the process has lived through. One that hangs
    all the same is given up later."""
    script = textwrap.dedent(
        f"""
        import pathlib, sys, time
        from tests.jobs import rig as r
        from kvxfer.testing import FaultyIO
        pages = r.ranks(r.MODEL, "nhd", 1, filled=True)
        rig = r.Rig(pathlib.Path({str(tmp_path / "slots")!r}), pages, io_timeout_s={STOPPED_S})
        rig.store(pages, r.EACH)
        rule = FaultyIO().hang("pread")
        rig.submit(r.LOAD, pages, [[0]])
        while rule.hits < 1: time.sleep(0.001)
        began = time.monotonic()
        print("hangs", flush=True)
        sys.stdin.readline()
        assert time.monotonic() - began > {STOPPED_S}
        rig.submit(r.LOAD, pages, [[1]], chunks=[1], deadline_s=0.3)
        cut = rig.finish(r.LOAD)  # by the monitor, which has looked at all calls with that
        print(cut.job_id, *cut.status, rig.runner.stats()["lost_calls"], flush=True)
        if {returns}: FaultyIO().release()
        ended = rig.finish(r.LOAD)
        print(ended.job_id, *ended.status, flush=True)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "hangs\n"
    child.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
    time.sleep(STOPPED_S + 0.1)  # what it is told of below, not what anything waits for
    child.send_signal(signal.SIGCONT)
    said, _ = child.communicate("go\n", timeout=60)
    assert said.split("\n")[:-1] == [f"3 {Status.CUT:d} 0", f"2 {0 if returns else Status.LOST:d}"]
    assert child.returncode == 0


@pytest.mark.parametrize("before", [True, False])
def test_sigkill_in_a_write_leaves_no_believable_chunk(tmp_path: Path, before: bool, target) -> None:
    script = textwrap.dedent(
        f"""
        import pathlib
        from tests.jobs import rig as r
        from kvxfer.testing import FaultyIO
        model = r.Model.random(r.GEOMETRY, 8)
        pages = r.ranks(model, "nhd", 2, filled=True)
        rig = r.Rig(pathlib.Path({str(tmp_path / "slots")!r}), pages, threads=1)
        FaultyIO().kill("pwrite", before={before}, nbytes=5000, after=3)
        rig.store(pages, [[b] for b in range(8)])
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Rig(tmp_path / "slots", target) as rig:
        outcome = rig.load(target, EACH)
        torn = Status.TRUNCATED
        assert outcome.status.tolist() == [0, 0, 0, torn, torn, torn, torn, torn]
    expect(MODEL, "hnd", target, range(3))


def test_many_jobs_at_once_from_many_threads(tmp_path: Path, source) -> None:
    """Loads into disjoint targets from several threads: every job ends once, with the right bytes."""
    rows = np.random.default_rng(3).integers(0, 256, (32, 9000), dtype=np.uint8)
    pages = KVPages(row_mapping(9000), [rows], 32)
    with Rig(tmp_path / "slots", [pages], threads=4, live=False) as rig:
        rig.store([pages], [[b] for b in range(32)])
        back = [np.zeros_like(rows) for _ in range(4)]
        targets = [KVPages(row_mapping(9000), [b], 32) for b in back]
        ended: list[int] = []
        lock = threading.Lock()

        def work(target: KVPages) -> None:
            for first in range(0, 32, 4):
                with lock:
                    rig.submit(LOAD, [target], [[b] for b in range(first, first + 4)], chunks=range(first, first + 4))
            while len(ended) < 32:
                if (outcome := rig.runner.poll(LOAD)) is not None:
                    assert not outcome.status.any()
                    ended.append(outcome.job_id)

        threads = [threading.Thread(target=work, args=(t,)) for t in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(ended) == list(range(2, 34))
    assert all(np.array_equal(b, rows) for b in back)
