"""Bytes from a disk that anybody may have written, and words that anybody may have typed.

(Trailers: native/test_trailer.py; slots: test_slots.py.) What is read is refused by name or is exactly what was
written; no size or count out of a file is believed before it was held against the file.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvxfer import _native
from kvxfer.cli import app, main
from kvxfer.config import StoreConfig
from kvxfer.errors import ConfigError, FormatError
from kvxfer.slot import ALIGNMENT, TRAILER_SUMS, SlotLayout
from kvxfer.staging import AlignedBuffer
from kvxfer.store import Store, trust
from kvxfer.store.rebuild import identify, parse_page
from kvxfer.store.records import (
    EPOCHS,
    LEASES,
    MEMBERS,
    SLABS,
    EpochRow,
    IndexRecord,
    LeaseRow,
    MemberRow,
    Row,
    SlabRow,
    SlabState,
    item,
    parse,
)
from kvxfer.store.root import NAMESPACES, RootInfo, read_root
from kvxfer.store.slab import SlabHeader, pack_header, parse_header, slab_file_bytes, whole_slots
from kvxfer.store.survey import survey_root
from tests.examples import examples
from tests.store import rig

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PLACES = st.tuples(U64, U64, U64)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from([0, 1, 2, 4096, 8192, -1, 2**31, 2**63, 2**64, 10**400, "open", "clean", "synced", "power"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
some = settings(max_examples=examples(15))
few = settings(max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])


# ---- the index's rows ---------------------------------------------------------------------------------------------

ROWS: st.SearchStrategy[Row] = st.one_of(
    st.builds(
        IndexRecord, st.binary(min_size=32, max_size=32), st.binary(min_size=1, max_size=64), U64, U64, U64,
        st.integers(0, 2**256 - 1),
    ),
    st.builds(EpochRow, U32, U64),
    st.builds(SlabRow, U64, st.sampled_from(SlabState), U64),
    st.builds(MemberRow, st.integers(0, 255), U32, U32),
    st.builds(LeaseRow, U32, U64, st.lists(PLACES, max_size=3)),
)  # fmt: skip


@some
@given(ROWS)
def test_a_row_reads_as_it_was_written(row: Row) -> None:
    assert parse(*item(row)) == row
    assert type(parse(*item(row))) is type(row)


@some
@given(st.sampled_from([b"", EPOCHS, SLABS, MEMBERS, LEASES]), st.binary(max_size=110), st.binary(max_size=80))
@example(SLABS, bytes(8), b"\0" * 9)  # no such state
def test_a_row_of_any_bytes_is_none_or_says_all_of_them(prefix: bytes, name: bytes, value: bytes) -> None:
    row = parse(prefix + name, value)
    assert row is None or item(row) == (prefix + name, value)
    assert not isinstance(row, SlabRow) or row.state in [*SlabState]


@some
@given(ROWS, st.integers(-3, 3).filter(bool))
def test_a_row_of_another_length_is_none(row: Row, change: int) -> None:
    name, value = item(row)
    if not value:  # a lease of nothing
        return
    longer = value + bytes(change) if change > 0 else value[:change]
    assert parse(name, longer) is None


# ---- slab headers and trailers --------------------------------------------------------------------------------------


def crc_fits(page: bytearray) -> bytes:
    """The page, with the CRC that belongs to it."""
    page[4092:4096] = int(_native.lib().kvx_crc32c(bytes(page[:4092]), 4092)).to_bytes(4, "little")
    return bytes(page)


EDITS = st.lists(st.tuples(st.integers(0, 100) | st.integers(0, 4095), st.binary(min_size=1, max_size=8)), max_size=4)


def edited(page: bytes, edits: list[tuple[int, bytes]]) -> bytearray:
    out = bytearray(page)
    for at, new in edits:
        out[at : at + len(new)] = new[: len(out) - at]
    return out


@some
@given(EDITS, st.booleans(), st.integers(0, 4096))
def test_a_slab_header_is_the_one_that_was_written_or_refused(
    edits: list[tuple[int, bytes]], forged: bool, length: int
) -> None:
    good = pack_header(7, rig.ROW, 21)
    page = edited(good, edits)
    raw = crc_fits(page) if forged else bytes(page)
    try:
        found = parse_header(raw, 7, ALIGNMENT, "slab")
    except FormatError:
        assert raw[:12] != good[:12], "only another version is left alone"
        return
    if raw[:4096] == good[:4096]:
        assert found == SlabHeader(7, 21, rig.ROW)
    elif not forged:
        assert found is None
    if found is not None:  # a forged one is believed as far as it can be so
        assert pack_header(found.slab_id, found.layout, found.num_slots)[:64] == raw[:64]
        assert whole_slots(found, length) * found.layout.slot_bytes <= length
        assert found.num_slots <= 2**32
    assert parse_header(raw[: length % 4096], 7, ALIGNMENT, "slab") is None


@settings(max_examples=3)
@given(st.integers(1, 2**32), st.integers(1, 2**34), st.integers(1, 1000))
def test_a_forged_header_makes_no_open_larger_than_its_file(slots: int, segment: int, segments: int) -> None:
    layout = SlotLayout(
        segment_bytes=segment, last_segment_bytes=segment, num_segments=segments, segments_per_trailer=TRAILER_SUMS
    )
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "root")
        Store.open(rig.config(root), housekeeping=False).close()
        (root / "slabs" / "slab-00000001.kvx").write_bytes(pack_header(1, layout, slots) + bytes(8192))
        (root / "index" / "state.json").unlink()  # so that it is scanned
        with Store.open(rig.config(root), housekeeping=False) as store:
            digest = store.register(rig.namespace(), rig.ROW)
            assert all(rig.put(store, digest, [rig.key(i) for i in range(20)]))
            assert store.stats().slab_bytes <= 8 << 20
        assert rig.disk_use(root)[0] <= 8 << 20
        assert slab_file_bytes(layout, slots) > 8192


@some
@given(st.lists(EDITS, min_size=1, max_size=3), st.booleans())
def test_slots_of_any_pages_are_identified_or_free(edits: list[list[tuple[int, bytes]]], forged: bool) -> None:
    image = rig.slot_image(b"key", bytes(32), rig.SHARED, 5, 3)
    at = rig.SHARED.payload_stride
    pages = []
    buffer = AlignedBuffer(ALIGNMENT, ALIGNMENT)
    changed = False
    for n in range(rig.SHARED.num_trailers):
        good = image.array[at + n * ALIGNMENT : at + (n + 1) * ALIGNMENT].tobytes()
        page = edited(good, edits[n % len(edits)])
        raw = crc_fits(page) if forged else bytes(page)
        changed = changed or raw != good
        buffer.array[:] = memoryview(raw)
        pages.append(parse_page(buffer.address, rig.SHARED))
    found = identify(pages, rig.SHARED, 1, 2)
    if not changed:
        assert found == IndexRecord(bytes(32), b"key", 1, 2, 5, 3)
    elif not forged:
        assert found is None
    assert found is None or (0 < len(found.key) <= 64 and found.mask < 1 << 256 and found.generation)


# ---- files of JSON --------------------------------------------------------------------------------------------------


def any_file(raw: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """JSON of this, or of anything, or no JSON."""
    texts = (raw | JSON).map(lambda value: json.dumps(value).encode())
    return texts | st.binary(max_size=40) | st.just(b"[" * 100_000)


def with_values(**good: Any) -> st.SearchStrategy[dict[str, Any]]:
    """These fields, each as it should be or anything."""
    return st.fixed_dictionaries({name: st.just(value) | JSON for name, value in good.items()})


LIMITS = {"capacity_bytes": 8 << 20, "max_files": 4096, "slab_bytes": None, "index_map_bytes": None}
ROOT = {"format": 1, "alignment": 4096, "weight_epoch": 3, "durability": "power"}


@few
@given(any_file(st.tuples(with_values(**ROOT), with_values(**LIMITS)).map(lambda both: both[0] | {"limits": both[1]})))
@example(json.dumps(ROOT | {"limits": LIMITS}).encode())
@example(json.dumps(ROOT | {"limits": LIMITS, "weight_epoch": -1}).encode())
@example(json.dumps(ROOT | {"limits": LIMITS, "durability": ["power"]}).encode())
def test_kvxfer_json(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "kvxfer.json").write_bytes(raw)
    try:
        info = read_root(tmp_path)
    except FormatError:
        return
    assert isinstance(info, RootInfo)
    assert info.alignment >= 4096 and info.weight_epoch >= 0
    try:
        config = info.config(tmp_path)
    except ConfigError:
        return
    assert config == StoreConfig(root=tmp_path, **dict(info.limits), durability=info.durability)


STATE = {"format": 2, "boot_id": trust.boot_id(), "state": "open"}


@few
@given(any_file(with_values(**STATE)))
@example(json.dumps(STATE | {"state": "synced", "boot_id": ""}).encode())
def test_state_json(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(b"no index")
    (tmp_path / "state.json").write_bytes(raw)
    assert trust.distrust(tmp_path), "and if all of it were right, there is no index"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A small root that was closed, and the digest of its namespace."""
    root = tmp_path_factory.mktemp("fuzz") / "root"
    with Store.open(rig.config(root), housekeeping=False) as store:
        digest = store.register(rig.namespace(), rig.ROW)
        assert all(rig.put(store, digest, [rig.key(i) for i in range(5)]))
    return root, digest


