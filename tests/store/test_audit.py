"""survey_root and verify_root: every kind of damage is found and named, and nothing is changed by looking."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError, FormatError
from kvxfer.slot import SlotLayout
from kvxfer.store import FINDINGS, Store, survey_root, verify_root
from kvxfer.store.entry import SlotState
from kvxfer.testing import FaultyIO
from tests.store import damage, rig
from tests.store.damage import DAMAGES, NEWER, ROW_KEY, ROWS, SHARED, SHARED_KEY, Filled

ROW_BYTES, SHARED_BYTES = 10_300, 8192


@pytest.fixture
def filled(root: Path) -> Filled:
    """A closed root with 50 rows and 20 shared chunks."""
    return damage.fill(root)


def test_a_whole_root_is_verified_to_the_last_byte(filled: Filled) -> None:
    before = rig.snapshot(filled.root)
    seen: list[tuple[int, int]] = []
    result = verify_root(filled.root, threads=3, progress=lambda done, total: seen.append((done, total)))
    assert result.findings == []
    assert (result.verified, result.entries_failed) == (ROWS + SHARED, 0)
    assert result.verified_bytes == ROWS * ROW_BYTES + SHARED * SHARED_BYTES
    assert result.slots == sum(slab.num_slots for slab in result.survey.slabs.values())
    assert result.free == result.slots - ROWS - SHARED
    assert result.stale == 0
    assert seen == [(n, result.slots) for n in range(1, result.slots + 1)]
    assert rig.snapshot(filled.root) == before


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(filled: Filled, name: str, threads: int) -> None:
    act, expected = DAMAGES[name]
    lost = act(filled)
    before = rig.snapshot(filled.root)
    result = verify_root(filled.root, threads=threads)
    assert {finding.what for finding in result.findings} == expected
    assert expected <= FINDINGS.keys()
    assert {finding.record.key for finding in result.findings if finding.record} == lost
    assert result.entries_failed == len(lost)
    assert result.verified == ROWS + SHARED - len(lost)
    for finding in result.findings:
        assert finding.detail
        if finding.offset is not None and finding.record is not None:
            path, offset, layout = filled.places[finding.record.key]
            assert (finding.slab_id, finding.offset) == (int(path.stem[5:]), offset)
            assert finding.slot == (offset - 4096) // layout.slot_bytes
    assert rig.snapshot(filled.root) == before


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_format_is_refused_by_name(filled: Filled, name: str) -> None:
    named = NEWER[name](filled)
    before = rig.snapshot(filled.root)
    for look in (survey_root, verify_root):
        with pytest.raises(FormatError, match=named):
            look(filled.root)
    assert rig.snapshot(filled.root) == before


def test_padding_and_free_slots_are_nobodys(filled: Filled) -> None:
    filled.flip(ROW_KEY, 5000)  # behind segment 0, before segment 1
    slabs = verify_root(filled.root).survey.slabs.values()
    used = {(path, offset) for path, offset, _ in filled.places.values()}
    slab = next(slab for slab in slabs if (slab.path, slab.slot_offset(slab.num_slots - 1)) not in used)
    with slab.path.open("r+b") as file:
        os.pwrite(file.fileno(), os.urandom(slab.layout.slot_bytes), slab.slot_offset(slab.num_slots - 1))
    result = verify_root(filled.root)
    assert (result.findings, result.verified) == ([], ROWS + SHARED)


def test_what_the_index_names_no_more_is_stale_and_not_damage(filled: Filled) -> None:
    with Store.open(rig.config(filled.root)) as store:
        digest = store.register(*damage.NAMESPACES[0])
        (entry,) = store.pin(digest, [ROW_KEY])
        assert entry is not None
        assert store.invalidate(entry, "bad_sum")
        store.unpin([entry])
    filled.flip(ROW_KEY, 0)
    result = verify_root(filled.root)
    assert (result.findings, result.verified, result.stale) == ([], ROWS + SHARED - 1, 1)


def test_an_index_that_says_other_blocks_is_found(root: Path) -> None:
    with Store.open(rig.config(root)) as store:
        digest = store.register(rig.namespace(), rig.ROW)
        (slot,) = store.reserve(digest, rig.ROW, 1)
        rig.write(slot, digest, ROW_KEY, mask=0b0011)
        assert store.commit(digest, [(ROW_KEY, slot, 0b0111)]) == [True]
    (finding,) = verify_root(root).findings
    assert finding.what == "foreign"
    assert "mask of blocks 0x3, the index says 0x7" in finding.detail


def test_segments_longer_than_a_piece_are_summed_whole(root: Path) -> None:
    layout = SlotLayout(
        segment_bytes=2_500_001,
        last_segment_bytes=1_048_577,
        num_segments=2,
        segments_per_trailer=1,
        blocks_per_chunk=4,
    )
    with Store.open(rig.config(root, capacity_bytes=32 << 20, slab_bytes=8 << 20)) as store:
        digest = store.register(rig.namespace(), layout)
        assert all(rig.put(store, digest, [rig.key(0)], layout))
        place = store.locate(digest, rig.key(0))
    assert verify_root(root).verified == 1
    assert place is not None
    for at in (0, 1 << 20, 2_500_000, layout.segment_stride + 1_048_576):
        with place[0].open("r+b") as file:
            (byte,) = os.pread(file.fileno(), 1, place[1] + at)
            os.pwrite(file.fileno(), bytes([byte ^ 0x80]), place[1] + at)
            assert [finding.what for finding in verify_root(root).findings] == ["bad_sum"], at
            os.pwrite(file.fileno(), bytes([byte]), place[1] + at)
    assert verify_root(root).findings == []


@pytest.fixture
def large(root: Path) -> Filled:
    """The same in slabs of 2 MiB, one for each layout."""
    return damage.fill(root, writers=1, slab_bytes=2 << 20, capacity_bytes=16 << 20)


def _far(filled: Filled) -> tuple[bytes, int, int]:
    """(a chunk, its slot's bytes): behind what is asked of small files, since a fault knows offsets and not files."""
    key, (_, offset, layout) = max(filled.places.items(), key=lambda item: item[1][1])
    assert offset >= 1 << 20
    return key, offset, offset + layout.slot_bytes


def test_a_slot_that_cannot_be_read_is_named(large: Filled, faults: FaultyIO) -> None:
    key, low, high = _far(large)
    rule = faults.fail("pread", errno.EIO, offset=(low, high))
    result = verify_root(large.root)
    assert rule.hits > 0
    assert {finding.what for finding in result.findings} == {"io"}
    assert key in {finding.record.key for finding in result.findings if finding.record}
    assert all("Input/output error" in finding.detail for finding in result.findings)


def test_a_slab_that_cannot_be_opened_is_named_entry_by_entry(filled: Filled, faults: FaultyIO) -> None:
    path = filled.places[ROW_KEY][0]
    opens = FaultyIO.calls("open")
    seen = survey_root(filled.root)
    order = [slab.path for slab in seen.slabs.values()].index(path)
    before = FaultyIO.calls("open") - opens + order  # one for each slab in front of it
    # With O_DIRECT and without, in the first look; in the second one it opens again.
    rule = faults.fail("open", errno.EMFILE, after=before, times=2)
    result = verify_root(filled.root, threads=1)
    assert rule.hits == 2
    assert (result.findings, result.verified) == ([], ROWS + SHARED)


def test_a_read_that_ends_early_is_truncated(large: Filled, faults: FaultyIO) -> None:
    key, low, high = _far(large)
    faults.short("pread", 0, offset=(low, high))
    found = {finding.record.key: finding.what for finding in verify_root(large.root).findings if finding.record}
    assert found[key] == "truncated"


def test_a_read_that_was_wrong_once_is_looked_at_again(large: Filled, faults: FaultyIO) -> None:
    _, low, _ = _far(large)
    rule = faults.flip(0, times=1, offset=(low, low + 1))
    result = verify_root(large.root, threads=1)
    assert rule.hits == 1
    assert (result.findings, result.verified) == ([], ROWS + SHARED)
    assert result.verified_bytes == ROWS * ROW_BYTES + SHARED * SHARED_BYTES


def test_where_direct_reads_do_not_work_buffered_ones_do(filled: Filled, faults: FaultyIO) -> None:
    beginnings = faults.delay("pread", 0, offset=(0, 1))
    survey_root(filled.root)
    before = beginnings.hits
    faults.__exit__(None, None, None)
    rule = faults.fail("pread", errno.EINVAL, offset=(0, 1), after=before, times=1)
    opens = FaultyIO.calls("open")
    result = verify_root(filled.root, threads=1)
    assert rule.hits == 1
    assert (result.findings, result.verified) == ([], ROWS + SHARED)
    assert FaultyIO.calls("open") - opens > 2 * len(result.survey.slabs)  # headers, slabs, and one slab again


def test_only_the_places_asked_for_are_read(filled: Filled) -> None:
    filled.flip(ROW_KEY, 0)
    filled.flip(SHARED_KEY, 0)
    path, offset, layout = filled.places[ROW_KEY]
    place = int(path.stem[5:]), (offset - 4096) // layout.slot_bytes
    result = verify_root(filled.root, only=[place, (999, 0)])
    assert [finding.record.key for finding in result.findings if finding.record] == [ROW_KEY]
    assert result.slots == 1


def test_a_root_in_use_is_seen_as_such_and_verified_while_it_changes(filled: Filled) -> None:
    """Slots are evicted, written and committed all the time; no look may take that for damage."""
    stop = threading.Event()
    with Store.open(rig.config(filled.root)) as store:
        digest = store.register(rig.namespace(model="busy"), rig.ROW)

        def churn() -> None:
            number = 1000
            while not stop.is_set():
                rig.put(store, digest, [rig.key(number + i) for i in range(8)])
                number += 8

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(6):
                result = verify_root(filled.root, threads=2)
                assert result.survey.holders == (os.getpid(),)
                assert result.findings == []
                assert result.verified > 0
        finally:
            stop.set()
            thread.join()
        assert store.stats().commits > 100
    assert survey_root(filled.root).holders == ()


def test_slots_that_change_hands_while_they_are_read_are_no_damage(filled: Filled) -> None:
    """After the first slot was read, every row gives its slot to another chunk."""
    names = [rig.key(i) for i in range(ROWS)]
    with Store.open(rig.config(filled.root), writers=1) as store:
        digest = store.register(*damage.NAMESPACES[0])

        def swap(done: int, _: int) -> None:
            if done > 1:
                return
            entries = store.pin(digest, names)
            store.unpin(entries)
            assert [store.invalidate(entry, "other") for entry in entries if entry] == [True] * ROWS
            assert store.maintain()
            places = {(slot.slab.slab_id, slot.slot): slot for slot in store.reserve(digest, rig.ROW, 63)}
            for entry in entries:
                assert entry is not None
                slot = places[entry.slab.slab_id, entry.slot]
                rig.write(slot, digest, b"new" + entry.key)
                assert store.commit(digest, [(b"new" + entry.key, slot, rig.FULL)]) == [True]
            store.release([slot for slot in places.values() if slot.state is SlotState.RESERVED])

        result = verify_root(filled.root, threads=1, progress=swap)
    assert result.findings == []
    assert result.changed >= ROWS - 1
    assert result.verified + result.changed == ROWS + SHARED


def test_slabs_that_come_and_go_are_no_damage(root: Path) -> None:
    """Two layouts take each other's room, slab by slab."""
    stop = threading.Event()
    with Store.open(rig.config(root)) as store:
        digests = [store.register(*each) for each in damage.NAMESPACES]

        def churn() -> None:
            number = 0
            while not stop.is_set():
                for digest, (_, layout) in zip(digests, damage.NAMESPACES, strict=True):
                    number += 300
                    rig.put(store, digest, [rig.key(number + i) for i in range(300)], layout)

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            looks = []
            while store.stats().slabs_removed < 60:
                looks.append(survey_root(root))
        finally:
            stop.set()
            thread.join()
    assert [seen.findings for seen in looks if seen.findings] == []
    assert len(looks) > 10


def test_threads_are_bounded(filled: Filled) -> None:
    for threads in (0, 257):
        with pytest.raises(ConfigError, match=f"threads={threads}"):
            verify_root(filled.root, threads=threads)


def test_no_root_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(ConfigError, match="no kvxfer root"):
            survey_root(place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_survey_counts_what_is_there(filled: Filled) -> None:
    (filled.root / "slabs" / "slab-00000099.kvx.tmp").write_bytes(b"cut short")
    (filled.root / "notes").write_bytes(bytes(5000))
    seen = survey_root(filled.root)
    assert (seen.leftovers, seen.other_files) == (1, 1)
    assert seen.other_bytes >= 5000
    # disk_use counts directories as well.
    nbytes, nfiles = rig.disk_use(filled.root)
    folders = sum(
        path.stat().st_blocks * 512 or path.stat().st_size
        for path in [filled.root, *filled.root.rglob("*")]
        if path.is_dir()
    )
    assert seen.disk_files == nfiles
    assert nbytes - folders - 4096 * 8 <= seen.disk_bytes <= nbytes
    assert [(view.entries, view.fields and view.fields["model"]) for view in seen.namespaces] == [
        (ROWS, "org/model"),
        (SHARED, "shared"),
    ]
    assert {view.weight_epoch for view in seen.namespaces} == {0}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"weight_epoch": 0}',
        b"[" * 50_000,
        b'{"weight_epoch": 1, "namespace": {"model": "x"}}',
        os.urandom(300),
    ],
)
def test_a_namespace_file_that_is_not_its_digests_is_not_believed(filled: Filled, text: bytes) -> None:
    digest = filled.digests[ROW_KEY]
    (filled.root / "namespaces" / digest.hex() / "namespace.json").write_bytes(text)
    seen = survey_root(filled.root)
    (view,) = [view for view in seen.namespaces if view.digest == digest]
    assert (view.fields, view.entries, view.why) == (
        None,
        ROWS,
        "namespace.json is damaged: its fields are not those of the digest",
    )
    assert seen.findings == ()  # nothing is decided by these files


