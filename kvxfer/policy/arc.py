"""Adaptive replacement."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from kvxfer.policy.base import T, chunk_name
from kvxfer.policy.order import Order
from kvxfer.policy.ranked import RankedPolicy


class ARCPolicy(RankedPolicy[T]):
    """Adaptive replacement (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003).

    What was stored and never used since ("recent") and what was used ("frequent") are two orders, each the least recent
    first. Names of what either of them lost lately are its ghosts. A ghost that is inserted again says that its order
    was too short, and moves the target: how many entries `recent` is to have. So a scan, which uses nothing twice,
    passes through `recent` and leaves `frequent` alone.

    Where this differs from the paper: a store makes room before it knows for whom, so that victims are chosen with the
    target as it was before an insertion. What is pinned or followed counts in its order and is passed over; where an
    order has nothing else, the other gives.

    Args:
        capacity: the paper's c, which bounds the ghosts of both orders together and the target.
    """

    def __init__(self, *, name_of: Callable[[T], Hashable] = chunk_name, capacity: int | None = None) -> None:
        super().__init__(name_of=name_of, capacity=capacity)
        self._recent: Order[T] = Order()
        self._frequent: Order[T] = Order()
        self._recent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._target = 0.0

    @property
    def target(self) -> float:
        """How many entries the order of those that were used once is to have; the paper's p."""
        return self._target

    @property
    def ghosts(self) -> int:
        """Names remembered; at most `capacity`."""
        return len(self._recent_ghosts) + len(self._frequent_ghosts)

    def _enter(self, item: T) -> None:
        """The youngest: of `frequent` a ghost, of `recent` any other."""
        name = self._name_of(item)
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        order = self._frequent
        if name in self._recent_ghosts:
            self._target = min(self._target + max(1.0, frequent / recent), float(self.capacity))
            del self._recent_ghosts[name]
        elif name in self._frequent_ghosts:
            self._target = max(self._target - max(1.0, recent / frequent), 0.0)
            del self._frequent_ghosts[name]
        else:
            order = self._recent
        order.add(item, self._next_number())
        self._bound_ghosts()

    def _use(self, item: T) -> None:
        """The youngest of `frequent`."""
        if item in self._frequent:
            self._frequent.renew(item, self._next_number())
            return
        hidden = self._recent.is_hidden(item)
        self._recent.remove(item)
        self._frequent.add(item, self._next_number())
        if hidden:
            self._frequent.hide(item)

    def _order_of(self, item: T) -> Order[T]:
        return self._recent if item in self._recent else self._frequent

    def _least(self) -> tuple[T, Order[T]] | None:
        """The oldest of `recent` while that is longer than the target, else of `frequent`."""
        order, other = self._recent, self._frequent
        if len(order) <= self._target:
            order, other = other, order
        if (item := order.oldest()) is not None:
            return item, order
        return None if (item := other.oldest()) is None else (item, other)

    def _remember(self, item: T, order: Order[T]) -> None:
        ghosts = self._recent_ghosts if order is self._recent else self._frequent_ghosts
        ghosts[self._name_of(item)] = None
        self._bound_ghosts()

    def _undo(self, item: T, order: Order[T]) -> None:
        name = self._name_of(item)
        self._recent_ghosts.pop(name, None)
        self._frequent_ghosts.pop(name, None)
        self._bound_ghosts()

    def _bound_ghosts(self) -> None:
        """The oldest go: `recent` and its ghosts are at most the capacity, and so are all ghosts together."""
        most, recent, frequent = self._capacity, self._recent_ghosts, self._frequent_ghosts
        while recent and len(self._recent) + len(recent) > most:
            recent.popitem(last=False)
        while len(recent) + len(frequent) > most:
            (frequent or recent).popitem(last=False)
