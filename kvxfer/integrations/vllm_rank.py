"""The worker's half of KvxferConnector: vLLM's OffloadingWorker over one rank (kvxfer/ranks.py, spread_ranks.py).

vLLM asserts that a job succeeds. So every job does, with one acknowledgement from every rank, and what did not arrive
is said as block ids, in the same pass as the report to the coordinator. Nothing here raises into vLLM.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import KvxferError, LayoutError
from kvxfer.integrations.vllm_compat import OffloadingWorker, TransferResult
from kvxfer.ranks import Ended, Rank
from kvxfer.report import engine_reporter
from kvxfer.spread_ranks import SpreadRank
from kvxfer.tickets import Report, SpreadTicket, Ticket

__all__ = ["KvxferWorker"]


class KvxferWorker(OffloadingWorker):
    """Moves this rank's part of jobs between its pages and slots on the drive."""

    def __init__(self, rank: Rank | SpreadRank, blocks_per_chunk: int) -> None:
        self._rank: Any = rank  # which takes the tickets of its own coordinator, whose kind it is of
        self._per_chunk = blocks_per_chunk
        self._jobs: dict[int, list[int]] = {}  # by ticket: vLLM's jobs (a load that did not begin has no own number)
        self._invalid: set[int] = set()
        self._report = Report()
        self._closed = False

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start a store. True."""
        return self._submit(job_id, src_spec, dst_spec.ticket)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Start a load. True."""
        return self._submit(job_id, dst_spec, src_spec.ticket)

    def _submit(self, job_id: int, blocks: Any, ticket: Ticket | SpreadTicket) -> bool:
        self._jobs.setdefault(ticket.number, []).append(job_id)
        table = np.empty((0, self._per_chunk), np.int64)
        try:
            table = block_table_of(blocks, ticket.chunks, self._per_chunk)
            self._rank.submit(ticket, table)
        except Exception as exc:  # the job was accepted: it ends, and nothing of it has arrived
            known = isinstance(exc, KvxferError)
            engine_reporter.warn("rank", f"a job could not be started: {exc}", exc_info=None if known else exc)
            if len(table) != ticket.chunks:
                table = np.array([[int(block)] for block in blocks.block_ids], np.int64)
            self._rank.fail(ticket, table)
        return True

    def get_finished(self) -> list[Any]:
        """Jobs that have ended since the last call, all of them with success: see `take_invalid`."""
        ended: list[Ended] = []
        try:
            ended = self._rank.collect()
            self._report.merge(self._rank.report())
        except Exception as exc:  # the next step asks again
            engine_reporter.warn("rank", f"ended jobs could not be collected: {exc}", exc_info=exc)
        results: list[Any] = []
        for one in ended:
            job_id = self._jobs[one.ticket.number].pop(0)
            if not self._jobs[one.ticket.number]:
                del self._jobs[one.ticket.number]
            if one.ticket.is_load:
                rows = [one.block_ids[position] for position in one.settled.failed if position < len(one.block_ids)]
                self._invalid.update(int(block) for row in rows for block in row if block >= 0)
            size, seconds = one.settled.nbytes, one.settled.seconds
            results.append(
                TransferResult(
                    job_id=job_id,
                    success=True,
                    transfer_size=size or None,
                    transfer_time=seconds if size else None,
                )
            )
        return results

    def take_invalid(self) -> set[int]:
        """Blocks of the device that loads should have filled and did not, of jobs that `get_finished` gave."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> Report:
        """What the coordinator is to hear, of jobs that `get_finished` gave."""
        report, self._report = self._report, Report()
        return report

    def wait(self, job_ids: Collection[int]) -> None:
        """Until these jobs leave their blocks alone: stores until they are gathered; loads are cut at the gate."""
        numbers = [number for number, jobs in self._jobs.items() if not set(job_ids).isdisjoint(jobs)]
        self._rank.free(numbers)

    def shutdown(self) -> None:
        """Stop; bounded. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._rank.shutdown()


def block_table_of(blocks: Any, chunks: int, per_chunk: int) -> NDArray[np.int64]:
    """The device's blocks of a job by chunk and place in it, -1 where the job does not touch one.

    Args:
        blocks: vLLM's GPULoadStoreSpec: of each group as many ids as group_sizes says, the first of them block number
            block_indices of its request.

    Raises:
        LayoutError: they do not belong to so many chunks of one group.
    """
    ids = np.asarray(blocks.block_ids, dtype=np.int64)
    if len(blocks.group_sizes) != 1 or len(ids) != blocks.group_sizes[0]:
        raise LayoutError(f"a job with blocks of {len(blocks.group_sizes)} groups: {blocks.group_sizes}")
    first = int(blocks.block_indices[0]) % per_chunk
    if -(-(first + len(ids)) // per_chunk) != chunks or not len(ids):
        raise LayoutError(f"{len(ids)} blocks from number {first} on do not belong to {chunks} chunks of {per_chunk}")
    table = np.full(chunks * per_chunk, -1, np.int64)
    table[first : first + len(ids)] = ids
    return table.reshape(chunks, per_chunk)
