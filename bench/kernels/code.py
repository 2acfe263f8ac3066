"""A kernel's machine code, as far as the rules ask: accesses, loops, registers. Whose code it was is forgotten here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class UnreadableError(Exception):
    """A compiler's output that is not as the parser expects it: never a pass."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of them, in order."""

    opcode: str
    target: str = ""  # the label that it branches to
    ends: bool = False  # what comes after it in the listing does not follow it
    labels: tuple[str, ...] = ()  # that stand before it
    load: int = 0  # bytes that a thread loads from global memory
    store: int = 0
    local: bool = False  # it reads or writes memory that stands in for registers
    call: bool = False  # of a routine, whose instructions are not counted


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes."""

    registers: int  # of a thread
    local_bytes: int  # of a thread: stack, spilled registers, arrays
    spills: int = 0  # registers that were spilled, where the compiler says so itself


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel as it was read."""

    registers: int
    local_bytes: int
    spills: int  # registers, or instructions that reach local memory
    loads: dict[int, int]  # how many there are in the loop (or all, where there is none) of each width in bytes
    stores: dict[int, int]
    loop: int  # instructions of the innermost loop that moves data; 0: there is none
    calls: int = 0  # in that loop

    @classmethod
    def of(cls, instructions: Sequence[Instruction], resources: Resources, width: int) -> Code:
        """Looks for the innermost loop with accesses of `width` bytes, stores if the kernel has such.

        Raises:
            UnreadableError: there is no access of global memory at all.
        """
        if not any(one.load or one.store for one in instructions):
            raise UnreadableError(f"no access of global memory among {len(instructions)} instructions")
        stores = any(one.store == width for one in instructions)
        body = _innermost(instructions, lambda one: (one.store if stores else one.load) == width)
        within = instructions if body is None else body
        return cls(
            registers=resources.registers,
            local_bytes=resources.local_bytes,
            spills=max(resources.spills, sum(one.local for one in instructions)),
            loads=dict(sorted(Counter(one.load for one in within if one.load).items())),
            stores=dict(sorted(Counter(one.store for one in within if one.store).items())),
            loop=0 if body is None else len(body),
            calls=sum(one.call for one in within),
        )


def _innermost(instructions: Sequence[Instruction], moves: Callable[[Instruction], bool]) -> list[Instruction] | None:
    """The instructions of the innermost loop with one that `moves`; of several beside each other, the one with most.

    Loops are looked for in the graph of jumps: a compiler may put a loop's parts anywhere, also behind its end.
    """
    after = _successors(instructions)
    chosen: set[int] | None = None
    nodes = set(range(len(instructions)))
    while True:
        loops = [loop for loop in _cycles(nodes, after) if any(moves(instructions[node]) for node in loop)]
        if not loops:
            return None if chosen is None else [instructions[node] for node in sorted(chosen)]
        chosen = max(loops, key=lambda loop: sum(moves(instructions[node]) for node in loop))
        entered = {node for source in nodes - chosen for node in after[source] if node in chosen} or {min(chosen)}
        # Without its entry, what still is a cycle is a loop within.
        nodes = chosen - entered


def _successors(instructions: Sequence[Instruction]) -> list[list[int]]:
    """Where each instruction may be followed by which."""
    place = {label: index for index, one in enumerate(instructions) for label in one.labels}
    after: list[list[int]] = []
    for index, one in enumerate(instructions):
        if one.target and one.target not in place:
            raise UnreadableError(f"{one.opcode} branches to {one.target}, which is nowhere")
        following = [] if one.ends or index + 1 == len(instructions) else [index + 1]
        after.append(following + ([place[one.target]] if one.target else []))
    return after


def _cycles(nodes: set[int], after: Sequence[Sequence[int]]) -> list[set[int]]:
    """The strongly connected parts of the graph within `nodes` that have an edge (Kosaraju's two passes)."""
    before: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        for other in after[node]:
            if other in nodes:
                before[other].append(node)
    order: list[int] = []
    seen: set[int] = set()
    for root in nodes:
        stack = [(root, iter(after[root]))] if root not in seen else []
        seen.add(root)
        while stack:
            node, others = stack[-1]
            step = next((other for other in others if other in nodes and other not in seen), None)
            if step is None:
                order.append(stack.pop()[0])
            else:
                seen.add(step)
                stack.append((step, iter(after[step])))
    found: list[set[int]] = []
    placed: set[int] = set()
    for root in reversed(order):
        part, queue = set(), [root]
        while queue:
            if (node := queue.pop()) not in placed:
                placed.add(node)
                part.add(node)
                queue += before[node]
        if len(part) > 1 or (part and root in after[root]):
            found.append(part)
    return found


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant, compiled for a target."""

    name: str
    target: str
    width: int  # bytes of an access of pages and rows, where everything is aligned to them
    per_turn: float  # such accesses that a thread makes in one turn of the loop
    code: Code
    triton: str = ""
    faults: tuple[str, ...] = field(default=())

    @property
    def per_16_bytes(self) -> float | None:
        """Instructions of the loop for 16 bytes that a thread moves; None: no loop moves anything."""
        moved = (self.code.stores.get(self.width) or self.code.loads.get(self.width, 0)) if self.code.loop else 0
        if self.code.stores.get(self.width, 0) == 0 and moved:
            # Sums alone: some loads are of tables. NVIDIA's compiler unrolls the loop; no table there is of 16 bytes.
            unrolled = self.width == 16 and self.target.startswith("sm_")
            moved = moved if unrolled else int(self.per_turn)
        return self.code.loop / (moved * self.width / 16) if moved else None
