"""A fork in the midst of everything: locks that other threads hold, staging under direct I/O, the end of the child."""

from __future__ import annotations

import ctypes as C
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.errors import ForkError
from kvxfer.jobs import LOAD, STORE
from kvxfer.testing import FaultyIO
from tests.jobs.rig import EACH, MODEL, Rig, expect
from tests.jobs.test_faults import until
from tests.native.shims import compiled, preloaded
from tests.native.uring import needs_uring

# What a thread does while it is stopped with a lock of libkvx in its hands, by which lock that is.
KEEPERS = {
    "rules": "lib.kvx_fault_hits(0)",
    "files of rings": "JobRunner(threads=1, io_timeout_s=0, max_lost_threads=0, backend='uring')",
    "files to close": "lib.kvx_file_release(spare)",
}
SCRIPT = """
    import ctypes, os, pathlib, signal, sys, threading, time
    from kvxfer.errors import ForkError
    from kvxfer.jobs import LOAD, JobRunner
    from kvxfer.testing import FaultyIO
    from tests.jobs import rig as r
    place = pathlib.Path({place!r})
    pages = r.ranks(r.MODEL, "nhd", 1, filled=True)
    rig = r.Rig(place / "slots", pages)
    rig.store(pages, r.EACH)
    rig.load(pages, r.EACH)  # by now rings have the file
    lib, shim = rig.lib, ctypes.CDLL(None)
    spare = lib.kvx_file_adopt(os.open(place / "spare", os.O_RDWR | os.O_CREAT, 0o600), b"spare", 0)
    rule = FaultyIO().fail("pread", 5, after=10**9)
    kept, go = (ctypes.c_int.in_dll(shim, name) for name in ("kvx_lock_kept", "kvx_lock_go"))

    def keep():
        shim.kvx_keep_next_lock()
        {keep}

    thread = threading.Thread(target=keep)
    thread.start()
    while not kept.value: time.sleep(0.001)
    if not (child := os.fork()):
        signal.alarm(40)
        for call in (lambda: rig.load(pages, r.EACH), lambda: rig.runner.shutdown(1.0)):
            try:
                call()
            except ForkError:
                print("told", flush=True)
        assert rule.hits == 0
        lib.kvx_file_release(rig.file)
        FaultyIO().fail("fsync", 5)
        with r.Rig(place / "slots", pages) as anew:
            assert not anew.load(pages, r.EACH).status.any()
        FaultyIO().__exit__(None, None, None)
        print("went on", flush=True)
        sys.exit(7)  # as a program ends: what Python has is given back
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go.value = 1
    thread.join()
    assert not rig.load(pages, r.EACH).status.any()
    print(ended, flush=True)
    rig.__exit__()
"""


@pytest.mark.skipif("tsan" in os.environ.get("LD_PRELOAD", ""), reason="ThreadSanitizer's own unlock calls the shim's")
@pytest.mark.parametrize("lock", KEEPERS)
def test_a_lock_that_is_held_at_the_fork_holds_up_nobody_in_the_child(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, lock: str
) -> None:
    """Who holds it is not there to give it back. The parent's is kept, and what it guards."""
    if lock == "files of rings":
        needs_uring(tmp_path_factory.getbasetemp())
    script = textwrap.dedent(SCRIPT).format(place=str(tmp_path), keep=KEEPERS[lock])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=120, env=os.environ | preloaded(compiled("unlock", tmp_path)),
    )  # fmt: skip
    assert done.stdout.split("\n")[:-1] == ["told", "told", "went on", "7"], done.stdout + done.stderr


@pytest.mark.parametrize(
    "call",
    [
        lambda rig: rig.runner.wake(STORE),
        lambda rig: rig.runner.wait([LOAD], 0),
        lambda rig: rig.runner.wait_gathered(1, 0),
        lambda rig: list(rig.runner.late()),
        lambda rig: rig.runner.shutdown(0),
    ],
    ids=["wake", "wait", "wait_gathered", "late", "shutdown"],
)
def test_every_call_in_a_forks_child_says_so(tmp_path: Path, source, call: Callable[[Rig], object]) -> None:
    """And does not wait for threads, or a lock of theirs, that the child has not."""
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        rule = io.hang("pwrite", times=1)  # of two threads one stores
        rig.submit(STORE, source, EACH)
        until(lambda: rule.hits == 1, "it is in a call")
        if (child := os.fork()) == 0:
            signal.alarm(20)
            try:
                call(rig)
                os._exit(1)
            except ForkError as exc:
                os._exit(0 if "is a fork of it" in str(exc) else 2)
            finally:
                os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        io.release()
        assert not rig.finish(STORE).status.any()


def not_copied() -> int:
    """Bytes of this process of which a fork's child gets no page."""
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and {"dc", "wf"} & set(line.split()):
            total += size
    return total


def test_staging_is_not_copied_by_a_fork(tmp_path: Path, source, target) -> None:
    """A page that a child shares is copied at the parent's next write: a read under way would end in the child's."""
    with Rig(tmp_path / "slots", source) as rig:
        before = not_copied()
        rig.store(source, EACH)
        assert not rig.load(target, EACH).status.any()
        staging = rig.runner.stats()["staging_bytes"]
        assert staging > 0 and not_copied() - before >= staging


def test_a_fork_in_the_midst_of_loads(tmp_path: Path, source, target) -> None:
    """The child ends as a program does, the parent's loads have their bytes."""
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        rule = io.hang("pread", times=2)
        rig.submit(LOAD, target, EACH)
        until(lambda: rule.hits == 2, "both threads are in a call")
        if (child := os.fork()) == 0:
            signal.alarm(20)
            C.CDLL(None).exit(0)  # exit handlers, destructors and all
        assert os.waitpid(child, 0)[1] == 0
        io.release()
        assert not rig.finish(LOAD).status.any()
    expect(MODEL, "hnd", target, range(8))
