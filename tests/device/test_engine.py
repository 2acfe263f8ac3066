"""The engine and the ranks over pages of a device: tests of theirs, run with one, and what is new."""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device import choice
from kvxfer.engine import TransferEngine
from kvxfer.errors import DeviceMemoryError, LayoutError
from kvxfer.jobs import JobRunner, Status
from kvxfer.store import Store
from kvxfer.testing import FakeDevice, FaultyIO
from tests.device.rig import JUNK, device_threads
from tests.engine.ranks_rig import Group, Server
from tests.engine.rig import Node, keys_of, namespace_of, ranks

# Collected here once more, so that the fixture below puts a device under them.
from tests.engine.test_engine import (  # noqa: F401
    MODEL,
    test_a_cut_slab_costs_what_it_held,
    test_a_failed_write_is_not_stored_and_its_slot_comes_back,
    test_a_fuller_chunk_replaces_a_partial_one,
    test_a_slot_under_a_lost_write_is_not_reused_until_it_returns,
    test_an_errno_is_a_miss_for_this_request_only,
    test_drain_and_shutdown_are_bounded_by_reads_that_never_return,
    test_misses_are_not_errors_and_cost_nothing,
    test_two_stores_of_one_key_at_once_write_it_once,
)
from tests.engine.test_ranks import (  # noqa: F401
    test_chunks_of_several_blocks_and_part_of_one,
    test_loads_that_are_freed_touch_no_block_any_more,
    test_one_rank_whose_disk_is_full_takes_its_chunks_away_from_all,
    test_stores_that_are_freed_have_gathered_what_they_write,
)
from tests.jobs.test_faults import until

_seeds = itertools.count()


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeDevice]]:
    """A device for each engine and rank: of a node first the writer's, then the reader's."""
    made: list[FakeDevice] = []

    def make() -> FakeDevice:
        made.append(FakeDevice(seed=next(_seeds), most_steps=16))
        return made[-1]

    monkeypatch.setattr(Node, "make_device", staticmethod(make))
    monkeypatch.setattr(Group, "make_device", staticmethod(make))
    yield made
    assert [device.defects for device in made] == [[] for _ in made]
    until(lambda: not device_threads(), "no runner's thread is left")


