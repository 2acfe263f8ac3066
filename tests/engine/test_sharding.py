"""Engines over every kind of pages: stored by ranks of one sharding, loaded by ranks of another."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.bitmap import CompletionBitmap
from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.errors import LayoutError
from kvxfer.geometry import Kind, KVGeometry, ShardSpec
from kvxfer.jobs import Status
from kvxfer.keys import Namespace, kvx1_namespace, make_offload_key
from kvxfer.layout import LAYOUTS, PageLayout, kvx1_mappings, local_heads
from kvxfer.opaque import opaque_mappings, opaque_namespace
from kvxfer.prefix import GroupHits, on_all_ranks, usable_prefix
from kvxfer.results import TransferResult
from kvxfer.store import Store
from kvxfer.testing import FaultyIO
from tests.jobs.test_faults import until
from tests.oracle import POISON, Bytes, Model

CONFIG = EngineConfig(io_threads=2, shutdown_timeout_s=1.0)
FOUR_LAYERS = KVGeometry(num_layers=4, num_kv_heads=4, head_dim=20, dtype="float16", tokens_per_block=4)
JOBS = itertools.count(1)


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with Store.open(StoreConfig(root=tmp_root, capacity_bytes=64 << 20), writers=2) as opened:
        yield opened


def namespace_of(geometry: KVGeometry, **shape: int) -> Namespace:
    return kvx1_namespace(geometry, model="test", weights_fingerprint="seed 0", **shape)


def keys_of(count: int, prompt: str = "", group: int = 0) -> list[bytes]:
    return [make_offload_key(f"{prompt}:{n}".encode().ljust(32, b"."), group) for n in range(count)]


def run(engine: TransferEngine, call: str, keys: Sequence[bytes], ids: Any) -> TransferResult:
    job = next(JOBS)
    getattr(engine, call)(job, keys, ids)
    return engine.wait([job], 20)[job]


def move(
    store: Store, namespace: Namespace, pages: Sequence[KVPages], call: str, keys: Sequence[bytes], ids: Any
) -> TransferResult:
    """A store or a load by an engine of its own."""
    with TransferEngine(store, namespace, pages, config=CONFIG) as engine:
        return run(engine, call, keys, ids)


class Ranks:
    """All ranks of a sharding over the oracle's tensors."""

    def __init__(
        self,
        model: Model,
        tp: int,
        pp: int,
        layout: str,
        *,
        layer_groups: int,
        stages: tuple[int, ...] | None = None,
        per_chunk: int = 1,
        only: Sequence[int] | None = None,
    ) -> None:
        self.model, self.layout, self.stages = model, layout, stages or (model.geometry.num_layers // pp,) * pp
        self.places = [(rank, stage) for stage in range(pp) for rank in range(tp)]
        self.tp = tp
        heads = len(local_heads(model.geometry, ShardSpec(tp_size=tp)))
        page = LAYOUTS[layout](model.geometry, heads, padding=24, offset=8)
        mappings = kvx1_mappings(
            model.geometry,
            tp,
            page,
            pp_size=pp,
            blocks_per_chunk=per_chunk,
            layer_groups=layer_groups,
            stage_layers=stages,
        )
        self.pages = [
            KVPages(mapping, self.tensors(rank, stage, only), model.num_blocks)
            for mapping, (rank, stage) in zip(mappings, self.places, strict=True)
        ]

    def tensors(self, rank: int, stage: int, only: Sequence[int] | None) -> list[Bytes]:
        """A rank's tensors: those of its stage's layers, cut out of the whole model's."""
        per_layer = 2 if "split" in self.layout else 1
        everything = self.model.pages(self.layout, tp_size=self.tp, tp_rank=rank, padding=24, offset=8, only=only)
        first = sum(self.stages[:stage])
        return everything[first * per_layer : (first + self.stages[stage]) * per_layer]

    def check(self, blocks: Sequence[int]) -> None:
        """Asserts that these blocks are the model's and that nothing else was touched."""
        for mine, (rank, stage) in zip(self.pages, self.places, strict=True):
            for number, (got, want) in enumerate(
                zip(mine.tensors, self.tensors(rank, stage, list(blocks)), strict=True)
            ):
                assert np.array_equal(got, want), f"tp rank {rank}, stage {stage}, tensor {number}"


# ---- kvx1 over tensor- and pipeline-parallel ranks


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize(("source", "target"), [((2, 2), (4, 1)), ((4, 1), (2, 2)), ((1, 4), (8, 2)), ((8, 4), (1, 1))])
def test_stored_under_one_sharding_and_loaded_under_another(
    store: Store, source: tuple[int, int], target: tuple[int, int], per_chunk: int
) -> None:
    model = Model.random(FOUR_LAYERS, 12)
    namespace = namespace_of(FOUR_LAYERS, blocks_per_chunk=per_chunk, layer_groups=4)
    ids = np.random.default_rng(1).permutation(12).reshape(-1, per_chunk)
    if per_chunk > 1:
        ids[-1, -1] = -1  # a partial chunk
    stored = Ranks(model, *source, "nhd", layer_groups=4, per_chunk=per_chunk)
    assert move(store, namespace, stored.pages, "submit_store", keys_of(len(ids)), ids).bitmap.all()
    loaded = Ranks(model, *target, "split-hnd", layer_groups=4, per_chunk=per_chunk, only=[])
    assert move(store, namespace, loaded.pages, "submit_load", keys_of(len(ids)), ids).bitmap.all()
    loaded.check(ids[ids >= 0].tolist())


def test_up_and_down_the_ladder_of_shardings(store: Store) -> None:
    """R8: each step loads what the one before stored, and stores what it loaded."""
    model = Model.random(FOUR_LAYERS, 6)
    namespace = namespace_of(FOUR_LAYERS, layer_groups=4)
    ids = list(range(6))
    held = Ranks(model, 2, 2, "nhd", layer_groups=4)
    steps = [(4, 1, "hnd"), (8, 2, "packed"), (1, 4, "split"), (2, 1, "packed-nhd"), (2, 2, "nhd")]
    for number, (tp, pp, layout) in enumerate(steps):
        keys = keys_of(6, prompt=f"step {number}")
        assert move(store, namespace, held.pages, "submit_store", keys, ids).bitmap.all()
        held = Ranks(model, tp, pp, layout, layer_groups=4, only=[])
        assert move(store, namespace, held.pages, "submit_load", keys, ids).bitmap.all()
        held.check(ids)


@pytest.mark.parametrize("stages", [(3, 1), (1, 3), (2, 1, 1)])
def test_stages_of_unequal_length(store: Store, stages: tuple[int, ...]) -> None:
    model = Model.random(FOUR_LAYERS, 6)
    namespace = namespace_of(FOUR_LAYERS, layer_groups=4)
    even = Ranks(model, 2, 2, "nhd", layer_groups=4)
    keys, ids = keys_of(6), list(range(6))
    assert move(store, namespace, even.pages, "submit_store", keys, ids).bitmap.all()
    uneven = Ranks(model, 2, len(stages), "nhd", layer_groups=4, stages=stages, only=[])
    assert move(store, namespace, uneven.pages, "submit_load", keys, ids).bitmap.all()
    uneven.check(ids)
    again = keys_of(6, prompt="again")
    assert move(store, namespace, uneven.pages, "submit_store", again, ids).bitmap.all()
    whole = Ranks(model, 1, 1, "nhd", layer_groups=4, only=[])
    assert move(store, namespace, whole.pages, "submit_load", again, ids).bitmap.all()
    whole.check(ids)


# ---- what arrived on all ranks


def damage(store: Store, namespace: Namespace, key: bytes, segment: int) -> None:
    """Inverts a bit of one segment of a stored chunk."""
    found = store.locate(namespace.digest(store.weight_epoch), key)
    assert found is not None
    path, offset, layout = found
    place = offset + segment * layout.segment_stride
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), place)


