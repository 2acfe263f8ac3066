"""A pass of scrubs that was cut short is gone on with, by whoever scrubs next; its place is not trusted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.store import Store, scrub_pass, uses
from kvxfer.store.root import strangers
from kvxfer.store.scrub import NOTE_S, Scrubbed, Scrubber, Throttle
from kvxfer.store.scrub_pass import Pass, Scrubs, begin, end, note, read_scrubs
from kvxfer.testing import FaultyIO, ManualClock
from tests.cli.commands import run
from tests.store import rig

Opened = Callable[..., Store]
NAMES = [rig.key(i) for i in range(60)]
START = 1_800_000_000


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Seconds since 1970, as this process has them."""
    clock = ManualClock(float(START))
    monkeypatch.setattr(uses, "clock", clock)
    return clock


@pytest.fixture
def store(opened: Opened, wall: ManualClock) -> Store:
    """With 60 chunks in several slabs, that fill them up to some slot."""
    store = opened()
    digest = store.register(rig.namespace(), rig.ROW)
    assert all(rig.put(store, digest, NAMES))
    assert len(store._table.slabs()) >= 3
    return store


def scrubbed(
    store: Store, until: int | None = None, *, anew: bool = False, then: Callable[[int], None] | None = None
) -> Scrubbed:
    """A pass, or its rest. NOTE_S / 3 seconds go by with each chunk, so the place is noted at every third.

    Args:
        until: ends after so many chunks, as a process that is told to stop does.
        then: called after each chunk.
    """
    clock, stop = ManualClock(), threading.Event()

    def progress(chunks: int) -> None:
        clock.advance(NOTE_S / 3)
        if then is not None:
            then(chunks)
        if chunks == until:
            stop.set()

    throttle = Throttle(None, clock.advance, clock)
    return Scrubber(lambda: store, throttle, stop, progress, clock=clock, anew=anew).run()


def behind(store: Store) -> int:
    """Chunks that the pass that is under way has behind it, as the file says."""
    known = read_scrubs(store.config.root).under_way
    assert known is not None
    with store.cleaning() as cleaner:
        return cleaner.behind(known.place)[0]


def test_a_pass_is_gone_on_with_until_all_was_read_once(store: Store, wall: ManualClock) -> None:
    parts = []
    for until in (25, 10, 1, None):
        wall.advance(86400)
        parts.append(scrubbed(store, until))
        assert (store.stats().scrub_ended == 0) == (until is not None), "no part of a pass is a pass"
    assert [part.chunks for part in parts] == [25, 10, 1, 24]
    assert [part.went_on for part in parts] == [False, True, True, True]
    assert [part.complete for part in parts] == [False, False, False, True]
    assert {part.started for part in parts} == {START + 86400}
    assert store.stats().scrub_ended == START + 4 * 86400
    assert read_scrubs(store.config.root) == Scrubs(None, START + 4 * 86400)
    again = scrubbed(store)
    assert (again.chunks, again.went_on) == (60, False)


def test_the_file_is_the_stores_own(store: Store) -> None:
    scrubbed(store, 20)
    root = store.config.root
    assert strangers(root) == (0, 0, [])
    (root / "scrub.json.tmp").write_text("left by a process that was killed while it wrote")
    assert strangers(root) == (0, 0, [root / "scrub.json.tmp"])


def test_the_cap_on_files_holds_with_it(opened: Opened, root: Path) -> None:
    store = opened(max_files=9)
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, NAMES)
    scrubbed(store, 5)
    assert (root / "scrub.json").exists()
    assert rig.disk_use(root)[1] + 1 <= 9, "and one that is being written beside it"


