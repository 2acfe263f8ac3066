"""`kvxfer export` and `import`: what arrives is what was there, and nothing that is not right is adopted."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer import _native
from kvxfer.cli import main
from kvxfer.errors import KvxferError
from kvxfer.slot import SlotLayout
from kvxfer.store import Store, uses, verify_root
from kvxfer.store.port import import_namespace
from kvxfer.store.transfer_file import ExportReader, pack_end
from kvxfer.testing import FaultyIO, ManualClock
from tests.cli.commands import json_of
from tests.store import damage, rig

Capture = pytest.CaptureFixture[str]
NAMES = [rig.key(i) for i in range(damage.ROWS)]
SHARED_NAMES = [rig.key(i) for i in range(damage.ROWS, damage.ROWS + damage.SHARED)]
CASES = {"row": (*damage.NAMESPACES[0], NAMES), "shared": (*damage.NAMESPACES[1], SHARED_NAMES)}


def digest_of(case: str, epoch: int = 0) -> str:
    return CASES[case][0].digest(epoch).hex()


def exported(root: Path, file: Path, capsys: Capture, case: str = "row") -> dict[str, Any]:
    damage.fill(root)
    code, said = json_of(capsys, "export", root, file, "--namespace", digest_of(case)[:12])
    assert code == 0
    return said


def held(root: Path, case: str) -> list[bytes]:
    """The keys that are there; each with the right bytes, read as another program would."""
    namespace, layout, names = CASES[case]
    with Store.open(rig.config(root), housekeeping=False) as store:
        digest = store.register(namespace, layout)
        found = rig.check_all(store, digest, names)
        assert set(found) == set(store.keys(digest))
        return found


def empty(root: Path, **config: Any) -> Path:
    Store.open(rig.config(root, **config)).close()
    return root


@pytest.fixture(scope="module")
def row_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What `exported` would make, made once."""
    place = tmp_path_factory.mktemp("row")
    damage.fill(place / "root")
    assert main(["export", str(place / "root"), str(place / "file"), "--namespace", digest_of("row")]) == 0
    return (place / "file").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_out_and_in(tmp_root: Path, tmp_path: Path, capsys: Capture, case: str) -> None:
    file, other = tmp_path / "file", empty(tmp_path / "other", slab_bytes=1 << 18)
    said = exported(tmp_root, file, capsys, case)
    names = CASES[case][2]
    assert (said["chunks"], said["failed"], said["digest"]) == (len(names), 0, digest_of(case))
    assert said["nbytes"] == file.stat().st_size
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["chunks"], done["present"], done["failed"], done["no_room"]) == (0, len(names), 0, 0, 0)
    assert verify_root(other).findings == []
    assert held(other, case) == names
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["chunks"], done["present"]) == (0, 0, len(names))
    assert held(tmp_root, case) == names


def test_what_is_damaged_stays_behind_on_both_ways(tmp_root: Path, tmp_path: Path, capsys: Capture) -> None:
    filled = damage.fill(tmp_root)
    filled.flip(damage.ROW_KEY, 3)
    file, other = tmp_path / "file", empty(tmp_path / "other")
    code, said = json_of(capsys, "export", tmp_root, file, "--namespace", digest_of("row"))
    assert (code, said["chunks"], said["failed"]) == (1, damage.ROWS - 1, 1)
    raw = bytearray(file.read_bytes())
    slot, start = rig.ROW.slot_bytes, len(raw) - len(pack_end(0)) - rig.ROW.slot_bytes * (damage.ROWS - 1)
    raw[start + 2 * slot + 1] ^= 1
    raw[start + 5 * slot + rig.ROW.payload_stride + 130] ^= 1
    file.write_bytes(raw)
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["chunks"], done["failed"]) == (1, damage.ROWS - 3, 2)
    assert done["reasons"] == {"bad_sum": 1, "bad_trailer": 1}
    assert len(held(other, "row")) == damage.ROWS - 3


