"""What a calibration found, in a small file of the user's cache directory: one for each device, driver and version.

Nothing in it is believed before it was checked; whatever is damaged, or somebody else's, is measured anew. A directory
that cannot be written is fine: then every process measures.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "BATCH",
    "DIRECTIONS",
    "ENGINES",
    "PACK",
    "ZERO",
    "Identity",
    "Kept",
    "Point",
    "path_of",
    "read",
    "user_folder",
    "write",
]

PACK, ZERO, BATCH = ENGINES = ("pack", "zero", "batch")  # of equals the first is taken
DIRECTIONS = ("store", "load")
FORMAT = 1
MOST_FILE_BYTES = 1 << 20


class Point(NamedTuple):
    """What is measured: so many fragments of that size, in one job."""

    direction: str
    fragment_bytes: int
    fragments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a measurement holds for."""

    device: str  # as the driver calls it
    uuid: str
    driver: str
    kvxfer: str
    triton: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What is in a file. Seconds by point and engine; None: the engine failed there."""

    seconds: Mapping[Point, Mapping[str, float | None]] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)  # engines that moved wrong bytes, and which


def user_folder() -> Path | None:
    """kvxfer's folder in the user's cache directory; None: there is no such directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # others are to be ignored, the specification says
        return Path(base) / "kvxfer"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "kvxfer" if os.path.isabs(home) else None


def path_of(folder: Path | None, identity: Identity) -> Path | None:
    """The file for an identity."""
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(asdict(identity), sort_keys=True).encode()).hexdigest()
    return folder / f"copy-engines-{digest[:16]}.json"


def _plain_opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe keeps nobody waiting


def read(folder: Path | None, identity: Identity) -> tuple[Kept, list[str]]:
    """What is kept, nothing if it is not to be believed; and why not."""
    if (path := path_of(folder, identity)) is None:
        return Kept(), []
    try:
        with open(path, "rb", opener=_plain_opener) as file:
            text = file.read(MOST_FILE_BYTES + 1)
    except FileNotFoundError:
        return Kept(), []
    except OSError as exc:
        return Kept(), [f"{path} cannot be read: {exc}"]
    try:
        if len(text) > MOST_FILE_BYTES:
            raise ValueError("it is too large")
        return _parse(json.loads(text), identity), []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        return Kept(), [f"{path} is not used: {type(exc).__name__}: {exc}"]


def _parse(raw: Any, identity: Identity) -> Kept:
    """Raises ValueError, KeyError, TypeError or AttributeError unless it is what `write` writes for this identity."""
    if raw["format"] != FORMAT or raw["identity"] != asdict(identity):
        raise ValueError("it is of another device or version")
    seconds: dict[Point, dict[str, float | None]] = {}
    for one in raw["points"]:
        point = Point(one["direction"], one["fragment_bytes"], one["fragments"])
        if point.direction not in DIRECTIONS or not all(type(n) is int and n > 0 for n in point[1:]):
            raise ValueError(f"{tuple(point)} is no point")
        seconds[point] = {}
        for engine, taken in one["seconds"].items():
            if engine not in ENGINES:
                raise ValueError(f"{engine!r} is no engine")
            if taken is not None and not (type(taken) is float and 0 < taken < math.inf):
                raise ValueError(f"{taken!r} is no time")
            seconds[point][engine] = taken
    wrong = raw["wrong"]
    if not all(engine in ENGINES and isinstance(why, str) for engine, why in wrong.items()):
        raise ValueError("its wrong engines are none")
    return Kept(seconds, dict(wrong))


def write(folder: Path | None, identity: Identity, kept: Kept) -> list[str]:
    """Replaces the file in one step; why it could not be."""
    if (path := path_of(folder, identity)) is None:
        return ["nothing is kept: there is no cache directory"]
    raw = {
        "format": FORMAT,
        "identity": asdict(identity),
        "points": [{**point._asdict(), "seconds": dict(taken)} for point, taken in sorted(kept.seconds.items())],
        "wrong": dict(kept.wrong),
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".copy-engines-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(raw, file, indent=1)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as exc:
        return [f"nothing is kept: {exc}"]
    return []
