"""What comes into a store and leaves it, of keys that somebody wants to hear of. Needs no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

from kvxfer.policy import CachePolicy, make_policy
from kvxfer.store.entry import Entry


class Journal:
    """Notes keys of one namespace: awaited ones that were stored, by any process, and announced ones that went.

    What it holds is bounded by the keys that were asked for. Thread-safe; the store writes under its table's lock.
    """

    def __init__(self) -> None:
        self.digests: frozenset[bytes] = frozenset()  # of the namespace, in each root; of others nothing is noted
        self._lock = threading.Lock()
        self._awaited: set[bytes] = set()
        self._announced: set[bytes] = set()
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    def await_store(self, keys: Iterable[bytes]) -> None:
        """Ask to hear of the next store of these keys."""
        with self._lock:
            self._awaited.update(keys)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Ends `await_store`."""
        with self._lock:
            self._awaited.difference_update(keys)

    def announce(self, key: bytes) -> bool:
        """Ask to hear when `key` goes; False if that was asked already."""
        with self._lock:
            known = key in self._announced
            self._announced.add(key)
            return not known

    def withdraw(self, key: bytes) -> None:
        """Ends `announce`."""
        with self._lock:
            self._announced.discard(key)

    def take_stored(self) -> list[bytes]:
        """Awaited keys that were stored since the last call."""
        if not self._stored:  # asked with every step
            return []
        with self._lock:
            stored, self._stored = self._stored, []
        return stored

    def take_removed(self) -> list[bytes]:
        """Announced keys that went since the last call; they are announced no more."""
        with self._lock:
            removed, self._removed = self._removed, []
        return removed

    def take_announced(self) -> list[bytes]:
        """Every announced key; none is announced any more."""
        with self._lock:
            announced, self._announced = self._announced, set()
        return list(announced)

    def inserted(self, entry: Entry) -> None:
        """The store has a new entry."""
        if entry.key in self._awaited and entry.digest in self.digests:
            with self._lock:
                self._awaited.discard(entry.key)
                self._stored.append(entry.key)

    def removed(self, entry: Entry) -> None:
        """The store has lost one."""
        if entry.key in self._announced and entry.digest in self.digests:
            with self._lock:
                self._announced.discard(entry.key)
                self._removed.append(entry.key)


def policies(name: str, journal: Journal) -> Callable[[], CachePolicy[Entry]]:
    """What makes a store's policies, by the key `policy`: each tells the journal."""
    return lambda: WatchedPolicy(make_policy(name), journal)


class WatchedPolicy(CachePolicy[Entry]):
    """Another policy, and a journal that is told what it is told."""

    def __init__(self, policy: CachePolicy[Entry], journal: Journal) -> None:
        self._policy, self._journal = policy, journal

    def insert(self, item: Entry) -> None:
        """As the policy, and noted."""
        self._policy.insert(item)
        self._journal.inserted(item)

    def touch(self, item: Entry) -> None:
        """As the policy."""
        self._policy.touch(item)

    def pin(self, item: Entry) -> None:
        """As the policy."""
        self._policy.pin(item)

    def unpin(self, item: Entry) -> None:
        """As the policy."""
        self._policy.unpin(item)

    def remove(self, item: Entry) -> None:
        """As the policy, and noted."""
        self._policy.remove(item)
        self._journal.removed(item)

    def link(self, item: Entry, parent: Entry) -> None:
        """As the policy."""
        self._policy.link(item, parent)

    def chain(self, names: Sequence[Hashable], items: Sequence[Entry | None]) -> bool:
        """As the policy."""
        return self._policy.chain(names, items)

    def followers(self, item: Entry) -> list[Entry]:
        """As the policy."""
        return self._policy.followers(item)

    @property
    def unreachable(self) -> int:
        """As the policy."""
        return self._policy.unreachable

    def victims(self, n: int) -> list[Entry]:
        """As the policy."""
        return self._policy.victims(n)

    def first(self) -> Entry | None:
        """As the policy."""
        return self._policy.first()

    def __len__(self) -> int:
        return len(self._policy)
