"""scrub.json: how far the pass of scrubs over a root has come, so that whoever scrubs next goes on there.

A pass reads slabs by number and slots in their order. All that was there when it began, and lies before its place, was
read since. So several processes may go on with one pass at once: the one that is farther is right, and what two of them
read was read twice. It is written under the root's lock, now and then, and not flushed. Nothing in it is believed that
does not fit together: then the next scrub begins anew, and costs time.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import IOFault
from kvxfer.io.system import read_small, replace_file
from kvxfer.store import uses
from kvxfer.store.members import LOCK_FILE
from kvxfer.store.root import SCRUB_FILE

_FORMAT = 1
_LIMIT = 4096
_LARGEST = 1 << 63
_SKEW_S = 86400  # a clock that was set back makes no garbage; times farther out hold up alerts, and are


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that is under way."""

    name: int  # tells passes apart
    started: int  # seconds since 1970
    slab: int = 0
    slot: int = 0  # of that slab: the next to look at

    @property
    def place(self) -> tuple[int, int]:
        """Everything before it was looked at."""
        return self.slab, self.slot


@dataclass(frozen=True, slots=True)
class Scrubs:
    """What is known of scrubs of a root, by whichever processes."""

    under_way: Pass | None = None
    ended: int = 0  # when a pass last came to its end, in seconds since 1970; 0: never


def read_scrubs(root: Path) -> Scrubs:
    """What the file says; nothing where it is missing, damaged, or of another root. Never raises."""
    try:
        body = json.loads(read_small(root / SCRUB_FILE, _LIMIT) or b"")
        if body.pop("sum") != _sum(body) or body["format"] != _FORMAT or body["lock"] != _lock_of(root):
            return Scrubs()
        latest = uses.now() + _SKEW_S
        ended, raw = _number(body["ended"], latest), body["pass"]
        if raw is None:
            return Scrubs(None, ended)
        under_way = Pass(**{name: _number(value, _LARGEST) for name, value in raw.items()})
        _number(under_way.started, latest)
    except (IOFault, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Scrubs()
    return Scrubs(under_way, ended)


def begin(root: Path, *, anew: bool = False) -> Pass:
    """The pass to go on with, or a new one. With the root's lock, as all below.

    Raises:
        IOFault: a new one cannot be written down.
    """
    known = read_scrubs(root)
    if known.under_way is not None and not anew:
        return known.under_way
    mine = new_pass()
    _write(root, Scrubs(mine, known.ended))
    return mine


def new_pass() -> Pass:
    """From the start, and not written down."""
    return Pass(secrets.randbits(62), uses.now())


def note(root: Path, mine: Pass) -> Pass:
    """Writes down how far a pass has come; where another process has brought it farther, that.

    Raises:
        IOFault: it cannot be written.
    """
    known = read_scrubs(root)
    theirs = known.under_way
    if theirs is not None and theirs.name == mine.name and theirs.place >= mine.place:
        return theirs
    # Another pass was begun, or this one was brought to its end: there is nothing to go on with for others.
    if (theirs is not None and theirs.name != mine.name) or (theirs is None and known.ended >= mine.started):
        return mine
    _write(root, Scrubs(mine, known.ended))
    return mine


def end(root: Path, mine: Pass) -> int:
    """A pass came to its end; what to tell as the time of the last that did.

    Raises:
        IOFault: it cannot be written.
    """
    known = read_scrubs(root)
    theirs = known.under_way
    ended = max(known.ended, uses.now())
    _write(root, Scrubs(None if theirs is None or theirs.name == mine.name else theirs, ended))
    return ended


def _write(root: Path, scrubs: Scrubs) -> None:
    body = {
        "format": _FORMAT,
        "lock": _lock_of(root),
        "pass": None if scrubs.under_way is None else asdict(scrubs.under_way),
        "ended": scrubs.ended,
    }
    replace_file(root / SCRUB_FILE, json.dumps(body | {"sum": _sum(body)}).encode() + b"\n", durable=False)


def _sum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _lock_of(root: Path) -> int:
    """Tells a root from its copy, whose bytes nobody has read where they are now; 0 where that is not known."""
    try:
        return os.stat(root / LOCK_FILE).st_ino
    except OSError:
        return 0


def _number(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(value)
    return value
