"""Which processes have a root open, and whose turn it is to change it: locks on bytes of one file.

Byte 0 is the root's lock: whoever reads or changes the index, makes or removes a slab, or replaces a small file holds
it, for some microseconds as a rule. Every process that has the root open holds another byte, its seat, for as long.
The kernel gives all of them back when the process ends, however it ends; so nobody's jobs are behind a seat that is
free, and nothing is ever taken from a process that is merely slow.

A tool, which writes for no request, also holds the byte MAX_MEMBERS behind its seat: those that write for requests do
not share their budget of writes with it. A kvxfer that does not know of these bytes counts it in, and writes less.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvxfer.errors import IOFault, StoreError
from kvxfer.io.system import (
    check_plain,
    read_upto,
    share,
    sys_close,
    sys_lock,
    sys_locked,
    sys_open,
    sys_unlock,
    write_all,
)
from kvxfer.report import reporter

LOCK_FILE = "lock"
MAX_MEMBERS = 64
LOCK_TIMEOUT_S = 5.0
_ROOT = 0
_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 2e-3
_SIGN_BYTES = 16


_LOCKS: weakref.WeakSet[RootLock] = weakref.WeakSet()


class RootBusy(StoreError):
    """Another process holds the root's lock for too long: it was stopped, or hangs in a call on the disk."""


class RootLock:
    """The lock file of a root, opened by one store."""

    def __init__(self, fd: int, path: Path) -> None:
        """For `open` only."""
        self.seat = 0
        self._is_tool = False
        self._depth = 0
        self._fd = fd
        self._path = path
        self._patient = True

    @classmethod
    def open(cls, root: Path, *, only_look: bool = False) -> RootLock:
        """Opens the file, or makes it; to look at the seats of others it is neither made nor locked.

        Raises:
            IOFault: it cannot be.
        """
        path = root / LOCK_FILE
        flags = os.O_RDONLY if only_look else os.O_RDWR
        try:
            fd = sys_open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
        except IOFault as exc:
            if only_look or exc.errno != errno.ENOENT:
                raise
            fd = sys_open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CREAT)
            share(fd, path)
        lock = cls(fd, path)
        try:
            check_plain(path)  # a pipe opens, but has no locks
        except IOFault:
            lock.close()
            raise
        _LOCKS.add(lock)
        return lock

    @contextmanager
    def held(self, timeout: float | None = None) -> Iterator[None]:
        """The root's lock, for the block. Between threads of one store another lock decides; one thread may nest it.

        Args:
            timeout: seconds to wait for it; None: LOCK_TIMEOUT_S, but no time at all after that was too little once.

        Raises:
            RootBusy: another process kept it.
            IOFault: the call failed.
        """
        if not self._depth:
            self._acquire(timeout)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            try:
                if not self._depth:
                    sys_unlock(self._fd, _ROOT, self._path)
            except IOFault as exc:  # nothing can be done: it goes when the file is closed
                reporter.warn("lock", f"the root's lock cannot be given back: {exc}", error=exc)

    def _acquire(self, timeout: float | None) -> None:
        if timeout is None:
            timeout = LOCK_TIMEOUT_S if self._patient else 0.0
        end, pause = 0.0, _PAUSE_S
        while not sys_lock(self._fd, _ROOT, self._path):
            now = time.monotonic()
            end = end or now + timeout
            if now >= end:
                self._patient = False
                who = f"one of {pids}" if (pids := self.pids()) else "one that is opening it"
                raise RootBusy(f"{self._path} is locked by another process, {who}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        self._patient = True
        if not self._is_named():  # another process may have made a root there: its processes look at another file
            sys_unlock(self._fd, _ROOT, self._path)
            raise RootBusy(f"{self._path} was taken away, or is another file by now: open the root anew")

    def sit(self, *, tool: bool = False) -> int:
        """Takes a seat; its number. With the root's lock.

        Args:
            tool: this process writes for no request.

        Raises:
            StoreError: MAX_MEMBERS processes have the root open.
            IOFault: the call failed.
        """
        for seat in range(1, MAX_MEMBERS + 1):
            if sys_lock(self._fd, seat, self._path):
                self.seat = seat
                self._is_tool = tool and sys_lock(self._fd, MAX_MEMBERS + seat, self._path)
                try:
                    write_all(self._fd, b"%-15d\n" % os.getpid(), seat * _SIGN_BYTES, self._path)
                except IOFault as exc:
                    reporter.warn("lock", f"the lock cannot be signed: {exc}", error=exc)  # it is held all the same
                return seat
        raise StoreError(f"{self._path} has {MAX_MEMBERS} seats, and as many processes have the root open")

    def others(self) -> list[int]:
        """The seats that other processes hold.

        Raises:
            IOFault: the call failed.
        """
        return [seat for seat in range(1, MAX_MEMBERS + 1) if self.is_taken(seat)]

    def is_taken(self, seat: int) -> bool:
        """Whether another open file holds a seat.

        Raises:
            IOFault: the call failed.
        """
        return sys_locked(self._fd, seat, self._path)

    def is_tool(self, seat: int) -> bool:
        """Whether the process in a seat has said that it writes for no request; False where that cannot be seen."""
        if seat == self.seat:
            return self._is_tool
        try:
            return self.is_taken(MAX_MEMBERS + seat)
        except IOFault:
            return False

    def pid(self, seat: int) -> int:
        """Who has signed for a seat; 0 where nobody has."""
        try:
            text = read_upto(self._fd, _SIGN_BYTES, seat * _SIGN_BYTES, self._path)
        except IOFault:
            return 0
        return int(text) if text.strip().isdigit() else 0

    def pids(self) -> list[int]:
        """The processes behind the taken seats, as far as they have signed."""
        try:
            return [pid for seat in self.others() if (pid := self.pid(seat))]
        except IOFault:
            return []

    def _is_named(self) -> bool:
        try:
            named, mine = os.stat(self._path), os.fstat(self._fd)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    def drop(self) -> None:
        """Gives everything back, also where a child that was forked behind Python's back has the file open."""
        if self._fd >= 0 and self.seat:
            with suppress(IOFault):  # the seat last: whoever takes it next may be no tool
                if self._is_tool:
                    sys_unlock(self._fd, MAX_MEMBERS + self.seat, self._path)
                sys_unlock(self._fd, self.seat, self._path)
        self.close()

    def close(self) -> None:
        """Closes the file. In the child of a fork the parent keeps what it holds."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            sys_close(fd)


def _after_fork() -> None:
    # The child must not keep its parent's seat, or the root's lock, when the parent has gone.
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_after_fork)
