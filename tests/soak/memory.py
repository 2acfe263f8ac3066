"""What a process keeps of doing the same again and again: python -m tests.soak.memory [--seconds S] [--dir DIR].

A round is one play of the scene for each of CASES: stores, loads, evictions, opens and closes, while a call fails,
lies, or is given up and comes back late. It leaves nothing behind: what malloc has given out (Python's, LMDB's and
libkvx's), mappings, descriptors and threads.

The process is started so that malloc's figure is exact (EXACT). It still grows by less and less, while Python's and
numpy's free lists fill, and now and then by a table of Python's that doubles. So what counts is the median of what the
rounds have added, after the first of them: a leak adds to each.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.soak.campaign import FAULTS, play
from tests.soak.scene import Pages, descriptors, settled, threads

EXACT = {
    "PYTHONMALLOC": "malloc",  # no allocator of Python's own in front of it
    "GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0:glibc.malloc.mmap_threshold=131072",
}
CASES = (
    ("pread", 200, "EIO"), ("pread", 150, "flip"), ("pwrite", 40, "ENOSPC"), ("fsync", 10, "EIO"),
    ("lock", 100, "EIO"), ("open", 20, "EMFILE"), ("pwrite", 30, "late"),
)  # fmt: skip
FIRST = 3  # rounds that are not looked at
LEAST = 4  # those that are
PLAY_BYTES = 2048  # of malloc's a play; found are 0 to 700, of 300 bytes kept for each job 5,400
RESIDENT_BYTES = 4 << 20  # over all rounds that are looked at


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


class Footprint(NamedTuple):
    """What the process has."""

    malloc: int  # bytes
    maps: int
    resident: int  # bytes

    @staticmethod
    def now() -> Footprint:
        """After a collection."""
        gc.collect()
        mallinfo2 = ctypes.CDLL(None).mallinfo2  # glibc 2.33
        mallinfo2.restype = _MallInfo
        info = mallinfo2()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        return Footprint(info.uordblks + info.hblkhd, maps, pages * os.sysconf("SC_PAGE_SIZE"))


def one_round(root: Path, pages: Pages) -> None:
    """All of CASES."""
    ways = {fault.name: fault for fault in FAULTS}
    for op, n, way in CASES:
        play(root, pages, op, n, ways[way], lambda _: None)
        shutil.rmtree(root)


def measure(root: Path, seconds: float, work: Callable[[Path, Pages], None] = one_round) -> int:
    """Rounds for so long, FIRST + LEAST of them at least; says what they added. The exit status."""
    pages, end = Pages(), time.monotonic() + seconds
    before = descriptors(), threads()
    found: list[Footprint] = []
    while len(found) < FIRST + LEAST + 1 or time.monotonic() < end:
        work(root, pages)
        settled(before)
        found.append(Footprint.now())
    seen = found[FIRST:]
    added = statistics.median(b.malloc - a.malloc for a, b in itertools.pairwise(seen)) / len(CASES)
    resident = seen[-1].resident - seen[0].resident
    grew = added > PLAY_BYTES or resident > RESIDENT_BYTES or seen[-1].maps > seen[0].maps + len(CASES)
    print(
        f"memory: {len(found)} rounds of {len(CASES)} plays; a play adds {added:.0f} bytes of malloc's (at most "
        f"{PLAY_BYTES}), {len(seen) - 1} rounds {resident >> 10} KiB resident (at most {RESIDENT_BYTES >> 10}) and "
        f"{seen[-1].maps - seen[0].maps} mappings; descriptors and threads are those of the start"
    )
    if grew:
        print("LOSS memory: " + ", ".join(f"{each.malloc}" for each in found))
    return grew


def run(seconds: float, place: str, code: str = "from tests.soak.memory import main; main()") -> tuple[bool, str]:
    """`measure` in a process of its own, as exact as it can be; whether nothing grew, and what it says."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return True, "memory: not measured, this C library has no mallinfo2"
    done = subprocess.run(
        [sys.executable, "-c", code, "--seconds", str(seconds), "--dir", place], capture_output=True, text=True,
        check=False, env=os.environ | EXACT,
    )  # fmt: skip
    said = done.stdout.rstrip()
    return done.returncode == 0, said if said and done.returncode in (0, 1) else said + done.stderr[-3000:]


def main(work: Callable[[Path, Pages], None] = one_round) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.soak.memory", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--dir", help="where roots are made; left out: the temporary directory")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in EXACT.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.soak.memory", *sys.argv[1:]], os.environ | EXACT)
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        sys.exit(measure(Path(place, "root"), options.seconds, work))


if __name__ == "__main__":
    main()
