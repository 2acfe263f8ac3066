"""The write budget of a root: from its configuration, and shared by its processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import StoreConfig
from kvxfer.errors import ConfigError, IOFault
from kvxfer.io.system import sys_locked
from kvxfer.store import Store, members
from kvxfer.store.budget import budget_of, write_rate
from kvxfer.store.members import MAX_MEMBERS
from kvxfer.testing import ManualClock
from tests.store import rig
from tests.store.peer import Peer


def config(**keys: Any) -> StoreConfig:
    return StoreConfig(root=Path("/nowhere/at/all"), **keys)


def test_no_budget_unless_one_is_given() -> None:
    assert write_rate(config()) is None and budget_of(config(), None, lambda: 1) is None


def test_bytes_per_second_need_no_drive() -> None:
    def never(path: Path) -> tuple[int | None, str]:
        raise AssertionError("nobody asked for the drive's size")

    assert write_rate(config(write_bytes_per_s=5e6), never) == 5e6
    assert write_rate(config(write_dwpd=1.5, drive_bytes=864_000), never) == 15


def test_drive_writes_per_day_of_the_drive_that_is_there() -> None:
    asked: list[Path] = []

    def size(path: Path) -> tuple[int | None, str]:
        asked.append(path)
        return 86_400_000, ""

    assert write_rate(config(write_dwpd=3), size) == 3000
    assert asked == [Path("/")], "the nearest directory that there is"


def test_a_drive_that_is_not_known_is_refused_with_the_reason_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write_dwpd=1 needs the size .* not known: it is memory\. Give drive_bytes"):
        write_rate(config(write_dwpd=1), lambda path: (None, "it is memory"))
    with pytest.raises(ConfigError, match="no block device"):
        Store.open(StoreConfig(root=Path("/dev/shm/kvxfer-budget"), write_dwpd=1))
    assert not Path("/dev/shm/kvxfer-budget").exists()


def test_the_burst_is_a_minute_and_never_tiny() -> None:
    for rate, keys, burst in (
        (1e9, {}, 60_000_000_000),
        (1.0, {}, 256 << 20),
        (1e9, {"write_burst_bytes": 5000}, 5000),
    ):
        budget = budget_of(config(write_bytes_per_s=rate, **keys), rate, lambda: 1)
        assert budget is not None and (budget.bytes_per_s, budget.burst_bytes) == (rate, burst)


def test_processes_that_have_the_root_open_share_the_rate(tmp_root: Path) -> None:
    clock = ManualClock()
    mine = rig.config(tmp_root, write_bytes_per_s=1000.0, write_burst_bytes=1 << 20)
    with Store.open(mine, clock=clock) as store:
        budget = store.write_budget
        assert budget is not None and budget.take(1 << 20)
        clock.advance(1)
        assert budget.available() == 1000
        with Peer(tmp_root) as peer:
            peer.call("open")
            store.maintain()
            assert store.stats().processes == 2
            clock.advance(1)
            assert store.stats().write_budget_left_bytes == 1500


@pytest.fixture
def alone(tmp_root: Path) -> Iterator[tuple[Store, ManualClock]]:
    """A server with an empty budget of 1000 bytes a second, and its clock."""
    clock = ManualClock()
    mine = rig.config(tmp_root, write_bytes_per_s=1000.0, write_burst_bytes=1 << 20)
    with Store.open(mine, clock=clock, housekeeping=False) as store:
        assert store.write_budget is not None and store.write_budget.take(1 << 20)
        yield store, clock


def earned(alone: tuple[Store, ManualClock]) -> float:
    """What it may write after one more second."""
    store, clock = alone
    assert store.maintain()
    before = store.stats().write_budget_left_bytes
    clock.advance(1)
    return store.stats().write_budget_left_bytes - before


def test_a_tool_takes_nothing_of_the_rate(alone: tuple[Store, ManualClock], tmp_root: Path) -> None:
    """Whoever comes first, and whoever sits in a seat that the other has left."""
    with Peer(tmp_root) as tool, Peer(tmp_root) as server:
        tool.call("open_tool")
        assert (earned(alone), alone[0].stats().processes) == (1000, 2)
        server.call("open")
        assert (earned(alone), alone[0].stats().processes) == (500, 3)
        tool.call("close")
        assert (earned(alone), alone[0].stats().processes) == (500, 2)
        tool.call("open")  # the same process and seat, and no tool any more
        assert earned(alone) == pytest.approx(1000 / 3)
        server.call("close")
        server.call("open_tool")
        assert earned(alone) == 500


def test_a_tool_that_is_killed_leaves_no_seat_that_counts_for_nothing(
    alone: tuple[Store, ManualClock], tmp_root: Path
) -> None:
    with Peer(tmp_root) as tool, Peer(tmp_root) as server:
        tool.call("open_tool")
        assert earned(alone) == 1000
        tool.kill()
        server.call("open")
        assert earned(alone) == 500


def test_a_server_that_comes_to_a_tool_has_the_whole_rate(tmp_root: Path) -> None:
    Store.open(rig.config(tmp_root)).close()
    clock = ManualClock()
    with Peer(tmp_root) as tool:
        tool.call("open_tool")
        mine = rig.config(tmp_root, write_bytes_per_s=1000.0, write_burst_bytes=1 << 20)
        with Store.open(mine, clock=clock, housekeeping=False) as store:
            assert store.write_budget is not None and store.write_budget.take(1 << 20)
            assert earned((store, clock)) == 1000


def test_a_tool_that_cannot_be_looked_at_shares_the_rate(
    alone: tuple[Store, ManualClock], tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does one that has not said what it is, as one of an older kvxfer."""
    looked: list[int] = []

    def fails(fd: int, offset: int, path: Path) -> bool:
        if offset <= MAX_MEMBERS:
            return sys_locked(fd, offset, path)
        looked.append(offset)
        raise IOFault(5, "lock")

    monkeypatch.setattr(members, "sys_locked", fails)
    with Peer(tmp_root) as tool:
        tool.call("open_tool")
        assert earned(alone) == 500
    assert looked == [MAX_MEMBERS + 2]
