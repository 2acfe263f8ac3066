"""Entries by age, of which some may not be found for a while and keep their place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
_SPARE = 64  # places in the heap that nobody has any more and that are not worth a clean-up


class Order(Generic[T]):
    """Entries, each with a number of its own; the one with the least number is the oldest.

    A hidden entry is never the oldest, keeps its number and is back in its old place once it is shown: so whatever is
    in use is not passed over and over again. New numbers grow, so that `add` and `renew` append to a list; entries that
    come back are in a heap beside it. Every method takes constant time, but for the heap's logarithm.
    """

    __slots__ = ("_back", "_hidden", "_listed", "_newest", "_returned")

    def __init__(self) -> None:
        self._listed: OrderedDict[T, int] = OrderedDict()  # by number
        self._newest = 0  # number, of those ever listed
        self._returned: dict[T, int] = {}  # came back behind younger ones
        self._back: list[tuple[int, T]] = []  # a heap of these, and of some that have left since
        self._hidden: dict[T, int] = {}

    def __len__(self) -> int:
        """All entries, the hidden ones too."""
        return len(self._listed) + len(self._returned) + len(self._hidden)

    def __contains__(self, item: object) -> bool:
        return item in self._listed or item in self._hidden or item in self._returned

    def add(self, item: T, number: int) -> None:
        """A new entry, with a number that is greater than all before."""
        self._listed[item] = self._newest = number

    def renew(self, item: T, number: int) -> None:
        """An entry gets a number that is greater than all before; a hidden one stays hidden."""
        if item in self._listed:
            self._listed.move_to_end(item)
        elif item in self._hidden:
            self._hidden[item] = number
            return
        else:
            del self._returned[item]
        self._listed[item] = self._newest = number

    def remove(self, item: T) -> int:
        """Takes an entry out, hidden or not; its number."""
        number = self._returned.pop(item, None)
        if number is None:
            number = self._listed.pop(item, None)
        return self._hidden.pop(item) if number is None else number

    def is_hidden(self, item: T) -> bool:
        """Whether an entry is hidden."""
        return item in self._hidden

    def hide(self, item: T) -> None:
        """From now on it is not found. Pre: it is not hidden."""
        number = self._listed.pop(item, None)
        self._hidden[item] = self._returned.pop(item) if number is None else number

    def show(self, item: T) -> None:
        """It is found again. Pre: it is hidden."""
        self.put(item, self._hidden.pop(item))

    def put(self, item: T, number: int) -> None:
        """An entry that is not in the order comes to the place that its number says."""
        if number > self._newest:
            self.add(item, number)
            return
        self._returned[item] = number
        if len(self._back) > 2 * len(self._returned) + _SPARE:
            self._back = [(each, other) for other, each in self._returned.items()]
            heapify(self._back)
        else:
            heappush(self._back, (number, item))

    def oldest(self) -> T | None:
        """The entry with the least number of those that are not hidden."""
        first = next(iter(self._listed), None)
        back = self._back
        while back:
            number, item = back[0]
            if self._returned.get(item) == number:
                return item if first is None or number < self._listed[first] else first
            heappop(back)
        return first