def test_ranks_that_load_apart_agree_by_and(store: Store) -> None:
    """Each rank reads only its own segments, so each sees only its own damage."""
    model = Model.random(FOUR_LAYERS, 10)
    namespace = namespace_of(FOUR_LAYERS, layer_groups=2)
    keys, ids = keys_of(10), list(range(10))
    source = Ranks(model, 1, 1, "nhd", layer_groups=2)
    assert move(store, namespace, source.pages, "submit_store", keys, ids).bitmap.all()
    # Four heads and two groups of layers: segment 7 is the last head of the second stage.
    damage(store, namespace, keys[6], 0)
    damage(store, namespace, keys[8], 7)
    target = Ranks(model, 2, 2, "hnd", layer_groups=2, only=[])
    with engines_of(store, namespace, target) as engines, FaultyIO() as io:
        io.hang("pread")  # or what the first one finds damaged is gone before the last one asks for it
        for engine in engines:
            engine.submit_load(1, keys, ids)
        until(lambda: all(engine.stats()["busy_threads"] for engine in engines), "each has asked for its chunks")
        io.release()
        results = [engine.wait([1], 20)[1] for engine in engines]
    assert [result.bitmap.missing() for result in results] == [[6], [], [], [8]]
    assert [[(e.chunk, e.status) for e in r.errors] for r in results] == [
        [(6, Status.BAD_SUM)],
        [],
        [],
        [(8, Status.BAD_SUM)],
    ]
    together = on_all_ranks(result.bitmap for result in results)
    assert together.missing() == [6, 8]
    group = GroupHits.of(FOUR_LAYERS, (result.bitmap for result in results))
    answer = usable_prefix([group], prompt_tokens=40)
    assert (answer.usable_tokens, answer.prefix_chunks, answer.kept_beyond_gap) == (24, 6, 2)


