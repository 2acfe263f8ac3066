"""Closes that never return: they cost whoever would have waited for them a moment at most, and no thread of a job's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvxfer import _native
from kvxfer.jobs import LOAD
from kvxfer.testing import FaultyIO
from tests.jobs.rig import EACH, MODEL, Rig, expect
from tests.jobs.test_faults import until
from tests.native.shims import compiled, preloaded

MANY = 12  # more than there are threads for closes


def is_open(path: Path) -> bool:
    """Whether a descriptor of this process is of that file."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # it was closed meanwhile
    return str(path) in links


def adopted(rig: Rig, path: Path) -> int:
    """A file of its own with what the rig's has; its handle."""
    path.write_bytes(rig.path.read_bytes())
    return int(rig.lib.kvx_file_adopt(os.open(path, os.O_RDWR), b"copy", 0))


def test_who_releases_a_file_waits_for_its_close(tmp_path: Path, source) -> None:
    with Rig(tmp_path / "slots", source) as rig:
        for step in range(20):
            file = adopted(rig, path := tmp_path / f"copy{step}")
            assert is_open(path)
            rig.lib.kvx_file_release(file)
            assert not is_open(path)


def test_and_not_for_ever(tmp_path: Path, source) -> None:
    """Nor does it wait again while such a close is under way, and others are closed all the same."""
    with Rig(tmp_path / "slots", source) as rig, FaultyIO() as io:
        paths = [tmp_path / f"copy{step}" for step in range(2 * MANY)]
        files = [adopted(rig, path) for path in paths]
        rule = io.hang("close", times=2)
        for file in files[:MANY]:
            rig.lib.kvx_file_release(file)
        until(lambda: sum(map(is_open, paths[:MANY])) == 2, "the others are closed")
        assert rule.hits == 2
        io.hang("close")
        for file in files[MANY:]:
            rig.lib.kvx_file_release(file)
        io.release()
        until(lambda: not any(map(is_open, paths)), "all are closed in the end")


def test_the_ends_of_jobs_wait_for_no_close(tmp_path: Path, source, target) -> None:
    """Neither the thread that had the job, nor who takes its result."""
    with Rig(tmp_path / "slots", source, threads=1) as rig, FaultyIO() as io:
        rig.store(source, EACH)
        io.hang("close")
        for step in range(MANY):
            record = _native.Chunk.from_buffer_copy(rig.record(0))
            record.file = adopted(rig, tmp_path / f"copy{step}")
            rig.submit(LOAD, target, EACH[:1], records=[bytes(record)])
            rig.lib.kvx_file_release(record.file)  # until its result was taken the job has it
            assert not rig.finish(LOAD).status.any()
        assert rig.runner.stats()["threads"] == 1
        io.release()
    expect(MODEL, "hnd", target, [0])


NO_MEMORY = """
    import ctypes, os
    from kvxfer import _native
    lib, shim = _native.lib(), ctypes.CDLL(None)
    failed = ctypes.c_int.in_dll(shim, "kvx_news_failed")

    def adopted():
        fd = os.open({place!r}, os.O_RDWR)
        return fd, lib.kvx_file_adopt(fd, b"a file", 0)

    first, file = adopted()
    shim.kvx_fail_new({which})
    lib.kvx_file_release(file)
    assert failed.value == 1
    other = os.open({place!r}, os.O_RDWR)
    assert other == first  # it was closed, and its number is another's now
    lib.kvx_file_release(adopted()[1])
    os.fstat(other)
"""


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has an operator new of its own")
@pytest.mark.parametrize("which", [1, 2], ids=["to say so", "for a thread"])
def test_a_close_for_which_there_is_no_memory_comes_once(tmp_path: Path, which: int) -> None:
    """A second one would close whatever file has the number by then."""
    (tmp_path / "file").touch()
    script = textwrap.dedent(NO_MEMORY).format(place=str(tmp_path / "file"), which=which)
    environment = os.environ | preloaded(compiled("new", tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
