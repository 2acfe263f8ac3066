"""Processes that meet the kernel's own refusals, not ones that are made up: python -m tests.soak.limits SCENE ROOT.

Each stores and loads under a limit, and again when it is gone. Exit status 0: no byte was wrong, nothing was raised but
a documented error at an open, and descriptors and threads are those of the start.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.store.index import Index
from tests.soak.scene import CHUNKS, SLAB, Pages, Session, descriptors, settled, threads, verify

EIGHT, ALL, TWELVE = [*range(8)], [*range(CHUNKS)], [*range(12)]


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Lower for a while."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def filled(session: Session) -> None:
    """What fits, while there is no limit."""
    assert session.save(EIGHT) == EIGHT
    assert session.load(EIGHT) == EIGHT


def under_the_limit(session: Session) -> list[int]:
    """What is acknowledged is there; whatever comes is right (`load` looks). What was stored."""
    stored = session.save(ALL)
    assert session.load(stored) == stored
    session.load(ALL)
    return stored


def well_again(session: Session) -> None:
    """Without a limit."""
    assert session.save(TWELVE) == TWELVE
    assert session.load(TWELVE) == TWELVE
    session.check_gauges()


def tried(root: Path, pages: Pages) -> None:
    """An open: it works, or says why not. Either way nothing is left open."""
    with contextlib.suppress(KvxferError):
        Session(root, pages).close()


def long_files(root: Path, pages: Pages) -> None:
    """RLIMIT_FSIZE: fallocate and pwrite answer EFBIG (Python ignores the signal that comes with it)."""
    stored = {}
    for most in (SLAB, SLAB // 2, 4096, 0):
        session = Session(root, pages)
        filled(session)
        with limited(resource.RLIMIT_FSIZE, most):
            stored[most] = under_the_limit(session)
        print(f"files of {most} bytes: {len(stored[most])} of {CHUNKS} stored")
        well_again(session)
        session.close()
        with limited(resource.RLIMIT_FSIZE, most):
            tried(root, pages)
            tried(root.with_name(f"another {most}"), pages)
        shutil.rmtree(root)
    assert len(stored[SLAB]) > len(stored[SLAB // 2])
    assert set(stored[0]) <= set(EIGHT), "no index takes it"


def descriptors_gone(root: Path, pages: Pages) -> None:
    """RLIMIT_NOFILE: every open answers EMFILE."""
    session = Session(root, pages)
    filled(session)
    holes, first = [], max(int(name.split()[0]) for name in descriptors()) + 1
    while (fd := os.open(os.devnull, os.O_RDONLY)) < first:
        holes.append(fd)
    os.close(fd)
    with limited(resource.RLIMIT_NOFILE, first):
        assert session.load(EIGHT) == EIGHT
        stored = under_the_limit(session)
    print(f"no descriptor: {len(stored)} of {CHUNKS} stored")
    assert 0 < len(stored) < CHUNKS, "in the slab that is open"
    well_again(session)
    session.close()
    for left in range(0, 24, 3):
        with limited(resource.RLIMIT_NOFILE, first + left):
            tried(root, pages)
    for fd in holes:
        os.close(fd)


def memory_gone(root: Path, pages: Pages) -> None:
    """RLIMIT_AS: there is no memory for staging."""
    session = Session(root, pages)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, in_use + (7 << 18)):  # less than any staging, more than Python asks for at a time
        stored = session.save(TWELVE)
        came = session.load(TWELVE)
    print(f"no memory: {len(stored)} of 12 stored, {len(came)} loaded")
    assert stored == came == []
    well_again(session)
    session.close()


def full_disk(root: Path, pages: Pages) -> None:
    """A file system that has no room left (the test has mounted a small one)."""
    filler = root.with_name("filler")
    for left in (SLAB + 300_000, SLAB // 2, 50_000, 0):
        room = shutil.disk_usage(root.parent).free - left
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, room // 4096 * 4096)
        tried(root, pages)
        filler.unlink()
        session = Session(root, pages)
        filled(session)
        room = shutil.disk_usage(root.parent).free - left
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, room // 4096 * 4096)
        stored = under_the_limit(session)
        print(f"{left} bytes left: {len(stored)} of {CHUNKS} stored")
        assert len(stored) < CHUNKS
        filler.unlink()
        well_again(session)
        session.close()
        shutil.rmtree(root)


def index_cut(root: Path, pages: Pages) -> None:
    """Somebody cuts the index's file short after it was looked at: the pages that LMDB reads are not there."""
    session = Session(root, pages)
    filled(session)
    looked = Index._look

    def look_and_cut(index: Index) -> object:
        answer = looked(index)
        os.truncate(index.directory / "data.mdb", 0)
        return answer

    Index._look = look_and_cut  # type: ignore[method-assign, assignment]
    session.store._index._position = 0  # another process has written it, as far as this one knows
    session.save(TWELVE)
    raise AssertionError("it goes on, although its mapping has no pages")


def after_the_cut(root: Path, pages: Pages) -> None:
    """A process that comes after it: what was acknowledged is there."""
    assert verify(root, pages)[:8] == EIGHT


SCENES: dict[str, Callable[[Path, Pages], None]] = {
    each.__name__: each for each in (long_files, descriptors_gone, memory_gone, full_disk, index_cut, after_the_cut)
}


def main() -> None:
    """The command."""
    signal.alarm(300)  # only ever reached by a defect
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = Pages()
    before = descriptors(), threads()
    SCENES[sys.argv[1]](Path(sys.argv[2]), pages)
    settled(before)


if __name__ == "__main__":
    main()
