"""What a coordinator and its ranks tell each other about loads and stores. Plain data: it crosses processes.

    coordinator  --Ticket-->  every rank          which chunks, and where each of them is
    coordinator  <--Report--  all ranks, merged   what became of them

Every rank moves its own part of every chunk of a ticket and settles it exactly once. A chunk counts when all ranks have
settled it without a failure.

Over several roots (spread_coordinator.py, spread_ranks.py) a SpreadTicket has a Ticket for each root that has some of
its chunks, and a Report has a Report for each root.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvxfer.jobs import LOAD, ChunkError, JobOutcome, Status

NOWHERE = -1  # Place.slab of a chunk that is not in the store
NOT_BEGUN = -1  # number of the tickets of loads that could not begin: nothing of them arrives, and nobody settles them


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk is, or is to be, by names that mean the same in every process."""

    key: bytes
    slab: int  # its number, or NOWHERE
    slot: int  # of the slab
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One load or store."""

    number: int  # of its coordinator; never given twice
    direction: int  # jobs.STORE or jobs.LOAD
    digest: bytes  # of the namespace, 32 bytes
    alignment: int  # of the root
    direct: bool  # whether its files are opened with O_DIRECT
    places: tuple[Place, ...]  # in prefix order
    seconds: float | None = None  # loads: a rank ends it so long after it began, with what has arrived

    @property
    def is_load(self) -> bool:
        """Whether it is a load."""
        return self.direction == LOAD

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.places)


@dataclass(frozen=True, slots=True)
class Part:
    """What of a ticket is on one of several roots."""

    root: int
    ticket: Ticket  # of the root's own coordinator
    positions: tuple[int, ...]  # in the whole, of each of its places


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadTicket:
    """One load or store over several roots. A rank settles each part to its root, all of them when the last has ended.

    What is in no part is a miss.
    """

    number: int  # of its coordinator; never given twice
    direction: int  # jobs.STORE or jobs.LOAD
    chunks: int
    parts: tuple[Part, ...]  # one at most for each root

    @property
    def is_load(self) -> bool:
        """Whether it is a load."""
        return self.direction == LOAD


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank's part of a chunk did not make it."""

    status: Status
    errno: int = 0

    @property
    def gravity(self) -> tuple[int, int, int]:
        """Of several ranks' failures the gravest counts: damage, then a write that may still land, then the rest."""
        return (2 if self.status.is_damage else self.status is Status.LOST, int(self.status), self.errno)


@dataclass(slots=True)
class Settled:
    """What ranks say of one ticket."""

    ranks: int = 0  # that have settled it
    failed: dict[int, Failure] = field(default_factory=dict)  # by position in the ticket
    nbytes: int = 0  # payload moved, over the ranks
    seconds: float = 0.0  # the slowest rank's

    def merge(self, other: Settled) -> None:
        """Takes in what other ranks say: a chunk that failed on any of them has failed."""
        self.ranks += other.ranks
        self.nbytes += other.nbytes
        self.seconds = max(self.seconds, other.seconds)
        for position, failure in other.failed.items():
            known = self.failed.get(position)
            if known is None or known.gravity < failure.gravity:
                self.failed[position] = failure


@dataclass(slots=True)
class Report:
    """What ranks have to say since they were last asked. Merging gives the same in any order."""

    settled: dict[int, Settled] = field(default_factory=dict)  # by number of the ticket
    lost: dict[int, int] = field(default_factory=dict)  # generation: ranks whose write into it has not returned
    returned: dict[int, int] = field(default_factory=dict)  # generation: ranks whose lost write has returned now
    totals: dict[int, dict[str, int]] = field(default_factory=dict)  # by rank: its runner's counters
    roots: dict[int, Report] = field(default_factory=dict)  # of several: what there is to say of each

    def __bool__(self) -> bool:
        return bool(self.settled or self.lost or self.returned or self.totals or self.roots)

    def merge(self, other: Report) -> None:
        """Takes in other ranks' report."""
        for number, settled in other.settled.items():
            self.settled.setdefault(number, Settled()).merge(settled)
        for mine, theirs in ((self.lost, other.lost), (self.returned, other.returned)):
            for generation, ranks in theirs.items():
                mine[generation] = mine.get(generation, 0) + ranks
        self.totals |= other.totals
        for root, report in other.roots.items():
            self.roots.setdefault(root, Report()).merge(report)


def chunk_errors(failed: dict[int, Failure], where: Iterable[str] = ()) -> tuple[ChunkError, ...]:
    """Failures as a TransferResult lists them; plain misses are not listed."""
    names = tuple(where)
    return tuple(
        ChunkError(position, failure.status, failure.errno, where=names[position] if names else "")
        for position, failure in sorted(failed.items())
        if failure.status is not Status.MISS
    )


def job_outcome(ticket: Ticket, settled: Settled) -> JobOutcome:
    """What the ranks say together of a ticket, as the breaker wants it."""
    status = np.zeros(ticket.chunks, np.uint8)
    for position, failure in settled.failed.items():
        status[position] = Status.CANCELLED if failure.status is Status.MISS else failure.status
    return JobOutcome(ticket.number, ticket.direction, settled.nbytes, 0.0, status, chunk_errors(settled.failed))
