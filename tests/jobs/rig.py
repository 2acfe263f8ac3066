"""A native job runner over one plain file of slots: no store, no index. Slots are numbered from 0."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvxfer import _native
from kvxfer.convert.native import mapping_handle
from kvxfer.convert.pages import KVPages
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.jobs import LOAD, STORE, JobOutcome, JobRunner
from kvxfer.layout import LAYOUTS, kvx1_mapping, local_heads
from tests.oracle import POISON, Bytes, Model

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=4, head_dim=40, dtype="float16", tokens_per_block=4)
DIGEST = bytes(range(32))
MODEL = Model.random(GEOMETRY, 8)
BACKEND = "KVXFER_TEST_BACKEND"  # the environment says by which a Rig moves bytes: of this process, and its children
EACH = [[b] for b in range(8)]  # a chunk for each of its blocks


def key_of(i: int) -> bytes:
    """A 36-byte key, as vLLM's."""
    return bytes([i % 256]) * 32 + b"\0\0\0\0"


def generation_of(i: int) -> int:
    """The generation that chunk i is stored under."""
    return (7 << 32) + i + 1


def ranks(
    model: Model,
    layout: str,
    tp_size: int,
    blocks_per_chunk: int = 1,
    *,
    filled: bool,
    only: Sequence[int] | None = None,
) -> list[KVPages]:
    """The pages of every rank of a tensor-parallel group: full of the model's bytes, or of POISON."""
    out = []
    for rank in range(tp_size):
        shard = ShardSpec(tp_size=tp_size, tp_rank=rank)
        page = LAYOUTS[layout](model.geometry, len(local_heads(model.geometry, shard)), padding=24, offset=8)
        mapping = kvx1_mapping(model.geometry, shard, page, blocks_per_chunk=blocks_per_chunk)
        tensors = model.pages(
            layout,
            tp_size=tp_size,
            tp_rank=rank,
            padding=24,
            offset=8,
            only=None if filled and only is None else only or [],
        )
        out.append(KVPages(mapping, tensors, model.num_blocks))
    return out


def expect(model: Model, layout: str, pages: Sequence[KVPages], blocks: Sequence[int]) -> None:
    """Asserts that `blocks` of these pages hold the model's bytes, and that every other byte is POISON."""
    for rank, mine in enumerate(pages):
        want = model.pages(layout, tp_size=len(pages), tp_rank=rank, padding=24, offset=8, only=list(blocks))
        for tensor, (got, right) in enumerate(zip(mine.tensors, want, strict=True)):
            wrong = np.flatnonzero(got != right)
            assert not len(wrong), f"rank {rank}, tensor {tensor}: {len(wrong)} bytes differ, first at {wrong[0]}"


def poisoned(pages: Sequence[KVPages]) -> bool:
    """Nothing was written to any of these pages."""
    return all(bool((tensor == POISON).all()) for mine in pages for tensor in mine.tensors)


class Rig:
    """A file, a runner, and jobs whose chunk i lives in slot i unless told otherwise."""

    def __init__(
        self,
        path: Path,
        pages: Sequence[KVPages],
        *,
        threads: int = 2,
        io_timeout_s: float = 0.0,
        max_lost_threads: int = 4,
        live: bool = True,
        read_piece_bytes: int = 256 << 10,
        **more: Any,
    ) -> None:
        self.path, self.slot, self.live = path, pages[0].mapping.slot, live
        self.lib = _native.lib()
        descriptor = self.lib.kvx_sys_open(os.fsencode(path), os.O_RDWR | os.O_CREAT, 0o600)
        assert descriptor >= 0
        self.file = self.lib.kvx_file_adopt(descriptor, b"slots", 0)
        self.runner = JobRunner(
            threads=threads,
            io_timeout_s=io_timeout_s,
            max_lost_threads=max_lost_threads,
            read_piece_bytes=read_piece_bytes,
            **({"backend": os.environ.get(BACKEND, "posix")} | more),
        )
        self.next_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.shutdown(1.0)
        self.lib.kvx_file_release(self.file)

    def record(self, i: int, slot: int | None = None, **other: int) -> bytes:
        """The kvx_chunk of chunk i."""
        key = key_of(i)
        chunk = _native.Chunk(
            file=self.file,
            slot_offset=(i if slot is None else slot) * self.slot.slot_bytes,
            generation=other.get("generation", generation_of(i)),
            key_bytes=len(key),
        )
        chunk.key[: len(key)] = key
        return bytes(chunk)

    def submit(
        self,
        direction: int,
        pages: Sequence[KVPages],
        block_ids: Sequence[Sequence[int]],
        *,
        chunks: Sequence[int] | None = None,
        records: Sequence[bytes] | None = None,
        digest: bytes = DIGEST,
        deadline_s: float | None = None,
        part_writes: np.ndarray | None = None,
    ) -> int:
        """Queue a job over chunks 0..n-1 (or `chunks`) and give its id."""
        self.next_id += 1
        chunks = range(len(block_ids)) if chunks is None else chunks
        self.runner.submit(
            self.next_id,
            direction,
            [mapping_handle(mine, mine.mapping, self.live) for mine in pages],
            b"".join(records or [self.record(i) for i in chunks]),
            np.array(block_ids, dtype=np.int64),
            digest,
            deadline_ns=0 if deadline_s is None else max(1, time.monotonic_ns() + int(deadline_s * 1e9)),
            part_writes=part_writes,
        )
        return self.next_id

    def finish(self, direction: int, timeout_s: float = 20.0) -> JobOutcome:
        """The next finished job of a direction."""
        end = time.monotonic() + timeout_s
        while (outcome := self.runner.poll(direction)) is None:
            assert time.monotonic() < end, "no job ended"
            self.runner.wait([direction], 0.05)
        return outcome

    def store(self, pages: Sequence[KVPages], block_ids: Sequence[Sequence[int]], **how: object) -> JobOutcome:
        """Store and wait."""
        self.submit(STORE, pages, block_ids, **how)
        return self.finish(STORE)

    def load(self, pages: Sequence[KVPages], block_ids: Sequence[Sequence[int]], **how: object) -> JobOutcome:
        """Load and wait."""
        self.submit(LOAD, pages, block_ids, **how)
        return self.finish(LOAD)

    def bytes_of(self, slot: int) -> Bytes:
        """What a slot holds on disk."""
        size = self.slot.slot_bytes
        return np.frombuffer(self.path.read_bytes()[slot * size : (slot + 1) * size], dtype=np.uint8)

    def overwrite(self, slot: int, offset: int, data: bytes) -> None:
        """Change bytes of a slot behind everybody's back."""
        with self.path.open("r+b") as file:
            file.seek(slot * self.slot.slot_bytes + offset)
            file.write(data)

    def flip(self, slot: int, offset: int) -> None:
        """Invert one bit of a slot."""
        self.overwrite(slot, offset, bytes([int(self.bytes_of(slot)[offset]) ^ 1]))
