"""Who may read a root, what is not followed out of it, and what is checked before it is believed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvxfer.cli import main
from kvxfer.errors import FormatError, IOFault, KvxferError
from kvxfer.store import Store, survey_root, verify_root
from kvxfer.store.slab import slab_name
from tests.store import damage, rig

Opened = Callable[..., Store]


def modes(root: Path) -> dict[str, int]:
    """The mode of everything under (and of) a root."""
    return {
        str(path.relative_to(root)): stat.S_IMODE(os.lstat(path).st_mode) for path in [root, *sorted(root.rglob("*"))]
    }


@pytest.fixture(params=[0o000, pytest.param(0o022, marks=pytest.mark.slow), 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The process's, for this test."""
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def use(root: Path) -> None:
    """Makes every kind of file that a root can have."""
    with Store.open(rig.config(root)) as store:
        digest = store.register(rig.namespace(), rig.ROW)
        assert all(rig.put(store, digest, [rig.key(1)]))
    Store.bump_epoch_of(root)
    (root / "index" / "state.json").unlink()
    with Store.open(rig.config(root)) as store:
        assert store.stats().rebuilds == 1
        store.register(rig.namespace(), rig.ROW)


@pytest.mark.parametrize("made", [False, True])
def test_a_root_is_the_owners_alone_whatever_the_umask(tmp_path: Path, umask: int, made: bool) -> None:
    root = tmp_path / "above" / "root"
    if made:
        root.mkdir(parents=True, mode=0o700)
    use(root)
    found = modes(root)
    assert {"lock", "kvxfer.json", "index/data.mdb", "index/state.json", f"slabs/{slab_name(1)}"} <= found.keys()
    assert sum(name.endswith("namespace.json") for name in found) == 2
    wrong = {
        name: oct(mode) for name, mode in found.items()
        if mode & 0o777 != (0o700 if (root / name).is_dir() else 0o600)
    }  # fmt: skip
    assert wrong == {}
    if not made:
        assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o700


def test_a_directory_that_was_made_for_its_group_is_shared_with_it(tmp_path: Path, umask: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o2770)
    use(root)
    wrong = {
        name: oct(mode) for name, mode in modes(root).items() if mode != (0o2770 if (root / name).is_dir() else 0o660)
    }
    assert wrong == {}


def test_a_new_root_in_a_shared_directory_is_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    use(tmp_path / "root")
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) & 0o777 == 0o700
    assert {mode & 0o077 for mode in modes(tmp_path / "root").values()} == {0}


# ---- links, pipes and directories in the place of files ----------------------------------------------------

FILES = ("kvxfer.json", "lock", "index/data.mdb", "index/state.json", "namespace.json", "slab")


def path_of(root: Path, name: str) -> Path:
    """One of FILES."""
    if name == "slab":
        return root / "slabs" / slab_name(1)
    return next(root.glob("namespaces/*/namespace.json")) if name == "namespace.json" else root / name


