"""Every call of a scene fails once, in every way: python -m tests.soak.campaign [--each N] [--op OP] [--seconds S].

The first play counts the calls of every operation that libkvx's table has (whatever operations those are). Then, for
the n-th call of each and for each fault that can be there, the scene is played in a process of its own with exactly
that call failing: delayed, cut short, changed on the way, answered with an errno, the last thing that the process did;
or not returning, until what it holds up has ended without it (`late`) or all has been shut down (`stuck`: held.py).
After each, a fresh process opens the root without faults. Exit status 1: something was lost, hung or left behind.

LMDB's own calls on its file do not go through that table: where tests/native/preload_lmdb.c is preloaded, they are
failed by it (`lmdb write`, `lmdb sync`; it cuts its file only where it writes by its mapping).
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvxfer import _native
from kvxfer.testing import FaultyIO
from kvxfer.testing.faulty_io import Rule
from tests.soak.held import Held, HeldScene
from tests.soak.scene import CHUNKS, Pages, Scene, descriptors, settled, threads, verify

HANG_S = 100.0  # for one play: only ever reached by a defect
_MANY = 1 << 20


LMDB = ("write", "sync")


class LmdbRule:
    """One call of LMDB's that fails, by way of the library that is preloaded."""

    def __init__(self, op: str, action: str, n: int) -> None:
        os.environ.pop("KVX_LMDB_ARMED", None)
        os.environ["KVX_LMDB_FAULT"] = f"{op.removeprefix('lmdb ')}:{action}:{n + 1}"
        os.environ["KVX_LMDB_FAULT_LIMIT"] = "1"

    @staticmethod
    def _read(name: str) -> int:
        return ctypes.c_long.in_dll(ctypes.CDLL(None), name).value

    @property
    def hits(self) -> int:
        """Calls that it has hit."""
        return self._read("kvx_lmdb_hits")

    @staticmethod
    def release() -> None:
        """One that hangs goes on."""
        ctypes.c_long.in_dll(ctypes.CDLL(None), "kvx_lmdb_released").value = 1

    @classmethod
    def calls(cls) -> int:
        """Calls of the operation that a rule is for."""
        return cls._read("kvx_lmdb_calls")

    @staticmethod
    def is_there() -> bool:
        """Whether the library is preloaded."""
        return hasattr(ctypes.CDLL(None), "kvx_lmdb_calls")


class Fault(NamedTuple):
    """One way to fail."""

    name: str
    arm: Callable[[FaultyIO, str, int], Rule | LmdbRule]  # (faults, operation, how many calls pass before)
    kills: bool = False
    lies: bool = False  # a read that says what is not so: chunks may be lost by it, never believed
    holds: bool = False


def _errno(code: int) -> Fault:
    return Fault(errno.errorcode[code], lambda io, op, n: io.fail(op, code, after=n, times=1))


def _short(nbytes: int) -> Fault:
    return Fault(f"short {nbytes}", lambda io, op, n: io.short(op, nbytes, after=n, times=1), lies=nbytes == 0)


FAULTS = (
    _errno(errno.EIO),
    Fault("kill after", lambda io, op, n: io.kill(op, after=n), kills=True),
    _errno(errno.ENOSPC),
    Fault("kill before", lambda io, op, n: io.kill(op, before=True, after=n), kills=True),
    _errno(errno.EMFILE),
    _short(5000),
    Fault("delay", lambda io, op, n: io.delay(op, 0.003, after=n, times=1)),
    _short(0),
    Fault("kill in", lambda io, op, n: io.kill(op, nbytes=4096, after=n), kills=True),
    Fault("flip", lambda io, op, n: io.flip(100, after=n, times=1), lies=True),
    _short(1),
    Fault("late", lambda io, op, n: io.hang(op, after=n, times=1), holds=True),
    Fault("stuck", lambda io, op, n: io.hang(op, after=n, times=1), holds=True),
)


def _lmdb(name: str, action: object) -> Fault:
    kills, holds = name.startswith("kill"), action == "hang"
    return Fault(f"lmdb {name}", lambda io, op, n: LmdbRule(op, str(action), n), kills, holds=holds)


LMDB_FAULTS = (
    _lmdb("EIO", errno.EIO), _lmdb("kill half", "kill-half"), _lmdb("ENOSPC", errno.ENOSPC),
    _lmdb("kill before", "kill-before"), _lmdb("kill after", "kill-after"),
    _lmdb("late", "hang"), _lmdb("stuck", "hang"),
)  # fmt: skip


