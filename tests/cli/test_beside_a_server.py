"""The commands while another process has the root open: they find what is there, and it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.store import Store
from tests.cli.commands import forked, json_of
from tests.engine.rig import Node, keys_of
from tests.jobs.rig import GEOMETRY
from tests.oracle import Model

MODEL = Model.random(GEOMETRY, 8)
EIGHT = range(8)


@pytest.fixture
def node(tmp_root: Path) -> Iterator[Node]:
    """A server with eight chunks."""
    with Node(tmp_root, MODEL) as node:
        assert node.put(EIGHT).bitmap.all()
        yield node


def until(node: Node, hits: int) -> None:
    """What another process did is seen."""
    end = time.monotonic() + 30
    while node.reader.lookup(keys_of(EIGHT)) != hits:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_repair_takes_out_what_fails(node: Node, tmp_root: Path) -> None:
    node.flip(5, 50)
    done = forked("verify", tmp_root)
    assert done.returncode == 1
    assert keys_of([5])[0].hex() in done.stdout
    done = forked("verify", tmp_root, "--repair", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    until(node, 5)
    result = node.get(EIGHT)
    assert [i for i in EIGHT if not result.bitmap[i]] == [5]
    assert result.errors == (), "a miss: the bytes were never read"
    assert node.put([5]).bitmap.all()
    assert node.get(EIGHT).bitmap.all()
    node.check(EIGHT)


def test_a_bump_reaches_a_server_that_goes_on_in_the_new_epoch(node: Node, tmp_root: Path) -> None:
    before = node.writer.digest
    done = forked("epoch", "bump", tmp_root, "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    until(node, 0)
    assert node.get(EIGHT).bitmap.none()
    end = time.monotonic() + 30
    while node.writer.digest == before or node.reader.digest == before:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert node.put(range(4)).bitmap.all()
    assert node.get(EIGHT).bitmap.count() == 4
    node.check(range(4))


def test_a_server_that_resets_is_followed_by_its_other_engine(node: Node) -> None:
    assert node.writer.reset() == 1
    assert node.reader.lookup(keys_of(EIGHT)) == 0
    end = time.monotonic() + 30
    while not node.put(EIGHT).bitmap.all():
        assert time.monotonic() < end
    end = time.monotonic() + 30
    while not node.get(EIGHT).bitmap.all():
        assert time.monotonic() < end
    node.check(EIGHT)


def test_who_has_it_open(node: Node, tmp_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = json_of(capsys, "inspect", tmp_root)
    assert code == 0
    assert len(report["open_in"]) == 1


def test_a_bump_while_a_server_keeps_the_lock(node: Node, tmp_root: Path) -> None:
    """As one that hangs with it does: after some seconds that is said, and nothing has changed."""
    with node.store._lock.held():
        done = forked("epoch", "bump", tmp_root, "--yes")
    assert done.returncode == 2
    assert "is locked by another process" in done.stderr
    assert Store.bump_epoch_of(tmp_root) == (0, 1)
