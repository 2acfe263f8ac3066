"""namespaces/<digest>/namespace.json: what a digest stands for, for people and tools. Nothing is decided by them."""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from kvxfer.config import StoreConfig
from kvxfer.errors import IOFault, StoreError
from kvxfer.io.system import fault, mkdir_within, read_small, replace_file, try_unlink
from kvxfer.keys import Namespace
from kvxfer.report import reporter
from kvxfer.slot import ALIGNMENT, SlotLayout, round_up
from kvxfer.store import uses
from kvxfer.store.root import FORMAT, NAMESPACE_FILE, NAMESPACES

_DIGEST = re.compile(r"[0-9a-f]{64}")


def describe(namespace: Namespace, slot: SlotLayout, weight_epoch: int) -> bytes:
    """The file's text."""
    body = {
        "format": FORMAT,
        "weight_epoch": weight_epoch,
        "namespace": namespace.as_json(),
        "slot": asdict(slot),
    }
    return json.dumps(body, indent=1, ensure_ascii=False).encode() + b"\n"


def named_digests(directory: Path) -> set[bytes]:
    """Those that have a directory, whatever is in it; none where it cannot be listed."""
    try:
        return {bytes.fromhex(name) for name in os.listdir(directory) if _DIGEST.fullmatch(name)}
    except OSError:
        return set()


class NamespaceFiles:
    """The files, kept within their share of the root: `limit` of them, `limit_bytes` together."""

    def __init__(self, config: StoreConfig) -> None:
        self._directory = config.root / NAMESPACES
        self._limit, self._limit_bytes = config.max_namespaces, config.namespace_bytes
        self._texts: dict[bytes, bytes] = {}  # of those that this process uses

    def write(self, digest: bytes, text: bytes, in_use: set[bytes]) -> None:
        """Writes one, and removes the oldest that this process does not use where the share would be passed.

        Raises:
            StoreError: those in use leave no room.
            IOFault: it could not be written; others may have gone.
        """
        self._texts[digest] = text
        place = self._directory / digest.hex()
        path = place / NAMESPACE_FILE
        if read_small(path, len(text) + 1) == text:
            _now(path)
            return
        if place.is_symlink():
            raise fault(errno.ELOOP, "a namespace's directory must be none of another place", place)
        self._make_room(_cost(len(text)), in_use | {digest})
        mkdir_within(self._directory)
        mkdir_within(place)
        replace_file(path, text, durable=False)  # one that is damaged is written again

    def touch(self, in_use: set[bytes]) -> None:
        """Says that these are in use, by their files' times of change. One that was removed is written again."""
        for digest in in_use & self._texts.keys():
            if not _now(self._directory / digest.hex() / NAMESPACE_FILE):
                self._write(digest, self._texts[digest], in_use)

    def missing(self, in_use: set[bytes]) -> list[bytes]:
        """Those of these that somebody removed. Needs no lock."""
        known = [digest for digest in in_use if digest in self._texts]
        return [digest for digest in known if _is_gone(self._directory / digest.hex() / NAMESPACE_FILE)]

    def restore(self, in_use: set[bytes]) -> None:
        """Writes again what is missing, as far as nothing has to go for it: that waits for `touch`."""
        for digest in self.missing(in_use):
            text = self._texts[digest]
            if self._fits([(0, _cost(len(text)), digest), *self._known()]):
                self._write(digest, text, in_use)

    def _write(self, digest: bytes, text: bytes, in_use: set[bytes]) -> None:
        try:
            self.write(digest, text, in_use)
        except (StoreError, IOFault) as exc:
            reporter.warn("namespace", f"a namespace file cannot be written: {exc}", error=exc)

    def remove(self, digest: bytes) -> bool:
        """Removes one that lies in the root itself; whether it has gone. Someone else's files beside it stay."""
        place = self._directory / digest.hex()
        if place.is_symlink() or not place.is_dir():
            return False
        return self._remove(digest)

    def trim(self) -> None:
        """Removes the oldest ones until the rest fits: the share may have shrunk since they were written."""
        self._make_room(0, set())

    def _make_room(self, nbytes: int, in_use: set[bytes]) -> None:
        kept = [(0, nbytes, b"")] if nbytes else []
        others: list[tuple[int, int, bytes]] = []
        for age, size, digest in self._known():
            (kept if digest in in_use else others).append((age, size, digest))
        others.sort()
        while others and not self._fits([*kept, *others]):
            self._remove(others.pop(0)[2])
        if not self._fits(kept):
            raise StoreError(
                f"{len(kept)} namespaces of {sum(size for _, size, _ in kept)} bytes are in use; max_files and "
                f"capacity_bytes leave room for {self._limit} of {self._limit_bytes} bytes: raise them"
            )

    def _fits(self, files: list[tuple[int, int, bytes]]) -> bool:
        return len(files) <= self._limit and sum(size for _, size, _ in files) <= self._limit_bytes

    def _known(self) -> list[tuple[int, int, bytes]]:
        """(time of change, bytes, digest) of each."""
        found = []
        try:
            places = list(self._directory.iterdir())
        except FileNotFoundError:
            return []
        except OSError as exc:
            reporter.warn("namespace", f"the namespaces cannot be listed: {exc}", error=exc)
            return []
        for place in places:
            if place.is_symlink():
                continue  # what is behind it is nobody's business here
            try:
                status = os.lstat(place / NAMESPACE_FILE)
                found.append((status.st_mtime_ns, _cost(status.st_size), bytes.fromhex(place.name)))
            except (OSError, ValueError):
                continue  # cut short, or not ours: counted as others' at open
        return found

    def _remove(self, digest: bytes) -> bool:
        place = self._directory / digest.hex()
        if fault := try_unlink(place / NAMESPACE_FILE):
            reporter.warn("namespace", f"an old namespace file cannot be removed: {fault}", error=fault)
            return False
        try:
            place.rmdir()
        except OSError as exc:
            reporter.warn("namespace", f"an old namespace directory cannot be removed: {exc}", error=exc)
            return False
        return True


def _is_gone(path: Path) -> bool:
    """Whether it is certainly not there."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _now(path: Path) -> bool:
    """Makes now the file's time of change; False where there is none."""
    try:
        now = uses.clock()
        os.utime(path, (now, now), follow_symlinks=False)
    except PermissionError:  # another user's, who shares the root: any writer may say now, and nothing else
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as exc:
        reporter.warn("namespace", f"a namespace file's time cannot be set: {exc}", error=exc)
    return True


def _cost(nbytes: int) -> int:
    return round_up(nbytes, ALIGNMENT) + ALIGNMENT  # the file, and its directory
