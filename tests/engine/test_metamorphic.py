"""One script of operations under every option: the answers must not show which.

The script stores prompts, loads them whole and in parts, damages slots, opens the root again, and runs in a store too
small for it. What must be the same under each option:

    threads, blocking calls or io_uring, direct or buffered I/O,
    size of reads, instruction set                                     every bitmap and every loaded byte, also which
                                                                       chunks were evicted, as an oracle of lists says
    blocks a chunk                                                     the same, of another oracle: larger chunks are
                                                                       evicted, and lost to damage, together
    the policy                                                         every loaded byte; what is evicted is its own
    the converter that filled or reads a slot                          every byte of it

The oracle shares no code with the product: Prompts below says what is there, tests/oracle.py what its bytes are.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.convert import reference
from kvxfer.policy import ARCPolicy
from kvxfer.store import Store
from tests.engine.rig import GEOMETRY, Node, keys_of
from tests.oracle import Model

PROMPTS, BLOCKS = 20, 24  # of a prompt
MODEL = Model.random(GEOMETRY, PROMPTS * BLOCKS)
CAPACITY = 4 << 20  # a quarter of what the script stores, or less
PLACE = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Variant:
    """Everything that the answers must not depend on; but for `per_chunk`, as said above."""

    io_threads: int = 2
    direct: str = "auto"
    io: str = "posix"
    read_piece_bytes: int = 1 << 20
    per_chunk: int = 1


@dataclass(frozen=True)
class Step:
    """One operation on a prompt's first `count` blocks, or on one of them."""

    what: str  # store | load | part | damage | reopen
    prompt: int = 0
    count: int = 0
    block: int = 0
    seed: int = 0


def script(seed: int, steps: int = 70) -> list[Step]:
    """Prompts that are used often, and those that come by."""
    rng = random.Random(seed)
    out = [Step("store", prompt, BLOCKS) for prompt in range(3)]
    for _ in range(steps):
        prompt = rng.choice((rng.randrange(4), rng.randrange(PROMPTS)))
        what = rng.choices(("store", "load", "part", "damage", "reopen"), (30, 30, 12, 8, 3))[0]
        out.append(
            Step(
                what,
                prompt,
                rng.choice((BLOCKS, rng.randint(1, BLOCKS))),
                rng.randrange(BLOCKS),
                rng.randrange(1 << 30),
            )
        )
    return [*out, *(Step("load", prompt, BLOCKS) for prompt in range(PROMPTS))]


