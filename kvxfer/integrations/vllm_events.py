"""KV events of a store: chunks that this process stored, and those of them that went. Needs no vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvxfer.integrations.vllm_journal import Journal

MOST = 1 << 16  # keys that wait to be told: past that the oldest are not, since events are hints


class EventLog:
    """Which chunks came and which went since it was asked last.

    Args:
        journal: told by the stores' policies.
        digests: of the namespace that lookups see, in each root.
        contains: whether a lookup finds a key.
    """

    def __init__(self, journal: Journal, digests: frozenset[bytes], contains: Callable[[bytes], bool]) -> None:
        self._journal, self._contains = journal, contains
        self._digests = journal.digests = digests
        self._fresh: deque[bytes] = deque(maxlen=MOST)

    def stored(self, keys: Iterable[bytes]) -> None:
        """These were published just now, by whichever thread."""
        self._fresh.extend(keys)

    def take(self, digests: frozenset[bytes]) -> list[tuple[bool, list[bytes]]]:
        """(removed, keys), in the order in which they are to be told. `digests`: of the namespace now."""
        told = [(True, self._gone(digests))]
        new: list[bytes] = []
        for _ in range(len(self._fresh)):
            key = self._fresh.popleft()
            if self._journal.announce(key):
                if self._contains(key):
                    new.append(key)
                else:  # evicted before anybody heard of it
                    self._journal.withdraw(key)
        told.append((False, new))
        return [(removed, keys) for removed, keys in told if keys]

    def _gone(self, digests: frozenset[bytes]) -> list[bytes]:
        gone = self._journal.take_removed()
        if digests != self._digests:  # a weight epoch was raised: nothing that was stored there before counts
            gone += self._journal.take_announced()
            self._digests = self._journal.digests = digests
        back = {key for key in gone if self._contains(key)}  # replaced, or stored again by a neighbour
        for key in back:
            self._journal.announce(key)
        return [key for key in dict.fromkeys(gone) if key not in back]
