"""How KvxferConnector reaches its drives, through vLLM's types."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError
from kvxfer.testing import FaultyIO
from tests.integrations.connector_rig import Server, caches_of, configs, make_spec, pages_of, whole_cache
from tests.native.uring import needs_uring

pytestmark = pytest.mark.vllm

N = 12


@pytest.mark.parametrize("io", ["posix", "uring"])
def test_ranks_move_bytes_as_the_key_io_says(tmp_root: Path, io: str) -> None:
    if io == "uring":
        needs_uring(tmp_root.parent)
    whole = whole_cache()
    with Server(tmp_root, 2, whole=whole, keys={"io": io}) as server:
        request = server.request("a")
        server.store(range(N), request)
        assert server.load(range(N), request, range(12, 24)) == set() and server.holds(whole, {12: 0, 23: 11})
        assert [worker._rank._runner.stats()["rings"] for worker in server.workers] == [2 * (io == "uring")] * 2
        paths = server.manager.get_stats().data["data"]["vllm:kvxfer_load_bytes_total"]
        assert [path.split()[0] for (path,), moved in paths.items() if moved] == [io]


def test_a_rank_that_gets_no_ring_ends_the_start(tmp_root: Path) -> None:
    spec = make_spec(*configs(tmp_root, keys={"io": "uring"}))
    spec.pages = pages_of(spec.setup, caches_of(whole_cache(), 1, 0))
    with FaultyIO() as faults:
        faults.fail("uring_setup", errno.EPERM)
        with pytest.raises(ConfigError, match="io='uring', but io_uring does not work .*Errno 1"):
            spec.get_worker(None)
