"""What a coordinator and its ranks must survive: words that come twice or make no sense, and long random runs."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.errors import ForkError, LayoutError
from kvxfer.jobs import JobRunner, Status
from kvxfer.layout import kvx1_slot
from kvxfer.ranks import Ended
from kvxfer.slabs import SlabFiles
from kvxfer.store.slab import SlabFile
from kvxfer.testing import FaultyIO
from kvxfer.tickets import NOWHERE, Failure, Report, Settled, SpreadTicket, Ticket
from tests.engine.ranks_rig import GEOMETRY, MODEL, Server, keys_of, one_root, two_as_one
from tests.jobs.test_faults import until
from tests.oracle import Model

__all__ = ["two_as_one"]  # every test here is run over one root and over two


@one_root
def test_a_rank_that_names_chunks_that_the_ticket_has_not(tmp_root: Path) -> None:
    """It costs nobody else anything: other tickets of the same report end, and this one too."""
    with Server(tmp_root, 1) as server:
        server.put(range(3))
        server.coordinator.begin("a")
        odd = server.coordinator.load(keys_of([0]), "a")
        plain = server.coordinator.load(keys_of([1]), "b")
        _, store = server.coordinator.store(keys_of([5]))
        assert store is not None
        wrong = {0: Failure(Status.STALLED), 7: Failure(Status.STALLED)}
        settled = {odd.number: Settled(1, wrong), plain.number: Settled(1), store.number: Settled(1, {9: wrong[0]})}
        assert server.coordinator.settle(Report(settled=settled)) == {"a"}
        end = time.monotonic() + 10
        while server.coordinator.is_busy:
            assert time.monotonic() < end, "tickets stay open"
        assert server.store.stats().pinned_entries == 0
        assert server.hits([0, 1, 2], "a") == [1, 2]


@one_root
def test_files_stay_open_until_the_job_has_them(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of more slabs than are kept open, and one under which the root is made anew: a closed file's place in
    memory may be another's, and then its chunk would be read from there, or written there."""
    slabs = {"slab_bytes": 4096 + 2 * kvx1_slot(MODEL.geometry, blocks_per_chunk=1).slot_bytes}
    submit = JobRunner.submit

    with Server(tmp_root, 1, writes=slabs) as server:
        files = server.group.parts[0][0]._files

        def submitted(
            runner: JobRunner, number: int, direction: int, parts: Any, records: bytes, *rest: Any, **more: Any
        ) -> None:
            size = ctypes.sizeof(_native.Chunk)
            named = {_native.Chunk.from_buffer_copy(records, at).file for at in range(0, len(records), size)}
            assert named <= {slab.handle for slab in (*files._open.values(), *files._old)}
            submit(runner, number, direction, parts, records, *rest, **more)

        monkeypatch.setattr(JobRunner, "submit", submitted)
        files._most = 2
        assert server.put(range(12)) == keys_of(range(12)) and len({server.locate(n)[0] for n in range(12)}) > 4
        assert server.get(range(12)) == [Status.OK] * 12
        assert server.get([0]) == [Status.OK]
        until(lambda: len(files._open) == 2, "the rest are closed")
        monkeypatch.setattr(SlabFile, "is_named", lambda slab: False)
        assert server.get(range(12)) == [Status.OK] * 12


def test_a_ticket_that_is_submitted_twice_is_two_jobs_and_settled_once(tmp_root: Path) -> None:
    """Or the coordinator takes one rank's word for another's, and gives slots away that are being written."""
    with Server(tmp_root, 2) as server, FaultyIO() as io:
        io.hang("pwrite")
        _, ticket = server.coordinator.store(keys_of(range(4)))
        server.group.submit(ticket, range(4))
        rank = server.group.ranks[0]
        with pytest.raises(LayoutError, match="submitted already"):
            rank.submit(ticket, range(4))
        rank.fail(ticket, np.arange(4).reshape(4, 1))
        server.coordinator.settle(server.group.report())
        assert [len(ended) for ended in server.group.ended] == [1, 0] and server.coordinator.is_busy
        io.release()
        server.settle()
        assert [len(ended) for ended in server.group.ended] == [2, 1]
        assert server.hits(range(4)) == list(range(4))


@pytest.mark.parametrize("call", ["submit", "fail"])
def test_a_forks_child_is_told_whoever_has_the_lock(tmp_root: Path, call: str) -> None:
    with Server(tmp_root, 1) as server:
        _, ticket = server.coordinator.store(keys_of(range(4)))
        first = server.group.parts[0][0]
        if (child := os.fork()) == 0:
            signal.alarm(20)
            first._lock = threading.Condition(threading.Lock())
            first._lock.acquire()  # as a thread that is not here any more
            try:
                getattr(server.group.ranks[0], call)(ticket, np.arange(4).reshape(4, 1))
            except ForkError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


