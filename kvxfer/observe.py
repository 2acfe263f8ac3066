"""What an engine and its store can be seen doing: the table of all series, and what turns results into counts.

A chunk of an accepted job counts once, when its job's one result is published, under one outcome; so the outcomes add
up to the chunks that were accepted, and polling changes nothing.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.breaker import BreakerState
from kvxfer.device.host_carrier import ENGINES as COPY_ENGINES
from kvxfer.drive_writes import DRIVE_WRITTEN
from kvxfer.io.ladder import REASONS, RUNGS
from kvxfer.io.modes import PATHS
from kvxfer.jobs import LOAD, NS, STORE, ChunkError, Status
from kvxfer.metrics import Kind, Series, Tally, Value, Values, add_up, expose
from kvxfer.report import engine_reporter
from kvxfer.results import PendingJob, TransferResult
from kvxfer.store import StoreStats
from kvxfer.store.stats import EVICTION_REASONS, INVALIDATION_REASONS

if TYPE_CHECKING:
    from kvxfer.intake import Intake
    from kvxfer.nvml import GpuMonitor

DIRECTIONS = {LOAD: "load", STORE: "store"}
_WHY = tuple(status.name.lower() for status in Status if status not in (Status.OK, Status.PENDING))
_NAMES = {status: status.name.lower() for status in Status}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# What an errno says about the storage.
ERRNO_CLASSES = {
    "device": (errno.EIO, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.ETIMEDOUT),
    "full": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "stale": (errno.ESTALE, errno.ENOENT, errno.EBADF),
    "refused": (errno.EROFS, errno.EACCES, errno.EPERM, errno.EINVAL),
    "resources": (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOBUFS),
}
_CLASS_OF = {number: name for name, numbers in ERRNO_CLASSES.items() for number in numbers}
_STORAGE_FAILED = (Status.IO, Status.LOST, Status.STALLED)


def _counter(name: str, help: str, unit: str = "", **labels: Iterable[str]) -> Series:
    return Series(name, Kind.COUNTER, help, unit, tuple((label, tuple(of)) for label, of in labels.items()))


def _gauge(name: str, help: str, unit: str = "", **labels: Iterable[str]) -> Series:
    return Series(name, Kind.GAUGE, help, unit, tuple((label, tuple(of)) for label, of in labels.items()))


_BOTH = tuple(DIRECTIONS.values())
_LOAD_OUTCOMES, _STORE_OUTCOMES = ("hit", *_WHY), ("stored", "present", *_WHY)

# Counted by an engine itself, as its jobs end.
COUNTED = (
    _counter("kvxfer_lookup_keys_total", "Keys that lookup() was asked for.", "keys"),
    _counter("kvxfer_lookup_hit_keys_total", "Keys that lookup() claimed to be stored; a load proves it.", "keys"),
    _counter("kvxfer_jobs_total", "Jobs that have their result.", "jobs", direction=_BOTH),
    _counter(
        "kvxfer_load_chunks_total",
        "Chunks of loads by outcome; hit: verified and in the pages. Verification failed: truncated, bad_trailer, "
        "foreign, bad_sum. Cut by the deadline: cut.",
        "chunks",
        outcome=_LOAD_OUTCOMES,
    ),
    _counter(
        "kvxfer_store_chunks_total",
        "Chunks of stores by outcome; stored: written for this job; present: there already, or another job's. "
        "Left out: not_admitted (first offer), budget (of writes), backlog (max_queue_s), dropped (queue full), "
        "no_space, off, breaker, index, busy, gap (a chunk before it in its request was left out or failed).",
        "chunks",
        outcome=_STORE_OUTCOMES,
    ),
    _counter("kvxfer_load_bytes_total", "Payload of verified hits, by path.", "bytes", path=PATHS),
    _counter("kvxfer_store_bytes_total", "Payload written by stores, by path.", "bytes", path=PATHS),
    _counter(
        "kvxfer_salvaged_chunks_total", "Chunks in the leading run of loads that were not complete: kept.", "chunks"
    ),
    _counter("kvxfer_salvaged_tokens_total", "Tokens of these chunks' requested blocks.", "tokens"),
    _counter("kvxfer_gap_chunks_total", "Chunks that arrived beyond the first gap of a load.", "chunks"),
    _counter("kvxfer_gap_tokens_total", "Tokens of these chunks' requested blocks.", "tokens"),
    _counter(
        "kvxfer_io_errors_total",
        "Chunks that ended with an errno, by what it says about the storage.",
        "chunks",
        direction=_BOTH,
        kind=(*ERRNO_CLASSES, "other"),
    ),
    Series(
        "kvxfer_load_seconds",
        Kind.HISTOGRAM,
        "From submit to result of loads that reached the storage, by path.",
        "seconds",
        (("path", PATHS),),
        _SECONDS,
    ),
    Series(
        "kvxfer_store_seconds",
        Kind.HISTOGRAM,
        "From submit to result of stores that reached the storage, by path.",
        "seconds",
        (("path", PATHS),),
        _SECONDS,
    ),
)

# Read off an engine and its native runner when they are asked.
READ = (
    _counter("kvxfer_device_read_bytes_total", "Read from files, trailers and padding included.", "bytes"),
    _counter("kvxfer_device_written_bytes_total", "Written to files, trailers and padding included.", "bytes"),
    _counter(
        "kvxfer_device_seconds_total",
        "Spent in reads and writes that have returned, over all threads: by kvxfer_threads the busy share.",
        "seconds",
        direction=_BOTH,
    ),
    _counter("kvxfer_verified_segments_total", "Segments compared with their checksums.", "segments"),
    _counter("kvxfer_lost_calls_total", "Storage calls given up after io_timeout_s.", "calls", direction=_BOTH),
    _counter("kvxfer_late_returns_total", "Such calls that have returned since.", "calls"),
    _counter("kvxfer_breaker_opened_total", "Times that the circuit breaker opened.", "times", direction=_BOTH),
    _gauge("kvxfer_queued_chunks", "Chunks of jobs that have no result yet.", "chunks", direction=_BOTH),
    _gauge(
        "kvxfer_store_queue_seconds", "How long the stores that are queued will take, as fast as of late.", "seconds"
    ),
    _gauge("kvxfer_open_jobs", "Jobs that have no result yet.", "jobs"),
    _gauge(
        "kvxfer_io_rung",
        "Engines whose pages in a device's memory go to the drive this way: direct (GPUDirect Storage), compat "
        "(kvikio's compat mode), host (pinned memory).",
        rung=RUNGS,
    ),
    _counter(
        "kvxfer_io_steps_down_total", "Ways that did not work when such an engine started.", "rungs", reason=REASONS
    ),
    _counter(
        "kvxfer_copies_total",
        "Batches of chunks between pages of a device and pinned memory, by copy engine: pack (one large copy), zero "
        "(kernels reach the pinned memory).",
        "batches",
        direction=_BOTH,
        copy_engine=COPY_ENGINES,  # not "engine": vLLM gives every series a label of that name
    ),
    _gauge("kvxfer_threads", "I/O threads in service.", "threads"),
    _gauge("kvxfer_busy_threads", "Of these, those that run a chunk.", "threads"),
    _gauge("kvxfer_lost_threads", "Threads in calls that were given up and have not returned.", "threads"),
    _gauge("kvxfer_staging_bytes", "Memory in the threads' buffers, the lost ones' included.", "bytes"),
    _gauge("kvxfer_staging_peak_bytes", "The most that it has been.", "bytes"),
    _gauge("kvxfer_staging_limit_bytes", "The most that it can be.", "bytes"),
    _gauge("kvxfer_leaked_staging_bytes", "Of it, what is under calls that were given up.", "bytes"),
    _gauge("kvxfer_bays", "Bays in service between pages of a device and the drive.", "bays"),
    _gauge("kvxfer_bay_bytes", "Memory of the device in these bays.", "bytes"),
    _gauge("kvxfer_held_bays", "Of these bays, those under writes that were given up.", "bays"),
    _gauge("kvxfer_leaked_bays", "Bays that a device which failed may use for ever.", "bays"),
    _gauge("kvxfer_lost_devices", "Engines whose device was lost: nothing is moved.", "engines"),
    _gauge(
        "kvxfer_breaker_state",
        "Engines whose breaker is in this state.",
        direction=_BOTH,
        state=tuple(state.value for state in BreakerState),
    ),
    _gauge("kvxfer_switched_off", "Engines that are turned off.", "engines"),
)

# Of the store: name of the field of StoreStats -> series.
_STORE_FIELDS = {
    "capacity_bytes": _gauge("kvxfer_capacity_bytes", "The cap on all that the root takes.", "bytes"),
    "disk_bytes": _gauge("kvxfer_capacity_used_bytes", "What slabs, index and others' files take of it.", "bytes"),
    "live_bytes": _gauge("kvxfer_live_bytes", "Slots that hold an entry.", "bytes"),
    "slab_bytes": _gauge("kvxfer_slab_bytes", "Slab files.", "bytes"),
    "index_bytes": _gauge("kvxfer_index_bytes", "The index.", "bytes"),
    "entries": _gauge("kvxfer_entries", "Chunks that can be looked up.", "chunks"),
    "max_entries": _gauge("kvxfer_max_entries", "Chunks that the index can name.", "chunks"),
    "unreachable_entries": _gauge(
        "kvxfer_unreachable_chunks",
        "Entries that no lookup gets to, since a chunk before them is missing; by kvxfer_entries their share.",
        "chunks",
    ),
    "pinned_entries": _gauge("kvxfer_pinned_entries", "Entries in use by jobs.", "chunks"),
    "reserved_slots": _gauge("kvxfer_reserved_slots", "Slots that are being written.", "slots"),
    "quarantined_slots": _gauge("kvxfer_quarantined_slots", "Slots under a write that was given up.", "slots"),
    "free_slots": _gauge("kvxfer_free_slots", "Free slots in the slabs there are.", "slots"),
    "slabs": _gauge("kvxfer_slabs", "Slab files.", "files"),
    "namespaces": _gauge("kvxfer_namespaces", "Namespaces that this process has registered.", "namespaces"),
    "processes": _gauge("kvxfer_processes", "Processes that have the root open.", "processes"),
    "foreign_slots": _gauge("kvxfer_foreign_slots", "Slots that other processes are writing.", "slots"),
    "weight_epoch": _gauge("kvxfer_weight_epoch", "The root's weight epoch."),
    "write_budget_bytes_per_s": _gauge(
        "kvxfer_write_budget_bytes_per_s",
        "What may be written a second, by all processes of the root together; infinity: there is no budget. What is "
        "written: kvxfer_device_written_bytes_total.",
    ),
    "write_budget_left_bytes": _gauge(
        "kvxfer_write_budget_left_bytes", "Of it, what this process may write at once; infinity: no budget.", "bytes"
    ),
    "commits": _counter("kvxfer_committed_chunks_total", "Chunks that were published.", "chunks"),
    "replacements": _counter(
        "kvxfer_replaced_chunks_total", "Of these, those that took the place of one with fewer blocks.", "chunks"
    ),
    "duplicates": _counter("kvxfer_duplicate_chunks_total", "Chunks written that were there already.", "chunks"),
    "failed_commits": _counter("kvxfer_failed_commits_total", "Chunks that the index refused.", "chunks"),
    "failed_flushes": _counter(
        "kvxfer_failed_flushes_total", "Flushes of slabs that failed under durability power; costs stores.", "times"
    ),
    "refused_reservations": _counter("kvxfer_refused_slots_total", "Slots asked for and not given.", "slots"),
    "slabs_created": _counter("kvxfer_created_slabs_total", "Slab files made.", "files"),
    "slabs_removed": _counter("kvxfer_removed_slabs_total", "Slab files removed.", "files"),
    "slab_errors": _counter(
        "kvxfer_slab_errors_total", "Slab files that could not be made, opened or removed.", "files"
    ),
    "index_errors": _counter("kvxfer_index_errors_total", "Transactions that failed.", "transactions"),
    "index_conflicts": _counter(
        "kvxfer_index_conflicts_total", "Records that the index had and memory had not.", "records"
    ),
    "index_recoveries": _counter("kvxfer_index_recoveries_total", "Times the index was written anew.", "times"),
    "rebuilds": _counter("kvxfer_index_rebuilds_total", "Times the index was rebuilt from the slots.", "times"),
    "busy": _counter("kvxfer_root_busy_total", "Times another process kept the root locked for too long.", "times"),
    "namespace_errors": _counter(
        "kvxfer_namespace_errors_total", "Namespace files that could not be written.", "files"
    ),
    "scrubbed_chunks": _counter("kvxfer_scrubbed_chunks_total", "Chunks that a scrub found right.", "chunks"),
    "scrubbed_bytes": _counter("kvxfer_scrubbed_bytes_total", "Their payload.", "bytes"),
    "unreadable_chunks": _counter(
        "kvxfer_unreadable_chunks_total",
        "Chunks that the drive did not give a scrub; they stay, and each pass counts them again.",
        "chunks",
    ),
    "scrub_ended": _gauge(
        "kvxfer_last_scrub_timestamp_seconds",
        "When scrubs, of any process, last came to the end of a pass over all of the root, as known within ten "
        "minutes; seconds since 1970, 0: never. Of several roots the one that is longest ago.",
        "seconds",
    ),
}
_STORE_REASONS = {
    "evictions": (
        _counter("kvxfer_evicted_chunks_total", "Chunks that made way for others.", "chunks", reason=EVICTION_REASONS),
        EVICTION_REASONS,
    ),
    "invalidations": (
        _counter(
            "kvxfer_invalidated_chunks_total",
            "Chunks taken out because their bytes were not what they should be, or because nobody wants them any more: "
            "expired (ttl_s), removed (kvxfer gc, reset).",
            "chunks",
            reason=INVALIDATION_REASONS,
        ),
        INVALIDATION_REASONS,
    ),
}

_LEAST = ("kvxfer_last_scrub_timestamp_seconds",)  # of several stores not the sum, but the least

ENGINE_SERIES = (*COUNTED, *READ)
STORE_SERIES = (*_STORE_FIELDS.values(), *(series for series, _ in _STORE_REASONS.values()))
SERIES = (*ENGINE_SERIES, *STORE_SERIES)


@dataclass(frozen=True, slots=True)
class Metrics:
    """All series of one engine and its store at one moment."""

    engine: Values
    store: Values
    store_id: int  # the same for engines that share a store
    drives: Values = field(default_factory=dict)  # of DRIVE_WRITTEN; empty: not known

    def value(self, name: str, **labels: str) -> float:
        """A counter or gauge; a histogram's number of observations. KeyError where there is no such series."""
        series = next((series for series in SERIES if series.name == name), None)
        if series is None or labels.keys() != {label for label, _ in series.labels}:
            raise KeyError(f"no series {name} with labels {sorted(labels)}")
        key = name, tuple(labels[label] for label, _ in series.labels)
        found = self.engine[key] if key in self.engine else self.store[key]
        return sum(found[:-1]) if isinstance(found, tuple) else found


