"""An engine over a store that goes by io_uring."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvxfer.errors import NativeError
from kvxfer.jobs import Status
from kvxfer.testing import FaultyIO
from tests.engine.rig import GEOMETRY, Node, expect
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
