"""KvxferConnector over pages as vLLM has them on CUDA: what is certified, what its bytes are, and what waits for what.

Over a simulated device, whose work happens late, and vLLM's own types. No GPU has run this.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError, LayoutError
from kvxfer.ranks import Rank
from kvxfer.testing.fake_device import FakeDevice
from tests.integrations import connector_rig
from tests.integrations.connector_rig import (
    DIM,
    HEADS,
    LAYERS,
    NAMES,
    TOKENS,
    Server,
    attention,
    caches_of,
    compat,
    configs,
    make_spec,
    pages_of,
    setup_of,
    torch,
    whole_cache,
)
from tests.integrations.harness import keys_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

N, BLOCKS = 8, 24


class Named:
    """A backend that is only known by name, as in 0.32 and later; in 0.28 with the shape that they all have there."""

    get_kv_cache_shape: Any

    def __init__(self, name: str) -> None:
        self.get_name = lambda: name
        if not NEW:
            self.get_kv_cache_shape = lambda blocks, tokens, heads, dim: (blocks, heads, tokens, 2 * dim)


NEW = importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None  # vLLM says for all backends how pages look


def cuda_caches(order: str) -> Callable[..., dict[str, Any]]:
    """As `caches_of`, as attention on CUDA fills them: a token's key, then its value; heads or tokens outermost."""

    def make(whole: Any, tp_size: int, rank: int) -> dict[str, Any]:
        made = {}
        for layer, (name, cpu) in enumerate(caches_of(whole, tp_size, rank).items()):
            heads = cpu.shape[1]
            first = rank * HEADS // tp_size if tp_size > 1 else 0
            pages = torch.empty(BLOCKS, heads, TOKENS, 2 * DIM)
            if order == "nhd":
                pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
            pages[..., :DIM] = whole[layer, 0][:, first : first + heads]
            pages[..., DIM:] = whole[layer, 1][:, first : first + heads]
            made[name] = pages
        return made

    return make


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeDevice]]:
    """vLLM on CUDA, whose pages are in the memory of simulated devices: those that ranks were given."""
    from kvxfer.integrations import vllm_connector, vllm_pages

    devices: list[FakeDevice] = []
    seeds = itertools.count()

    def rank(*given: Any, **named: Any) -> Rank:
        devices.append(FakeDevice(seed=next(seeds)))
        return Rank(*given, device=devices[-1], **named)

    monkeypatch.setattr(compat, "is_cpu_platform", lambda: False)
    monkeypatch.setattr(compat, "is_cuda_platform", lambda: True)
    monkeypatch.setattr(compat, "has_triton", lambda: True)
    monkeypatch.setattr(vllm_pages, "_check_place", lambda pages, on_device: None)
    monkeypatch.setattr(vllm_connector, "Rank", rank)
    backends = dict.fromkeys(NAMES, Named("FLASHINFER"))
    monkeypatch.setattr(connector_rig, "pages_of", functools.partial(pages_of, backends=backends))
    given: dict[str, Any] = {"cache_config": cache(), "keys": {"bays": 3, "bay_bytes": 1 << 18}}
    monkeypatch.setattr(connector_rig, "configs", lambda *where, **how: configs(*where, **given | how))
    monkeypatch.setattr(connector_rig, "caches_of", cuda_caches("hnd"))
    yield devices
    for device in devices:
        assert device.defects == []


def cache(dtype: str = "auto") -> Any:
    return SimpleNamespace(cache_dtype=dtype)


def cuda_setup(root: Path, **how: Any) -> Any:
    return setup_of(*configs(root, **{"cache_config": cache()} | how))


# ---- bytes


