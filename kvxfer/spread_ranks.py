"""One rank's side of several roots: a SpreadTicket is split into its parts, and what ranks say is put together again.

A ticket ends when its last part has, and then every root hears of its own: what fails is a miss in the same pass in
which the server hears of the blocks. Of calls that were given up, and of counters, each root hears at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.errors import EngineClosed, KvxferError, LayoutError
from kvxfer.jobs import Status
from kvxfer.ranks import FREE_S, Ended, Rank, all_failed
from kvxfer.report import engine_reporter
from kvxfer.tickets import Failure, Part, Report, Settled, SpreadTicket

__all__ = ["SpreadRank"]


@dataclass(slots=True, eq=False)
class _Whole:
    """A ticket whose parts are under way."""

    ticket: SpreadTicket
    block_ids: NDArray[np.int64]
    settled: Settled
    left: int  # parts that have not ended
    parts: list[tuple[Part, Settled]] = field(default_factory=list)  # those that have

    def take(self, part: Part, settled: Settled) -> None:
        """A part has ended. (Positions that it has not are of no chunk of the whole.)"""
        known = {place: failure for place, failure in settled.failed.items() if place < len(part.positions)}
        failed = {part.positions[place]: failure for place, failure in known.items()}
        self.settled.merge(Settled(0, failed, settled.nbytes, settled.seconds))
        self.parts.append((part, settled))
        self.left -= 1


class SpreadRank:
    """Ranks of one number over the same pages, one for each root. Its calls are Rank's, over SpreadTickets.

    Args:
        ranks: at least one, in the order of the coordinators; `shutdown` ends them.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = tuple(ranks)
        self._open: dict[int, _Whole] = {}  # by number
        self._parts: dict[tuple[int, int], tuple[_Whole, Part]] = {}  # by root and the part's own number
        self._ended: list[_Whole] = []
        self._settled: list[dict[int, Settled]] = [{} for _ in ranks]  # by root: what is to be said of it
        self._closing = False

    def submit(self, ticket: SpreadTicket, block_ids: ArrayLike) -> None:
        """As Rank.submit. A part that its rank refuses is one that fails."""
        ids = self._ranks[0].block_table(ticket, block_ids)
        if self._closing:
            raise EngineClosed("the rank was shut down")
        if ticket.number in self._open:
            raise LayoutError(f"ticket {ticket.number} was submitted already")
        spread = {position for part in ticket.parts for position in part.positions}
        missed = dict.fromkeys(set(range(ticket.chunks)) - spread, Failure(Status.MISS))
        self._begin(_Whole(ticket, ids, Settled(1, missed), len(ticket.parts)))
        for part in ticket.parts:
            mine = ids[list(part.positions)]
            try:
                self._ranks[part.root].submit(part.ticket, mine)
            except Exception as exc:  # other parts are under way by then: this one ends, and nothing of it has arrived
                known = isinstance(exc, KvxferError)
                engine_reporter.warn("rank", f"a part was refused: {exc}", exc_info=None if known else exc)
                self._ranks[part.root].fail(part.ticket, mine)

    def fail(self, ticket: SpreadTicket, block_ids: NDArray[np.int64]) -> None:
        """As Rank.fail."""
        failed = all_failed(ticket, block_ids)
        if ticket.number in self._open:  # submitted twice: its parts are the first one's
            self._ended.append(_Whole(ticket, block_ids, Settled(0, failed), 0))
            return
        self._begin(_Whole(ticket, block_ids, Settled(1, failed), len(ticket.parts)))
        for part in ticket.parts:
            self._ranks[part.root].fail(part.ticket, block_ids[:0])  # whose rows are of which part is not known

    def _begin(self, whole: _Whole) -> None:
        if not whole.left:
            self._ended.append(whole)
            return
        self._open[whole.ticket.number] = whole
        for part in whole.ticket.parts:
            self._parts[part.root, part.ticket.number] = whole, part

    def collect(self) -> list[Ended]:
        """As Rank.collect: tickets all of whose parts have ended."""
        for root, rank in enumerate(self._ranks):
            for one in rank.collect():
                whole, part = self._parts.pop((root, one.ticket.number))
                whole.take(part, one.settled)
                if not whole.left:
                    del self._open[whole.ticket.number]
                    self._ended.append(whole)
        ended, self._ended = self._ended, []
        for whole in ended:
            for part, settled in whole.parts:
                self._settled[part.root][part.ticket.number] = settled
        return [Ended(whole.ticket, whole.block_ids, whole.settled) for whole in ended]

    def report(self) -> Report:
        """As Rank.report, by root: of tickets that `collect` gave, and no others."""
        report = Report()
        for root, rank in enumerate(self._ranks):
            mine = rank.report()
            mine.settled, self._settled[root] = self._settled[root], {}  # what the parts' own `collect` gave
            if mine:
                report.roots[root] = mine
        return report

    def free(self, numbers: Iterable[int], timeout: float = FREE_S) -> None:
        """As Rank.free, of all parts within `timeout` seconds."""
        end = time.monotonic() + timeout
        parts = [part for number in numbers if number in self._open for part in self._open[number].ticket.parts]
        for root, rank in enumerate(self._ranks):
            mine = [part.ticket.number for part in parts if part.root == root]
            rank.free(mine, max(0.0, end - time.monotonic()))

    def shutdown(self, timeout: float | None = None) -> int:
        """As Rank.shutdown, of all at once."""
        self._closing = True
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            return sum(pool.map(lambda rank: rank.shutdown(timeout), self._ranks))
