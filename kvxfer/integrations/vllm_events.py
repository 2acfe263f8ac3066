"""KV events of a store: chunks that this process stored, and those of them that went. Needs no vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvxfer.integrations.vllm_journal import Journal

MOST = 1 << 16  # keys that wait to be told: past that the oldest are not, since events are hints


class EventLog:
    """Which chunks came and which went since it was asked last.

    Args:
        journal: told by the store's policies.
        digest: of the namespace that lookups see.
        contains: (digest, key), whether a lookup finds it.
    """

    def __init__(self, journal: Journal, digest: bytes, contains: Callable[[bytes, bytes], bool]) -> None:
        self._journal, self._contains = journal, contains
        self._digest = journal.digest = digest
        self._fresh: deque[bytes] = deque(maxlen=MOST)

    def stored(self, keys: Iterable[bytes]) -> None:
        """These were published just now, by whichever thread."""
        self._fresh.extend(keys)

    def take(self, digest: bytes) -> list[tuple[bool, list[bytes]]]:
        """(removed, keys), in the order in which they are to be told. `digest`: of the namespace now."""
        told = [(True, self._gone(digest))]
        new: list[bytes] = []
        for _ in range(len(self._fresh)):
            key = self._fresh.popleft()
            if self._journal.announce(key):
                if self._contains(digest, key):
                    new.append(key)
                else:  # evicted before anybody heard of it
                    self._journal.withdraw(key)
        told.append((False, new))
        return [(removed, keys) for removed, keys in told if keys]

    def _gone(self, digest: bytes) -> list[bytes]:
        gone = self._journal.take_removed()
        if digest != self._digest:  # the weight epoch was raised: nothing that was stored before counts
            gone += self._journal.take_announced()
            self._digest = self._journal.digest = digest
        back = {key for key in gone if self._contains(digest, key)}  # replaced, or stored again by a neighbour
        for key in back:
            self._journal.announce(key)
        return [key for key in dict.fromkeys(gone) if key not in back]
