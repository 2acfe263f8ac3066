"""KvxferConnector's halves through vLLM's types: what is stored, what arrives, and what vLLM is told of the rest."""

from __future__ import annotations

import errno
import json
import re
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError, LayoutError
from kvxfer.testing import FaultyIO
from kvxfer.tickets import Report
from tests.integrations.connector_engines import connector
from tests.integrations.connector_rig import (
    DIM,
    HEADS,
    LAYERS,
    NAMES,
    TOKENS,
    ConnectorConfig,
    GPULoadStoreSpec,
    Group,
    KvxferOffloadingSpec,
    KvxferWorkerMetadata,
    MLAAttentionSpec,
    OffloadPolicy,
    Server,
    SlidingWindowSpec,
    attention,
    block_table_of,
    caches_of,
    compat,
    configs,
    make_spec,
    pages_of,
    setup_of,
    torch,
    whole_cache,
)
from tests.integrations.harness import build, key_of, keys_of

pytestmark = pytest.mark.vllm

N = 12


@pytest.mark.parametrize("tp_load", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_store", [1, 2, 4, 8])
def test_a_trip_from_any_number_of_ranks_to_any_other(tmp_root: Path, tp_store: int, tp_load: int) -> None:
    whole = whole_cache()
    with Server(tmp_root, tp_store, whole=whole) as source:
        assert source.store(range(N), source.request("a")) == keys_of(range(N))
        assert source.hits(range(N + 1), source.request("b")) == list(range(N))
        assert not source.invalid
    with Server(tmp_root, tp_load) as target:
        request = target.request("a")
        assert target.hits(range(N), request) == list(range(N))
        blocks = [20 - n for n in range(N)]
        assert target.load(range(N), request, blocks) == set()
        assert target.holds(whole, {20 - n: n for n in range(N)})


def test_chunks_of_several_blocks_that_begin_in_the_middle_of_one(tmp_root: Path) -> None:
    whole = whole_cache()
    with Server(tmp_root, 2, whole=whole, blocks_per_chunk=4) as source:
        source.store([0, 1, 2], source.request("a"), blocks=range(N))
    with Server(tmp_root, 1, blocks_per_chunk=4) as target:
        target.on_slot(1, lambda old: bytes(len(old)))
        request = target.request("a")
        # Blocks 2..9 of the prompt, into blocks 12..19 of the device: the last two of chunk 0 to the first two of 2.
        invalid = target.load([0, 1, 2], request, range(12, 20), first=2)
        assert invalid == {14, 15, 16, 17}  # those of chunk 1
        assert target.holds(whole, {12: 2, 13: 3, 18: 8, 19: 9})


def test_where_a_jobs_blocks_belong() -> None:
    def table(ids: list[int], first: int, chunks: int) -> list[list[int]]:
        spec = GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[first])
        return block_table_of(spec, chunks, 4).tolist()

    assert table([7, 8, 9], 5, 1) == [[-1, 7, 8, 9]]
    assert table([7, 8, 9], 6, 2) == [[-1, -1, 7, 8], [9, -1, -1, -1]]
    assert table([1, 2, 3, 4], 400, 1) == [[1, 2, 3, 4]]
    for ids, first, chunks in (([7, 8, 9], 6, 1), ([7, 8, 9], 0, 2), ([], 0, 1)):
        with pytest.raises(LayoutError):
            table(ids, first, chunks)
    with pytest.raises(LayoutError, match="2 groups"):
        block_table_of(GPULoadStoreSpec([1, 2], group_sizes=[1, 1], block_indices=[0, 0]), 2, 1)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    "change",
    [lambda old: bytes(len(old)), lambda old: old[:100] + bytes([old[100] ^ 1]) + old[101:]],
    ids=["zeroed", "a bit"],
)
def test_damage_goes_back_as_invalid_blocks_and_is_a_miss_at_once(tmp_root: Path, tp_size: int, change: Any) -> None:
    whole = whole_cache()
    with Server(tmp_root, tp_size, whole=whole) as server:
        server.store(range(N), server.request("a"))
        server.on_slot(5, change)
        one, other = server.request("one"), server.request("other")
        spec = server.manager.prepare_load(keys_of(range(N)), one)
        job = server.submit("submit_load", spec, range(12, 24))
        said: set[int] = set()
        end = time.monotonic() + 30
        while server.acknowledged.get(job) != tp_size:
            assert time.monotonic() < end
            server.invalid = set()
            merged = server.step()
            failed = server.failures(merged.report, spec.ticket)
            assert (failed, server.invalid) in (({5}, {17}), (set(), set()))  # both in one pass
            said |= failed
            if said:  # by one rank, or by both
                assert server.hits([5], one) == server.hits([5], other) == []
        server.finish(job)
        assert said == {5}
        assert server.store(range(N), other) == [key_of(5)]  # computed anew, stored anew
        assert server.hits(range(N), one) == list(range(N))


