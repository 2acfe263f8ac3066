"""The policies' rows: what an eviction looks at, and whether that grows with what is held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import ClassVar

from bench.options import Options
from bench.table import Row, Table, figure
from kvxfer.policy import ARCPolicy, CachePolicy, LRUPolicy

__all__ = ["run"]

MOST_VISITED = 2.0  # entries looked at for one that is evicted
MOST_SLOWER = 3.0  # time an evicted entry takes among many held ones, by that among few
BATCH = 256  # entries of one eviction, as a store's transaction has
EVICTED = 2048  # in one round


class Chunk:
    """As a store's entry: compared by identity, with a name."""

    __slots__ = ("digest", "key")

    def __init__(self, number: int) -> None:
        self.digest = b"bench"
        self.key = number.to_bytes(8, "big")


class Seen(Chunk):
    """One that says when anything looks at it: at its hash, its equality or its name."""

    __slots__ = ("_digest",)
    visited: ClassVar[set[int]] = set()

    def __hash__(self) -> int:
        Seen.visited.add(id(self))
        return id(self)

    def __eq__(self, other: object) -> bool:
        Seen.visited.add(id(self))
        return self is other

    @property
    def digest(self) -> bytes:
        Seen.visited.add(id(self))
        return self._digest

    @digest.setter
    def digest(self, digest: bytes) -> None:
        self._digest = digest


POLICIES: dict[str, Callable[[], CachePolicy[Chunk]]] = {"lru": LRUPolicy, "arc": ARCPolicy}


class Full:
    """A policy that holds `held` entries, a third of them used again, and as many more that are pinned: the oldest."""

    def __init__(self, make: Callable[[], CachePolicy[Chunk]], kind: type[Chunk], held: int) -> None:
        self.policy = make()
        self._kind, self._next = kind, 0
        self.held: dict[int, Chunk] = {}
        self.pinned = [self._new() for _ in range(held)]
        for chunk in self.pinned:
            self.policy.insert(chunk)
            self.policy.pin(chunk)
        self.store(held)
        for chunk in list(self.held.values())[::3]:
            self.policy.touch(chunk)

    def _new(self, number: int | None = None) -> Chunk:
        self._next += number is None
        return self._kind(self._next if number is None else number)

    def store(self, n: int, again: tuple[Chunk, ...] = ()) -> None:
        """Inserts n chunks; those of `again` under the names they had."""
        names: list[int | None] = [int.from_bytes(chunk.key, "big") for chunk in again]
        for name in names + [None] * (n - len(names)):
            chunk = self._new(name)
            self.policy.insert(chunk)
            self.held[id(chunk)] = chunk

    def evict(self, n: int) -> list[Chunk]:
        """What a store does to make room."""
        victims = self.policy.victims(n)
        for victim in victims:
            self.policy.remove(victim)
        return victims

    def check(self, victims: list[Chunk], n: int) -> str | None:
        """Takes the victims out of what is held; what is wrong with them."""
        if len(victims) != n:
            return f"{len(victims)} of {n} victims"
        wrong = sum(self.held.pop(id(victim), None) is None for victim in victims)
        if wrong:
            return f"{wrong} victims were pinned, evicted before or named twice"
        if len(self.policy) != len(self.held):
            return f"{len(self.policy)} entries are held, not {len(self.held)}"
        return None

    def round(self) -> tuple[float, int, str | None]:
        """(seconds an evicted entry, entries visited, what was wrong); then what is held is as much as before."""
        took, visited, why = 0.0, 0, None
        evicted = min(EVICTED, len(self.held) // 2)
        for start in range(0, evicted, BATCH):
            n = min(BATCH, evicted - start)
            Seen.visited.clear()
            begin = time.perf_counter()
            victims = self.evict(n)
            took += time.perf_counter() - begin
            visited += len(Seen.visited)
            why = why or self.check(victims, n)
            self.store(n, tuple(victims[: n // 8]))  # some come back, so that ghosts are met and the target moves
        return took / evicted, visited, why


def visited_rows(options: Options) -> list[Row]:
    """A count: the same on every machine."""
    rows = []
    for name, make in POLICIES.items():
        full = Full(make, Seen, options.entries[0])
        _, visited, why = full.round()
        evicted = min(EVICTED, options.entries[0] // 2)
        case = f"eviction of {BATCH}, {options.entries[0]:,} held"
        unit = "entries visited per evicted"
        rows.append(figure(case, name, visited / evicted, unit, most=MOST_VISITED, why=why))
    return rows


def time_rows(options: Options) -> list[Row]:
    """Rounds among few and among many take turns. What iterates over entries without asking them shows here alone."""
    few, many = options.entries
    rows = []
    for name, make in POLICIES.items():
        caches = [Full(make, Chunk, held) for held in (few, many)]
        seconds: list[list[float]] = [[], []]
        why = None
        for number in range(options.runs + 1):
            for own, full in zip(seconds, caches, strict=True):
                took, _, wrong = full.round()
                why = why or wrong
                if number:  # the first is the warm-up
                    own.append(took)
        for held, own in zip((few, many), seconds, strict=True):
            found = statistics.median(own) * 1e9
            rows.append(figure(f"eviction, {held:,} held", name, found, "ns per evicted", why=why, runs=len(own)))
        ratio = statistics.median(mine / base for base, mine in zip(*seconds, strict=True))
        case = f"eviction, {many:,} held by {few:,}"
        rows.append(figure(case, name, ratio, "x the time per evicted", most=MOST_SLOWER, why=why, runs=options.runs))
    return rows


def run(table: Table, options: Options) -> None:
    """Adds the policies' rows."""
    table.note(f"policy: batches of {BATCH}; beside what is held as many pinned entries, the oldest of all")
    missing = "vLLM is not installed" if find_spec("vllm") is None else "there is no driver for its policies yet"
    table.note(f"policy: no rows beside vLLM's own: {missing}")
    table.add(visited_rows(options))
    table.add(time_rows(options))
