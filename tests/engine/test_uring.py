"""An engine, and the ranks of a coordinator, over a store that goes by io_uring."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError, NativeError
from kvxfer.jobs import Status
from kvxfer.ranks import Rank
from kvxfer.testing import FaultyIO
from tests.engine.ranks_rig import Server
from tests.engine.rig import GEOMETRY, Node, expect
from tests.jobs.rig import ranks
from tests.native.uring import needs_uring
from tests.oracle import Model

MODEL = Model.random(GEOMETRY, 8)


@pytest.fixture(autouse=True)
def _works(tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_uring(tmp_path_factory.getbasetemp())


def test_its_jobs_go_by_rings_and_it_tells(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, io="uring") as node:
        assert node.writer.io_mode.startswith("uring ")
        assert node.put(range(8)).bitmap.all() and node.get(range(8)).bitmap.all()
        assert node.reader.stats()["rings"] == node.config.io_threads
        path = node.writer.io_mode
        assert node.writer.metrics().value("kvxfer_store_bytes_total", path=path) == MODEL.full.size
        assert node.reader.metrics().value("kvxfer_load_bytes_total", path=path) == MODEL.full.size
    expect(MODEL, "hnd", node.target, range(8))


def test_a_request_that_fails_is_a_miss_of_its_chunk(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, io="uring") as node, FaultyIO() as io:
        node.put(range(8))
        io.fail("uring_complete", errno.EIO, times=1)
        result = node.get(range(8))
        (error,) = result.errors
        assert (error.status, error.errno, result.bitmap.count()) == (Status.IO, errno.EIO, 7)
        assert node.get(range(8)).bitmap.all()


def test_rings_that_run_out_after_the_open_are_an_error(tmp_root: Path) -> None:
    with FaultyIO() as io:
        io.fail("uring_setup", errno.ENOMEM, after=1)  # the store's own try passes
        with pytest.raises(NativeError, match="Errno 12"), Node(tmp_root, MODEL, io="uring"):
            pass


def rank_in(root: Path, io: str) -> Rank:
    (pages,) = ranks(MODEL, "nhd", 1, filled=False)
    return Rank(root, lambda alignment: pages, io=io)


def goes_by_rings(server: Server, counted: str) -> None:
    assert [rank._runner.stats()["rings"] for rank in server.group.ranks] == [server.config.io_threads] * 2
    path = server.store.io_mode
    assert path.startswith("uring ") and server.coordinator.metrics().value(counted, path=path) == MODEL.full.size


def test_ranks_go_by_rings_where_their_store_does_and_the_metrics_say_so(tmp_root: Path) -> None:
    with Server(tmp_root, 2, model=MODEL, io="uring") as source:
        assert source.put(range(8)) and source.hits(range(8)) == list(range(8))
        goes_by_rings(source, "kvxfer_store_bytes_total")
    with Server(tmp_root, 2, "hnd", model=MODEL, filled=False, io="uring") as target:
        assert target.get(range(8)) == [Status.OK] * 8
        target.expect(range(8))
        goes_by_rings(target, "kvxfer_load_bytes_total")


@pytest.mark.parametrize("io", ["auto", "posix"])
def test_ranks_that_are_not_asked_to_make_no_ring(tmp_root: Path, io: str) -> None:
    with FaultyIO() as faults:
        rule = faults.fail("uring_setup", errno.ENOSYS)
        with Server(tmp_root, 1, model=MODEL, io=io) as server:
            server.put(range(2))
            assert server.group.ranks[0]._runner.stats()["rings"] == rule.hits == 0


def test_a_rank_whose_process_gets_no_ring_refuses_with_the_reason_and_leaves_nothing(tmp_root: Path) -> None:
    """As where the scheduler's process may, and a rank's may not."""
    with FaultyIO() as faults:
        faults.fail("uring_setup", errno.EPERM)
        with pytest.raises(ConfigError, match="io='uring', but io_uring does not work .*Errno 1.*use auto or posix"):
            rank_in(tmp_root, "uring")
    assert not tmp_root.exists() and list(tmp_root.parent.iterdir()) == []


def test_a_rank_comes_before_its_root_and_is_tried_where_that_will_be(tmp_root: Path) -> None:
    """A server makes its ranks first: the root is made when its scheduler opens it."""
    rank = rank_in(tmp_root / "not" / "there", "uring")
    assert rank._runner.stats()["rings"] == rank.config.io_threads
    assert not tmp_root.exists() and rank.shutdown(1.0) == 0
