"""What every policy is: an order of entries by worth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class CachePolicy(ABC, Generic[T]):
    """Orders entries by worth. An entry is in one of three states:

        unknown --insert--> held --pin--> pinned --unpin--> held
                            held or pinned --remove--> unknown

    Only held entries are ever victims, so asking for n of them visits about n entries however many are pinned.
    Entries are compared by identity (hash and equality must not depend on what may change). Not thread-safe: the
    store calls it under its table's lock. Each method but `victims` and `chain` takes constant time, amortised.

    An entry's worth is what `insert` and `touch` say of it. `pin` and `unpin` say nothing: it comes back to where it
    was. So whoever calls decides what one use is, and says it once (kvxfer/store/access.py).

    Entries may follow one another in chains (`link`, `chain`). A lookup ends at the first gap, so what follows an entry
    is of no use without it: an entry is no victim while a known one follows it that does not go before it. Its own
    worth counts once the last of those has gone.

    A policy that remembers what was evicted (ARC, S3-FIFO) takes the name to remember from the entry in `remove`, and
    looks for it in `insert`. No two known entries have one name. An entry was evicted if it is removed right after
    `victims` named it, with nothing but such removals in between; every other removal (an invalidation, a replacement)
    leaves no memory. The same entry inserted again, with no `victims` in between, undoes its eviction.
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
        """Pre: pinned. Post: held, of the worth that it has had, or got by `touch` meanwhile."""

    @abstractmethod
    def remove(self, item: T) -> None:
        """Pre: held or pinned. Post: unknown."""

    def link(self, item: T, parent: T) -> None:
        """Says that `item` follows `parent` in a chain. Pre: both are known. Nothing, where a policy has no chains."""

    def chain(self, names: Sequence[Hashable], items: Sequence[T | None]) -> bool:
        """Says that these follow one another, each the one before it, if not directly. Nothing, as `link`.

        Args:
            names: of chunks, as entries are remembered.
            items: the known entry of each name; None where none is known, which is a gap before those that follow.

        Returns:
            Whether the last is known now to follow the one before it; False where it is to be said again some time.
        """
        return True

    def followers(self, item: T) -> list[T]:
        """The known entries that follow this one next, as far as chains were told, over gaps too. Pre: known."""
        return []

    @property
    def unreachable(self) -> int:
        """Known entries before which something is missing, as far as chains were told: no lookup finds them."""
        return 0

    @abstractmethod
    def victims(self, n: int) -> list[T]:
        """The n entries to go, of least worth and followers first; fewer, where no more can go. Changes nothing."""

    def first(self) -> T | None:
        """The entry that `victims` would name first, without naming it."""
        return next(iter(self.victims(1)), None)

    @abstractmethod
    def __len__(self) -> int:
        """Held entries."""


def chunk_name(entry: Any) -> Hashable:
    """The name of a store's entry: what it has in common with the one that is made when the chunk is stored again."""
    return entry.digest, entry.key
