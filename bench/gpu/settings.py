"""How large things are. Sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvxfer.geometry import PRESETS, KVGeometry

__all__ = ["Settings"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one run; tests take small ones, on "cpu"."""

    root: Path  # of the checkout
    directory: Path  # where the engine and the ladder are tried
    device: str = "cuda:0"
    device_bytes: int = 1024 * MIB  # of the largest copy on the device
    link_bytes: int = 256 * MIB  # of the largest to and from the host
    convert_bytes: int = 256 * MIB  # of pages that are gathered and scattered
    copy_bytes: int = 128 * MIB  # the most that one case of the copy engines moves
    filled_bytes: int = 64 * MIB  # what it moves beside one large copy
    engine_bytes: int = 512 * MIB  # that a store or a load moves
    geometry: KVGeometry = PRESETS["llama-3.1-8b"]
    fragments: tuple[int, ...] = (256, 4096, 1 << 10, 16 << 10, 64 << 10)
    counts: tuple[int, ...] = (4096, 50_000, 256, 16)
    most_in_batch: int = 50_000
    programs: tuple[int | None, ...] = (None, 16, 32, 64, 128)
    matrix: int = 8192
