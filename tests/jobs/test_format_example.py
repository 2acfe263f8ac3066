"""The slot that docs/format.md shows in hex is the slot that libkvx writes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from kvxfer.convert.pages import KVPages
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping
from tests.jobs.rig import Rig
from tests.oracle import Bytes

GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=2, head_dim=8, dtype="uint8", tokens_per_block=4)
DOC = Path(__file__).parents[2] / "docs" / "format.md"


def hexdump(data: Bytes) -> str:
    """As `hexdump -C` without its right half: lines of 16 bytes, zeros left out."""
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        if row.any():
            lines.append(f"{at:08x}  {row.tobytes().hex(' ')}")
    return "\n".join(lines)


def test_the_slot_in_the_document(tmp_path: Path) -> None:
    mapping = kvx1_mapping(GEOMETRY, ShardSpec(), PageLayout.hnd(GEOMETRY, 2))
    page = np.arange(128, dtype=np.uint8).reshape(1, -1)  # [K, V][head][token][byte]
    with Rig(tmp_path / "slots", [KVPages(mapping, [page], 1)]) as rig:
        assert not rig.store([KVPages(mapping, [page], 1)], [[0]]).status.any()
        slot = rig.bytes_of(0)
    shown = re.search(r"## A slot in hex\n.*?```\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == hexdump(slot)
