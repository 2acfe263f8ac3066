"""Stores and loads of several ranks together, each with its own part of every chunk: the side that decides.

It owns the store. `store` and `load` say which slots a ticket is about, every rank moves its part (ranks.py), and what
they report decides: a chunk is published when all ranks have sealed their parts, and slots come back by reports alone.
Nothing here waits for the disk or another process but the constructor, `reset`, `drain` and `shutdown`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvxfer import _native
from kvxfer.admission import SecondTouch
from kvxfer.bitmap import CompletionBitmap
from kvxfer.breaker import Permit
from kvxfer.config import EngineConfig
from kvxfer.intake import Intake
from kvxfer.jobs import LOAD, STORE, ChunkError, Status
from kvxfer.keys import Namespace, check_key
from kvxfer.observe import Metrics, Observer, engine_values, report_errors, store_values
from kvxfer.placement import Outlook
from kvxfer.report import engine_reporter
from kvxfer.results import PendingJob, TransferResult
from kvxfer.slot import ALIGNMENT, SlotLayout
from kvxfer.store import Access, Entry, Reservation, Store
from kvxfer.supply import SlotSupply
from kvxfer.tickets import NOT_BEGUN, NOWHERE, Failure, Place, Report, Settled, Ticket, chunk_errors, job_outcome

__all__ = ["Coordinator"]

AT_HAND = 64
RESET_S = 10.0  # how long a reset waits for the disk, unless told
SHARE = 4  # reserved ahead is at most 1/SHARE of all slots that there is room for
COUNTERS = tuple(name for name, *_ in _native.Stats._fields_)


@dataclass(slots=True, eq=False)
class _Open:
    """A ticket that not every rank has settled."""

    ticket: Ticket
    owner: str
    job: PendingJob  # for what is counted: every key that was asked for
    index: list[int]  # of the job, for each of the ticket's places
    permit: Permit
    entries: list[Entry | None] = field(default_factory=list)  # loads: pinned, one a place
    slots: list[Reservation] = field(default_factory=list)  # stores: one a place
    settled: Settled = field(default_factory=Settled)


class Coordinator:
    """Tickets for a fixed number of ranks. One thread's.

    Args:
        store: open; stays the caller's, and must outlive this.
        namespace: what the bytes mean; registered here.
        slot: of the root's alignment.
        ranks: how many settle each ticket.
        at_hand: slots reserved ahead at rest: what may be asked for at once.
        stored: is told keys that were published, by whichever thread published them.
        second_touch: shared with coordinators of other roots; None: one of its own, if config asks for it.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        slot: SlotLayout,
        *,
        ranks: int,
        config: EngineConfig | None = None,
        at_hand: int = AT_HAND,
        stored: Callable[[list[bytes]], None] = lambda keys: None,
        clock: Callable[[], float] = time.monotonic,
        second_touch: SecondTouch | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._store, self._slot, self._ranks, self._stored = store, slot, ranks, stored
        self._tokens = namespace.tokens_per_chunk
        self._totals: dict[int, dict[str, int]] = {}  # by rank
        self._intake = Intake(self.config, self._counters, clock, budget=store.write_budget, second_touch=second_touch)
        self._observer = Observer(namespace.tokens_per_chunk / namespace.blocks_per_chunk, store.io_mode)
        room = max(1, store.config.slab_budget[0] // slot.slot_bytes)
        most = max(1, min(self.config.max_queued_store_chunks, room // SHARE))
        self._supply = SlotSupply(store, namespace, slot, least=max(1, at_hand), most=most)
        self._number = 0
        self._open: dict[int, _Open] = {}
        self._queued = {STORE: 0, LOAD: 0}  # chunks of open tickets
        self._writing: dict[bytes, set[Access]] = {}  # keys under way to the store, and who found them so
        self._published: deque[tuple[_Open, list[int], list[bool]]] = deque()  # what the supply has committed
        self._committing = 0
        self._outstanding: dict[int, int] = {}  # generation: writes of ranks that were given up and have not returned
        self._quarantined: dict[int, Reservation] = {}  # by generation
        self._seconds: deque[tuple[int, str, float]] = deque(maxlen=4096)  # of tickets: see `take_seconds`
        self._accesses: dict[str, Access] = {}  # by owner
        self._failed: dict[str, dict[bytes, int]] = {}  # by owner: keys that did not arrive, in which generation
        self._closed = False

    # ---- lookups ---------------------------------------------------------------------------------------------------

    @property
    def digest(self) -> bytes:
        """Of the namespace that tickets which start now are about."""
        return self._supply.digest

    @property
    def digests(self) -> frozenset[bytes]:
        """The same, as those are named who have several roots."""
        return frozenset((self.digest,))

    def contains(self, key: bytes) -> bool:
        """Whether the store has a key, for whatever owner, and whatever the breakers say."""
        return self._store.contains(self.digest, key)

    def lookup(self, key: bytes, owner: str = "") -> bool:
        """Whether a chunk is stored: a claim, which a load proves. False for one that failed this owner, as stored."""
        found = self.answers(key, owner)
        self._observer.looked_up(1, int(found))
        return found

    def answers(self, key: bytes, owner: str = "") -> bool:
        """`lookup`, uncounted."""
        found = self.answers_loads and self.contains(key)
        if found and (failed := self._failed.get(owner)) and key in failed:
            (entry,) = self._store.pin(self.digest, [key], self._access(owner, [key]))
            self._store.unpin([entry])
            found = entry is not None and entry.generation != failed[key]
        return found

    @property
    def answers_loads(self) -> bool:
        """Whether a chunk of a load would be tried now."""
        return self._usable and self._intake.room(1) > 0

    @property
    def takes_stores(self) -> bool:
        """Whether a chunk of a store might be given a slot."""
        room = self._queued[STORE] < self.config.max_queued_store_chunks
        return self._usable and room and self._intake.refusal(STORE) is None

    def knows(self, key: bytes) -> bool:
        """Whether second touch, if it is asked for, would let the chunk be stored."""
        return self._intake.knows(key)

    @property
    def outlook(self) -> Outlook:
        """What one more store would meet. It affords as many chunks as there are slots at hand, at most."""
        room = self.config.max_queued_store_chunks - self._queued[STORE]
        affords = min(self._intake.affords(self._slot.slot_bytes), self._supply.at_hand, room)
        return Outlook(affords, self._store.has_room(self._slot), self._intake.backlog.seconds())

    @property
    def _usable(self) -> bool:
        return not self._closed and not self._supply.outdated

    def touch(self, keys: Collection[bytes], owner: str = "") -> None:
        """Counts as a use of those that are stored."""
        self._store.touch(self.digest, keys, self._access(owner, keys))

    def begin(self, owner: str, access: Access | None = None) -> None:
        """What fails this owner from now on is remembered for it, and what it does to a chunk is one use."""
        self._failed.setdefault(owner, {})
        self._accesses.setdefault(owner, access or Access())

    def end(self, owner: str) -> None:
        """It asks no more."""
        self._failed.pop(owner, None)
        self._accesses.pop(owner, None)

    def _access(self, owner: str, keys: Collection[bytes]) -> Access:
        """Of an owner that has begun; a call of any other is an access by itself."""
        return (self._accesses.get(owner) or Access()).place(keys)

    # ---- tickets ---------------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], owner: str = "", *, seconds: float | None = None) -> Ticket:
        """A ticket for loading these chunks. Those that cannot be read have no place: every rank fails them."""
        outdated = self._supply.outdated  # before the digest, which is the new one once this says no
        digest = self.digest
        names = tuple(map(check_key, keys))
        job = PendingJob(self._next(), LOAD, names, self._blocks(len(keys)), self._access(owner, names))
        entries: list[Entry | None] = [None] * len(keys) if outdated else self._store.pin(digest, keys, job.access)
        permit = self._intake.admit(LOAD, sum(entry is not None for entry in entries))
        room = self.config.max_queued_load_chunks - self._queued[LOAD]
        left = min(permit.chunks, room) if self._intake.enabled else 0
        places: list[Place] = []
        for position, (key, entry) in enumerate(zip(keys, entries, strict=True)):
            if entry is None:
                places.append(Place(key, NOWHERE, 0, 0))
            elif left > 0:
                places.append(Place(key, entry.slab.slab_id, entry.slot, entry.generation))
                left -= 1
            else:  # held back: it is there, and must be a miss for this owner all the same
                places.append(Place(key, NOWHERE, 0, entry.generation))
                self._store.unpin([entry])
                entries[position] = None
        ticket = self._ticket(job, digest, tuple(places), seconds)
        self._open[ticket.number] = _Open(ticket, owner, job, list(range(len(keys))), permit, entries=entries)
        self._queued[LOAD] += len(keys)
        return ticket

    def store(self, keys: Sequence[bytes], owner: str = "") -> tuple[list[bytes], Ticket | None]:
        """A ticket for storing those of these chunks that are not there, and for which there are slots; and which.

        The rest are dropped and counted. No ticket where nothing is to be written.
        """
        self._collect()
        usable = self._usable  # before the digest: see `load`
        digest = self.digest
        names = tuple(map(check_key, keys))
        job = PendingJob(self._next(), STORE, names, self._blocks(len(keys)), self._access(owner, names))
        absent: dict[bytes, int] = {}
        for position, key in enumerate(names):
            if (finders := self._writing.get(key)) is not None:
                finders.add(job.access)
                job.access.gaps.close(key)  # if it fails, this one hears of it
            elif key not in absent and not self._store.contains(digest, key):
                absent[key] = position
        self._store.touch(digest, names, job.access)  # what is there is used, as the engine's stores use it
        wanted, left_out = self._admitted(keys, list(absent.values()), job.access)
        paid = len(wanted)
        permit = self._intake.admit(STORE, len(wanted))
        wanted, held_back = wanted[: permit.chunks], wanted[permit.chunks :]
        slots = self._supply.take(len(wanted)) if wanted and usable else []
        wanted, lacking = wanted[: len(slots)], wanted[len(slots) :]
        self._intake.unspent((paid - len(wanted)) * self._slot.slot_bytes)
        left_out |= dict.fromkeys(held_back, Status.BREAKER) | dict.fromkeys(lacking, Status.NO_SPACE)
        for position, why in left_out.items():
            job.fail(position, why)
        missing = {*left_out, *wanted}
        for position in range(len(keys)):
            if position not in missing:
                job.arrive(position)
        if not wanted:
            self._intake.settle(STORE, permit, None)
            self._observer.settle(job, job.result())
            return [], None
        chosen = [keys[position] for position in wanted]
        places = tuple(
            Place(key, slot.slab.slab_id, slot.slot, slot.generation) for key, slot in zip(chosen, slots, strict=True)
        )
        ticket = self._ticket(job, digest, places, None)
        self._open[ticket.number] = _Open(ticket, owner, job, wanted, permit, slots=slots)
        self._writing |= {key: set() for key in chosen}
        self._queued[STORE] += len(chosen)
        self._intake.weigh(job, len(chosen) * self._slot.slot_bytes)
        return chosen, ticket

    def is_storing(self, key: bytes) -> bool:
        """Whether the key is under way to the store."""
        return key in self._writing

    def withdraw(self, ticket: Ticket) -> None:
        """Takes a ticket back that no rank was told of: nothing of it arrives."""
        failed = dict.fromkeys(range(ticket.chunks), Failure(Status.CANCELLED))
        if not ticket.is_load:
            self._intake.unspent(ticket.chunks * self._slot.slot_bytes)
        self.settle(Report(settled={ticket.number: Settled(self._ranks, failed)}))

    @staticmethod
    def nowhere(keys: Sequence[bytes]) -> Ticket:
        """The ticket of a load that cannot begin, of chunks that are nowhere."""
        places = tuple(Place(key, NOWHERE, 0, 0) for key in keys)
        return Ticket(
            number=NOT_BEGUN, direction=LOAD, digest=bytes(32), alignment=ALIGNMENT, direct=False, places=places
        )

    def _admitted(
        self, keys: Sequence[bytes], absent: list[int], access: Access
    ) -> tuple[list[int], dict[int, Status]]:
        """Positions of what the queue has room for and the intake lets pass, and why not of the others."""
        refused = self._intake.verdict(STORE, 0, 0)
        if refused in (Status.OFF, Status.BACKLOG):  # an open breaker is asked for permits, as it probes
            return [], dict.fromkeys(absent, refused)
        room = max(0, self.config.max_queued_store_chunks - self._queued[STORE])
        absent, dropped = absent[:room], absent[room:]
        names = [keys[position] for position in absent]
        wanted, left_out = self._intake.sift(names, self._slot.slot_bytes, access, self.contains)
        found = {absent[place]: why for place, why in left_out.items()} | dict.fromkeys(dropped, Status.DROPPED)
        return [absent[place] for place in wanted], found

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _blocks(self, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.zeros((n, self._slot.blocks_per_chunk), np.int64)  # which they are is the ranks' business

    def _ticket(self, job: PendingJob, digest: bytes, places: tuple[Place, ...], seconds: float | None) -> Ticket:
        return Ticket(
            number=job.job_id,
            direction=job.direction,
            digest=digest,
            alignment=self._slot.alignment,
            direct=self._store.direct,
            places=places,
            seconds=seconds,
        )

    # ---- reports ---------------------------------------------------------------------------------------------------

    def settle(self, report: Report) -> set[str]:
        """Takes in what ranks say. The first failure of a chunk makes it a miss for the ticket's owner, at once.

        Returns:
            Owners of loads of which something failed.
        """
        short: set[str] = set()
        self._totals |= report.totals
        for generation, ranks in report.lost.items():
            self._outstanding[generation] = self._outstanding.get(generation, 0) + ranks
        for generation, ranks in report.returned.items():
            self._outstanding[generation] = self._outstanding.get(generation, 0) - ranks
        for number, settled in report.settled.items():
            if number == NOT_BEGUN:
                continue
            if (one := self._open.get(number)) is None:
                engine_reporter.warn("ticket", f"a rank settled ticket {number}, which is not open")
                continue
            for position in [p for p in settled.failed if p >= len(one.ticket.places)]:
                del settled.failed[position]  # blocks of a job that was not this ticket's
            one.settled.merge(settled)
            if one.ticket.is_load and settled.failed:
                short.add(one.owner)
                self._note_failures(one, settled.failed)
            self._cut(one, settled.failed)
            if one.settled.ranks >= self._ranks:
                del self._open[number]
                self._queued[one.ticket.direction] -= len(one.ticket.places)
                (self._end_load if one.ticket.is_load else self._end_store)(one)
        self._give_back()
        self._collect()
        self._intake.watch()
        return short

    def _cut(self, one: _Open, failed: dict[int, Failure]) -> None:
        """What failed of a store is a gap of its request, and of those that found it under way."""
        for position, failure in failed.items() if not one.ticket.is_load else ():
            key = one.ticket.places[position].key
            for access in (one.job.access, *self._writing.get(key, ())):
                access.gaps.open(key, failure.status)

    def _note_failures(self, one: _Open, failed: dict[int, Failure]) -> None:
        """Of a load, on the first ranks that say so: a miss for its owner, and where it is damage for everybody."""
        places = [one.ticket.places[position] for position in failed]
        if (known := self._failed.get(one.owner)) is not None:
            known |= {place.key: place.generation for place in places}
        for position, failure in failed.items():
            entry = one.entries[position]
            if failure.status.is_damage and entry is not None:
                self._store.invalidate(entry, failure.status.name.lower())

    def _end_load(self, one: _Open) -> None:
        failed = one.settled.failed
        self._store.unpin(one.entries)
        self._intake.settle(LOAD, one.permit, job_outcome(one.ticket, one.settled))
        names = ["" if entry is None else entry.slab.name for entry in one.entries]
        self._finish(one, chunk_errors(failed, names))

    def _end_store(self, one: _Open) -> None:
        """All ranks are done: what is whole is published, the rest comes back."""
        failed, ticket = one.settled.failed, one.ticket
        whole = [position for position in range(len(ticket.places)) if position not in failed]
        for position in failed:
            self._quarantine_or_release(one.slots[position])
        self._intake.settle(STORE, one.permit, job_outcome(ticket, one.settled))
        self._intake.backlog.wrote(len(whole) * self._slot.slot_bytes)
        self._intake.weigh(one.job, 0)
        mask = (1 << self._slot.blocks_per_chunk) - 1
        items = [(ticket.places[position].key, one.slots[position], mask) for position in whole]

        def done(answers: list[bool]) -> None:
            self._published.append((one, whole, answers))
            try:
                self._stored([key for (key, _, _), there in zip(items, answers, strict=True) if there])
            except Exception as exc:  # whoever listens must not end the thread that publishes
                engine_reporter.failed("stored", "a listener failed", exc)

        self._committing += 1
        if items:
            self._supply.commit(ticket.digest, items, done, one.job.access)
        else:
            self._published.append((one, whole, []))

    def _quarantine_or_release(self, slot: Reservation) -> None:
        if self._outstanding.get(slot.generation, 0) > 0:
            self._store.quarantine(slot)
            self._quarantined[slot.generation] = slot
        else:
            self._store.release([slot])

    def _give_back(self) -> None:
        """Slots under writes that were given up come back once all of these have returned."""
        for generation in [g for g, writes in self._outstanding.items() if writes <= 0]:
            if (slot := self._quarantined.pop(generation, None)) is not None:
                self._store.release([slot])
            if slot is not None or not any(self._holds(one, generation) for one in self._open.values()):
                del self._outstanding[generation]

    def _holds(self, one: _Open, generation: int) -> bool:
        return any(slot.generation == generation for slot in one.slots)

    def _collect(self) -> None:
        """Takes note of what was committed."""
        while self._published:
            one, whole, answers = self._published.popleft()
            self._committing -= 1
            lost = [position for position, there in zip(whole, answers, strict=True) if not there]
            failed = one.settled.failed | dict.fromkeys(lost, Failure(Status.INDEX))
            self._cut(one, failed)  # what ranks said too: others may have found it under way since
            for place in one.ticket.places:
                self._writing.pop(place.key, None)
            one.job.moved = len(one.ticket.places) - len(failed)
            self._finish(one, chunk_errors(failed, [slot.slab.name for slot in one.slots]))

    def _finish(self, one: _Open, errors: tuple[ChunkError, ...]) -> None:
        """Counts a ticket that has ended."""
        job, settled = one.job, one.settled
        if settled.nbytes:
            self._seconds.append((one.ticket.direction, self._store.io_mode, settled.seconds))
        job.native_ids.append(one.ticket.number)  # it reached the storage
        failed = {error.chunk for error in errors} | settled.failed.keys()
        arrived = set(range(len(job.keys))) - {one.index[position] for position in failed}
        dropped = job.result().errors  # of a store: what was left out from the start
        arrived -= {error.chunk for error in dropped}
        result = TransferResult(
            job.job_id,
            CompletionBitmap.from_bools(position in arrived for position in range(len(job.keys))),
            settled.nbytes,
            settled.seconds,
            (*dropped, *(replace(error, chunk=one.index[error.chunk]) for error in errors)),
        )
        self._observer.settle(job, result)
        if errors:
            report_errors(job, result.errors, str(self._store.config.root))

    # ---- the rest --------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether there are tickets that not all ranks have settled, or chunks that are being published."""
        self._collect()
        return bool(self._open or self._committing)

    def drain(self, timeout: float) -> bool:
        """Wait for what the ranks have settled to be published. False if `timeout` seconds did not suffice."""
        done = self._supply.flush(timeout)
        self._collect()
        return done

    def reset(self, timeout: float = RESET_S) -> bool:
        """Makes everything stored so far a miss: here at once, for all processes when it is written down.

        Returns:
            False: it could not be within `timeout` seconds. It is tried on; until then nothing is loaded or stored.
        """
        return self._supply.raise_epoch(timeout)

    def metrics(self) -> Metrics:
        """Every series, of all ranks together. Never blocks."""
        self._collect()
        stats = self._counters() | {"jobs_open": len(self._open)}
        limit = sum(totals.get("staging_limit", 0) for totals in self._totals.values())
        read = engine_values(stats, self._queued, limit, self._intake)
        store = store_values(self._store.stats())
        return Metrics(self._observer.counted() | read, store, id(self._store), self._store.drives.values())

    def take_seconds(self) -> list[tuple[int, str, float]]:
        """Direction, I/O path and time of the tickets that moved bytes and ended since the last call."""
        return [self._seconds.popleft() for _ in range(len(self._seconds))]

    def _counters(self) -> dict[str, int]:
        """Of all ranks' runners, added up."""
        return {name: sum(totals.get(name, 0) for totals in self._totals.values()) for name in COUNTERS}

    def shutdown(self, timeout: float | None = None) -> bool:
        """Publish what all ranks have sealed, and end. Ranks should have been shut down.

        Slots that a rank may still write to stay this process's until it ends.

        Returns:
            False: the thread that publishes is in a call that has not returned.
        """
        if self._closed:
            return True
        self._closed = True
        ended = self._supply.close(self.config.shutdown_timeout_s if timeout is None else timeout)
        self._collect()
        for one in self._open.values():
            self._store.unpin(one.entries)
            for slot in one.slots:
                self._store.quarantine(slot)
        self._open.clear()
        engine_reporter.flush(everything=True)
        return ended
