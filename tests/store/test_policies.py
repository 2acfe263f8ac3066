"""The store under each policy: the same promises, another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvxfer.errors import ConfigError
from kvxfer.policy import ARCPolicy, LRUPolicy, S3FIFOPolicy
from kvxfer.store import Entry, Store
from kvxfer.store.table import Policies
from tests.store import rig
from tests.store.test_model import StoreMachine

POLICIES: dict[str, Policies] = {"lru": LRUPolicy, "arc": ARCPolicy, "s3fifo": S3FIFOPolicy}


class ArcStoreMachine(StoreMachine):
    """The store's own machine over adaptive replacement."""

    policy: Policies = ARCPolicy

    def open(self, capacity: int) -> None:
        with pytest.MonkeyPatch.context() as patch:  # of the one call that opens it
            opening = Store.open
            patch.setattr(Store, "open", lambda config, **how: opening(config, policy=type(self).policy, **how))
            super().open(capacity)


class S3FifoStoreMachine(ArcStoreMachine):
    """The same over S3-FIFO."""

    policy = S3FIFOPolicy


ArcStoreMachine.TestCase.settings = S3FifoStoreMachine.TestCase.settings = settings(
    max_examples=5, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestArcStore = pytest.mark.timeout(300)(ArcStoreMachine.TestCase)
TestS3FifoStore = pytest.mark.timeout(300)(S3FifoStoreMachine.TestCase)


@pytest.fixture
def small(root: Path) -> Iterator[Callable[[Policies], Store]]:
    """small(policy): a store of 4 MiB; closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda policy: stack.enter_context(Store.open(rig.config(root, capacity_bytes=4 << 20), policy=policy))


def policy_of(store: Store) -> ARCPolicy[Entry]:
    (found,) = {id(slab.policy): slab.policy for slab in store._table.slabs()}.values()
    assert isinstance(found, ARCPolicy)
    return found


def fill(store: Store, digest: bytes, numbers: range) -> list[bool]:
    return [rig.put(store, digest, [rig.key(n)])[0] for n in numbers]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_was_loaded_outlives_a_scan(small: Callable[[Policies], Store], policy: Policies) -> None:
    store = small(policy)
    digest = store.register(rig.namespace(), rig.ROW)
    used = [rig.key(n) for n in range(20)]
    assert all(fill(store, digest, range(20)))
    for _ in range(2):  # S3-FIFO keeps what was used twice
        store.unpin(store.pin(digest, used))  # what a load does
    assert all(fill(store, digest, range(100, 600)))
    assert store.stats().evictions["capacity"] > 300
    kept = rig.check_all(store, digest, used)
    assert kept == ([] if policy is LRUPolicy else used)


def test_a_chunk_that_is_stored_again_is_known_by_its_key(small: Callable[[Policies], Store]) -> None:
    store = small(ARCPolicy)
    digest = store.register(rig.namespace(), rig.ROW)
    used = [rig.key(n) for n in range(1000, 1010)]
    assert all(rig.put(store, digest, used))
    store.touch(digest, used)
    fill(store, digest, range(200))
    gone = [n for n in range(200) if not store.contains(digest, rig.key(n))]
    policy = policy_of(store)
    assert len(gone) > 20
    assert 0 < policy.ghosts <= policy.capacity
    assert policy.target == 0
    assert rig.put(store, digest, [rig.key(gone[-1])]) == [True]
    assert policy.target == 1


def test_invalidations_and_replacements_are_no_evictions(small: Callable[[Policies], Store]) -> None:
    store = small(ARCPolicy)
    digest = store.register(rig.namespace(), rig.ROW)
    fill(store, digest, range(20))
    entries = store.pin(digest, [rig.key(n) for n in range(5)])
    for entry in entries:
        assert entry is not None
        assert store.invalidate(entry, "bad_sum")
    store.unpin(entries)
    assert rig.put(store, digest, [rig.key(7)], mask=1) == [True]
    assert rig.put(store, digest, [rig.key(30)], mask=1) == [True]
    assert rig.put(store, digest, [rig.key(30)]) == [True]
    assert store.stats().replacements == 1
    assert store.maintain()
    assert policy_of(store).ghosts == 0


def test_victims_that_the_index_could_not_forget_stay_as_they_were(
    small: Callable[[Policies], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small(ARCPolicy)
    digest = store.register(rig.namespace(), rig.ROW)
    fill(store, digest, range(400))
    policy = policy_of(store)
    ghosts, order = policy.ghosts, policy.victims(1000)
    monkeypatch.setattr(store._index, "apply", lambda *_: False)
    assert len(store.reserve(digest, rig.ROW, 3)) == 0
    monkeypatch.undo()
    assert policy.ghosts == ghosts
    assert sorted(map(id, policy.victims(1000))) == sorted(map(id, order))
    assert policy.target == 0


def test_the_configuration_names_the_policy(root: Path) -> None:
    for name, kind in POLICIES.items():
        with Store.open(rig.config(root, policy=name)) as store:
            digest = store.register(rig.namespace(), rig.ROW)
            fill(store, digest, range(1))
            assert {type(slab.policy) for slab in store._table.slabs()} == {kind}
    with pytest.raises(ConfigError, match="policy='mru' must be one of lru, arc, s3fifo"):
        rig.config(root, policy="mru")
