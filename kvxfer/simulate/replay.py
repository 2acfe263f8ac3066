"""One trace against one store that moves no bytes: the store's own policies and admission, and its order of things.

Of each request, in the order of the trace: the leading run of its blocks that are there is looked up and loaded, those
of the rest that are there are held, what is missing is offered to the admission, room is made by the policy's choice of
what nobody holds, and what was admitted is stored. All of it is one access. A request is over before the next begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, compress, islice
from operator import and_

from kvxfer.admission import SecondTouch, WriteBudget
from kvxfer.errors import ConfigError
from kvxfer.policy import POLICIES, make_policy
from kvxfer.simulate.trace import BLOCK_TOKENS, Request, usable_tokens

SECOND_TOUCH, BUDGET, NO_ROOM = "second_touch", "budget", "no_room"
REASONS = (SECOND_TOUCH, BUDGET, NO_ROOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A store to be simulated.

    Raises:
        ConfigError: a value that cannot work.
    """

    policy: str  # a key of POLICIES
    capacity_blocks: int
    block_bytes: int  # what a block takes on the drive; a partial one takes a whole one's
    block_tokens: int = BLOCK_TOKENS
    second_touch_names: int = 0  # that the filter remembers; 0: everything is admitted at once
    bytes_per_s: float = 0.0  # of the write budget; 0: none
    burst_bytes: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r} must be one of {', '.join(POLICIES)}")
        for name, least in (("capacity_blocks", 1), ("block_bytes", 1), ("block_tokens", 1), ("second_touch_names", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(slots=True)
class Counts:
    """What a replay came to. A block operation is one block looked up, used, stored or evicted."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0  # in leading runs
    stored_blocks: int = 0
    evicted_blocks: int = 0
    peak_blocks: int = 0  # held at once
    dropped_blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    operations: int = 0


def _itself(block: int) -> int:
    return block


class Replay:
    """A store without bytes. Each request of a trace goes through `step`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.counts = Counts()
        # A block is its own entry and its own name. (That one which comes back is equal to the one that was evicted
        # makes no difference: the policies are asked for victims again before anything is stored in a full store.)
        # As in the store it measures itself by what there ever was at once, and not by the capacity.
        self._policy = make_policy(setup.policy, name_of=_itself)
        self._held: dict[int, int | None] = {}  # the block that each follows
        self._seen = SecondTouch(setup.second_touch_names) if setup.second_touch_names else None
        self._now = 0.0
        self._budget = (
            WriteBudget(setup.bytes_per_s, setup.burst_bytes, lambda: self._now) if setup.bytes_per_s else None
        )

    @property
    def held_blocks(self) -> int:
        """How many blocks are stored now."""
        return len(self._held)

    def step(self, request: Request) -> None:
        """One request."""
        counts, held, blocks = self.counts, self._held, request.blocks
        self._now = request.ms / 1e3
        run = 0
        for block in blocks:
            if block not in held:
                break
            run += 1
        here = blocks[:run]
        missing: list[int] = []
        for block in islice(blocks, run, None):
            (here if block in held else missing).append(block)
        counts.operations += len(blocks) + len(here)
        touch = self._policy.touch
        for block in here:
            touch(block)
        if missing:
            self._store(blocks[max(0, run - 1) :], here, missing)
        counts.requests += 1
        counts.prompt_tokens += request.tokens
        counts.hit_tokens += usable_tokens(run, request.tokens, self.setup.block_tokens)
        counts.blocks += len(blocks)
        counts.hit_blocks += run

    def _store(self, blocks: list[int], here: list[int], missing: list[int]) -> None:
        """Of `blocks`, which begin with the last one that was hit, stores what is missing. `here` is in use."""
        counts, held, policy = self.counts, self._held, self._policy
        admitted = self._admit(missing)
        room = self.setup.capacity_blocks - len(held)
        if len(admitted) > room:
            room += self._evict(len(admitted) - room, here)
        if len(admitted) > room:
            self._drop(NO_ROOM, len(admitted) - room)
            if self._budget is not None:
                self._budget.give_back((len(admitted) - room) * self.setup.block_bytes)
            admitted = admitted[:room]
        if not admitted:
            return
        follows = dict(zip(blocks[1:], blocks, strict=False))
        for block in admitted:
            policy.insert(block)
            held[block] = follows.get(block)
        policy.chain(blocks, [block if block in held else None for block in blocks])
        counts.stored_blocks += len(admitted)
        counts.operations += len(admitted)
        counts.peak_blocks = max(counts.peak_blocks, len(held))

    def _evict(self, most: int, pinned: list[int]) -> int:
        """Makes room; for how many."""
        policy, held = self._policy, self._held
        for block in pinned:
            policy.pin(block)
        victims = policy.victims(most)
        for block in victims:
            policy.remove(block)
            del held[block]
        for block in pinned:
            policy.unpin(block)
        self.counts.evicted_blocks += len(victims)
        self.counts.operations += len(victims)
        return len(victims)

    def _admit(self, missing: list[int]) -> list[int]:
        """Those that may be written, in order: what is behind one that may not would be of no use."""
        wanted = missing
        if self._seen is not None:
            known = [self._seen.offer(block) for block in missing]  # all are offered, also behind a gap
            wanted = list(compress(missing, accumulate(known, and_)))
            self._drop(SECOND_TOUCH, len(missing) - len(wanted))
        if self._budget is None or not wanted:
            return wanted
        paid = self._budget.take_some(self.setup.block_bytes, len(wanted))
        self._drop(BUDGET, len(wanted) - paid)
        return wanted[:paid]

    def _drop(self, reason: str, blocks: int) -> None:
        self.counts.dropped_blocks[reason] += blocks

    def unreachable_blocks(self) -> int:
        """Stored blocks that no lookup finds, since one that they follow is not stored."""
        held = self._held
        reached: dict[int | None, bool] = {None: True}
        for start in held:
            path: list[int | None] = []
            block: int | None = start
            while block not in reached:
                path.append(block)
                if block not in held:
                    break
                block = held[block]
            answer = reached.get(block, False)
            reached.update(dict.fromkeys(path, answer))
        return sum(not reached[block] for block in held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One setup's counts over a whole trace."""

    setup: Setup
    counts: Counts
    held_blocks: int
    unreachable_blocks: int  # of those held at the end
    wall_s: float  # that it took, reading included

    @property
    def token_hit_ratio(self) -> float:
        """Of all prompts' tokens, those that need not be computed."""
        return self.counts.hit_tokens / self.counts.prompt_tokens

    @property
    def block_hit_ratio(self) -> float:
        """Of all blocks looked up, those in leading runs."""
        return self.counts.hit_blocks / self.counts.blocks


def replay(requests: Iterable[Request], setup: Setup) -> Outcome:
    """All requests of a trace through a new store.

    Raises:
        ConfigError: there is no request; whatever reading them raises.
    """
    start = time.perf_counter()
    model = Replay(setup)
    for request in requests:
        model.step(request)
    took = time.perf_counter() - start
    if not model.counts.requests:
        raise ConfigError("the trace has no request")
    return Outcome(
        setup=setup,
        counts=model.counts,
        held_blocks=model.held_blocks,
        unreachable_blocks=model.unreachable_blocks(),
        wall_s=took,
    )