def test_a_root_of_seven_files_goes_on_without_it(opened: Opened, root: Path) -> None:
    """There were such roots before there was the file."""
    store = opened(max_files=9)
    rig.put(store, store.register(rig.namespace(), rig.ROW), NAMES)
    scrubbed(store, 5)
    assert (root / "scrub.json").exists()
    assert store.close()
    store = opened(max_files=7)
    assert not (root / "scrub.json").exists()
    digest = store.register(rig.namespace(), rig.ROW)
    rig.put(store, digest, NAMES)
    kept = len(store.keys(digest))
    assert kept > 10
    assert not scrubbed(store, 5).complete
    assert (scrubbed(store).chunks, scrubbed(store).complete) == (kept, True)
    assert read_scrubs(root) == Scrubs()
    assert rig.disk_use(root)[1] + 1 <= 7
    assert store.close()
    with Store.open_existing(root) as tool:
        assert scrubbed(tool).chunks == kept


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from kvxfer.store import Store
from kvxfer.store.scrub import NOTE_S, Scrubber, Throttle
from kvxfer.testing import ManualClock
clock = ManualClock()
def progress(chunks):
    clock.advance(NOTE_S / 3)
    if chunks == 42:
        os.kill(os.getpid(), signal.SIGKILL)
with Store.open_existing(Path(sys.argv[1])) as store:
    Scrubber(lambda: store, Throttle(None, clock.advance, clock), threading.Event(), progress, clock=clock).run()
"""


def test_killed_in_the_middle(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted at the chunks 4, 7, ... 40; killed after 42."""
    monkeypatch.undo()  # the other process goes by the real time
    done = rig.run_python(KILLED, store.config.root)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert behind(store) == 40
    rest = scrubbed(store)
    assert (rest.chunks, rest.went_on, rest.complete) == (20, True, True)


def test_a_pass_that_raises_is_gone_on_with(store: Store) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(chunks: int) -> None:
        if chunks == 33:
            raise Interrupted

    with pytest.raises(Interrupted):
        scrubbed(store, then=interrupt)
    assert behind(store) == 33
    assert scrubbed(store).chunks == 27


# ---- several at once -----------------------------------------------------------------------------------------


def test_another_process_that_scrubs_too_goes_on_with_the_pass_and_ends_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look at every chunk behind the place that was noted; neither believes the other's end for its own."""
    monkeypatch.undo()
    said = []

    def other(chunks: int) -> None:
        if chunks == 12:
            said.append(json.loads(run("scrub", store.config.root, "--json", "--rate", "1TB/s").stdout))

    done = scrubbed(store, then=other)
    assert (said[0]["verified"], said[0]["went_on"], said[0]["complete"]) == (60 - 10, True, True)
    assert (done.chunks, done.removed, done.unreadable, done.complete) == (60, [], [], True)
    known = read_scrubs(store.config.root)
    assert known.under_way is None and known.ended >= done.started
    assert scrubbed(store).chunks == 60, "the next pass begins at the start"


def test_who_is_behind_goes_on_where_the_other_one_is(store: Store) -> None:
    parts = []

    def other(chunks: int) -> None:
        if chunks == 12:  # noted at 10: it reads 11 to 40, and this one 11 to 13
            parts.append(scrubbed(store, 30))

    done = scrubbed(store, then=other)
    assert (parts[0].chunks, done.chunks, done.complete) == (30, 13 + 20, True)


def test_a_pass_from_the_start_is_another_one(store: Store, wall: ManualClock) -> None:
    scrubbed(store, 20)
    parts = []

    def other(chunks: int) -> None:
        if chunks == 5:
            wall.advance(3600)
            parts.append(scrubbed(store, 6, anew=True))

    rest = scrubbed(store, then=other)
    assert (rest.chunks, rest.went_on, rest.complete) == (40, True, True), "it goes on with its own"
    assert (parts[0].chunks, parts[0].went_on) == (6, False)
    known = read_scrubs(store.config.root)
    assert known.under_way is not None
    assert (known.under_way.started, known.ended) == (START + 3600, START + 3600), "whole is the first, not the second"
    assert behind(store) == 6
    assert scrubbed(store).chunks == 54


def test_whatever_processes_note_no_place_goes_back_and_no_end_is_lost(store: Store, wall: ManualClock) -> None:
    root = store.config.root
    first = begin(root)
    far, near = Pass(first.name, first.started, 2, 7), Pass(first.name, first.started, 2, 6)
    assert note(root, far) == far
    assert note(root, near) == far
    assert begin(root) == far
    wall.advance(10)
    assert end(root, near) == START + 10
    assert note(root, far) == far, "it was brought to its end: nothing is written"
    assert read_scrubs(root) == Scrubs(None, START + 10)
    second, third = begin(root), begin(root, anew=True)
    assert note(root, second) == second
    assert read_scrubs(root).under_way == third
    wall.now = START + 5.0  # the clock was set back
    assert end(root, second) == START + 10
    assert read_scrubs(root) == Scrubs(third, START + 10)


