"""Staging is bounded by its configuration, also under calls that never return."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import STAGING_UNIT, EngineConfig, staging_plan
from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError
from kvxfer.slot import TRAILER_SUMS, SlotLayout
from kvxfer.testing import FaultyIO
from tests.engine.rig import GEOMETRY, Node, keys_of
from tests.jobs.test_faults import until
from tests.oracle import Model

MODEL = Model.random(GEOMETRY, 40)
ROOT = Path(__file__).resolve().parents[2]


def slot_of(nbytes: int) -> SlotLayout:
    """A slot with about so many bytes of payload."""
    return SlotLayout(
        segment_bytes=nbytes, last_segment_bytes=nbytes, num_segments=1, segments_per_trailer=TRAILER_SUMS
    )


def resident_bytes() -> int:
    """What this process has in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@given(st.integers(1, 64 << 20), st.integers(1, 64), st.integers(0, 16), st.integers(4096, 1 << 30))
def test_the_plan_never_passes_the_bound_and_wastes_no_thread(nbytes: int, wanted: int, lost: int, bound: int) -> None:
    config = EngineConfig(io_threads=wanted, max_lost_threads=lost, staging_bytes=bound)
    slot = slot_of(nbytes)
    buffer = -(-slot.slot_bytes // STAGING_UNIT) * STAGING_UNIT
    if buffer > bound:
        with pytest.raises(ConfigError, match=f"staging_bytes={bound} holds") as refusal:
            staging_plan(config, slot)
        remedy = re.search(r"at least (\d+)", str(refusal.value))
        assert remedy is not None
        helped = EngineConfig(io_threads=wanted, max_lost_threads=lost, staging_bytes=int(remedy[1]))
        assert 1 <= staging_plan(helped, slot)[0] <= 2
        return
    threads, most = staging_plan(config, slot)
    replaced, rest = divmod(most - threads * buffer, buffer)
    assert 1 <= threads <= wanted and 0 <= replaced <= lost and not rest and most <= bound
    assert (threads, replaced) == (wanted, lost) or most + buffer > bound, "no buffer is left unused"
    assert threads == wanted or replaced <= threads


def test_the_unit_is_that_of_csrc() -> None:
    found = re.search(r"kHuge = (\d+)u << (\d+);", (ROOT / "csrc" / "io_engine.cpp").read_text())
    assert found is not None and int(found[1]) << int(found[2]) == STAGING_UNIT


def test_no_thread_fits_is_said_before_anything_is_made(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        before = sorted(tmp_root.rglob("*"))
        config = EngineConfig(staging_bytes=1 << 20)
        with pytest.raises(ConfigError, match=r"staging_bytes=1048576 holds no I/O thread.*at least 4194304"):
            TransferEngine(node.store, node.namespace, node.target, config=config)
        assert sorted(tmp_root.rglob("*")) == before


def test_fewer_threads_where_the_bound_holds_no_more(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL, io_threads=8, max_lost_threads=1, staging_bytes=8 << 20) as node:
        assert node.reader.metrics().value("kvxfer_threads") == 3
        assert node.put(range(40)).bitmap.all() and node.get(range(40)).bitmap.all()
        assert 0 < node.reader.metrics().value("kvxfer_staging_peak_bytes") <= 8 << 20


def test_the_gauge_stays_within_the_bound_while_calls_hang_and_return(tmp_root: Path) -> None:
    bound = 12 << 20
    with Node(tmp_root, MODEL) as node:  # whose writes are not given up after 20 ms
        assert node.put(range(40)).bitmap.all()
    with (
        Node(tmp_root, MODEL, io_threads=8, max_lost_threads=3, staging_bytes=bound, io_timeout_s=0.02,
             breaker_failures=0) as node,
        FaultyIO() as io,
    ):  # fmt: skip
        resident = resident_bytes()
        for turn in range(6):
            for job in range(8):
                io.hang("pread", after=job, times=1 + turn)
                node.reader.submit_load(1000 + 10 * turn + job, keys_of(range(40)), range(40))
            until(lambda: node.reader.metrics().value("kvxfer_lost_threads") >= 2, "calls are given up")
            metrics = node.reader.metrics()
            assert metrics.value("kvxfer_staging_limit_bytes") == bound
            assert metrics.value("kvxfer_leaked_staging_bytes") > 0
            assert metrics.value("kvxfer_staging_bytes") <= bound
            io.__exit__(None, None, None)  # they return, and their threads leave or take their places again
            assert node.reader.drain(20) and len(node.reader.poll()) == 8
        until(lambda: node.reader.metrics().value("kvxfer_lost_threads") == 0, "all are back")
        metrics = node.reader.metrics()
        # The peak is kept where buffers are made, so that no scrape had to come at the right moment.
        assert 4 * STAGING_UNIT <= metrics.value("kvxfer_staging_peak_bytes") <= bound
        assert metrics.value("kvxfer_leaked_staging_bytes") == 0
        assert resident_bytes() - resident < bound + (32 << 20)
        # A busy machine may keep a read from its thread for 20 ms, and then it is given up.
        until(lambda: node.get(range(40)).bitmap.all(), "loads are as before")