@contextmanager
def engines_of(store: Store, namespace: Namespace, ranks: Ranks) -> Iterator[list[TransferEngine]]:
    """An engine for each rank."""
    with ExitStack() as stack:
        yield [stack.enter_context(TransferEngine(store, namespace, [pages], config=CONFIG)) for pages in ranks.pages]


def test_groups_of_unequal_pages_are_cut_where_all_can_go_on(store: Store) -> None:
    """A window of eight tokens in pages of another size than full attention's: each group has slots of its own."""
    sliding = replace(FOUR_LAYERS, num_layers=2, head_dim=12, kind=Kind.SLIDING_WINDOW, window=8)
    groups = [Model.random(sliding, 10, seed=1), Model.random(FOUR_LAYERS, 10, seed=2)]
    ids, hits, targets = list(range(10)), [], []
    for number, (model, lost) in enumerate(zip(groups, ([6, 1], [8]), strict=True)):
        namespace, keys = namespace_of(model.geometry), keys_of(10, group=number)
        source = Ranks(model, 2, 1, "nhd", layer_groups=1)
        assert move(store, namespace, source.pages, "submit_store", keys, ids).bitmap.all()
        for chunk in lost:
            damage(store, namespace, keys[chunk], 0)
        target = Ranks(model, 4, 1, "hnd", layer_groups=1, only=[])
        result = move(store, namespace, target.pages, "submit_load", keys, ids)
        assert result.bitmap.missing() == sorted(lost)
        hits.append(GroupHits.of(model.geometry, [result.bitmap]))
        targets.append(target)
    # Full attention reaches block 8; the window of a cut there needs blocks 6 and 7, and of one at 6 blocks 4 and 5.
    answer = usable_prefix(hits, prompt_tokens=40)
    assert (answer.usable_tokens, answer.recompute_tokens) == (24, 16)
    targets[0].check([0, 2, 3, 4, 5, 7, 8, 9])
    targets[1].check([0, 1, 2, 3, 4, 5, 6, 7, 9])


# ---- latents with an indexer's keys, and opaque pages


