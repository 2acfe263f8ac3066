"""One request's uses of chunks, and the order in which its chunks follow one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.store.entry import Entry, Lease, Reservation
    from kvxfer.store.shares import Shares
    from kvxfer.store.uses import UseTimes

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

    __slots__ = ("_before", "_last", "_leases", "_parts", "_position", "_used", "cut", "is_short")

    def __init__(self, position: Callable[[bytes], int | None] | None = None) -> None:
        self._position = position
        self._before: dict[bytes, bytes | None] = {}  # of each key that was placed: which it follows
        self._last: dict[bytes, bytes] = {}  # by group: the one that is followed by none yet
        self._used: set[bytes] = set()
        self._parts: dict[int, Access] = {}
        self._leases: set[Lease] = set()
        self.is_short = False  # a store gave it fewer slots than it asked for: what is stored next is behind a gap
        self.cut: int | None = None  # why some of its chunks were left out, so that later ones would be behind a gap

    def part(self, number: int) -> Access:
        """The same request's in one of several stores, of which each has some of its chunks."""
        part = self._parts.setdefault(number, Access(self._position))
        if part.cut is None:
            part.cut = self.cut
        return part

    def join_cuts(self) -> None:
        """What was cut in one of several stores is cut, in all of them, for what comes from now on."""
        if self.cut is None:
            self.cut = next((part.cut for part in self._parts.values() if part.cut is not None), None)

    def place(self, keys: Iterable[bytes]) -> Access:
        """Takes note of a call's keys, in their order; itself."""
        position = self._position
        if position is not None:
            places = {key: place for key in keys if (place := position(key)) is not None}
            keys = sorted(places, key=places.__getitem__)
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
        for key in run:
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
        first, there = self._position(run[0]), self._position(last)
        return run[0] not in self._before and first is not None and there is not None and there < first

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