# ---- what is not there ---------------------------------------------------------------------------------------


def test_a_slab_that_is_gone_is_passed_over(store: Store) -> None:
    scrubbed(store, 20)
    known = read_scrubs(store.config.root).under_way
    assert known is not None
    with store.cleaning() as cleaner:
        (here,) = [slab for slab in cleaner.slabs() if slab.slab_id == known.slab]
        gone = cleaner.in_slab(here)
        rest = sum((entry.slab.slab_id, entry.slot) >= known.place for entry in gone)
        assert cleaner.drop(gone, "removed")[0] == len(gone)
        for slab in cleaner.slabs():  # what is reserved for writers goes back with it
            assert slab.slab_id != here.slab_id or not slab.entries
        cleaner.drop_empty_slabs()
        assert here.slab_id not in {slab.slab_id for slab in cleaner.slabs()}
    done = scrubbed(store)
    assert (done.chunks, done.complete, done.unreadable) == (40 - rest, True, [])


def test_a_slab_that_cannot_be_read_is_told_once_a_pass(store: Store) -> None:
    first = min(store._table.slabs(), key=lambda slab: slab.slab_id)
    lost = len(first.entries)
    first.path.rename(first.path.with_suffix(".elsewhere"))
    part = scrubbed(store, lost + 5)
    assert (len(part.unreadable), part.chunks) == (lost, 5)
    rest = scrubbed(store)
    assert (rest.unreadable, rest.chunks, rest.complete) == ([], 60 - lost - 5, True)


def test_a_place_behind_everything_is_the_end(store: Store) -> None:
    known = begin(store.config.root)
    note(store.config.root, Pass(known.name, known.started, 1 << 40, 0))
    done = scrubbed(store)
    assert (done.chunks, done.complete) == (0, True)
    assert scrubbed(store).chunks == 60


def test_a_store_that_has_gone_ends_no_pass(store: Store) -> None:
    there: list[Store] = [store]
    done = Scrubber(
        lambda: there[0] if there else None, Throttle(None, float), threading.Event(), lambda chunks: there.clear()
    ).run()
    assert not done.complete
    assert read_scrubs(store.config.root).ended == 0


@pytest.mark.parametrize("call", ["", "pwrite", "rename"])
def test_a_place_that_cannot_be_written_costs_the_place_alone(store: Store, faults: FaultyIO, call: str) -> None:
    scrubbed(store, 10)
    before = (store.config.root / "scrub.json").read_bytes()
    rule = faults.fail(call, errno.ENOSPC) if call else None
    if rule is None:  # the file cannot be made
        (store.config.root / "scrub.json.tmp").mkdir()
    done = scrubbed(store, anew=True)
    assert (done.chunks, done.complete, done.unreadable) == (60, True, [])
    assert rule is None or rule.hits
    assert (store.config.root / "scrub.json").read_bytes() == before


def test_others_hear_of_an_end_within_ten_minutes(store: Store, opened: Opened, wall: ManualClock) -> None:
    assert store.maintain()
    assert store.stats().scrub_ended == 0
    wall.advance(77)
    scrubbed(store)
    assert store.close()
    later = opened()
    assert later.stats().scrub_ended == 0
    assert later.maintain()
    assert later.stats().scrub_ended == START + 77
    end(later.config.root, Pass(1, 0))
    assert later.maintain() and later.stats().scrub_ended == START + 77, "it looks again after ten minutes"
    later._cleaner._next_tend = later._cleaner._next_touch = 0.0  # which are over
    wall.advance(5)
    end(later.config.root, Pass(1, 0))
    assert later.maintain() and later.stats().scrub_ended == START + 82


# ---- garbage -------------------------------------------------------------------------------------------------


