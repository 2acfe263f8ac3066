"""The simulator's rows: what they say of a trace, and that a wrong replay has no figure."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import simulate
from bench.table import OK, WRONG, Table, exit_status
from kvxfer.policy import POLICIES
from kvxfer.simulate import Outcome, replay
from tests.bench.test_bench import tiny


def table_of(path: Path) -> Table:
    return command.run(tiny(path, only="simulate"), None)


def test_every_policy_has_its_rows_at_every_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "SHARES", (50, 100))
    monkeypatch.setattr(simulate, "whats_missing", lambda: "it is not here")
    table = table_of(tmp_path)
    assert [row.ok for row in table.rows] == [OK] * (len(POLICIES) * (1 + 2 * 2) + 1)
    assert [row.impl for row in table.rows if row.most == simulate.MOST_US] == list(POLICIES)
    figures = {(row.case, row.impl): row.figure for row in table.rows}
    best = figures["token hits", "no bound"]
    assert best == pytest.approx(100 * 1024 / 2612)  # two blocks of the second prompt
    assert all(figures["token hits, 100 % of the footprint", name] == pytest.approx(best) for name in POLICIES)
    assert table.notes[1] == "simulate: no rows of vLLM's own policies: it is not here"
    assert table.notes[2].startswith("simulate: most token hits: at 50 % ")
    assert "at 100 % lru and arc and s3fifo (lru 39.20, arc 39.20, s3fifo 39.20)" in table.notes[2]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"requests": 2}, "not all of the trace was replayed"),
        ({"hit_tokens": 4000}, "4000 tokens were hit, of 1024"),
        ({"evicted_blocks": 99}, "blocks are held"),
        ({"peak_blocks": 99}, "99 blocks were held at once"),
    ],
)
def test_a_wrong_replay_has_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], why: str
) -> None:
    def wrong(*arguments: object) -> Outcome:
        outcome = replay(*arguments)
        return dataclasses.replace(outcome, counts=dataclasses.replace(outcome.counts, **change))

    monkeypatch.setattr(simulate, "replay", wrong)
    table = table_of(tmp_path)
    assert {row.ok for row in table.rows if row.impl in POLICIES} == {WRONG}
    assert all(why in row.why and row.figure is None for row in table.rows if row.impl in POLICIES)
    assert exit_status(table.rows) == 1


def test_a_trace_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "simulate", "--trace", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
