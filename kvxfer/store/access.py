"""One request's uses of chunks, and the order in which its chunks follow one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvxfer.keys import GROUP_BYTES
from kvxfer.store.gaps import Gaps

if TYPE_CHECKING:
    from kvxfer.store.entry import Entry, Lease, Reservation
    from kvxfer.store.shares import Shares
    from kvxfer.store.uses import UseTimes


class Access:
    """What one request does to chunks, through whichever calls: to each of them that is one use.

    A lookup that touches, a load, a store that finds the chunk there and the store that wrote it are the same use, the
    first. A call that is given no access has one of its own.

    It also knows which key follows which: the keys of a call are in prefix order, each KV-cache group's by themselves,
    and what a request asks for later follows what it asked for before. Keys that were placed once stay where they are.
    So it knows what is behind a gap (`gaps`).

    `place` and `order` are for the thread that makes the request's calls; the store reads the rest under its table's
    lock.

    Args:
        position: where in the request a key ends, where its owner knows: keys may then come in any order, and those of
            which it does not know it (None) follow nothing.
        whole: of which this is a part.
    """

    __slots__ = ("_before", "_last", "_leases", "_parts", "_places", "_position", "_used", "gaps")

    def __init__(self, position: Callable[[bytes], int | None] | None = None, *, whole: Access | None = None) -> None:
        self._position = position
        self._places: dict[bytes, int] = {} if whole is None else whole._places  # what `position` has said
        self._before: dict[bytes, bytes | None] = {}  # of each key that was placed: which it follows
        self._last: dict[bytes, bytes] = {}  # by group: the one that is followed by none yet
        self._used: set[bytes] = set()
        self._parts: dict[int, Access] = {}
        self._leases: set[Lease] = set()
        places = None if position is None else self._places
        self.gaps: Gaps = Gaps(self._before, places) if whole is None else whole.gaps

    def part(self, number: int) -> Access:
        """The same request's in one of several stores, of which each has some of its chunks. Its gaps are those of all:
        whoever spreads a request's stores places their keys here too."""
        if (part := self._parts.get(number)) is None:
            part = self._parts[number] = Access(self._position, whole=self)
        return part

    def order(self, keys: Sequence[bytes]) -> list[int]:
        """Places of these keys in the order of the request, as far as that is known: the rest last, as they came."""
        found = self._told(keys) if self._position is not None else self._linked(keys)
        known = sorted((n for n, key in enumerate(keys) if key in found), key=lambda n: found[keys[n]])
        return known if len(known) == len(keys) else [*known, *(n for n, key in enumerate(keys) if key not in found)]

    def _told(self, keys: Sequence[bytes]) -> Mapping[bytes, int]:
        """Where keys end, asked for once each."""
        places, position = self._places, self._position
        if position is not None:
            for key in keys:
                if key not in places and (place := position(key)) is not None:
                    places[key] = place
        return places

    def _linked(self, keys: Sequence[bytes]) -> Mapping[bytes, int]:
        """Where in their chains keys were placed, for want of anything better."""
        found: dict[bytes, int] = {}
        for group in {key[-GROUP_BYTES:] for key in keys} if len(keys) > 1 else ():
            chain, at = [], self._last.get(group)
            while at is not None:
                chain.append(at)
                at = self._before.get(at)
            found |= {key: n for n, key in enumerate(reversed(chain))}
        return found

    def place(self, keys: Iterable[bytes]) -> Access:
        """Takes note of a call's keys, in their order; itself."""
        if self._position is not None:
            keys = list(keys)
            keys = [keys[n] for n in self.order(keys) if keys[n] in self._places]
        groups: dict[bytes, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            groups.setdefault(key[-GROUP_BYTES:], []).append(key)
        for group, run in groups.items():
            self._place(group, run)
        return self

    def _place(self, group: bytes, run: list[bytes]) -> None:
        before, last = self._before, self._last.get(group)
        # The latest in this run that was placed before it, and of all the latest.
        anchor = at = last if last is not None and self._goes_on(run, last) else None
        tail = max((n + 1 for n, key in enumerate(run) if key in before), default=0)
        for n, key in enumerate(run):
            if n == tail and self._position is None:
                at = last  # what comes behind all that is known in this run comes behind all that is known
            if key in before:
                if at != anchor and before[key] == anchor:
                    before[key] = at  # what was not known came in between
                anchor = key
            else:
                before[key] = at
                if at == last:
                    last = key
            at = key
        self._last[group] = last or run[-1]

    def _goes_on(self, run: list[bytes], last: bytes) -> bool:
        """Whether a run begins behind what was asked for before: nothing of it is known, as far as positions say."""
        if self._position is None:
            return not any(key in self._before for key in run)
        return run[0] not in self._before and self._places[last] < self._places[run[0]]

    def before(self, key: bytes) -> bytes | None:
        """The key that this one follows in the request, as far as it is known."""
        return self._before.get(key)

    def took(self, reservations: Iterable[Reservation]) -> None:
        """Slots were reserved for it."""
        self._leases = {lease for lease in self._leases if lease.slots} | {one.lease for one in reservations}

    @property
    def pending(self) -> int:
        """Slots that were reserved for it and not committed or released."""
        return sum(len(lease.slots) for lease in self._leases)

    def has_used(self, key: bytes) -> bool:
        """Whether there was a use of it."""
        return key in self._used

    def use(self, key: bytes) -> bool:
        """Notes a use; False if there was one before."""
        if key in self._used:
            return False
        self._used.add(key)
        return True


def learn(entry: Entry, access: Access, table: dict[bytes, Entry], shares: Shares) -> None:
    """Tells an entry's policies what it follows in a request: the chunk before it, and over gaps one that is there.

    Args:
        table: the entries of its namespace.
        shares: before its policies.
    """
    keys = [entry.key]
    while (before := access.before(keys[-1])) is not None and (len(keys) == 1 or keys[-1] not in table):
        keys.append(before)
    keys.reverse()
    names = [(entry.digest, key) for key in keys]
    if shares.chain(entry, names, [table.get(key) for key in keys]):
        entry.after = keys[-2]


def use_before(entry: Entry, table: dict[bytes, Entry], times: UseTimes) -> None:
    """Whoever uses a chunk needs what it follows, also where the device or the host has that and nobody asked for it:
    so no time of use is later than one before it in the chain.

    Args:
        table: the entries of its namespace.
    """
    at = times.at(entry.slab.slab_id, entry.slot)
    while (before := table.get(entry.after)) is not None and times.note_at(before.slab.slab_id, before.slot, at):
        entry = before
