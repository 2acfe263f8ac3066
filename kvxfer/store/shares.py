"""How much of a root each namespace may have, and how much of it the others must leave: who evicts whom.

The quotas are in kvxfer.json, so that all processes of a root have the same ones. Bytes are of slots with an entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvxfer.errors import ConfigError
from kvxfer.policy import CachePolicy, LRUPolicy
from kvxfer.store.access import Access
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
    """Between a table and its policies: applies quotas to what the table holds. Used with the table's lock.

    A namespace that was once at its limit also has an order of its own, of last use and chains, so that finding what
    has to go costs no look at what stays.

    Args:
        entries: the entries of a namespace, by key.
        detach: takes an entry out of the table.
    """

    def __init__(self, entries: Callable[[bytes], Mapping[bytes, Entry]], detach: Callable[[Entry], None]) -> None:
        self.quotas: Mapping[bytes, Quota] = {}
        self._entries, self._detach = entries, detach
        self._orders: dict[bytes, CachePolicy[Entry]] = {}

    # ---- what policies are told --------------------------------------------------------------------------------

    def insert(self, entry: Entry) -> None:
        """As a policy's."""
        entry.slab.policy.insert(entry)
        if self._orders and (own := self._orders.get(entry.digest)) is not None:
            own.insert(entry)

    def touch(self, entry: Entry) -> None:
        """As a policy's."""
        entry.slab.policy.touch(entry)
        if self._orders and (own := self._orders.get(entry.digest)) is not None:
            own.touch(entry)

    def pin(self, entry: Entry) -> None:
        """As a policy's."""
        entry.slab.policy.pin(entry)
        if self._orders and (own := self._orders.get(entry.digest)) is not None:
            own.pin(entry)

    def unpin(self, entry: Entry) -> None:
        """As a policy's."""
        entry.slab.policy.unpin(entry)
        if self._orders and (own := self._orders.get(entry.digest)) is not None:
            own.unpin(entry)

    def remove(self, entry: Entry) -> None:
        """As a policy's."""
        entry.slab.policy.remove(entry)
        if self._orders and (own := self._orders.get(entry.digest)) is not None:
            own.remove(entry)

    def chain(self, entry: Entry, names: Sequence[Hashable], items: Sequence[Entry | None]) -> bool:
        """As a policy's, of chunks of one namespace of which `entry` is the last."""
        known = entry.slab.policy.chain(names, items)
        if self._orders and (own := self._orders.get(entry.digest)) is not None:
            known &= own.chain(names, items)
        return known

    # ---- who goes ----------------------------------------------------------------------------------------------

    def victims(self, policy: CachePolicy[Entry], n: int, owner: bytes, access: Access) -> list[Entry]:
        """Up to n entries that may go to make room for `owner`, in the policy's order, taken out.

        One that is protected counts as used when its turn comes. What the request itself has used, or stored, does not
        go, nor what that follows.
        """

        def stays(entry: Entry) -> bool:
            return self._is_of(entry, owner, access) or not self._may_go(entry, owner)

        return self._search(policy, n, stays, owner)

    def _search(self, policy: CachePolicy[Entry], n: int, stays: Callable[[Entry], bool], owner: bytes) -> list[Entry]:
        """Takes out up to n of a policy's victims. What stays is held until the search is over: so none is passed over
        again and again, and none hides those that may go. What stays of the owner is its request's."""
        chosen: list[Entry] = []
        passed: list[Entry] = []
        protected = 0
        while len(chosen) < n and protected < _PASSED and (named := policy.victims(n - len(chosen))):
            kept = []
            for entry in named:
                if stays(entry) or policy.followers(entry):  # of those that follow it, one stays
                    kept.append(entry)
                else:
                    self._detach(entry)
                    chosen.append(entry)
            for entry in kept:  # after the removals: what a policy remembers of them are evictions
                if entry.digest != owner:
                    protected += 1
                    policy.touch(entry)
                policy.pin(entry)
            passed += kept
            if not kept:
                break
        for entry in passed:
            policy.unpin(entry)
        return chosen

    @staticmethod
    def _is_of(entry: Entry, owner: bytes, access: Access) -> bool:
        return entry.digest == owner and access.has_used(entry.key)

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

    def over(self, digest: bytes, slot_bytes: int, n: int, access: Access) -> list[Entry]:
        """Takes out what a namespace has too much for n more: its own, those first that were used least recently.

        Pinned ones are in use, and so are the request's own, and what they follow; an entry goes after all that follow
        it. Some more go, so that it need not be asked for each chunk that comes. Looks at no more than it takes out,
        and the request's own; at all only the first time.
        """
        for other in [other for other in self._orders if self._room(other, slot_bytes) is None]:
            del self._orders[other]
        room, entries = self._room(digest, slot_bytes), self._entries(digest)
        if room is None or len(entries) + n <= room:
            return []
        if (order := self._orders.get(digest)) is None:
            order = self._orders[digest] = _order_of(entries)
        most = len(entries) + n - room + room // _SLACK
        return self._search(order, most, lambda entry: self._is_of(entry, digest, access), digest)

    def _room(self, digest: bytes, slot_bytes: int) -> int | None:
        quota = self.quotas.get(digest)
        return None if quota is None or quota.at_most is None else quota.at_most // slot_bytes


def _order_of(entries: Mapping[bytes, Entry]) -> CachePolicy[Entry]:
    """What is there already, as it was used."""
    order: CachePolicy[Entry] = LRUPolicy()
    for entry in sorted(entries.values(), key=lambda entry: entry.tick):
        order.insert(entry)
        if entry.pins:
            order.pin(entry)
    for entry in entries.values():
        if (before := entries.get(entry.after)) is not None:
            order.link(entry, before)
    return order