def test_a_chunk_that_goes_between_the_lookup_and_the_load(tmp_root: Path) -> None:
    with Server(tmp_root, 2, whole=whole_cache()) as server:
        request = server.request("a")
        server.store(range(3), request)
        assert server.hits(range(3), request) == [0, 1, 2]
        server.forget(1)
        assert server.load(range(3), request, [12, 13, 14]) == {13}


def test_an_errno_is_a_miss_for_that_request_only(tmp_root: Path) -> None:
    with Server(tmp_root, 1, whole=whole_cache()) as server:
        one, other = server.request("one"), server.request("other")
        server.store(range(2), one)
        with FaultyIO() as io:
            io.fail("pread", errno.EIO)
            assert server.load(range(2), one, [12, 13]) == {12, 13}
        assert server.hits(range(2), one) == []
        assert server.hits(range(2), other) == [0, 1]
        server.manager.on_request_finished(one)
        assert server.hits(range(2), server.request("one")) == [0, 1]


def test_stores_are_published_when_all_ranks_have_sealed_them(tmp_root: Path) -> None:
    with Server(tmp_root, 2, whole=whole_cache()) as server:
        request = server.request("a")
        answer = server.manager.prepare_store(keys_of(range(3)), request)
        first, second = server.workers
        pages = GPULoadStoreSpec([0, 1, 2], group_sizes=[3], block_indices=[0])
        first.submit_store(1, pages, answer.store_spec)
        end = time.monotonic() + 30
        while server.acknowledged.get(1) != 1:
            assert time.monotonic() < end
            server.step()
        server.manager.complete_store(set(keys_of(range(3))), request)  # vLLM's own word decides nothing
        assert server.manager._coordinator.drain(5) and server.hits(range(3), request) == []
        assert server.manager.has_pending_work()
        second.submit_store(1, pages, answer.store_spec)
        server.finish(1)
        assert server.hits(range(3), request) == [0, 1, 2]


def test_what_is_there_drops_out_and_hits_are_offered_again(tmp_root: Path) -> None:
    with Server(tmp_root, 1, whole=whole_cache()) as server:
        request = server.request("a")
        assert server.manager.on_new_request(request).policy is OffloadPolicy.REQUEST_LEVEL
        server.store(range(3), request)
        answer = server.manager.prepare_store(keys_of(range(5)), request)
        assert answer.keys_to_store == keys_of([3, 4]) and answer.evicted_keys == []


def test_waiting_for_jobs_lets_their_blocks_go(tmp_root: Path) -> None:
    whole = whole_cache()
    with Server(tmp_root, 2, whole=whole, keys={"io_threads": 1}) as server, FaultyIO() as io:
        request = server.request("a")
        answer = server.manager.prepare_store(keys_of(range(4)), request)
        io.delay("pwrite", 0.02)
        job = server.submit("submit_store", answer.store_spec, range(4))
        for worker, caches in zip(server.workers, server.caches, strict=True):
            worker.wait({job, 999})
            for tensor in caches.values():
                tensor[:4] = 0
        server.finish(job)
        io.release()
        hits = server.hits(range(4), request)
        assert hits
        assert server.load(hits, request, [12 + n for n in hits]) == set()
        assert server.holds(whole, {12 + n: n for n in hits})
        io.hang("pread", offset=(4096, 1 << 40))
        spec = server.manager.prepare_load(keys_of(hits), request)
        job = server.submit("submit_load", spec, [16 + n for n in hits])
        for worker in server.workers:
            worker.wait({job})
        io.release()
        server.invalid = set()
        server.finish(job)
        assert server.invalid == {16 + n for n in hits}


