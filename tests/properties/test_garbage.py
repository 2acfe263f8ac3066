"""What nobody should pass: refused with an error of kvxfer's, or Python's own for a wrong type. Never anything else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvxfer.config import EngineConfig, StoreConfig
from kvxfer.convert import native, reference
from kvxfer.convert.pages import KVPages
from kvxfer.errors import KvxferError
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.keys import Namespace, make_offload_key
from kvxfer.layout import PageLayout, kvx1_mapping, row_mapping
from kvxfer.store import Store
from tests.engine.rig import GEOMETRY, Node, keys_of, poisoned
from tests.examples import examples
from tests.oracle import Model

many = settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
NUM_BLOCKS = 6
MODEL = Model.random(GEOMETRY, NUM_BLOCKS)

NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 5, 6, -1, -2, 7, 4096, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**40]
) | st.integers()  # fmt: skip
FLOATS = st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 0.5, 1.0, 1e300, 5e-324]) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | FLOATS | st.text(max_size=4) | st.binary(max_size=4) | st.just(1j)
DTYPES = [
    "?",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u4",
    "u8",
    ">i8",
    "f2",
    "f4",
    "f8",
    "c8",
    "M8[s]",
    "m8[s]",
    "O",
    "S3",
    "U2",
    "V4",
]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Of every dtype and of odd shapes and strides."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(np.prod([2 * n for n in shape])) if shape else 1
    values = np.array(draw(st.lists(st.integers(-3, 8), min_size=size, max_size=size)), np.int64)
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    flat = values.astype(dtype) if dtype.kind != "V" else values.astype("i4").view("V4")
    full = flat.reshape([2 * n for n in shape])
    cut = tuple(draw(st.sampled_from([slice(n), slice(None, None, 2), slice(n - 1, None, -1)])) for n in shape)
    return full[cut] if shape else full.reshape(())


VALUES = st.recursive(
    SCALARS | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=8,
)


def refused(call: Callable[[], Any]) -> bool:
    """Whether the call was refused. Any other error than kvxfer's or a TypeError is one of the test."""
    try:
        call()
    except (KvxferError, TypeError):
        return True
    return False


# ---- jobs


@pytest.fixture
def node(tmp_root: Path) -> Iterator[Node]:
    with Node(tmp_root, MODEL, capacity_bytes=8 << 20) as opened:
        assert opened.put(range(3)).bitmap.all()
        yield opened


@many
@given(call=st.sampled_from(["submit_load", "submit_store"]), ids=VALUES, n=st.integers(0, 4))
@example(call="submit_load", ids=[[0], [1, 2]], n=3)
def test_block_ids(node: Node, call: str, ids: Any, n: int) -> None:
    job, engine = node.next_job(), node.reader if call == "submit_load" else node.writer
    node.poison()
    if refused(lambda: getattr(engine, call)(job, keys_of(range(n)), ids)):
        assert poisoned(node.target)
        assert engine.stats()["jobs_open"] == 0
    else:  # then they were block ids
        table = np.asarray(ids)
        assert table.size == 0 or table.dtype.kind in "iu"
        assert table.size == n
        assert list(engine.wait([job], 20)) == [job]
    assert node.store.stats().pinned_entries == 0


@many
@given(call=st.sampled_from(["submit_load", "submit_store"]), keys=VALUES)
def test_keys(node: Node, call: str, keys: Any) -> None:
    job, engine = node.next_job(), node.reader if call == "submit_load" else node.writer
    ids = range(len(keys) if isinstance(keys, list | tuple | str | bytes | dict) else 1)
    if not refused(lambda: getattr(engine, call)(job, keys, ids)):
        assert all(isinstance(key, bytes) and 1 <= len(key) <= 64 for key in keys)
        assert list(engine.wait([job], 20)) == [job]
    assert engine.stats()["jobs_open"] == 0


@many
@given(deadline=SCALARS, speed=SCALARS)
def test_deadlines(node: Node, deadline: Any, speed: Any) -> None:
    job = node.next_job()

    def submit() -> None:
        node.reader.submit_load(job, keys_of([0, 1]), [0, 1], deadline=deadline, recompute_tokens_per_s=speed)

    if not refused(submit):
        assert list(node.reader.wait([job], 20)) == [job]
    assert node.reader.stats()["jobs_open"] == 0


