"""Writers and readers on one root, killed, stopped and failing, and an operator's commands beside them: every byte that
a load brings is looked at.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.soak.housekeeping import Housekeeping
from tests.store import rig
from tests.store.peer import CHUNKS, Dead, Peer, Refused
from tests.store.sharing import agree

WRITERS, READERS = 4, 4
HANG_S = 120.0  # for an answer, however slow the machine: only ever reached by a defect
CAPACITY = 6 << 20
CONFIG = {"capacity_bytes": CAPACITY, "slab_bytes": 65 * 4096, "open_timeout_s": HANG_S}  # half of all CHUNKS fit
LEAST = 200  # chunks that a round stores, and loads, however slow the machine
EVERYTHING = [*range(CHUNKS)]
KINDS = ("process", "power", "none")


class Loss(Exception):
    """Something was lost, wrong, or did not end."""


class Worker:
    """One process, and what it was told to do last."""

    def __init__(self, root: Path, role: str, durability: str) -> None:
        self.role, self.busy, self.doomed = role, False, False
        self.durability, self.since = durability, time.monotonic()
        self.first: dict[str, int] = {}  # its gauges when it had done nothing
        self.peer = Peer(root)

    def open(self) -> None:
        """Once it has started, which takes a while: several do so at a time."""
        self.peer.call("open", housekeeping=True, durability=self.durability, timeout=HANG_S, **CONFIG)
        self.peer.call("register", 7, timeout=HANG_S)
        self.peer.call("engine", timeout=HANG_S)
        self.first = self.peer.call("gauges")

    def begin(self, draw: random.Random) -> None:
        """A while of work."""
        self.busy, self.since = True, time.monotonic()
        self.peer.send(self.role, draw.randrange(1 << 30), draw.uniform(0.2, 1.0))

    def look(self) -> dict[str, int] | None:
        """What it has done, if it has."""
        try:
            done = self.peer.answer(0.005)
        except TimeoutError:
            if time.monotonic() - self.since > HANG_S:
                raise Loss(f"{self.role}: no answer in {HANG_S} s: {self.peer.errors()[-2000:]}") from None
            return None
        self.busy = False
        assert isinstance(done, dict)
        return done


class Storm:
    """Rounds on one root, and what was counted."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.draw = root, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.losses: list[str] = []
        self.workers: list[Worker] = []
        self.keeper = Housekeeping(root, random.Random(seed + 1), self.counts)

    def round(self, seconds: float) -> None:
        """Everybody at once for so long from their start on, and then what is left is looked at. Losses are noted."""
        durability = self.draw.choice(KINDS)
        before = self.counts.copy()
        try:
            for n in range(WRITERS + READERS):
                self._start("loading" if n % 2 else self.draw.choice(["saving", "both"]), durability)
            for worker in self.workers:
                worker.open()
            end = time.monotonic() + seconds
            while time.monotonic() < end or any(
                self.counts[what] - before[what] < LEAST for what in ("loads", "saves")
            ):
                self._step()
            self._kill(self.draw.choice(self.workers))  # at work, at least this one
            self._calm()
            self._after(durability)
        except (Loss, Refused, Dead, AssertionError, TimeoutError) as exc:
            self.losses.append(f"durability {durability}: {type(exc).__name__}: {exc}"[:4000])
        finally:
            self.keeper.stop()
            for worker in self.workers:
                worker.peer.end()
            self.workers = []
        self.counts["rounds"] += 1

    def _start(self, role: str, durability: str) -> Worker:
        self.workers.append(Worker(self.root, role, durability))
        self.counts["processes"] += 1
        return self.workers[-1]

    def _step(self) -> None:
        for worker in list(self.workers):
            try:
                if worker.busy:
                    if (done := worker.look()) is None:
                        continue
                    self.counts.update(done)
                self._rest(worker)
                if self.keeper.is_free:
                    self.keeper.begin(worker.peer.call("digest"))
                worker.begin(self.draw)
            except Dead:
                if not worker.doomed:
                    raise
                self._bury(worker)
        self._strike()
        self.keeper.look()

    def _rest(self, worker: Worker) -> None:
        """Between two whiles: a fault for the next one, or none."""
        worker.peer.call("no_faults")
        if worker.role == "both" or self.draw.random() < 0.5:  # what `both` does besides has no patience with faults
            return
        after = self.draw.randrange(60)
        faults: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            (("fail", "pread", errno.EIO), {}), (("flip", self.draw.randrange(4096)), {}),
            (("fail", "pwrite", errno.ENOSPC), {}), (("short", "pwrite", self.draw.randrange(9000)), {}),
            (("short", "pread", self.draw.randrange(9000)), {}), (("fail", "fsync", errno.EIO), {}),
            (("fail", "fallocate", errno.ENOSPC), {}), (("delay", "lock", 0.01), {}), (("delay", "pwrite", 0.05), {}),
        ]  # fmt: skip
        (action, *args), named = self.draw.choice(faults)
        if action == "flip":
            worker.peer.call("fault", "flip", *args, after=after, times=1)
        else:
            worker.peer.call("fault", action, *args, after=after, times=1, **named)
        self.counts["faults"] += 1

    def _strike(self) -> None:
        """Now and then somebody is killed, at a call of its own or anywhere, or stopped for a while."""
        chance = self.draw.random()
        worker = self.draw.choice(self.workers)
        if chance < 0.02:
            self._kill(worker)
        elif chance < 0.03 and not worker.busy and not worker.doomed:
            op = self.draw.choice(["pwrite", "pread", "lock", "open", "fsync", "rename", "unlink"])
            worker.peer.call("fault", "kill", op, before=self.draw.random() < 0.5, after=self.draw.randrange(80))
            worker.doomed = True
        elif chance < 0.04 and worker.peer.is_alive():
            os.kill(worker.peer.pid, signal.SIGSTOP)
            time.sleep(self.draw.uniform(0.0, 0.3))
            os.kill(worker.peer.pid, signal.SIGCONT)
            self.counts["stops"] += 1

    def _kill(self, worker: Worker) -> None:
        worker.doomed = True
        worker.peer.kill()
        self._bury(worker)

    def _bury(self, worker: Worker) -> None:
        if (status := worker.peer.died()) != -signal.SIGKILL:
            raise Loss(f"a {worker.role} ended with {status}: {worker.peer.errors()[-2000:]}")
        worker.peer.end()
        self.workers.remove(worker)
        self.counts["kills"] += 1
        self._start(worker.role, worker.durability).open()

    def _calm(self) -> None:
        """Everybody comes to rest; nothing is held, nothing was left behind, all agree."""
        self.keeper.rest()
        for worker in list(self.workers):
            try:
                while worker.busy and worker.look() is None:
                    pass
                worker.peer.call("no_faults", timeout=HANG_S)
            except Dead:
                if not worker.doomed or worker.peer.died() != -signal.SIGKILL:
                    raise
                self.workers.remove(worker)
                self.counts["kills"] += 1
        for worker in self.workers:
            now = worker.peer.call("gauges", timeout=HANG_S)
            assert (now["held"], now["leaked"]) == (0, 0), now
            assert now["threads"] <= worker.first["threads"], (worker.first, now)
            assert now["descriptors"] <= worker.first["descriptors"], (worker.first, now)
        if self.workers:
            agree(self.root, [worker.peer for worker in self.workers], CAPACITY)

    def _after(self, durability: str) -> None:
        """All end, by a close or a kill; a fresh process finds its root in order, and what it stores outlives it."""
        for worker in self.workers:
            if self.draw.random() < 0.5:
                worker.peer.kill()
                self.counts["kills"] += 1
            else:
                worker.peer.call("shutdown", timeout=HANG_S)
                assert worker.peer.call("close", HANG_S, timeout=HANG_S) is True
            worker.peer.end()
        self.workers = []
        fresh = self._fresh(durability)
        bits = fresh.call("load", EVERYTHING, timeout=HANG_S)
        self.counts["loaded"] += sum(bits)
        kept = self.draw.sample(EVERYTHING, 12)
        stored = fresh.call("save", kept, timeout=HANG_S)
        assert all(stored), (kept, stored)
        fresh.kill()
        again = self._fresh(durability)
        assert all(again.call("load", kept, timeout=HANG_S)), "what was acknowledged did not outlive a SIGKILL"
        slots = len(again.call("reserve_pages", 1000, timeout=HANG_S))
        assert slots >= 50, f"{slots} slots can be had of the capacity: some were lost to the dead"
        nbytes, _ = rig.disk_use(self.root)
        assert nbytes <= CAPACITY
        again.kill()

    def _fresh(self, durability: str) -> Peer:
        worker = self._start("loading", durability)
        worker.open()
        stats = worker.peer.call("stats")
        assert stats["rebuilds"] == 0, stats["rebuild_reason"]
        assert not stats["rebuild_reason"], stats["rebuild_reason"]
        return worker.peer
