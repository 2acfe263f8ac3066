"""Several drives behind one coordinator's face: chunks are spread over the roots of several coordinators.

Every root is a whole store of its own, with its own slots at hand and circuit breakers, and hears what the ranks say of
it alone. So a drive that fails, fills or vanishes costs the chunks that lie on it, and nothing else: they become
misses, and stores go to the others. Where a chunk is, and goes, placement.py says, as for engines (spread.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from kvxfer.coordinator import RESET_S, Coordinator
from kvxfer.intake import place_over_roots
from kvxfer.jobs import LOAD, STORE
from kvxfer.observe import Metrics, together
from kvxfer.placement import Placement
from kvxfer.store import Access
from kvxfer.tickets import NOT_BEGUN, Part, Report, SpreadTicket, Ticket

__all__ = ["SpreadCoordinator"]


class SpreadCoordinator:
    """Coordinators of one namespace and as many ranks, each with a root on a drive of its own. One thread's.

    Its calls are Coordinator's, with the same arguments, errors and results, over SpreadTickets and the reports of
    SpreadRanks. A part counts by itself: `kvxfer_jobs_total` and the histograms have one for each root of a ticket.

    Args:
        coordinators: at least one; `shutdown` ends them, their stores stay the caller's. With `second_touch_names` they
            share one `second_touch`: a chunk is not always offered to the same one.
        weights: how much each is to get beside the others, such as its capacity in bytes.

    Raises:
        ConfigError: no coordinator, or not as many positive weights.
    """

    def __init__(self, coordinators: Sequence[Coordinator], weights: Sequence[float]) -> None:
        self._coordinators = tuple(coordinators)
        self._placement = Placement(self._coordinators, weights)
        self._number = 0
        self._accesses: dict[str, Access] = {}  # by owner: the whole, of which each root has a part

    # ---- lookups ---------------------------------------------------------------------------------------------------

    @property
    def digests(self) -> frozenset[bytes]:
        """The namespace's digest in each root: they have weight epochs of their own."""
        return frozenset(each.digest for each in self._coordinators)

    def contains(self, key: bytes) -> bool:
        """Whether any root has it."""
        return any(each.contains(key) for each in self._coordinators)

    def lookup(self, key: bytes, owner: str = "") -> bool:
        """As Coordinator.lookup: in a root that answers, and in which it did not fail this owner."""
        return self._coordinators[self._home(key, owner)].lookup(key, owner)

    def _home(self, key: bytes, owner: str) -> int:
        return self._placement.home(key, lambda number: self._coordinators[number].answers(key, owner))

    def touch(self, keys: Collection[bytes], owner: str = "") -> None:
        """As Coordinator.touch. A root hears of the keys that it has: the others' are no gaps in its chains."""
        if (access := self._accesses.get(owner)) is not None:
            access.place(keys)
        for each in self._coordinators:
            each.touch([key for key in keys if each.contains(key)], owner)

    def begin(self, owner: str, access: Access | None = None) -> None:
        """As Coordinator.begin."""
        whole = self._accesses.setdefault(owner, access or Access())
        for number, each in enumerate(self._coordinators):
            each.begin(owner, whole.part(number))

    def end(self, owner: str) -> None:
        """As Coordinator.end."""
        self._accesses.pop(owner, None)
        for each in self._coordinators:
            each.end(owner)

    # ---- tickets ---------------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], owner: str = "", *, seconds: float | None = None) -> SpreadTicket:
        """As Coordinator.load."""
        homes = [self._home(key, owner) for key in keys]
        where = {root: [n for n, home in enumerate(homes) if home == root] for root in dict.fromkeys(homes or [0])}

        def begin(root: int) -> Ticket:
            return self._coordinators[root].load([keys[n] for n in where[root]], owner, seconds=seconds)

        begun = self._begun(where, begin)
        return self._ticket(LOAD, len(keys), [Part(root, ticket, tuple(where[root])) for root, ticket in begun.items()])

    def store(self, keys: Sequence[bytes], owner: str = "") -> tuple[list[bytes], SpreadTicket | None]:
        """As Coordinator.store."""
        if (access := self._accesses.get(owner)) is not None:
            place_over_roots(keys, access, self.contains)
        found = self._placement.look()
        homes = {key: self._placement.place(key, found, self._storing(key))[0] for key in dict.fromkeys(keys)}
        written: set[bytes] = set()

        def begin(root: int) -> Ticket | None:
            chosen, ticket = self._coordinators[root].store([key for key in keys if homes[key] == root], owner)
            written.update(chosen)
            return ticket

        begun = self._begun(dict.fromkeys(homes.values()), begin)
        chosen = [key for key in homes if key in written]
        if not chosen:
            return [], None
        order = {key: position for position, key in enumerate(chosen)}
        parts = [Part(root, each, tuple(order[place.key] for place in each.places)) for root, each in begun.items()]
        return chosen, self._ticket(STORE, len(chosen), parts)

    def _storing(self, key: bytes) -> int | None:
        """Which root the key is under way to."""
        return next((root for root, each in enumerate(self._coordinators) if each.is_storing(key)), None)

    def _begun(self, roots: Iterable[int], begin: Callable[[int], Ticket | None]) -> dict[int, Ticket]:
        """The tickets that `begin` gives for these roots: all, or none where one raises."""
        tickets: dict[int, Ticket] = {}
        with ExitStack() as undo:
            for root in roots:
                if (ticket := begin(root)) is not None:
                    undo.callback(self._coordinators[root].withdraw, ticket)
                    tickets[root] = ticket
            undo.pop_all()
        return tickets

    def _ticket(self, direction: int, chunks: int, parts: Iterable[Part]) -> SpreadTicket:
        self._number += 1
        return SpreadTicket(number=self._number, direction=direction, chunks=chunks, parts=tuple(parts))

    @staticmethod
    def nowhere(keys: Sequence[bytes]) -> SpreadTicket:
        """As Coordinator.nowhere."""
        return SpreadTicket(number=NOT_BEGUN, direction=LOAD, chunks=len(keys), parts=())

    # ---- reports ---------------------------------------------------------------------------------------------------

    def settle(self, report: Report) -> set[str]:
        """As Coordinator.settle, of each root. What one raises is raised when all have heard theirs."""
        short: set[str] = set()
        failed: list[Exception] = []
        for number, each in enumerate(self._coordinators):
            try:
                short |= each.settle(report.roots.get(number, Report()))
            except Exception as exc:  # a defect of one root's must not keep the others' slots
                failed.append(exc)
        if failed:
            raise failed[0]
        return short

    # ---- the rest --------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """As Coordinator.is_busy, of any."""
        return any(each.is_busy for each in self._coordinators)

    def drain(self, timeout: float) -> bool:
        """As Coordinator.drain, of all within `timeout` seconds."""
        end = time.monotonic() + timeout
        drained = [each.drain(max(0.0, end - time.monotonic())) for each in self._coordinators]
        return all(drained)

    def reset(self, timeout: float = RESET_S) -> bool:
        """As Coordinator.reset, in every root at once."""
        return all(self._at_once(lambda each: each.reset(timeout)))

    def metrics(self) -> Metrics:
        """The sums: gauges too, so that `kvxfer_breaker_state` says how many drives are in a state."""
        return together([each.metrics() for each in self._coordinators], id(self))

    def take_seconds(self) -> list[tuple[int, str, float]]:
        """As Coordinator.take_seconds, of each part."""
        return [one for each in self._coordinators for one in each.take_seconds()]

    def shutdown(self, timeout: float | None = None) -> bool:
        """As Coordinator.shutdown, of all at once."""
        return all(self._at_once(lambda each: each.shutdown(timeout)))

    def _at_once(self, call: Callable[[Coordinator], bool]) -> list[bool]:
        with ThreadPoolExecutor(len(self._coordinators)) as pool:
            return list(pool.map(call, self._coordinators))