@many
@given(st.binary(max_size=70) | SCALARS, SCALARS)
def test_offload_keys(block_hash: Any, group: Any) -> None:
    if not refused(lambda: make_offload_key(block_hash, group)):
        assert isinstance(block_hash, bytes)
        assert 1 <= len(block_hash) <= 60
        assert type(group) is int
        assert 0 <= group < 2**32


# ---- converters


PAGES = KVPages(kvx1_mapping(GEOMETRY, ShardSpec(), PageLayout.nhd(GEOMETRY, 4)), MODEL.pages("nhd"), NUM_BLOCKS)
SLOT = PAGES.mapping.slot


@many
@given(st.data())
def test_converters(data: st.DataObject) -> None:
    """One argument of each call is garbage, by turns."""
    before = [tensor.copy() for tensor in PAGES.tensors]
    good: dict[str, Any] = {
        "ids": np.array([[1], [4]]), "buffer": np.zeros((2, SLOT.payload_stride), np.uint8),
        "sums": np.zeros((2, SLOT.num_segments), np.uint64),
    }  # fmt: skip
    name = data.draw(st.sampled_from(sorted(good)))
    garbage = data.draw(VALUES)
    args = good | {name: garbage}
    for converter in (reference, native):
        calls = [
            lambda: converter.gather(PAGES, args["ids"], PAGES.mapping, args["buffer"], args["sums"]),  # noqa: B023
            lambda: converter.scatter(args["buffer"], args["ids"], PAGES.mapping, PAGES, args["sums"]),  # noqa: B023
        ]
        assert [refused(call) for call in calls] == [not (name == "sums" and garbage is None)] * 2
    for tensor, want in zip(PAGES.tensors, before, strict=True):
        if not (name == "sums" and garbage is None):
            assert np.array_equal(tensor, want)
        tensor[:] = want


@many
@given(st.lists(VALUES, min_size=3, max_size=3) | VALUES, st.just(NUM_BLOCKS) | VALUES)
def test_pages(tensors: Any, num_blocks: Any) -> None:
    assert refused(lambda: KVPages(PAGES.mapping, tensors, NUM_BLOCKS))
    if not refused(lambda: KVPages(PAGES.mapping, PAGES.tensors, num_blocks)):
        assert 1 <= int(num_blocks) <= NUM_BLOCKS


# ---- geometries, layouts, namespaces


@many
@given(st.data())
def test_geometries_and_layouts(data: st.DataObject) -> None:
    """Whatever is accepted can be worked with: its mapping was proved."""

    def draw(name: str, good: Any) -> Any:
        return data.draw(st.just(good) | st.just(good) | SCALARS | st.lists(NUMBERS, max_size=3), label=name)

    made: dict[str, Any] = {}

    def geometry() -> None:
        made["geometry"] = KVGeometry(
            num_layers=draw("num_layers", 2), num_kv_heads=draw("num_kv_heads", 4), head_dim=draw("head_dim", 8),
            dtype=draw("dtype", "float16"), tokens_per_block=draw("tokens_per_block", 4),
            kind=draw("kind", "attention"), window=draw("window", None), extra_bytes=draw("extra_bytes", 0),
        )  # fmt: skip

    def shard() -> None:
        made["shard"] = ShardSpec(tp_size=draw("tp_size", 2), tp_rank=draw("tp_rank", 1), pp_size=draw("pp_size", 1))

    def page() -> None:
        made["page"] = PageLayout(
            name="drawn", block_stride=draw("block_stride", 256), kv_stride=draw("kv_stride", 128),
            head_stride=draw("head_stride", 16), token_stride=draw("token_stride", 32),
            dim_stride=draw("dim_stride", 2), page_bytes=draw("page_bytes", 256), offset=draw("offset", 0),
        )  # fmt: skip

    if any([refused(geometry), refused(shard), refused(page)]):
        return
    if made["geometry"].num_layers > 1000 or made["geometry"].num_kv_heads > 1000:
        return  # accepted, and too large to try
    chunk = draw("blocks_per_chunk", 1), draw("layer_groups", 1)

    def mapping() -> None:
        made["mapping"] = kvx1_mapping(
            made["geometry"], made["shard"], made["page"], blocks_per_chunk=chunk[0], layer_groups=chunk[1]
        )

    if not refused(mapping):
        assert made["mapping"].part_bytes > 0


