"""Several drives behind one face: every chunk has one home, and a drive that fails costs its own chunks alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path

import pytest

from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError, EngineClosed, LayoutError
from kvxfer.jobs import Status
from kvxfer.placement import LAG_S, Outlook
from kvxfer.policy import LRUPolicy
from kvxfer.results import TransferResult
from kvxfer.spread import SpreadEngine
from kvxfer.testing import FaultyIO
from tests.engine.rig import GEOMETRY, Node, expect, keys_of
from tests.oracle import Model

N = 24
BLOCKS = 32


class Drives:
    """Nodes over roots of their own that share their pages' meaning, and the spread engines above them."""

    def __init__(self, where: Path, weights: Sequence[float] = (1, 1)) -> None:
        self.model = Model.random(GEOMETRY, BLOCKS)
        self._stack = ExitStack()
        self.nodes = [
            self._stack.enter_context(Node(where / f"drive {number}", self.model)) for number in range(len(weights))
        ]
        first = self.nodes[0]
        for other in self.nodes[1:]:  # one target: loads of any drive end in the same pages
            other.reader.shutdown()
            other.reader = type(other.reader)(other.store, other.namespace, first.target, config=other.config)
        self.writer = SpreadEngine([node.writer for node in self.nodes], weights)
        self.reader = SpreadEngine([node.reader for node in self.nodes], weights)
        self._job = 0

    def __enter__(self) -> Drives:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.shutdown(1.0)
        self.reader.shutdown(1.0)
        self._stack.close()

    def result(self, engine: SpreadEngine, job: int) -> TransferResult:
        """The one result of a job."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if found := engine.poll():
                assert [each.job_id for each in found] == [job]
                assert engine.poll() == []
                return found[0]
            time.sleep(0.001)
        raise AssertionError("no result")

    def put(self, numbers: Sequence[int]) -> TransferResult:
        self._job += 1
        self.writer.submit_store(self._job, keys_of(numbers), list(numbers))
        return self.result(self.writer, self._job)

    def get(self, numbers: Sequence[int], deadline: float | None = None) -> TransferResult:
        self._job += 1
        self.nodes[0].poison()
        self.reader.submit_load(self._job, keys_of(numbers), list(numbers), deadline=deadline)
        return self.result(self.reader, self._job)

    def home(self, number: int) -> int:
        """Which drive has a chunk."""
        (home,) = [i for i, node in enumerate(self.nodes) if node.reader.contains(keys_of([number])[0])]
        return home

    def check(self, numbers: Sequence[int]) -> None:
        expect(self.model, "hnd", self.nodes[0].target, list(numbers))


@pytest.mark.parametrize(("weights", "shares"), [((1, 1), (12, 12)), ((3e12, 1e12), (18, 6)), ((2, 1, 1), (12, 6, 6))])
def test_chunks_spread_by_weight_and_come_back(
    tmp_path: Path, weights: tuple[float, ...], shares: tuple[int, ...]
) -> None:
    with Drives(tmp_path, weights) as drives:
        assert drives.put(range(N)).bitmap.all()
        homes = [drives.home(number) for number in range(N)]
        assert tuple(homes.count(drive) for drive in range(len(weights))) == shares
        assert drives.reader.lookup(keys_of(range(N + 3))) == N
        loaded = drives.get(range(N))
        assert loaded.bitmap.all() and loaded.nbytes == N * GEOMETRY.block_bytes
        drives.check(range(N))


def test_what_is_there_is_not_stored_anywhere_else(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        drives.put(range(5))
        homes = [drives.home(number) for number in range(5)]
        again = drives.put([4, 3, 2, 1, 0, 5])
        assert again.bitmap.all() and again.nbytes == GEOMETRY.block_bytes
        assert [drives.home(number) for number in range(5)] == homes
        assert sum(node.store.stats().entries for node in drives.nodes) == 6


def test_damage_on_one_drive_costs_its_chunks(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        drives.put(range(N))
        lost = [number for number in range(N) if drives.home(number) == 1]
        assert 0 < len(lost) < N
        for number in lost:
            drives.nodes[1].flip(number, 100)
        loaded = drives.get(range(N))
        assert [n for n in range(N) if not loaded.bitmap[n]] == lost
        assert [(error.chunk, error.status) for error in loaded.errors] == [(n, Status.BAD_SUM) for n in lost]
        drives.check([n for n in range(N) if n not in lost])
        assert drives.reader.lookup(keys_of(range(N))) == lost[0]
        assert drives.put(range(N)).bitmap.all()
        assert drives.get(range(N)).bitmap.all()


def test_a_drive_that_is_turned_off_is_a_miss_and_gets_no_stores(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        drives.put(range(6))
        gone = [number for number in range(6) if drives.home(number) == 0]
        for engine in (drives.nodes[0].writer, drives.nodes[0].reader):
            engine.turn_off()
        assert drives.reader.lookup(keys_of([n for n in range(6) if n not in gone])) == 6 - len(gone)
        assert drives.reader.lookup(keys_of(gone)) == 0
        loaded = drives.get(range(6))
        assert [n for n in range(6) if not loaded.bitmap[n]] == gone
        assert drives.put(range(6, 12)).bitmap.all()
        assert {drives.home(number) for number in range(6, 12)} == {1}


def test_a_hanging_drive_ends_with_the_deadline_and_the_other_arrives(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        drives.put(range(2))
        assert {drives.home(0), drives.home(1)} == {0, 1}
        with FaultyIO() as io:
            io.hang("pread", after=0, times=1)  # of whichever comes first
            loaded = drives.get(range(2), deadline=time.monotonic() + 1.5)  # time for the other's
            assert loaded.bitmap.count() == 1
            (error,) = loaded.errors
            assert error.status is Status.CUT and not loaded.bitmap[error.chunk]


def test_an_engine_that_refuses_fails_its_part_alone(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        drives.put(range(6))
        first = drives.home(0)
        other = 1 - first
        theirs = [number for number in range(6) if drives.home(number) == other]
        drives.nodes[other].reader.shutdown()
        loaded = drives.get(range(6))
        assert [n for n in range(6) if not loaded.bitmap[n]] == theirs
        assert {error.status for error in loaded.errors} == {Status.CANCELLED}
        drives.nodes[first].reader.shutdown()
        with pytest.raises(EngineClosed):
            drives.reader.submit_load(99, keys_of(range(6)), list(range(6)))
        assert drives.reader.drain(1.0) and drives.reader.poll() == []


@pytest.mark.parametrize("ids", [[0, 0], [0, BLOCKS], [0], [[0.5], [1.0]]], ids=str)
def test_bad_ids_are_refused_and_leave_nothing(tmp_path: Path, ids: list[int]) -> None:
    with Drives(tmp_path) as drives:
        drives.put(range(2))
        with pytest.raises(LayoutError):
            drives.reader.submit_load(7, keys_of(range(2)), ids)
        assert drives.reader.drain(1.0)
        drives.reader.submit_load(7, keys_of(range(2)), [0, 1])  # the id is free
        with pytest.raises(LayoutError, match="job 7 is still open"):
            drives.reader.submit_load(7, keys_of(range(2)), [0, 1])
        assert drives.result(drives.reader, 7).bitmap.all()


def test_empty_jobs_cancelled_jobs_and_shutdown_have_their_results(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        assert drives.put([]).bitmap.n == 0
        drives.put(range(4))
        with FaultyIO() as io:
            io.hang("pread")
            drives.reader.submit_load(50, keys_of(range(4)), list(range(4)))
            assert not drives.reader.drain(0.05)
            drives.reader.cancel(50)
            assert drives.reader.drain(5.0)
            assert not drives.result(drives.reader, 50).bitmap.count()
            drives.reader.submit_load(51, keys_of(range(4)), list(range(4)))
            drives.reader.shutdown(0.2)
            assert drives.result(drives.reader, 51).bitmap.n == 4


def test_metrics_add_up_and_a_reset_reaches_every_root(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        drives.put(range(N))
        metrics = drives.writer.metrics()
        assert metrics.value("kvxfer_store_chunks_total", outcome="stored") == N
        assert metrics.value("kvxfer_entries") == N
        assert metrics.value("kvxfer_threads") == sum(n.writer.metrics().value("kvxfer_threads") for n in drives.nodes)
        before = drives.reader.digests
        drives.reader.reset()
        end = time.monotonic() + 10
        while drives.reader.lookup(keys_of(range(N))) or set(before) & set(drives.reader.digests):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_result_took_as_long_as_its_slowest_part(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives, FaultyIO() as io:
        drives.put(range(2))
        assert {drives.home(0), drives.home(1)} == {0, 1}
        io.delay("pread", 0.5, times=1)
        loaded = drives.get(range(2))
        assert loaded.bitmap.all() and loaded.seconds >= 0.5


def test_it_is_quiet_when_nothing_can_be_taken(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        quiet = lambda: drives.writer.is_quiet  # noqa: E731  # a property that changes: asked anew each time
        assert quiet()
        drives.writer.submit_store(1, keys_of(range(2)), [0, 1], begin=False)
        assert not quiet()
        drives.writer.begin()
        assert drives.writer.drain(20)
        assert not quiet()
        result = drives.result(drives.writer, 1)
        assert quiet()
        drives.writer._ready.append(result)  # as where another thread has taken a job's last part
        assert not quiet()
        assert drives.writer.poll() == [result]


def test_a_touch_counts_on_the_drive_that_has_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[bytes] = []
    with Drives(tmp_path) as drives:
        drives.put(range(4))
        assert {drives.home(number) for number in range(4)} == {0, 1}
        monkeypatch.setattr(LRUPolicy, "touch", lambda policy, entry: touched.append(entry.key))
        drives.reader.touch(keys_of(range(5)))
        end = time.monotonic() + 20
        while len(touched) < 4:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert sorted(touched) == sorted(keys_of(range(4)))


@pytest.mark.parametrize("weights", [(), (1.0,), (1.0, 0.0), (1.0, -1.0)], ids=str)
def test_weights_are_one_a_drive_and_positive(tmp_path: Path, weights: tuple[float, ...]) -> None:
    with Drives(tmp_path) as drives, pytest.raises(ConfigError, match="positive weights"):
        SpreadEngine([node.reader for node in drives.nodes], weights)


def test_a_drive_that_comes_back_gets_its_share_and_no_more(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        drives.nodes[0].writer.turn_off()
        assert drives.put(range(12)).bitmap.all()
        drives.nodes[0].writer.turn_on()
        assert drives.put(range(12, N)).bitmap.all()
        assert abs(sum(drives.home(number) for number in range(12, N)) - (N - 12) / 2) <= 1


def test_a_drive_that_lags_behind_gets_nothing_until_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: dict[object, Outlook] = {}
    monkeypatch.setattr(TransferEngine, "outlook", property(lambda engine: looks.get(engine, Outlook(inf, True, 0.0))))
    with Drives(tmp_path, weights=(5, 1)) as drives:
        first, second = (node.writer for node in drives.nodes)
        looks[first] = Outlook(inf, True, 2 * LAG_S)
        assert drives.put(range(8)).bitmap.all()
        assert [drives.home(number) for number in range(8)] == [1] * 8
        looks[first] = Outlook(inf, False, 1.6 * LAG_S)  # both are slow, and the one of more weight would have to evict
        looks[second] = Outlook(inf, True, 2 * LAG_S)
        assert drives.put(range(8, 14)).bitmap.all()
        assert [drives.home(number) for number in range(8, 14)] == [1] * 6
        looks[second] = Outlook(inf, False, 2 * LAG_S)  # nothing speaks for either: by weight
        assert drives.put(range(14, N)).bitmap.all()
        assert {drives.home(number) for number in range(14, N)} == {0, 1}
        assert drives.get(range(N)).bitmap.all()


def stored_by(node: Node, number: int) -> bool:
    node.writer.submit_store(number, keys_of([number]), [number % BLOCKS])
    return bool(node.writer.wait([number])[number].bitmap.all())


def test_there_is_room_until_the_next_chunk_would_push_one_out(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        node = drives.nodes[0]
        for number in range(100, 3000):
            if not node.writer.outlook.has_room:
                break
            assert stored_by(node, number) and not sum(node.store.stats().evictions.values())
        assert number < 2999
        assert stored_by(node, 3000) and sum(node.store.stats().evictions.values()) > 0


def test_a_chunk_that_no_load_can_reach_is_stored_on_another_drive(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        drives.put(range(6))
        gone = [number for number in range(6) if drives.home(number) == 0]
        for engine in (drives.nodes[0].writer, drives.nodes[0].reader):
            engine.turn_off()
        assert drives.put(gone).bitmap.all()
        assert drives.reader.lookup(keys_of(range(6))) == 6
        assert drives.get(range(6)).bitmap.all()
        drives.check(range(6))
        for engine in (drives.nodes[0].writer, drives.nodes[0].reader):
            engine.turn_on()
        assert drives.get(range(6)).bitmap.all()
        drives.check(range(6))


def test_a_chunk_that_is_being_stored_is_stored_once(tmp_path: Path) -> None:
    with Drives(tmp_path) as drives:
        with FaultyIO() as io:
            io.delay("pwrite", 0.3)
            for job, numbers in enumerate(([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 4, 4])):
                drives.writer.submit_store(100 + job, keys_of(numbers), numbers)
            assert drives.writer.drain(20)
        assert sorted(result.job_id for result in drives.writer.poll() if result.bitmap.all()) == [100, 101, 102]
        assert sum(node.store.stats().entries for node in drives.nodes) == 5
        assert not drives.writer._under_way
        drives.nodes[0].writer.shutdown()
        drives.nodes[1].writer.shutdown()
        with pytest.raises(EngineClosed):
            drives.writer.submit_store(200, keys_of([7, 8]), [7, 8])
        assert not drives.writer._under_way and not drives.writer._jobs
