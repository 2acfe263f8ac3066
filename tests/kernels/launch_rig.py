"""Pages for launch.py in the interpreter, and the recorder in its kernels' place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvxfer.convert import launch
from kvxfer.convert.pages import KVPages
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping
from tests.convert.common import NUM_BLOCKS, attention
from tests.kernels.recorder import Recorder, record
from tests.oracle import Model

interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="these need Triton's interpreter: run without -m gpu")
MODEL = Model.random(attention(8, "uint8", 2), NUM_BLOCKS)
SMALL = attention(128, "bfloat16", 16)  # 4 KiB of a block for each head and plane
IDS = torch.tensor([[0, 1], [2, 3], [4, -1]])
STRIDE = 4 * 4096


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return record(monkeypatch)


def aligned(size: int, at: int = 0) -> np.ndarray:
    """Bytes whose address is `at` modulo 4096."""
    memory = np.zeros(size + 8192, np.uint8)
    start = -memory.ctypes.data % 4096 + at
    return memory[start : start + size]


def one_page(geometry: KVGeometry, page: PageLayout, at: int = 0, num_blocks: int = 2) -> KVPages:
    mapping = kvx1_mapping(geometry, ShardSpec(), page)
    size = page.offset + num_blocks * page.block_stride
    return KVPages(mapping, [aligned(size, at) for _ in range(mapping.num_tensors)], num_blocks)
