"""Putting the double of kvikio where kvikio is looked for."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer import probe
from kvxfer.io import kvikio_door

HERE = Path(__file__).parent


class Kvikio:
    """The double, in this process and in its children."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        monkeypatch.syspath_prepend(str(HERE))
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvikio"]:
            monkeypatch.delitem(sys.modules, name)

    def in_children(self, **faults: Any) -> None:
        """What it does wrong there."""
        self._monkeypatch.setenv("KVIKIO_DOUBLE", json.dumps(faults | {"not_in": os.getpid()}))

    @property
    def double(self) -> Any:
        """`kvikio.double` of this process, which imports the double if nothing did so far."""
        return importlib.import_module("kvikio.double")

    def close(self) -> None:
        """No call hangs any more, and nothing of it is left imported."""
        if "kvikio.double" in sys.modules:
            self.double.reset()
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvikio"]:
            del sys.modules[name]


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kvikio]:
    """A double of kvikio, and a device that answers."""
    double = Kvikio(monkeypatch)
    monkeypatch.setattr(kvikio_door, "_asked", [])
    monkeypatch.setattr(probe, "cuda", lambda timeout_s: probe.Probe(True, "1 x Fake H200, CUDA 13.0"))
    yield double
    double.close()