def test_a_deadline_is_the_sooner_of_the_two(tmp_root: Path) -> None:
    def seconds(chunks: int, **keys: Any) -> float | None:
        with Server(tmp_root, keys=keys) as server:
            found = server.manager.prepare_load(keys_of(range(chunks)), server.request("a")).ticket.seconds
            return None if found is None else float(found)

    assert seconds(12) is None
    assert seconds(12, deadline_s=2.0) == 2.0
    assert seconds(12, recompute_tokens_per_s=TOKENS) == 12.0
    assert seconds(12, recompute_tokens_per_s=TOKENS, deadline_s=2.0) == 2.0
    assert seconds(1, recompute_tokens_per_s=TOKENS, deadline_s=2.0) == 1.0
    with Server(tmp_root, keys={"recompute_tokens_per_s": "measured", "deadline_s": 90.0}) as server:
        request = server.request("a")
        assert server.manager.prepare_load(keys_of([0]), request).ticket.seconds == 90.0  # no estimate yet
        for _ in range(10):
            server.manager.pace.observe(2 * TOKENS, 1.0)
        assert server.manager.prepare_load(keys_of([0, 1]), request).ticket.seconds == pytest.approx(1.0)


def test_events_of_chunks_that_came_and_went(tmp_root: Path) -> None:
    with Server(tmp_root, 1, whole=whole_cache(), events=True, keys={"enable_kv_events": True}) as server:
        request = server.request("a")
        server.store(range(3), request)
        (event,) = server.manager.take_events()
        assert not event.removed and sorted(event.keys) == sorted(keys_of(range(3)))
        assert list(server.manager.take_events()) == []
        server.on_slot(1, lambda old: bytes(len(old)))
        server.load(range(3), request, [12, 13, 14])
        (event,) = server.manager.take_events()
        assert event.removed and event.keys == keys_of([1])
        server.store([1], request)
        (event,) = server.manager.take_events()
        assert not event.removed and event.keys == keys_of([1])
    with Server(tmp_root, 1, whole=whole_cache(), events=False, keys={"enable_kv_events": True}) as server:
        server.store([5], server.request("a"))
        assert list(server.manager.take_events()) == []


@pytest.mark.parametrize("bump", [True, False])
def test_a_reset_makes_all_a_miss_only_where_it_is_asked_for(tmp_root: Path, bump: bool) -> None:
    """Reports of jobs that vLLM has forgotten by then still give their slots back."""
    with Server(tmp_root, 2, whole=whole_cache(), keys={"reset_on_drain": bump}) as server:
        request = server.request("a")
        server.store(range(3), request)
        answer = server.manager.prepare_store(keys_of([7]), request)
        spec = server.manager.prepare_load(keys_of(range(3)), request)
        server.manager.reset_cache()
        assert server.hits(range(3), request) == ([] if bump else [0, 1, 2])
        store = server.submit("submit_store", answer.store_spec, [7])
        server.finish(store, server.submit("submit_load", spec, [12, 13, 14]))
        assert server.pinned == 0
        assert server.hits([7], request) == ([] if bump else [7])
        end = time.monotonic() + 10
        later = server.request("b")
        while not server.store([8], later):  # the namespace of the new epoch is open
            assert time.monotonic() < end
        assert server.hits([8], later) == [8]


