"""What `kvxfer bench gds` is asked to do, checked before anything is made or touched."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from kvxfer.cli.bench_content import PAGE
from kvxfer.errors import ConfigError

OPERATIONS = ("read", "write", "mixed")
MODES = ("auto", "direct", "buffered", "gds", "compat")
MEMORIES = ("auto", "host", "device")
LAYOUTS = ("sequential", "random")
PEERS = ("fio",)
DEVICE_MODES = ("gds", "compat")
MAX_REQUEST = 1 << 30
MAX_LANES = 256
MAX_IN_FLIGHT_BYTES = 2 << 30
MAX_SPAN = 1 << 40
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of "512", "64K", "64KiB", "2M", "1G" (all powers of 1024; "64KB" would be another number, and is refused).

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"([0-9]{1,15})\s*(?:([KMGT])(?:iB)?|B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"size {text!r}: allowed are numbers with K, M, G or T, as 64K or 64KiB")
    return int(found[1]) * _UNITS[(found[2] or "").upper()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Of "64K,512K,2M"."""
    return tuple(parse_size(part) for part in text.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes in bytes, times in seconds.

    Raises:
        ConfigError: a value that cannot work; names the option and what is allowed.
    """

    targets: tuple[Path, ...]  # one directory, or files
    operation: str = "read"
    read_percent: int = 70  # of requests, in mixed
    sizes: tuple[int, ...] = (64 << 10, 512 << 10, 2 << 20)  # of a request, each size by itself
    threads: int = 1  # each has a part of the files to itself
    depth: int = 8  # requests in flight for each thread
    duration_s: float = 3.0  # of timed I/O for each size
    limit_bytes: int | None = None  # that are moved for each size, at most
    span_bytes: int = 1 << 30  # of files, in all: those made here, or of those given the first part
    memory: str = "auto"
    mode: str = "auto"
    layout: str = "random"
    repetitions: int = 3
    drive_gbps: float | None = None  # 1e9 bytes a second, as its maker says
    seed: int | None = None
    overwrite: bool = False
    peer: str | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("--operation", self.operation, OPERATIONS),
            ("--memory", self.memory, MEMORIES),
            ("--mode", self.mode, MODES),
            ("--layout", self.layout, LAYOUTS),
            ("--peer", self.peer, (None, *PEERS)),
        ):
            if value not in allowed:
                raise ConfigError(f"{option} {value!r}: allowed are {', '.join(filter(None, allowed))}")
        for option, number, low, high in (
            ("--read-percent", self.read_percent, 1, 99),
            ("--threads", self.threads, 1, MAX_LANES),
            ("--depth", self.depth, 1, MAX_LANES),
            ("--duration", self.duration_s, 0.05, 86400),
            ("--repetitions", self.repetitions, 1, 100),
            ("--drive-gbps", 1.0 if self.drive_gbps is None else self.drive_gbps, 0.001, 10000),
            ("--seed", self.seed or 0, 0, 2**64 - 1),
        ):
            if not low <= number <= high or not math.isfinite(number):
                raise ConfigError(f"{option} {number:g}: allowed are {low:g} to {high:g}")
        if self.memory == "host" and self.mode in DEVICE_MODES:
            raise ConfigError(f"--mode {self.mode} moves the device's memory: not with --memory host")
        if self.overwrite and self.operation == "read":
            raise ConfigError("--overwrite: only with --operation write or mixed; a read changes no file")
        self._check_sizes()

    def _check_sizes(self) -> None:
        for size in self.sizes:
            if not PAGE <= size <= MAX_REQUEST or size % PAGE:
                raise ConfigError(f"--sizes {size}: allowed are multiples of {PAGE} up to {MAX_REQUEST}")
        if len(set(self.sizes)) != len(self.sizes):
            raise ConfigError("--sizes: one of them is there twice")
        if self.lanes > MAX_LANES:
            raise ConfigError(f"--threads {self.threads} x --depth {self.depth}: at most {MAX_LANES} in flight")
        largest = max(self.sizes)
        if self.lanes * largest > MAX_IN_FLIGHT_BYTES:
            raise ConfigError(
                f"--threads {self.threads} x --depth {self.depth} requests of {largest} bytes: at most "
                f"{MAX_IN_FLIGHT_BYTES} bytes in flight"
            )
        if self.limit_bytes is not None and self.limit_bytes < largest:
            raise ConfigError(f"--limit {self.limit_bytes}: holds no request of {largest} bytes")
        if self.span_bytes > MAX_SPAN:
            raise ConfigError(f"--span {self.span_bytes}: at most {MAX_SPAN}")
        if self.span_bytes < self.lanes * largest:
            raise ConfigError(
                f"--span {self.span_bytes}: {self.lanes} requests of {largest} bytes at once need "
                f"{self.lanes * largest}"
            )

    @property
    def lanes(self) -> int:
        """Requests in flight, over all threads."""
        return self.threads * self.depth

    @property
    def writes(self) -> bool:
        """Whether anything is written but to prepare."""
        return self.operation != "read"