def test_a_slot_of_another_namespace_is_not_adopted(row_file: bytes, tmp_path: Path, capsys: Capture) -> None:
    file, other = tmp_path / "file", empty(tmp_path / "other")
    file.write_bytes(row_file)
    raw = bytearray(file.read_bytes())
    foreign = rig.slot_image(rig.key(9999), bytes(32), rig.ROW, 7 << 32 | 1, rig.FULL).array.tobytes()
    at = len(raw) - len(pack_end(0)) - rig.ROW.slot_bytes
    raw[at : at + rig.ROW.slot_bytes] = foreign
    file.write_bytes(raw)
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["chunks"], done["reasons"]) == (1, damage.ROWS - 1, {"foreign": 1})


@pytest.mark.parametrize("mask", [1 << 4, 1 << 255 | 1, 0])
def test_a_mask_that_cannot_be_is_damage(row_file: bytes, tmp_path: Path, capsys: Capture, mask: int) -> None:
    """Of blocks that a chunk does not have, though every sum is right: no lack of room."""
    file, other = tmp_path / "file", empty(tmp_path / "other")
    at = len(row_file) - len(pack_end(0)) - 2 * rig.ROW.slot_bytes
    slot = rig.slot_image(rig.key(9999), CASES["row"][0].digest(0), rig.ROW, 7 << 32 | 1, rig.FULL).array
    for start in range(rig.ROW.payload_stride, rig.ROW.slot_bytes, rig.ROW.alignment):  # kvxfer seals none of these
        page = slot[start : start + 4096]
        page[56:88] = list(mask.to_bytes(32, "little"))
        page[4092:] = list(int(_native.lib().kvx_crc32c(page[:4092].tobytes(), 4092)).to_bytes(4, "little"))
    file.write_bytes(row_file[:at] + slot.tobytes() + row_file[at + len(slot) :])
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["chunks"], done["failed"], done["no_room"]) == (1, damage.ROWS - 1, 1, 0)
    assert done["reasons"] == {"bad_trailer": 1}


