"""What the campaign plays with one fault in it: store, load, evict, invalidate, close, open again, load, collect."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.errors import KvxferError
from kvxfer.results import TransferResult
from kvxfer.store import Store, members, room
from kvxfer.store import index as index_module
from tests.engine.rig import GEOMETRY, expect, keys_of, namespace_of, ranks
from tests.oracle import POISON, Model

CHUNKS = 40
WAIT_S = 60.0  # for what must end: only ever reached by a defect
CAPACITY, SLAB = 4 << 20, 17 * 4096 * 8  # a few slabs: storing CHUNKS twice over evicts


class Pages:
    """The model's bytes, to store from, and room to load into; made once, before the processes that use it."""

    def __init__(self) -> None:
        self.model = Model.random(GEOMETRY, CHUNKS, seed=11)
        self.source: list[KVPages] = ranks(self.model, "nhd", 2, filled=True)
        self.target: list[KVPages] = ranks(self.model, "hnd", 1, filled=False)

    def poison(self) -> None:
        """Nothing was loaded."""
        for mine in self.target:
            for tensor in mine.tensors:
                tensor[:] = POISON


class Session:
    """A store and its two engines, in this process."""

    def __init__(
        self, root: Path, pages: Pages, *, durability: str = "process", io: str = "auto", bump: bool = False
    ) -> None:
        """Raises KvxferError, with nothing left open. bump: begins with another weight epoch.

        For processes that do nothing else: what a store leaves alone for a while is tried at once from now on.
        """
        index_module.RECOVERY_INTERVAL_S = room.RETRY_S = 0.0
        self.pages, self._job = pages, 0
        self.came: list[int] | None = None  # with the last load
        config = StoreConfig(root=root, capacity_bytes=CAPACITY, slab_bytes=SLAB, durability=durability, io=io)
        self.engines: list[TransferEngine] = []
        with self.own():
            self.store = Store.open(config, writers=2, housekeeping=False)
            try:
                if bump:
                    self.store.bump_epoch()
                for mine in (pages.source, pages.target):
                    self.engines.append(TransferEngine(self.store, namespace_of(), mine, config=self.how()))
            except BaseException:
                self.close()
                raise

    def how(self) -> EngineConfig:
        """Of both engines."""
        return EngineConfig(io_threads=1, shutdown_timeout_s=WAIT_S, breaker_failures=0)

    def own(self) -> AbstractContextManager[None]:
        """Around calls of this thread that may wait for the drive for as long as it takes."""
        return nullcontext()

    def save(self, numbers: Sequence[int]) -> list[int]:
        """Those that were stored."""
        self._job += 1
        self.engines[0].submit_store(self._job, keys_of(numbers), [*numbers])
        return _with_bits(numbers, self.result(self.engines[0], self._job))

    def load(self, numbers: Sequence[int], deadline: float | None = None) -> list[int]:
        """Those that came: every byte of them is right, and no other byte was written."""
        self._job += 1
        self.pages.poison()
        self.engines[1].submit_load(self._job, keys_of(numbers), [*numbers], deadline=deadline)
        self.came = came = _with_bits(numbers, self.result(self.engines[1], self._job))
        self.check_pages()
        return came

    def check_pages(self) -> None:
        """The pages have what came with the last load, and nothing else."""
        if self.came is not None:
            expect(self.pages.model, "hnd", self.pages.target, self.came)

    def keep(self, numbers: Sequence[int]) -> None:
        """What was acknowledged can be loaded, if not at the first try then at the next."""
        if self.load(numbers) != numbers:
            assert self.load(numbers) == numbers

    def result(self, engine: TransferEngine, job: int) -> TransferResult:
        """Of a job."""
        results = engine.wait([job], WAIT_S)
        assert list(results) == [job], "a job without a result"
        return results[job]

    def check_gauges(self) -> None:
        """Nothing is held once all jobs have their results."""
        stats = self.store.stats()
        assert (stats.pinned_entries, stats.reserved_slots, stats.quarantined_slots) == (0, 0, 0), stats
        for engine in self.engines:
            assert engine.stats()["leaked_bytes"] == 0

    def close(self) -> None:
        """Bounded, and complete."""
        for engine in self.engines:
            assert engine.shutdown(WAIT_S) == 0, "threads in calls that never returned"
        assert self.store.close(WAIT_S), "a call on the root never returned"


