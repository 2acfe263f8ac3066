"""namespaces/<digest>/namespace.json: what a digest stands for, for people and tools. Nothing is decided by them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from kvxfer.config import StoreConfig
from kvxfer.errors import StoreError
from kvxfer.io.system import read_small, replace_file, sys_mkdir, try_unlink
from kvxfer.keys import Namespace
from kvxfer.report import reporter
from kvxfer.slot import ALIGNMENT, SlotLayout, round_up
from kvxfer.store.root import FORMAT, NAMESPACE_FILE, NAMESPACES


def describe(namespace: Namespace, slot: SlotLayout, weight_epoch: int) -> bytes:
    """The file's text."""
    body = {
        "format": FORMAT,
        "weight_epoch": weight_epoch,
        "namespace": namespace.as_json(),
        "slot": asdict(slot),
    }
    return json.dumps(body, indent=1, ensure_ascii=False).encode() + b"\n"


class NamespaceFiles:
    """The files, kept within their share of the root: `limit` of them, `limit_bytes` together."""

    def __init__(self, config: StoreConfig) -> None:
        self._directory = config.root / NAMESPACES
        self._limit, self._limit_bytes = config.max_namespaces, config.namespace_bytes

    def write(self, digest: bytes, text: bytes, in_use: set[bytes]) -> None:
        """Writes one, and removes the oldest that this process does not use where the share would be passed.

        Raises:
            StoreError: those in use leave no room.
            IOFault: it could not be written; others may have gone.
        """
        place = self._directory / digest.hex()
        path = place / NAMESPACE_FILE
        if read_small(path, len(text) + 1) == text:
            return
        self._make_room(_cost(len(text)), in_use | {digest})
        sys_mkdir(self._directory)
        sys_mkdir(place)
        replace_file(path, text, durable=False)  # one that is damaged is written again

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
            try:
                status = os.lstat(place / NAMESPACE_FILE)
                found.append((status.st_mtime_ns, _cost(status.st_size), bytes.fromhex(place.name)))
            except (OSError, ValueError):
                continue  # cut short, or not ours: counted as others' at open
        return found

    def _remove(self, digest: bytes) -> None:
        place = self._directory / digest.hex()
        if fault := try_unlink(place / NAMESPACE_FILE):
            reporter.warn("namespace", f"an old namespace file cannot be removed: {fault}", error=fault)
            return
        try:
            place.rmdir()
        except OSError as exc:
            reporter.warn("namespace", f"an old namespace directory cannot be removed: {exc}", error=exc)


def _cost(nbytes: int) -> int:
    return round_up(nbytes, ALIGNMENT) + ALIGNMENT  # the file, and its directory
