"""Trailer pages and slot arithmetic against a second implementation, written from docs/format.md alone."""

from __future__ import annotations

import ctypes as C
import errno
import mmap
import random
import struct
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import _native
from kvxfer.slot import TRAILER_SUMS, SlotLayout

OK, BAD = 0, 6
PAGE = 4096
HEAD = struct.Struct("<8sIIIIIIQQQ4Q32s64s72x")
TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Fields:
    """What a trailer page says."""

    first_segment: int = 0
    num_segments: int = 8
    blocks_per_chunk: int = 16
    key: bytes = b"a key"
    generation: int = 7 << 32 | 1
    payload_bytes: int = 8 * 1000 - 1
    segment_bytes: int = 1000
    mask: tuple[int, int, int, int] = (0xFFFF, 0, 0, 0)
    digest: bytes = bytes(range(32))
    sums: tuple[int, ...] = field(default=(1, 2**64 - 1))


def seal(fields: Fields, *, magic: bytes = b"KVXTRLR1", version: int = 1, count: int | None = None) -> bytes:
    """The page, by docs/format.md."""
    page = HEAD.pack(
        magic, version, fields.first_segment, len(fields.sums) if count is None else count, fields.num_segments,
        fields.blocks_per_chunk, len(fields.key), fields.generation, fields.payload_bytes, fields.segment_bytes,
        *fields.mask, fields.digest, fields.key,
    )  # fmt: skip
    page += struct.pack(f"<{len(fields.sums)}Q", *fields.sums)
    return with_crc(page.ljust(PAGE, b"\0"))


def with_crc(page: bytes) -> bytes:
    return page[:4092] + struct.pack("<I", crc32c(page[:4092])) + page[4096:]


def parse(page: bytes) -> Fields:
    """What a page says, by docs/format.md, if it is a good one."""
    magic, version, first, count, segments, blocks, key_bytes, *rest = HEAD.unpack_from(page)
    generation, payload, segment_bytes, *mask, digest, key = rest
    assert (magic, version) == (b"KVXTRLR1", 1)
    assert struct.unpack_from("<I", page, 4092)[0] == crc32c(page[:4092])
    sums = struct.unpack_from(f"<{count}Q", page, 256)
    return Fields(
        first, segments, blocks, key[:key_bytes], generation, payload, segment_bytes, tuple(mask), digest, sums
    )


def to_struct(fields: Fields) -> tuple[_native.Trailer, C.Array[C.c_uint64]]:
    trailer = _native.Trailer(
        key_bytes=len(fields.key), first_segment=fields.first_segment, segment_count=len(fields.sums),
        num_segments=fields.num_segments, blocks_per_chunk=fields.blocks_per_chunk, generation=fields.generation,
        payload_bytes=fields.payload_bytes, segment_bytes=fields.segment_bytes,
    )  # fmt: skip
    trailer.namespace_digest[:] = fields.digest
    trailer.key[: len(fields.key)] = fields.key[:64]
    trailer.mask[:] = fields.mask
    return trailer, (C.c_uint64 * max(len(fields.sums), 1))(*fields.sums)


def native_seal(fields: Fields, page_bytes: int = PAGE) -> bytes | int:
    """The page, or -errno."""
    trailer, sums = to_struct(fields)
    page = C.create_string_buffer(b"\xa5" * page_bytes, page_bytes)
    answer = _native.lib().kvx_trailer_seal(C.byref(trailer), sums, page, page_bytes)
    return page.raw if answer == 0 else int(answer)


