"""Every policy against a model that shares no code with it: whatever is done in whatever order."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.policy import make_policy
from tests.policy_models import ArcModel, LruModel, Model, S3FifoModel

ITEMS = st.integers(0, 24)


class PolicyMachine(RuleBasedStateMachine):
    """LRU; the others derive from it."""

    name = "lru"
    model_of: Callable[[int | None], Model] = LruModel
    capacity: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.policy = make_policy(self.name, name_of=lambda item: item, capacity=self.capacity)
        self.model = type(self).model_of(self.capacity)

    def some(self, data: st.DataObject, *, pinned: bool | None = None) -> int | None:
        found = sorted(x for x, one in self.model.known.items() if pinned is None or one.pinned is pinned)
        return data.draw(st.sampled_from(found)) if found else None

    @rule(items=st.lists(ITEMS, min_size=1, max_size=8, unique=True), chained=st.booleans())
    def insert(self, items: list[int], chained: bool) -> None:
        fresh = [item for item in items if item not in self.model.known and item not in self.model.gone]
        for item in fresh:
            self.policy.insert(item)
            self.model.insert(item)
        if chained:
            self.chain(items)

    @rule(names=st.lists(ITEMS, min_size=1, max_size=8))  # garbage too: cycles, repetitions
    def chain(self, names: list[int]) -> None:
        self.policy.chain(names, [name if name in self.model.known else None for name in names])
        self.model.learn(names)

    @rule(data=st.data())
    def link(self, data: st.DataObject) -> None:
        item, parent = self.some(data), self.some(data)
        if item is not None and parent is not None:
            self.policy.link(item, parent)
            self.model.learn([parent, item])

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if (item := self.some(data)) is not None:
            self.policy.touch(item)
            self.model.touch(item)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if (item := self.some(data, pinned=False)) is not None:
            self.policy.pin(item)
            self.model.known[item].pinned = True

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if (item := self.some(data, pinned=True)) is not None:
            self.policy.unpin(item)
            self.model.known[item].pinned = False

    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        if (item := self.some(data)) is not None:
            self.policy.touch(item)  # whatever was named before, this is no eviction
            self.model.touch(item)
            self.policy.remove(item)
            self.model.remove(item)

    @rule(n=st.integers(0, 12), order=st.randoms(use_true_random=False), shuffled=st.booleans())
    def evict(self, n: int, order: random.Random, shuffled: bool) -> None:
        victims = self.policy.victims(n)
        assert victims == self.model.victims(n)
        if shuffled:
            order.shuffle(victims)
        for victim in victims:
            self.policy.remove(victim)
            self.model.evict(victim)

    @rule(n=st.integers(0, 12))
    def ask(self, n: int) -> None:
        victims = self.policy.victims(n)
        assert victims == self.model.victims(n)
        assert self.policy.victims(n // 2) == victims[: n // 2], "for fewer it gives the first"

    @rule()
    def ask_for_the_first(self) -> None:
        first = self.policy.first()
        assert [first] == (self.model.victims(1) or [None])

    @precondition(lambda self: self.model.gone)
    @rule()
    def undo(self) -> None:
        for item in list(self.model.gone):
            if item not in self.model.known:
                self.policy.insert(item)
                self.model.undo(item)

    @invariant()
    def the_order_is_the_models(self) -> None:
        policy, model = copy.deepcopy(self.policy), copy.deepcopy(self.model)  # to ask is to name
        victims = policy.victims(100)
        assert victims == model.victims(100)
        for at, victim in enumerate(victims):
            left = model.known.keys() - set(victims[: at + 1])
            assert not any(victim in model.above(x) for x in left), "something that follows it would stay"

    @invariant()
    def the_counts_are_the_models(self) -> None:
        model, policy = self.model, self.policy
        assert len(policy) == sum(not one.pinned for one in model.known.values())
        assert policy.unreachable == model.unreachable()
        assert {name: getattr(policy, name) for name in model.state()} == model.state()


class ArcMachine(PolicyMachine):
    name, model_of = "arc", ArcModel


class SmallArcMachine(ArcMachine):
    """With a capacity that is often less than what is held."""

    capacity = 5


class S3FifoMachine(PolicyMachine):
    name, model_of = "s3fifo", S3FifoModel


class SmallS3FifoMachine(S3FifoMachine):
    capacity = 30


for machine in (PolicyMachine, ArcMachine, SmallArcMachine, S3FifoMachine, SmallS3FifoMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLru = PolicyMachine.TestCase
TestArc = ArcMachine.TestCase
TestSmallArc = SmallArcMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase
TestSmallS3Fifo = SmallS3FifoMachine.TestCase
