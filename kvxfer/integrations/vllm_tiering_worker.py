"""KvxferTieringSpec's worker: kvxfer's converter between vLLM's pages and its host rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kvxfer.errors import KvxferError
from kvxfer.integrations.vllm_compat import OffloadingWorker, TransferResult
from kvxfer.integrations.vllm_copier import Done, RowJob
from kvxfer.integrations.vllm_rows import job_pages
from kvxfer.report import engine_reporter

__all__ = ["KvxferTieringWorker"]

SHUTDOWN_S = 30.0  # that a job under way gets at shutdown


class Copier(Protocol):
    """RowCopier, for pages in host memory, or DeviceRowCopier."""

    def submit(self, job: RowJob) -> None:
        """Queue a job. Never waits."""

    def finished(self) -> list[Done]:
        """What has ended since the last call. Never waits."""

    def wait(self, job_ids: Iterable[int]) -> None:
        """Until these have ended."""

    def close(self, timeout_s: float) -> bool:
        """End; whether nothing is written any more."""


class KvxferTieringWorker(OffloadingWorker):
    """Hands jobs to a copier: a job is queued by `submit_*`, which never waits, and is done when its turn comes.

    Nothing here raises into vLLM. It takes no failure either: it asserts that every job is accepted and succeeds, and
    ends. So everything is checked when the plan is made, and a job that names a block or row that there is not (which
    vLLM does not do) is refused: to copy something else instead would be wrong output later.

    Args:
        copier: over this rank's pages; the worker's own from now on.
        region: vLLM's SharedOffloadRegion with the copier's rows; the worker's own from now on.
        per_chunk: blocks of a chunk.
    """

    def __init__(self, copier: Copier, region: Any, per_chunk: int) -> None:
        self._copier, self._region, self._per_chunk = copier, region, per_chunk

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Pages to rows."""
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Rows to pages. `expedited`: it is waited for at once."""
        return self._submit(job_id, dst_spec, src_spec, is_store=False, urgent=expedited)

    def get_finished(self) -> list[Any]:
        """What has ended since the last call."""
        return [
            TransferResult(
                job_id=done.job_id, success=done.success, transfer_size=done.nbytes, transfer_time=done.seconds
            )
            for done in self._copier.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Blocks until these jobs have ended."""
        self._copier.wait(job_ids)

    def shutdown(self) -> None:
        """Ends the job under way, drops what is queued, and gives the rows' memory back to vLLM."""
        region, self._region = self._region, None
        if region is None:
            return
        if self._copier.close(SHUTDOWN_S):
            region.cleanup()
        else:  # unmapping rows under a copy would end the process
            engine_reporter.warn("shutdown", f"a copy has not ended for {SHUTDOWN_S:g} s: the rows stay mapped")

    def _submit(self, job_id: int, blocks: Any, rows: Any, *, is_store: bool, urgent: bool = False) -> bool:
        try:
            block_ids, pages, group_pages = job_pages(blocks, rows, self._per_chunk)
            self._copier.submit(RowJob(job_id, is_store, block_ids, pages, group_pages, urgent))
        except (KvxferError, ValueError) as exc:
            what = "store" if is_store else "load"
            engine_reporter.warn("job", f"{what} job {job_id} is refused: {exc}", exc_info=exc, job=job_id)
            return False
        return True
