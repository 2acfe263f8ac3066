"""How much of a root each namespace may have, and how much of it the others must leave: who evicts whom.

The quotas are in kvxfer.json, so that all processes of a root have the same ones. Bytes are of slots with an entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from kvxfer.errors import ConfigError
from kvxfer.policy import CachePolicy
from kvxfer.store.entry import Entry

MAX_QUOTAS = 256
_PASSED = 1024  # entries that are passed over, because they are protected, in one search for victims
_SLACK = 64  # a namespace that is full gives up this part of its quota at once, not an entry for each that comes
_KEYS = {"at_most", "at_least"}


class Quota(NamedTuple):
    """Of one namespace, in bytes of slots."""

    at_most: int | None = None  # it never has more
    at_least: int = 0  # others evict none of it where it would have less


def parse_quotas(raw: Any) -> dict[bytes, Quota]:
    """What kvxfer.json has under `quotas`.

    Raises:
        ConfigError: it cannot be.
    """
    if not isinstance(raw, Mapping) or len(raw) > MAX_QUOTAS:
        raise ConfigError(f"quotas must be an object of at most {MAX_QUOTAS} namespaces")
    quotas = {}
    for name, fields in raw.items():
        try:
            digest = bytes.fromhex(name)
            quota = Quota(**fields) if set(fields) <= _KEYS else None
        except (TypeError, ValueError):
            digest, quota = b"", None
        if len(digest) != 32 or quota is None or not _is_sound(quota):
            raise ConfigError(f"quotas has {name!r}: {fields!r}, which cannot be")
        quotas[digest] = quota
    return quotas


def _is_sound(quota: Quota) -> bool:
    numbers = [quota.at_least, *([] if quota.at_most is None else [quota.at_most])]
    return all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) and (
        quota.at_most is None or quota.at_least <= quota.at_most
    )


def quotas_object(quotas: Mapping[bytes, Quota]) -> dict[str, dict[str, int | None]]:
    """For kvxfer.json."""
    return {digest.hex(): quota._asdict() for digest, quota in sorted(quotas.items())}


class Shares:
    """Applies quotas to what a table holds. Used with the table's lock.

    Args:
        entries: the entries of a namespace, by key.
        detach: takes an entry out of the table.
    """

    def __init__(self, entries: Callable[[bytes], Mapping[bytes, Entry]], detach: Callable[[Entry], None]) -> None:
        self.quotas: Mapping[bytes, Quota] = {}
        self._entries, self._detach = entries, detach

    def victims(self, policy: CachePolicy[Entry], n: int, owner: bytes) -> list[Entry]:
        """Up to n entries that may go to make room for `owner`, in the policy's order, taken out.

        One that is protected counts as used when its turn comes, and is held until the search is over: so none is
        passed over again and again, and none hides those that may go.
        """
        chosen: list[Entry] = []
        passed: list[Entry] = []
        while len(chosen) < n and len(passed) < _PASSED and (named := policy.victims(n - len(chosen))):
            kept = []
            for entry in named:
                if self._may_go(entry, owner):
                    self._detach(entry)
                    chosen.append(entry)
                else:
                    kept.append(entry)
            for entry in kept:  # after the removals: what a policy remembers of them are evictions
                policy.touch(entry)
                policy.pin(entry)
            passed += kept
            if not kept:
                break
        for entry in passed:
            policy.unpin(entry)
        return chosen

    def _may_go(self, entry: Entry, owner: bytes) -> bool:
        quota = self.quotas.get(entry.digest)
        if quota is None or not quota.at_least or entry.digest == owner:
            return True
        return self._bytes(entry.digest, entry) - entry.slab.slot_bytes >= quota.at_least

    def _bytes(self, digest: bytes, like: Entry) -> int:
        return len(self._entries(digest)) * like.slab.slot_bytes  # a namespace's slots are of one size

    def may_lose(self, entries: Iterable[Entry]) -> bool:
        """Whether all of these may go at once."""
        if not self.quotas:
            return True
        lost = {entry.digest: entry for entry in entries if not entry.dead}
        counts = Counter(entry.digest for entry in entries if not entry.dead)
        return all(
            self._bytes(digest, one) - counts[digest] * one.slab.slot_bytes >= self.quotas[digest].at_least
            for digest, one in lost.items()
            if digest in self.quotas
        )

    def left(self, digest: bytes, slot_bytes: int) -> int | None:
        """How many more entries a namespace may have; None: any number."""
        room = self._room(digest, slot_bytes)
        return None if room is None else max(0, room - len(self._entries(digest)))

    def over(self, digest: bytes, slot_bytes: int, n: int) -> list[Entry]:
        """Takes out what a namespace has too much for n more: its own, those first that were used least recently.

        Pinned ones are in use, and so is what they follow; an entry goes after all that follow it. Some more go, so
        that it need not be asked for each chunk that comes.
        """
        room, entries = self._room(digest, slot_bytes), self._entries(digest)
        if room is None or len(entries) + n <= room:
            return []
        chosen = _coldest(entries, len(entries) + n - room + room // _SLACK)
        for entry in chosen:
            self._detach(entry)
        return chosen

    def _room(self, digest: bytes, slot_bytes: int) -> int | None:
        quota = self.quotas.get(digest)
        return None if quota is None or quota.at_most is None else quota.at_most // slot_bytes


def _coldest(entries: Mapping[bytes, Entry], n: int) -> list[Entry]:
    """Up to n entries in the order in which they would go: each is worth as much as the best of what follows it."""
    ranked = sorted(entries.values(), key=lambda entry: (entry.pins > 0, entry.tick), reverse=True)
    seen: set[Entry] = set()
    runs: list[list[Entry]] = []  # from the best one's on; each from its end up to what a better one follows as well
    for entry in ranked:
        run: list[Entry] = []
        at: Entry | None = entry
        while at is not None and at not in seen:
            seen.add(at)
            run.append(at)
            at = entries.get(at.after)
        if run and not entry.pins:
            runs.append(run)
    return list(islice(chain.from_iterable(reversed(runs)), n))