def filled(sizes: Sequence[int], padding: int, offset: int, blocks: int, seed: int | None) -> list[Bytes]:
    """Tensors of pages of these sizes, all else POISON; without a seed the pages, too."""
    rng = np.random.default_rng(seed)
    out = []
    for size in sizes:
        memory = np.full(offset + blocks * (size + padding), POISON, dtype=np.uint8)
        pages = memory[offset:].reshape(blocks, -1)[:, :size]
        if seed is not None:
            pages[:] = rng.integers(0, 256, size=pages.shape, dtype=np.uint8)
        out.append(memory)
    return out


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_a_latent_and_its_indexers_keys(store: Store, per_chunk: int) -> None:
    geometry = KVGeometry(
        num_layers=4,
        num_kv_heads=1,
        head_dim=36,
        dtype="bfloat16",
        tokens_per_block=4,
        kind=Kind.MLA,
        extra_bytes=(33, 0, 33, 0),
    )
    layouts = [PageLayout.nhd(tensor, 1, padding=8, offset=4) for tensor in geometry.tensors]
    sizes = [layout.page_bytes for layout in layouts]
    whole = filled(sizes, 8, 4, 8, seed=3)
    namespace = namespace_of(geometry, blocks_per_chunk=per_chunk, layer_groups=2)
    ids = np.arange(8).reshape(-1, per_chunk)
    keys = keys_of(len(ids))
    shape = {"blocks_per_chunk": per_chunk, "layer_groups": 2}
    source = kvx1_mappings(geometry, 4, layouts, **shape)
    pages = [KVPages(mapping, [t.copy() for t in whole], 8) for mapping in source]
    assert move(store, namespace, pages, "submit_store", keys, ids).bitmap.all()
    target = kvx1_mappings(geometry, 2, layouts, pp_size=2, **shape)
    empty = filled(sizes, 8, 4, 8, seed=None)
    loaded = [
        KVPages(mapping, [t.copy() for t in empty[3 * stage : 3 * stage + 3]], 8)
        for mapping, stage in zip(target, (0, 0, 1, 1), strict=True)
    ]
    assert move(store, namespace, loaded, "submit_load", keys, ids).bitmap.all()
    for mine, stage in zip(loaded, (0, 0, 1, 1), strict=True):
        for got, want in zip(mine.tensors, whole[3 * stage : 3 * stage + 3], strict=True):
            assert np.array_equal(got, want)


def test_states_come_back_under_their_own_topology_alone(store: Store) -> None:
    geometry = KVGeometry.opaque((4096, 100), tokens_per_block=16)
    layouts = [PageLayout.whole(size, padding=12, offset=8) for size in geometry.layer_page_bytes]

    def ranks(sizes: ShardSpec, seed: int | None) -> list[KVPages]:
        mappings = opaque_mappings([[page.tensor for page in layouts]] * sizes.world_size, sizes)
        assert {mapping.topology for mapping in mappings} == {named(sizes).topology}
        return [
            KVPages(mapping, filled(geometry.layer_page_bytes, 12, 8, 6, seed if seed is None else seed + rank), 6)
            for rank, mapping in enumerate(mappings)
        ]

    def named(sizes: ShardSpec) -> Namespace:
        return opaque_namespace(geometry, sizes, model="test", weights_fingerprint="seed 0")

    here, there = ShardSpec(tp_size=2), ShardSpec(pp_size=2)
    keys, ids = keys_of(6), list(range(6))
    source = ranks(here, seed=5)
    assert move(store, named(here), source, "submit_store", keys, ids).bitmap.all()
    for wrong in (named(there), namespace_of(geometry)):
        with pytest.raises(LayoutError, match="topology 'tp2 pp1 dcp1 pcp1 interleave1'; the namespace has"):
            TransferEngine(store, wrong, source, config=CONFIG)
    foreign = ranks(there, seed=None)
    assert move(store, named(there), foreign, "submit_load", keys, ids).bitmap.none()
    target = ranks(here, seed=None)
    damage(store, named(here), keys[4], 1)
    result = move(store, named(here), target, "submit_load", keys, ids)
    assert result.bitmap.missing() == [4]
    for mine, want in zip(target, source, strict=True):
        for got, right, layout in zip(mine.tensors, want.tensors, layouts, strict=True):
            lost = slice(8 + 4 * layout.block_stride, 8 + 4 * layout.block_stride + layout.page_bytes)
            assert (got[lost] == POISON).all()
            right = right.copy()
            right[lost] = POISON
            assert np.array_equal(got, right)
    states = GroupHits.of(geometry, [result.bitmap])
    attention = GroupHits(bitmap=CompletionBitmap.full(24), tokens_per_block=4)
    assert usable_prefix([states, attention], prompt_tokens=97).usable_tokens == 96
    assert usable_prefix([states, attention], prompt_tokens=96).usable_tokens == 64  # the state at 80 is lost
