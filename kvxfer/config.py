"""What a user may set: one frozen dataclass per room, checked before anything is made on disk."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from kvxfer.errors import ConfigError
from kvxfer.policy import POLICIES
from kvxfer.slot import ALIGNMENT, SlotLayout, round_up

IO_BACKENDS = ("auto", "posix", "uring")
DIRECT_MODES = ("auto", "on", "off")
DURABILITIES = ("none", "process", "power")
ROW_MODES = ("auto", "straight", "staged")
GDS_MODES = ("auto", "gds", "compat", "host")
COPY_ENGINES = ("auto", "pack", "zero")
_MOST_PROGRAMS = 65535

CACHED_BYTES = 256 << 10  # what a core's cache keeps between two passes
STAGING_UNIT = 2 << 20  # bytes: staging is made in huge pages (kHuge in csrc/io_engine.cpp)
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
# What a store may own beside slabs and index: its small files, and those of its namespaces.
_SMALL_MIN, _SMALL_MAX = 128 * _KIB, 2 * _MIB
_SMALL_FIXED = 64 * _KIB  # kvxfer.json, scrub.json, lock, index/state.json, a temporary file and four directories
_SMALL_FILES = 6
_DIRECTORY_ENTRY = 64  # bytes that one more slab's name may cost its directory
_INDEX_MIN, _INDEX_MID, _INDEX_MAX = _MIB, 64 * _MIB, 1 << 40  # the largest can be mapped by any 64-bit process
_MAX_NAMESPACES = 64
_LEAST_CAPACITY = 4 * _MIB
_MAX_TTL_S = 10 * 365 * 86400
SPARE_DESCRIPTORS = 64  # open files of a process beside its store's slabs


def _check_integers(owner: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < least:
            raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")


def _check_seconds(owner: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= 86400:
            raise ConfigError(f"{name}={value!r} must be a number of seconds in {least}..86400")


def _check_amount(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value) or value <= 0):
            raise ConfigError(f"{name}={value!r} must be a positive number, or left out")


def _check_choice(owner: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if not isinstance(value, str) or value not in allowed:  # an array's `in` answers with arrays
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def _check_keys(cls: Any, what: str, raw: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(cls)}
    if unknown := sorted(str(key) for key in raw if key not in known):
        raise ConfigError(f"unknown {what} keys {unknown}; known keys are {sorted(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """One store. Sizes in bytes.

    `capacity_bytes` and `max_files` are hard caps on everything under `root`: slabs, index, headers, small files and
    what an earlier process left behind. `slab_bytes` left out means 1 GiB, or a sixteenth of a smaller capacity,
    rounded down to the alignment; a slot that is larger then gets slabs of one slot each. Given, it must hold a slot.

    Raises:
        ConfigError: a value cannot work; names the value and what is allowed.
    """

    root: Path
    capacity_bytes: int = 64 << 30
    slab_bytes: int | None = None  # largest size of one preallocated file
    max_files: int = 4096
    policy: str = "lru"  # what makes way when it is full: lru | arc | s3fifo (kvxfer/policy)
    # How jobs move bytes: posix (blocking calls on threads) | uring (io_uring, or refuse to open) | auto (posix, which
    # measured at least as fast: docs/adr/0010).
    io: str = "auto"
    direct: str = "auto"  # O_DIRECT: auto (where it works) | on (or refuse to open) | off
    index_map_bytes: int | None = None  # cap of the index file; None: a share of the capacity
    # What outlives what (docs/adr/0014): none (an index that cannot be trusted, as after the machine went down, is
    # begun anew: no open ever scans) | process (the end of processes, however they end; after the machine went down
    # what is whole is found by a scan) | power (a power cut too, and no scan: each commit waits for the device).
    durability: str = "process"
    ttl_s: float | None = None  # chunks that nobody used for so long are removed, at most ten minutes later
    scrub_bytes_per_s: int | None = None  # a thread reads and checks what is stored, again and again, at this rate
    open_timeout_s: float = 60.0  # how long an open waits for a process that has the root locked: it may be scanning it
    # At most so much is written in any stretch of time, shared evenly by the processes that have the root open: bytes a
    # second, or drive-writes-per-day. What goes beyond is dropped and counted. None: any amount.
    write_bytes_per_s: float | None = None
    write_dwpd: float | None = None
    drive_bytes: int | None = None  # size of the drive for write_dwpd; None: as the system says of the one under root
    write_burst_bytes: int | None = None  # what may be written at once after a pause; None: a minute's worth, see below

    def __post_init__(self) -> None:
        if not isinstance(self.root, str | Path) or not str(self.root):
            raise ConfigError(f"root={self.root!r} must be the path of a directory")
        try:
            sound = b"\0" not in os.fsencode(self.root)
        except UnicodeEncodeError:
            sound = False
        if not sound:
            raise ConfigError(f"root={self.root!r} cannot be a path on this system")
        object.__setattr__(self, "root", Path(self.root))
        _check_integers(self, _LEAST_CAPACITY, "capacity_bytes")
        _check_integers(self, _SMALL_FILES + 1, "max_files")
        _check_choice(self, "io", IO_BACKENDS)
        _check_choice(self, "policy", tuple(POLICIES))
        _check_choice(self, "direct", DIRECT_MODES)
        _check_choice(self, "durability", DURABILITIES)
        if self.slab_bytes is not None:
            _check_integers(self, 2 * ALIGNMENT, "slab_bytes")
            if self.slab_bytes % ALIGNMENT:
                raise ConfigError(f"slab_bytes={self.slab_bytes} must be a multiple of {ALIGNMENT}")
        if self.index_map_bytes is not None:
            _check_integers(self, _INDEX_MIN, "index_map_bytes")
            if self.index_map_bytes % ALIGNMENT or self.index_map_bytes > _INDEX_MAX:
                raise ConfigError(
                    f"index_map_bytes={self.index_map_bytes} must be a multiple of {ALIGNMENT}, at most {_INDEX_MAX}"
                )
        _check_seconds(self, 0.0, "open_timeout_s")
        self._check_writes()
        if self.ttl_s is not None and (type(self.ttl_s) not in (int, float) or not 60 <= self.ttl_s <= _MAX_TTL_S):
            raise ConfigError(f"ttl_s={self.ttl_s!r} must be a number of seconds in 60..{_MAX_TTL_S}")
        if self.scrub_bytes_per_s is not None:
            _check_integers(self, 1, "scrub_bytes_per_s")
        self.check_room(0, 0)

    def _check_writes(self) -> None:
        _check_amount(self, "write_bytes_per_s", "write_dwpd")
        for name in ("drive_bytes", "write_burst_bytes"):
            if getattr(self, name) is not None:
                _check_integers(self, 1, name)
        if self.write_bytes_per_s is not None and self.write_dwpd is not None:
            raise ConfigError(
                f"write_bytes_per_s={self.write_bytes_per_s} and write_dwpd={self.write_dwpd}: give one of them"
            )
        if self.drive_bytes is not None and self.write_dwpd is None:
            raise ConfigError(f"drive_bytes={self.drive_bytes} is for write_dwpd, which is left out")
        if self.write_burst_bytes is not None and self.write_bytes_per_s is None and self.write_dwpd is None:
            raise ConfigError(
                f"write_burst_bytes={self.write_burst_bytes} is for a budget: give write_bytes_per_s or write_dwpd"
            )

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Self:
        """The configuration that a parsed file or command line gives.

        Raises:
            ConfigError: an unknown key, a missing root, or a value that cannot work.
        """
        _check_keys(cls, "store", raw)
        if "root" not in raw:
            raise ConfigError("store key 'root' is missing: the directory that the store may fill")
        return cls(**raw)

    @property
    def effective_slab_bytes(self) -> int:
        """`slab_bytes`, or what stands for it when it was left out."""
        if self.slab_bytes is not None:
            return self.slab_bytes
        return max(2 * ALIGNMENT, min(_GIB, self.capacity_bytes // 16) // ALIGNMENT * ALIGNMENT)

    @property
    def effective_index_map_bytes(self) -> int:
        """Most bytes that the index file can reach; taken off the capacity from the start.

        Left out: 1/32 of the capacity up to 64 MiB, then 1/128; at least 1 MiB, at most 1 TiB.
        """
        if self.index_map_bytes is not None:
            return self.index_map_bytes
        share = min(self.capacity_bytes // 32, max(_INDEX_MID, self.capacity_bytes // 128))
        return max(_INDEX_MIN, min(_INDEX_MAX, share // ALIGNMENT * ALIGNMENT))

    @property
    def max_namespaces(self) -> int:
        """Namespace files that may lie in the root at once."""
        return min(_MAX_NAMESPACES, max(1, self.max_files // 16))

    @property
    def namespace_bytes(self) -> int:
        """Bytes that all namespace files may take together."""
        return self._small_bytes - _SMALL_FIXED

    @property
    def keeps_scrubs(self) -> bool:
        """Whether `max_files` has one for scrub.json: there are roots from before there was such a file."""
        return self.max_files > _SMALL_FILES + 1

    @property
    def slab_budget(self) -> tuple[int, int]:
        """(bytes, files) left for slabs once the index, the small files and the namespaces have theirs."""
        files = self.max_files - _SMALL_FILES - self.max_namespaces + (not self.keeps_scrubs)
        names = round_up(_DIRECTORY_ENTRY * min(files, self.capacity_bytes // self.effective_slab_bytes), ALIGNMENT)
        return self.capacity_bytes - self.effective_index_map_bytes - self._small_bytes - names, files

    @property
    def max_slabs(self) -> int:
        """Slabs of `effective_slab_bytes` that there is room for; each takes an open file."""
        nbytes, files = self.slab_budget
        return min(files, nbytes // slab_cost(self.effective_slab_bytes))

    @property
    def descriptors(self) -> int:
        """Open files that a process with this store may need: its slabs, and some to spare."""
        return self.max_slabs + SPARE_DESCRIPTORS

    @property
    def _small_bytes(self) -> int:
        return min(_SMALL_MAX, max(_SMALL_MIN, self.capacity_bytes // 64 // ALIGNMENT * ALIGNMENT))

    def check_room(self, other_bytes: int, other_files: int) -> None:
        """Raises ConfigError unless one slab fits beside `other_bytes` in `other_files` that are not the store's."""
        nbytes, nfiles = self.slab_budget
        cost = slab_cost(self.effective_slab_bytes)
        if nbytes - other_bytes < cost:
            raise ConfigError(
                f"capacity_bytes={self.capacity_bytes} holds no slab of slab_bytes={self.effective_slab_bytes}: "
                f"{max(0, nbytes - other_bytes)} bytes are left beside the index ({self.effective_index_map_bytes}), "
                f"the small files and {other_bytes} bytes of others, a slab takes {cost}"
            )
        if nfiles - other_files < 1:
            raise ConfigError(
                f"max_files={self.max_files} leaves no file for a slab: {self.max_files - nfiles} are for the index, "
                f"the small files and namespaces, {other_files} are others' under {self.root}"
            )