def test_ranks_over_two_roots_move_pages_of_one_device(
    tmp_root: Path, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a runner of its own over the same pages, for each root."""
    monkeypatch.setattr(Server, "roots", 2)
    with Server(tmp_root, 2) as source:
        assert source.put(range(12)) and {source.home(number) for number in range(12)} == {0, 1}
        assert len(devices) == 2 * 2
    with Server(tmp_root, 1, "hnd", filled=False) as target:
        assert target.get(range(12)) == [Status.OK] * 12
        target.expect(range(12))


def test_what_is_queued_before_a_submit_comes_before_the_job(tmp_root: Path, devices: list[FakeDevice]) -> None:
    with Node(tmp_root, MODEL) as node:
        right = [[tensor.copy() for tensor in mine.tensors] for mine in node.source]
        fill(node.source, JUNK)

        def compute() -> None:
            for mine, tensors in zip(node.source, right, strict=True):
                for tensor, data in zip(mine.tensors, tensors, strict=True):
                    tensor[:] = data

        devices[0].launch(compute)
        node.writer.submit_store(901, keys_of(range(40)), range(40))
        assert node.writer.wait_gathered(901, 20)
        fill(node.source, JUNK)
        assert node.writer.wait([901], 20)[901].bitmap.all()
        devices[1].launch(lambda: fill(node.target, 0xA5))
        assert node.get(range(40)).bitmap.all()
        node.check(range(40))


def fill(pages: list[KVPages], what: int) -> None:
    """Every byte of these pages."""
    for mine in pages:
        for tensor in mine.tensors:
            tensor[:] = what


def test_a_lost_device_turns_its_engine_off_and_harms_nothing_else(tmp_root: Path, devices: list[FakeDevice]) -> None:
    with Node(tmp_root, MODEL) as node:
        assert node.put(range(10)).bitmap.all()
        metrics = node.reader.metrics()
        assert metrics.value("kvxfer_lost_devices") == 0 and metrics.value("kvxfer_bays") == 4
        assert metrics.value("kvxfer_bay_bytes") == 4 * node.config.bay_bytes
        devices[1].faults.lose("scatter")
        lost = node.get(range(10))
        assert {error.status for error in lost.errors} == {Status.DEVICE} and lost.bitmap.none()
        assert not node.reader.answers_loads and not node.reader.takes_stores
        assert node.reader.lookup(keys_of(range(10))) == 0 and not node.reader.holds(keys_of([0])[0])
        again = node.get(range(10))
        assert [error.status for error in again.errors] == [Status.DEVICE] * 10
        metrics = node.reader.metrics()
        assert metrics.value("kvxfer_lost_devices") == 1 and metrics.value("kvxfer_leaked_bays") == 1
        assert metrics.value("kvxfer_load_chunks_total", outcome="device") == 20
        assert metrics.value("kvxfer_breaker_opened_total", direction="load") == 0, "the drive is well"
        assert node.store.stats().pinned_entries == 0 and not any(node.store.stats().invalidations.values())
        assert node.writer.lookup(keys_of(range(10))) == 10 and node.put(range(10, 12)).bitmap.all()


def test_a_store_on_a_device_that_is_lost_gives_its_slots_back(tmp_root: Path, devices: list[FakeDevice]) -> None:
    with Node(tmp_root, MODEL) as node:
        devices[0].faults.lose("copy", after=1)
        assert {error.status for error in node.put(range(10)).errors} == {Status.DEVICE}
        assert node.writer.lookup(keys_of(range(10))) == 0
        stats = node.store.stats()
        assert (stats.reserved_slots, stats.quarantined_slots, stats.entries) == (0, 0, 0)


def test_a_deadline_gives_the_prefix_that_made_it(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, bay_bytes=4 * 16384) as node, FaultyIO() as io:
        node.put(range(40))
        io.hang("pread", offset=node.offsets_from(12))
        result = node.get(range(40), recompute_tokens_per_s=107)  # 160 tokens: 1.5 s
        count = result.bitmap.count()
        assert result.bitmap.leading_run() == count == 12, "three batches"
        assert {error.status for error in result.errors} == {Status.CUT}
        node.check(range(count))


def test_what_had_arrived_of_a_batch_at_its_deadline_is_kept(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bay holds all: it lands before the deadline, with what has arrived."""
    monkeypatch.setattr("kvxfer.device.flights.LANDING_NS", 10**9)
    with Node(tmp_root, MODEL) as node, FaultyIO() as io:
        node.put(range(40))
        io.hang("pread", offset=node.offsets_from(8))
        result = node.get(range(40), recompute_tokens_per_s=64)  # 2.5 s, of which 0.6 are for the way up
        count = result.bitmap.count()
        assert result.bitmap.leading_run() == count == 8 and result.seconds < 2.5
        node.check(range(count))


def test_no_memory_for_a_bay_refuses_the_engine_and_leaves_nothing(tmp_root: Path) -> None:
    threads = threading.active_count()
    store = Store.open(StoreConfig(root=tmp_root, capacity_bytes=64 << 20), writers=2)
    pages, device = ranks(MODEL, "nhd", 1, filled=True), FakeDevice(memory_bytes=1000)
    with pytest.raises(DeviceMemoryError, match="16384 bytes"):
        TransferEngine(store, namespace_of(), pages, device=device)
    store.close()
    until(lambda: threading.active_count() <= threads, "no thread is left")
    assert device.allocated == {True: 0, False: 0}


# ---- which runner --------------------------------------------------------------------------------------------------


class Labelled(KVPages):
    """Pages that say where they are."""

    device = "cpu"


def labelled(label: str) -> KVPages:
    (mine,) = ranks(MODEL, "nhd", 1, filled=True)
    pages = Labelled(mine.mapping, mine.tensors, mine.num_blocks)
    pages.device = label
    return pages


def test_pages_choose_the_runner(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def torch_device(label: str, *, programs: int | None) -> FakeDevice:
        made.append(f"{label} {programs}")
        return FakeDevice()

    module = types.SimpleNamespace(TorchDevice=torch_device)
    monkeypatch.setitem(__import__("sys").modules, "kvxfer.device.torch_device", module)
    nothing = types.SimpleNamespace(gather=lambda *_: None, scatter=lambda *_: None)  # no host converter takes these
    monkeypatch.setattr("kvxfer.testing.fake_device.native", nothing)
    slot, config = labelled("cpu").mapping.slot, EngineConfig(io_threads=1, bay_bytes=1 << 20, programs=24)
    runner, _ = choice.runner_over(config, slot, [labelled("cpu")], None, tmp_root)
    assert isinstance(runner, JobRunner) and runner.refusal is None and runner.mark() is None and made == []
    runner.shutdown(1)
    runner, limit = choice.runner_over(config, slot, [labelled("cuda:1")], None, tmp_root)
    assert made == ["cuda:1 24"] and limit > 0 and not isinstance(runner, JobRunner)
    assert runner.shutdown(1) == 0
    with pytest.raises(LayoutError, match=r"several devices: \['cpu', 'cuda:0'\]"):
        choice.runner_over(config, slot, [labelled("cpu"), labelled("cuda:0")], None, tmp_root)


def test_no_torch_for_pages_in_host_memory(tmp_root: Path) -> None:
    with Store.open(StoreConfig(root=tmp_root, capacity_bytes=64 << 20), writers=2) as store:
        (mine,) = ranks(MODEL, "nhd", 1, filled=True)
        with TransferEngine(store, namespace_of(), [mine]) as engine:
            assert isinstance(engine._runner, JobRunner)
            assert engine.metrics().value("kvxfer_bays") == 0
    assert np.asarray(mine.tensors[0]).any()
