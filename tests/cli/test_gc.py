"""`kvxfer gc`, `reset` and `rebuild-index`: what they say goes, goes, and nothing else."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import main
from kvxfer.store import Store, collect, uses
from kvxfer.testing import ManualClock
from tests.cli.commands import json_of, run_on_terminal
from tests.store import damage, rig
from tests.store.sharing import Group

DAY = 86400
# tenant, adapter, model: one namespace each, with five chunks
WHO = {"a": ("x", None), "b": ("x", "lora"), "c": ("y", "lora"), "d": ("y", "x")}
Stored = dict[str, tuple[bytes, list[bytes]]]


def fields(who: str, **changes: Any) -> Any:
    tenant, adapter = WHO[who]
    extra = {"tenant": tenant} | ({"adapter": adapter} if adapter else {})
    return rig.namespace(model=who, extra=extra, **changes)


def fill(root: Path, number: int = 0) -> Stored:
    """Five chunks of each."""
    stored = {}
    with Store.open(rig.config(root)) as store:
        for i, who in enumerate(WHO):
            names = [rig.key(100 * i + number + j) for j in range(5)]
            digest = store.register(fields(who), rig.ROW)
            assert all(rig.put(store, digest, names))
            stored[who] = digest, names
    return stored


def left(root: Path, stored: Stored) -> dict[str, int]:
    """How many chunks of each are there, with their bytes."""
    with Store.open(rig.config(root), housekeeping=False) as store:
        return {
            who: len(rig.check_all(store, store.register(fields(who), rig.ROW), names))
            for who, (_, names) in stored.items()
        }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock(float(int(time.time()) // uses.GRAIN_S * uses.GRAIN_S))  # when ten minutes begin
    monkeypatch.setattr(uses, "clock", clock)
    return clock


NOBODY = ("--tenant z", "--other-epochs", "--unnamed", "--unused-for 1d")


@pytest.mark.parametrize(
    ("options", "goes"),
    [
        (["--tenant", "x"], "ab"),
        pytest.param(["--adapter", "lora"], "bc", marks=pytest.mark.slow),
        (["--tenant", "x", "--adapter", "lora"], "b"),
        (["--adapter", "x"], "d"),  # a tenant of that name is somebody else
        (["--salt", "x"], ""),
        *(pytest.param(options.split(), "", marks=pytest.mark.slow) for options in NOBODY),
        ([], ""),
    ],
)
def test_what_is_chosen_goes_and_nothing_else(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], options: list[str], goes: str
) -> None:
    stored = fill(tmp_root)
    code, said = json_of(capsys, "gc", tmp_root, *options, "--dry-run")
    assert (code, said["chunks"], said["removed"]["chunks"]) == (0, 5 * len(goes), 0)
    assert said["bytes"] == 5 * len(goes) * rig.ROW.slot_bytes
    before = left(tmp_root, stored)
    assert before == dict.fromkeys(WHO, 5), "a dry run"
    code, done = json_of(capsys, "gc", tmp_root, *options, "--yes")
    assert code == 0
    assert {view["digest"] for view in done["namespaces"]} == {stored[who][0].hex() for who in goes}
    assert (done["removed"]["chunks"], done["removed"]["namespaces"]) == (5 * len(goes), len(goes))
    assert {path.name for path in (tmp_root / "namespaces").iterdir()} == {
        digest.hex() for who, (digest, _) in stored.items() if who not in goes
    }
    assert left(tmp_root, stored) == {who: 0 if who in goes else 5 for who in WHO}
    if goes:
        (tmp_root / "index" / "state.json").unlink()
        assert left(tmp_root, stored) == {who: 0 if who in goes else 5 for who in WHO}, "nor do they come back"


def test_what_was_evicted_or_replaced_before_does_not_come_back_either(
    tmp_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [rig.key(i) for i in range(30)]
    with Store.open(rig.config(tmp_root), housekeeping=False) as store:
        a, b = store.register(fields("a"), rig.ROW), store.register(fields("c"), rig.ROW)
        assert all(rig.put(store, a, names, mask=1))
        assert all(rig.put(store, a, names[:20]))
        assert all(rig.put(store, b, names))
        assert all(store.invalidate(entry, "other") for entry in store.pin(a, names[5:]) if entry is not None)
    code, done = json_of(capsys, "gc", tmp_root, "--tenant", "x", "--yes")
    assert (code, done["removed"]["chunks"]) == (0, 5)
    (tmp_root / "index" / "state.json").unlink()
    with Store.open(rig.config(tmp_root), housekeeping=False) as store:
        assert store.stats().rebuilds == 1
        assert store.keys(store.register(fields("a"), rig.ROW)) == []
        assert rig.check_all(store, store.register(fields("c"), rig.ROW), names) == names


def test_by_time(tmp_root: Path, capsys: pytest.CaptureFixture[str], clock: ManualClock) -> None:
    stored = fill(tmp_root)
    clock.advance(5 * DAY)
    with Store.open(rig.config(tmp_root), housekeeping=False) as store:
        digest = store.register(fields("a"), rig.ROW)
        store.touch(digest, stored["a"][1][:2])
    clock.advance(3 * DAY)
    assert json_of(capsys, "gc", tmp_root, "--unused-for", "9d", "--dry-run")[1]["chunks"] == 0
    assert json_of(capsys, "gc", tmp_root, "--unused-for", "7d", "--dry-run")[1]["chunks"] == 18
    said = json_of(capsys, "gc", tmp_root, "--namespaces-unused-for", "7d", "--dry-run")[1]
    assert {view["digest"] for view in said["namespaces"]} == {stored[who][0].hex() for who in "bcd"}
    code, done = json_of(capsys, "gc", tmp_root, "--unused-for", "1w", "--tenant", "x", "--yes")
    assert (code, done["removed"]["chunks"], done["removed"]["namespaces"]) == (0, 8, 0)
    assert left(tmp_root, stored) == {"a": 2, "b": 0, "c": 5, "d": 5}


def test_what_nobody_can_reach_goes_without_options(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = fill(tmp_root)
    Store.bump_epoch_of(tmp_root)
    new = fill(tmp_root, 50)
    broken = tmp_root / "namespaces" / ("ab" * 32)
    broken.mkdir()
    (broken / "namespace.json").write_text("{")
    code, done = json_of(capsys, "gc", tmp_root, "--yes")
    assert (code, done["removed"]["chunks"]) == (0, 20)
    assert broken.name in {view["digest"] for view in done["namespaces"]}
    assert left(tmp_root, new) == dict.fromkeys(WHO, 5)
    assert left(tmp_root, stored) == dict.fromkeys(WHO, 0)
    assert len(list((tmp_root / "namespaces").iterdir())) == 4


def test_a_namespace_without_its_file(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = fill(tmp_root)
    (tmp_root / "namespaces" / stored["b"][0].hex() / "namespace.json").unlink()
    assert json_of(capsys, "gc", tmp_root, "--yes")[1]["removed"]["chunks"] == 0, "a server may use it"
    assert json_of(capsys, "gc", tmp_root, "--unnamed", "--yes")[1]["removed"]["chunks"] == 5
    assert left(tmp_root, stored)["b"] == 0
    digest = stored["c"][0].hex()
    assert json_of(capsys, "gc", tmp_root, "--namespace", digest[:10], "--yes")[1]["removed"]["chunks"] == 5


def test_beside_servers(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = Group(tmp_root)
    try:
        server = group.open()
        server.call("put", list(range(20)))
        code, done = json_of(capsys, "gc", tmp_root, "--tenant", "nobody", "--yes")
        assert (code, done["removed"]["chunks"]) == (0, 0)
        digest = next(iter(group.agree()["entries"]))[:64]
        assert json_of(capsys, "gc", tmp_root, "--namespace", digest, "--yes")[1]["removed"]["chunks"] == 20
        group.agree()
        assert server.call("picture")["entries"] == {}
        server.call("put", list(range(30)))
        group.agree()
        assert len(server.call("picture")["entries"]) == 30
        assert main(["rebuild-index", str(tmp_root), "--yes"]) == 2
        assert "open in processes" in capsys.readouterr().err
        code, done = json_of(capsys, "reset", tmp_root, "--yes")
        assert (code, done["weight_epoch"], done["removed"]["chunks"]) == (0, 1, 30)
        group.agree()
        server.call("register")
        server.call("put", list(range(30)))
        assert len(group.agree()["entries"]) == 30
    finally:
        group.end()


def test_reset(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = damage.fill(tmp_root)
    code, done = json_of(capsys, "reset", tmp_root, "--yes")
    assert (code, done["weight_epoch"]) == (0, 1)
    assert done["removed"]["chunks"] == len(filled.keys)
    assert done["removed"]["namespaces"] == 2
    assert list((tmp_root / "slabs").iterdir()) == []
    assert list((tmp_root / "namespaces").iterdir()) == []
    with Store.open(rig.config(tmp_root)) as store:
        assert store.weight_epoch == 1
        digest = store.register(*damage.NAMESPACES[0])
        assert all(rig.put(store, digest, [rig.key(1)]))
    assert main(["reset", str(tmp_root), "--yes"]) == 0
    assert "1 chunks of 1 namespaces" in capsys.readouterr().out


def test_a_reset_leaves_what_a_server_has_registered_in_the_new_epoch(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its file nobody could say what is stored there, nor would `gc` find it after the next bump."""
    damage.fill(tmp_root)
    drop = collect._drop

    def registered_meanwhile(store: Store, chosen: Any) -> Any:
        store.register(*damage.NAMESPACES[0])
        return drop(store, chosen)

    monkeypatch.setattr(collect, "_drop", registered_meanwhile)
    code, done = json_of(capsys, "reset", tmp_root, "--yes")
    assert (code, done["removed"]["namespaces"]) == (0, 2)
    new = damage.NAMESPACES[0][0].digest(1).hex()
    assert [path.name for path in (tmp_root / "namespaces").iterdir()] == [new]
    assert (tmp_root / "namespaces" / new / "namespace.json").is_file()


