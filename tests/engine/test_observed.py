"""What an engine tells about itself: every number against one computed from the results alone."""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError
from kvxfer.io.modes import PATHS
from kvxfer.jobs import Status
from kvxfer.metrics import Kind
from kvxfer.nvml import GpuMonitor
from kvxfer.observe import SERIES, render_metrics
from kvxfer.report import INTERVAL_S, Reporter
from kvxfer.results import TransferResult
from kvxfer.testing import FaultyIO, ManualClock
from tests.engine.rig import GEOMETRY, Node, keys_of
from tests.jobs.test_faults import until
from tests.oracle import Model
from tests.test_metrics import parse
from tests.test_report import Lines

MODEL = Model.random(GEOMETRY, 40)
ALL = list(range(40))
NEVER_DOWN = [series.name for series in SERIES if series.kind is not Kind.GAUGE]


def outcomes(engine: TransferEngine, direction: str) -> dict[str, float]:
    """The chunks counted so far, by outcome, without those that are 0."""
    metrics = engine.metrics()
    series = next(each for each in SERIES if each.name == f"kvxfer_{direction}_chunks_total")
    found = {name: metrics.value(series.name, outcome=name) for name in series.labels[0][1]}
    return {name: count for name, count in found.items() if count}


class Ledger:
    """All results of one engine, and what its metrics must say about them. It knows nothing of how they are counted."""

    def __init__(self, direction: str) -> None:
        self.direction = direction
        self.jobs: list[tuple[TransferResult, np.ndarray]] = []

    def add(self, result: TransferResult, block_ids: Any) -> None:
        self.jobs.append((result, np.asarray(block_ids).reshape(result.bitmap.n, -1)))

    def outcomes(self) -> Counter[str]:
        count: Counter[str] = Counter()
        for result, _ in self.jobs:
            named = {error.chunk: error.status for error in result.errors}
            assert len(named) == len(result.errors)
            for chunk, arrived in enumerate(result.bitmap):
                assert not (arrived and chunk in named)
                count["arrived" if arrived else named[chunk].name.lower() if chunk in named else "miss"] += 1
        return count

    def salvage(self) -> dict[str, int]:
        kept = dict.fromkeys(("salvaged_chunks", "salvaged_tokens", "gap_chunks", "gap_tokens"), 0)
        for result, ids in self.jobs:
            gap = False
            for arrived, blocks in zip(result.bitmap, ids, strict=True):
                gap = gap or not arrived
                if arrived and not all(result.bitmap):
                    kind = "gap" if gap else "salvaged"
                    kept[f"{kind}_chunks"] += 1
                    kept[f"{kind}_tokens"] += GEOMETRY.tokens_per_block * sum(int(block) >= 0 for block in blocks)
        return kept

    def check(self, engine: TransferEngine) -> None:
        metrics, found = engine.metrics(), outcomes(engine, self.direction)
        for done in ("hit", "stored", "present"):
            found["arrived"] = found.get("arrived", 0) + found.pop(done, 0)
        assert {name: count for name, count in found.items() if count} == self.outcomes()
        assert metrics.value("kvxfer_jobs_total", direction=self.direction) == len(self.jobs)
        total = sum(metrics.value(f"kvxfer_{self.direction}_bytes_total", path=path) for path in PATHS)
        assert total == sum(result.nbytes for result, _ in self.jobs)
        if self.direction == "load":
            assert {name: metrics.value(f"kvxfer_{name}_total") for name in self.salvage()} == self.salvage()
        numbers = Counter(e.errno for result, _ in self.jobs for e in result.errors if e.status is Status.IO)
        told = {
            kind: metrics.value("kvxfer_io_errors_total", direction=self.direction, kind=kind)
            for kind in ("device", "full", "stale", "refused", "resources", "other")
        }
        assert told == {
            "device": numbers[errno.EIO],
            "full": numbers[errno.ENOSPC] + numbers[errno.EDQUOT],
            "stale": numbers[errno.ESTALE],
            "refused": numbers[errno.EROFS],
            "resources": numbers[errno.EMFILE],
            "other": numbers[errno.EXDEV],
        }
        reached = sum(metrics.value(f"kvxfer_{self.direction}_seconds", path=path) for path in PATHS)
        assert sum(r.nbytes > 0 for r, _ in self.jobs) <= reached <= len(self.jobs)


