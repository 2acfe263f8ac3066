"""Over which of several roots chunks are spread: for engines (spread.py) and coordinators (spread_coordinator.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvxfer.errors import ConfigError

__all__ = ["LAG_S", "Outlook", "Placement", "Root", "Round"]

LAG_S = 0.5  # a drive whose queued stores take so much longer than another's is left alone until it has caught up


class Outlook(NamedTuple):
    """What one more store would meet."""

    affords: float  # chunks that may be written at once, such as the write budget's; infinity where nothing bounds them
    has_room: bool  # whether it would evict nothing
    queue_seconds: float  # how long what is queued takes, at the drive's speed of late


class Root(Protocol):
    """Who has one root. None of these waits for anything."""

    def contains(self, key: bytes) -> bool:
        """Whether it has a chunk."""

    @property
    def answers_loads(self) -> bool:
        """Whether a chunk of a load would be tried now."""

    @property
    def takes_stores(self) -> bool:
        """Whether a store would be queued now."""

    @property
    def outlook(self) -> Outlook:
        """What one more store would meet."""


@dataclass(slots=True)
class Round:
    """What one store found at its beginning; its chunks are counted against it."""

    affords: list[float]  # by root
    preferred: set[int]  # where drives are quick and have room


class Placement:
    """A store's chunk goes to the root that has it and answers loads, or else to one that takes stores: none whose
    queue lags LAG_S behind the shortest, none that must evict while another need not, and of the rest in turn by
    weight. A load's goes to the one that has it. Roots are named by their place in `roots`. One caller's at a time.

    Args:
        roots: at least one.
        weights: how much each is to get beside the others, such as its capacity in bytes.

    Raises:
        ConfigError: no root, or not as many positive weights.
    """

    def __init__(self, roots: Sequence[Root], weights: Sequence[float]) -> None:
        if not roots or len(weights) != len(roots) or min(weights) <= 0:
            raise ConfigError(f"{len(roots)} roots need as many positive weights, not {list(weights)}")
        self._roots, self._weights = tuple(roots), tuple(weights)
        self._turns = [0.0] * len(roots)  # the one with the least is next: chunks sent there by their weight
        self._turn = 0.0  # of the last that was chosen; who took no stores for a while does not catch up

    def home(self, key: bytes, answers: Callable[[int], bool] | None = None) -> int:
        """Which root has the key, one that answers loads of it if there is one; the first, which misses it, if none.

        Args:
            answers: whether a root does; unless given, as it says of itself.
        """
        having = self._having(key)
        answers = answers or (lambda number: self._roots[number].answers_loads)
        return next((number for number in having if answers(number)), (having or [0])[0])

    def look(self) -> Round:
        """To be asked once for a store, before its first chunk is placed."""
        outlooks = [root.outlook for root in self._roots]
        least = min(each.queue_seconds for each in outlooks)
        quick = {number for number, each in enumerate(outlooks) if each.queue_seconds <= least + LAG_S}
        preferred = {number for number in quick if outlooks[number].has_room} or quick
        return Round([each.affords for each in outlooks], preferred)

    def place(self, key: bytes, found: Round, under_way: int | None) -> tuple[int, bool]:
        """Which root is to store the key, and whether that has it under way from now on. (One that has it and answers
        no load would keep it from everybody.) As long as one affords a chunk it goes there, so that what is kept of a
        chain is its head.

        Args:
            under_way: where it is being stored already.
        """
        roots = self._roots
        having = self._having(key)
        for number in having:
            if roots[number].answers_loads:
                return number, False
        if under_way is not None and roots[under_way].takes_stores:
            return under_way, True
        others = [number for number in range(len(roots)) if number not in having]
        choice = [number for number in others if roots[number].takes_stores]
        choice = [number for number in choice if found.affords[number] >= 1] or choice
        if not choice and having:
            return having[0], False
        better = [number for number in choice if number in found.preferred]
        number = min(better or choice or others, key=lambda n: max(self._turns[n], self._turn))
        self._turn = max(self._turns[number], self._turn)
        self._turns[number] = self._turn + 1 / self._weights[number]
        found.affords[number] -= 1
        return number, True

    def _having(self, key: bytes) -> list[int]:
        return [number for number, root in enumerate(self._roots) if root.contains(key)]