@pytest.mark.parametrize(("tp_store", "first", "tp_load", "then"), [
    (1, "hnd", 2, "nhd"), (2, "nhd", 1, "hnd"), (4, "nhd", 2, "nhd"), (1, "nhd", 1, "hnd"),
])  # fmt: skip
def test_a_trip_between_servers_of_any_ranks_and_order(
    tmp_root: Path, cuda: list[FakeDevice], monkeypatch: pytest.MonkeyPatch,
    tp_store: int, first: str, tp_load: int, then: str,
) -> None:  # fmt: skip
    whole = whole_cache()
    monkeypatch.setattr(connector_rig, "caches_of", cuda_caches(first))
    with Server(tmp_root, tp_store, whole=whole) as source:
        assert source.store(range(N), source.request("a")) == keys_of(range(N))
    monkeypatch.setattr(connector_rig, "caches_of", cuda_caches(then))
    with Server(tmp_root, tp_load) as target:
        request = target.request("a")
        assert target.hits(range(N), request) == list(range(N))
        assert target.load(range(N), request, [20 - n for n in range(N)]) == set()
        assert target.holds(whole, {20 - n: n for n in range(N)})
    assert len(cuda) == tp_store + tp_load


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_canonical_bytes_are_each_heads_keys_and_then_its_values(
    tmp_root: Path, order: str, cuda: list[FakeDevice]
) -> None:
    """By slicing: of each head, for each layer, its keys of the block and then its values, elements in order."""
    from kvxfer.convert import reference

    whole = whole_cache()
    for tp_size, rank in ((1, 0), (2, 1), (8, 3)):
        setup = cuda_setup(tmp_root, tp_size=tp_size, rank=rank)
        caches = cuda_caches(order)(whole, tp_size, rank)
        pages = pages_of(setup, caches, dict.fromkeys(NAMES, Named("TRITON_ATTN")))(4096)
        slot = pages.mapping.slot
        out = np.zeros((1, slot.payload_stride), np.uint8)
        reference.gather(pages, np.array([[9]]), pages.mapping, out)
        assert pages.mapping.segments
        for segment in pages.mapping.segments:
            want = whole[:, :, 9, segment].contiguous().numpy().tobytes()
            assert out[0, segment * slot.segment_stride :][: slot.segment_bytes].tobytes() == want


def test_a_namespace_of_cuda_is_none_of_a_cpus_and_knows_no_sharding(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch, cuda: list[FakeDevice]
) -> None:
    """A kernel for CPUs orders a key's elements its own way; on CUDA all certified backends have them in order."""
    here = cuda_setup(tmp_root).namespace
    assert cuda_setup(tmp_root, tp_size=2, rank=1).namespace.digest(0) == here.digest(0)
    assert cuda_setup(tmp_root, cache_config=cache("float16")).namespace.digest(0) == here.digest(0)
    assert cuda_setup(tmp_root, spec=attention(dtype=torch.bfloat16)).namespace.digest(0) != here.digest(0)
    monkeypatch.setattr(compat, "is_cuda_platform", lambda: False)
    monkeypatch.setattr(compat, "is_cpu_platform", lambda: True)
    assert setup_of(*configs(tmp_root)).namespace.digest(0) != here.digest(0)


# ---- what waits for what


def test_a_store_has_what_was_computed_before_it_and_wait_ends_at_the_gather(
    tmp_root: Path, cuda: list[FakeDevice]
) -> None:
    whole, other = whole_cache(1), whole_cache(2)
    with Server(tmp_root, 2) as server:
        request = server.request("a")
        for device, mine, rank in zip(cuda, server.caches, range(2), strict=True):
            computed = cuda_caches("hnd")(whole, 2, rank)

            def compute(mine: Any = mine, computed: Any = computed) -> None:
                for name in NAMES:
                    mine[name].copy_(computed[name])

            device.launch(compute)  # a step whose end nobody has waited for
        answer = server.manager.prepare_store(keys_of(range(N)), request)
        job = server.submit("submit_store", answer.store_spec, range(N))
        for worker, mine, rank in zip(server.workers, server.caches, range(2), strict=True):
            worker.wait({job})
            for name, pages in cuda_caches("hnd")(other, 2, rank).items():
                mine[name].copy_(pages)  # the blocks are somebody else's now
        server.finish(job)
        assert server.load(range(N), request, range(12, 12 + N)) == set()
        assert server.holds(whole, {12 + n: n for n in range(N)})


def test_a_load_writes_nothing_that_an_earlier_step_still_reads(tmp_root: Path, cuda: list[FakeDevice]) -> None:
    whole = whole_cache(1)
    for seed in range(3):
        with Server(tmp_root, 1, whole=whole) as server:
            request = server.request("a")
            server.store(range(N), request)
            (device,) = cuda[-1:]
            seen: list[bool] = []
            before = {name: pages[15].clone() for name, pages in server.caches[0].items()}

            def read(server: Server = server, before: Any = before, seen: Any = seen) -> None:
                seen.append(all(torch.equal(server.caches[0][name][15], before[name]) for name in NAMES))

            device.launch(read)
            server.load(range(N), request, range(12, 12 + N))
            device.run()
            assert seen == [True] and server.holds(whole, {12 + n: n for n in range(N)}), seed


def test_a_lost_device_gives_invalid_blocks_and_no_failed_job(tmp_root: Path, cuda: list[FakeDevice]) -> None:
    with Server(tmp_root, 2, whole=whole_cache()) as server:
        request = server.request("a")
        server.store(range(3), request)
        cuda[1].lost = True
        assert server.load(range(3), request, [12, 13, 14]) == {12, 13, 14}


