"""What `kvxfer gc`, `reset` and `rebuild-index` do to a root: planned on a survey, carried out beside its servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvxfer.errors import ConfigError, StoreError
from kvxfer.store import trust, uses
from kvxfer.store.cleaner import STEP, Chosen, all_of
from kvxfer.store.members import RootLock
from kvxfer.store.namespaces import named_digests
from kvxfer.store.records import IndexRecord
from kvxfer.store.root import INDEX, NAMESPACES, digests_of_epoch, quota_bearers, read_root, write_root
from kvxfer.store.store import Store
from kvxfer.store.survey import NamespaceView, Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which chunks are to go: those for which all holds that is given. Nothing given: what nobody can reach.

    That is: namespaces of another weight epoch, and what is left of damaged ones without chunks.
    """

    unused_for_s: float | None = None  # chunks that nobody used for so long
    namespaces_unused_for_s: float | None = None  # all of namespaces none of whose chunks was used for so long
    other_epochs: bool = False  # of namespaces of another weight epoch than the root's
    unnamed: bool = False  # of namespaces of which no file says what they are
    namespace: str = ""  # digest, or what it begins with, in hexadecimal digits
    extra: Mapping[str, str] = field(default_factory=dict)  # of namespaces with these fields: tenant, adapter, salt

    @property
    def is_empty(self) -> bool:
        """Whether nothing is given."""
        return self == Selection()


@dataclass(frozen=True, slots=True)
class Part:
    """What goes of one namespace. Sizes in bytes, of slots."""

    view: NamespaceView
    chunks: int
    nbytes: int
    whole: bool  # with its file