def together(each: Sequence[Metrics], store_id: int) -> Metrics:
    """The sums of several that share no store, as of one."""
    drives = {key: value for one in each for key, value in one.drives.items()}
    return Metrics(add_up(one.engine for one in each), add_up_stores(one.store for one in each), store_id, drives)


def render_metrics(*metrics: Metrics, gpus: GpuMonitor | None = None) -> str:
    """What engines of this process tell, in the text format of Prometheus, and the last that `gpus` has seen.

    Engines add up, gauges too: `kvxfer_breaker_state` says how many of them have their breaker in a state. A store that
    several of them share counts once, as the last of them saw it, and so does a drive.
    """
    values = add_up(each.engine for each in metrics)
    values |= add_up_stores({each.store_id: each.store for each in metrics}.values())
    drives = {key: value for each in metrics for key, value in each.drives.items()}
    known = replace(DRIVE_WRITTEN, labels=(("drive", tuple(sorted(drive for _, (drive,) in drives))),))
    return (expose((*SERIES, known), values | drives) if metrics else "") + ("" if gpus is None else gpus.render())


def add_up_stores(parts: Iterable[Values]) -> dict[tuple[str, tuple[str, ...]], Value]:
    """The values of several stores as those of one."""
    return add_up(parts, _LEAST)