# ---- what is certified, and what is refused

FINE = dict.fromkeys(NAMES, Named("FLASH_ATTN"))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            Named("FLEX_ATTENTION"),
            "attention backend FLEX_ATTENTION, whose pages are not certified .* --attention-backend",
        ),
        (Named("FLASH_ATTN_DIFFKV"), "FLASH_ATTN_DIFFKV"),
        (None, "none that vLLM names"),
    ],
)
def test_backends_that_are_not_known_are_refused_by_name(
    tmp_root: Path, cuda: list[FakeDevice], backend: Any, message: str
) -> None:
    caches = cuda_caches("hnd")(whole_cache(), 1, 0)
    backends = {name: backend if name == NAMES[1] else FINE[name] for name in NAMES}
    with pytest.raises(ConfigError, match=message):
        pages_of(cuda_setup(tmp_root), caches, backends)
    del backends[NAMES[1]]
    with pytest.raises(ConfigError, match="none that vLLM names"):
        pages_of(cuda_setup(tmp_root), caches, backends)


@pytest.mark.parametrize(
    "shape",
    [
        lambda blocks, tokens, heads, dim: (blocks, tokens, heads, 2 * dim),
        lambda blocks, tokens, heads, dim: (2, blocks, tokens, heads, dim),
        lambda blocks, tokens, heads, dim: (blocks, heads, tokens, 2 * dim + 4),
    ],
    ids=["tokens first", "K and V apart", "scales within"],
)
def test_a_backend_whose_axes_are_others_is_refused(tmp_root: Path, cuda: list[FakeDevice], shape: Any) -> None:
    """Its tensors may look alike: with as many heads as tokens nobody could tell."""
    backend = Named("FLASH_ATTN")
    backend.get_kv_cache_shape = shape
    with pytest.raises(ConfigError, match="attention backend FLASH_ATTN of this vLLM has pages of shape"):
        pages_of(cuda_setup(tmp_root), cuda_caches("hnd")(whole_cache(), 1, 0), dict.fromkeys(NAMES, backend))


def strided(pages: Any, strides: tuple[int, ...]) -> Any:
    room = sum((size - 1) * stride for size, stride in zip(pages.shape, strides, strict=True)) + 1
    return torch.as_strided(torch.zeros(room), pages.shape, strides)


HEAD, PAGE = TOKENS * 2 * DIM, HEADS * TOKENS * 2 * DIM


@pytest.mark.parametrize(
    "change",
    [
        lambda pages: pages[:-1],
        lambda pages: pages.view(2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM),
        lambda pages: pages.transpose(1, 2),
        lambda pages: pages.to(torch.bfloat16),
        lambda pages: strided(pages, (PAGE * 2, HEAD, 2 * DIM, 2)),
        lambda pages: strided(pages, (PAGE - HEAD, HEAD, 2 * DIM, 1)),
        lambda pages: strided(pages, (HEAD, BLOCKS * HEAD, 2 * DIM, 1)),
        lambda pages: strided(pages, (3 * PAGE, 3 * HEAD, 2 * DIM, 1)),
        lambda pages: pages.unsqueeze(0),
    ],
    ids=["fewer blocks", "split for a kernel", "transposed", "dtype", "gaps", "overlap", "LHBNC", "BHLNC", "axes"],
)
def test_tensors_that_are_not_as_certified(tmp_root: Path, cuda: list[FakeDevice], change: Any) -> None:
    setup, caches = cuda_setup(tmp_root), cuda_caches("hnd")(whole_cache(), 1, 0)
    pages_of(setup, caches, FINE)(4096)
    caches[NAMES[1]] = change(caches[NAMES[1]])
    with pytest.raises(LayoutError, match="is not certified"):
        pages_of(setup, caches, FINE)(4096)


