"""Three first-in first-out queues."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from kvxfer.policy.base import CachePolicy, T, chunk_name

SMALL = 0.1  # share of the capacity that is for entries on probation
MOST_USES = 3  # what the clock bits count to


class S3FIFOPolicy(CachePolicy[T]):
    """S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023)."""

    def __init__(self, *, name_of: Callable[[T], Hashable] = chunk_name, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self._name_of, self._fixed = name_of, capacity
        self._peak = 0
        self._small: OrderedDict[T, int] = OrderedDict()  # uses
        self._main: OrderedDict[T, int] = OrderedDict()
        self._pinned: dict[T, tuple[OrderedDict[T, int], int]] = {}
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._named: set[T] = set()

    @property
    def capacity(self) -> int:
        """In entries."""
        return self._peak if self._fixed is None else self._fixed

    def insert(self, item: T) -> None:
        """Into the main queue if it is remembered, else into the small one."""
        self._named.clear()
        name = self._name_of(item)
        queue = self._main if name in self._ghosts else self._small
        self._ghosts.pop(name, None)
        queue[item] = 0
        self._peak = max(self._peak, len(self) + len(self._pinned))

    def touch(self, item: T) -> None:
        """Counts a use."""
        self._named.clear()
        for queue in (self._small, self._main):
            if item in queue:
                queue[item] = min(MOST_USES, queue[item] + 1)

    def pin(self, item: T) -> None:
        """Takes it out of its queue."""
        self._named.clear()
        queue = self._small if item in self._small else self._main
        self._pinned[item] = queue, queue.pop(item)

    def unpin(self, item: T) -> None:
        """Back, as the newest, with a use more."""
        self._named.clear()
        queue, uses = self._pinned.pop(item)
        queue[item] = min(MOST_USES, uses + 1)

    def remove(self, item: T) -> None:
        """Forgets it; remembers its name if it was evicted from the small queue."""
        if item in self._named and item in self._small:
            self._ghosts[self._name_of(item)] = None
            while len(self._ghosts) > self.capacity:
                self._ghosts.popitem(last=False)
        for queue in (self._small, self._main, self._pinned):
            queue.pop(item, None)

    def victims(self, n: int) -> list[T]:
        """The oldest of the small queue while that is longer than its share, else of the main queue."""
        chosen: list[T] = []
        small, main = OrderedDict(self._small), OrderedDict(self._main)
        while len(chosen) < n and (small or main):
            if small and (len(small) >= max(1, SMALL * self.capacity) or not main):
                item, uses = small.popitem(last=False)
                if uses > 1:
                    main[item] = 0
                else:
                    chosen.append(item)
            else:
                item, uses = main.popitem(last=False)
                if uses:
                    main[item] = uses - 1
                else:
                    chosen.append(item)
        self._named = set(chosen)
        return chosen

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