@pytest.fixture
def noted(tmp_path: Path, wall: ManualClock) -> Path:
    """A folder with a lock file and a place; no store is needed to read it."""
    (tmp_path / "lock").touch()
    known = begin(tmp_path)
    note(tmp_path, Pass(known.name, known.started, 3, 4))
    assert read_scrubs(tmp_path).under_way == Pass(known.name, START, 3, 4)
    return tmp_path


def test_no_bit_of_it_may_be_another(noted: Path) -> None:
    file = noted / "scrub.json"
    right, said = file.read_bytes(), read_scrubs(noted)
    for at in range(len(right) * 8):
        wrong = bytearray(right)
        wrong[at // 8] ^= 1 << at % 8
        file.write_bytes(wrong)
        assert read_scrubs(noted) in (Scrubs(), said), bytes(wrong)
        if wrong[at // 8 : at // 8 + 1].isdigit():
            assert read_scrubs(noted) == Scrubs(), bytes(wrong)
    for cut in range(len(right) - 1):
        file.write_bytes(right[:cut])
        assert read_scrubs(noted) in (Scrubs(), said)


def sealed(root: Path, **changes: object) -> bytes:
    """A file with some fields otherwise, and a sum that is right."""
    body = json.loads((root / "scrub.json").read_bytes())
    del body["sum"]
    body |= changes
    return json.dumps(body | {"sum": scrub_pass._sum(body)}).encode()


PASS = {"name": 1, "started": START, "slab": 3, "slot": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2}, {"lock": 1}, {"ended": START + 2 * 86400}, {"ended": -1}, {"ended": True}, {"ended": 1.0},
        {"pass": PASS | {"slab": -1}}, {"pass": PASS | {"slot": 1 << 64}}, {"pass": PASS | {"slot": "4"}},
        {"pass": PASS | {"started": START + 2 * 86400}}, {"pass": PASS | {"more": 1}}, {"pass": {}}, {"pass": []},
        {"pass": 7}, {"pass": {"name": 1}},
    ],
)  # fmt: skip
def test_what_cannot_be_is_no_place(noted: Path, changes: dict[str, object]) -> None:
    (noted / "scrub.json").write_bytes(sealed(noted, **changes))
    assert read_scrubs(noted) == Scrubs()


def test_what_can_be_is_one(noted: Path) -> None:
    """So that the cases above are refused for what they say."""
    (noted / "scrub.json").write_bytes(sealed(noted, **{"pass": PASS, "ended": START + 3600}))
    assert read_scrubs(noted) == Scrubs(Pass(**PASS), START + 3600)
    (noted / "scrub.json").write_bytes(sealed(noted, **{"pass": None}))
    assert read_scrubs(noted) == Scrubs(None, START + 3600)


@given(st.binary(max_size=200) | st.integers(1, 5000).map(lambda deep: b"[" * deep))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "scrub.json").write_bytes(raw)
    assert read_scrubs(root) == Scrubs()


def test_what_is_no_file_is_not_followed_nor_waited_for(noted: Path) -> None:
    file = noted / "scrub.json"
    (noted / "elsewhere").write_bytes(file.read_bytes())
    for make in (lambda: file.symlink_to(noted / "elsewhere"), lambda: os.mkfifo(file), file.mkdir):
        file.unlink()
        make()
        assert read_scrubs(noted) == Scrubs()
        file.rmdir() if file.is_dir() else None
        file.touch()


def test_a_copy_of_a_root_was_read_by_nobody(store: Store, tmp_path: Path) -> None:
    scrubbed(store, 30)
    shutil.copytree(store.config.root, tmp_path / "copy")
    assert read_scrubs(tmp_path / "copy") == Scrubs()


def test_garbage_means_that_all_is_read(store: Store) -> None:
    scrubbed(store, 30)
    (store.config.root / "scrub.json").write_bytes(b'{"format": 1, "pass": {"slab": 99')
    done = scrubbed(store)
    assert (done.chunks, done.went_on, done.complete) == (60, False, True)


def test_a_file_that_is_lost_under_a_pass_is_written_again(store: Store) -> None:
    def lose(chunks: int) -> None:
        if chunks == 20:
            (store.config.root / "scrub.json").unlink()

    scrubbed(store, 40, then=lose)
    assert behind(store) == 40
