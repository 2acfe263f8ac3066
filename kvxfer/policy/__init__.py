"""Which entries go first when a store is full. Policies know nothing of slots, files or locks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.policy.arc import ARCPolicy
from kvxfer.policy.base import CachePolicy, T, chunk_name
from kvxfer.policy.lru import LRUPolicy
from kvxfer.policy.s3fifo import S3FIFOPolicy

POLICIES: Mapping[str, Callable[..., CachePolicy[Any]]] = {"lru": LRUPolicy, "arc": ARCPolicy, "s3fifo": S3FIFOPolicy}

__all__ = [
    "POLICIES", "ARCPolicy", "CachePolicy", "LRUPolicy", "S3FIFOPolicy", "T", "chunk_name", "make_policy",
]  # fmt: skip


def make_policy(
    name: str, *, name_of: Callable[[T], Hashable] = chunk_name, capacity: int | None = None
) -> CachePolicy[T]:
    """The policy of that name, of `POLICIES`; knows chains (`link`).

    Args:
        name_of: the name by which an entry is remembered.
        capacity: the entries that are held at most; None: as many as there ever were at once.

    Raises:
        ConfigError: there is no such policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy={name!r} must be one of {sorted(POLICIES)}")
    return POLICIES[name](name_of=name_of, capacity=capacity)
