"""Adaptive replacement."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from kvxfer.policy.base import CachePolicy, T, chunk_name


class ARCPolicy(CachePolicy[T]):
    """Adaptive replacement (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003).

    What was stored and never used since ("recent") and what was used ("frequent") are two orders, each the least recent
    first. Names of what either of them lost lately are its ghosts. A ghost that is inserted again says that its order
    was too short, and moves the target: how many entries `recent` is to have. So a scan, which uses nothing twice,
    passes through `recent` and leaves `frequent` alone.

    Where this differs from the paper: a store makes room before it knows for whom, so that victims are chosen with the
    target as it was before an insertion. Pinned entries are in neither order: they come back as the most recent of
    `frequent`, for a pin is a use.

    Args:
        name_of: the name by which an entry is remembered.
        capacity: the entries that are held at most, the paper's c, which bounds the ghosts of both orders together
            and the target. None: as many as there ever were at once, which a store fills up to its cap.
    """

    def __init__(self, *, name_of: Callable[[T], Hashable] = chunk_name, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self._name_of = name_of
        self._fixed = capacity
        self._known = self._peak = 0
        self._recent: OrderedDict[T, None] = OrderedDict()
        self._frequent: OrderedDict[T, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._target = 0.0
        self._named: set[T] = set()  # by the `victims` that was the latest call but for their own removals
        self._evicted: dict[T, OrderedDict[T, None]] = {}  # since the latest `victims`: the order each was in

    @property
    def capacity(self) -> int:
        """The paper's c, in entries."""
        return self._peak if self._fixed is None else self._fixed

    @property
    def target(self) -> float:
        """How many entries the order of those that were used once is to have; the paper's p."""
        return self._target

    @property
    def ghosts(self) -> int:
        """Names remembered; at most `capacity`."""
        return len(self._recent_ghosts) + len(self._frequent_ghosts)

    def insert(self, item: T) -> None:
        """As the most recent: of `frequent` a ghost, of its own order an undone eviction, of `recent` any other."""
        self._named.clear()
        self._known += 1
        self._peak = max(self._peak, self._known)
        name = self._name_of(item)
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        order = self._frequent
        if (before := self._evicted.pop(item, None)) is not None:
            self._recent_ghosts.pop(name, None)
            self._frequent_ghosts.pop(name, None)
            order = before
        elif name in self._recent_ghosts:
            self._target = min(self._target + max(1.0, frequent / recent), float(self.capacity))
            del self._recent_ghosts[name]
        elif name in self._frequent_ghosts:
            self._target = max(self._target - max(1.0, recent / frequent), 0.0)
            del self._frequent_ghosts[name]
        else:
            order = self._recent
        order[item] = None
        self._bound_ghosts()

    def touch(self, item: T) -> None:
        """Makes a held one the most recent of `frequent`; a pinned one becomes that anyway."""
        self._named.clear()
        if item in self._frequent:
            self._frequent.move_to_end(item)
        elif item in self._recent:
            del self._recent[item]
            self._frequent[item] = None

    def pin(self, item: T) -> None:
        """Takes it out of its order."""
        self._named.clear()
        if item in self._recent:
            del self._recent[item]
        else:
            del self._frequent[item]

    def unpin(self, item: T) -> None:
        """Back, as the most recent of `frequent`."""
        self._named.clear()
        self._frequent[item] = None

    def remove(self, item: T) -> None:
        """Forgets it; remembers its name if it was evicted."""
        self._known -= 1
        order = self._recent if item in self._recent else self._frequent
        if item not in self._named:
            self._named.clear()
            order.pop(item, None)
            return
        self._named.remove(item)
        del order[item]
        self._evicted[item] = order
        ghosts = self._recent_ghosts if order is self._recent else self._frequent_ghosts
        ghosts[self._name_of(item)] = None
        self._bound_ghosts()

    def victims(self, n: int) -> list[T]:
        """The least recent of `recent` while that is longer than the target, else of `frequent`, n times over."""
        chosen = self._choose(n)
        self._named = set(chosen)
        self._evicted = {}
        return chosen

    def first(self) -> T | None:
        """The one that would go first."""
        return next(iter(self._choose(1)), None)

    def _choose(self, n: int) -> list[T]:
        recent, frequent = iter(self._recent), iter(self._frequent)
        in_recent, in_frequent = len(self._recent), len(self._frequent)
        chosen: list[T] = []
        for _ in range(min(n, in_recent + in_frequent)):
            if in_recent and (in_recent > self._target or not in_frequent):
                in_recent -= 1
                chosen.append(next(recent))
            else:
                in_frequent -= 1
                chosen.append(next(frequent))
        return chosen

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def _bound_ghosts(self) -> None:
        """The oldest go: `recent` and its ghosts are at most the capacity, and so are all ghosts together."""
        most = self.capacity
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > most:
            self._recent_ghosts.popitem(last=False)
        while self.ghosts > most:
            (self._frequent_ghosts or self._recent_ghosts).popitem(last=False)
