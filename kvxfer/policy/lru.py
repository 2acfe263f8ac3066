"""The least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice

from kvxfer.policy.base import CachePolicy, T, chunk_name


class LRUPolicy(CachePolicy[T]):
    """The least recently used goes first. Pinned entries leave the order and come back as the most recent."""

    def __init__(self, *, name_of: Callable[[T], Hashable] = chunk_name, capacity: int | None = None) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def insert(self, item: T) -> None:
        """As the most recent."""
        self._order[item] = None

    def touch(self, item: T) -> None:
        """Makes a held one the most recent; a pinned one becomes that anyway."""
        if item in self._order:
            self._order.move_to_end(item)

    def pin(self, item: T) -> None:
        """Takes it out of the order."""
        del self._order[item]

    def unpin(self, item: T) -> None:
        """Back, as the most recent."""
        self._order[item] = None

    def remove(self, item: T) -> None:
        """Forgets it."""
        self._order.pop(item, None)

    def victims(self, n: int) -> list[T]:
        """The n least recent ones, the least recent first."""
        return list(islice(self._order, max(0, n)))

    def __len__(self) -> int:
        return len(self._order)
