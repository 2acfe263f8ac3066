"""Whatever happens to a slot on disk: its chunk is refused, and nothing of it reaches a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvxfer.convert.pages import KVPages
from kvxfer.geometry import KVGeometry
from kvxfer.jobs import Status
from kvxfer.layout import row_mapping
from tests.examples import examples
from tests.jobs.rig import DIGEST, Rig, expect, poisoned, ranks
from tests.oracle import POISON, Model

PAGE, WORD = 4096, 4
# Segments that end on a page: 8 layers of 2 planes of 8 tokens of 64 bytes are 8192. No byte of a slot is padding.
GEOMETRY = KVGeometry(num_layers=8, num_kv_heads=2, head_dim=32, dtype="float16", tokens_per_block=8)
MODEL = Model.random(GEOMETRY, 4)
CHUNKS = 4
ROW_BYTES = 5 * PAGE
many = settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Bench:
    """Four chunks in a file, as they were written, and a way to load one of them after it was changed."""

    rig: Rig
    target: list[KVPages]
    whole: bytes
    live: bool

    @property
    def slot_bytes(self) -> int:
        return self.rig.slot.slot_bytes

    def load(self, chunk: int, **how: Any) -> Status:
        """Load one chunk and put the file and the pages back; asserts that a refusal touched no live page."""
        for pages in self.target:
            for tensor in pages.tensors:
                tensor[:] = POISON
        outcome = self.rig.load(self.target, [[chunk]], chunks=[chunk], **how)
        status = Status(int(outcome.status[0]))
        if status is Status.OK:
            self.check(chunk)
        elif self.live:
            assert poisoned(self.target), f"{status.name} and pages were written"
        self.rig.path.write_bytes(self.whole)
        return status

    def check(self, chunk: int) -> None:
        """Asserts that the pages hold this chunk."""
        if self.live:
            expect(MODEL, "hnd", self.target, [chunk])
        else:
            assert np.array_equal(self.target[0].tensors[0][chunk], ROWS[chunk])

    def bytes_of(self, chunk: int) -> bytes:
        return self.whole[chunk * self.slot_bytes : (chunk + 1) * self.slot_bytes]


ROWS = np.random.default_rng(6).integers(0, 256, (CHUNKS, ROW_BYTES), dtype=np.uint8)


@pytest.fixture(params=["kvx1", "row"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if live := request.param == "kvx1":
        source, target = ranks(MODEL, "nhd", 2, filled=True), ranks(MODEL, "hnd", 1, filled=False)
    else:
        mapping = row_mapping(ROW_BYTES)
        source = [KVPages(mapping, [ROWS], CHUNKS)]
        target = [KVPages(mapping, [np.zeros_like(ROWS)], CHUNKS)]
    with Rig(tmp_path / "slots", source, live=live) as rig:
        assert not rig.store(source, [[chunk] for chunk in range(CHUNKS)]).status.any()
        found = Bench(rig, target, rig.path.read_bytes(), live)
        assert all(found.load(chunk) is Status.OK for chunk in range(CHUNKS)), "whole chunks are believed"
        yield found


@many
@given(chunk=st.integers(0, CHUNKS - 1), data=st.data())
def test_any_flipped_bit_is_seen(bench: Bench, chunk: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, bench.slot_bytes - 1), label="byte")
    bit = data.draw(st.integers(0, 7), label="bit")
    bench.rig.overwrite(chunk, at, bytes([bench.bytes_of(chunk)[at] ^ 1 << bit]))
    status = bench.load(chunk)
    assert status.is_damage
    assert (status is Status.BAD_SUM) == (at < bench.rig.slot.payload_stride)


@many
@given(chunk=st.integers(0, CHUNKS - 1), size=st.sampled_from([WORD, PAGE]), data=st.data())
def test_any_two_places_that_changed_places_are_seen(bench: Bench, chunk: int, size: int, data: st.DataObject) -> None:
    """Words, or pages, of one slot: sums that were taken of both could not tell."""
    slot, last = bench.bytes_of(chunk), bench.slot_bytes // size - 1
    one, two = (data.draw(st.integers(0, last), label="place") * size for _ in range(2))
    left, right = slot[one : one + size], slot[two : two + size]
    assume(left != right)
    bench.rig.overwrite(chunk, one, right)
    bench.rig.overwrite(chunk, two, left)
    assert bench.load(chunk).is_damage


@many
@given(chunks=st.tuples(st.integers(0, CHUNKS - 1), st.integers(0, CHUNKS - 1)), data=st.data())
def test_pages_of_another_chunk_are_seen(bench: Bench, chunks: tuple[int, int], data: st.DataObject) -> None:
    """Also where a page lies where it lay in its own slot: a write that went astray."""
    here, there = chunks
    first = data.draw(st.integers(0, bench.slot_bytes // PAGE - 1), label="page")
    count = data.draw(st.integers(1, bench.slot_bytes // PAGE - first), label="pages")
    span = slice(first * PAGE, (first + count) * PAGE)
    assume(bench.bytes_of(here)[span] != bench.bytes_of(there)[span])
    bench.rig.overwrite(here, first * PAGE, bench.bytes_of(there)[span])
    assert bench.load(here).is_damage


@many
@given(start=st.integers(0), length=st.integers(1), data=st.data())
def test_any_stretch_that_was_overwritten_is_seen(bench: Bench, start: int, length: int, data: st.DataObject) -> None:
    """By zeros, by ones or by whatever there is."""
    start %= bench.slot_bytes
    length = min(length, bench.slot_bytes - start)
    fill = data.draw(st.sampled_from([b"\0", b"\xff", b"\xa5"]) | st.binary(min_size=1, max_size=9), label="bytes")
    junk = (fill * (length // len(fill) + 1))[:length]
    assume(junk != bench.bytes_of(1)[start : start + length])
    bench.rig.overwrite(1, start, junk)
    assert bench.load(1).is_damage


@many
@given(keep=st.integers(0))
def test_any_file_that_ends_within_a_slot_is_seen(bench: Bench, keep: int) -> None:
    keep %= bench.slot_bytes
    with bench.rig.path.open("r+b") as file:
        file.truncate((CHUNKS - 1) * bench.slot_bytes + keep)
    assert bench.load(CHUNKS - 1) is Status.TRUNCATED


@many
@given(chunks=st.tuples(st.integers(0, CHUNKS - 1), st.integers(0, CHUNKS - 1)))
def test_a_whole_slot_under_another_key_is_foreign(bench: Bench, chunks: tuple[int, int]) -> None:
    here, there = chunks
    assume(here != there)
    bench.rig.overwrite(here, 0, bench.bytes_of(there))
    assert bench.load(here) is Status.FOREIGN


@many
@given(digest=st.binary(min_size=32, max_size=32) | st.integers(0, 255).map(lambda bit: flip(DIGEST, bit)))
def test_a_slot_of_another_namespace_is_foreign(bench: Bench, digest: bytes) -> None:
    assume(digest != DIGEST)
    assert bench.load(2, digest=digest) is Status.FOREIGN


@many
@given(generation=st.integers(1, 2**64 - 1) | st.integers(0, 63).map(lambda bit: ((7 << 32) + 3) ^ 1 << bit))
def test_a_slot_of_another_generation_is_foreign(bench: Bench, generation: int) -> None:
    assume(generation != (7 << 32) + 3)
    record = bench.rig.record(2, generation=generation)
    assert bench.load(2, records=[record]) is Status.FOREIGN


def flip(data: bytes, bit: int) -> bytes:
    """`data` with one of its bits inverted."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)