@many
@given(VALUES, VALUES)
def test_rows(row_bytes: Any, row_stride: Any) -> None:
    if isinstance(row_bytes, int) and row_bytes > 1 << 40:
        return  # a row of a TiB needs a table of millions of segments
    if not refused(lambda: row_mapping(row_bytes, row_stride=row_stride)):
        assert int(row_bytes) > 0


@many
@given(st.data())
def test_namespaces(data: st.DataObject) -> None:
    good: dict[str, Any] = {
        "model": "m", "weights_fingerprint": "w", "dtype": "float16", "canonical_form": "kvx1", "geometry": [{}],
        "blocks_per_chunk": 1, "tokens_per_chunk": 16, "topology": None, "extra": {},
    }  # fmt: skip
    bad = {
        name: data.draw(VALUES, label=name) for name in data.draw(st.sets(st.sampled_from(sorted(good)), min_size=1))
    }

    def make() -> None:
        namespace = Namespace(**(good | bad))
        assert Namespace.from_json(namespace.as_json()).digest(0) == namespace.digest(0)

    refused(make)


# ---- configuration


ROOTS = st.sampled_from(["root", "root", "root", "r\0t", "\ud800", "r" * 300, "a b\n\u00e9"])
STORE_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "capacity_bytes": st.sampled_from([4 << 20, 8 << 20, (4 << 20) - 1, 1 << 40, 1 << 50, 1 << 62, 1 << 70]),
    "slab_bytes": st.sampled_from([None, 8192, 65536, 8193, 1 << 30, 1 << 62]),
    "max_files": st.sampled_from([4096, 7, 8, 9, 64, 1 << 40]),
    "io": st.sampled_from(["auto", "posix", "uring", "AUTO", ""]),
    "direct": st.sampled_from(["auto", "off", "on", "yes"]),
    "index_map_bytes": st.sampled_from([None, 1 << 20, (1 << 20) + 1, 1 << 40, 1 << 62]),
}


@many
@given(st.data())
def test_store_values(data: st.DataObject) -> None:
    fields = {name: data.draw(good | VALUES, label=name) for name, good in STORE_FIELDS.items()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        refused(lambda: StoreConfig.from_mapping({"root": root, **fields}))
        refused(lambda: StoreConfig.from_mapping({"root": root, data.draw(st.text(max_size=5), label="key"): 1}))
        refused(lambda: StoreConfig(root=data.draw(VALUES, label="root")))
        assert not list(Path(folder).iterdir()), "checking a configuration makes nothing"


@settings(max_examples=examples(25))
@given(st.data())
def test_what_is_accepted_opens_and_what_is_refused_makes_nothing(data: st.DataObject) -> None:
    fields = {name: data.draw(good, label=name) for name, good in STORE_FIELDS.items()}
    writers = data.draw(st.sampled_from([1, 4, 0, -1, True, 2.0, None]), label="writers")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / data.draw(ROOTS, label="root")

        def make() -> None:
            with Store.open(StoreConfig(root=root, **fields), writers=writers) as store:
                assert store.stats().entries == 0

        if refused(make):
            assert not list(Path(folder).iterdir())


@many
@given(st.data())
def test_engine_values(data: st.DataObject) -> None:
    names = [
        "io_threads", "io_timeout_s", "max_lost_threads", "max_queued_store_chunks", "max_queued_load_chunks",
        "read_piece_bytes", "shutdown_timeout_s",
    ]  # fmt: skip
    chosen = data.draw(st.sets(st.sampled_from([*names, "io_thread", ""]), min_size=1))
    fields = {name: data.draw(VALUES, label=name) for name in chosen}
    if not refused(lambda: EngineConfig.from_mapping(fields)):
        assert fields.keys() <= set(names)
        assert all(type(value) in (int, float) for value in fields.values())