def test_a_namespace_file_of_another_namespace_is_not_believed(filled: Filled) -> None:
    mine, other = (filled.root / "namespaces" / filled.digests[key].hex() for key in (ROW_KEY, SHARED_KEY))
    (mine / "namespace.json").write_bytes((other / "namespace.json").read_bytes())
    views = {view.digest: view for view in survey_root(filled.root).namespaces}
    assert views[filled.digests[ROW_KEY]].fields is None
    assert views[filled.digests[SHARED_KEY]].fields is not None


def test_a_namespace_without_file_is_counted_all_the_same(filled: Filled) -> None:
    digest = filled.digests[SHARED_KEY]
    (filled.root / "namespaces" / digest.hex() / "namespace.json").unlink()
    (view,) = [view for view in survey_root(filled.root).namespaces if view.digest == digest]
    assert (view.entries, view.why) == (SHARED, "it has no namespace.json")


def test_no_room_for_a_copy_of_the_index_is_said(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of 8 TiB without blocks: no copy of it is begun."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    os.truncate(filled.root / "index" / "data.mdb", 8 << 40)
    seen = survey_root(filled.root)
    assert (seen.index.state, seen.index.usable) == ("busy", False)
    assert "no room to copy" in seen.index.why
    assert [path for path in tmp_path.iterdir() if path.name.startswith("kvxfer-index")] == []
