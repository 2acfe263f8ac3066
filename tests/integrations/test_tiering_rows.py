"""Where KvxferTieringSpec's worker puts which byte, against copies done a descriptor at a time. Needs torch, not vLLM.

vLLM's worker makes a descriptor (source, destination, size) for each page of direct rows, and for each fragment of
canonical ones; `unrolled` finds the same ones from what vLLM registers, and copies them with plain slices of arrays. A
second oracle (row_oracle) knows what canonical rows must hold without reading a run. test_tiering_stock.py runs vLLM's
own worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.errors import LayoutError
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.integrations.vllm_rows import job_pages, make_plan
from kvxfer.layout import PageLayout
from kvxfer.mapping import CopyRun
from kvxfer.rows import RowPage, vllm_v1_mappings
from tests.convert.common import assert_same
from tests.oracle import POISON
from tests.row_oracle import Layer, Place

torch: Any = pytest.importorskip("torch")
Bytes = NDArray[np.uint8]

# ---- doubles of what vLLM hands over, with its names


@dataclass
class Tensor:
    tensor: Any
    page_size_bytes: int


@dataclass(frozen=True)
class Mapping:
    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[CopyRun, ...]
    num_writers: int = 1
    writer_index: int = 0
    parallelism_agnostic: bool = True


@dataclass
class Ref:
    tensor_idx: int
    page_size_bytes: int
    mapping: Mapping | None = None


@dataclass
class Caches:
    tensors: list[Tensor]
    group_data_refs: list[list[Ref]]


@dataclass
class Blocks:
    block_ids: Any
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


@dataclass
class Rows:
    block_ids: Any


@dataclass
class Region:
    """Rows of all ranks, `start` bytes into each of which this rank's own part begins."""

    rows: Bytes
    start: int = 0
    taken: int = field(default=0, init=False)
    views: list[Bytes] = field(default_factory=list, init=False)

    def create_next_worker_view(self, size: int) -> Any:
        return self._take(self.start, size)

    def create_next_canonical_view(self, size: int) -> Any:
        return self._take(0, size)

    def _take(self, start: int, size: int) -> Any:
        at = start + self.taken
        self.taken += size
        assert at + size <= self.rows.shape[1]
        self.views.append(self.rows[:, at : at + size])
        return torch.from_numpy(self.rows).view(torch.int8)[:, at : at + size]