def test_what_was_used_last_is_the_youngest_where_it_comes_to_and_nothing_follows_anything(
    tmp_root: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots say nothing of prompts, so that the order in which they come is one of last use and nothing else."""
    file, other = tmp_path / "file", empty(tmp_path / "other", capacity_bytes=4 << 20)
    clock = ManualClock(float(int(time.time()) - 86400))
    monkeypatch.setattr(uses, "clock", clock)
    with Store.open(rig.config(tmp_root), housekeeping=False) as store:
        digest = store.register(CASES["row"][0], rig.ROW)
        assert all(rig.put(store, digest, NAMES))
        clock.advance(uses.GRAIN_S)
        store.touch(digest, NAMES[:7])
    assert json_of(capsys, "export", tmp_root, file, "--namespace", digest.hex())[0] == 0
    with closing(ExportReader(file)) as source, Store.open(rig.config(other, capacity_bytes=4 << 20)) as store:
        monkeypatch.setattr(Store, "open_existing", lambda root: nullcontext(store))
        assert import_namespace(other, source).chunks == len(NAMES)
        entries = [store._table.find(digest, name) for name in NAMES]
        assert {entry.after for entry in entries if entry is not None} == {b""}
        assert not any(entry.slab.policy.followers(entry) for entry in entries if entry is not None)
    with Store.open(rig.config(other, capacity_bytes=4 << 20), housekeeping=False) as store:
        store.register(CASES["row"][0], rig.ROW)
        taken = []
        while len(store.keys(digest)) > 7:
            taken += store.reserve(digest, rig.ROW, 1)
        assert set(store.keys(digest)) == set(NAMES[:7])
        store.release(taken)


def test_another_weight_epoch_is_refused_unless_the_weights_are_said_to_be_the_same(
    row_file: bytes, tmp_path: Path, capsys: Capture
) -> None:
    file, other = tmp_path / "file", empty(tmp_path / "other")
    file.write_bytes(row_file)
    Store.bump_epoch_of(other)
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["error"]["type"]) == (2, "ConfigError")
    assert "weight epoch 0" in done["error"]["message"]
    assert held(other, "row") == []
    code, done = json_of(capsys, "import", other, file, "--yes", "--same-weights")
    assert (code, done["chunks"], done["digest"]) == (0, damage.ROWS, digest_of("row", 1))
    namespace, layout, names = CASES["row"]
    with Store.open(rig.config(other)) as store:
        digest = store.register(namespace, layout)
        assert digest == namespace.digest(1)
        assert rig.check_all(store, digest, names) == names


def test_another_alignment(row_file: bytes, tmp_path: Path, capsys: Capture) -> None:
    file, other = tmp_path / "file", empty(tmp_path / "other")
    file.write_bytes(row_file)
    path = other / "kvxfer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alignment": 16384}))
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["chunks"]) == (0, damage.ROWS)
    assert verify_root(other).findings == []
    fields = {name: getattr(rig.ROW, name) for name in rig.ROW.__slots__} | {"alignment": 16384}
    with Store.open(rig.config(other)) as store:
        digest = store.register(CASES["row"][0], SlotLayout(**fields))
        assert rig.check_all(store, digest, NAMES) == NAMES


def test_slots_that_do_not_fit_are_refused_by_name(row_file: bytes, tmp_path: Path, capsys: Capture) -> None:
    file, other = tmp_path / "file", empty(tmp_path / "other", slab_bytes=8192)
    file.write_bytes(row_file)
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["error"]["type"]) == (2, "ConfigError")
    assert "slab_bytes=8192" in done["error"]["message"]


def test_slots_of_another_layout_cost_nobody_anything(row_file: bytes, tmp_path: Path, capsys: Capture) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(row_file)
    with Store.open(rig.config(other)) as store:
        digest = store.register(CASES["row"][0], rig.SHARED)
        assert all(rig.put(store, digest, [rig.key(5)], rig.SHARED))
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert (code, done["error"]["type"]) == (2, "ConfigError")
    assert "another layout" in done["error"]["message"]
    with Store.open(rig.config(other)) as store:
        assert rig.check_all(store, store.register(CASES["row"][0], rig.SHARED), [rig.key(5)]) == [rig.key(5)]


def test_more_than_there_is_room_for(row_file: bytes, tmp_path: Path, capsys: Capture) -> None:
    other = empty(tmp_path / "other", capacity_bytes=4 << 20, max_files=11, slab_bytes=1 << 18)
    file = tmp_path / "file"
    file.write_bytes(row_file)
    code, done = json_of(capsys, "import", other, file, "--yes")
    assert code in (0, 1)
    nbytes, files = rig.disk_use(other)
    assert nbytes <= 4 << 20
    assert files <= 11
    assert done["chunks"] + done["no_room"] == damage.ROWS
    assert verify_root(other).findings == []


@pytest.mark.parametrize(
    "cut", [1, 30000, *(pytest.param(n, marks=pytest.mark.slow) for n in (25, 26 * rig.ROW.slot_bytes))]
)
def test_a_file_that_ends_early(row_file: bytes, tmp_path: Path, capsys: Capture, cut: int) -> None:
    file, other = tmp_path / "file", empty(tmp_path / "other")
    file.write_bytes(row_file)
    os.truncate(file, file.stat().st_size - cut)
    code, done = json_of(capsys, "import", other, file, "--yes")
    whole = damage.ROWS - -(-max(0, cut - len(pack_end(0))) // rig.ROW.slot_bytes)
    assert (code, done["complete"], done["chunks"], done["failed"]) == (1, False, whole, 0)
    assert len(held(other, "row")) == whole


def test_an_import_that_is_interrupted_leaves_whole_chunks_and_nothing_taken(
    row_file: bytes, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "file", empty(tmp_path / "other")
    file.write_bytes(row_file)
    monkeypatch.setattr("kvxfer.store.port.BATCH_BYTES", 8 * rig.ROW.slot_bytes)

    def interrupt(done: int, of: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    source = ExportReader(file)
    with Store.open(rig.config(other), housekeeping=False) as store:
        monkeypatch.setattr(Store, "open_existing", lambda root: nullcontext(store))
        with pytest.raises(KeyboardInterrupt):
            import_namespace(other, source, progress=interrupt)
        assert (store.stats().reserved_slots, store.stats().entries) == (0, 16)
    source.close()
    assert len(held(other, "row")) == 16
    with Store.open(rig.config(other), housekeeping=False) as store:
        stats = store.stats()
        assert (stats.reserved_slots, stats.foreign_slots, stats.entries) == (0, 0, 16)


def test_a_full_disk_leaves_no_file_and_no_slot_taken(tmp_root: Path, tmp_path: Path, capsys: Capture) -> None:
    file, other = tmp_path / "file", empty(tmp_path / "other")
    exported(tmp_root, file, capsys)
    with FaultyIO() as faults:
        faults.fail("pwrite", errno.ENOSPC, after=20, offset=(4096, 1 << 40))
        code, done = json_of(capsys, "export", tmp_root, tmp_path / "second", "--namespace", digest_of("row"))
    assert (code, done["error"]["type"]) == (2, "IOFault")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("second")]
    with FaultyIO() as faults:
        rule = faults.fail("pwrite", errno.EIO, after=20, times=1, offset=(4096, 1 << 40))
        code, done = json_of(capsys, "import", other, file, "--yes")
        assert rule.hits == 1
    assert (code, done["error"]["type"]) == (2, "IOFault")
    with Store.open(rig.config(other), housekeeping=False) as store:
        assert store.stats().foreign_slots == store.stats().entries == 0
    assert json_of(capsys, "import", other, file, "--yes")[1]["chunks"] == damage.ROWS


def test_nothing_is_written_over(tmp_root: Path, tmp_path: Path, capsys: Capture) -> None:
    damage.fill(tmp_root)
    target = tmp_path / "precious"
    target.write_text("mine")
    link, temporary = tmp_path / "link", tmp_path / "file.tmp"
    link.symlink_to(tmp_path / "nowhere")
    temporary.symlink_to(target)
    for name in ("precious", "link", "file"):
        assert json_of(capsys, "export", tmp_root, tmp_path / name, "--namespace", digest_of("row"))[0] == 2
    assert target.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
    temporary.unlink()
    for digest in ("", "ff", "../x", digest_of("row") + "0"):
        assert json_of(capsys, "export", tmp_root, tmp_path / "file", "--namespace", digest)[0] == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path != tmp_root) == ["link", "precious"]


def test_files_that_are_none(tmp_root: Path, tmp_path: Path, capsys: Capture) -> None:
    empty(tmp_root)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    for name, code in (("fifo", 2), ("text", 1), ("empty", 1), ("nothing", 2), (".", 2)):
        assert json_of(capsys, "import", tmp_root, tmp_path / name, "--yes")[0] == code, name


# ---- files that somebody made up ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of three chunks."""
    place = tmp_path_factory.mktemp("small")
    with Store.open(rig.config(place / "root")) as store:
        digest = store.register(CASES["row"][0], rig.ROW)
        assert all(rig.put(store, digest, NAMES[:3]))
    assert main(["export", str(place / "root"), str(place / "file"), "--namespace", digest.hex()]) == 0
    return (place / "file").read_bytes()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty(tmp_path_factory.mktemp("target") / "root")


def adopt(target: Path, raw: bytes) -> int:
    """How many chunks a root took from these bytes; each of them is right, whatever the bytes are."""
    file = target.parent / "file"
    file.write_bytes(raw)
    try:
        source = ExportReader(file)
    except KvxferError:
        return 0
    try:
        done = import_namespace(target, source, same_weights=True)
    except KvxferError:
        return 0
    finally:
        source.close()
    with Store.open(rig.config(target), housekeeping=False) as store:
        try:
            digest = store.register(source.heading.namespace, source.heading.layout)
        except KvxferError:  # a layout that no root takes, so that nothing was taken from the file
            assert done.chunks == 0
            return 0
        names = store.keys(digest)
        assert set(names) <= set(NAMES[:3])
        assert rig.check_all(store, digest, names) == names
        for entry in store.pin(digest, names):
            assert entry is not None
            store.invalidate(entry, "other")
            store.unpin([entry])
    return done.chunks


fuzz = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _edited(raw: bytes, edits: list[tuple[int, int]], cut: int | None) -> bytes:
    body = bytearray(raw)
    for at, value in edits:
        body[at % len(body)] = value
    return bytes(body[: cut % (len(body) + 1)] if cut is not None else body)


CHANGED = {
    "edits": st.lists(st.tuples(st.integers(0, 1 << 20) | st.integers(0, 900), st.integers(0, 255)), max_size=4),
    "cut": st.none() | st.integers(0, 1 << 20),
}


def changed_bytes(target: Path, small: bytes, edits: list[tuple[int, int]], cut: int | None) -> None:
    taken = adopt(target, _edited(small, edits, cut))
    assert 0 <= taken <= 3


test_bytes_that_were_changed = settings(fuzz, max_examples=6)(given(**CHANGED)(changed_bytes))
test_many_bytes_that_were_changed = pytest.mark.slow(settings(fuzz, max_examples=80)(given(**CHANGED)(changed_bytes)))


def _with_heading(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with a heading that is whole and says something else."""
    length = int.from_bytes(raw[12:16], "little")
    body = json.loads(raw[16 : 16 + length])
    change(body)
    text = json.dumps(body).encode()
    head = raw[:12] + len(text).to_bytes(4, "little") + text
    head += int(_native.lib().kvx_crc32c(head, len(head))).to_bytes(4, "little")
    return head.ljust(-(-len(head) // 4096) * 4096, b"\0") + raw[-(-(16 + length + 4) // 4096) * 4096 :]


def test_a_whole_heading_is_read_as_it_is(target: Path, small: bytes) -> None:
    assert adopt(target, _with_heading(small, lambda body: None)) == 3


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 464, 4096, 5000, 1 << 20, 1 << 31, 1 << 34, 1 << 63, 1 << 70]) | st.none()


CLAIMS = {
    "name": st.sampled_from([*rig.ROW.__slots__, "strange"]),
    "value": NUMBERS | st.text(max_size=3) | st.floats(),
    "epoch": NUMBERS,
}


def claims(target: Path, small: bytes, name: str, value: Any, epoch: Any) -> None:
    def change(body: dict[str, Any]) -> None:
        body["slot"][name] = value
        body["weight_epoch"] = epoch

    before = set(target.parent.rglob("*"))
    adopt(target, _with_heading(small, change))
    new = {path for path in set(target.parent.rglob("*")) - before if "namespaces" not in str(path)}
    assert all(path.name.startswith(("slab-", "file")) for path in new)


test_headings_that_claim_anything = settings(fuzz, max_examples=10)(given(**CLAIMS)(claims))
test_many_headings_that_claim_anything = pytest.mark.slow(settings(fuzz, max_examples=150)(given(**CLAIMS)(claims)))


@pytest.mark.parametrize("model", ["../../x", "/etc/passwd", "a\0b", "x" * 70000, "é" * 100, "\ud800"])
def test_names_reach_no_path(target: Path, small: bytes, model: str) -> None:
    before = set(target.parent.parent.rglob("*"))
    adopt(target, _with_heading(small, lambda body: body["namespace"].update(model=model)))
    new = set(target.parent.parent.rglob("*")) - before
    assert all(
        path.name in ("file", "namespace.json") or len(path.name) == 64 or path.name.startswith("slab-") for path in new
    )
