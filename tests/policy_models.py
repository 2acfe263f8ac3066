"""The policies once more, slow and obvious: lists that are searched, and chains that are walked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class One:
    """A known entry: an integer, whose name is itself."""

    stamp: int
    queue: str = "all"
    uses: int = 0
    pinned: bool = False


class Model:
    """What every policy does."""

    def __init__(self, capacity: int | None = None) -> None:
        self.known: dict[int, One] = {}
        self.parent: dict[int, int] = {}  # of the known, and of the missing that something known follows
        self.fixed, self.peak, self.clock = capacity, 0, 0
        self.gone: dict[int, tuple[One, int | None]] = {}  # by the latest eviction: the entry, and what it followed

    @property
    def c(self) -> int:
        return self.fixed or self.peak

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # ---- chains

    def above(self, x: int) -> list[int]:
        found: list[int] = []
        while x in self.parent:
            x = self.parent[x]
            found.append(x)
        return found

    def remembered(self, x: int) -> bool:
        return x in self.known or any(x in self.above(y) for y in self.known)

    def prune(self) -> None:
        for x in list(self.parent):
            if not self.remembered(x):
                del self.parent[x]

    def learn(self, names: Sequence[int]) -> None:
        pairs = list(zip(names[1:], names, strict=False))[::-1]
        later = []
        for x, before in pairs:
            if not self.remembered(x):
                continue
            if x in self.parent:
                later.append((x, before))
            elif x != before and x not in self.above(before):
                self.parent[x] = before
        for x, before in later:
            if before not in (x, self.parent[x]) and self.parent.get(before) == self.parent[x]:
                self.parent[x] = before

    def unreachable(self) -> int:
        return sum(any(y not in self.known for y in self.above(x)) for x in self.known)

    # ---- entries

    def insert(self, x: int) -> None:
        self.peak = max(self.peak, len(self.known) + 1)
        self.known[x] = One(self.tick())
        self.enter(x)

    def remove(self, x: int) -> None:
        del self.known[x]
        self.prune()

    def touch(self, x: int) -> None:
        self.use(self.known[x])

    def candidates(self, without: Sequence[int]) -> list[int]:
        """Those that may go after `without`, the oldest first."""
        staying = [x for x in self.known if x not in without]
        followed = {y for x in staying for y in self.above(x)}
        free = [x for x in staying if not self.known[x].pinned and x not in followed]
        return sorted(free, key=lambda x: self.known[x].stamp)

    def victims(self, n: int) -> list[int]:
        self.gone = {}
        chosen: list[int] = []
        while len(chosen) < n and (x := self.least(chosen)) is not None:
            chosen.append(x)
        return chosen

    def evict(self, x: int) -> None:
        self.gone[x] = self.known[x], self.parent.get(x)
        self.remove(x)
        self.remember(x, self.gone[x][0])

    def undo(self, x: int) -> None:
        one, before = self.gone.pop(x)
        self.peak = max(self.peak, len(self.known) + 1)
        self.known[x] = One(one.stamp, one.queue)
        self.forget(x)
        if before is not None:
            self.learn([before, x])

    # ---- of each policy

    def enter(self, x: int) -> None: ...
    def use(self, one: One) -> None: ...
    def remember(self, x: int, one: One) -> None: ...
    def forget(self, x: int) -> None: ...
    def least(self, without: Sequence[int]) -> int | None: ...
    def state(self) -> dict[str, float]:
        return {}


class LruModel(Model):
    def use(self, one: One) -> None:
        one.stamp = self.tick()

    def least(self, without: Sequence[int]) -> int | None:
        return next(iter(self.candidates(without)), None)


class ArcModel(Model):
    """T1, T2, B1, B2 and p of the paper."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def t1(self, without: Sequence[int] = ()) -> list[int]:
        return [x for x, one in self.known.items() if one.queue == "t1" and x not in without]

    def enter(self, x: int) -> None:
        queue = "t1"
        if x in self.b1:
            self.p = min(self.p + (1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)), self.c)
            queue = "t2"
        elif x in self.b2:
            self.p = max(self.p - (1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)), 0)
            queue = "t2"
        self.known[x].queue = queue
        self.forget(x)

    def use(self, one: One) -> None:
        one.stamp, one.queue = self.tick(), "t2"

    def least(self, without: Sequence[int]) -> int | None:
        free = self.candidates(without)
        first = [x for x in free if self.known[x].queue == "t1"]
        second = [x for x in free if self.known[x].queue == "t2"]
        order = first + second if len(self.t1(without)) > self.p else second + first
        return next(iter(order), None)

    def remember(self, x: int, one: One) -> None:
        (self.b1 if one.queue == "t1" else self.b2).append(x)
        self.bound()

    def forget(self, x: int) -> None:
        self.b1 = [y for y in self.b1 if y != x]
        self.b2 = [y for y in self.b2 if y != x]
        self.bound()

    def bound(self) -> None:
        """|T1| + |B1| <= c and |B1| + |B2| <= c; B2 gives first where both are too long."""
        self.b1 = self.b1[max(0, len(self.t1()) + len(self.b1) - self.c) :]
        self.b2 = self.b2[max(0, len(self.b1) + len(self.b2) - self.c) :]
        self.b1 = self.b1[max(0, len(self.b1) + len(self.b2) - self.c) :]

    def state(self) -> dict[str, float]:
        return {"target": self.p, "ghosts": len(self.b1) + len(self.b2), "capacity": self.c}


class S3FifoModel(Model):
    """S, M and G of the paper."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self.g: list[int] = []

    def enter(self, x: int) -> None:
        self.known[x].queue = "m" if x in self.g else "s"
        self.forget(x)

    def use(self, one: One) -> None:
        one.uses = min(3, one.uses + 1)

    def least(self, without: Sequence[int]) -> int | None:
        while True:
            free = self.candidates(without)
            small = [x for x in free if self.known[x].queue == "s"]
            main = [x for x in free if self.known[x].queue == "m"]
            length = sum(one.queue == "s" for x, one in self.known.items() if x not in without)
            order = small + main if length >= max(1, self.c // 10) else main + small
            if not order:
                return None
            one = self.known[order[0]]
            if one.queue == "s" and one.uses > 1:
                one.queue, one.uses, one.stamp = "m", 0, self.tick()
            elif one.queue == "m" and one.uses > 0:
                one.uses, one.stamp = one.uses - 1, self.tick()
            else:
                return order[0]

    def remember(self, x: int, one: One) -> None:
        if one.queue == "s":
            self.g.append(x)
            self.g = self.g[max(0, len(self.g) - max(1, self.c - max(1, self.c // 10))) :]

    def forget(self, x: int) -> None:
        self.g = [y for y in self.g if y != x]

    def state(self) -> dict[str, float]:
        return {"ghosts": len(self.g), "capacity": self.c}
