"""The latest changes of the index, kept in the index itself, from which other processes bring their tables up to date.

A row of the log has the transaction's number and a place in its name, and one changed row in its value. Every
transaction of a process that knows of others is in it. One that did not know leaves a gap, and what was dropped is
behind `trimmed`: then there is no saying what was changed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from kvxfer.store.records import DIGEST_BYTES, Item

_LOG = b"log"
_HEAD = struct.Struct("<QQ")  # bytes of all rows, the last transaction of which rows were dropped
_NAME_BYTES = len(_LOG) + 8 + 4
_OVERHEAD = 16  # what a row costs in a page beside its name and value


def append(txn: Any, items: Sequence[Item], budget: int) -> None:
    """Adds what `txn` changes; drops the oldest rows where the log has more than `budget` bytes."""
    if not items:
        return
    nbytes, trimmed = _head(txn)
    for number, (name, value) in enumerate(items):
        row = bytes([value is not None, len(name)]) + name + (value or b"")
        txn.put(_name(txn.id(), number), row)
        nbytes += _NAME_BYTES + len(row) + _OVERHEAD
    if nbytes > budget:
        cursor = txn.cursor()
        while nbytes > budget and cursor.set_range(_name(0, 0)) and _is_row(name := cursor.key()):
            trimmed = int.from_bytes(name[3:11], "big")
            nbytes -= _NAME_BYTES + len(cursor.value()) + _OVERHEAD
            cursor.delete()
    txn.put(_LOG, _HEAD.pack(nbytes, trimmed))


def since(txn: Any, position: int) -> list[Item] | None:
    """What was changed after transaction `position`, in order; None where the log does not have all of it."""
    if _head(txn)[1] > position:
        return None
    found: list[Item] = []
    cursor = txn.cursor()
    more = cursor.set_range(_name(position + 1, 0))
    while more and (name := cursor.key()).startswith(_LOG):
        if _is_row(name):
            txn_id = int.from_bytes(name[3:11], "big")
            if txn_id > position + 1:
                return None
            position = txn_id
            row = cursor.value()
            split = 2 + row[1]
            found.append((row[2:split], row[split:] if row[0] else None))
        more = cursor.next()
    return found if position == txn.id() else None


def clear(txn: Any) -> None:
    """Empties the log: nobody is left who could want it."""
    cursor = txn.cursor()
    more = cursor.set_range(_LOG)
    while more and (name := cursor.key()).startswith(_LOG):
        more = cursor.delete() if name == _LOG or _is_row(name) else cursor.next()


def _head(txn: Any) -> tuple[int, int]:
    raw = txn.get(_LOG)
    return _HEAD.unpack(raw) if raw is not None and len(raw) == _HEAD.size else (0, 0)


def _name(txn_id: int, number: int) -> bytes:
    return _LOG + txn_id.to_bytes(8, "big") + number.to_bytes(4, "big")


def _is_row(name: bytes) -> bool:
    return name.startswith(_LOG) and len(name) == _NAME_BYTES


def delete_all(txn: Any, prefix: bytes) -> None:
    """Deletes the rows of one kind, whose names begin with `prefix`."""
    cursor = txn.cursor()
    more = cursor.set_range(prefix)
    while more and (name := cursor.key()).startswith(prefix):
        more = cursor.delete() if len(name) <= DIGEST_BYTES else cursor.next()