@few
@given(
    any_file(
        with_values(format=1, weight_epoch=0, slot={}, namespace=rig.namespace().as_json())
        | with_values(**rig.namespace().as_json()).map(lambda space: {"weight_epoch": 0, "namespace": space})
    )
)
@example(json.dumps({"weight_epoch": 0, "namespace": rig.namespace(model="another").as_json()}).encode())
@example(json.dumps({"weight_epoch": 10**400, "namespace": rig.namespace().as_json()}).encode())
def test_namespace_json(filled: tuple[Path, bytes], raw: bytes) -> None:
    root, digest = filled
    path = root / NAMESPACES / digest.hex() / "namespace.json"
    before = path.read_bytes()
    try:
        path.write_bytes(raw)
        (seen,) = [view for view in survey_root(root).namespaces if view.digest == digest]
        assert (seen.fields is None) == bool(seen.why)
        assert seen.fields is None or seen.fields == rig.namespace().as_json()
    finally:
        path.write_bytes(before)


# ---- the command line -----------------------------------------------------------------------------------------------

HEAVY = ("demo", "doctor", "bench")  # they move gigabytes, or ask the machine: only what they refuse is tried


def words_of(commands: Any) -> list[str]:
    """All names of commands and options there are."""
    import typer.main

    found: list[str] = []

    def walk(command: Any) -> None:
        found.extend(option for parameter in command.params for option in getattr(parameter, "opts", ()))
        for name, inner in getattr(command, "commands", {}).items():
            found.append(name)
            walk(inner)

    walk(typer.main.get_command(commands))
    return sorted(set(found))


@settings(max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_words_end_with_an_exit_code_and_no_traceback(
    filled: tuple[Path, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, data: st.DataObject,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    known = words_of(app)
    names = [name for name in known if not name.startswith("-")]
    value = (
        st.sampled_from(["", ".", "nowhere", "-", "--", "0", "-1", "1e999", "nan", "9" * 30, "1G", "\0", "é\udc80"])
        | st.just(str(filled[0])) | st.text(st.characters(exclude_characters="/"), max_size=5)
    )  # fmt: skip
    words = [data.draw(st.sampled_from(names))]
    words += data.draw(st.lists(st.sampled_from([word for word in known if word != "--dir"]) | value, max_size=5))
    if words[0] in HEAVY or set(words) & set(HEAVY):
        words.append("--no-such-option")
    code = main(words)
    said = capsys.readouterr()
    assert code in (0, 1, 2), (words, code)
    assert "Traceback" not in said.err + said.out, words
