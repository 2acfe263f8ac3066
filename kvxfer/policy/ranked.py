"""What LRU, ARC and S3-FIFO have in common: pins, chains, and evictions that may be undone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence

from kvxfer.policy.base import CachePolicy, T, chunk_name
from kvxfer.policy.chains import Chains, Node
from kvxfer.policy.order import Order


class RankedPolicy(CachePolicy[T]):
    """Entries in one or more orders, in which those that cannot go now are hidden: the pinned, and the followed.

    So a victim is found at the end of an order, whatever else is held. A batch of victims is taken out of the orders as
    it is named, for then what they follow may go too; whatever comes next but their removal puts them back.

    Args:
        name_of: the name by which an entry is remembered.
        capacity: the entries that are known at most, which a policy may measure itself by. None: as many as there ever
            were at once, which a store fills up to its cap.
    """

    def __init__(self, *, name_of: Callable[[T], Hashable] = chunk_name, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self._name_of, self._grows = name_of, capacity is None
        self._known = self._capacity = self._number = 0
        self._pinned: set[T] = set()
        self._chains: Chains[T] = Chains(self._sheltered, self._exposed)
        # Named by the latest `victims`, in this order, and where each was: its order, its number there, its node.
        self._named: dict[T, tuple[Order[T], int, Node[T] | None]] = {}
        # Of these, the ones that were removed since: instead of the node the name of what each followed.
        self._evicted: dict[T, tuple[Order[T], int, Hashable | None]] = {}
        # What was inserted since one went that followed something, by name: it may be that, and no node says so.
        self._since: dict[Hashable, T] = {}
        self._torn = False  # one of them followed something
        self._measure(capacity or 0)

    # ---- what a policy says of itself ----------------------------------------------------------------------

    @abstractmethod
    def _enter(self, item: T) -> None:
        """A new entry comes into an order."""

    @abstractmethod
    def _use(self, item: T) -> None:
        """A known entry was used."""

    @abstractmethod
    def _order_of(self, item: T) -> Order[T]:
        """The order in which a known entry is that was not named."""

    @abstractmethod
    def _least(self) -> tuple[T, Order[T]] | None:
        """The entry of least worth of those that are not hidden, and its order. Asked again it answers the same."""

    def _remember(self, item: T, order: Order[T]) -> None:
        """An entry was evicted from an order."""

    def _forget(self, item: T) -> None:
        """An entry is gone, and was not evicted."""

    def _undo(self, item: T, order: Order[T]) -> None:
        """An entry was not evicted after all, and is back in its order."""

    def _measure(self, capacity: int) -> None:
        """What the capacity is from now on."""
        self._capacity = capacity

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    @property
    def capacity(self) -> int:
        """In entries."""
        return self._capacity

    # ---- entries -------------------------------------------------------------------------------------------

    def insert(self, item: T) -> None:
        """Held from now on; back in its place, if it was evicted by the latest `victims`."""
        if self._named:
            self._put_back(0)
        self._known += 1
        if self._grows and self._known > self._capacity:
            self._measure(self._known)
        chains = self._chains
        hidden = chains.missing and chains.enter(self._name_of(item), item)
        place = None
        if self._evicted:
            place = self._evicted.pop(item, None)
        if self._torn:
            self._since[self._name_of(item)] = item
        if place is None:
            self._enter(item)
        else:
            order, number, before = place
            order.put(item, number)
            self._undo(item, order)
            if before is not None:
                chains.learn((before, self._name_of(item)), (self._since.get(before), item))
        if hidden:
            self._order_of(item).hide(item)

    def touch(self, item: T) -> None:
        """A use."""
        if self._named:
            self._put_back(0)
        self._use(item)

    def pin(self, item: T) -> None:
        """Hides it."""
        if self._named:
            self._put_back(0)
        self._pinned.add(item)
        if not self._is_followed(item):
            self._order_of(item).hide(item)

    def unpin(self, item: T) -> None:
        """Shows it, unless others follow it."""
        if self._named:
            self._put_back(0)
        self._pinned.remove(item)
        if not self._is_followed(item):
            self._order_of(item).show(item)

    def remove(self, item: T) -> None:
        """Forgets it; remembers its name if it was evicted."""
        place = self._named.pop(item, None)
        if place is None and self._named:
            self._put_back(0)
        self._known -= 1
        self._pinned.discard(item)
        if self._since:
            self._since.pop(self._name_of(item), None)
        if place is None:
            self._order_of(item).remove(item)
            if (node := self._node(item)) is not None:
                if not node.kids:
                    self._chains.leave(node)
                self._chains.remove(node)
            self._forget(item)
            return
        order, number, node = place
        before: Hashable | None = None
        if node is not None:
            if node.parent is not None:
                before, self._torn = node.parent.name, True
            self._chains.remove(node)
        self._evicted[item] = order, number, before
        self._remember(item, order)

    def __len__(self) -> int:
        return self._known - len(self._pinned)

    # ---- chains --------------------------------------------------------------------------------------------

    def link(self, item: T, parent: T) -> None:
        """Nothing where that would bite its tail, or where something nearer is known."""
        self.chain((self._name_of(parent), self._name_of(item)), (parent, item))

    def chain(self, names: Sequence[Hashable], items: Sequence[T | None]) -> bool:
        """As `link`, of many, the first first. Takes time by their number."""
        if self._named:
            self._put_back(0)
        return self._chains.learn(names, items)

    def followers(self, item: T) -> list[T]:
        """By the chains."""
        return self._chains.followers(self._name_of(item))

    @property
    def unreachable(self) -> int:
        """Known entries before which something is missing."""
        return self._chains.unreachable

    def _node(self, item: T) -> Node[T] | None:
        """What chains know of an entry."""
        nodes = self._chains.nodes
        return nodes.get(self._name_of(item)) if nodes else None

    def _is_followed(self, item: T) -> bool:
        return (node := self._node(item)) is not None and node.kids > 0

    def _sheltered(self, item: T) -> None:
        if item not in self._pinned:
            self._order_of(item).hide(item)

    def _exposed(self, item: T) -> None:
        if item not in self._pinned:
            self._order_of(item).show(item)

    # ---- victims -------------------------------------------------------------------------------------------

    def victims(self, n: int) -> list[T]:
        """From the ends of the orders, n times over."""
        named, chains = self._named, self._chains
        if len(named) > n:
            self._put_back(max(0, n))
        self._evicted, self._since, self._torn = {}, {}, False
        while len(named) < n and (least := self._least()) is not None:
            item, order = least
            node = self._node(item)
            named[item] = order, order.remove(item), node
            if node is not None:
                chains.leave(node)
        return list(named)

    def first(self) -> T | None:
        """The one that would go first."""
        first = next(iter(self.victims(1)), None)
        self._put_back(0)
        return first

    def _put_back(self, kept: int) -> None:
        """All that are named but the first `kept` stay after all."""
        while len(self._named) > kept:
            item, (order, number, node) = self._named.popitem()
            order.put(item, number)
            if node is not None:
                self._chains.stay(node)
