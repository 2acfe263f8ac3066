"""Which entries go first when a store is full. Policies know nothing of slots, files or locks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class CachePolicy(ABC, Generic[T]):
    """Orders entries by worth. An entry is in one of three states:

        unknown --insert--> held --pin--> pinned --unpin--> held
                            held or pinned --remove--> unknown

    Only held entries are ever victims, so asking for n of them visits about n entries however many are pinned.
    Entries are compared by identity (hash and equality must not depend on what may change). Not thread-safe: the
    store calls it under its table's lock. Each method but `victims` takes constant time, amortised.

    A policy that remembers what it gave up (ARC, S3-FIFO) takes the name to remember from the entry in `remove` and
    looks for it in `insert`.
    """

    @abstractmethod
    def insert(self, item: T) -> None:
        """Pre: `item` is unknown. Post: held, and not among the next victims if the policy can help it."""

    @abstractmethod
    def touch(self, item: T) -> None:
        """Says that `item` was used. Pre: held or pinned. Post: in the same state."""

    @abstractmethod
    def pin(self, item: T) -> None:
        """Pre: held. Post: pinned: no victim until `unpin`."""

    @abstractmethod
    def unpin(self, item: T) -> None:
        """Pre: pinned. Post: held; counts as a use."""

    @abstractmethod
    def remove(self, item: T) -> None:
        """Pre: held or pinned. Post: unknown."""

    @abstractmethod
    def victims(self, n: int) -> list[T]:
        """The n held entries of least worth (all of them if fewer are held), the least first. Changes nothing."""

    @abstractmethod
    def __len__(self) -> int:
        """Held entries."""


class LRUPolicy(CachePolicy[T]):
    """The least recently used goes first. Pinned entries leave the order and come back as the most recent."""

    def __init__(self) -> None:
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
