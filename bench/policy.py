"""The policies' rows: what an eviction looks at, whether that grows with what is held, and vLLM's own beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import ClassVar, Protocol

from bench.options import Options
from bench.table import Row, Table, figure
from kvxfer.policy import POLICIES as NAMES
from kvxfer.policy import CachePolicy, make_policy

__all__ = ["run"]

MOST_VISITED = 2.0  # entries looked at for one that is evicted
MOST_SLOWER = 3.0  # time an evicted entry takes among many held ones, by that among few
MOST_OF_VLLM = 1.0  # time, by that of vLLM's own policy of the same name
BATCH = 256  # entries of one eviction, as a store's transaction has
EVICTED = 2048  # in one round
CHAIN = 64  # chunks that follow one another, where they do
PEERS = ("lru", "arc")  # that vLLM has


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


def _maker(name: str) -> Callable[[], CachePolicy[Chunk]]:
    return lambda: make_policy(name)


POLICIES: dict[str, Callable[[], CachePolicy[Chunk]]] = {name: _maker(name) for name in NAMES}


class Cache(Protocol):
    """What is done to a policy, by whomever it is."""

    def insert(self, chunks: Sequence[Chunk]) -> None: ...
    def pin(self, chunks: Sequence[Chunk]) -> None: ...
    def touch(self, chunks: Sequence[Chunk]) -> None: ...
    def link(self, chunks: Sequence[Chunk]) -> None: ...
    def evict(self, n: int) -> list[Chunk]: ...
    def __len__(self) -> int: ...


class Own:
    """kvxfer's, called as its store does."""

    def __init__(self, policy: CachePolicy[Chunk]) -> None:
        self._policy = policy

    def insert(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._policy.insert(chunk)

    def pin(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._policy.pin(chunk)

    def touch(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._policy.touch(chunk)

    def link(self, chunks: Sequence[Chunk]) -> None:
        for parent, chunk in pairwise(chunks):
            self._policy.link(chunk, parent)

    def evict(self, n: int) -> list[Chunk]:
        victims = self._policy.victims(n)
        for victim in victims:
            self._policy.remove(victim)
        return victims

    def __len__(self) -> int:
        return len(self._policy)


class Full:
    """A cache that holds `held` entries, a third of them used again, and as many more that are pinned: the oldest."""

    def __init__(self, cache: Cache, kind: type[Chunk], held: int, chain: int = 1) -> None:
        self.cache = cache
        self._kind, self._next, self._chain = kind, 0, chain
        self.held: dict[int, Chunk] = {}
        pinned = [self._new() for _ in range(held)]
        cache.insert(pinned)
        cache.pin(pinned)
        self.store(held)
        cache.touch(list(self.held.values())[::3])

    def _new(self, number: int | None = None) -> Chunk:
        self._next += number is None
        return self._kind(self._next if number is None else number)

    def store(self, n: int, again: Sequence[Chunk] = ()) -> list[Chunk]:
        """Inserts n chunks, in chains; those of `again` under the names they had."""
        names: list[int | None] = [int.from_bytes(chunk.key, "big") for chunk in again]
        chunks = [self._new(name) for name in names + [None] * (n - len(names))]
        self.cache.insert(chunks)
        if self._chain > 1:
            for start in range(0, n, self._chain):
                self.cache.link(chunks[start : start + self._chain])
        self.held.update((id(chunk), chunk) for chunk in chunks)
        return chunks

    def check(self, victims: list[Chunk], n: int) -> str | None:
        """Takes the victims out of what is held; what is wrong with them."""
        if len(victims) != n:
            return f"{len(victims)} of {n} victims"
        wrong = sum(self.held.pop(id(victim), None) is None for victim in victims)
        if wrong:
            return f"{wrong} victims were pinned, evicted before or named twice"
        if len(self.cache) != len(self.held):
            return f"{len(self.cache)} entries are held, not {len(self.held)}"
        return None

    def round(self) -> tuple[float, float, int, str | None]:
        """(seconds an evicted entry, and with its store and uses; entries visited; what was wrong).

        What is held is as much as before then. Seconds are the process's own: others' work does not count.
        """
        evicting, all_of_it, visited, why = 0.0, 0.0, 0, None
        evicted = min(EVICTED, len(self.held) // 2)
        for start in range(0, evicted, BATCH):
            n = min(BATCH, evicted - start)
            Seen.visited.clear()
            begin = time.process_time()
            victims = self.cache.evict(n)
            took = time.process_time() - begin
            visited += len(Seen.visited)
            why = why or self.check(victims, n)
            begin = time.process_time()
            stored = self.store(n, victims[: n // 8])  # some come back, so that ghosts are met and the target moves
            self.cache.touch(stored[::4])
            evicting += took
            all_of_it += took + time.process_time() - begin
        return evicting / evicted, all_of_it / evicted, visited, why


SHAPES = {"": 1, f" in chains of {CHAIN}": CHAIN}


def visited_rows(options: Options) -> list[Row]:
    """A count: the same on every machine."""
    rows = []
    for shape, chain in SHAPES.items():
        for name, make in POLICIES.items():
            full = Full(Own(make()), Seen, options.entries[0], chain)
            _, _, visited, why = full.round()
            evicted = min(EVICTED, options.entries[0] // 2)
            case = f"eviction of {BATCH}, {options.entries[0]:,} held{shape}"
            unit = "entries visited per evicted"
            rows.append(figure(case, name, visited / evicted, unit, most=MOST_VISITED, why=why))
    return rows


def time_rows(options: Options) -> list[Row]:
    """Rounds among few and among many take turns. What iterates over entries without asking them shows here alone."""
    few, many = options.entries
    rows = []
    for shape, chain in SHAPES.items():
        for name, make in POLICIES.items():
            taken, why = _in_turns([Full(Own(make()), Chunk, held, chain) for held in (few, many)], options.runs)
            seconds = [[evicting for evicting, _ in each] for each in taken]
            for held, own in zip((few, many), seconds, strict=True):
                found = statistics.median(own) * 1e9
                case = f"eviction, {held:,} held{shape}"
                rows.append(figure(case, name, found, "ns per evicted", why=why, runs=len(own)))
            ratio = statistics.median(mine / base for base, mine in zip(*seconds, strict=True))
            case = f"eviction, {many:,} held by {few:,}{shape}"
            unit = "x the time per evicted"
            rows.append(figure(case, name, ratio, unit, most=MOST_SLOWER, why=why, runs=options.runs))
    return rows


def peer_rows(options: Options, peer: Callable[[str, int], Cache]) -> list[Row]:
    """The same operations on vLLM's policy of the same name, round by round."""
    rows = []
    for held in options.entries:
        for name in PEERS:
            own, theirs = Full(Own(POLICIES[name]()), Chunk, held), Full(peer(name, 2 * held), Chunk, held)
            (mine, base), why = _in_turns([own, theirs], options.runs)
            for part, what in enumerate(("eviction", "eviction, store and use")):
                case = f"{what}, {held:,} held"
                for impl, each in ((name, mine), (f"vLLM's {name}", base)):
                    found = statistics.median(one[part] for one in each) * 1e9
                    rows.append(figure(case, impl, found, "ns per evicted", why=why, runs=len(each)))
                ratio = statistics.median(a[part] / b[part] for a, b in zip(mine, base, strict=True))
                unit = "x vLLM's time"
                rows.append(figure(case, name, ratio, unit, most=MOST_OF_VLLM, why=why, runs=options.runs))
    return rows


def _in_turns(caches: list[Full], runs: int) -> tuple[list[list[tuple[float, float]]], str | None]:
    """For each cache the times of its rounds, and what was wrong with any."""
    taken: list[list[tuple[float, float]]] = [[] for _ in caches]
    why = None
    for number in range(runs + 1):
        for own, full in zip(taken, caches, strict=True):
            evicting, all_of_it, _, wrong = full.round()
            why = why or wrong
            if number:  # the first is the warm-up
                own.append((evicting, all_of_it))
    return taken, why


def run(table: Table, options: Options) -> None:
    """Adds the policies' rows."""
    table.note(f"policy: batches of {BATCH}; beside what is held as many pinned entries, the oldest of all")
    table.add(visited_rows(options))
    table.add(time_rows(options))
    if find_spec("vllm") is None:
        table.note("policy: no rows beside vLLM's own: vLLM is not installed in this environment: make bench-vllm")
        return
    from bench.policy_peers import Vllm, release

    table.note(f"policy: beside vLLM {release()}'s own, of as many entries and the same operations in the same turns")
    table.add(peer_rows(options, Vllm))
