"""The least recently used goes first."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kvxfer.policy.base import T, chunk_name
from kvxfer.policy.order import Order
from kvxfer.policy.ranked import RankedPolicy


class LRUPolicy(RankedPolicy[T]):
    """The least recently used goes first: one order, in which whatever is inserted or used is the youngest."""

    def __init__(self, *, name_of: Callable[[T], Hashable] = chunk_name, capacity: int | None = None) -> None:
        super().__init__(name_of=name_of, capacity=capacity)
        self._order: Order[T] = Order()

    def _enter(self, item: T) -> None:
        self._number += 1
        self._order.add(item, self._number)

    def _use(self, item: T) -> None:
        self._number += 1
        self._order.renew(item, self._number)

    def _order_of(self, item: T) -> Order[T]:
        return self._order

    def _least(self) -> tuple[T, Order[T]] | None:
        item = self._order.oldest()
        return None if item is None else (item, self._order)