@one_root
def test_a_process_that_was_stopped_takes_no_file_for_one_that_does_not_open(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job has waited as long as its process has lived meanwhile. One that does not open is given up in the end."""
    now = time.monotonic()
    monkeypatch.setattr("kvxfer.ranks.time", SimpleNamespace(monotonic=lambda: now))
    with Server(tmp_root, 1) as source:
        source.put(range(4))
    with Server(tmp_root, 1, filled=False, io_timeout_s=80.0) as target, FaultyIO() as io:
        (rank,) = target.group.ranks
        rule = io.hang("open", times=1)
        ticket = target.coordinator.load(keys_of(range(4)))
        target.group.submit(ticket, range(4))
        until(lambda: rule.hits == 1, "its slab is being opened")
        now += 3600.0
        assert not rank.collect()
        io.release()
        assert target.wait(ticket) == [Status.OK] * 4
        now += 3600.0
        rule = io.hang("open", times=1)
        rank._files.close()
        ticket = target.coordinator.load(keys_of(range(4)))
        target.group.submit(ticket, range(4))
        until(lambda: rule.hits == 1, "its slab is being opened again")
        for _ in range(79):
            now += 1.0
            assert not rank.collect()
        now += 1.0
        assert target.wait(ticket) == [Status.STALLED] * 4


@one_root
def test_files_stay_open_until_their_job_has_ended(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's runner hands a job on in batches, when there are bays: until then nobody else keeps its files."""
    slabs = {"slab_bytes": 4096 + 2 * kvx1_slot(MODEL.geometry, blocks_per_chunk=1).slot_bytes}
    closed: list[SlabFile] = []
    close = SlabFile.close
    monkeypatch.setattr(SlabFile, "close", lambda slab: (closed.append(slab), close(slab)))
    with Server(tmp_root, 1, writes=slabs) as server, FaultyIO() as io:
        server.put(range(12))
        rank = server.group.parts[0][0]
        rule = io.hang("pread", times=1)  # of two threads one
        ticket = server.coordinator.load(keys_of([0]))
        server.group.submit(ticket, [0])
        until(lambda: rule.hits == 1, "it is under way")
        files = rank._files
        mine, files._most = files._open[server.places(ticket)[0].slab], 1
        closed.clear()
        monkeypatch.setattr(SlabFile, "is_named", lambda slab: False)
        second = server.coordinator.load(keys_of(range(1, 12)))
        server.group.submit(second, range(1, 12))
        until(lambda: (rank._settle(), second.number not in rank._jobs)[1], "it has ended, and nobody uses its files")
        third = server.coordinator.load(keys_of([2]))
        server.group.submit(third, [2])
        until(lambda: len(closed) >= 5, "those are closed")
        assert mine not in closed
        io.release()
        assert server.wait(ticket) == [Status.OK] and server.get([1]) == [Status.OK]
        until(lambda: mine in closed, "and this too, then")
    assert not files._open and not files._old


@one_root
def test_what_was_kept_open_for_a_job_is_closed_at_the_end(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[SlabFile] = []
    close = SlabFile.close
    with Server(tmp_root, 1) as server:
        server.put([0])
        (entry,) = server.store.pin(server.coordinator.digest, keys_of([0]))
        assert entry is not None
        files = SlabFiles(tmp_root)
        old = files.get(entry.slab.slab_id, entry.slab.layout, direct=False)
        monkeypatch.setattr(SlabFile, "is_named", lambda slab: False)
        new = files.get(entry.slab.slab_id, entry.slab.layout, direct=False)
        server.store.unpin([entry])
        monkeypatch.setattr(SlabFile, "close", lambda slab: (closed.append(slab), close(slab)))
        files.trim({old})
        assert closed == []
        files.close()
        assert closed == [old, new]


def test_a_listener_that_raises_does_not_end_the_publishing(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as server:
        told: list[bytes] = []

        def stored(keys: list[bytes]) -> None:
            told.extend(keys)
            raise RuntimeError("a defect of whoever listens")

        for each in server.coordinators:
            each._stored = stored
        server.put([0])
        server.put([1])
        assert told == keys_of([0, 1]) and server.hits([0, 1]) == [0, 1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_random_runs_with_room_for_a_few_chunks(tmp_root: Path, tp_size: int, seed: int) -> None:
    """Blocks change as soon as a store is freed, calls fail, hang and come back, slots are damaged, epochs are raised.

    Whatever arrives is the chunk's own bytes of its epoch; blocks that are nobody's stay as they were; each ticket ends
    once on each rank; and at the end nothing is pinned, reserved or in quarantine.
    """
    rng = random.Random(f"{tp_size} {seed}")
    how: dict[str, Any] = {"capacity_bytes": 4 << 20, "io_timeout_s": 0.15, "breaker_failures": 0, "model": MANY}
    with Server(tmp_root, tp_size, **how) as server, FaultyIO() as io:
        run = Run(server, rng)
        for _ in range(150):
            rng.choice([run.store, run.store, run.load, run.load, run.step, run.step, run.step])()
            which = {"times": 1, "offset": (1 << 17, 1 << 40), "after": rng.randrange(3)}  # slots alone
            match rng.randrange(24):
                case 0:
                    io.hang(rng.choice(["pread", "pwrite"]), **which)
                case 1:
                    io.fail(rng.choice(["pread", "pwrite"]), errno.EIO, **which)
                case 2:
                    io.flip(rng.randrange(4096), **which)
                case 3:
                    io.release()
                case 4:
                    run.reset()
                case 5:
                    time.sleep(0.2)
                case 6 | 7:
                    run.free()
        io.release()
        end = time.monotonic() + 30
        while server.coordinator.is_busy or server.total("quarantined_slots"):
            assert time.monotonic() < end
            run.step()
        run.check()
        assert run.arrived > 0 and not run.jobs
        for each in server.coordinators:
            assert not each._outstanding and not each._writing and set(each._queued.values()) == {0}
        server.group.shutdown()
        assert server.coordinator.shutdown(5.0)
        assert [server.total(what) for what in ("pinned_entries", "reserved_slots", "quarantined_slots")] == [0] * 3


MANY = Model.random(GEOMETRY, 40)
NOBODYS = 0xEE


class Job:
    def __init__(
        self, ticket: Ticket | SpreadTicket, chunks: list[int], blocks: list[int], epoch: int, ranks: int
    ) -> None:
        self.ticket, self.chunks, self.blocks, self.epoch = ticket, chunks, blocks, epoch
        self.left = set(range(ranks))


class Run:
    """Chunk c of epoch e is what the model has in block c + e. Every job has blocks of its own on every rank."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.arrived = self.epoch = 0
        self.jobs: dict[int, Job] = {}
        self.pages = server.group.pages
        self.source = [[np.array(tensor) for tensor in mine.tensors] for mine in self.pages]
        self.free_blocks = set(range(MANY.num_blocks))
        for block in self.free_blocks:
            self.fill(block, None)

    def part(self, rank: int, tensor: int, block: int, *, source: bool = False) -> np.ndarray[Any, Any]:
        where = self.pages[rank].mapping.tensors[tensor]
        start = where.offset + block * where.block_stride
        memory = self.source[rank][tensor] if source else self.pages[rank].tensors[tensor]
        return memory.reshape(-1)[start : start + where.page_bytes]

    def fill(self, block: int, number: int | None) -> None:
        for rank, mine in enumerate(self.pages):
            for tensor in range(len(mine.tensors)):
                self.part(rank, tensor, block)[:] = (
                    NOBODYS if number is None else self.part(rank, tensor, number, source=True)
                )

    def holds(self, rank: int, block: int, number: int | None) -> bool:
        return all(
            bool((self.part(rank, t, block) == NOBODYS).all())
            if number is None
            else np.array_equal(self.part(rank, t, block), self.part(rank, t, number, source=True))
            for t in range(len(self.pages[rank].tensors))
        )

    def number(self, chunk: int, epoch: int) -> int:
        return (chunk + epoch) % MANY.num_blocks

    def take(self, n: int) -> list[int]:
        taken = self.rng.sample(sorted(self.free_blocks), min(n, len(self.free_blocks)))
        self.free_blocks.difference_update(taken)
        for block in taken:
            for rank in range(len(self.pages)):
                assert self.holds(rank, block, None), f"rank {rank} wrote to block {block}, which was nobody's"
        return taken

    def give(self, blocks: list[int]) -> None:
        for block in blocks:
            self.fill(block, None)
        self.free_blocks.update(blocks)

    def check(self) -> None:
        self.give(self.take(MANY.num_blocks))

    def store(self) -> None:
        chunks = self.rng.sample(range(12), self.rng.randint(1, 4))
        if len(self.free_blocks) < len(chunks):
            return
        keys, ticket = self.server.coordinator.store(keys_of(chunks))
        if ticket is None:
            return
        chunks = [chunk for chunk in chunks if keys_of([chunk])[0] in keys]
        blocks = self.take(len(chunks))
        for chunk, block in zip(chunks, blocks, strict=True):
            self.fill(block, self.number(chunk, self.epoch))
        self.begin(ticket, chunks, blocks)

    def load(self) -> None:
        chunks = [chunk for chunk in range(12) if self.server.coordinator.lookup(keys_of([chunk])[0], "a")]
        chunks = self.rng.sample(chunks, min(len(chunks), self.rng.randint(1, 5)))
        if self.rng.random() < 0.2:
            chunks = self.rng.sample(range(12), 2)
        if not chunks or len(self.free_blocks) < len(chunks):
            return
        blocks = self.take(len(chunks))
        seconds = self.rng.choice([None, None, 0.0, 0.05])
        self.begin(self.server.coordinator.load(keys_of(chunks), "a", seconds=seconds), chunks, blocks)

    def begin(self, ticket: Ticket | SpreadTicket, chunks: list[int], blocks: list[int]) -> None:
        self.jobs[ticket.number] = Job(ticket, chunks, blocks, self.epoch, len(self.pages))
        self.server.group.submit(ticket, blocks)

    def step(self) -> None:
        time.sleep(self.rng.choice([0, 0.001, 0.01]))
        only = [rank for rank in range(len(self.pages)) if self.rng.random() < 0.8]
        report = self.server.group.report(only)
        for rank, ended in enumerate(self.server.group.ended):
            for one in ended:
                self.end(rank, one)
            ended.clear()
        self.server.coordinator.settle(report)

    def end(self, rank: int, one: Ended) -> None:
        job = self.jobs[one.ticket.number]
        job.left.remove(rank)
        if job.ticket.is_load:
            for position, (chunk, block) in enumerate(zip(job.chunks, job.blocks, strict=True)):
                if position not in one.settled.failed:
                    assert self.holds(rank, block, self.number(chunk, job.epoch)), f"chunk {chunk} on rank {rank}"
                    self.arrived += 1
        if not job.left:
            del self.jobs[one.ticket.number]
            self.give(job.blocks)

    def free(self) -> None:
        """As vLLM's `wait`: the blocks of a store are another's from now on."""
        if not self.jobs:
            return
        job = self.rng.choice(list(self.jobs.values()))
        for rank in self.server.group.ranks:
            rank.free([job.ticket.number], 0.05)
        if not job.ticket.is_load:
            self.give(job.blocks)
            job.blocks = []

    def reset(self) -> None:
        self.server.coordinator.reset()
        self.epoch += 1


@pytest.mark.parametrize("fault", ["fail", "hang"])
def test_a_reset_that_cannot_be_written_down_is_one_all_the_same(tmp_root: Path, fault: str) -> None:
    """Bytes of old weights are wrong output. Until the new epoch is on the drive nothing is loaded or stored here."""
    with Server(tmp_root, 2) as server:
        server.put(range(3))
        under_way = server.coordinator.store(keys_of([7]))[1]
        assert under_way is not None
        with FaultyIO() as io:
            rule = io.fail("rename", errno.EIO) if fault == "fail" else io.hang("rename", times=server.roots)
            start = time.monotonic()
            assert not server.coordinator.reset(0.3)
            assert time.monotonic() - start < 15 and rule.hits > 0
            assert server.hits(range(3)) == []
            assert server.coordinator.store(keys_of([8])) == ([], None)
            ticket = server.coordinator.load(keys_of(range(3)), "a")
            assert {place.slab for place in server.places(ticket)} == {NOWHERE}
            server.group.submit(ticket, [0, 1, 2])
            server.group.submit(under_way, [7])
            end = time.monotonic() + 10
            while any(each._open for each in server.coordinators):
                assert time.monotonic() < end
                server.coordinator.settle(server.group.report())
        end = time.monotonic() + 30
        while not server.put([8]):
            assert time.monotonic() < end
        assert server.hits([0, 1, 2, 7, 8]) == [8]
        until(lambda: {store.weight_epoch for store in server.stores} == {1}, "every root has it")
        assert server.hits([0, 1, 2, 7, 8]) == [8]


def test_a_reset_that_could_not_be_written_down_is_tried_again_at_the_end(tmp_root: Path) -> None:
    with Server(tmp_root, 1) as server:
        server.put(range(3))
        with FaultyIO() as io:
            io.fail("rename", errno.EIO)
            assert not server.coordinator.reset(0.1)
        server.group.shutdown()
        server.coordinator.shutdown(5.0)
    with Server(tmp_root, 1) as again:
        assert again.hits(range(3)) == []
