"""The main job on a real model: its KV cache goes to disk, a block is lost, it comes back, and the model goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.bitmap import CompletionBitmap
from kvxfer.cli.source import RankPages, rank_heads
from kvxfer.config import StoreConfig
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine, TransferResult
from kvxfer.geometry import KVGeometry
from kvxfer.jobs import Status
from kvxfer.keys import kvx1_namespace, make_offload_key
from kvxfer.layout import PageLayout, kvx1_mappings
from kvxfer.prefix import full_attention
from kvxfer.store import Store

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from tests.model import tiny_llama  # noqa: E402  after the skips

TOKENS, BLOCK, NEXT = 640, 16, 16
BLOCKS = TOKENS // BLOCK
POOL = BLOCKS + 5  # blocks of a rank's pool, in no order
HEAD_BYTES = tiny_llama.HEAD_DIM * 4
GEOMETRY = KVGeometry(
    num_layers=tiny_llama.LAYERS, num_kv_heads=tiny_llama.KV_HEADS, head_dim=tiny_llama.HEAD_DIM, dtype="float32",
    tokens_per_block=BLOCK,
)  # fmt: skip
NAMESPACE = kvx1_namespace(GEOMETRY, model="tiny llama", weights_fingerprint="seed 1234")
KEYS = [make_offload_key(block.to_bytes(32, "big"), 0) for block in range(BLOCKS)]


@dataclass(frozen=True)
class Truth:
    """The run that never offloaded: the model, its prompt, its cache after the prompt, and what it said next."""

    model: Any
    prompt: Any  # int64 [TOKENS]
    cache: Any  # float32 [layers, 2, heads, TOKENS, head_dim]
    said: list[int]


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Prefill and go on, all in memory."""
    model, prompt = tiny_llama.build(), tiny_llama.prompt(TOKENS)
    cache = tiny_llama.cache_of([])
    logits = tiny_llama.forward(model, prompt, cache)
    kept = tiny_llama.keys_and_values(cache).clone()
    said, margin = tiny_llama.greedy(model, logits, cache, NEXT)
    assert len(set(said)) > NEXT // 2  # a model that repeats itself would hide a wrong cache
    assert margin > 1e-3  # float32 rounding cannot turn the choice
    return Truth(model, prompt, kept, said)


def ranks(tp: int, layout: PageLayout) -> tuple[list[RankPages], list[KVPages]]:
    """Poisoned pools of `tp` ranks, and the same as kvxfer sees them."""
    mappings = kvx1_mappings(GEOMETRY, tp, layout)
    pools = [RankPages(GEOMETRY, layout, rank_heads(GEOMETRY, tp, rank), POOL) for rank in range(tp)]
    return pools, [KVPages(mapping, pool.tensors, POOL) for mapping, pool in zip(mappings, pools, strict=True)]


def as_blocks(cache: Any) -> np.ndarray:
    """A cache [layers, 2, heads, tokens, dim] as bytes [layers, 2, blocks, BLOCK, heads, head_bytes]."""
    raw = np.ascontiguousarray(cache.numpy().transpose(0, 1, 3, 2, 4)).view(np.uint8)
    return raw.reshape(tiny_llama.LAYERS, 2, BLOCKS, BLOCK, tiny_llama.KV_HEADS, HEAD_BYTES)


@dataclass(frozen=True)
class Loaded:
    """What came back, and where."""

    result: TransferResult
    stats: dict[str, int]
    pool: RankPages  # of the one rank that loaded
    block_ids: list[int]


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    """An empty store."""
    with Store.open(StoreConfig(root=tmp_root, capacity_bytes=64 << 20)) as opened:
        yield opened