def chunks_of(step: Step, per_chunk: int) -> list[tuple[int, list[int]]]:
    """(number of the chunk, its blocks) of a prompt's first blocks; a chunk that would not be whole is left out."""
    start = step.prompt * BLOCKS
    whole = max(1, step.count // per_chunk)
    return [
        (step.prompt * BLOCKS + i, list(range(start + i * per_chunk, start + (i + 1) * per_chunk)))
        for i in range(whole)
    ]


def wanted(step: Step, ids: list[list[int]]) -> list[list[int]]:
    """A part of a load: of some chunks only some blocks; of every one at least the first."""
    rng = random.Random(step.seed)
    return [[ids_of[0], *(block if rng.random() < 0.5 else -1 for block in ids_of[1:])] for ids_of in ids]


@dataclass
class Answer:
    """What came of a step."""

    bits: list[bool]
    memory: str = ""  # of a load: a digest of all the target's bytes
    arrived: list[int] = field(default_factory=list)  # of a load: its blocks


@dataclass
class Run:
    """The answers of a script, and how many slots there were for it."""

    answers: list[Answer]
    slots: int
    evicted: int


def run(root: Path, steps: Sequence[Step], variant: Variant) -> Run:
    """The script through the engine. Every loaded byte is compared with the model here."""
    how = {"io_threads": variant.io_threads, "read_piece_bytes": variant.read_piece_bytes}

    def open_node() -> Node:
        return Node(
            root,
            MODEL,
            capacity_bytes=CAPACITY,
            direct=variant.direct,
            io=variant.io,
            blocks_per_chunk=variant.per_chunk,
            **how,
        )

    node, answers, evicted = open_node(), [], 0
    try:
        for step in steps:
            if step.what == "reopen":
                evicted += sum(node.store.stats().evictions.values())
                node.__exit__()
                node = open_node()
                continue
            chunks = chunks_of(step, variant.per_chunk)
            numbers, ids = [number for number, _ in chunks], [blocks for _, blocks in chunks]
            if step.what == "damage":
                number = step.prompt * BLOCKS + step.block // variant.per_chunk
                if node.store.contains(node.digest, keys_of([number])[0]):
                    node.flip(number, step.seed % 1000)  # of the first segment
            elif step.what == "store":
                result = node.put(numbers, block_ids=ids)
                answers.append(Answer(list(result.bitmap)))
            else:
                asked = ids if step.what == "load" else wanted(step, ids)
                node.poison()
                result = node.get(numbers, block_ids=asked)
                arrived = [b for bit, row in zip(result.bitmap, asked, strict=True) if bit for b in row if b >= 0]
                node.check(arrived)
                memory = hashlib.sha256(b"".join(t.tobytes() for pages in node.target for t in pages.tensors))
                answers.append(Answer(list(result.bitmap), memory.hexdigest(), arrived))
            assert node.store.stats().pinned_entries == 0
        assert node.store.maintain()  # slots of chunks that were found damaged are free from here on
        stats = node.store.stats()
        return Run(answers, stats.entries + stats.free_slots, evicted + sum(stats.evictions.values()))
    finally:
        node.__exit__()


class Prompts:
    """What a store of `slots` chunks has: lists of numbers, the least recently used first. A prompt is a chain."""

    def __init__(self, slots: int, per_chunk: int) -> None:
        self.slots, self.per_chunk = slots, per_chunk
        self.order: list[int] = []
        self.stored: list[int] = []  # in the order of their storing, which is what a reopened root knows
        self.bad: dict[int, set[int]] = {}  # which bytes of a chunk are not what they were
        self.linked: set[int] = set()  # chunks of which the store knows that they follow the one before them

    def learn(self, numbers: list[int]) -> None:
        """From a call about a prompt's first chunks: as far as there is one, those on the way to it included."""
        last = max([n for n in numbers if n in self.order], default=-1)
        self.linked.update(n for n in numbers[1:] if n <= last)

    def followed(self, number: int) -> bool:
        """Whether a later chunk of the prompt is there, and known to come after this one."""
        after = number + 1
        while after % BLOCKS and after in self.linked:
            if after in self.order:
                return True
            after += 1
        return False

    def evict(self, count: int, held: list[int]) -> None:
        """The least recently used of those that none follows, one at a time."""
        for _ in range(count):
            self.drop([n for n in self.order if n not in held and not self.followed(n)][:1])

    def drop(self, numbers: Iterable[int]) -> None:
        gone = set(numbers)
        self.order = [n for n in self.order if n not in gone]
        self.stored = [n for n in self.stored if n not in gone]
        self.bad = {n: places for n, places in self.bad.items() if n not in gone}
        for n in sorted(self.linked, reverse=True):
            if n not in self.order and not self.followed(n):
                self.linked.remove(n)

    def store(self, numbers: list[int]) -> list[bool]:
        held = [n for n in numbers if n in self.order]
        new = [n for n in numbers if n not in held]
        self.learn(numbers)
        self.evict(len(self.order) + len(new) - self.slots, held)
        fit = new[: self.slots - len(self.order)]
        self.order = [n for n in self.order if n not in held] + held + fit
        self.stored += fit
        self.learn(numbers)
        return [n in self.order for n in numbers]

    def load(self, numbers: list[int]) -> list[bool]:
        found = [n for n in numbers if n in self.order]
        good = [n for n in found if not self.bad.get(n)]
        self.learn(numbers)
        self.drop(n for n in found if self.bad.get(n))
        self.order = [n for n in self.order if n not in good] + good
        return [n in good for n in numbers]

    def answers(self, steps: Sequence[Step]) -> list[list[bool]]:
        """The bitmaps of a script."""
        out = []
        for step in steps:
            numbers = [step.prompt * BLOCKS + i for i in range(max(1, step.count // self.per_chunk))]
            if step.what == "reopen":
                self.order, self.linked = list(self.stored), set()
            elif step.what == "damage":
                number = step.prompt * BLOCKS + step.block // self.per_chunk
                if number in self.order:
                    self.bad.setdefault(number, set()).symmetric_difference_update({step.seed % 1000})
            else:
                out.append(self.store(numbers) if step.what == "store" else self.load(numbers))
        return out


SEEDS = (1, 2)
VARIANTS = {
    "one thread": Variant(io_threads=1),
    "eight threads": Variant(io_threads=8),
    "buffered": Variant(direct="off"),
    "small reads": Variant(read_piece_bytes=4096),
    "odd reads": Variant(read_piece_bytes=12_288 + 1, io_threads=3),
    "buffered, small reads": Variant(direct="off", read_piece_bytes=8192, io_threads=1),
    "io_uring": Variant(io="uring"),
    "io_uring, buffered, small reads": Variant(io="uring", direct="off", read_piece_bytes=4096),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Each script as it is run by default."""
    return {seed: run(tmp_path_factory.mktemp("plain") / "root", script(seed), Variant()) for seed in SEEDS}


def test_the_scripts_are_worth_running(plain: dict[int, Run]) -> None:
    for seed, found in plain.items():
        steps = [step.what for step in script(seed)]
        assert {"store", "load", "part", "damage", "reopen"} == set(steps)
        bits = [bit for answer in found.answers for bit in answer.bits]
        assert 0.2 < sum(bits) / len(bits) < 0.98
        assert found.evicted > 50
        assert found.slots < PROMPTS * BLOCKS // 3


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_there_is_what_the_oracle_says(plain: dict[int, Run], seed: int) -> None:
    found = plain[seed]
    assert [answer.bits for answer in found.answers] == Prompts(found.slots, 1).answers(script(seed))


@pytest.mark.parametrize("name", VARIANTS)
def test_no_answer_shows_the_options(plain: dict[int, Run], tmp_root: Path, name: str) -> None:
    seed = SEEDS[list(VARIANTS).index(name) % len(SEEDS)]
    assert run(tmp_root, script(seed), VARIANTS[name]).answers == plain[seed].answers


@pytest.mark.parametrize(("per_chunk", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_larger_chunks_are_evicted_and_lost_together(tmp_root: Path, per_chunk: int, seed: int) -> None:
    steps = script(seed, 150)
    found = run(tmp_root, steps, Variant(per_chunk=per_chunk))
    assert [answer.bits for answer in found.answers] == Prompts(found.slots, per_chunk).answers(steps)
    assert found.evicted > 0


@pytest.mark.parametrize("per_chunk", [1, 2, 3, 4, 6])
def test_with_room_for_all_the_size_of_a_chunk_does_not_show(tmp_root: Path, per_chunk: int) -> None:
    """Without evictions and damage the same blocks arrive: whole prompts of a length that every size divides."""
    rng = random.Random(5)
    steps = [Step(rng.choice(("store", "load", "load")), rng.randrange(2), 12) for _ in range(30)]
    found = run(tmp_root, steps, Variant(per_chunk=per_chunk))
    stored: set[int] = set()
    answers = iter(found.answers)
    for step in steps:
        answer = next(answers)
        if step.what == "store":
            stored.add(step.prompt)
            assert all(answer.bits)
        else:
            first = step.prompt * BLOCKS
            assert answer.arrived == (list(range(first, first + 12)) if step.prompt in stored else [])
    assert found.evicted == 0


@pytest.mark.parametrize("seed", SEEDS[:1])
def test_another_policy_keeps_other_chunks_and_the_same_bytes(
    plain: dict[int, Run], tmp_root: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    opening = Store.open
    monkeypatch.setattr(Store, "open", lambda config, **how: opening(config, policy=ARCPolicy, **how))
    found = run(tmp_root, script(seed), Variant())
    assert found.slots == plain[seed].slots
    assert [len(a.bits) for a in found.answers] == [len(a.bits) for a in plain[seed].answers]
    ever = set()
    for step, answer in zip(
        [s for s in script(seed) if s.what not in ("damage", "reopen")], found.answers, strict=True
    ):
        numbers = [step.prompt * BLOCKS + i for i in range(step.count)]
        if step.what == "store":
            assert all(answer.bits), "there is room for a prompt whatever is evicted for it"
            ever |= set(numbers)
        assert {n for n, bit in zip(numbers, answer.bits, strict=True) if bit} <= ever


@pytest.mark.parametrize("most", ["scalar", "avx2"])
def test_no_answer_shows_the_instruction_set(plain: dict[int, Run], tmp_root: Path, most: str) -> None:
    """KVXFER_ISA is read once, hence a process of its own; without it this machine's best was used."""
    code = (
        "import dataclasses, json, sys; from pathlib import Path; from tests.engine.test_metamorphic import *\n"
        "from kvxfer import _native\n"
        "found = run(Path(sys.argv[1]), script(1), Variant())\n"
        "print(json.dumps([_native.lib().kvx_features().decode(), [dataclasses.asdict(a) for a in found.answers]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_root)], capture_output=True, text=True, timeout=100, cwd=PLACE,
        env=os.environ | {"KVXFER_ISA": most, "PYTHONPATH": PLACE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    features, answers = json.loads(done.stdout)
    assert "avx512" not in features
    assert most != "scalar" or features == "scalar"
    assert [Answer(**answer) for answer in answers] == plain[1].answers


# ---- the reference converter: there is no switch for it, so it fills and reads slots from outside


def test_the_reference_reads_what_the_engine_stored(tmp_root: Path) -> None:
    """Every slot, by its place on disk alone."""
    for per_chunk in (1, 3):
        model = Model.random(GEOMETRY, 12)
        with Node(tmp_root / str(per_chunk), model, blocks_per_chunk=per_chunk) as node:
            ids = np.random.default_rng(1).permutation(12).reshape(-1, per_chunk)
            if per_chunk > 1:
                ids[1, 0] = ids[-1, -1] = -1
            assert node.put(range(len(ids)), block_ids=ids.tolist()).bitmap.all()
            slot = node.source[0].mapping.slot
            payloads = np.stack(
                [np.frombuffer(node.slot_bytes(n), np.uint8)[: slot.payload_stride] for n in range(len(ids))]
            )
            for mine in node.target:
                reference.scatter(payloads, ids, mine.mapping, mine)
            node.check(ids[ids >= 0].tolist())


def image(node: Node, number: int, ids: Sequence[int], generation: int) -> np.ndarray:
    """A whole slot, gathered by the reference and sealed a trailer page at a time."""
    slot = node.source[0].mapping.slot
    payload = np.zeros((1, slot.payload_stride), np.uint8)
    sums = np.zeros((1, slot.num_segments), np.uint64)
    for mine in node.source:
        reference.gather(mine, np.array([ids], np.int64), mine.mapping, payload, sums)
    pages = np.zeros((slot.num_trailers, slot.alignment), np.uint8)
    key = keys_of([number])[0]
    for page in range(slot.num_trailers):
        trailer = _native.Trailer(
            key_bytes=len(key), generation=generation, first_segment=page, segment_count=1,
            num_segments=slot.num_segments, blocks_per_chunk=slot.blocks_per_chunk,
            payload_bytes=slot.payload_bytes, segment_bytes=slot.segment_bytes,
        )  # fmt: skip
        trailer.namespace_digest[:], trailer.key[: len(key)] = node.digest, key
        trailer.mask[0] = sum(1 << i for i, block in enumerate(ids) if block >= 0)
        own = sums[0, page:].ctypes.data
        assert _native.lib().kvx_trailer_seal(ctypes.byref(trailer), own, pages[page].ctypes.data, slot.alignment) == 0
    return np.concatenate([payload.reshape(-1), pages.reshape(-1)])


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_the_engine_loads_what_the_reference_wrote(tmp_root: Path, per_chunk: int, direct: str) -> None:
    model = Model.random(GEOMETRY, 12)
    with Node(tmp_root, model, blocks_per_chunk=per_chunk, direct=direct) as node:
        slot = node.source[0].mapping.slot
        ids = np.random.default_rng(2).permutation(12).reshape(-1, per_chunk)
        if per_chunk > 1:
            ids[0, -1] = -1
        slots = node.store.reserve(node.digest, slot, len(ids))
        for number, (place, row) in enumerate(zip(slots, ids.tolist(), strict=True)):
            with place.slab.path.open("r+b") as file:
                file.seek(place.slot_offset)
                file.write(image(node, number, row, place.generation).tobytes())
                file.flush()
                os.fsync(file.fileno())
        masks = [sum(1 << i for i, block in enumerate(row) if block >= 0) for row in ids.tolist()]
        items = [(keys_of([number])[0], place, masks[number]) for number, place in enumerate(slots)]
        assert all(node.store.commit(node.digest, items))
        result = node.get(range(len(ids)), block_ids=ids.tolist())
        assert result.bitmap.all(), result.errors
        node.check(ids[ids >= 0].tolist())


def test_a_slot_of_the_engine_and_one_of_the_reference_are_the_same_bytes(tmp_root: Path) -> None:
    model = Model.random(GEOMETRY, 6)
    with Node(tmp_root, model, blocks_per_chunk=2) as node:
        ids = [[0, 1], [-1, 2], [5, 3]]
        assert node.put(range(3), block_ids=ids).bitmap.all()
        for number, row in enumerate(ids):
            found = node.store.pin(node.digest, keys_of([number]))[0]
            assert found is not None
            want = image(node, number, row, found.generation)
            node.store.unpin([found])
            assert node.slot_bytes(number) == want.tobytes()