class Observer:
    """Counts what one engine does. Whoever calls `settle` and `counted` holds the engine's lock."""

    def __init__(self, tokens_per_block: float, path: str) -> None:
        self._tally = Tally(COUNTED)
        self._tokens_per_block = tokens_per_block
        self._path = path
        self._looking = threading.Lock()  # of its own: nobody keeps it for long
        self._asked = self._claimed = 0

    def looked_up(self, asked: int, claimed: int) -> None:
        """A lookup of `asked` keys answered `claimed`."""
        with self._looking:  # plain numbers: of all calls these are the most frequent
            self._asked += asked
            self._claimed += claimed

    def settle(self, job: PendingJob, result: TransferResult) -> None:
        """A job has its result."""
        add, direction = self._tally.add, DIRECTIONS[job.direction]
        add("kvxfer_jobs_total", 1, direction)
        chunks, arrived = f"kvxfer_{direction}_chunks_total", result.bitmap.count()
        if job.direction == LOAD:
            add(chunks, arrived, "hit")
            if arrived and arrived < result.bitmap.n:
                self._salvage(job, result)
        else:
            moved = min(job.moved, arrived)
            add(chunks, moved, "stored")
            add(chunks, arrived - moved, "present")
        add(chunks, max(0, result.bitmap.n - arrived - len(result.errors)), "miss")
        for (status, number), count in Counter((error.status, error.errno) for error in result.errors).items():
            add(chunks, count, _NAMES[status])
            if status is Status.IO:
                add("kvxfer_io_errors_total", count, direction, _CLASS_OF.get(number, "other"))
        add(f"kvxfer_{direction}_bytes_total", result.nbytes, self._path)
        if job.native_ids:
            self._tally.observe(f"kvxfer_{direction}_seconds", result.seconds, self._path)

    def _salvage(self, job: PendingJob, result: TransferResult) -> None:
        packed = result.bitmap.bits.to_bytes(-(-result.bitmap.n // 8), "little")
        here = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: result.bitmap.n].astype(bool)
        blocks = (job.block_ids >= 0).sum(axis=1) * here
        prefix = result.bitmap.leading_run()
        for name, chunks, tokens in (
            ("salvaged", prefix, blocks[:prefix].sum()),
            ("gap", int(here.sum()) - prefix, blocks[prefix:].sum()),
        ):
            self._tally.add(f"kvxfer_{name}_chunks_total", chunks)
            self._tally.add(f"kvxfer_{name}_tokens_total", int(tokens * self._tokens_per_block))

    def counted(self) -> dict[tuple[str, tuple[str, ...]], Value]:
        """What was counted so far."""
        looked_up = {("kvxfer_lookup_keys_total", ()): self._asked, ("kvxfer_lookup_hit_keys_total", ()): self._claimed}
        return self._tally.values() | looked_up


def engine_values(
    stats: Mapping[str, int],
    queued_chunks: Mapping[int, int],
    staging_limit: int,
    intake: Intake,
) -> dict[tuple[str, tuple[str, ...]], Value]:
    """The values of READ.

    Args:
        stats: TransferEngine.stats().
        queued_chunks: by direction.
        staging_limit: bytes.
    """
    breakers = intake.states()
    values: dict[tuple[str, tuple[str, ...]], Value] = {
        ("kvxfer_device_read_bytes_total", ()): stats["bytes_read"],
        ("kvxfer_device_written_bytes_total", ()): stats["bytes_written"],
        ("kvxfer_device_seconds_total", ("load",)): stats["read_ns"] / NS,
        ("kvxfer_device_seconds_total", ("store",)): stats["write_ns"] / NS,
        ("kvxfer_verified_segments_total", ()): stats["segments_verified"],
        ("kvxfer_lost_calls_total", ("load",)): stats["lost_calls"] - stats["lost_writes"],
        ("kvxfer_lost_calls_total", ("store",)): stats["lost_writes"],
        ("kvxfer_late_returns_total", ()): stats["late_returns"],
        ("kvxfer_open_jobs", ()): stats["jobs_open"],
        ("kvxfer_threads", ()): stats["threads"],
        ("kvxfer_busy_threads", ()): stats["busy_threads"],
        ("kvxfer_lost_threads", ()): stats["lost_threads"],
        ("kvxfer_staging_bytes", ()): stats["staging_bytes"],
        ("kvxfer_staging_peak_bytes", ()): stats["staging_peak_bytes"],
        ("kvxfer_staging_limit_bytes", ()): staging_limit,
        ("kvxfer_leaked_staging_bytes", ()): stats["leaked_bytes"],
        ("kvxfer_switched_off", ()): int(not intake.enabled),
        ("kvxfer_store_queue_seconds", ()): float(intake.backlog.seconds()),
        ("kvxfer_bays", ()): stats.get("device_bays", 0),  # of a runner over a device
        ("kvxfer_bay_bytes", ()): stats.get("device_bays_bytes", 0),
        ("kvxfer_held_bays", ()): stats.get("device_held_bays", 0),
        ("kvxfer_leaked_bays", ()): stats.get("device_leaked_bays", 0),
        ("kvxfer_lost_devices", ()): stats.get("device_lost", 0),
    }
    for rung in RUNGS:
        values["kvxfer_io_rung", (rung,)] = stats.get(f"rung_{rung}", 0)
    for reason in REASONS:
        values["kvxfer_io_steps_down_total", (reason,)] = stats.get(f"step_{reason}", 0)
    for direction, name in DIRECTIONS.items():
        state, opened = breakers[direction]
        values["kvxfer_queued_chunks", (name,)] = queued_chunks[direction]
        values["kvxfer_breaker_opened_total", (name,)] = opened
        for engine in COPY_ENGINES:
            values["kvxfer_copies_total", (name, engine)] = stats.get(f"copies_{name}_{engine}", 0)
        for each in BreakerState:
            values["kvxfer_breaker_state", (name, each.value)] = int(state is each)
    return values


def store_values(stats: StoreStats) -> dict[tuple[str, tuple[str, ...]], Value]:
    """The values of STORE_SERIES."""
    values: dict[tuple[str, tuple[str, ...]], Value] = {
        (series.name, ()): getattr(stats, name) for name, series in _STORE_FIELDS.items()
    }
    for name, (series, reasons) in _STORE_REASONS.items():
        values |= {(series.name, (reason,)): getattr(stats, name).get(reason, 0) for reason in reasons}
    return values


def report_errors(job: PendingJob, errors: Iterable[ChunkError], root: str) -> None:
    """Say what the storage did wrong, once for each kind of error of a job; a flood is kept back (report.py)."""
    direction = DIRECTIONS[job.direction]
    groups: dict[tuple[Status, int], list[ChunkError]] = {}
    for error in errors:
        if error.status in _STORAGE_FAILED or error.status.is_damage:
            groups.setdefault((error.status, error.errno), []).append(error)
    for (status, number), those in groups.items():
        what = f"{direction} {job.job_id}: {len(those)} of {len(job.keys)} chunks failed; first {those[0]}"
        engine_reporter.warn(
            f"{direction} {_NAMES[status]}" + (f" {errno.errorcode.get(number, number)}" if number else ""),
            what,
            errno=number or None,
            path=those[0].where or None,
            count=len(those),
            # Damage is found, taken out and recomputed, and kvxfer_load_chunks_total has it: nothing is failing.
            level=logging.INFO if status.is_damage else logging.WARNING,
            job=job.job_id,
            root=root,
        )