def there_and_back(store: Store, truth: Truth, lost: list[int]) -> Loaded:
    """Offloads from TP2 NHD pages, flips a byte of each block in `lost` on disk, loads into padded TP1 HND pages."""
    shuffle = np.random.default_rng(1)
    source_ids = [int(block) for block in shuffle.permutation(POOL)[:BLOCKS]]
    target_ids = [int(block) for block in shuffle.permutation(POOL)[:BLOCKS]]
    pools, pages = ranks(2, PageLayout.nhd(GEOMETRY, 2))
    for pool in pools:
        pool.fill(as_blocks(truth.cache), source_ids)
    with TransferEngine(store, NAMESPACE, pages) as engine:
        engine.submit_store(1, KEYS, np.array(source_ids))
        assert engine.wait([1], timeout=60)[1].bitmap == CompletionBitmap.full(BLOCKS)
        digest = engine.digest
    for pool in pools:
        pool.poison()  # nothing may be read from here any more

    for block in lost:
        place = store.locate(digest, KEYS[block])
        assert place is not None
        path, offset, _ = place
        with open(path, "r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, offset + 1000)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), offset + 1000)

    pools, pages = ranks(1, PageLayout.hnd(GEOMETRY, tiny_llama.KV_HEADS, padding=384, offset=64))
    with TransferEngine(store, NAMESPACE, pages) as engine:
        engine.submit_load(2, KEYS, np.array(target_ids))
        result = engine.wait([2], timeout=60)[2]
        return Loaded(result, engine.stats(), pools[0], target_ids)


def cache_from_pages(loaded: Loaded, tokens: int) -> Any:
    """The model's cache of the first `tokens` tokens, read from the loaded pages and from nothing else."""
    ids = loaded.block_ids[: tokens // BLOCK]
    layers = []
    for layer in range(tiny_llama.LAYERS):
        planes = [np.ascontiguousarray(loaded.pool.plane(layer, plane)[ids]).view(np.float32) for plane in range(2)]
        heads_first = [plane.reshape(tokens, tiny_llama.KV_HEADS, -1).transpose(1, 0, 2).copy() for plane in planes]
        layers.append([torch.from_numpy(plane) for plane in heads_first])
    return tiny_llama.cache_of(layers)


@pytest.mark.parametrize(
    ("lost", "usable", "beyond"),
    [
        pytest.param([28], 448, 11, id="block 28 lost"),
        pytest.param([], 624, 0, id="whole hit"),
        pytest.param([0], 0, 39, id="first block lost"),
        pytest.param(list(range(BLOCKS)), 0, 0, id="none"),
    ],
)
def test_the_model_goes_on_with_the_same_tokens(
    store: Store, truth: Truth, lost: list[int], usable: int, beyond: int
) -> None:
    loaded = there_and_back(store, truth, lost)
    bitmap = loaded.result.bitmap
    assert bitmap.missing() == lost
    assert [(error.chunk, error.status) for error in loaded.result.errors] == [(n, Status.BAD_SUM) for n in lost]
    assert loaded.stats["chunks_verified"] == BLOCKS
    assert loaded.stats["bad_sum"] == len(lost)
    prefix = full_attention(bitmap, prompt_tokens=TOKENS, tokens_per_block=BLOCK)
    assert (prefix.usable_tokens, prefix.recompute_tokens) == (usable, TOKENS - usable)
    assert prefix.kept_beyond_gap == beyond

    checked, wrong = loaded.pool.compare(as_blocks(truth.cache), loaded.block_ids, list(bitmap))
    assert (checked, wrong) == ((BLOCKS - len(lost)) * GEOMETRY.block_bytes, 0)

    cache = cache_from_pages(loaded, usable) if usable else tiny_llama.cache_of([])
    assert cache.get_seq_length() == usable
    logits = tiny_llama.forward(truth.model, truth.prompt[usable:], cache)
    assert tiny_llama.greedy(truth.model, logits, cache, NEXT)[0] == truth.said


def test_a_wrong_byte_would_be_heard(store: Store, truth: Truth) -> None:
    """The comparison of tokens is no formality: pages that were not loaded change what the model says."""
    loaded = there_and_back(store, truth, [])
    loaded.pool.plane(1, 0)[loaded.block_ids[5]] = 0
    cache = cache_from_pages(loaded, 448)
    logits = tiny_llama.forward(truth.model, truth.prompt[448:], cache)
    assert tiny_llama.greedy(truth.model, logits, cache, NEXT)[0] != truth.said


def test_what_was_damaged_is_a_miss_until_it_is_stored_again(store: Store, truth: Truth) -> None:
    there_and_back(store, truth, [28])
    _, pages = ranks(1, PageLayout.nhd(GEOMETRY, tiny_llama.KV_HEADS))
    with TransferEngine(store, NAMESPACE, pages) as engine:
        assert engine.lookup(KEYS) == 28
    loaded = there_and_back(store, truth, [])
    assert loaded.result.bitmap.all()
