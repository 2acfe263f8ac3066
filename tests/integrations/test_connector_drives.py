"""How KvxferConnector reaches its drives, through vLLM's types: by which calls, and several of them.

Tests of one root are run here over two: what a server stores and loads, and what vLLM is told, is the same.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import ConfigError, KvxferError
from kvxfer.ranks import Rank
from kvxfer.testing import FaultyIO
from tests.integrations.connector_rig import Server, caches_of, configs, make_spec, pages_of, whole_cache
from tests.integrations.harness import keys_of
from tests.integrations.test_connector import (  # noqa: F401  # over two roots
    test_a_chunk_that_goes_between_the_lookup_and_the_load,
    test_a_job_that_cannot_be_started_ends_all_the_same,
    test_a_reset_makes_all_a_miss_only_where_it_is_asked_for,
    test_a_trip_from_any_number_of_ranks_to_any_other,
    test_an_errno_is_a_miss_for_that_request_only,
    test_chunks_of_several_blocks_that_begin_in_the_middle_of_one,
    test_damage_goes_back_as_invalid_blocks_and_is_a_miss_at_once,
    test_events_of_chunks_that_came_and_went,
    test_nothing_raises_into_vllm_and_everything_ends,
    test_stores_are_published_when_all_ranks_have_sealed_them,
)
from tests.native.uring import needs_uring

pytestmark = pytest.mark.vllm

N = 12


@pytest.fixture(autouse=True)
def two_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "roots", 2)


@pytest.mark.parametrize("io", ["posix", "uring"])
def test_ranks_move_bytes_as_the_key_io_says(tmp_root: Path, io: str) -> None:
    if io == "uring":
        needs_uring(tmp_root.parent)
    whole = whole_cache()
    with Server(tmp_root, 2, whole=whole, keys={"io": io}) as server:
        request = server.request("a")
        server.store(range(N), request)
        assert server.load(range(N), request, range(12, 24)) == set() and server.holds(whole, {12: 0, 23: 11})
        parts = [part for worker in server.workers for part in worker._rank._ranks]
        assert [part._runner.stats()["rings"] for part in parts] == [2 * (io == "uring")] * 4
        paths = server.manager.get_stats().data["data"]["vllm:kvxfer_load_bytes_total"]
        assert [path.split()[0] for (path,), moved in paths.items() if moved] == [io]


def test_a_rank_that_gets_no_ring_ends_the_start(tmp_root: Path) -> None:
    spec = make_spec(*configs(tmp_root, keys={"io": "uring"}))
    spec.pages = pages_of(spec.setup, caches_of(whole_cache(), 1, 0))
    with FaultyIO() as faults:
        faults.fail("uring_setup", errno.EPERM)
        with pytest.raises(ConfigError, match="io='uring', but io_uring does not work .*Errno 1"):
            spec.get_worker(None)


def homes(server: Server) -> list[int]:
    """Which root has each chunk."""
    return [server.stores.index(server._home(number)[0]) for number in range(N)]


def test_a_drive_that_is_taken_out_costs_its_chunks_and_the_other_serves(tmp_root: Path) -> None:
    """vLLM is told the blocks, each request goes on, and what is stored from then on goes to the other."""
    whole = whole_cache()
    keys = {"breaker_failures": 3, "breaker_cooldown_s": 600.0, "breaker_max_cooldown_s": 600.0}
    with Server(tmp_root, 2, whole=whole, keys=keys) as server:
        server.store(range(N), server.request("a"))
        lost = [number for number, home in enumerate(homes(server)) if home == 1]
        assert 0 < len(lost) < N
        (tmp_root / "drive 1").rename(tmp_root / "gone")
        one = server.request("one")
        assert server.load(range(N), one, range(12, 24)) == {12 + number for number in lost}
        left = {number: number for number in range(N) if number not in lost}
        assert server.holds(whole, {12 + number: number for number in left})
        assert server.hits(range(N), one) == server.hits(range(N), server.request("other")) == list(left)
        other = server.request("b")
        for number in lost:  # the first of them go to the drive that is gone, until its breaker opens for stores too
            server.store([number], other)
        end = time.monotonic() + 20
        while (missing := [n for n in range(N) if n not in server.hits(range(N), other)]) and time.monotonic() < end:
            server.store(missing, server.request(f"again {time.monotonic()}"))
        assert not missing and server.pinned == 0
        assert server.load(range(N), server.request("c"), range(12, 24)) == set()


def test_a_root_that_cannot_be_opened_ends_the_start_and_leaves_the_others_closed(tmp_root: Path) -> None:
    tmp_root.mkdir()
    (tmp_root / "drive 1").write_text("no directory")
    offloading, vllm_config, caches = configs(tmp_root, roots=2)
    spec = make_spec(offloading, vllm_config, caches)
    with pytest.raises(KvxferError, match="drive 1"):
        spec.get_manager()
    (tmp_root / "drive 1").unlink()
    with Server(tmp_root, whole=whole_cache()) as server:  # nobody has the first open
        assert [store.stats().processes for store in server.stores] == [1, 1]
        assert server.store(range(2), server.request("a")) == keys_of(range(2))


def test_a_rank_that_cannot_be_made_for_one_root_leaves_none_behind(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Rank] = []

    def rank(*given: Any, **named: Any) -> Rank:
        if made:
            raise ConfigError("no memory for a bay")
        made.append(Rank(*given, **named))
        return made[-1]

    monkeypatch.setattr("kvxfer.integrations.vllm_connector.Rank", rank)
    spec = make_spec(*configs(tmp_root, roots=2))
    spec.pages = pages_of(spec.setup, caches_of(whole_cache(), 1, 0))
    with pytest.raises(ConfigError, match="no memory for a bay"):
        spec.get_worker(None)
    assert not made[0]._thread.is_alive()


@pytest.mark.parametrize(("roots", "why"), [
    (["drive", "drive"], "names a directory twice"), (["drive", "drive/inner"], "lies in"), ([], "must be the path"),
])  # fmt: skip
def test_lists_of_roots_that_cannot_be(tmp_root: Path, roots: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_spec(*configs(tmp_root, keys={"root_dir": [str(tmp_root / root) for root in roots]}))
    assert not tmp_root.exists()


def test_a_second_offer_counts_wherever_a_chunk_is_offered(tmp_root: Path) -> None:
    with Server(tmp_root, whole=whole_cache(), keys={"second_touch_names": 100}) as server:
        assert server.store(range(3), server.request("a")) == []
        assert server.store(range(3), server.request("b")) == keys_of(range(3))  # each to the other root: its turn


def test_metrics_are_of_all_roots_and_each_part_of_a_job_is_timed(tmp_root: Path) -> None:
    with Server(tmp_root, 2, whole=whole_cache()) as server:
        request = server.request("a")
        server.store(range(N), request)
        server.load(range(N), request, range(12, 24))
        data = server.manager.get_stats().data["data"]
        counted = [data[f"vllm:kvxfer_{name}"] for name in ("load_chunks_total", "store_chunks_total", "entries")]
        moved = [{labels: value for labels, value in values.items() if value} for values in counted]
        assert moved == [{("hit",): N}, {("stored",): N}, {(): N}]
        seconds = data["vllm:kvxfer_load_seconds"].values()
        assert sum(len(observed) for observed in seconds) == 2
