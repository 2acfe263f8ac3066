"""What a run of the bench does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.geometry import KVGeometry

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes in bytes."""

    only: str | None = None  # converter | rows | engine | policy | lookup | resident
    dirs: tuple[Path, ...] = ()  # where the engine's rows are measured; the last one is for what no disk matters to
    quick: bool = False  # fewer cases and rounds
    runs: int = 15  # timed rounds of a case
    budget_s: float = 5.0  # seconds after which a case begins no further round, once it has three
    threads: tuple[int, ...] = (1, 2)  # of the converter and its peers
    io_threads: int = 8  # of the engine and its peer
    tp_sizes: tuple[int, ...] = (1, 2, 4, 8)
    geometry: KVGeometry | None = None  # Llama-3.1-8B
    converter_bytes: int = 64 * MIB  # that one run of a converter case moves
    engine_bytes: int = 128 * MIB  # that one store or load moves
    engine: Mapping[str, Any] = field(default_factory=dict)  # further fields of EngineConfig
    row_sizes: tuple[int, ...] | None = None  # of host rows; None: the project's three
    head_sizes: tuple[int, ...] = (512, 1024)  # of further pages, in whose NHD order a head's token is one piece
    entries: tuple[int, int] = (10_000, 1_000_000)  # held by a policy: few, and many
    keys: int = 1_000_000  # in the index that is looked up
    jobs: int = 10_000  # stores, and as many loads, of the resident set's rows
    trace: Path | None = None  # that is simulated; None: the tests' sample