def test_a_fresh_scrape_has_every_series_and_nothing_counted(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        metrics = node.reader.metrics()
        samples = parse(render_metrics(metrics))
        for series in SERIES:
            suffix = "_count" if series.kind is Kind.HISTOGRAM else ""
            for labels in series.label_values:
                named = tuple(zip([name for name, _ in series.labels], labels, strict=True))
                value = samples[series.name + suffix, named]
                assert series.kind is Kind.GAUGE or value == 0, series.name
                assert metrics.value(series.name, **dict(named)) == value
        assert metrics.value("kvxfer_capacity_bytes") == node.store.config.capacity_bytes
        assert metrics.value("kvxfer_breaker_state", direction="load", state="closed") == 1
        with pytest.raises(KeyError, match="kvxfer_jobs_total"):
            metrics.value("kvxfer_jobs_total")


def test_no_label_is_one_that_servers_give() -> None:
    """vLLM gives every series these two."""
    for series in SERIES:
        assert not {"engine", "model_name"} & {name for name, _ in series.labels}, series.name


def own_lines(engine: TransferEngine) -> list[str]:
    """All series, but for what others write to the drive meanwhile."""
    lines = render_metrics(engine.metrics()).splitlines()
    return [line for line in lines if not line.startswith("kvxfer_drive_written_bytes_total")]


def test_a_finished_job_counts_once_however_often_it_is_asked_for(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put(range(12))
        assert node.reader.lookup(keys_of(range(20))) == 12
        node.reader.submit_load(901, keys_of(range(20)), range(20))
        assert node.reader.drain(20)
        until(lambda: node.reader.metrics().value("kvxfer_busy_threads") == 0, "threads leave their chunks")
        before = own_lines(node.reader)
        assert len(node.reader.poll()) == 1 and node.reader.poll() == [] and node.reader.wait([901], 0) == {}
        assert own_lines(node.reader) == before
        metrics = node.reader.metrics()
        assert metrics.value("kvxfer_lookup_keys_total") == 20 and metrics.value("kvxfer_lookup_hit_keys_total") == 12
        assert outcomes(node.reader, "load") == {"hit": 12, "miss": 8}
        assert metrics.value("kvxfer_load_seconds", path=node.reader.io_mode) == 1
        assert metrics.value("kvxfer_device_seconds_total", direction="load") > 0
        assert outcomes(node.writer, "store") == {"stored": 12}
        node.put(range(14))
        assert outcomes(node.writer, "store") == {"stored": 14, "present": 12}


def test_engines_add_up_and_the_store_they_share_counts_once(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put(range(10))
        node.get(range(10))
        node.reader.turn_off()
        samples = parse(render_metrics(node.writer.metrics(), node.reader.metrics()))
        assert samples["kvxfer_capacity_bytes", ()] == node.store.config.capacity_bytes
        assert samples["kvxfer_committed_chunks_total", ()] == samples["kvxfer_entries", ()] == 10
        assert samples["kvxfer_store_chunks_total", (("outcome", "stored"),)] == 10
        assert samples["kvxfer_load_chunks_total", (("outcome", "hit"),)] == 10
        assert samples["kvxfer_switched_off", ()] == 1
        closed = (("direction", "load"), ("state", "closed"))
        assert samples["kvxfer_breaker_state", closed] == 2
    assert render_metrics() == ""


def test_gpus_come_along_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing asks the driver otherwise."""
    monkeypatch.setattr("kvxfer.nvml._absent", lambda: "nvidia-ml-py is not installed")
    with GpuMonitor() as gpus:
        assert render_metrics(gpus=gpus) == gpus.render()
        assert "kvxfer_gpus 0" in render_metrics(gpus=gpus)
    assert kvxfer.GpuMonitor is GpuMonitor


def damage(node: Node, io: FaultyIO, dice: random.Random) -> None:
    """One thing that may go wrong."""
    number = dice.choice([errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EMFILE, errno.EDQUOT, errno.EXDEV])
    op = dice.choice(["pread", "pwrite"])
    which = dice.randrange(5)
    if which == 0:
        io.fail(op, number, after=dice.randrange(4), times=dice.randrange(1, 12))
    elif which == 1:
        io.flip(dice.randrange(4096), after=dice.randrange(4), times=dice.randrange(1, 4))
    elif which == 2:
        io.short("pread", 0, times=1)
    elif which == 3:
        for engine in (node.writer, node.reader):
            engine.turn_on() if dice.randrange(2) else engine.turn_off()
    else:
        io.delay(op, 0.01, times=2)


@pytest.mark.parametrize("seed", range(4))
def test_no_count_goes_down_and_all_agree_with_the_results(tmp_root: Path, seed: int) -> None:
    dice, stored, loaded = random.Random(seed), Ledger("store"), Ledger("load")
    before: dict[Any, float] = {}
    with (
        Node(tmp_root, MODEL, blocks_per_chunk=2, breaker_failures=4, breaker_cooldown_s=0.02) as node,
        FaultyIO() as io,
    ):
        for job in range(60):
            if dice.randrange(3) == 0:
                damage(node, io, dice)
            first = dice.randrange(20)
            chunks = range(first, min(20, first + dice.randrange(1, 12)))
            ids = np.arange(40).reshape(20, 2)[list(chunks)]
            if dice.randrange(2):
                ids[-1, 1] = -1
            engine, ledger = (node.writer, stored) if dice.randrange(2) else (node.reader, loaded)
            if engine is node.writer:
                engine.submit_store(job, keys_of(chunks), ids)
            else:
                deadline = time.monotonic() + 0.005 if dice.randrange(4) == 0 else None
                engine.submit_load(job, keys_of(chunks), ids, deadline=deadline)
            if dice.randrange(6) == 0:
                engine.cancel(job)
            results = engine.wait([job], 20)
            assert list(results) == [job] and engine.poll() == []
            ledger.add(results[job], ids)
            samples = parse(render_metrics(node.writer.metrics(), node.reader.metrics()))
            for key, value in samples.items():
                if key[0].startswith(tuple(NEVER_DOWN)):
                    assert value >= before.get(key, 0), key
            before = samples
        stored.check(node.writer)
        loaded.check(node.reader)
        assert stored.outcomes()["arrived"] and loaded.outcomes()["arrived"]
        kept = node.store.stats()
        metrics = node.reader.metrics()
        assert metrics.value("kvxfer_committed_chunks_total") == kept.commits > 0
        for reason, count in kept.invalidations.items():
            assert metrics.value("kvxfer_invalidated_chunks_total", reason=reason) == count
        for reason, count in kept.evictions.items():
            assert metrics.value("kvxfer_evicted_chunks_total", reason=reason) == count


def test_a_flood_of_errors_is_few_lines_with_the_right_total(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = ManualClock(), Lines("kvxfer.test.flood")
    reporter = Reporter("kvxfer.test.flood", clock)
    monkeypatch.setattr("kvxfer.observe.engine_reporter", reporter)
    with Node(tmp_root, MODEL, breaker_failures=0) as node, FaultyIO() as io:
        node.put(ALL)
        io.fail("pread", errno.EIO)
        for _ in range(25):
            assert {error.errno for error in node.get(ALL).errors} == {errno.EIO}
        until(lambda: node.reader.metrics().value("kvxfer_open_jobs") == 0, "jobs end")
    clock.advance(INTERVAL_S)
    reporter.flush()
    first, last = lines.records
    assert first.count + last.count == 1000
    for record in (first, last):
        assert (record.event, record.errno) == ("load io EIO", errno.EIO)
        assert record.path.startswith("slab") and "[Errno 5]" in record.getMessage()
    assert first.root == str(tmp_root) and first.job == 2 and last.kept_back == 24


def test_damage_is_told_apart_from_a_failing_disk(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines("kvxfer.test.damage")
    logging.getLogger("kvxfer.test.damage").setLevel(logging.INFO)
    monkeypatch.setattr("kvxfer.observe.engine_reporter", Reporter("kvxfer.test.damage", ManualClock()))
    with Node(tmp_root, MODEL) as node, FaultyIO() as io:
        node.put(ALL)
        node.flip(3, 100)
        node.flip(9, 100)
        assert node.get(ALL).bitmap.count() == 38
        io.fail("pread", errno.ESTALE, times=1)
        assert node.get(ALL).bitmap.count() == 37
        assert outcomes(node.reader, "load") == {"hit": 75, "bad_sum": 2, "io": 1, "miss": 2}
        assert node.reader.metrics().value("kvxfer_invalidated_chunks_total", reason="bad_sum") == 2
    assert [(record.event, record.levelno, record.errno, record.count) for record in lines.records] == [
        ("load bad_sum", logging.INFO, None, 2),
        ("load io ESTALE", logging.WARNING, errno.ESTALE, 1),
    ]


def test_the_switch_in_the_middle_of_jobs(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node, FaultyIO() as io:
        node.put(range(5))
        rule = io.hang("pwrite")
        node.writer.submit_store(901, keys_of(range(5, 10)), range(5, 10))
        until(lambda: rule.hits >= 1, "a write is under way")
        for engine in (node.writer, node.reader):
            engine.turn_off()
            assert not engine.enabled and engine.lookup(keys_of(range(5))) == 0
        refused = node.put([20, 21])
        assert [error.status for error in refused.errors] == [Status.OFF] * 2 and refused.bitmap.none()
        missed = node.get(range(5))
        assert [error.status for error in missed.errors] == [Status.OFF] * 5 and missed.bitmap.none()
        assert "turned off" in str(missed.errors[0])
        assert node.writer.wait([901], 0) == {}, "what was accepted goes on"
        io.release()
        assert node.writer.wait([901], 20)[901].bitmap.all()
        for engine in (node.writer, node.reader):
            engine.turn_on()
        assert node.reader.lookup(keys_of(range(10))) == 10 and node.get(range(10)).bitmap.all()
        assert outcomes(node.reader, "load") == {"hit": 10, "off": 5}
        assert outcomes(node.writer, "store") == {"stored": 10, "off": 2}


def test_the_environment_turns_engines_off_at_their_start(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put([0])
        monkeypatch.setenv("KVXFER_DISABLE", "1")
        with TransferEngine(node.store, node.namespace, node.target) as engine:
            assert not engine.enabled and engine.lookup(keys_of([0])) == 0
            assert engine.metrics().value("kvxfer_switched_off") == 1
            engine.turn_on()
            assert engine.lookup(keys_of([0])) == 1
        threads = threading.active_count()
        monkeypatch.setenv("KVXFER_DISABLE", "yes")
        with pytest.raises(ConfigError, match="KVXFER_DISABLE='yes' must be 1"):
            TransferEngine(node.store, node.namespace, node.target)
        assert threading.active_count() == threads
        monkeypatch.setenv("KVXFER_DISABLE", "0")
        with TransferEngine(node.store, node.namespace, node.target) as engine:
            assert engine.enabled


def test_refused_chunks_are_counted_by_reason(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, max_queued_store_chunks=4, max_queued_load_chunks=4) as node, FaultyIO() as io:
        assert {e.status for e in node.put(range(5)).errors} == {e.status for e in node.get(range(5)).errors}
        assert outcomes(node.writer, "store") == outcomes(node.reader, "load") == {"dropped": 5}
        io.fail("fallocate", errno.ENOSPC)
        io.fail("pwrite", errno.ENOSPC)
        assert {e.status for e in node.put([0, 1]).errors} == {Status.NO_SPACE}
        assert outcomes(node.writer, "store") == {"dropped": 5, "no_space": 2}
        assert node.writer.metrics().value("kvxfer_breaker_state", direction="store", state="closed") == 1