def native_parse(page: bytes) -> Fields | int:
    """What the page says, or the status."""
    trailer, sums = _native.Trailer(), (C.c_uint64 * TRAILER_SUMS)(*[0xDEAD] * TRAILER_SUMS)
    # At the end of its memory: a read beyond the page would not go unseen, at least by a sanitizer.
    room = mmap.mmap(-1, -(-len(page) // PAGE) * PAGE or PAGE)
    room[len(room) - len(page) :] = page
    view = (C.c_char * len(room)).from_buffer(room)
    at = C.addressof(view) + len(room) - len(page)
    status = _native.lib().kvx_trailer_parse(at, len(page), C.byref(trailer), sums)
    del view
    if status != OK:
        assert sums[:] == [0xDEAD] * TRAILER_SUMS
        return int(status)
    assert trailer.reserved == 0
    assert bytes(trailer.key[trailer.key_bytes :]) == bytes(64 - trailer.key_bytes)
    return Fields(
        trailer.first_segment, trailer.num_segments, trailer.blocks_per_chunk,
        bytes(trailer.key[: trailer.key_bytes]), trailer.generation, trailer.payload_bytes, trailer.segment_bytes,
        tuple(trailer.mask), bytes(trailer.namespace_digest), tuple(sums[: trailer.segment_count]),
    )  # fmt: skip


u64 = st.integers(0, 2**64 - 1)


@st.composite
def fields(draw: st.DrawFn) -> Fields:
    """Any page that the format allows."""
    count = draw(st.integers(1, TRAILER_SUMS))
    first = draw(st.integers(0, 2**20))
    segments = draw(st.integers(first + count, first + count + 1000))
    segment_bytes = draw(st.integers(1, 16 << 30))
    blocks = draw(st.integers(1, 256))
    mask = draw(st.integers(0, 2**blocks - 1))
    return Fields(
        first_segment=first,
        num_segments=segments,
        blocks_per_chunk=blocks,
        key=draw(st.binary(min_size=1, max_size=64)),
        generation=draw(u64),
        payload_bytes=(segments - 1) * segment_bytes + draw(st.integers(1, segment_bytes)),
        segment_bytes=segment_bytes,
        mask=(mask & 2**64 - 1, mask >> 64 & 2**64 - 1, mask >> 128 & 2**64 - 1, mask >> 192),
        digest=draw(st.binary(min_size=32, max_size=32)),
        sums=tuple(draw(st.lists(u64, min_size=count, max_size=count))) if count < 20 else tuple(range(count)),
    )


@given(fields())
def test_both_implementations_write_the_same_page_and_read_it_back(given_fields: Fields) -> None:
    page = seal(given_fields)
    assert native_seal(given_fields) == page
    assert native_parse(page) == parse(page) == given_fields


def test_a_page_longer_than_its_meaning_is_zero_filled_and_read_back() -> None:
    page = native_seal(Fields(), 16384)
    assert page == seal(Fields()) + bytes(16384 - PAGE)
    assert isinstance(page, bytes)
    assert native_parse(page) == Fields()


def test_no_flipped_byte_goes_unseen() -> None:
    page = bytearray(seal(Fields()))
    for at in range(PAGE):
        for flip in (1, 0x80, 1 + at % 255):
            page[at] ^= flip
            assert native_parse(bytes(page)) == BAD, (at, flip)
            page[at] ^= flip
    assert native_parse(bytes(page)) == Fields()


BAD_FIELDS = {
    "no key": {"key": b""},
    "no blocks": {"blocks_per_chunk": 0},
    "too many blocks": {"blocks_per_chunk": 257},
    "no sums": {"sums": ()},
    "no segments": {"num_segments": 0},
    "first segment beyond the last": {"first_segment": 8},
    "sums beyond the last segment": {"first_segment": 7},
    "a range that wraps": {"first_segment": 2**32 - 1, "num_segments": 2**32 - 1},
    "no segment bytes": {"segment_bytes": 0},
    "a segment beyond 16 GiB": {"segment_bytes": (16 << 30) + 1, "payload_bytes": 8 * ((16 << 30) + 1)},
    "no payload": {"payload_bytes": 0},
    "an empty last segment": {"payload_bytes": 7 * 1000},
    "payload beyond the segments": {"payload_bytes": 8 * 1000 + 1},
    "sizes beyond 64 bits": {"num_segments": 2**32 - 1, "segment_bytes": 16 << 30, "payload_bytes": 2**64 - 1},
    "a block beyond the chunk": {"mask": (1 << 16, 0, 0, 0)},
    "a block far beyond the chunk": {"mask": (0, 0, 0, 1 << 63)},
}


@pytest.mark.parametrize("change", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_fields_that_contradict_each_other_are_refused_both_ways(change: dict) -> None:
    bad = replace(Fields(), **change)
    assert native_parse(seal(bad)) == BAD
    assert native_seal(bad) == -errno.EINVAL


@pytest.mark.parametrize("count", [0, 1, 3, 465, 480, 2**31, 2**32 - 1])
def test_a_count_is_checked_before_it_is_used(count: int) -> None:
    assert native_parse(seal(replace(Fields(), num_segments=2**32 - 1), count=count)) == BAD


def test_another_magic_or_version_is_refused() -> None:
    assert native_parse(seal(Fields(), magic=b"KVXTRLR2")) == BAD
    for version in (0, 2, 2**32 - 1):
        assert native_parse(seal(Fields(), version=version)) == BAD


@pytest.mark.parametrize("at", [120 + 5, 183, 184, 255, 256 + 2 * 8, 256 + 463 * 8, 3968, 4091])
def test_what_must_be_zero_is_checked(at: int) -> None:
    page = bytearray(seal(Fields()))
    assert page[at] == 0
    page[at] = 1
    assert native_parse(with_crc(bytes(page))) == BAD


@pytest.mark.parametrize("length", [0, 1, 255, 4095])
def test_a_page_too_short_is_refused(length: int) -> None:
    assert native_parse(seal(Fields())[:length]) == BAD
    assert native_seal(Fields(), max(length, 1)) == -errno.EINVAL
    assert _native.lib().kvx_trailer_parse(None, PAGE, None, None) == BAD
    assert _native.lib().kvx_trailer_seal(None, None, None, PAGE) == -errno.EINVAL


@given(st.integers(0, 2**32), st.booleans(), st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=8))
def test_no_page_breaks_the_parser(seed: int, crc_is_right: bool, edits: list[tuple[int, int]]) -> None:
    """Random pages, and good ones with a few bytes changed, behind a CRC that fits."""
    page = bytearray(random.Random(seed).randbytes(PAGE) if not edits else seal(Fields()))
    page[:12] = seal(Fields())[:12]
    for at, value in edits:
        page[at] = value
    parsed = native_parse(with_crc(bytes(page)) if crc_is_right else bytes(page))
    if isinstance(parsed, Fields):
        # Whatever was believed can be written again.
        assert native_seal(parsed) == with_crc(bytes(page))
    else:
        assert parsed == BAD


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4031, 4032, 4033, 4092, 8064, 10_000])
def test_crc32c_is_that_of_the_table(length: int) -> None:
    data = random.Random(length).randbytes(length + 3)
    for start in range(3):
        part = data[start : start + length]
        assert _native.lib().kvx_crc32c(part, length) == crc32c(part)


# ---- slots ------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 1 << 20), st.data(), st.integers(1, 3000), st.sampled_from([1, TRAILER_SUMS]),
    st.integers(1, 256), st.sampled_from([4096, 8192, 65536]),
)  # fmt: skip
def test_slots_have_the_size_that_python_says(
    segment_bytes: int, data: st.DataObject, num_segments: int, per_trailer: int, blocks: int, alignment: int
) -> None:
    layout = SlotLayout(
        segment_bytes=segment_bytes,
        last_segment_bytes=data.draw(st.integers(1, segment_bytes)),
        num_segments=num_segments,
        segments_per_trailer=per_trailer,
        blocks_per_chunk=blocks,
        alignment=alignment,
    )
    lib, twin = _native.lib(), _native.SlotLayoutStruct.of(layout)
    assert lib.kvx_slot_payload_stride(C.byref(twin)) == layout.payload_stride
    assert lib.kvx_slot_trailers(C.byref(twin)) == layout.num_trailers
    assert lib.kvx_slot_bytes(C.byref(twin)) == layout.slot_bytes
