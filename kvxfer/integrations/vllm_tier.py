"""`KvxferTier`: kvxfer as a secondary tier under vLLM's stock TieringOffloadingSpec, chosen from configuration alone.

vLLM's primary tier is a table of rows in host memory; a job moves some of them to or from the store. Every method runs
on the scheduler's thread, and none but `drain_jobs` and `shutdown` waits for anything. Storage errors end as misses and
dropped stores: nothing but a wrong configuration, at start, raises into vLLM, which dies of what a tier raises. Hence
the broad excepts: each answers as the worst of the storage would, and `_report` keeps a defect's trace.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from kvxfer.engine import TransferResult
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.integrations import vllm_compat as compat
from kvxfer.integrations.vllm_compat import LookupResult, Medium, RequestOffloadingContext, SecondaryTierManager
from kvxfer.integrations.vllm_config import TierConfig
from kvxfer.integrations.vllm_deadline import Deadlines
from kvxfer.integrations.vllm_events import EventLog
from kvxfer.integrations.vllm_journal import Journal
from kvxfer.integrations.vllm_metrics import Told, definitions
from kvxfer.integrations.vllm_namespace import check_stages, fingerprint_of, namespace_of
from kvxfer.integrations.vllm_reset import Reset
from kvxfer.integrations.vllm_roots import Roots
from kvxfer.report import engine_reporter
from kvxfer.store import Access

__all__ = ["KvxferTier"]

OWNER = "kvxfer"  # what KV events say
CANCEL_S = 5.0  # what cancelled jobs get to end in, at a drain
STATS_S = 0.25  # metrics are told at most this often: reading them costs more than a step's other calls together


@dataclass(frozen=True, slots=True)
class _Job:
    """A job that vLLM waits for."""

    keys: tuple[bytes, ...]
    is_load: bool
    request: str


class _Rows:
    """The primary view's memory for numpy, without the buffer being held: vLLM unmaps it when it has shut us down.

    (An engine writes rows between a load's submit and its result and reads them between a store's submit and its end;
    it has ended all jobs before `shutdown` returns. For reads that never return see `shutdown`; a write that never
    returns may go on reading rows, into a slot that is never believed.)
    """

    def __init__(self, view: memoryview) -> None:
        array = np.frombuffer(view, dtype=np.uint8)
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (int(array.ctypes.data), view.readonly),
        }


_KEPT: list[memoryview] = []  # of tiers that left reads behind


class KvxferTier(SecondaryTierManager):
    """A root on a local drive as one of vLLM's secondary tiers. docs/vllm.md has its keys.

    Args:
        offloading_spec: has vLLM's offloading configuration, which names what the rows mean.
        primary_kv_view: [rows, row_bytes].
        tier_type: as vLLM calls this tier.
        backpressure_detector: vLLM's, which it then feeds with the bytes that stores really wrote. A store dropped for
            `max_queue_s` is a failed one to it; one that admission or the write budget leaves out is neither.
        tier_keys: see TierConfig.

    Raises:
        ConfigError: a key is unknown, missing, not built or cannot work.
        FormatError, StoreError, IOFault: the root cannot be opened; says why.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **tier_keys: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, **compat.detector_argument(backpressure_detector))
        try:
            self._open(offloading_spec, primary_kv_view, tier_keys)
        except KvxferError as exc:
            exc.add_note(f"vLLM's secondary tier {tier_type!r}, root_dir={tier_keys.get('root_dir')!r}, cannot start")
            raise

    def _open(self, spec: Any, view: memoryview, keys: dict[str, Any]) -> None:
        self.config = TierConfig.from_keys(keys)
        self.locality = None if self.config.locality is None else compat.Locality(self.config.locality)
        mine = [each for each in getattr(spec, "secondary_tier_configs", ()) if each.get("type") == self.tier_type]
        if len(mine) > 1:
            raise ConfigError(f"{len(mine)} tiers of type {self.tier_type!r}: give one of them a list as root_dir")
        row_bytes, self._view = _row_bytes(view), view
        vllm_config = spec.config
        partition = compat.pipeline_partition()
        check_stages(vllm_config, partition=partition, stated_equal=self.config.equal_pipeline_stages)
        namespace = namespace_of(
            vllm_config,
            row_bytes=row_bytes,
            weights=fingerprint_of(
                vllm_config.model.name, self.config.weights_fingerprint, compat.max_model_len(vllm_config)
            ),
            canonical_format=compat.canonical_format(vllm_config),
            page_layout=compat.page_layout(vllm_config),
            device=compat.device_type(),
            release=compat.vllm_release(),
        )
        tokens = [group.tokens_per_block * vllm_config.cache.blocks_per_chunk for group in vllm_config.groups]
        self._deadlines = Deadlines(self.config.deadline_s, self.config.recompute_tokens_per_s, tokens)
        self._journal = Journal()
        self._roots = Roots(self.config, namespace, np.asarray(_Rows(view)), len(view), self._journal)
        try:
            self._begin(spec)
        except BaseException:  # whatever it is, the roots must not stay open under a tier that there is not
            self._roots.engine.shutdown()
            self._roots.close()
            raise

    def _begin(self, spec: Any) -> None:
        self._engine, self._store = self._roots.engine, self._roots.stores[0]
        self._journal.digests = self._roots.digests
        self._jobs: dict[int, _Job] = {}
        self._ready: list[Any] = []  # results that vLLM has not taken
        self._accesses: dict[str, Access] = {}  # by request: what it does to a chunk is one use
        self._failed: dict[str, set[bytes]] = {}  # by request: keys that did not arrive; every request that is there
        self._reset = Reset(self._engine.reset)
        self._old: set[str] = set()  # requests that were there at a reset for new weights
        self._events: EventLog | None = None
        if self.config.enable_kv_events:
            if spec.kv_events_config.enable_kv_cache_events:
                self._events = EventLog(self._journal, self._roots.digests, self._engine.contains)
            else:
                engine_reporter.warn("events", "enable_kv_events is set, but vLLM's KV events are off: there are none")
        self._stepped = False
        self._ended = False  # a job has, since vLLM was told
        self._told = Told()
        self._told_at = -STATS_S
        self._closed = False

    # ---- requests ----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """Chunks of a request are stored as they come."""
        self._failed.setdefault(req_context.req_id, set())
        self._accesses.setdefault(req_context.req_id, Access(compat.key_positions(req_context)))
        self._deadlines.came(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """What failed for it is forgotten."""
        self._deadlines.left(req_context.req_id)
        self._old.discard(req_context.req_id)
        self._accesses.pop(req_context.req_id, None)
        failed = self._failed.pop(req_context.req_id, None)
        if failed:
            self._journal.forget(failed.difference(*self._failed.values()))

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS, at once, from memory. MISS for a key that failed for this request and was not stored since.

        (A hit on it would be promoted again with every step.)
        """
        try:
            if self._is_left_out(req_context.req_id):
                return LookupResult.MISS
            failed = self._failed.get(req_context.req_id)
            if failed and key in failed:
                self._take_stored()
                if key in failed:
                    return LookupResult.MISS
            return LookupResult.HIT if self._engine.holds(key) else LookupResult.MISS
        except Exception as exc:  # a lookup that raises kills the engine: a miss
            _report("lookup", exc)
            return LookupResult.MISS

    def _is_left_out(self, request: str) -> bool:
        """Whether what a request computed, or what is stored, may be of weights that are no more.

        vLLM offers all chunks of requests that go on over a reset once more, those computed before it too.
        """
        return self._reset.outdated or request in self._old

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Counts as a use."""
        try:
            self._engine.touch(keys, self._accesses.get(req_context.req_id))
        except Exception as exc:  # a use that is not counted
            _report("touch", exc)

    # ---- jobs --------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Queue a store; one that finds the queue full fails and is counted."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Start a load; at its deadline, if it has one, it ends with what has arrived."""
        self._submit(job_metadata, is_load=True)

    def _submit(self, metadata: Any, *, is_load: bool) -> None:
        job = _Job(tuple(metadata.keys), is_load, metadata.req_context.req_id)
        self._jobs[metadata.job_id] = job
        if self._is_left_out(job.request):
            self._finish(metadata.job_id, job, None)
            return
        try:
            rows, access = compat.job_rows(metadata), self._accesses.get(job.request)
            if not is_load:  # vLLM hands a store's keys over as a set
                order = (access or Access(compat.key_positions(metadata.req_context))).order(job.keys)
                job, rows = replace(job, keys=tuple(job.keys[place] for place in order)), rows[order]
                self._jobs[metadata.job_id] = job
            if self._deadlines.measuring:
                self._measure(job)
            if is_load:
                deadline = self._deadlines.of(job.keys)
                self._engine.submit_load(metadata.job_id, job.keys, rows, deadline=deadline, access=access, begin=False)
            else:
                self._engine.submit_store(metadata.job_id, job.keys, rows, access=access, begin=False)
        except Exception as exc:  # the job was accepted: it has its one result, a failed one
            _report("load" if is_load else "store", exc)
            self._finish(metadata.job_id, job, None)

    def _measure(self, job: _Job) -> None:
        if job.is_load:
            self._deadlines.loads(job.request)
        else:
            known = any(self._engine.contains(key) for key in job.keys)
            self._deadlines.offers(job.request, job.keys, known=known)

    def get_finished_jobs(self) -> list[Any]:
        """The results since the last call: of every job exactly one, of jobs that vLLM gave alone."""
        self._collect()
        if not self._ready:
            return []
        ready, self._ready = self._ready, []
        return ready

    def has_pending_work(self) -> bool:
        """Whether there are jobs without a result that vLLM has taken, or there was no step yet.

        (vLLM asks for metrics with its steps alone: without one of its own accord, /metrics would have no series of the
        tier before the first request.)
        """
        return bool(self._jobs or self._ready) or not self._stepped

    def _collect(self) -> None:
        """Turns the engine's results into vLLM's."""
        if self._closed:
            return
        try:
            self._engine.begin()
        except Exception as exc:  # they begin of themselves soon
            _report("begin", exc)
        self._take_results()

    def _take_results(self) -> None:
        try:
            results = self._engine.poll()
        except Exception as exc:  # the next step asks again
            _report("poll", exc)
            return
        for result in results:
            if (job := self._jobs.get(result.job_id)) is not None:  # others were given up at a drain
                self._finish(result.job_id, job, result)

    def _finish(self, job_id: int, job: _Job, result: TransferResult | None) -> None:
        """A job has ended. None: it did not begin, or was given up."""
        del self._jobs[job_id]
        self._ended = True
        complete = bool(result and result.bitmap.all())
        # To vLLM's detector a failed store is a sign of pressure; one that the configuration leaves out is none.
        errors = () if result is None or job.is_load else result.errors
        left_out = bool(errors) and all(error.status.is_policy for error in errors)
        keys, missing = (job.keys, []) if complete else _split(job.keys, result)
        if not job.is_load:
            self._hit_again(keys)
            if self._events is not None:
                self._events.stored(keys)
        elif not complete and (failed := self._failed.get(job.request)) is not None:
            failed.update(missing)
            self._journal.await_store(missing)
        if result is not None and result.nbytes:
            self._told.observe("load" if job.is_load else "store", self._engine.io_mode, result.seconds)
        self._ready.append(
            compat.job_result(
                job_id,
                complete or left_out,
                keys if job.is_load and keys and not complete else None,
                None if result is None else result.seconds,
                None if result is None else result.nbytes,
            )
        )

    def _take_stored(self) -> None:
        """Takes note of failed keys that were stored since, by whatever process."""
        self._hit_again(self._journal.take_stored())

    def _hit_again(self, keys: Collection[bytes]) -> None:
        if any(self._failed.values()):
            for failed in self._failed.values():
                failed.difference_update(keys)
            self._journal.forget(keys)  # a store that found them there inserts nothing

    # ---- events ------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        """KV events: chunks that this process's stores put there, and those of them that are gone since."""
        if self._events is None or self._closed:
            return ()
        try:
            told = self._events.take(self._roots.digests)
        except Exception as exc:  # some are not told: events are hints
            _report("events", exc)
            return ()
        return [compat.event(keys, removed=removed, owner=OWNER, locality=self.locality) for removed, keys in told]

    # ---- drain, reset, shutdown --------------------------------------------------------------------------------

    def on_schedule_end(self, context: Any) -> None:
        """The end of a step: what it submitted begins."""
        self._stepped = True
        try:
            if not self._closed:
                self._engine.begin()
            if self._events is None:  # which does it where there is one
                self._journal.digests = self._roots.digests
            self._take_stored()
        except Exception as exc:  # jobs begin of themselves soon, and the next step is as good for the rest
            _report("step", exc)

    def drain_jobs(self) -> None:
        """Wait until every job has its result; what has none after drain_timeout_s is cancelled.

        No row is touched after this. vLLM drains where it resets its prefix cache (sleep, resume, new weights): with
        reset_on_drain all that is stored becomes a miss here, for other processes too.
        """
        if self._closed:
            return
        try:
            if not self._engine.drain(self.config.drain_timeout_s):
                for job_id in list(self._jobs):
                    self._engine.cancel(job_id)
                self._wait_for_rows()
        except Exception as exc:  # what has not ended is given up below
            _report("drain", exc)
        self._collect()
        for job_id, job in list(self._jobs.items()):  # cancelled, so the engine does not touch their rows any more
            self._finish(job_id, job, None)
        if self.config.reset_on_drain:
            self._old = set(self._failed)
            if not self._reset.ask(self.config.drain_timeout_s):
                engine_reporter.warn("reset", "a reset is not written down yet: until it is, all is a miss here")

    def _wait_for_rows(self) -> None:
        """Wait until no cancelled job can write a row any more: for loads, until they have their results.

        That takes a moment, unless a read straight into a row (rows="straight") does not return: then as long as it
        does not. The row's next owner would find other bytes in it otherwise.
        """
        while not self._engine.drain(CANCEL_S):
            self._collect()
            if not any(job.is_load for job in self._jobs.values()):
                return
            engine_reporter.warn("drain", "a drain waits for reads into rows that have not returned")

    def shutdown(self) -> None:
        """End all jobs, give the roots back and let go of vLLM's memory. Twice is fine. The jobs have their results.

        Where a read straight into a row has not returned the memory stays until the process ends: vLLM says in its log
        that it could not unmap it.
        """
        if self._closed:
            return
        self._closed = True
        self._reset.close()
        try:
            if self._engine.shutdown() and self.config.engine.rows == "straight":
                _KEPT.append(memoryview(self._view))
            self._take_results()
        except Exception as exc:  # such as a fork's: what is open ends below
            _report("shutdown", exc)
        for job_id, job in list(self._jobs.items()):
            self._finish(job_id, job, None)
        try:
            self._roots.close()
        except Exception as exc:  # vLLM is ending, and goes on with that
            _report("close", exc)

    # ---- metrics -----------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """All kvxfer_* series, declared for vLLM's /metrics."""
        return definitions()

    def get_stats(self) -> Any | None:
        """What has changed since the last call: at most every STATS_S, and with the last job's end.

        (vLLM may make no step after that, until the next request: what was not told would be missing until then.)
        """
        now = time.monotonic()
        if self._closed or (now - self._told_at < STATS_S and (self._jobs or not self._ended)):
            return None
        self._told_at, self._ended = now, False
        try:
            return self._told.news(self._engine.metrics())
        except Exception as exc:  # told with the next: they are totals
            _report("metrics", exc)
            return None


def _split(keys: tuple[bytes, ...], result: TransferResult | None) -> tuple[tuple[bytes, ...], list[bytes]]:
    """The keys of a job that arrived, wherever they are named in it, and those that did not."""
    arrived = [False] * len(keys) if result is None else result.bitmap
    here: list[bytes] = []
    missing: list[bytes] = []
    for key, bit in zip(keys, arrived, strict=True):
        (here if bit else missing).append(key)
    lost = set(missing)
    return tuple(key for key in here if key not in lost), missing


def _row_bytes(view: memoryview) -> int:
    """Of a row of the primary view. ConfigError where rows are not adjacent, or there are none."""
    if view.ndim != 2 or not view.c_contiguous or not view.nbytes:
        raise ConfigError(
            f"the primary tier's view has shape {view.shape} and strides {view.strides}: want adjacent rows, at least "
            "one of them (is cpu_bytes_to_use smaller than a chunk?)"
        )
    return view.nbytes // len(view)


def _report(what: str, exc: Exception) -> None:
    """None of them reaches vLLM."""
    engine_reporter.failed(f"tier {what}", f"tier: {what} failed", exc)
