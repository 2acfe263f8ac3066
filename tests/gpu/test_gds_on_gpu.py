"""GPUDirect Storage on a machine that has it: an engine's slots by either way, read back by the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.io.ladder import climb_here
from kvxfer.keys import kvx1_namespace, make_offload_key
from kvxfer.store import Store
from tests.jobs.rig import GEOMETRY, expect, ranks
from tests.oracle import Model

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gds
MODEL = Model.random(GEOMETRY, 16)
BLOCKS = list(range(MODEL.num_blocks))
KEYS = [make_offload_key(bytes([block]) * 32, 0) for block in BLOCKS]
NAMESPACE = kvx1_namespace(GEOMETRY, model="gds", weights_fingerprint="1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = climb_here(tmp_path)
    if found.name != "direct":
        pytest.skip(f"no GPUDirect Storage in {tmp_path}: {found.why}")
    with Store.open(StoreConfig(root=tmp_path / "root", capacity_bytes=64 << 20)) as store:
        yield store


def on_gpu(pages: Sequence[KVPages]) -> list[KVPages]:
    """The same pages in the device's memory."""
    return [
        KVPages(mine.mapping, [torch.from_numpy(t).cuda() for t in mine.tensors], mine.num_blocks) for mine in pages
    ]


def moved_by(engine: TransferEngine, way: str) -> Any:
    return engine.metrics().value("kvxfer_io_rung", rung=way)


@pytest.mark.parametrize("writes, reads", [("gds", "host"), ("host", "gds"), ("gds", "gds")])
def test_a_cache_goes_by_gpudirect_storage_and_by_the_host(store: Store, writes: str, reads: str) -> None:
    rungs = {"gds": "direct", "host": "host"}
    with TransferEngine(
        store, NAMESPACE, on_gpu(ranks(MODEL, "nhd", 2, filled=True)), config=EngineConfig(gds=writes)
    ) as engine:
        assert moved_by(engine, rungs[writes]) == 1
        engine.submit_store(1, KEYS, np.array(BLOCKS))
        assert engine.wait([1], 60)[1].bitmap.all()
    host = ranks(MODEL, "hnd", 1, filled=False)
    pages = on_gpu(host)
    with TransferEngine(store, NAMESPACE, pages, config=EngineConfig(gds=reads)) as engine:
        assert moved_by(engine, rungs[reads]) == 1
        engine.submit_load(2, KEYS, np.array(BLOCKS))
        assert engine.wait([2], 60)[2].bitmap.all()
    for mine, copy in zip(pages, host, strict=True):
        for tensor, array in zip(mine.tensors, copy.tensors, strict=True):
            array[:] = tensor.cpu().numpy()
    expect(MODEL, "hnd", host, BLOCKS)
