"""Numbers that tell what was written at different times into one slot."""

from __future__ import annotations

import secrets
from collections.abc import Collection

_COUNTER_BITS = 32


class Generations:
    """Numbers that are used once: a random 32-bit epoch above a counter. `seen`: epochs that the root shows."""

    def __init__(self, seen: Collection[int]) -> None:
        self._seen = set(seen)
        self._draw()

    def _draw(self) -> None:
        while (epoch := secrets.randbits(32)) == 0 or epoch in self._seen:
            pass
        self._seen.add(epoch)
        self.epoch, self._counter = epoch, 0

    def next(self) -> int:
        """The next number. After 2^32 - 1 of them the epoch is drawn anew."""
        if self._counter == (1 << _COUNTER_BITS) - 1:
            self._draw()
        self._counter += 1
        return self.epoch << _COUNTER_BITS | self._counter
