"""What of a request's chunks is not in the store, so that what comes after it would lie behind a gap."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Container, Iterable, Mapping

from kvxfer.keys import GROUP_BYTES


class Gaps:
    """The gaps of one request, in all stores over which its chunks are spread. Thread-safe; memory only.

    A gap is a key that was offered and is not there: one that was left out, that failed, or that would have lain behind
    another gap. It is at its place in the chain of its KV-cache group: what comes before it is not behind it, and what
    other groups have is not either. It is closed as soon as its chunk is there, whoever stored it.

    Args:
        before: of each key that was placed, which one it follows.
        places: of each key that was placed, where in the request it ends; None: that is not known of any.
    """

    __slots__ = ("_before", "_first", "_listed", "_lock", "_places", "_why")

    def __init__(self, before: Mapping[bytes, bytes | None], places: Mapping[bytes, int] | None) -> None:
        self._before, self._places = before, places
        self._lock = threading.Lock()
        self._why: dict[bytes, int] = {}
        self._first: dict[bytes, list[tuple[int, bytes]]] = {}  # with places, by group: a heap; closed ones linger
        self._listed: set[bytes] = set()  # what is in a heap, once: one that is closed and opened again was there

    def __bool__(self) -> bool:
        return bool(self._why)

    def open(self, key: bytes, why: int) -> None:
        """A chunk is not there, and why. (One whose place is not known follows nothing, and nothing follows it.)"""
        place = None if self._places is None else self._places.get(key)
        if place is None and self._places is not None:
            return
        with self._lock:
            if place is not None and key not in self._listed:
                self._listed.add(key)
                heapq.heappush(self._first.setdefault(key[-GROUP_BYTES:], []), (place, key))
            self._why[key] = why

    def open_others(self, keys: Iterable[bytes], why: int) -> None:
        """`open` of those of these keys that are none yet."""
        for key in keys:
            if key not in self._why:
                self.open(key, why)

    def close(self, key: bytes) -> None:
        """It is there, or on its way there."""
        with self._lock:
            self._why.pop(key, None)

    def at(self, key: bytes) -> int | None:
        """Why this very chunk is one; None: it is none."""
        return self._why.get(key)

    def ahead(self, key: bytes, present: Callable[[bytes], bool], clear: Container[bytes] = ()) -> int | None:
        """Why there is a gap before a key; None: there is none.

        Args:
            present: whether a key is in the store by now: such a gap is closed.
            clear: keys before which there is none, for all that is known: one is looked for behind them only.
        """
        if not self._why:
            return None
        with self._lock:
            return self._by_links(key, present, clear) if self._places is None else self._by_place(key, present)

    def close_some(self, keys: Iterable[bytes], present: Callable[[bytes], bool], again: Callable[[int], bool]) -> None:
        """Closes the gaps at and before these keys whose chunks are there by now, and those at them that are behind no
        other and may be tried again.

        Args:
            keys: in prefix order.
            again: whether a chunk that was left out for this reason may be.
        """
        clear, behind = set[bytes](), set[bytes]()  # what follows these is behind none, and behind one
        for key in keys if self._why else ():
            if self._before.get(key) not in behind and self.ahead(key, present, clear) is None:
                why = self.at(key)
                if why is None or again(why) or present(key):
                    self.close(key)
                    clear.add(key)
                    continue
            behind.add(key)

    def _by_links(self, key: bytes, present: Callable[[bytes], bool], clear: Container[bytes]) -> int | None:
        at = self._before.get(key)
        while at is not None and at not in clear:
            if (why := self._why.get(at)) is not None:
                if not present(at):
                    return why
                del self._why[at]
            at = self._before.get(at)
        return None

    def _by_place(self, key: bytes, present: Callable[[bytes], bool]) -> int | None:
        place, first = (self._places or {}).get(key), self._first.get(key[-GROUP_BYTES:])
        while first and place is not None:
            at, gap = first[0]
            if (why := self._why.get(gap)) is not None:
                if at >= place:
                    return None
                if not present(gap):
                    return why
                del self._why[gap]
            heapq.heappop(first)
            self._listed.discard(gap)
        return None
