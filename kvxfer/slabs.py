"""Slabs of a root by their numbers, for a process that moves bytes of slots which another one names.

No index, no lock of the root, nothing decided: whoever names a slot has reserved or pinned it.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from kvxfer.errors import IOFault
from kvxfer.slot import SlotLayout
from kvxfer.store.root import SLABS
from kvxfer.store.slab import SlabFile, inspect_slab, slab_name

MOST_OPEN = 512


class SlabFiles:
    """Open slabs, the least recently used closed first. One thread's. Calls block as the file system does.

    What `get` gave stays open until a `trim` that does not name it: handles alone keep nothing open.
    """

    def __init__(self, root: Path, most: int = MOST_OPEN) -> None:
        self._directory = root / SLABS
        self._most = most
        self._open: OrderedDict[int, SlabFile] = OrderedDict()
        self._old: list[SlabFile] = []  # to be closed

    def get(self, slab_id: int, layout: SlotLayout, direct: bool) -> SlabFile:
        """The slab of this number.

        Raises:
            IOFault: there is none, it cannot be opened or read, or it holds slots of another layout (ESTALE).
            FormatError: it is of another version.
        """
        slab = self._open.pop(slab_id, None)
        if slab is not None and not slab.is_named():  # the root was made anew
            self._old.append(slab)
            slab = None
        if slab is None:
            slab = self._opened(slab_id, layout, direct)
        self._open[slab_id] = slab
        if slab.layout != layout:
            raise IOFault(errno.ESTALE, "the slab holds slots of another layout", str(slab.path))
        return slab

    def _opened(self, slab_id: int, layout: SlotLayout, direct: bool) -> SlabFile:
        found = inspect_slab(self._directory / slab_name(slab_id), slab_id, layout.alignment)
        if found.error:
            raise IOFault(errno.EIO, found.error, str(found.path))
        if found.header is None:
            raise IOFault(errno.ESTALE, "no slab, or one of another root", str(found.path))
        return SlabFile.open(found, found.header, direct)

    def trim(self, used: Collection[SlabFile] = ()) -> None:
        """Closes what is too many, or has gone from under its name, but for what is used."""
        for slab_id in [each for each, slab in self._open.items() if slab not in used]:
            if len(self._open) <= self._most:
                break
            self._old.append(self._open.pop(slab_id))
        old, self._old = self._old, [slab for slab in self._old if slab in used]
        for slab in old:
            if slab not in used:
                slab.close()

    def close(self) -> None:
        """Closes what jobs do not use any more."""
        self.trim()
        while self._open:
            self._open.popitem()[1].close()
