"""The index's log of changes: it says everything that was changed, or that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvxfer.store import changes
from kvxfer.store.records import Item

ROOMY = 1 << 20


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Any]:
    """An empty index."""
    with lmdb.open(str(tmp_path), map_size=8 << 20, lock=False, sync=False) as env:
        yield env


def change(env: Any, name: bytes, value: bytes | None, *, logged: bool = True, budget: int = ROOMY) -> None:
    """One transaction."""
    with env.begin(write=True) as txn:
        txn.put(name, value) if value is not None else txn.delete(name)
        if logged:
            changes.append(txn, [(name, value)], budget)


def since(env: Any, position: int) -> list[Item] | None:
    with env.begin() as txn:
        return changes.since(txn, position)


def test_it_tells_what_came_after(env: Any) -> None:
    change(env, b"a", b"1")
    change(env, b"b", b"2")
    change(env, b"a", None)
    assert since(env, 0) == [(b"a", b"1"), (b"b", b"2"), (b"a", None)]
    assert since(env, 2) == [(b"a", None)]
    assert since(env, 3) == []


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_transaction_that_is_not_in_it_leaves_nothing_to_say(env: Any, missing: int) -> None:
    for number in range(3):
        change(env, b"%d" % number, b"x", logged=number != missing)
    assert since(env, 0) is None
    assert since(env, missing) is None
    assert since(env, missing + 1) == [(b"%d" % number, b"x") for number in range(missing + 1, 3)]


def test_what_was_dropped_leaves_nothing_to_say(env: Any) -> None:
    for number in range(20):
        change(env, b"%d" % number, bytes(100), budget=1500)
    assert since(env, 0) is None
    assert since(env, 19) == [(b"19", bytes(100))]


def test_a_transaction_of_which_a_part_was_dropped_is_not_told(env: Any) -> None:
    with env.begin(write=True) as txn:
        changes.append(txn, [(b"%d" % number, bytes(100)) for number in range(20)], 1500)
    assert since(env, 0) is None
    assert since(env, 1) == []


def test_a_name_that_looks_like_a_row_is_none(env: Any) -> None:
    change(env, b"log" + bytes(40), b"an entry whose digest begins so", logged=False)
    change(env, b"a", b"1")
    assert since(env, 1) == [(b"a", b"1")]
    with env.begin(write=True) as txn:
        changes.clear(txn)
    with env.begin() as txn:
        assert [name for name, _ in txn.cursor()] == [b"a", b"log" + bytes(40)]
