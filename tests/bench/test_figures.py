"""The bench's rows that are no times beside a peer: what they count, and that a wrong answer has no figure."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import lookup, policy, resident
from bench.table import OK, WRONG, Table, exit_status, figure
from kvxfer.policy import ARCPolicy, LRUPolicy
from kvxfer.store import Store
from tests.bench.test_bench import tiny


def rows_of(path: Path, room: str, **other: Any) -> Table:
    return command.run(tiny(path, only=room, **other), None)


def test_a_figure_has_a_bar_that_it_must_not_exceed() -> None:
    out = io.StringIO()
    table = Table({}, out)
    table.add([figure("a", "x", 1.5, "visits", most=2.0), figure("b", "x", 2.5, "visits", most=2.0)])
    table.add([figure("c", "x", 9.0, "KiB"), figure("d", "x", 1.0, "visits", most=2.0, why="lost one")])
    table.close()
    text = out.getvalue()
    assert [row.met for row in table.rows] == [True, False, None, None]
    assert "1.500 visits  met <= 2.00" in text
    assert "2.500 visits  short <= 2.00" in text
    assert "1 of 3 bars met, 1 wrong answers" in text
    assert "short: b, x: 2.50 of 2.00" in text
    assert (table.rows[3].figure, table.rows[3].ok) == (None, WRONG)
    assert exit_status(table.rows[:3]) == 0
    assert exit_status(table.rows) == 1


def test_the_tiers_rows_are_left_out_where_there_is_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    table = rows_of(tmp_path, "tier")
    assert table.rows == []
    assert table.notes == ["tier: left out: vLLM is not installed in this environment: make bench-vllm"]
    assert exit_status(table.rows) == 0


# ---- policies


def test_policies_are_counted_and_timed(tmp_path: Path) -> None:
    table = rows_of(tmp_path, "policy")
    assert all(row.ok == OK and row.figure for row in table.rows)
    visited = [row for row in table.rows if row.most == policy.MOST_VISITED]
    slower = [row for row in table.rows if row.most == policy.MOST_SLOWER]
    assert [row.impl for row in visited] == [row.impl for row in slower] == ["lru", "arc", "s3fifo"] * 2
    assert all(row.met for row in visited), "a count is no matter of the machine"
    assert "vLLM" in table.notes[1]
    assert sum("in chains" in row.case for row in visited) == 3


class Rescanning(LRUPolicy[Any]):
    """Keeps what is pinned in its order and passes over it, again for every batch."""

    def pin(self, item: Any) -> None:
        self._pinned.add(item)

    def victims(self, n: int) -> list[Any]:
        held = [item for item in self._order._listed if item not in self._pinned]
        return held[:n]


def test_a_policy_that_passes_over_what_is_pinned_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "POLICIES", {"rescanning": Rescanning})
    row = rows_of(tmp_path, "policy").rows[0]
    assert row.ok == OK
    assert row.met is False
    assert row.figure is not None
    assert row.figure > policy.MOST_VISITED


class Careless(ARCPolicy[Any]):
    """Names what is pinned, too."""

    def pin(self, item: Any) -> None:
        pass


class Twice(LRUPolicy[Any]):
    def victims(self, n: int) -> list[Any]:
        return super().victims(1) * n

    def remove(self, item: Any) -> None:
        if item in self._named:
            super().remove(item)


class Short(LRUPolicy[Any]):
    def victims(self, n: int) -> list[Any]:
        return super().victims(n - 1)


@pytest.mark.parametrize("wrong", [Careless, Twice, Short])
def test_wrong_victims_have_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(policy, "POLICIES", {"lru": LRUPolicy, "wrong": wrong})
    table = rows_of(tmp_path, "policy")
    assert {row.impl for row in table.rows if row.ok == WRONG} == {"wrong"}
    assert {row.impl for row in table.rows if row.ok == OK} == {"lru"}
    assert exit_status(table.rows) == 1


# ---- lookups


def test_lookups_are_answered_from_the_table_that_opening_fills(tmp_path: Path) -> None:
    table = rows_of(tmp_path, "lookup")
    assert [row.ok for row in table.rows] == [OK] * len(lookup.CHAINS)
    assert all(row.most == lookup.MOST_US and "2,000 stored" in row.case for row in table.rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["blind", "short"])
def test_a_lookup_that_is_wrong_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    right = Store.lookup_prefix

    def answer(self: Store, digest: bytes, keys: Iterable[bytes]) -> int:
        listed = list(keys)
        return len(listed) if wrong == "blind" else max(0, right(self, digest, listed) - 1)

    monkeypatch.setattr(Store, "lookup_prefix", answer)
    table = rows_of(tmp_path, "lookup")
    assert [(row.ok, row.figure) for row in table.rows] == [(WRONG, None)] * len(lookup.CHAINS)


# ---- the resident set


def test_the_resident_set_is_that_of_a_process_of_its_own(tmp_path: Path) -> None:
    rows = resident.measure_growth(tmp_path, 5, 20)
    assert [row.ok for row in rows] == [OK] * 4
    before, after, growth, a_job = (row.figure or 0.0 for row in rows)
    assert 1 << 10 < before < 1 << 20
    assert growth == after - before
    assert a_job == growth * 1024 / 40
    assert rows[2].most == resident.MOST_KIB


def test_loads_that_bring_other_bytes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: resident.Worker, call: str, keys: Any, first: int) -> None:
        right(self, call, keys, first)
        if call == "submit_load":
            self._tensors[1][first + 1, 100] ^= 1

    right = resident.Worker._run
    monkeypatch.setattr(resident.Worker, "_run", run)
    assert "other bytes" in str(resident.child(tmp_path / "root", 1, 2)["why"])


def test_a_child_that_fails_is_a_wrong_answer(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("in the way")
    rows = resident.measure_growth(tmp_path, 1, 1)
    assert {(row.ok, row.figure) for row in rows} == {(WRONG, None)}
    assert "exit status 1" in rows[0].why


def test_the_rows_of_durability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(tmp_path, "durability").rows
    assert [(row.impl, row.ok) for row in rows] == [("none", OK), ("process", OK), ("power", OK)]
    assert all(row.figure for row in rows)
    commit = Store.commit
    monkeypatch.setattr(Store, "commit", lambda *args: [*commit(*args)[:-1], False])
    assert [row.ok for row in rows_of(tmp_path, "durability").rows] == [WRONG] * 3
