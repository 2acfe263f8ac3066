"""A store, an engine and the pages of a small model: what the engine's tests share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.device.base import Device
from kvxfer.engine import TransferEngine
from kvxfer.geometry import KVGeometry
from kvxfer.keys import Namespace, make_offload_key
from kvxfer.results import TransferResult
from kvxfer.store import Store
from tests.jobs.rig import GEOMETRY, expect, poisoned, ranks
from tests.oracle import POISON, Model

__all__ = ["GEOMETRY", "Node", "expect", "keys_of", "namespace_of", "poisoned", "ranks"]


def keys_of(numbers: Sequence[int], prompt: int = 0) -> list[bytes]:
    """Keys of a chain of chunks."""
    return [make_offload_key(f"{prompt}:{n}".encode().ljust(32, b"."), 0) for n in numbers]


def namespace_of(geometry: KVGeometry = GEOMETRY, blocks_per_chunk: int = 1, **changed: Any) -> Namespace:
    """A namespace for the test model."""
    fields: dict[str, Any] = {
        "model": "test",
        "weights_fingerprint": "seed 0",
        "dtype": geometry.dtype,
        "canonical_form": "kvx1",
        "geometry": [{"num_layers": geometry.num_layers, "num_kv_heads": geometry.num_kv_heads}],
        "blocks_per_chunk": blocks_per_chunk,
        "tokens_per_chunk": blocks_per_chunk * geometry.tokens_per_block,
    }
    return Namespace(**(fields | changed))


class Node:
    """One server: a store at `root` and engines over a TP2 NHD source and a TP4 HND target. Chunk i is block i."""

    @staticmethod
    def make_device() -> Device | None:
        """Tests of devices put one here."""
        return None

    def __init__(
        self,
        root: Path,
        model: Model,
        *,
        capacity_bytes: int = 64 << 20,
        slab_bytes: int | None = None,
        direct: str = "auto",
        policy: str = "lru",
        io: str = "auto",
        blocks_per_chunk: int = 1,
        namespace: Namespace | None = None,
        clock: Callable[[], float] = time.monotonic,
        writes: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        """`writes`: of the store's configuration, what bounds them."""
        self.model = model
        self.namespace = namespace or namespace_of(blocks_per_chunk=blocks_per_chunk)
        self.config = EngineConfig(**({"io_threads": 2, "shutdown_timeout_s": 1.0, "bay_bytes": 1 << 20} | config))
        limits: dict[str, Any] = {"capacity_bytes": capacity_bytes, "slab_bytes": slab_bytes, "direct": direct}
        self.store = Store.open(
            StoreConfig(root=root, policy=policy, io=io, **limits, **(writes or {})), writers=2, clock=clock
        )
        self.source = ranks(model, "nhd", 2, blocks_per_chunk, filled=True)
        self.target = ranks(model, "hnd", 4, blocks_per_chunk, filled=False)
        self.writer, self.reader = (
            TransferEngine(
                self.store, self.namespace, pages, config=self.config, clock=clock, device=self.make_device()
            )
            for pages in (self.source, self.target)
        )
        self.digest = self.reader.digest
        self._job = 0

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.shutdown()
        self.reader.shutdown()
        self.store.close()

    def next_job(self) -> int:
        self._job += 1
        return self._job

    def put(self, numbers: Sequence[int], timeout: float = 20.0, **how: Any) -> TransferResult:
        """Store these chunks and wait."""
        return self._run(self.writer, "submit_store", numbers, timeout, how)

    def get(self, numbers: Sequence[int], timeout: float = 20.0, **how: Any) -> TransferResult:
        """Load these chunks and wait."""
        return self._run(self.reader, "submit_load", numbers, timeout, how)

    def _run(
        self, engine: TransferEngine, call: str, numbers: Sequence[int], timeout: float, how: dict[str, Any]
    ) -> TransferResult:
        job = self.next_job()
        ids = how.pop("block_ids", list(numbers))
        keys = how.pop("keys", None) or keys_of(numbers)
        getattr(engine, call)(job, keys, ids, **how)
        results = engine.wait([job], timeout)
        assert list(results) == [job], "no result"
        return results[job]

    def poison(self) -> None:
        """Makes the target unreadable again."""
        for mine in self.target:
            for tensor in mine.tensors:
                tensor[:] = POISON

    def check(self, numbers: Sequence[int]) -> None:
        """Asserts that these blocks of the target are the model's, and all else is untouched."""
        expect(self.model, "hnd", self.target, numbers)

    # ---- damage, behind everybody's back ------------------------------------------------------------------

    def slot_bytes(self, number: int) -> bytes:
        """What the slot of a chunk holds on disk."""
        path, offset, layout = self._where(number)
        with path.open("rb") as file:
            return os.pread(file.fileno(), layout.slot_bytes, offset)

    def overwrite(self, number: int, at: int, data: bytes) -> None:
        """Change bytes of a chunk's slot."""
        path, offset, _ = self._where(number)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), data, offset + at)
            os.fsync(file.fileno())

    def flip(self, number: int, at: int) -> None:
        """Invert one bit of a chunk's slot."""
        self.overwrite(number, at, bytes([self.slot_bytes(number)[at] ^ 1]))

    def _where(self, number: int) -> tuple[Path, int, Any]:
        found = self.store.locate(self.digest, keys_of([number])[0])
        assert found is not None, f"chunk {number} is not stored"
        return found

    def offset_range(self, number: int) -> tuple[int, int]:
        """File offsets of a chunk's slot, for FaultyIO."""
        _, offset, layout = self._where(number)
        return offset, offset + layout.slot_bytes

    def offsets_from(self, number: int) -> tuple[int, int]:
        """File offsets of the slot of this chunk and all beyond it: in their slabs, those before it lie in front."""
        start, _ = self.offset_range(number)
        assert all(self.offset_range(before)[1] <= start for before in range(number))
        return start, 1 << 40


def files_and_bytes(root: Path) -> tuple[int, int]:
    """What a root takes: files, and the larger of their sizes and their blocks."""
    stats = [os.lstat(os.path.join(folder, name)) for folder, _, names in os.walk(root) for name in names]
    return len(stats), int(np.sum([max(s.st_size, s.st_blocks * 512) for s in stats]))
