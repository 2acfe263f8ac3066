"""The process that test_crash.py has killed: python -m tests.engine.crash_child ROOT, and how it is to end.

Stores chunks 0..19, says so, arms the fault, stores 20..39 in jobs of five, saying so after each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvxfer.testing import FaultyIO
from tests.engine import rig
from tests.oracle import Model


def main() -> None:
    root, how, *fault = sys.argv[1:]
    node = rig.Node(Path(root), Model.random(rig.GEOMETRY, 40))
    assert node.put(range(20)).bitmap.all()
    print("stored 20", flush=True)
    Path(os.environ["KVX_LMDB_ARMED"]).touch()
    if how == "table":
        when, nbytes, after = fault
        FaultyIO().kill("pwrite", before=when == "before", nbytes=int(nbytes), after=int(after))
    for first in range(20, 40, 5):
        done = node.put(range(first, first + 5))
        assert done.bitmap.all()
        print("stored", first + 5, flush=True)


if __name__ == "__main__":
    main()