def _with_bits(numbers: Sequence[int], result: TransferResult) -> list[int]:
    return [k for k, bit in zip(numbers, result.bitmap, strict=True) if bit]


def descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:  # that of the listing itself
            continue
    return found


def threads() -> int:
    """Of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


class Scene:
    """One play, over a root of its own."""

    def __init__(
        self, root: Path, pages: Pages, told: Callable[[Sequence[int]], None], *, strict: bool = True, io: str = "auto"
    ) -> None:
        """`told` hears of chunks when they are acknowledged; strict: no read tells what is not so."""
        self.root, self.pages, self.told, self.strict, self.io = root, pages, told, strict, io
        self.refused: list[KvxferError] = []

    def play(self) -> None:
        """All of it. Whatever is not a documented error of the call that had it comes out."""
        self._session(self._fill, bump=True)
        self._damage()
        self._session(self._again)
        assert len(self.refused) <= 1, self.refused  # one fault costs one call at most

    def open(self, bump: bool) -> Session:
        """Raises KvxferError, with nothing left open."""
        return Session(self.root, self.pages, durability="power", io=self.io, bump=bump)

    def _session(self, work: Callable[[Session], None], bump: bool = False) -> None:
        try:
            session = self.open(bump)
        except KvxferError as exc:
            self.refused.append(exc)
            session = self.open(bump)  # the fault has passed
        try:
            work(session)
            session.check_gauges()
        finally:
            session.close()

    def _keep(self, session: Session, numbers: Sequence[int]) -> None:
        """Stores these."""
        stored = session.save(numbers)
        self.told(stored)
        if self.strict:
            session.keep(stored)

    def _fill(self, session: Session) -> None:
        for first in range(0, CHUNKS, 10):
            self._keep(session, [*range(first, first + 10)])
            session.load([*range(first + 10)])
        with session.own():
            (entry,) = session.store.pin(session.engines[0].digest, keys_of([CHUNKS - 1]))
            if entry is not None:
                session.store.invalidate(entry, "bad_sum")
            session.store.unpin([entry])
            session.store.maintain()
        self._keep(session, [0, 1])

    def _damage(self) -> None:
        """A slab that grew, one that was half made, an index that is gone: the open has to mend all three."""
        slabs = sorted((self.root / "slabs").glob("slab-*.kvx")) if (self.root / "slabs").is_dir() else []
        if slabs:
            with slabs[0].open("ab") as file:
                file.write(b"x" * 5000)
            (self.root / "slabs" / "slab-00000099.kvx.tmp").write_bytes(b"half")
        (self.root / "index" / "data.mdb").unlink(missing_ok=True)

    def _again(self, session: Session) -> None:
        session.load([*range(CHUNKS)])
        self._keep(session, [*range(0, CHUNKS, 2)])


def verify(root: Path, pages: Pages) -> list[int]:
    """A fresh session without faults: what comes is right, what it stores it finds. Those that came."""
    session = Session(root, pages, durability="power")
    try:
        came = session.load([*range(CHUNKS)])
        again = session.save([*range(12)])
        assert again == [*range(12)], again
        assert session.load([*range(12)]) == [*range(12)]
        session.check_gauges()
        return came
    finally:
        session.close()


def settled(before: tuple[set[str], int]) -> None:
    """Asserts that descriptors and threads are what they were."""
    end = time.monotonic() + WAIT_S
    while threads() > before[1] and time.monotonic() < end:
        time.sleep(0.002)
    assert threads() <= before[1], f"{threads()} threads, {before[1]} before"
    extra = {each for each in descriptors() - before[0] if str(Path("/proc")) not in each}
    assert not extra, f"left open: {sorted(extra)}"


assert members.LOCK_TIMEOUT_S < WAIT_S
