"""`kvxfer simulate`: the work, and what came of it as one object."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from kvxfer.admission import DAY_S, life_years
from kvxfer.cli.simulate_plan import Drive, Plan, Run
from kvxfer.errors import ConfigError
from kvxfer.simulate import Outcome, Survey, read_trace, replay, survey

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated store."""

    run: Run
    outcome: Outcome


@dataclass(slots=True)
class Report:
    """What was found."""

    plan: Plan
    survey: Survey
    rows: list[Row] = field(default_factory=list)

    @property
    def footprint_bytes(self) -> int:
        """Of all different blocks."""
        return self.survey.distinct_blocks * self.plan.block_bytes

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        plan, found = self.plan, self.survey
        return {
            "schema": SCHEMA,
            "trace": str(plan.trace),
            "requests": found.requests,
            "seconds": found.seconds,
            "prompt_tokens": found.prompt_tokens,
            "blocks": found.blocks,
            "distinct_blocks": found.distinct_blocks,
            "block_tokens": plan.block_tokens,
            "block_bytes": plan.block_bytes,
            "footprint_bytes": self.footprint_bytes,
            "drive_bytes": plan.drive.num_bytes or None,
            "endurance_bytes": plan.drive.endurance_bytes or None,
            "write_amplification": plan.drive.write_amplification,
            "unbounded": {
                "token_hit_ratio": found.hit_tokens / found.prompt_tokens,
                "block_hit_ratio": found.hit_blocks / found.blocks,
                "recomputed_tokens": found.prompt_tokens - found.hit_tokens,
                **self.wear(self.footprint_bytes),
            },
            "rows": [self._row(row) for row in self.rows],
        }

    def wear(self, written_bytes: int) -> dict[str, Any]:
        """What writing so much within the trace's time means for the drive; None for what nobody said."""
        drive, seconds = self.plan.drive, self.survey.seconds
        rate = written_bytes * drive.write_amplification / seconds if seconds else None
        return {
            "written_bytes": written_bytes,
            "written_bytes_per_s": written_bytes / seconds if seconds else None,
            "drive_writes_per_day": rate * DAY_S / drive.num_bytes if drive.num_bytes and rate is not None else None,
            "drive_life_years": _life(drive, rate),
        }

    def _row(self, row: Row) -> dict[str, Any]:
        run, outcome, counts = row.run, row.outcome, row.outcome.counts
        size = self.plan.block_bytes
        return {
            "policy": run.setup.policy,
            "capacity": run.capacity.text,
            "capacity_bytes": run.setup.capacity_blocks * size,
            "admission": run.admission,
            "budget": run.budget.text,
            "budget_bytes_per_s": run.budget.bytes_per_s or None,
            "token_hit_ratio": outcome.token_hit_ratio,
            "block_hit_ratio": outcome.block_hit_ratio,
            "hit_tokens": counts.hit_tokens,
            "recomputed_tokens": counts.prompt_tokens - counts.hit_tokens,
            **self.wear(counts.stored_blocks * size),
            "evicted_bytes": counts.evicted_blocks * size,
            "held_bytes": outcome.held_blocks * size,
            "peak_bytes": counts.peak_blocks * size,
            "unreachable_share": share(outcome),
            "dropped_blocks": dict(counts.dropped_blocks),
            "operations": counts.operations,
            "wall_s": outcome.wall_s,
        }


def share(outcome: Outcome) -> float:
    """Of the blocks held at the end, those that no lookup finds."""
    return outcome.unreachable_blocks / outcome.held_blocks if outcome.held_blocks else 0.0


def _life(drive: Drive, bytes_per_s: float | None) -> float | None:
    """Years; None where nobody said what the drive endures, the trace takes no time, or nothing was written."""
    if not drive.endurance_bytes or not bytes_per_s:
        return None
    return life_years(bytes_per_s, drive.endurance_bytes)


def run(plan: Plan) -> Report:
    """Reads the trace once for what it holds, and once for each combination.

    Raises:
        ConfigError: a bad line, a capacity that holds no block, a trace that changed meanwhile.
        OSError: it cannot be read.
    """
    before = _stamp(plan)
    report = Report(plan, survey(plan.trace, plan.block_tokens))
    for each in plan.runs(report.survey):
        if _stamp(plan) != before:
            raise ConfigError(f"{plan.trace} was changed while it was read")
        report.rows.append(Row(each, replay(read_trace(plan.trace, plan.block_tokens), each.setup)))
    return report


def _stamp(plan: Plan) -> tuple[int, int, int]:
    found = os.stat(plan.trace)
    return found.st_ino, found.st_size, found.st_mtime_ns