def test_metrics_are_all_there_at_zero_and_count_once(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.integrations.vllm_manager.STATS_S", 3600.0)
    names = set(KvxferOffloadingSpec.build_metric_definitions({}))
    with Server(tmp_root, 2, whole=whole_cache()) as server:
        stats = server.manager.get_stats()
        assert stats is not None and set(stats.data["data"]) >= {n for n in names if not n.endswith("_seconds")}
        assert server.manager.get_stats() is None  # not with every step
        request = server.request("a")
        server.store(range(N), request)
        server.load(range(N), request, range(12, 24))
        monkeypatch.setattr("kvxfer.integrations.vllm_manager.STATS_S", 0.0)
        data = server.manager.get_stats().data["data"]
        assert data["vllm:kvxfer_load_chunks_total"] == {("hit",): N}
        assert data["vllm:kvxfer_store_chunks_total"] == {("stored",): N}
        assert data["vllm:kvxfer_verified_segments_total"] == {(): N * HEADS}
        payload = N * LAYERS * 2 * HEADS * TOKENS * DIM * 4
        (moved,) = data["vllm:kvxfer_load_bytes_total"].values()
        assert moved == payload
        assert [len(seconds) for seconds in data["vllm:kvxfer_load_seconds"].values()] == [1]
        assert set(data) <= names


def test_nothing_raises_into_vllm_and_everything_ends(tmp_root: Path) -> None:
    with Server(tmp_root, 2, whole=whole_cache()) as server:
        request, other = server.request("a"), server.request("b")
        server.store(range(3), request)
        for store in server.stores:
            store.close()
        assert server.hits(range(3), request) == []
        assert server.manager.prepare_store(keys_of([5]), request) is None
        spec = server.manager.prepare_load(keys_of(range(3)), request)
        server.invalid = set()
        job = server.submit("submit_load", spec, [12, 13, 14])
        while server.acknowledged.get(job) != 2:
            server.step()
        assert server.invalid == {12, 13, 14}
        assert server.hits([0], other) == []
        server.manager.touch(keys_of([0]), request)
        server.manager.reset_cache()
        assert list(server.manager.take_events()) == []
        server.manager.shutdown()
        server.manager.shutdown()
        assert not server.manager.has_pending_work()


def test_a_job_that_cannot_be_started_ends_all_the_same(tmp_root: Path) -> None:
    with Server(tmp_root, 1, whole=whole_cache()) as server:
        request = server.request("a")
        server.store(range(2), request)
        spec = server.manager.prepare_load(keys_of(range(2)), request)
        job = server.submit("submit_load", spec, [12, 99])  # no such block
        server.finish(job)
        assert server.invalid == {12, 99} and server.hits(range(2), request) == []
        answer = server.manager.prepare_store(keys_of([5]), request)
        server.finish(server.submit("submit_store", answer.store_spec, [3, 4, 5]))
        assert server.hits([5], request) == []
        assert server.pinned == 0


def test_ranks_words_are_merged_as_vllm_merges_its_own() -> None:
    ours = KvxferWorkerMetadata.of(None, Report(lost={3: 1}))
    ours.mark_completed(7)
    theirs = KvxferWorkerMetadata.of(None, Report(lost={3: 1}, returned={4: 1}))
    theirs.mark_completed(7)
    merged = ours.aggregate(theirs).aggregate(KvxferWorkerMetadata.of(None, Report()))
    assert isinstance(merged, KvxferWorkerMetadata)
    assert merged.completed_jobs == {7: 2} and merged.report == Report(lost={3: 2}, returned={4: 1})
    assert ours.report == Report(lost={3: 1})


# ---- what is certified, and what is refused ------------------------------------------------------------------------


def test_canonical_bytes_are_each_heads_keys_and_then_its_values(tmp_root: Path) -> None:
    """By slicing: what is gathered is, of each head, for each layer, its keys of the block and then its values."""
    from kvxfer.convert import reference

    whole = whole_cache()
    for tp_size, rank in ((1, 0), (2, 1), (8, 3)):
        setup = setup_of(*configs(tmp_root, tp_size=tp_size, rank=rank))
        pages = pages_of(setup, caches_of(whole, tp_size, rank))(4096)
        slot = pages.mapping.slot
        out = np.zeros((1, slot.payload_stride), np.uint8)
        reference.gather(pages, np.array([[9]]), pages.mapping, out)
        for segment in pages.mapping.segments:
            want = whole[:, :, 9, segment].contiguous().numpy().tobytes()
            assert out[0, segment * slot.segment_stride :][: slot.segment_bytes].tobytes() == want
    assert len(want) == slot.segment_bytes == LAYERS * 2 * TOKENS * DIM * 4


@pytest.mark.parametrize(
    "change",
    [
        lambda caches: caches.pop(NAMES[1]),
        lambda caches: caches.update({NAMES[1]: caches[NAMES[1]][:-1]}),
        lambda caches: caches.update({NAMES[1]: caches[NAMES[1]].transpose(1, 2)}),
        lambda caches: caches.update({NAMES[1]: caches[NAMES[1]].transpose(1, 2).contiguous().transpose(1, 2)}),
        lambda caches: caches.update({NAMES[1]: caches[NAMES[1]].to(torch.bfloat16)}),
        lambda caches: caches.update({NAMES[1]: caches[NAMES[1]].view(24, 4, 64, 32)}),
        lambda caches: caches.update({NAMES[1]: caches[NAMES[1]].to("meta")}),
        lambda caches: caches.update({NAMES[1]: caches[NAMES[0]]}),
    ],
    ids=["missing", "fewer blocks", "transposed", "tokens first", "dtype", "shape", "elsewhere", "shared"],
)
def test_pages_that_are_not_as_certified(tmp_root: Path, change: Any) -> None:
    setup = setup_of(*configs(tmp_root))
    caches = caches_of(whole_cache(), 1, 0)
    pages_of(setup, caches)(4096)
    change(caches)
    with pytest.raises(LayoutError):
        pages_of(setup, caches)(4096)


def test_padded_pages_are_declared(tmp_root: Path) -> None:
    """vLLM may keep blocks further apart than their pages are long."""
    whole = whole_cache()
    caches = {}
    for name, pages in caches_of(whole, 1, 0).items():
        wide = torch.zeros(24, pages[0].numel() + 64)
        caches[name] = torch.as_strided(wide, pages.shape, (wide.stride(0), *pages.stride()[1:]))
        caches[name].copy_(pages)
    setup = setup_of(*configs(tmp_root))
    made = pages_of(setup, caches)(4096)
    assert made.mapping.tensors[0].block_stride == (HEADS * TOKENS * 2 * DIM + 64) * 4


def test_the_namespace_knows_no_sharding_and_all_else(tmp_root: Path) -> None:
    def digest(**how: Any) -> bytes:
        return setup_of(*configs(tmp_root, **how)).namespace.digest(0)

    base = digest()
    assert digest(tp_size=2) == digest(tp_size=2, rank=1) == digest(tp_size=8) == base
    others = [
        digest(blocks_per_chunk=2),
        digest(keys={"weights_fingerprint": "seed 1"}),
        digest(model_config__model="org/other"),
        digest(model_config__dtype=torch.bfloat16),
        digest(model_config__quantization="fp8"),
        digest(model_config__hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 20000.0})),
        digest(spec=attention(dtype=torch.float16)),
        digest(spec=attention(dtype=torch.bfloat16)),
        digest(spec=attention(head_size=64)),
        digest(spec=attention(head_size=80)),  # another kernel
        digest(spec=attention(block_size=64)),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_the_weights_must_be_named(tmp_root: Path) -> None:
    offloading, vllm_config, caches = configs(tmp_root)
    del offloading.extra_config["kvxfer"]["weights_fingerprint"]
    with pytest.raises(ConfigError, match="weights_fingerprint is missing"):
        make_spec(offloading, vllm_config, caches)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "policy": ({"kv_transfer_config__kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
    "unknown key": ({"keys": {"root": "x"}}, "unknown kvxfer keys .'root'.; known keys are .*'root_dir'"),
    "unknown keys by name": ({"keys": {"capacity": 1}}, "unknown kvxfer keys .'capacity'."),
    "bad value": ({"keys": {"policy": "mru"}}, "policy='mru'"),
    "allow": ({"keys": {"allow_load_failures": 1}}, "allow_load_failures=1 must be true or false"),
    "no keys": ({"extra": {"kvxfer": None}}, "must be an object"),
    "no root": ({"extra": {"kvxfer": {}}}, "'root_dir' is missing"),
    "another spec": ({"extra": {"spec_name": "TieringOffloadingSpec"}}, "spec_name='KvxferOffloadingSpec'"),
    "pipeline": ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2 .* must be 1"),
    "decode context": ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
    "prefill context": ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
    "loads within a step": ({"extra": {"sync_load_budget_bytes": 1}}, "sync_load_budget_bytes=1: .* leave it out"),
    "self-describing events": ({"extra": {"self_describing_kv_events": True}}, "self_describing_kv_events=True"),
    "canonical rows": ({"extra": {"canonical_layout": True}}, "canonical_layout=True"),
    "hisparse": ({"attention_config__hisparse_config": object()}, "hisparse .* turn it off"),
    "draft model": ({"speculative_config": object()}, "leave speculative_config out"),
    "quantized": ({"spec": attention(kv_quant_mode=2)}, "kv_quant_mode=2"),
    "values of another size": ({"spec": attention(head_size_v=16)}, "head_size_v=16"),
    "heads": ({"spec": attention(heads=3)}, "3 KV heads on a rank, where 4 are expected"),
    "window": ({"spec": build(SlidingWindowSpec, block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32,
                              sliding_window=64)}, "SlidingWindowSpec .* KvxferTier stores such models"),
    "latent": ({"spec": build(MLAAttentionSpec, block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)},
               "MLAAttentionSpec"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_at_start_and_what_would_help(tmp_root: Path, case: str) -> None:
    how, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        make_spec(*configs(tmp_root, **how))
    assert not tmp_root.exists()


def test_several_groups_are_refused(tmp_root: Path) -> None:
    offloading, vllm_config, caches = configs(tmp_root)
    caches.kv_cache_groups.append(Group(layer_names=["other"], kv_cache_spec=attention()))
    with pytest.raises(ConfigError, match=r"2 KV-cache groups .* --disable-hybrid-kv-cache-manager"):
        make_spec(offloading, vllm_config, caches)


def test_other_devices_are_refused_by_name(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device_type", lambda: "xpu")
    monkeypatch.setattr(compat, "is_cpu_platform", lambda: False)
    with pytest.raises(ConfigError, match="no converter for pages of device type 'xpu' here"):
        make_spec(*configs(tmp_root))


def test_failing_requests_may_be_asked_for(tmp_root: Path) -> None:
    how: dict[str, Any] = {"kv_transfer_config__kv_load_failure_policy": "fail"}
    spec = make_spec(*configs(tmp_root, keys={"allow_load_failures": True}, **how))
    assert spec.setup.config.allow_load_failures


def test_the_spec_works_with_its_own_connector_only(tmp_root: Path) -> None:
    offloading, _, _ = configs(tmp_root)
    with pytest.raises(ConfigError, match='"kv_connector": "KvxferConnector"'):
        KvxferOffloadingSpec(offloading)


# ---- docs/vllm.md --------------------------------------------------------------------------------------------------


def test_the_pasted_configuration_is_that_of_the_engine_tests() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text().partition("\n## KvxferConnector\n")[2]
    (pasted,) = re.findall(r"--kv-transfer-config '(.*?)'\n```", text, re.DOTALL)
    transfer = json.loads(pasted)
    keys = transfer["kv_connector_extra_config"].pop("kvxfer")
    tested = connector(Path("root"))
    tested["kv_connector_extra_config"].pop("kvxfer")
    assert transfer == tested
    assert set(keys) == {"root_dir", "capacity_bytes"}
    ConnectorConfig.from_extra({"kvxfer": keys})
    for name in {field.name for field in fields(ConnectorConfig)} - {"tier"}:
        assert f"`{name}`" in text