def test_layers_that_differ_and_pages_elsewhere_are_refused(
    tmp_root: Path, cuda: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, caches = cuda_setup(tmp_root), cuda_caches("hnd")(whole_cache(), 1, 0)
    caches[NAMES[1]] = cuda_caches("nhd")(whole_cache(), 1, 0)[NAMES[1]]
    with pytest.raises(LayoutError, match="laid out in 2 ways"):
        pages_of(setup, caches, FINE)
    monkeypatch.undo()
    monkeypatch.setattr(compat, "is_cuda_platform", lambda: True)
    with pytest.raises(LayoutError, match="the KV caches are on cpu, which is not where"):
        pages_of(setup, cuda_caches("hnd")(whole_cache(), 1, 0), FINE)(4096)


@pytest.mark.skipif(not NEW, reason="0.28 has no KVCacheLayout")
@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
def test_vllms_own_views_of_every_order(tmp_root: Path, cuda: list[FakeDevice], name: str) -> None:
    """The tensors that vLLM itself would make, and how far apart heads and tokens are in them."""
    from vllm.v1.kv_cache_interface import compute_layout_strides
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = attention()
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, KVCacheLayout[name])
    shape = (
        LAYERS,
        *compat.logical_page(Named("FLASH_ATTN"), torch.float32, BLOCKS, HEADS, TOKENS, DIM)[:3],
        2 * DIM * 4,
    )
    raw = torch.zeros(LAYERS * BLOCKS * PAGE * 4, dtype=torch.int8)
    views = torch.as_strided(raw, shape, strides)
    caches = {layer: views[number].view(torch.float32) for number, layer in enumerate(NAMES)}
    setup = cuda_setup(tmp_root)
    if name in ("LHBNC", "BHLNC"):
        with pytest.raises(LayoutError, match="give VLLM_KV_CACHE_LAYOUT=NHD"):
            pages_of(setup, caches, FINE)
        return
    pages = pages_of(setup, caches, FINE)(4096)
    assert pages.mapping.tensors[0].block_stride == strides[1]
    for layer in NAMES:
        caches[layer][5, 2, 7, 3], caches[layer][5, 2, 7, DIM + 3] = 1.0, 2.0
    from kvxfer.convert import reference

    out = np.zeros((1, pages.mapping.slot.payload_stride), np.uint8)
    reference.gather(pages, np.array([[5]]), pages.mapping, out)
    slot = pages.mapping.slot
    head = out[0, 2 * slot.segment_stride :][: slot.segment_bytes].view(np.float32).reshape(LAYERS, 2, TOKENS, DIM)
    assert (head[:, 0, 7, 3] == 1).all() and (head[:, 1, 7, 3] == 2).all() and np.count_nonzero(head) == 2 * LAYERS


BACKENDS = {
    "flash_attn": "FlashAttentionBackend",
    "triton_attn": "TritonAttentionBackend",
    "flashinfer": "FlashInferBackend",
}


@pytest.mark.parametrize(("module", "name"), BACKENDS.items())
def test_vllms_own_backends_are_as_certified(module: str, name: str) -> None:
    from kvxfer.integrations.vllm_pages import _check_backend

    try:
        found = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), name)
    except (ImportError, AttributeError) as exc:  # without a GPU not all of them can be imported
        pytest.skip(f"{module} cannot be imported here: {exc}")
    _check_backend("a layer", found, torch.bfloat16)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"cache_config": cache("fp8")}, "kv_cache_dtype='fp8': what such pages mean hangs on scales"),
        ({"cache_config": cache("fp8_e5m2")}, "fp8_e5m2"),
        ({"cache_config": SimpleNamespace()}, "kv_cache_dtype='None'"),
        ({"spec": attention(dtype=torch.uint8)}, "pages of uint8 are not certified"),
        ({"spec": attention(dtype=torch.float8_e4m3fn)}, "pages of float8_e4m3fn are not certified"),
    ],
)
def test_quantized_pages_are_refused(tmp_root: Path, cuda: list[FakeDevice], how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_spec(*configs(tmp_root, **{"cache_config": cache()} | how))


# ---- how the connector asks vLLM


def test_the_connector_asks_for_each_layers_backend(
    tmp_root: Path, cuda: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from kvxfer.integrations.vllm_connector import KvxferConnector

    class Layer(AttentionLayerBase):
        def __init__(self, backend: Any) -> None:
            self.backend = backend

        def get_attn_backend(self) -> Any:
            return self.backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

    given = configs(tmp_root, cache_config=cache())
    layers = {name: Layer(Named("FLASH_ATTN")) for name in NAMES}
    given[1].compilation_config = SimpleNamespace(static_forward_context=layers)
    registered: list[Any] = []
    monkeypatch.setattr(
        compat.OffloadingConnector, "register_kv_caches", lambda self, caches: registered.append(caches)
    )
    connector = KvxferConnector.__new__(KvxferConnector)
    connector._vllm_config = given[1]
    connector.connector_worker = SimpleNamespace(spec=make_spec(*given))
    caches = cuda_caches("nhd")(whole_cache(), 1, 0)
    connector.register_kv_caches(caches)
    assert registered == [caches] and connector.connector_worker.spec.pages(4096).num_blocks == BLOCKS
    layers[NAMES[2]] = Layer(Named("TREE_ATTN"))
    with pytest.raises(ConfigError, match="TREE_ATTN"):
        connector.register_kv_caches(caches)
    monkeypatch.setattr(compat, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="compiles its kernels with triton"):
        connector.register_kv_caches(caches)
