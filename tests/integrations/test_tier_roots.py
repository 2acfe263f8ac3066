"""KvxferTier over several roots, through vLLM's own interface: one tier, and each root a whole one by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from tests.integrations.harness import HIT, MISS, Rig, key_of

pytestmark = pytest.mark.vllm

N = 24


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    return [str(tmp_path / name) for name in ("one", "other")]


def shares(rig: Rig) -> list[list[int]]:
    """Which chunks are in each of its roots."""
    stores, digests = rig.tier._roots.stores, [engine.digest for engine in rig.tier._roots._engines]
    return [
        [number for number in range(N) if store.contains(digest, key_of(number))]
        for store, digest in zip(stores, digests, strict=True)
    ]


def test_chunks_lie_in_one_root_each_and_are_found_again(roots: list[str], tmp_path: Path) -> None:
    with Rig(tmp_path, root_dir=roots) as rig:
        want = rig.fill()
        assert rig.store(range(N)).success
        one, other = shares(rig)
        assert one and other and sorted(one + other) == list(range(N))
        assert rig.store(range(N)).success  # there already
        assert shares(rig) == [one, other]
    with Rig(tmp_path, root_dir=roots[::-1]) as rig:
        request = rig.request("a")
        assert rig.lookups(range(N + 1), request) == [HIT] * N + [MISS]
        rig.poison()
        assert rig.load(range(N), request).success
        rig.check(want, range(N))
        assert shares(rig) == [other, one]


def test_without_a_root_its_own_chunks_are_misses(roots: list[str], tmp_path: Path) -> None:
    with Rig(tmp_path, root_dir=roots) as rig:
        want = rig.fill()
        rig.store(range(N))
        one, _ = shares(rig)
    with Rig(tmp_path, root_dir=roots[0]) as rig:
        request = rig.request("a")
        assert rig.lookups(range(N), request) == [HIT if number in one else MISS for number in range(N)]
        rig.poison()
        assert rig.load(one, request).success
        rig.check(want, one)


def test_a_reset_reaches_every_root(roots: list[str], tmp_path: Path) -> None:
    with Rig(tmp_path, root_dir=roots, reset_on_drain=True) as rig:
        rig.fill()
        rig.store(range(N))
        rig.tier.drain_jobs()
    with Rig(tmp_path, root_dir=roots) as rig:
        assert rig.lookups(range(N), rig.request("a")) == [MISS] * N


def test_a_root_that_cannot_be_opened_leaves_the_others_closed(roots: list[str], tmp_path: Path) -> None:
    Path(roots[1]).write_text("a file")
    with pytest.raises(KvxferError, match="other"):
        Rig(tmp_path, root_dir=roots)
    Path(roots[1]).unlink()
    with Rig(tmp_path, root_dir=roots) as rig:  # the first one's lock is free
        rig.fill()
        assert rig.store(range(N)).success
