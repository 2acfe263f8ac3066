"""Configuration: what is refused, and that the message says what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import EngineConfig, StoreConfig, slab_cost
from kvxfer.errors import ConfigError


@pytest.mark.parametrize(
    ("cls", "what", "known"), [(StoreConfig, "store", "capacity_bytes"), (EngineConfig, "engine", "io_threads")]
)
def test_unknown_keys_are_named_with_the_known_ones(cls: Any, what: str, known: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown {what} keys \['capacty', 'x'\]; known keys are \[.*'{known}'"):
        cls.from_mapping({"root": "/x", "x": 1, "capacty": 2} if cls is StoreConfig else {"x": 1, "capacty": 2})


def test_a_missing_root_is_named() -> None:
    with pytest.raises(ConfigError, match="'root' is missing"):
        StoreConfig.from_mapping({"capacity_bytes": 1 << 30})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root": ""}, "root=''"),
        ({"root": 3}, "root=3"),
        ({"root": "a\0b"}, "root='a.*b' cannot be a path"),
        ({"root": Path("a\0b")}, "cannot be a path"),
        ({"root": "\ud800"}, "cannot be a path"),
        ({"capacity_bytes": 1 << 21}, "capacity_bytes=2097152 must be an integer of at least 4194304"),
        ({"capacity_bytes": 1e12}, "capacity_bytes=1000000000000.0 must be an integer"),
        ({"capacity_bytes": True}, "capacity_bytes=True"),
        ({"slab_bytes": 0}, "slab_bytes=0 must be an integer of at least 8192"),
        ({"slab_bytes": 10000}, "slab_bytes=10000 must be a multiple of 4096"),
        ({"slab_bytes": 64 << 30}, "capacity_bytes=68719476736 holds no slab of slab_bytes=68719476736"),
        ({"max_files": 3}, "max_files=3 must be an integer of at least 7"),
        ({"io": "gds"}, "io='gds' must be one of auto, posix, uring"),
        ({"durability": "fsync"}, "durability='fsync' must be one of none, process, power"),
        ({"durability": None}, "durability=None must be one of"),
        ({"direct": "yes"}, "direct='yes' must be one of auto, on, off"),
        ({"index_map_bytes": 4096}, "index_map_bytes=4096 must be an integer of at least 1048576"),
        ({"index_map_bytes": (1 << 20) + 1}, "must be a multiple of 4096"),
        ({"write_bytes_per_s": 0}, "write_bytes_per_s=0 must be a positive number, or left out"),
        ({"write_bytes_per_s": float("inf")}, "write_bytes_per_s=inf must be a positive number"),
        ({"write_bytes_per_s": True}, "write_bytes_per_s=True must be a positive number"),
        ({"write_dwpd": -1}, "write_dwpd=-1 must be a positive number, or left out"),
        ({"write_dwpd": "1"}, "write_dwpd='1' must be a positive number"),
        ({"write_dwpd": 1, "write_bytes_per_s": 5}, "write_bytes_per_s=5 and write_dwpd=1: give one of them"),
        ({"write_dwpd": 1, "drive_bytes": 0}, "drive_bytes=0 must be an integer of at least 1"),
        ({"write_dwpd": 1, "write_burst_bytes": 0.5}, "write_burst_bytes=0.5 must be an integer of at least 1"),
        ({"drive_bytes": 5}, "drive_bytes=5 is for write_dwpd, which is left out"),
        ({"write_bytes_per_s": 5, "drive_bytes": 5}, "drive_bytes=5 is for write_dwpd"),
        ({"write_burst_bytes": 5}, "write_burst_bytes=5 is for a budget: give write_bytes_per_s or write_dwpd"),
        ({"ttl_s": 59.9}, "ttl_s=59.9 must be a number of seconds in 60"),
        ({"ttl_s": float("nan")}, "ttl_s=nan"),
        ({"ttl_s": True}, "ttl_s=True"),
        ({"scrub_bytes_per_s": 0}, "scrub_bytes_per_s=0 must be an integer of at least 1"),
    ],
)
def test_store_values_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        StoreConfig(**({"root": Path("/x")} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"io_threads": 0}, "io_threads=0 must be an integer of at least 1"),
        ({"io_threads": 5000}, "io_threads=5000 must be 1..1024"),
        ({"io_timeout_s": 0}, "io_timeout_s=0 must be a number of seconds in 0.001..86400"),
        ({"io_timeout_s": float("nan")}, "io_timeout_s=nan"),
        ({"shutdown_timeout_s": "5"}, "shutdown_timeout_s='5'"),
        ({"max_lost_threads": -1}, "max_lost_threads=-1 must be an integer of at least 0"),
        ({"max_queued_store_chunks": 0}, "max_queued_store_chunks=0"),
        ({"read_piece_bytes": 100}, "read_piece_bytes=100 must be an integer of at least 4096"),
        ({"staging_bytes": 0}, "staging_bytes=0 must be an integer of at least 4096"),
        ({"copy_engine": "batch"}, "copy_engine='batch'"),
        ({"programs": 0}, "programs=0 must be an integer of at least 1"),
        ({"programs": 65536}, "programs=65536 must be 1..65535"),
        ({"programs": True}, "programs=True"),
        ({"breaker_failures": -1}, "breaker_failures=-1 must be an integer of at least 0"),
        ({"breaker_probe_chunks": 0}, "breaker_probe_chunks=0 must be an integer of at least 1"),
        ({"breaker_cooldown_s": 0}, "breaker_cooldown_s=0 must be a number of seconds in 0.001..86400"),
        ({"second_touch_names": -1}, "second_touch_names=-1 must be an integer of at least 0"),
        ({"second_touch_names": 1e6}, "second_touch_names=1000000.0 must be an integer"),
        ({"max_queue_s": 0}, "max_queue_s=0 must be a number of seconds in 0.001..86400"),
        ({"max_queue_s": "5"}, "max_queue_s='5'"),
        ({"breaker_cooldown_s": 90}, "breaker_max_cooldown_s=60.0 must not be less than breaker_cooldown_s=90"),
    ],
)
def test_engine_values_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


@given(st.integers(4 << 20, 1 << 44), st.integers(8, 1 << 16))
def test_the_shares_never_pass_the_caps(capacity: int, max_files: int) -> None:
    config = StoreConfig(root=Path("/x"), capacity_bytes=capacity, max_files=max_files)
    nbytes, nfiles = config.slab_budget
    assert nbytes >= slab_cost(config.effective_slab_bytes)
    assert nbytes + config.effective_index_map_bytes + config.namespace_bytes < capacity
    assert 1 <= nfiles < max_files
    assert nfiles + config.max_namespaces < max_files
    assert config.effective_slab_bytes % 4096 == config.effective_index_map_bytes % 4096 == 0


def test_the_room_of_others_counts() -> None:
    config = StoreConfig(root=Path("/x"), capacity_bytes=8 << 20, max_files=64)
    config.check_room(1 << 20, 4)
    with pytest.raises(ConfigError, match="capacity_bytes=8388608 holds no slab.*7340032 bytes of others"):
        config.check_room(7 << 20, 0)
    with pytest.raises(ConfigError, match="max_files=64 leaves no file for a slab.* 60 are others'"):
        config.check_room(0, 60)


def test_defaults() -> None:
    config = StoreConfig.from_mapping({"root": "/x"})
    assert config.root == Path("/x")
    assert config.effective_slab_bytes == 1 << 30
    assert config.effective_index_map_bytes == 512 << 20
    assert EngineConfig.from_mapping({"io_threads": 3}).io_threads == 3


def test_the_index_is_never_larger_than_can_be_mapped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="index_map_bytes=1099511631872 must be .* at most 1099511627776"):
        StoreConfig(root=tmp_path, capacity_bytes=1 << 50, index_map_bytes=(1 << 40) + 4096)
    assert StoreConfig(root=tmp_path, capacity_bytes=1 << 62).effective_index_map_bytes == 1 << 40


@pytest.mark.parametrize("name", ["io", "direct"])
def test_a_choice_that_is_an_array_is_named_too(tmp_path: Path, name: str) -> None:
    for value in (np.zeros(0), np.array(["auto", "on"]), ["auto"], None):
        with pytest.raises(ConfigError, match=f"{name}="):
            StoreConfig.from_mapping({"root": tmp_path, name: value})