def faults_of(op: str) -> list[Fault]:
    """Those that libkvx, or the preloaded library, knows of such a call."""
    if op.startswith("lmdb"):
        return [*LMDB_FAULTS]
    return [fault for fault in FAULTS if applies(fault, op)]


def applies(fault: Fault, op: str) -> bool:
    """Whether libkvx knows such a fault of such a call."""
    if fault.name == "flip" and op != "pread":
        return False  # `flip` takes no operation
    try:
        with FaultyIO() as io:
            fault.arm(io, op, _MANY)
    except OSError:
        return False
    return True


def io_of(op: str) -> str:
    """How the scene is played in which such a call is met."""
    return "uring" if op.startswith("uring") else "auto"


class Outcome(NamedTuple):
    """How a process ended."""

    status: int  # as os.waitstatus_to_exitcode; negative: the signal
    text: str
    hung: bool = False


def in_a_process(work: Callable[[Callable[[Any], None]], None]) -> Outcome:
    """Runs `work(say)` in a fork of this process, which has no threads; what was said."""
    pull, push = os.pipe()
    if not (pid := os.fork()):
        os.close(pull)
        status = 1
        try:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (warnings of faults that were asked for)
            os.dup2(sys.stderr.fileno(), 2)
            work(lambda what: os.write(push, f"{what}\n".encode()) and None)
            status = 0
        except BaseException:
            os.write(push, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(status)
    os.close(push)
    end, text, hung = time.monotonic() + HANG_S, b"", False
    os.set_blocking(pull, False)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end and not hung:
            os.kill(pid, signal.SIGKILL)
            hung = True
        text += _read(pull)
        time.sleep(0.001)
    text += _read(pull)
    os.close(pull)
    return Outcome(os.waitstatus_to_exitcode(ended[1]), text.decode(errors="replace"), hung)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def _numbers(text: str) -> list[list[int]]:
    """What was acknowledged, one list a time."""
    return [[int(k) for k in line.split()[1:]] for line in text.splitlines() if line.startswith("told")]


def play(root: Path, pages: Pages, op: str, n: int, fault: Fault, say: Callable[[Any], None]) -> None:
    """The scene with a fault at one call; says what is acknowledged, how often the fault was met, and where it hung."""
    told = lambda ks: say("told " + " ".join(map(str, ks)))  # noqa: E731
    with FaultyIO() as io:
        rule = fault.arm(io, op, n)
        if fault.holds:
            release = rule.release if isinstance(rule, LmdbRule) else io.release
            with Held(lambda: rule.hits, release, stuck=fault.name.endswith("stuck")) as held:
                HeldScene(held, root, pages, told, io=io_of(op)).play()
            say("held " + " ".join(held.where))
        else:
            Scene(root, pages, told, strict=not fault.lies, io=io_of(op)).play()
        say(f"hits {rule.hits}")


class Campaign:
    """Plays in a directory; counts what became of them."""

    def __init__(self, place: Path, pages: Pages) -> None:
        self.place, self.pages = place, pages
        self.plays = self.kills = self.unreached = 0
        self.by_op: dict[str, int] = {}
        self.held: Counter[str] = Counter()
        self.defects: list[str] = []

    def count(self) -> dict[str, int]:
        """Calls of every operation in a play without faults; of a ring's where one can be had.

        Raises:
            AssertionError: that play has a defect already.
        """
        counts = self._count("auto")
        counts |= {op: n for op, n in self._count("uring").items() if op.startswith("uring")}
        return counts | (self._count_lmdb() if LmdbRule.is_there() else {})

    def _count(self, io: str) -> dict[str, int]:
        def work(say: Callable[[Any], None]) -> None:
            before = {op: FaultyIO.calls(op) for op in _native.OPS}
            Scene(self.place / "root", self.pages, lambda ks: say("told " + " ".join(map(str, ks))), io=io).play()
            for op, old in before.items():
                say(f"calls {op} {FaultyIO.calls(op) - old}")

        done = in_a_process(work)
        self._clear()
        if io == "uring" and "io_uring does not work" in done.text:
            return {}
        assert done.status == 0, done.text
        assert all(told for told in _numbers(done.text)), "without faults everything is stored"
        lines = [line.split() for line in done.text.splitlines() if line.startswith("calls")]
        return {op: int(n) for _, op, n in lines}

    def _count_lmdb(self) -> dict[str, int]:
        def work(op: str, say: Callable[[Any], None]) -> None:
            LmdbRule(op, str(errno.EIO), _MANY)
            Scene(self.place / "root", self.pages, lambda _: None).play()
            say(LmdbRule.calls())

        counts = {}
        for op in LMDB:
            done = in_a_process(lambda say, op=op: work(op, say))  # type: ignore[misc]
            assert done.status == 0, done.text
            counts[f"lmdb {op}"] = int(done.text)
            self._clear()
        return counts

    def play(self, op: str, n: int, fault: Fault) -> None:
        """One play, and what comes after it."""
        root = self.place / "root"
        self.plays += 1
        self.by_op[op] = self.by_op.get(op, 0) + 1

        def work(say: Callable[[Any], None]) -> None:
            before = descriptors(), threads()
            play(root, self.pages, op, n, fault, say)
            settled(before)

        done = in_a_process(work)
        reached = done.status == -signal.SIGKILL if fault.kills else "hits 1" in done.text
        self.kills += fault.kills and reached
        self.unreached += not reached
        self.held.update(re.findall(r"^held (\w+)$", done.text, re.MULTILINE))
        if done.hung or (done.status != 0 and not (fault.kills and done.status == -signal.SIGKILL)):
            self._defect(op, n, fault, done)
        after = in_a_process(lambda say: say("told " + " ".join(map(str, verify(root, self.pages)))))
        if after.status != 0:
            self._defect(op, n, fault, after)
        elif not fault.lies and (told := _numbers(done.text)):
            # The latest are asked for: what was stored before may have been evicted, one was invalidated.
            lost = set(told[-1]) - {CHUNKS - 1} - set(_numbers(after.text)[0])
            if lost:
                self._defect(op, n, fault, Outcome(1, f"lost {sorted(lost)}"))
        self._clear()

    def _defect(self, op: str, n: int, fault: Fault, done: Outcome) -> None:
        how = "hung" if done.hung else f"status {done.status}"
        self.defects.append(f"{op} {n}, {fault.name}: {how}\n{done.text[-2500:]}")
        print(f"LOSS {self.defects[-1]}", flush=True)

    def _clear(self) -> None:
        shutil.rmtree(self.place / "root", ignore_errors=True)


def cases(
    counts: dict[str, int], each: int | None, ways: list[str] | None, draw: random.Random
) -> Iterable[tuple[str, int, Fault]]:
    """Every call and every fault, in no order; or (each given) so many of each operation, spread over its calls."""
    chosen: list[tuple[str, int, Fault]] = []
    for op, calls in counts.items():
        faults = [fault for fault in faults_of(op) if not ways or fault.name.removeprefix("lmdb ") in ways]
        if each is None:
            chosen += [(op, n, fault) for n in range(calls) for fault in faults]
            continue
        for i in range(min(each, calls)):
            chosen.append((op, draw.randrange(i * calls // each, max(i * calls // each + 1, (i + 1) * calls // each)),
                           faults[i % len(faults)]))  # fmt: skip
    draw.shuffle(chosen)
    return chosen


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.soak.campaign", description=__doc__)
    parser.add_argument("--dir", type=Path, help="where roots are made; left out: the temporary directory")
    parser.add_argument("--each", type=int, help="so many plays of each operation; left out: all there are")
    parser.add_argument("--op", action="append", help="only this operation; may be given again")
    parser.add_argument("--way", action="append", help="only this fault; may be given again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no play after that")
    parser.add_argument("--loud", action="store_true", help="say how far it got, all 100 plays")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args(words)
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        campaign = Campaign(Path(place), Pages())
        counts = campaign.count()
        wanted = {op: n for op, n in counts.items() if not options.op or op in options.op}
        planned = list(cases(wanted, options.each, options.way, random.Random(options.seed)))
        for case in planned:
            if time.monotonic() >= end:
                break
            campaign.play(*case)
            if options.loud and campaign.plays % 100 == 0:
                print(f"  {campaign.plays} of {len(planned)} plays", flush=True)
    print(f"campaign: seed {options.seed}, {len(planned)} cases of {sum(counts.values())} calls ({CHUNKS} chunks)")
    print("  calls  " + ", ".join(f"{op} {n}" for op, n in counts.items()))
    print("  plays  " + ", ".join(f"{op} {n}" for op, n in campaign.by_op.items()))
    print(
        f"  faults {campaign.plays - campaign.unreached} of {campaign.plays} plays met theirs, "
        f"{campaign.kills} kills; losses {len(campaign.defects)}"
    )
    if campaign.held:
        print("  hung   " + ", ".join(f"{where} {n}" for where, n in sorted(campaign.held.items())))
    return 1 if campaign.defects else 0


if __name__ == "__main__":
    sys.exit(main())