def test_rebuild(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = damage.fill(tmp_root)
    code, done = json_of(capsys, "rebuild-index", tmp_root, "--yes")
    assert (code, done["before"], done["entries"]) == (0, len(filled.keys), len(filled.keys))
    filled.intact(set())
    filled.flip(damage.ROW_KEY, rig.ROW.payload_stride + 3)
    assert main(["rebuild-index", str(tmp_root), "--yes"]) == 0
    assert f"{len(filled.keys) - 1} entries" in capsys.readouterr().out
    filled.intact({damage.ROW_KEY})
    assert damage.DAMAGES["index overwritten"][0](filled) == set()
    assert main(["gc", str(tmp_root), "--yes"]) == 2
    assert "rebuild-index" in capsys.readouterr().err
    assert json_of(capsys, "rebuild-index", tmp_root, "--yes")[1]["before"] is None
    filled.intact({damage.ROW_KEY})


COMMANDS = (["gc", "--tenant", "x"], ["reset"], ["rebuild-index"])


def test_they_ask(tmp_root: Path) -> None:
    stored = fill(tmp_root)
    code, out, terminal = run_on_terminal("n\n", "gc", tmp_root, "--tenant", "x")
    assert code == 1
    assert "10 chunks of 240.0 KiB, 2 namespaces as a whole" in terminal
    assert "nothing was changed" in terminal
    assert "model" not in out
    assert left(tmp_root, stored) == dict.fromkeys(WHO, 5)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_without_a_terminal_they_need_yes_and_they_make_no_root(
    tmp_path: Path, tmp_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:  # fmt: skip
    damage.fill(tmp_root)
    before = rig.snapshot(tmp_root)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, said = json_of(capsys, command[0], tmp_root, *command[1:])
    assert (code, said["error"]["type"]) == (2, "ConfigError")
    assert "--yes" in said["error"]["message"]
    assert rig.snapshot(tmp_root) == before
    nothing = tmp_path / "nothing"
    code, said = json_of(capsys, command[0], nothing, *command[1:], "--yes")
    assert (code, said["error"]["type"]) == (2, "ConfigError")
    assert not nothing.exists()


@pytest.mark.parametrize("name", damage.NEWER)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_newer_format_is_left_as_it_is(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], command: list[str], name: str
) -> None:
    named = damage.NEWER[name](damage.fill(tmp_root))
    before = rig.snapshot(tmp_root)
    code, report = json_of(capsys, command[0], tmp_root, *command[1:], "--yes")
    assert (code, report["error"]["type"]) == (1, "FormatError")
    assert named in report["error"]["message"]
    assert rig.snapshot(tmp_root) == before


@pytest.mark.parametrize("options", [["--unused-for", "7"], ["--unused-for", "-1d"], ["--unused-for", "x"]])
def test_times_that_are_none(tmp_root: Path, options: list[str]) -> None:
    assert main(["gc", str(tmp_root), *options, "--yes"]) == 2


@pytest.mark.parametrize("command", [["gc", "--unused-for", "0s", "--yes"], ["quota"]], ids=lambda command: command[0])
def test_a_digest_that_is_empty_is_nobodys(
    tmp_root: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """As of a script's variable that is not set: it selects no namespace, and so not all of them."""
    stored = fill(tmp_root)
    code, said = json_of(capsys, command[0], tmp_root, *command[1:], "--namespace", "")
    assert (code, said.get("error", {}).get("type")) == (2, "ConfigError")
    assert left(tmp_root, stored) == dict.fromkeys(WHO, 5)


def test_a_dry_run_says_how_much_in_all(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_root)
    assert main(["gc", str(tmp_root), "--tenant", "x", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "10 chunks of 240.0 KiB, 2 namespaces as a whole, would be removed; this was a dry run" in said


def test_digests_that_are_none(tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_root)
    for digest in ("../..", "AB", "g", "a" * 65):
        assert json_of(capsys, "gc", tmp_root, "--namespace", digest, "--yes")[0] == 2
