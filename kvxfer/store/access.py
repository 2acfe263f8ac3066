"""One request's uses of chunks, and the order in which its chunks follow one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

GROUP_BYTES = 4  # at the end of a key: its KV-cache group (keys.py)


class Access:
    """What one request does to chunks, through whichever calls: to each of them that is one use.

    A lookup that touches, a load, a store that finds the chunk there and the store that wrote it are the same use, the
    first. A call that is given no access has one of its own.

    It also knows which key follows which: the keys of a call are in prefix order, each KV-cache group's by themselves,
    and what a request asks for later follows what it asked for before. Keys that were placed once stay where they are.

    `place` is for the thread that makes the request's calls; the store reads the rest under its table's lock.

    Args:
        position: where in the request a key ends, where its owner knows: keys may then come in any order, and those of
            which it does not know it (None) follow nothing.
    """

    __slots__ = ("_before", "_last", "_parts", "_position", "_used", "cut")

    def __init__(self, position: Callable[[bytes], int | None] | None = None) -> None:
        self._position = position
        self._before: dict[bytes, bytes | None] = {}  # of each key that was placed: which it follows
        self._last: dict[bytes, bytes] = {}  # by group: the one that is followed by none yet
        self._used: set[bytes] = set()
        self._parts: dict[int, Access] = {}
        self.cut: int | None = None  # why some of its chunks were left out, so that later ones would be behind a gap

    def part(self, number: int) -> Access:
        """The same request's in one of several stores, of which each has some of its chunks."""
        return self._parts.setdefault(number, Access(self._position))

    def place(self, keys: Iterable[bytes]) -> Access:
        """Takes note of a call's keys, in their order; itself."""
        position = self._position
        if position is not None:
            places = {key: place for key in keys if (place := position(key)) is not None}
            keys = sorted(places, key=places.__getitem__)
        before = self._before
        previous: dict[bytes, bytes] = {}  # by group: the one before, in this call
        for key in keys:
            group = key[-GROUP_BYTES:]
            at = previous.get(group)
            if key not in before:
                last = self._last.get(group)
                if at is None and last is not None and self._is_later(key, last):
                    at = last
                before[key] = at
                if last is None or last == at:
                    self._last[group] = key
            elif at is not None and at != key and before[key] == before[at]:
                before[key] = at  # it came in between
            previous[group] = key
        return self

    def _is_later(self, key: bytes, last: bytes) -> bool:
        if self._position is None:
            return True
        mine, theirs = self._position(key), self._position(last)
        return mine is not None and theirs is not None and theirs < mine

    def before(self, key: bytes) -> bytes | None:
        """The key that this one follows in the request, as far as it is known."""
        return self._before.get(key)

    def use(self, key: bytes) -> bool:
        """Notes a use; False if there was one before."""
        if key in self._used:
            return False
        self._used.add(key)
        return True