@dataclass(frozen=True, slots=True)
class Plan:
    """What would go."""

    parts: tuple[Part, ...]
    unused_since: float | None  # only chunks that were used last before, in seconds since 1970
    namespaces_since: float | None  # only where no chunk of the namespace was used later

    @property
    def chunks(self) -> int:
        """Of all namespaces."""
        return sum(part.chunks for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of their slots."""
        return sum(part.nbytes for part in self.parts)


@dataclass(slots=True)
class Removed:
    """What has gone. Sizes in bytes."""

    namespaces: int = 0
    chunks: int = 0
    nbytes: int = 0  # of slots, which are free now
    slabs: int = 0
    slab_bytes: int = 0  # which the file system has back


def plan(seen: Survey, selection: Selection) -> Plan:
    """What goes by a survey.

    Raises:
        ConfigError: a selection that cannot be.
        StoreError: the index cannot be asked.
    """
    _check(selection)
    if not seen.index.usable:
        raise StoreError(
            f"the index of {seen.root} cannot be used ({seen.index.why}): try again at a quieter moment if servers "
            "have it open, else `kvxfer rebuild-index` first"
        )
    now = uses.now()
    since = _ago(now, selection.unused_for_s)
    records: dict[bytes, list[IndexRecord]] = defaultdict(list)
    for record in seen.index.records:
        records[record.digest].append(record)
    parts = []
    for view in seen.namespaces:
        times = [(record, seen.index.used_at(record) or now) for record in records[view.digest]]
        latest = max([view.used_at, *(used for _, used in times)])
        if not _is_chosen(seen, view, selection, latest, now):
            continue
        old = [record for record, used in times if since is None or used < since]
        whole = since is None
        if old or whole:
            nbytes = sum(seen.slabs[r.slab_id].layout.slot_bytes for r in old if r.slab_id in seen.slabs)
            parts.append(Part(view, len(old), nbytes, whole))
    return Plan(tuple(parts), since, _ago(now, selection.namespaces_unused_for_s))


def _check(selection: Selection) -> None:
    digits = selection.namespace
    if digits and (len(digits) > 64 or not set(digits) <= set("0123456789abcdef")):
        raise ConfigError(f"namespace={digits!r} must be up to 64 hexadecimal digits in lower case")
    for name in ("unused_for_s", "namespaces_unused_for_s"):
        value = getattr(selection, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{name}={value!r} must be a number of seconds")


def _ago(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else uses.unused_since(now, seconds)


def _is_chosen(seen: Survey, view: NamespaceView, selection: Selection, latest: float, now: float) -> bool:
    other = view.weight_epoch is not None and view.weight_epoch != seen.info.weight_epoch
    if selection.is_empty:
        return other or (view.fields is None and not view.entries)
    since = _ago(now, selection.namespaces_unused_for_s)
    extra = (view.fields or {}).get("extra", {})
    return (
        (since is None or latest < since)
        and (other or not selection.other_epochs)
        and (view.fields is None or not selection.unnamed)
        and view.digest.hex().startswith(selection.namespace)
        and all(name in extra and _text(extra[name]) == value for name, value in selection.extra.items())
    )


def _text(value: object) -> str:
    """As somebody would type it."""
    return value if isinstance(value, str) else repr(value)


def carry_out(root: Path, wanted: Plan) -> Removed:
    """Takes out what was planned, as far as nobody used it since. Leftovers of a root that nobody has open go, too.

    Raises:
        ConfigError, FormatError, StoreError, IOFault: the root cannot be opened, or changed.
    """
    with Store.open_existing(root) as store:
        with store.cleaning() as cleaner:
            latest = cleaner.last_used()
        since = wanted.namespaces_since
        digests = {p.view.digest for p in wanted.parts if since is None or latest.get(p.view.digest, 0) < since}
        whole = {part.view.digest for part in wanted.parts if part.whole} & digests
        removed = _drop(store, all_of(digests, wanted.unused_since))
        if whole:
            _wipe_free(store, whole)
        with store.cleaning() as cleaner:
            removed.namespaces = cleaner.drop_namespaces(whole - quota_bearers(root))
        return removed


def reset(root: Path) -> tuple[Removed, int]:
    """Drops everything in a root, whoever has it open, and raises its weight epoch; what went, and the new epoch.

    The epoch goes first: what servers are storing at the moment belongs to the old one.

    Raises:
        ConfigError, FormatError, StoreError, IOFault: the root cannot be opened, or changed.
    """
    with Store.open_existing(root) as store:
        epoch = store.bump_epoch()
        removed = _drop(store, lambda entry, used: True)
        with store.cleaning() as cleaner:
            kept = quota_bearers(root) | digests_of_epoch(root, epoch)  # servers may have registered them meanwhile
            removed.namespaces = cleaner.drop_namespaces(named_digests(root / NAMESPACES) - kept)
        return removed, epoch


def _drop(store: Store, chosen: Chosen) -> Removed:
    removed = Removed()
    with store.cleaning() as cleaner:
        entries = cleaner.find(chosen)
    for start in range(0, len(entries), STEP):  # servers get the root's lock in between
        with store.cleaning() as cleaner:
            chunks, nbytes = cleaner.drop(entries[start : start + STEP], "removed", chosen=chosen)
        removed.chunks, removed.nbytes = removed.chunks + chunks, removed.nbytes + nbytes
    with store.cleaning() as cleaner:
        removed.slabs, removed.slab_bytes = cleaner.drop_empty_slabs()
    return removed


def _wipe_free(store: Store, digests: set[bytes]) -> None:
    """What was evicted or replaced of these namespaces comes back no more either, whatever becomes of the index."""
    with store.cleaning() as cleaner:
        slabs = cleaner.slabs()
    for slab in slabs:
        for first in range(0, slab.usable, STEP):
            with store.cleaning() as cleaner:
                cleaner.wipe_free(slab, first, digests)


def rebuild_index(root: Path) -> tuple[int, int]:
    """Throws the index away and finds it again in the slots; (slabs that were read, entries that were found).

    Raises:
        ConfigError: there is no root.
        StoreError: a process has the root open.
        FormatError, IOFault: the root is damaged, or cannot be read or written.
    """
    info = read_root(root)
    if info is None:
        raise ConfigError(f"{root} is no root: it has no kvxfer.json")
    info.config(root)  # refuses what could not be opened, before anything is changed
    lock = RootLock.open(root)
    try:
        with lock.held():
            if others := lock.others():
                pids = ", ".join(map(str, lock.pids())) or f"in {len(others)} seats"
                raise StoreError(f"{root} is open in processes {pids}: their index is in use; end them first")
            if (root / INDEX).exists():
                trust.unmark(root / INDEX)
    finally:
        lock.drop()
    # With "none" slots are not read for a lost index: so as "process", which nobody who opens it meanwhile may join.
    scanning = "process" if info.durability == "none" else info.durability
    with Store.open(replace(info.config(root), durability=scanning)) as store:
        if scanning != info.durability:
            with store.cleaning():
                write_root(root, replace(read_root(root) or info, durability=info.durability))
        stats = store.stats()
        return stats.slabs, stats.entries
