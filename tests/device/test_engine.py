"""The engine's and the ranks' promises, over pages of a device: their own tests, run with one; and what is new."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvxfer.testing import FakeDevice
from tests.engine.ranks_rig import Group
from tests.engine.rig import Node
from tests.engine.test_engine import *  # noqa: F403
from tests.engine.test_ranks import *  # noqa: F403

_seeds = itertools.count()


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[FakeDevice] = []

    def make() -> FakeDevice:
        made.append(FakeDevice(seed=next(_seeds)))
        return made[-1]

    monkeypatch.setattr(Node, "make_device", staticmethod(make))
    monkeypatch.setattr(Group, "make_device", staticmethod(make))
    yield
    assert made and not any(device.defects for device in made)