def unrolled(caches: Caches, region: Region, blocks: Blocks, rows: Rows, per_chunk: int, canonical: bool, store: bool):
    """Copies what vLLM's worker makes descriptors of. Returns the bytes."""
    ids, chunks, moved = list(blocks.block_ids), list(rows.block_ids), 0
    for refs, size, first in zip(caches.group_data_refs, blocks.group_sizes, blocks.block_indices, strict=True):
        if size == 0:
            continue
        skip = first % per_chunk
        mine = chunks[: -(-(size + skip) // per_chunk)]
        chunks = chunks[len(mine) :]
        places = [(chunk, part) for chunk in mine for part in range(per_chunk)][skip : skip + size]
        for ref in refs:
            tensor, view = caches.tensors[ref.tensor_idx], region.views[ref.tensor_idx]
            pages = tensor.tensor.numpy().view(np.uint8)
            cell = view.shape[1] // per_chunk
            for block, (chunk, part) in zip(ids[:size], places, strict=True):
                pieces = [(0, 0, ref.page_size_bytes)]
                if canonical:
                    assert ref.mapping
                    page_id = chunk * per_chunk + part
                    if store and page_id % ref.mapping.num_writers != ref.mapping.writer_index:
                        continue
                    pieces = [
                        (run.local_offset + i * run.local_stride, run.canonical_offset + i * run.canonical_stride, n)
                        for run in ref.mapping.runs
                        for i in range(run.num_fragments)
                        for n in [run.fragment_size]
                    ]
                for near, far, n in pieces:
                    here = pages[block, near : near + n]
                    there = view[chunk, part * cell + far : part * cell + far + n]
                    if store:
                        there[:] = here
                    else:
                        here[:] = there
                    moved += n
        ids = ids[size:]
    assert not ids and not chunks
    return moved


def check(
    caches: Caches, rows: Bytes, job: tuple[Blocks, Rows], per_chunk: int, *, canonical: bool = False, start: int = 0
) -> None:
    """A store and a load of a job are what is unrolled; all other bytes of rows and tensors are kept."""
    mine, theirs = Region(rows.copy(), start), Region(rows.copy(), start)
    plan = make_plan(caches, mine, per_chunk, canonical=canonical)
    make_plan(caches, theirs, per_chunk, canonical=canonical)  # takes the views
    moved = unrolled(caches, theirs, *job, per_chunk, canonical, store=True)
    assert plan.gather(*job_pages(*job, per_chunk)) == moved
    assert_same(mine.rows, theirs.rows, "rows")
    noise = np.random.default_rng(77).integers(0, 256, size=rows.shape, dtype=np.uint8)
    mine.rows[:] = theirs.rows[:] = noise
    before = [tensor.tensor.clone() for tensor in caches.tensors]
    moved = unrolled(caches, theirs, *job, per_chunk, canonical, store=False)
    want = [tensor.tensor.clone() for tensor in caches.tensors]
    for tensor, old in zip(caches.tensors, before, strict=True):
        tensor.tensor.copy_(old)
    assert plan.scatter(*job_pages(*job, per_chunk)) == moved
    for number, (tensor, expected) in enumerate(zip(caches.tensors, want, strict=True)):
        assert_same(tensor.tensor.numpy().view(np.uint8), expected.numpy().view(np.uint8), f"tensor {number}")
    assert_same(mine.rows, noise, "rows after the load")


def pages(count: int, size: int, seed: int) -> Any:
    """A tensor of random pages."""
    noise = np.random.default_rng(seed).integers(-128, 128, size=(count, size), dtype=np.int8)
    return torch.from_numpy(noise)


def random_job(
    seed: int, groups: int, per_chunk: int, num_blocks: int, num_rows: int, *, whole: bool = False
) -> tuple[Blocks, Rows]:
    """As vLLM submits them: consecutive blocks of a request for each group, from anywhere within a chunk; now and then
    nothing of a group."""
    rng = np.random.default_rng(seed)
    blocks, rows = list(rng.permutation(num_blocks)), list(rng.permutation(num_rows))
    sizes: list[int] = []
    indices: list[int] = []
    ids: list[int] = []
    chunks: list[int] = []
    for group in range(groups):
        room = min(len(rows) // (groups - group), len(blocks) // (groups - group) // per_chunk)
        first = int(rng.integers(0, 20))
        skip = 0 if whole else first % per_chunk
        first += skip - first % per_chunk
        count = room * per_chunk if whole else int(rng.integers(0, room * per_chunk - skip + 1))
        taken = -(-(count + skip) // per_chunk) if count else 0
        sizes.append(count)
        indices.append(first)
        ids += [int(blocks.pop()) for _ in range(count)]
        chunks += [int(rows.pop()) for _ in range(taken)]
    return Blocks(np.array(ids, dtype=np.int32), sizes, indices), Rows(np.array(chunks, dtype=np.int32))


NUM_BLOCKS, NUM_ROWS = 24, 9


def poisoned(width: int) -> Bytes:
    return np.full((NUM_ROWS, width), POISON, dtype=np.uint8)


@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("padding", [0, 40])
def test_direct_rows(per_chunk: int, padding: int) -> None:
    """Three layers; the rank is the second of two in the row."""
    size = 200
    caches = Caches(
        [Tensor(pages(NUM_BLOCKS, size + padding, n), size + padding) for n in range(3)],
        [[Ref(n, size) for n in range(3)]],
    )
    part = 3 * (size + padding) * per_chunk
    for seed in range(5):
        check(
            caches, poisoned(2 * part + 64), random_job(seed, 1, per_chunk, NUM_BLOCKS, NUM_ROWS), per_chunk, start=part
        )


@pytest.mark.parametrize("per_chunk", [1, 4])
def test_direct_rows_of_groups_that_share_tensors(per_chunk: int) -> None:
    """As of a hybrid model: the third group has pages of its own size in the same tensors, and one tensor alone."""
    caches = Caches(
        [Tensor(pages(NUM_BLOCKS, size, size), size) for size in (256, 256, 96)],
        [[Ref(0, 256), Ref(1, 256)], [Ref(0, 256), Ref(1, 256)], [Ref(1, 120), Ref(2, 96)]],
    )
    for seed in range(8):
        check(caches, poisoned(608 * per_chunk), random_job(seed, 3, per_chunk, NUM_BLOCKS, NUM_ROWS), per_chunk)


def test_direct_rows_of_tensors_in_one_piece_of_memory() -> None:
    """Packed: layers interleaved within a block, so that a page's stride exceeds its size; or one region of blocks for
    all layers, which every group moves whole."""
    memory = pages(NUM_BLOCKS, 3 * 64, 1)
    layers = [Tensor(memory[:, n * 64 : (n + 1) * 64], 64) for n in range(3)]
    interleaved = Caches(layers, [[Ref(0, 64), Ref(1, 60)], [Ref(2, 64)]])
    whole = Caches([Tensor(memory, 192)], [[Ref(0, 192)], [Ref(0, 192)]])
    for seed in range(4):
        check(interleaved, poisoned(192 * 4), random_job(seed, 2, 4, NUM_BLOCKS, NUM_ROWS), 4)
        check(whole, poisoned(192 * 4), random_job(seed, 2, 4, NUM_BLOCKS, NUM_ROWS), 4)


def test_layers_with_the_same_pages_are_moved_once() -> None:
    caches = Caches([Tensor(pages(NUM_BLOCKS, 64, 1), 64)], [[Ref(0, 64), Ref(0, 64)]])
    plan = make_plan(caches, Region(poisoned(64)), 1, canonical=False)
    blocks, rows, counts = job_pages(Blocks([3, 5], [2], [0]), Rows([1, 0]), 1)
    assert plan.gather(blocks, rows, counts) == 2 * 64


# ---- canonical rows

ORDERS = {
    "packed-nhd": PageLayout.packed_nhd,
    "packed": PageLayout.packed,
    "nhd": PageLayout.nhd,
    "hnd": PageLayout.hnd,
}
PLACES = [(4, 1, 1), (4, 2, 1), (4, 4, 1), (2, 4, 1), (1, 4, 1), (1, 4, 2)]  # heads, tp, dcp


class Ranks:
    """Simulated ranks that have their parts of the same layers, registered as vLLM does."""

    def __init__(self, order: str, heads: int, tp: int, dcp: int, per_chunk: int, padding: int = 0) -> None:
        self.per_chunk = per_chunk
        geometry = KVGeometry(num_layers=1, num_kv_heads=heads, head_dim=10, dtype="float16", tokens_per_block=6)
        self.layers = [Layer.random(geometry, order, NUM_BLOCKS, dcp, seed) for seed in range(2)]
        page = RowPage(geometry=geometry, layout=ORDERS[order](geometry, max(1, heads // tp)))
        mappings = vllm_v1_mappings([page], ShardSpec(tp_size=tp, dcp_size=dcp), blocks_per_chunk=per_chunk)
        self.places = [Place(tp, dcp, 1, 1, rank) for rank in range(tp)]
        self.caches: list[Caches] = []
        for place, mapping in zip(self.places, mappings, strict=True):
            (derived,) = (cell.page for cell in mapping.cells)
            ref = Mapping(
                derived.canonical_bytes, derived.local_bytes, derived.runs, derived.num_writers, derived.writer_index
            )
            size = derived.local_bytes + padding
            tensors = [
                Tensor(torch.from_numpy(layer.tensor(place, padding=padding)).view(torch.int8).view(-1, size), size)
                for layer in self.layers
            ]
            self.caches.append(Caches(tensors, [[Ref(n, derived.local_bytes, ref) for n in range(2)]]))
        self.cell = mappings[0].cells[0].page.canonical_bytes

    def expected(self, width: int, blocks: Any, places: Any) -> Bytes:
        """Rows by the oracle that reads no run."""
        rows = poisoned(width)
        for block, page in zip(blocks.tolist(), places.tolist(), strict=True):
            row, part = divmod(page, self.per_chunk)
            for number, layer in enumerate(self.layers):
                at = (number * self.per_chunk + part) * self.cell
                rows[row, at : at + self.cell] = layer.canonical(block)
        return rows


@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize(("heads", "tp", "dcp"), PLACES)
@pytest.mark.parametrize("order", ORDERS)
def test_canonical_rows(order: str, heads: int, tp: int, dcp: int, per_chunk: int) -> None:
    """Each rank against the unrolled descriptors, and all ranks together against the oracle of whole rows."""
    padding = 24 if per_chunk == 4 else 0
    ranks = Ranks(order, heads, tp, dcp, per_chunk, padding)
    width = 2 * ranks.cell * per_chunk + 32
    for seed in range(3):
        job = random_job(seed, 1, per_chunk, NUM_BLOCKS, NUM_ROWS)
        blocks, places, counts = job_pages(*job, per_chunk)
        shared = poisoned(width)
        for caches in ranks.caches:
            before = [tensor.tensor.clone() for tensor in caches.tensors]
            check(caches, poisoned(width), job, per_chunk, canonical=True)
            for tensor, old in zip(caches.tensors, before, strict=True):
                tensor.tensor.copy_(old)
            make_plan(caches, Region(shared), per_chunk, canonical=True).gather(blocks, places, counts)
        assert_same(shared, ranks.expected(width, blocks, places), f"seed {seed}")


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (4, 1), (2, 4), (1, 4)])
def test_rows_of_one_tensor_parallel_size_are_read_by_another(writers: int, readers: int) -> None:
    job = random_job(3, 1, 4, NUM_BLOCKS, NUM_ROWS, whole=True)
    blocks, places, counts = job_pages(*job, 4)
    assert len(blocks) == NUM_BLOCKS
    before, after = (Ranks("packed", 2, tp, 1, 4) for tp in (writers, readers))
    rows = poisoned(2 * before.cell * 4)
    for caches in before.caches:
        make_plan(caches, Region(rows), 4, canonical=True).gather(blocks, places, counts)
    for place, caches in zip(after.places, after.caches, strict=True):
        for tensor in caches.tensors:
            tensor.tensor.fill_(1)
        make_plan(caches, Region(rows), 4, canonical=True).scatter(blocks, places, counts)
        for layer, tensor in zip(after.layers, caches.tensors, strict=True):
            assert_same(tensor.tensor.numpy().view(np.uint8).reshape(-1), layer.tensor(place), f"rank {place.rank}")


def test_canonical_rows_of_groups_whose_pages_differ() -> None:
    """Aliased tensors: a place in the row is as large as the largest canonical page of it; three runs and one."""
    run = CopyRun(
        local_offset=0, canonical_offset=16, fragment_size=8, num_fragments=4, local_stride=8, canonical_stride=32
    )
    tail = CopyRun(
        local_offset=32, canonical_offset=0, fragment_size=16, num_fragments=1, local_stride=16, canonical_stride=16
    )
    more = CopyRun(
        local_offset=48, canonical_offset=140, fragment_size=4, num_fragments=2, local_stride=4, canonical_stride=6
    )
    large = Mapping(160, 56, (run, tail, more), num_writers=3, writer_index=1)
    small = Mapping(80, 40, (CopyRun(**{**_fields(tail), "local_offset": 0, "fragment_size": 40}),))
    caches = Caches(
        [Tensor(pages(NUM_BLOCKS, 64, n), 64) for n in range(2)],
        [[Ref(0, 56, large), Ref(1, 40, small)], [Ref(0, 40, small), Ref(1, 56, large)]],
    )
    for seed in range(6):
        check(caches, poisoned(320 * 4 + 8), random_job(seed, 2, 4, NUM_BLOCKS, NUM_ROWS), 4, canonical=True)


def _fields(run: CopyRun) -> dict[str, int]:
    names = ("local_offset", "canonical_offset", "fragment_size", "num_fragments", "local_stride", "canonical_stride")
    return {name: getattr(run, name) for name in names}


def test_a_lone_writer_writes_what_others_have_too() -> None:
    ranks = Ranks("nhd", 1, 4, 1, 1)
    blocks, places, counts = job_pages(Blocks(np.arange(6), [6], [0]), Rows(np.arange(6)), 1)
    rows = poisoned(2 * ranks.cell)
    plan = make_plan(ranks.caches[0], Region(rows), 1, canonical=True, lone_writer=True)
    plan.gather(blocks, places, counts)
    assert_same(rows, ranks.expected(2 * ranks.cell, blocks, places))


# ---- refusals


@pytest.mark.parametrize(
    ("caches", "canonical", "message"),
    [
        (Caches([], []), False, "vLLM has registered no KV cache"),
        (Caches([Tensor(pages(4, 64, 0), 60)], [[Ref(0, 60)]]), False, "its blocks are no pages of 60 bytes"),
        (Caches([Tensor(pages(4, 64, 0), 64)], [[Ref(0, 65)]]), False, "a page of 65 bytes exceeds its place"),
        (Caches([Tensor(pages(4, 64, 0)[:, ::2], 32)], [[Ref(0, 32)]]), False, "its pages are in several pieces"),
        (Caches([Tensor(pages(4, 64, 0), 64)], [[Ref(0, 64)]]), True, "vLLM has no mapping of its pages"),
        (
            Caches([Tensor(pages(4, 64, 0), 64)], [[Ref(0, 64, Mapping(64, 60, ()))]]),
            True,
            "vLLM has no mapping of its pages of 64 bytes",
        ),
        (
            Caches(
                [Tensor(pages(4, 64, 0), 64)],
                [[Ref(0, 64, Mapping(64, 64, (CopyRun(local_offset=0, canonical_offset=0, fragment_size=32,
                                                      num_fragments=1, local_stride=32, canonical_stride=32),)))]],
            ),
            True,
            "no run covers bytes",
        ),
        (
            Caches([Tensor(pages(4, 8, 0), 8), Tensor(pages(4, 8, 0), 8)], [[Ref(0, 8, Mapping(8, 8, (CopyRun(
                local_offset=0, canonical_offset=0, fragment_size=8, num_fragments=1, local_stride=8,
                canonical_stride=8),)))]]),
            True,
            "tensor 1 is of no group",
        ),
        (
            Caches([Tensor(pages(4, 8, 0), 8)], [[Ref(0, 8, Mapping(8, 8, (CopyRun(
                local_offset=0, canonical_offset=1, fragment_size=8, num_fragments=1, local_stride=8,
                canonical_stride=8),)))]]),
            True,
            "kvx_row_plan_new refused",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_certified_is_refused(caches: Caches, canonical: bool, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_plan(caches, Region(poisoned(256)), 1, canonical=canonical)


@pytest.mark.parametrize(
    ("blocks", "rows", "message"),
    [
        (Blocks([1, 2], [3], [0]), Rows([0]), r"2 blocks and 1 rows, where .* want 3 and 1"),
        (Blocks([1, 2, 3], [3], [2]), Rows([0]), r"want 3 and 2"),
        (Blocks([1, 2, 3], [3], [0]), Rows([0, 1]), r"want 3 and 1"),
        (Blocks([1], [1, 0], [0]), Rows([0]), "do not go together"),
        (Blocks([], [-1], [0]), Rows([]), "do not go together"),
    ],
)
def test_jobs_that_do_not_add_up_are_refused(blocks: Blocks, rows: Rows, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        job_pages(blocks, rows, 4)


def test_partial_chunks_go_where_they_lie_in_their_chunks() -> None:
    """Two groups with blocks 5..9 and 3..3 of their requests, chunks of 4; a group without any between them."""
    blocks, places, counts = job_pages(Blocks([10, 11, 12, 13, 14, 15], [5, 0, 1], [5, 99, 3]), Rows([7, 2, 0]), 4)
    assert blocks.tolist() == [10, 11, 12, 13, 14, 15]
    assert places.tolist() == [7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 2 * 4, 2 * 4 + 1, 3]
    assert counts.tolist() == [5, 0, 1]
