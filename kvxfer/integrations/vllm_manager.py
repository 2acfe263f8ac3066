"""The scheduler's half of KvxferConnector: vLLM's OffloadingManager over a coordinator of ranks.

Every method runs on the scheduler's thread, and none but `reset_cache` and `shutdown` waits for anything. vLLM dies of
what a manager raises, hence the broad excepts: each answers as the worst of the storage would, and `_report` keeps a
defect's trace.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from kvxfer.integrations import vllm_compat as compat
from kvxfer.integrations.vllm_compat import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from kvxfer.integrations.vllm_deadline import patience
from kvxfer.integrations.vllm_events import EventLog
from kvxfer.integrations.vllm_journal import Journal
from kvxfer.integrations.vllm_metrics import Told
from kvxfer.integrations.vllm_roots import CoordinatedRoots
from kvxfer.integrations.vllm_setup import Setup
from kvxfer.jobs import LOAD, STORE
from kvxfer.layout import kvx1_slot
from kvxfer.pace import Pace
from kvxfer.report import engine_reporter
from kvxfer.store import Access
from kvxfer.tickets import Report, SpreadTicket, Ticket

__all__ = ["KvxferManager", "SlotsSpec"]

OWNER = "kvxfer"  # what KV events say
STATS_S = 0.25  # metrics are told at most this often
_DIRECTIONS = {LOAD: "load", STORE: "store"}


@dataclass
class SlotsSpec(LoadStoreSpec):
    """Where the chunks of a job are on the drive: what vLLM carries from the scheduler to every rank."""

    ticket: Ticket | SpreadTicket


class KvxferManager(OffloadingManager):
    """Which chunks are on the drive, and what becomes of those under way: by the ranks' reports alone.

    Raises:
        ConfigError, FormatError, StoreError, IOFault: a root cannot be opened; says why.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, tier = setup, setup.config.tier
        self.pace = Pace()  # of this server; the connector feeds it
        self._locality = None if tier.locality is None else compat.Locality(tier.locality)
        journal = Journal()
        events = tier.enable_kv_events and setup.events
        if tier.enable_kv_events and not events:
            engine_reporter.warn("events", "enable_kv_events is set, but vLLM's KV events are off: there are none")
        self._roots = CoordinatedRoots(
            tier,
            setup.namespace,
            lambda alignment: kvx1_slot(setup.geometry, blocks_per_chunk=setup.blocks_per_chunk, alignment=alignment),
            journal,
            ranks=setup.shard.tp_size,
            at_hand=setup.step_chunks,
            stored=self._stored,
        )
        self._coordinator = self._roots.coordinator
        self._events = EventLog(journal, self._coordinator.digests, self._coordinator.contains) if events else None
        self._broken: set[str] = set()  # requests for which a call of ours failed: they miss
        self._live: set[str] = set()  # requests that have not finished
        self._left_out: set[str] = set()  # those of them of which nothing is stored or loaded
        self._told, self._told_at = Told(), -STATS_S
        self._closed = False

    # ---- requests --------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """Chunks of a request are offered for storing also where they were loaded.

        What failed to load is computed anew, and only so is it stored anew; what is there drops out.
        """
        self._live.add(req_context.req_id)
        self._coordinator.begin(req_context.req_id, Access(compat.key_positions(req_context)))
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: Any) -> None:
        """What failed for it is forgotten."""
        self._coordinator.end(req_context.req_id)
        self._broken.discard(req_context.req_id)
        self._left_out.discard(req_context.req_id)
        self._live.discard(req_context.req_id)

    def leave_out(self, request: str) -> None:
        """Nothing of this request is stored or loaded, until it has finished: its keys do not say all."""
        self._left_out.add(request)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS, at once, from memory. MISS for a chunk that failed for this request and was not stored since.

        (vLLM looks up again as soon as a request's first chunk failed: a hit on it would be loaded again, for ever.)
        """
        try:
            request = req_context.req_id
            allowed = getattr(req_context, "load_tier_filter", None)
            if (
                request in self._broken
                or request in self._left_out
                or (allowed is not None and not allowed.allows(compat.Medium.STORAGE, self._locality))
            ):
                return LookupResult.MISS
            return LookupResult.HIT if self._coordinator.lookup(key, request) else LookupResult.MISS
        except Exception as exc:  # a lookup that raises kills the engine: a miss
            _report("lookup", exc)
            return LookupResult.MISS

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """From the drive."""
        return compat.disk_source()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Counts as a use."""
        try:
            self._coordinator.touch(keys, req_context.req_id)
        except Exception as exc:  # a use that is not counted
            _report("touch", exc)

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Where these chunks are; they stay there until all ranks have settled them."""
        keys = list(keys)
        try:
            return SlotsSpec(self._coordinator.load(keys, req_context.req_id, seconds=self._seconds(len(keys))))
        except Exception as exc:  # nothing arrives, and nothing of this request is asked for again
            _report("load", exc)
            self._broken.add(req_context.req_id)
            return SlotsSpec(self._coordinator.nowhere(keys))

    def _seconds(self, chunks: int) -> float | None:
        """How long a load of so many chunks may take: no longer than recomputing them would."""
        tier = self._setup.config.tier
        given = tier.recompute_tokens_per_s
        rate = self.pace.tokens_per_s if isinstance(given, str) else given
        return patience(tier.deadline_s, rate, chunks * self._setup.tokens_per_chunk)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Slots for what is not there yet; what there are none for is dropped and counted."""
        if req_context.req_id in self._left_out:
            return PrepareStoreOutput(keys_to_store=[], store_spec=LoadStoreSpec(), evicted_keys=[])
        try:
            chosen, ticket = self._coordinator.store(list(keys), req_context.req_id)
        except Exception as exc:  # nothing is stored
            _report("store", exc)
            return None
        spec = LoadStoreSpec() if ticket is None else SlotsSpec(ticket)
        return PrepareStoreOutput(keys_to_store=chosen, store_spec=spec, evicted_keys=[])

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Nothing: what the ranks report decides, since after a reset vLLM does not call this."""

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Nothing, as `complete_load`."""

    def settle(self, report: Report) -> Collection[str]:
        """Takes in what the ranks say; to be called before vLLM hears that the jobs are done.

        Returns:
            Requests that did not get all that was to be loaded for them.
        """
        try:
            return self._coordinator.settle(report)
        except Exception as exc:  # some slots stay taken, and what failed for whom is not known: nobody asks again
            _report("report", exc)
            self._broken |= self._live
            return ()

    def has_pending_work(self) -> bool:
        """Whether there are jobs that not all ranks have settled, or chunks that are being published."""
        try:
            return not self._closed and self._coordinator.is_busy
        except Exception as exc:  # what was to be counted is not
            _report("pending", exc)
            return False

    # ---- events, reset, shutdown -----------------------------------------------------------------------------------

    def _stored(self, keys: list[bytes]) -> None:
        if self._events is not None:
            self._events.stored(keys)

    def take_events(self) -> Iterable[Any]:
        """KV events: chunks that this server stored, and those of them that are gone since."""
        if self._events is None or self._closed:
            return ()
        try:
            told = self._events.take(self._coordinator.digests)
        except Exception as exc:  # some are not told: events are hints
            _report("events", exc)
            return ()
        return [compat.event(keys, removed=removed, owner=OWNER, locality=self._locality) for removed, keys in told]

    def reset_cache(self) -> None:
        """vLLM's prefix cache is reset, for new weights, or for sleep or pause, and it does not say for which.

        With reset_on_drain all that is stored becomes a miss here, for other processes too. Requests that go on are
        left out then: vLLM offers all their chunks once more, also those computed with the old weights.
        """
        if self._closed:
            return
        try:
            timeout = self._setup.config.tier.drain_timeout_s
            if self._setup.config.tier.reset_on_drain:  # first: whatever else fails
                self._left_out |= self._live
                self._coordinator.reset(timeout)
            self._coordinator.drain(timeout)
        except Exception as exc:  # of a store that is closed
            _report("reset", exc)

    def shutdown(self) -> None:
        """Publish what all ranks have sealed, and give the roots back. Bounded; twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            self._coordinator.shutdown()
        finally:
            self._roots.close()

    def get_stats(self) -> Any | None:
        """What has changed since the last call, at most every STATS_S."""
        now = time.monotonic()
        if self._closed or now - self._told_at < STATS_S:
            return None
        self._told_at = now
        try:
            for direction, path, seconds in self._coordinator.take_seconds():
                self._told.observe(_DIRECTIONS[direction], path, seconds)
            return self._told.news(self._coordinator.metrics())
        except Exception as exc:  # told with the next: they are totals
            _report("metrics", exc)
            return None


def _report(what: str, exc: Exception) -> None:
    """None of them reaches vLLM."""
    engine_reporter.failed(f"connector {what}", f"connector: {what} failed", exc)
