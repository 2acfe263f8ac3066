"""Three first-in first-out queues."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from kvxfer.policy.base import T, chunk_name
from kvxfer.policy.order import Order
from kvxfer.policy.ranked import RankedPolicy

SMALL = 0.1  # share of the capacity that is for entries on probation
PROMOTED = 2  # uses on probation that make an entry one to keep
MOST_USES = 3  # what the clock bits count to


class S3FIFOPolicy(RankedPolicy[T]):
    """S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023).

    New entries queue on probation in a small queue of a tenth of the capacity. At its end go those that were used less
    than twice; their names stay as ghosts. The others, and ghosts that are inserted again, queue in the main one, where
    an entry that was used goes round again, once for each use, of which at most three count. A use moves nothing: it is
    counted, which is why this is cheap, and a scan leaves the main queue alone.

    Where this differs from the paper: a store makes room before it knows for whom, so that an entry which is inserted
    again may have cost another one its place before its ghost was looked at. Which queue is to give is asked anew for
    every entry that is looked at, so that where promotions have made the small one short the main one gives (the paper
    evicts from a main queue that they have overfilled, and goes on in the small one). What is pinned or followed counts
    in its queue and is passed over; where a queue has nothing else, the other gives.

    Args:
        capacity: of which the small queue is a tenth, and which bounds the ghosts to the rest.
    """

    def __init__(self, *, name_of: Callable[[T], Hashable] = chunk_name, capacity: int | None = None) -> None:
        self._small_target = self._most_ghosts = 1  # entries that the small queue is to have; names remembered
        super().__init__(name_of=name_of, capacity=capacity)
        self._small: Order[T] = Order()
        self._main: Order[T] = Order()
        self._uses: dict[T, int] = {}  # where there are any
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def ghosts(self) -> int:
        """Names remembered; at most what is left of the capacity beside the small queue, and 1 in any case."""
        return len(self._ghosts)

    def _measure(self, capacity: int) -> None:
        super()._measure(capacity)
        self._small_target = max(1, int(SMALL * capacity))
        self._most_ghosts = max(1, capacity - self._small_target)

    def _enter(self, item: T) -> None:
        """The youngest: of the main queue a ghost, of the small one any other."""
        order = self._small
        if self._ghosts and (name := self._name_of(item)) in self._ghosts:
            del self._ghosts[name]
            order = self._main
        order.add(item, self._next_number())

    def _use(self, item: T) -> None:
        uses = self._uses.get(item, 0)
        if uses < MOST_USES:
            self._uses[item] = uses + 1

    def _order_of(self, item: T) -> Order[T]:
        return self._small if item in self._small else self._main

    def _least(self) -> tuple[T, Order[T]] | None:
        """What has been used since it was looked at last goes on, in the main queue; the first that hasn't is it."""
        small, main, uses, target = self._small, self._main, self._uses, self._small_target
        while True:
            item = small.oldest() if len(small) >= target else None
            if item is None:
                item = main.oldest()
                if item is not None:
                    if not (count := uses.pop(item, 0)):
                        return item, main
                    if count > 1:
                        uses[item] = count - 1
                    main.renew(item, self._next_number())
                    continue
                item = small.oldest()
                if item is None:
                    return None
            if uses.get(item, 0) < PROMOTED:
                return item, small
            del uses[item]
            small.remove(item)
            main.add(item, self._next_number())

    def _remember(self, item: T, order: Order[T]) -> None:
        """Of the small queue alone."""
        self._uses.pop(item, None)
        if order is self._small:
            self._ghosts[self._name_of(item)] = None
            while len(self._ghosts) > self._most_ghosts:
                self._ghosts.popitem(last=False)

    def _forget(self, item: T) -> None:
        self._uses.pop(item, None)

    def _undo(self, item: T, order: Order[T]) -> None:
        self._ghosts.pop(self._name_of(item), None)