def slab_cost(file_bytes: int) -> int:
    """What a slab file is counted as: its bytes and room for what the file system keeps to find them."""
    return round_up(file_bytes + file_bytes // 256, ALIGNMENT) + ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One transfer engine. Times in seconds, sizes in bytes.

    Raises:
        ConfigError: a value cannot work; names the value and what is allowed.
    """

    io_threads: int = 8  # threads of its jobs: each converts and does I/O. Store.open(writers=...) should be as many
    io_timeout_s: float = 30.0  # a storage call that runs longer is given up and its thread replaced
    max_lost_threads: int = 8  # given-up threads that are replaced; past that the tier is off
    max_queued_store_chunks: int = 4096  # further stores are dropped and counted
    max_queued_load_chunks: int = 65536  # further loads are misses
    # Further stores are dropped while those queued would take longer than this, as fast as the device took the last
    # ones. None: max_queued_store_chunks alone bounds them.
    max_queue_s: float | None = None
    # A chunk is stored when its key is offered for the second time, as far as so many keys are remembered (and up to
    # twice as many; 170 bytes each). 0: at the first.
    second_touch_names: int = 0
    # A read; large enough for a drive, small enough for a cache while it is summed. At most CACHED_BYTES in memory.
    read_piece_bytes: int = 1 << 20
    # Host rows: straight (the drive reads and writes their own memory, where alignment and no deadline allow it) |
    # staged (by way of a buffer) | auto (straight for stores where files are memory, else staged).
    rows: str = "auto"
    shutdown_timeout_s: float = 5.0
    staging_bytes: int = 1 << 30  # most that its threads' buffers may take, those of given-up threads included
    # Pages in a device's memory: staging there, and as much pinned host memory where transfers go through that. A bay
    # holds the chunks of a batch, at least one; several let batches convert, copy and move at once.
    bays: int = 4
    bay_bytes: int = 32 << 20
    # Their way to the drive: gds (GPUDirect Storage, or an error) | compat (kvikio's compat mode, or an error) | host
    # (pinned memory) | auto (the first of them that a test in the root's directory shows to work).
    gds: str = "auto"
    # Between pages and pinned memory: pack (by staging on the device and one large copy) | zero (kernels read and write
    # the pinned memory) | auto (the faster of the two, as measured). KVXFER_COPY_ENGINE goes before it.
    copy_engine: str = "auto"
    programs: int | None = None  # most of a kernel's at once: what transfers take of a GPU's processors; None: any
    breaker_failures: int = 8  # storage calls in a row that fail until loads (or stores) are turned off; 0: never
    breaker_cooldown_s: float = 1.0  # until they are tried again; doubles each time that fails
    breaker_max_cooldown_s: float = 60.0  # and is never longer than this
    breaker_probe_chunks: int = 2  # chunks that may try at once

    def __post_init__(self) -> None:
        _check_integers(self, 1, "io_threads", "max_queued_store_chunks", "max_queued_load_chunks", "bays")
        _check_integers(self, 0, "max_lost_threads", "breaker_failures", "second_touch_names")
        _check_integers(self, 1, "breaker_probe_chunks")
        _check_integers(self, ALIGNMENT, "read_piece_bytes", "staging_bytes", "bay_bytes")
        _check_choice(self, "rows", ROW_MODES)
        _check_choice(self, "gds", GDS_MODES)
        _check_choice(self, "copy_engine", COPY_ENGINES)
        if self.programs is not None:
            _check_integers(self, 1, "programs")
            if self.programs > _MOST_PROGRAMS:
                raise ConfigError(f"programs={self.programs} must be 1..{_MOST_PROGRAMS}")
        if self.io_threads > 1024:
            raise ConfigError(f"io_threads={self.io_threads} must be 1..1024")
        _check_seconds(self, 0.001, "io_timeout_s", "breaker_cooldown_s", "breaker_max_cooldown_s")
        _check_seconds(self, 0.0, "shutdown_timeout_s")
        if self.max_queue_s is not None:
            _check_seconds(self, 0.001, "max_queue_s")
        if self.breaker_max_cooldown_s < self.breaker_cooldown_s:
            raise ConfigError(
                f"breaker_max_cooldown_s={self.breaker_max_cooldown_s} must not be less than "
                f"breaker_cooldown_s={self.breaker_cooldown_s}"
            )

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Self:
        """The configuration that a parsed file or command line gives.

        Raises:
            ConfigError: an unknown key, or a value that cannot work.
        """
        _check_keys(cls, "engine", raw)
        return cls(**raw)


def staging_buffer(slot: SlotLayout) -> int:
    """Most bytes of the buffer that each I/O thread has: a slot, in whole huge pages."""
    return round_up(slot.slot_bytes, STAGING_UNIT)


def staging_plan(config: EngineConfig, slot: SlotLayout) -> tuple[int, int]:
    """How many threads an engine for such slots gets, and the most bytes that their buffers take together.

    A thread that is stuck in a call keeps its buffer while another has its place. Where staging_bytes does not hold
    io_threads and max_lost_threads buffers there are fewer threads, but at least half of the buffers are theirs; what
    is left is how many stuck ones are replaced.

    Raises:
        ConfigError: it does not hold one buffer.
    """
    buffer = staging_buffer(slot)
    buffers = config.staging_bytes // buffer
    if not buffers:
        raise ConfigError(
            f"staging_bytes={config.staging_bytes} holds no I/O thread: its buffer takes {buffer} bytes (a slot is "
            f"{slot.slot_bytes}); give at least {2 * buffer}, so that one that is stuck can be replaced, or make "
            "chunks of fewer blocks"
        )
    threads = min(config.io_threads, max(buffers - config.max_lost_threads, -(-buffers // 2)))
    return threads, min(threads + config.max_lost_threads, buffers) * buffer
