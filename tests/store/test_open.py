"""What an open finds and what it makes of it: formats, leftovers, smaller caps, damaged slabs."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer import _native
from kvxfer.errors import ConfigError, FormatError, IOFault, StoreError
from kvxfer.slot import SlotLayout
from kvxfer.store import Store
from kvxfer.store.slab import pack_header, parse_header
from kvxfer.testing import FaultyIO
from tests.native.uring import needs_uring
from tests.store import rig

Opened = Callable[..., Store]
KEYS = [rig.key(i) for i in range(100)]


def fill(opened: Opened, names: list[bytes] | None = None, **config: Any) -> bytes:
    """A closed store with chunks in it; the digest."""
    store = opened(**config)
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, KEYS if names is None else names))
    store.close()
    return digest


def slabs(root: Path) -> list[Path]:
    return sorted((root / "slabs").iterdir())


def test_everything_is_there_again(opened: Opened) -> None:
    digest = fill(opened)
    store = opened()
    assert store.register(rig.namespace(), rig.ROW) == digest
    assert rig.check_all(store, digest, KEYS) == KEYS
    assert store.stats().rebuilds == 0
    assert store.stats().index_conflicts == 0


def test_a_reopened_store_evicts_what_was_stored_first(opened: Opened) -> None:
    names = [rig.key(i) for i in range(273)]
    digest = fill(opened, names[:100])
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, names[100:])
    store.close()
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, [rig.key(i) for i in range(1000, 1100)])
    assert [name for name in names if not store.contains(digest, name)] == names[:100]


def test_modes_are_private(opened: Opened, root: Path) -> None:
    fill(opened)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_header_is_what_the_format_says(opened: Opened, root: Path) -> None:
    fill(opened)
    page = slabs(root)[1].read_bytes()[:4096]
    head = struct.unpack_from("<8sIIQQQQQQIII", page)
    assert head == (b"KVXSLAB1", 1, 4096, 2, 21, 24576, 5000, 300, 8192, 3, 464, 4)
    assert not any(page[76:4092])
    assert int.from_bytes(page[4092:], "little") == _native.lib().kvx_crc32c(page, 4092)


def test_a_headers_fields_must_fit_together() -> None:
    page = pack_header(7, rig.ROW, 10)
    header = parse_header(page, 7, 4096, "x")
    assert header is not None
    assert (header.slab_id, header.num_slots, header.layout) == (7, 10, rig.ROW)
    assert parse_header(page, 8, 4096, "x") is parse_header(page, 7, 8192, "x") is None
    assert parse_header(page[:4000], 7, 4096, "x") is parse_header(bytes(4096), 7, 4096, "x") is None
    for offset in range(16, 76, 4):  # any field wrong, under a CRC that fits
        body = bytearray(page)
        body[offset : offset + 4] = b"\xff" * 4
        assert parse_header(bytes(body), 7, 4096, "x") is None
        body[4092:] = _native.lib().kvx_crc32c(bytes(body), 4092).to_bytes(4, "little")
        parsed = parse_header(bytes(body), 7, 4096, "x")
        assert parsed is None or (offset == 24 and parsed.num_slots == 0xFFFFFFFF), offset


# ---- refusals ------------------------------------------------------------------------------------------------


def refuse(root: Path, error: type[Exception], match: str, **changes: Any) -> None:
    """The open is refused and every byte is as it was."""
    before = rig.snapshot(root)
    with pytest.raises(error, match=match):
        Store.open(rig.config(root, **changes))
    assert rig.snapshot(root) == before


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"format": 2, "alignment": 4096, "weight_epoch": 0}', "is of format 2; this kvxfer knows format 1"),
        ('{"format": "1", "alignment": 4096, "weight_epoch": 0}', "is of format '1'"),
        ('{"format": 1, "alignment": 5000, "weight_epoch": 0}', "alignment 5000"),
        ('{"format": 1, "alignment": 4096, "weight_epoch": -1}', "weight_epoch -1"),
        ('{"format": 1, "alignment": 4096}', "weight_epoch None"),
        ("[]", "is damaged; nothing was changed"),
        ("", "is damaged"),
        ('{"form', "is damaged"),
    ],
)
def test_an_unknown_root_is_refused_and_untouched(opened: Opened, root: Path, text: str, match: str) -> None:
    fill(opened)
    (root / "kvxfer.json").write_text(text)
    (root / "slabs" / "slab-00000099.kvx.tmp").write_bytes(b"x")
    refuse(root, FormatError, match)


@pytest.mark.parametrize(("magic", "version"), [(b"KVXSLAB1", 2), (b"KVXSLAB2", 1), (b"KVXSLAB9", 9), (b"KVXSLAB1", 0)])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_newer_slab_is_refused_and_untouched(
    opened: Opened, root: Path, magic: bytes, version: int, sealed: bool
) -> None:
    fill(opened)
    (root / "slabs" / "slab-00000099.kvx.tmp").write_bytes(b"x")
    (root / "slabs" / "slab-00000002.kvx").write_bytes(b"destroyed")
    with slabs(root)[2].open("r+b") as file:
        page = bytearray(file.read(4096))
        page[:12] = magic + version.to_bytes(4, "little")
        if sealed:
            page[4092:] = _native.lib().kvx_crc32c(bytes(page), 4092).to_bytes(4, "little")
        file.seek(0)
        file.write(page)
    refuse(root, FormatError, f"slab-00000003.kvx is of slab version {version}.*Nothing was changed")


def test_a_directory_of_something_else_is_refused(root: Path) -> None:
    root.mkdir()
    (root / "thesis.tex").write_text("years of work")
    refuse(root, FormatError, r"is not empty and has no kvxfer.json: thesis.tex; nothing was changed")


def test_a_root_whose_making_was_cut_short_is_made(root: Path, opened: Opened) -> None:
    root.mkdir()
    (root / "lock").touch()
    (root / "kvxfer.json.tmp").write_text("{")
    fill(opened)
    assert not (root / "kvxfer.json.tmp").exists()


def test_a_process_opens_a_root_once(opened: Opened, root: Path) -> None:
    store = opened()
    with pytest.raises(StoreError, match="open in this process already"):
        Store.open(rig.config(root))
    store.close()
    code = (
        "import sys; from tests.store import rig; from kvxfer.store import Store\n"
        "from pathlib import Path\n"
        "store = Store.open(rig.config(Path(sys.argv[1]))); print(store.stats().slabs); sys.stdout.flush(); input()"
    )
    done = rig.run_python(code + "\n", root)
    assert done.stdout == "0\n", done.stderr
    fill(opened)  # the kernel gave its seat back although nobody closed that store


def test_a_network_file_system_is_refused_before_anything_is_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.io.modes.filesystem_type", lambda path, mountinfo=None: "nfs4")
    with pytest.raises(ConfigError, match="is on nfs4, a network file system"):
        Store.open(rig.config(root))
    assert not root.exists()


def test_direct_on_that_does_not_work_makes_nothing(root: Path, faults: FaultyIO) -> None:
    faults.fail("open", errno.EINVAL, after=1, times=1)  # kvxfer.json is looked for, then comes the probe
    with pytest.raises(ConfigError, match="direct='on'"):
        Store.open(rig.config(root, direct="on"))
    assert not root.exists()


def test_io_uring_that_is_asked_for_is_had_and_told_or_nothing_is_made(root: Path, faults: FaultyIO) -> None:
    rule = faults.fail("uring_setup", errno.EPERM)
    with pytest.raises(ConfigError, match="io='uring', but io_uring does not work .*Errno 1.*use auto or posix"):
        Store.open(rig.config(root, io="uring"))
    assert rule.hits == 1 and not root.exists()
    faults.__exit__(None, None, None)
    needs_uring(root.parent)
    with Store.open(rig.config(root, io="uring")) as store:
        assert (store.backend, store.io_mode) == ("uring", f"uring {'direct' if store.direct else 'buffered'}")
        assert "io_uring works" in store.stats().mode
    faults.fail("uring_setup", errno.EPERM)
    before = rig.snapshot(root)
    with pytest.raises(ConfigError, match="io='uring'"):
        Store.open(rig.config(root, io="uring"))
    assert rig.snapshot(root) == before
    with Store.open(rig.config(root)) as store:
        assert store.io_mode.startswith("posix ")


def test_direct_io_refused_means_buffered_and_is_said(opened: Opened, faults: FaultyIO) -> None:
    faults.fail("open", errno.EINVAL, after=1, times=1)
    store = opened()
    assert (store.direct, store.io_mode) == (False, "posix buffered")
    assert "direct I/O off: [Errno 22]" in store.stats().mode
    digest = store.register(rig.namespace(), rig.ROW)
    assert rig.put(store, digest, KEYS[:5]) == [True] * 5
    store.close()
    store = opened(direct="off")
    store.register(rig.namespace(), rig.ROW)
    assert rig.check_all(store, digest, KEYS) == KEYS[:5]


def test_too_many_slabs_for_the_process_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="raise slab_bytes, or the limit"):
        Store.open(rig.config(root, capacity_bytes=1 << 50, slab_bytes=1 << 20, max_files=1 << 26))
    assert not root.exists()


def test_a_root_of_a_larger_alignment_keeps_it(opened: Opened, root: Path) -> None:
    root.mkdir()
    (root / "kvxfer.json").write_text('{"format": 1, "alignment": 16384, "weight_epoch": 5}')
    store = opened()
    assert (store.alignment, store.weight_epoch) == (16384, 5)
    wide = SlotLayout(
        segment_bytes=5000, last_segment_bytes=300, num_segments=3, segments_per_trailer=1, alignment=16384,
        blocks_per_chunk=4,
    )  # fmt: skip
    digest = store.register(rig.namespace(), wide)
    assert rig.put(store, digest, KEYS[:5], layout=wide) == [True] * 5
    store.close()
    shutil.rmtree(root / "index")
    store = opened()
    store.register(rig.namespace(), wide)
    assert rig.check_all(store, digest, KEYS) == KEYS[:5]


# ---- leftovers, strangers, caps ------------------------------------------------------------------------------


def test_leftovers_are_removed_before_anything_is_served(opened: Opened, root: Path) -> None:
    digest = fill(opened)
    left = [
        root / "slabs" / "slab-00000050.kvx.tmp", root / "kvxfer.json.tmp", root / "index" / "state.json.tmp",
        root / "namespaces" / digest.hex() / "namespace.json.tmp", root / ".kvx-probe-0123456789abcdef.tmp",
    ]  # fmt: skip
    for path in left:
        path.write_bytes(bytes(100_000))
    store = opened()
    assert [path for path in left if path.exists()] == []
    store.register(rig.namespace(), rig.ROW)
    assert store.lookup_prefix(digest, KEYS) == 100


def test_strangers_are_kept_and_counted(opened: Opened, root: Path) -> None:
    fill(opened)
    (root / "notes.txt").write_bytes(bytes(2 << 20))
    (root / "slabs" / "old").mkdir()
    (root / "slabs" / "old" / "x").write_bytes(bytes(1 << 20))
    store = opened()
    assert (root / "notes.txt").exists()
    assert (root / "slabs" / "old" / "x").exists()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, [rig.key(i) for i in range(500)])
    assert rig.disk_use(root)[0] <= 8 << 20
    store.close()
    (root / "notes.txt").write_bytes(bytes(7 << 20))
    with pytest.raises(ConfigError, match="bytes of others"):
        Store.open(rig.config(root))


@pytest.mark.parametrize("smaller", [{"capacity_bytes": 4 << 20}, {"max_files": 10}])
def test_a_smaller_cap_holds_from_the_first_moment(opened: Opened, root: Path, smaller: dict[str, int]) -> None:
    names = [rig.key(i) for i in range(273)]
    digest = fill(opened, names)
    store = opened(**({"slab_bytes": 1 << 19} | smaller))
    nbytes, nfiles = rig.disk_use(root)
    assert nbytes <= smaller.get("capacity_bytes", 8 << 20)
    assert nfiles <= smaller.get("max_files", 4096)
    store.register(rig.namespace(), rig.ROW)
    kept = rig.check_all(store, digest, names)
    stats = store.stats()
    assert 0 < len(kept) == stats.entries < 273
    assert stats.evictions["shrunk"] == 273 - len(kept)
    rig.put(store, digest, names)
    assert rig.disk_use(root)[0] <= smaller.get("capacity_bytes", 8 << 20)
    assert rig.disk_use(root)[1] <= smaller.get("max_files", 4096)
    store.close()
    store = opened()  # and a larger one again
    store.register(rig.namespace(), rig.ROW)
    assert sum(rig.put(store, digest, names)) == 273
    assert rig.check_all(store, digest, names) == names


def test_a_smaller_cap_keeps_what_was_stored_last(opened: Opened, root: Path) -> None:
    store = opened(writers=1)
    digest = store.register(rig.namespace(), rig.ROW)
    names = [rig.key(i) for i in range(273)]
    for name in names:
        rig.put(store, digest, [name])
    store.close()
    store = opened(capacity_bytes=4 << 20, slab_bytes=1 << 19)
    store.register(rig.namespace(), rig.ROW)
    kept = rig.check_all(store, digest, names)
    assert kept == names[-len(kept) :]


def test_an_index_larger_than_its_new_share_is_written_anew(opened: Opened, root: Path) -> None:
    small = SlotLayout(segment_bytes=64, last_segment_bytes=64, num_segments=1, segments_per_trailer=464)
    store = opened(capacity_bytes=48 << 20, index_map_bytes=8 << 20)
    digest = store.register(rig.namespace(), small)
    names = [rig.key(i) for i in range(3500)]
    slots = store.reserve(digest, small, 3500)
    assert all(store.commit(digest, [(name, slot, 1) for name, slot in zip(names, slots, strict=True)]))
    store.close()
    assert (root / "index" / "data.mdb").stat().st_size > 1 << 20
    store = opened(capacity_bytes=48 << 20, index_map_bytes=1 << 20)
    assert (root / "index" / "data.mdb").stat().st_size <= 1 << 20
    store.register(rig.namespace(), small)
    assert store.stats().entries == store.stats().max_entries == 674
    assert [store.contains(digest, name) for name in names] == [False] * (3500 - 674) + [True] * 674


# ---- damaged slabs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(b"\0" * 4096), id="zeros"),
        pytest.param(lambda path: os.truncate(path, 100), id="cut in the header"),
        pytest.param(lambda path: overwrite(path, 40, b"\xff"), id="flipped"),
        pytest.param(lambda path: overwrite(path, 0, os.urandom(4096)), id="garbage"),
    ],
)
def test_a_slab_with_a_destroyed_header_goes(opened: Opened, root: Path, damage: Callable[[Path], None]) -> None:
    digest = fill(opened)
    path = slabs(root)[1]
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    inside = {name for name in KEYS if (place := store.locate(digest, name)) and place[0] == path}
    assert inside
    store.close()
    damage(path)
    store = opened()
    assert not path.exists()
    store.register(rig.namespace(), rig.ROW)
    assert set(rig.check_all(store, digest, KEYS)) == set(KEYS) - inside
    assert all(rig.put(store, digest, KEYS))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("name", ["slab-00000040.kvx", "slab-000000001.kvx"])
def test_a_slab_copied_under_another_name_is_not_believed(opened: Opened, root: Path, name: str) -> None:
    digest = fill(opened)
    shutil.copy(slabs(root)[0], root / "slabs" / name)
    shutil.rmtree(root / "index")
    store = opened()
    assert not (root / "slabs" / name).exists()
    store.register(rig.namespace(), rig.ROW)
    assert rig.check_all(store, digest, KEYS) == KEYS


@pytest.mark.parametrize("lost_index", [False, True])
def test_a_slab_cut_short_loses_what_was_cut_and_is_made_whole(opened: Opened, root: Path, lost_index: bool) -> None:
    digest = fill(opened)
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    path = slabs(root)[1]
    cut = 4096 + 3 * rig.ROW.slot_bytes + 5000  # inside slot 3
    places = {name: store.locate(digest, name) for name in KEYS}
    lost = {name for name, at in places.items() if at and at[0] == path and at[1] + rig.ROW.slot_bytes > cut}
    assert lost
    store.close()
    size = path.stat().st_size
    os.truncate(path, cut)
    if lost_index:
        shutil.rmtree(root / "index")
    store = opened()
    assert path.stat().st_size == size
    assert path.stat().st_blocks * 512 >= size
    store.register(rig.namespace(), rig.ROW)
    assert set(rig.check_all(store, digest, KEYS)) == set(KEYS) - lost
    assert all(rig.put(store, digest, KEYS))
    assert rig.check_all(store, digest, KEYS) == KEYS


def test_a_slab_cut_short_on_a_full_disk_keeps_to_what_is_there(opened: Opened, root: Path, faults: FaultyIO) -> None:
    digest = fill(opened)
    path = slabs(root)[1]
    os.truncate(path, 4096 + 3 * rig.ROW.slot_bytes + 5000)
    faults.fail("fallocate", errno.ENOSPC)
    store = opened(direct="off")
    store.register(rig.namespace(), rig.ROW)
    slots = store.reserve(digest, rig.ROW, 300)
    assert {slot.slot for slot in slots if slot.slab.path == path} <= {0, 1, 2}
    assert path.stat().st_size < 4096 + 4 * rig.ROW.slot_bytes


def test_a_slab_that_grew_is_cut_to_its_size(opened: Opened, root: Path) -> None:
    digest = fill(opened)
    path = slabs(root)[0]
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(1 << 20))
    store = opened()
    assert path.stat().st_size == size
    store.register(rig.namespace(), rig.ROW)
    assert rig.check_all(store, digest, KEYS) == KEYS


def test_a_slab_with_holes_is_filled(opened: Opened, root: Path) -> None:
    digest = fill(opened)
    path = slabs(root)[0]
    data = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:  # as a copy that keeps to what is not zero leaves it
        file.write(data[:4096])
        os.truncate(path, len(data))
    store = opened()
    assert path.stat().st_blocks * 512 >= len(data)
    store.register(rig.namespace(), rig.ROW)
    assert store.lookup_prefix(digest, KEYS) <= 100  # claims; loads would find zeros and miss


def test_a_slab_that_cannot_be_read_now_is_left_alone(opened: Opened, root: Path, faults: FaultyIO) -> None:
    digest = fill(opened)
    paths = slabs(root)
    (root / "slabs" / "slab-00000077.kvx").symlink_to("/etc/hostname")
    (root / "slabs" / "slab-00000078.kvx").mkdir()
    faults.fail("open", errno.EIO, after=3, times=1)  # kvxfer.json, lock, kvxfer.json, then the first slab
    store = opened()
    assert store.stats().slab_errors == 3
    store.register(rig.namespace(), rig.ROW)
    found = rig.check_all(store, digest, KEYS)
    assert 0 < len(found) < 100
    assert all(path.exists() for path in paths)
    rig.put(store, digest, [rig.key(i) for i in range(1000, 1300)])
    assert rig.disk_use(root)[0] <= 8 << 20
    store.close()
    (root / "slabs" / "slab-00000077.kvx").unlink()
    (root / "slabs" / "slab-00000078.kvx").rmdir()
    store = opened()
    store.register(rig.namespace(), rig.ROW)
    back = rig.check_all(store, digest, KEYS)
    assert set(back) - set(found)  # its entries were not forgotten


def test_what_cannot_be_removed_counts(opened: Opened, root: Path, faults: FaultyIO) -> None:
    fill(opened)
    left = root / "slabs" / "slab-00000050.kvx.tmp"
    left.write_bytes(bytes(1 << 20))
    faults.fail("unlink", errno.EPERM, after=1)  # the probe's file goes
    store = opened()
    assert left.exists()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, [rig.key(i) for i in range(500)])
    assert rig.disk_use(root)[0] <= 8 << 20
    assert store.stats().slab_errors == 1


@pytest.mark.parametrize("op", ["mkdir", "open", "lock", "pwrite", "fsync", "rename"])
def test_a_root_that_cannot_be_made_is_an_io_fault(root: Path, faults: FaultyIO, op: str) -> None:
    after = {"open": 2, "pwrite": 4}.get(op, 0)  # kvxfer.json is not there; the probe's calls pass
    faults.fail(op, errno.EROFS, after=after)
    with pytest.raises(IOFault) as info:
        Store.open(rig.config(root))
    assert info.value.errno == errno.EROFS
    faults.__exit__(None, None, None)
    Store.open(rig.config(root)).close()