def as_link(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    path.symlink_to(outside)


def as_dangling_link(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(outside)


def as_pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_directory(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").touch()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "change",
    [as_link, as_pipe, pytest.param(as_dangling_link, marks=SLOW), pytest.param(as_directory, marks=SLOW)],
    ids=lambda way: way.__name__,
)
@pytest.mark.parametrize("name", FILES)
def test_nothing_is_followed_and_nobody_waits(tmp_root: Path, name: str, change: Callable[[Path, Path], None]) -> None:
    """Everything that looks at a root ends, with an error on purpose or without; what is outside stays as it was."""
    damage.fill(tmp_root)
    outside = tmp_root.parent / "outside"
    change(path_of(tmp_root, name), outside)
    before = outside.read_bytes() if outside.exists() else None
    for look in (survey_root, verify_root, Store.bump_epoch_of):
        with contextlib.suppress(KvxferError):
            look(tmp_root)
    assert main(["gc", str(tmp_root), "--namespaces-unused-for", "1d", "--yes"]) in (0, 1, 2)
    try:
        with Store.open(rig.config(tmp_root)) as store:
            digest = store.register(*damage.NAMESPACES[0])
            rig.check_all(store, digest, [rig.key(i) for i in range(damage.ROWS)])
            rig.put(store, digest, [rig.key(i) for i in range(1000, 1030)])
    except KvxferError:
        assert name in ("kvxfer.json", "lock")
    assert (outside.read_bytes() if outside.exists() else None) == before
    if name == "slab" and change is not as_directory:
        with pytest.raises(FileNotFoundError):
            os.lstat(tmp_root.parent / "outside.tmp")


@pytest.mark.parametrize("name", FILES)
def test_what_a_link_leads_to_is_not_believed(tmp_root: Path, name: str) -> None:
    """Though it is the very file that lay there before."""
    damage.fill(tmp_root)
    path = path_of(tmp_root, name)
    as_link(path, tmp_root.parent / "outside")
    if name == "kvxfer.json":
        with pytest.raises(IOFault, match="symbolic"):
            survey_root(tmp_root)
        return
    seen = survey_root(tmp_root)
    if name == "lock":
        with pytest.raises(IOFault, match="symbolic"):
            Store.open(rig.config(tmp_root))
    elif name == "namespace.json":
        assert [view.fields is None for view in seen.namespaces if view.digest.hex() == path.parent.name] == [True]
    elif name == "slab":
        assert "slab_unreadable" in {finding.what for finding in seen.findings}
    else:
        assert seen.index.state == "lost"
        with Store.open(rig.config(tmp_root)) as store:
            assert store.stats().rebuilds == 1
        assert not path.is_symlink()


@pytest.mark.parametrize("name", ["slabs", "index", "namespaces"])
def test_directories_that_are_links_are_refused(tmp_root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    damage.fill(tmp_root)
    outside = tmp_root.parent / "outside"
    as_link(tmp_root / name, outside)
    before = rig.snapshot(outside)
    with pytest.raises(FormatError, match=name):
        Store.open(rig.config(tmp_root))
    with pytest.raises(FormatError, match=name):
        survey_root(tmp_root)
    for command in (["reset"], ["gc"], ["rebuild-index"], ["epoch", "bump"], ["verify", "--repair"]):
        assert main([*command, str(tmp_root), "--yes"]) == 1, command
    assert rig.snapshot(outside) == before


def test_a_root_may_be_a_link(tmp_root: Path) -> None:
    filled = damage.fill(tmp_root)
    link = tmp_root.parent / "link"
    link.symlink_to(tmp_root)
    filled.root = link
    filled.intact(set())


def test_a_namespaces_directory_that_is_a_link(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage.fill(tmp_root)
    outside = tmp_root.parent / "outside"
    place = path_of(tmp_root, "namespace.json").parent
    as_link(place, outside)
    before = rig.snapshot(outside)
    (view,) = [view for view in survey_root(tmp_root).namespaces if view.digest.hex() == place.name]
    assert view.fields is None
    assert "link" in view.why
    assert main(["gc", str(tmp_root), "--namespace", place.name, "--yes"]) == 0
    with Store.open(rig.config(tmp_root)) as store:
        for namespace, layout in damage.NAMESPACES:
            store.register(namespace, layout)
    for number in range(3):  # more than there is room for: the oldest make way
        with Store.open(rig.config(tmp_root)) as store:
            for i in range(6):
                store.register(rig.namespace(model=f"{number} {i}"), rig.ROW)
    assert len(list((tmp_root / "namespaces").iterdir())) < 16
    assert rig.snapshot(outside) == before


@pytest.mark.parametrize("kind", ["link", "pipe", "hard link", "left over"])
def test_a_temporary_file_is_not_written_through(tmp_root: Path, kind: str) -> None:
    damage.fill(tmp_root)
    outside, temporary = tmp_root.parent / "outside", tmp_root / "kvxfer.json.tmp"
    outside.write_text("mine")
    if kind == "link":
        temporary.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(temporary)
    elif kind == "hard link":
        os.link(outside, temporary)
    else:
        temporary.write_text("x" * 10000)
    assert Store.bump_epoch_of(tmp_root) == (0, 1)
    assert outside.read_text() == "mine"
    assert json.loads((tmp_root / "kvxfer.json").read_text())["weight_epoch"] == 1
    assert not os.path.lexists(temporary)


# ---- sizes and counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "claim",
    [
        {"alignment": 1 << 40}, {"alignment": 4096.0}, {"alignment": 4097}, {"weight_epoch": 1 << 64},
        {"weight_epoch": -1}, {"weight_epoch": True}, {"alignment": "4096"},
    ],
    ids=str,
)  # fmt: skip
def test_claims_of_the_root_are_bounded(tmp_root: Path, claim: dict[str, object]) -> None:
    damage.fill(tmp_root)
    path = tmp_root / "kvxfer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | claim))
    with pytest.raises(FormatError):
        Store.open(rig.config(tmp_root))


@pytest.mark.parametrize("name", ["kvxfer.json", "index/state.json", "namespace.json"])
def test_a_small_file_that_is_not_small_is_not_read_whole(tmp_root: Path, name: str) -> None:
    damage.fill(tmp_root)
    path = path_of(tmp_root, name)
    with path.open("ab") as file:
        file.truncate(1 << 40)  # sparse: more than there is memory
    try:
        survey_root(tmp_root)
    except FormatError:
        assert name == "kvxfer.json"
    try:
        Store.open(rig.config(tmp_root, capacity_bytes=2 << 40)).close()
    except (FormatError, IOFault):
        assert name == "kvxfer.json"


def test_somebody_elses_root_is_said(
    tmp_root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_root.mkdir()
    tmp_root.chmod(0o707)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_root).st_uid + 1)
    Store.open(rig.config(tmp_root)).close()
    text = " ".join(record.getMessage() for record in caplog.records)
    assert "belongs to user" in text
    assert "can be changed by every user" in text
