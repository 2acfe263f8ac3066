"""convert/launch.py for pages in host memory, by the native converter: fast, and with places for faults."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvxfer.checksum import segment_checksum
from kvxfer.convert import native


class Converter:
    """Stands in for the module; `spoil[name]` is called with what was written. Calls are noted with their cap."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.spoil: dict[str, Any] = {}

    def prepare(self, pages: Any, mapping: Any) -> None:
        self.calls.append(("prepare", None))

    def gather(self, pages: Any, ids: Any, mapping: Any, out: Any, sums: Any = None, *, programs: Any = None) -> None:
        self.calls.append(("gather", programs))
        native.gather(pages, ids.numpy(), mapping, out.numpy(), _numbers(sums))
        self._spoil("gather", out, sums)

    def scatter(self, src: Any, ids: Any, mapping: Any, pages: Any, sums: Any = None, *, programs: Any = None) -> None:
        self.calls.append(("scatter", programs))
        native.scatter(src.numpy(), ids.numpy(), mapping, pages, _numbers(sums))
        self._spoil("scatter", pages.tensors[0], sums)

    def checksum(self, src: Any, mapping: Any, sums: Any, *, programs: Any = None) -> None:
        slot = mapping.slot
        for payload, row in zip(src.numpy(), _numbers(sums), strict=True):
            for segment in mapping.segments:
                start = segment * slot.segment_stride
                row[segment] = segment_checksum(payload[start : start + slot.segment_length(segment)])
        self._spoil("checksum", sums, None)

    def _spoil(self, name: str, written: Any, sums: Any) -> None:
        self.spoil.get(name, lambda _: None)(written)
        if sums is not None:
            self.spoil.get("sums", lambda _: None)(sums)


def _numbers(sums: Any) -> Any:
    return None if sums is None else sums.numpy().view(np.uint64)


def first_byte(tensor: Any) -> None:
    """A wrong one."""
    tensor.view(-1)[0] ^= 1


def last_byte(tensor: Any) -> None:
    """In a pool: of a spare block, or of one that was moved; wrong either way."""
    tensor.view(-1)[-1] ^= 1
