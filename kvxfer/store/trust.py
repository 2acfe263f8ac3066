"""Whether the index's files can be believed: what state.json says of them, and what LMDB's own verifier finds."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvxfer.io.system import check_plain, read_small, replace_file, sync_directory, sys_unlink

try:
    from lmdb import verify as lmdb_verify
except ImportError:  # before lmdb 3: what cannot be checked is rebuilt
    lmdb_verify = None

DATA, STATE = "data.mdb", "state.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORMAT = 2


def boot_id() -> str:
    """Names the time since the machine was started; empty where the kernel does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def distrust(directory: Path) -> str:
    """Why the files cannot be trusted; empty if they can.

    Raises:
        IOFault: state.json cannot be read.
    """
    if not os.path.lexists(directory / DATA):
        return "there is no index"
    try:
        state = json.loads(read_small(directory / STATE) or b"")
        format_, boot, mark = state["format"], state["boot_id"], state["state"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "state.json is missing or damaged"
    if format_ != _FORMAT or mark not in ("open", "synced", "clean"):
        return f"state.json is of format {format_!r}, state {mark!r}"
    if mark == "open" and (not boot or boot != boot_id()):
        return "the machine went down while the index was open"
    return damage(directory)


def damage(directory: Path) -> str:
    """What is wrong with the pages; empty if nothing is. LMDB itself believes them, and a process dies of that.

    Raises:
        IOFault: it is no regular file.
    """
    check_plain(directory / DATA)
    if lmdb_verify is None:
        return "this lmdb has no verifier (lmdb >= 3 has)"
    try:
        problems = lmdb_verify.verify(str(directory))
    except Exception as exc:  # whatever a walk over damaged bytes trips over, it means damage
        return f"not an index: {exc}"
    return f"damaged: {problems[0]}" if problems else ""


def mark(directory: Path, state: str) -> None:
    """Says on disk that the index is "open" (being written), "clean" (whole), or "synced" (whole after every
    transaction, since each waits for the device).

    Raises:
        IOFault: it could not be written; what was said before still stands.
    """
    body = {"format": _FORMAT, "boot_id": boot_id(), "state": state}
    replace_file(directory / STATE, json.dumps(body).encode())


def unmark(directory: Path) -> None:
    """Takes away what says that the index is whole.

    Raises:
        IOFault: it could not be.
    """
    sys_unlink(directory / STATE)
    sync_directory(directory)
