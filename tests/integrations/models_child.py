"""What engine_child.py needs of models whose rows are not one for each chunk: keys by group, and what rows held.

Steps besides Child's: branch TOKENS (a prompt that begins as the first one and goes on otherwise), damage GROUP NUMBER
(of the first prompt's chunks, on disk), rows (digests of every row that was stored, and that was loaded, by key).
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from tests.integrations.engine_child import prompt
from tests.integrations.parallel_child import TiersChild


class BranchChild(TiersChild):
    """Any engine."""

    def branch(self, tokens: int) -> dict[str, Any]:
        ids = prompt(0)["prompt_token_ids"][:tokens] + prompt(1000 + tokens)["prompt_token_ids"][tokens:]
        return self._run(ids, 8)

    def shutdown(self) -> dict[str, Any]:
        if self.scheduler.connector is None:
            return super(TiersChild, self).shutdown()
        return super().shutdown()


class GroupsChild(BranchChild):
    """With KvxferTier alone."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        (self.tier,) = self.manager.secondary_tiers
        self.groups: dict[int, list[bytes]] = {}  # the first prompt's keys, in order
        self.stored: dict[bytes, str] = {}
        self.loaded: dict[bytes, str] = {}
        self._loads: dict[int, Any] = {}
        self._store, self.tier.submit_store = self.tier.submit_store, self.submit_store
        self._load, self.tier.submit_load = self.tier.submit_load, self.submit_load
        self._finished, self.tier.get_finished_jobs = self.tier.get_finished_jobs, self.get_finished_jobs

    def digest(self, row: int) -> str:
        view = self.tier._primary_kv_view
        return hashlib.sha256(view.cast("B")[row * view.shape[1] : (row + 1) * view.shape[1]]).hexdigest()

    def rows_of(self, job: Any) -> list[int]:
        return [int(row) for row in getattr(job, "chunk_ids", getattr(job, "block_ids", ()))]

    def submit_store(self, job: Any) -> None:
        """Listens: rows are not written until the job has its result."""
        for key, row in zip(job.keys, self.rows_of(job), strict=True):
            self.stored[key] = self.digest(row)
            if self.fillers == 100:
                self.groups.setdefault(int.from_bytes(key[-4:], "big"), []).append(key)
        self._store(job)

    def submit_load(self, job: Any) -> None:
        self._loads[job.job_id] = job
        self._load(job)

    def get_finished_jobs(self) -> list[Any]:
        """Listens: loaded rows are as they came until vLLM has the result."""
        results = list(self._finished())
        for result in results:
            job = self._loads.pop(result.job_id, None)
            for key, row in zip(job.keys, self.rows_of(job), strict=True) if job else ():
                if result.success or key in (result.successful_keys or ()):
                    self.loaded[key] = self.digest(row)
        return results

    def rows(self) -> dict[str, Any]:
        return {
            "stored": {key.hex(): value for key, value in self.stored.items()},
            "loaded": {key.hex(): value for key, value in self.loaded.items()},
            "groups": {group: len(keys) for group, keys in self.groups.items()},
        }

    def damage(self, group: int, number: int) -> dict[str, Any]:
        path, offset, layout = self.tier._store.locate(self.tier._engine.digest, self.groups[group][number])
        with path.open("r+b") as file:
            at = offset + layout.slot_bytes // 4
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
            os.fsync(file.fileno())
        return {}
