"""Cases that once went wrong: each left a job without a result, a pin, a slot or a key behind, or believed too much."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError, ForkError, LayoutError
from kvxfer.geometry import ShardSpec
from kvxfer.jobs import Status
from kvxfer.mapping import LocalTensor
from kvxfer.opaque import opaque_mapping
from kvxfer.testing import FaultyIO, Rule
from tests.engine.rig import GEOMETRY, Node, keys_of, namespace_of
from tests.jobs.test_faults import until
from tests.oracle import Model

MODEL = Model.random(GEOMETRY, 40)


def _hit(rule: Rule) -> bool:
    return rule.hits == 1


@pytest.mark.parametrize("deadline", [float("inf"), 1e300])
def test_a_deadline_that_never_comes(tmp_root: Path, deadline: float) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put([0])
        assert node.get([0], deadline=deadline).bitmap.all()


def test_a_deadline_that_is_no_time_is_refused_before_the_job_is_accepted(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put([0])
        with pytest.raises(ConfigError, match="nan"):
            node.reader.submit_load(1, keys_of([0]), [0], deadline=float("nan"))
        with pytest.raises(ConfigError, match="nan"):
            node.reader.submit_load(1, keys_of([0]), [0], recompute_tokens_per_s=float("nan"))
        assert node.get([0], deadline=-1e300).errors[0].status is Status.CUT
        assert node.reader.stats()["jobs_open"] == 0
        assert node.store.stats().pinned_entries == 0


def test_a_block_id_beyond_int64_is_not_an_absent_block(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        node.put([0])
        with pytest.raises(LayoutError, match="18446744073709551615"):
            node.get([0], block_ids=np.array([2**64 - 1], dtype=np.uint64))


def test_timeouts_that_have_passed(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node, FaultyIO() as io:
        io.hang("pwrite", offset=(4096, 1 << 40))
        node.writer.submit_store(1, keys_of([0]), [0])
        start = time.monotonic()
        assert node.writer.wait([1], -1) == {}
        assert node.writer.drain(-1) is False
        node.writer.shutdown(-1)
        assert time.monotonic() - start < 20
        assert list(node.writer.wait([1], 0)) == [1]


def test_pages_that_depend_on_the_sharding_need_a_namespace_that_says_so(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        shard = ShardSpec(tp_size=2, tp_rank=0)
        mapping = opaque_mapping([LocalTensor(block_stride=4096, page_bytes=4096)] * 2, shard)
        pages = KVPages(mapping, [np.zeros((4, 4096), np.uint8) for _ in range(2)], 4)
        with pytest.raises(LayoutError, match="topology=None"):
            TransferEngine(node.store, namespace_of(canonical_form="opaque"), [pages])


def test_a_store_that_cannot_be_planned_leaves_nothing_behind(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Node(tmp_root, MODEL) as node:
        for broken in ("reserve", "pin", "commit"):

            def refuse(*_: Any) -> Any:
                raise MemoryError("no more")

            with monkeypatch.context() as patch:
                patch.setattr(node.store, broken, refuse)
                failed = node.put([0, 1, 0])
                assert {e.status for e in failed.errors} == {Status.INDEX}
                assert failed.bitmap.none()
            assert node.writer.stats()["jobs_open"] == 0
            assert node.store.stats().reserved_slots == 0
        assert node.put([0, 1, 0]).bitmap.all()


def test_a_write_that_returns_right_after_its_job_was_cancelled(tmp_root: Path) -> None:
    """The late return may be there before the result was polled."""
    with Node(tmp_root, MODEL) as node:
        for step in range(30):
            with FaultyIO() as io:
                rule = io.hang("pwrite", times=1, offset=(4096, 1 << 40))
                node.writer.submit_store(step, keys_of([step]), [step])
                until(partial(_hit, rule), "its write hangs")
                node.writer.cancel(step)
                io.release()
                (result,) = node.writer.wait([step], 10).values()
                assert result.bitmap.all() or [e.status for e in result.errors] == [Status.LOST]
        until(lambda: node.store.stats().quarantined_slots == 0, "slots come back")
        assert node.put(range(30)).bitmap.all()


def test_a_queued_store_can_be_cancelled(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node, FaultyIO() as io:
        rule = io.hang("fallocate")
        node.writer.submit_store(1, keys_of([0]), [0])
        until(lambda: rule.hits == 1, "the service thread makes a slab")
        node.writer.submit_store(2, keys_of([1]), [1])
        node.writer.cancel(2)
        assert [e.status for e in node.writer.wait([2], 20)[2].errors] == [Status.CANCELLED]
        io.release()
        assert node.writer.wait([1], 10)[1].bitmap.all()


@pytest.mark.parametrize("call", ["stats", "poll", "shutdown", "drain"])
def test_every_call_in_a_fork_says_so(tmp_root: Path, call: str) -> None:
    with Node(tmp_root, MODEL) as node:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                getattr(node.reader, call)()
            except ForkError as exc:
                os.write(writer, str(exc).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert b"is a fork of it" in os.read(reader, 4096)
        os.close(reader)


def test_a_store_does_not_push_out_its_own_head(tmp_root: Path) -> None:
    """R6: a full store, and a longer chain with the same beginning. What the result says is there is there."""
    big = Model.random(GEOMETRY, 300)
    with Node(tmp_root, big, capacity_bytes=5 << 20, slab_bytes=1 << 20) as node:
        first = node.put(range(300)).bitmap.leading_run()
        assert 0 < first < 300
        again = node.put(range(300))
        assert again.bitmap.leading_run() == again.bitmap.count() == first
        assert {e.status for e in again.errors} == {Status.NO_SPACE}
        assert node.reader.lookup(keys_of(range(300))) == first
        assert node.store.stats().pinned_entries == 0
        other = node.put(range(50), keys=keys_of(range(50), prompt=1))
        assert other.bitmap.all(), "pins end with the job"


def test_a_store_that_is_being_planned_can_be_cancelled(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node, FaultyIO() as io:
        rule = io.hang("fallocate")
        node.writer.submit_store(1, keys_of([0]), [0])
        until(partial(_hit, rule), "the stores' thread makes a slab")
        node.writer.cancel(1)
        io.release()
        assert [e.status for e in node.writer.wait([1], 10)[1].errors] == [Status.CANCELLED]
        assert node.store.stats().reserved_slots == 0


def test_slots_under_lost_writes_come_back_after_a_shutdown_too(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        for step in range(3):
            engine = TransferEngine(node.store, node.namespace, node.source, config=node.config)
            with FaultyIO() as io:
                rule = io.hang("pwrite", offset=(4096, 1 << 40))
                engine.submit_store(step, keys_of([step]), [step])
                until(partial(_hit, rule), "its write hangs")
                assert engine.shutdown(0.05) == 1
                assert node.store.stats().quarantined_slots == 1
                io.release()
            until(lambda: node.store.stats().quarantined_slots == 0, "the slot comes back")


def test_a_signal_in_a_wait_costs_no_job(tmp_root: Path) -> None:
    """Its handler raises, as that of Ctrl-C does, at whatever instant of a wait."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupted

    with Node(tmp_root, MODEL) as node:
        node.put(range(10))
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            interrupts = answered = 0
            for job in range(100, 500):
                node.reader.submit_load(job, keys_of(range(10)), range(10))
                while True:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0.0002 + (job % 13) * 0.0001)
                        taken = node.reader.wait([job], 20)
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        break
                    except (Interrupted, RuntimeError):
                        # Where it comes as threading.Condition takes the lock again, it shows as "cannot release
                        # un-acquired lock".
                        interrupts += 1
                # Without an answer only if the signal came when it had been taken and was on its way to us.
                assert not taken or taken[job].bitmap.all()
                answered += len(taken)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert interrupts > 20
        assert answered > 300
        assert node.reader.stats()["jobs_open"] == 0
        assert node.reader.drain(5)
        assert node.store.stats().pinned_entries == 0


def test_a_second_shutdown_waits_for_the_first(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node, FaultyIO() as io:
        rule = io.hang("pwrite", offset=(4096, 1 << 40))
        node.writer.submit_store(1, keys_of([0]), [0])
        until(partial(_hit, rule), "its write hangs")
        first = threading.Thread(target=node.writer.shutdown, args=(0.3,))
        first.start()
        until(lambda: node.writer._closing, "it has begun")
        node.writer.shutdown(0.3)
        assert node.writer.stats()["jobs_open"] == 0
        first.join()


def test_long_keys_are_refused(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        for key in (b"", b"k" * 65, "text"):
            with pytest.raises(Exception, match="1..64 bytes"):
                node.put([0], keys=[key])
        for size in (1, 63, 64):
            assert node.put([0], keys=[b"k" * size]).bitmap.all()
            assert node.get([0], keys=[b"k" * size]).bitmap.all()
