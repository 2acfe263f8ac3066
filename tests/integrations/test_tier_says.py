"""What KvxferTier is told and tells: keys, namespaces, metrics, events, and vLLM's own manager above it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.drive_writes import DRIVE_WRITTEN
from kvxfer.errors import ConfigError, IOFault, KvxferError
from kvxfer.integrations.vllm_namespace import fingerprint_of
from kvxfer.observe import SERIES
from kvxfer.testing import FaultyIO
from tests.integrations import harness
from tests.integrations.harness import HIT, MISS, KvxferTier, LookupResult, Rig, TieringOffloadingSpec, keys_of

pytestmark = pytest.mark.vllm

N = 12
ROW = 64 << 10


# ---- keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"capacity": 5}, r"unknown tier keys \['capacity'\]; known keys are"),
        ({"n_read_threads": 16}, "unknown tier keys"),
        ({"root_dir": []}, "root_dir=.. must be the path of a directory, or a list of such paths"),
        ({"root_dir": ["/a", 5]}, "root_dir=.'/a', 5. must be the path"),
        ({"root_dir": ["/a", "/b", "/b/../a"]}, "names a directory twice"),
        ({"root_dir": None}, "root_dir' is missing"),
        ({"policy": "mru"}, "policy='mru' must be one of lru, arc, s3fifo"),
        ({"durability": "fsync"}, "durability='fsync' must be one of none, process, power"),
        ({"locality": "REMOTE"}, "locality='REMOTE' must be"),
        ({"deadline_s": 0}, "deadline_s=0 must be a positive number"),
        ({"recompute_tokens_per_s": "fast"}, "recompute_tokens_per_s='fast'"),
        ({"reset_on_drain": "yes"}, "reset_on_drain='yes' must be true or false"),
        ({"weights_fingerprint": None}, "weights_fingerprint is missing, and the model 'org/tiny' is not a local"),
        ({"weights_fingerprint": ""}, "weights_fingerprint=''"),
        ({"vllm": {"pp": 2}, "equal_pipeline_stages": False}, "pipeline_parallel_size=2: vLLM's stages must be of one"),
        ({"equal_pipeline_stages": 1}, "equal_pipeline_stages=1 must be true or false"),
        ({"capacity_bytes": 1}, "capacity_bytes=1"),
        ({"io_threads": 0}, "io_threads=0"),
        ({"io": "gds"}, "io='gds' must be one of auto, posix, uring"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(tmp_root: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Rig(tmp_root, **({"root_dir": str(tmp_root)} | keys))
    assert "cannot start" in "".join(caught.value.__notes__)
    assert not tmp_root.exists()


def test_a_root_that_cannot_be_opened_is_said_at_start(tmp_root: Path) -> None:
    tmp_root.write_text("a file")
    with pytest.raises(KvxferError, match=str(tmp_root)):
        Rig(tmp_root)
    tmp_root.unlink()
    with FaultyIO() as io:
        io.fail("open", 13)
        with pytest.raises(IOFault, match=str(tmp_root)):
            Rig(tmp_root)
    with Rig(tmp_root) as rig, pytest.raises(KvxferError, match="open"):  # and not twice
        Rig(tmp_root, weights_fingerprint="other")
    assert rig.store([0]).success is False  # closed by now, and quiet about it


def test_two_tiers_are_refused(tmp_root: Path) -> None:
    tier = harness.TIER | harness.KEYS
    extra = {
        "cpu_bytes_to_use": 64 * ROW,
        "secondary_tiers": [tier | {"root_dir": str(tmp_root / name)} for name in ("a", "b")],
    }
    with pytest.raises(ConfigError, match="2 tiers of type 'KvxferTier': give one of them a list as root_dir"):
        TieringOffloadingSpec(harness.offloading_config(ROW, extra=extra)).get_manager()


def test_a_local_model_names_its_weights_itself(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (model / "config.json").write_text('{"rope_theta": 1}')
    vllm = {"model": str(model)}
    with Rig(tmp_path / "root", weights_fingerprint=None, vllm=vllm) as rig:
        rig.fill()
        rig.store([0])
    with Rig(tmp_path / "root", weights_fingerprint=None, vllm=vllm) as rig:
        assert rig.lookups([0], rig.request("a")) == [HIT]
    (model / "config.json").write_text('{"rope_theta": 2}')
    with Rig(tmp_path / "root", weights_fingerprint=None, vllm=vllm) as rig:
        assert rig.lookups([0], rig.request("a")) == [MISS]


@pytest.mark.parametrize(("rope", "other"), [("longrope", True), ("su", True), ("linear", False)])
def test_a_rope_that_hangs_on_the_longest_sequence(tmp_path: Path, rope: str, other: bool) -> None:
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "config.json").write_text(f'{{"rope_scaling": {{"type": "{rope}"}}}}')
    names = {fingerprint_of(str(tmp_path), None, longest) for longest in (4096, 131072)}
    assert len(names) == 1 + other
    if other:
        with pytest.raises(ConfigError, match="weights_fingerprint is missing, and with this model's rope factors"):
            fingerprint_of(str(tmp_path), None)


@pytest.mark.skipif(
    not harness.CONFIG_HAS_LAYOUT, reason="this vLLM's configuration has no layout that could be left out"
)
def test_a_spec_may_say_as_little_as_programs_that_drive_tiers_themselves_do(tmp_root: Path) -> None:
    spec = SimpleNamespace(
        config=harness.offloading_config(ROW, layout=None),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )
    with Rig(tmp_root, spec=spec) as rig:
        want = rig.fill()
        assert rig.store(range(N)).success
        rig.poison()
        request = rig.request("a")
        assert rig.lookups(range(N), request) == [HIT] * N
        assert rig.load(range(N), request).success
        rig.check(want, range(N))


# ---- namespaces ------------------------------------------------------------------------------------------------

CANONICAL = {"canonical": True}


@pytest.mark.parametrize(
    ("stored", "asked", "answer"),
    [
        ({}, {}, HIT),
        ({}, {"model": "org/other"}, MISS),
        ({}, {"dtype": "bfloat16"}, MISS),
        ({}, {"layers": ("layers.0", "layers.9")}, MISS),
        ({}, {"tokens": 32, "tokens_per_hash": 32}, MISS),
        ({"tokens": 32}, {"tokens": 32, "tokens_per_hash": 32}, MISS),
        ({}, {"blocks_per_chunk": 2}, MISS),
        ({}, {"groups": 2}, MISS),
        ({}, {"layout": "LBNHC"}, MISS),
        ({}, {"replicated": True}, MISS),
        ({}, {"tp": 2}, MISS),  # whatever is_parallelism_agnostic says
        ({"tp": 2}, {"pp": 2}, MISS),
        ({"tp": 4}, {"tp": 2, "pp": 2}, MISS),
        ({}, CANONICAL, MISS),
        (CANONICAL, CANONICAL | {"tp": 2}, HIT),
        (CANONICAL, CANONICAL | {"tp": 2, "agnostic": False}, MISS),
        (CANONICAL, CANONICAL | {"layout": "LBNHC"}, MISS),
        (CANONICAL | {"layout": "LBNHC"}, CANONICAL | {"layout": "LBNHC", "tp": 2}, HIT),
        (CANONICAL | {"layout": "BHLNC"}, CANONICAL | {"layout": "BHLNC", "tp": 2}, MISS),  # a form that we do not know
    ],
    ids=str,
)
def test_whose_bytes_are_whose(
    tmp_root: Path, stored: dict[str, Any], asked: dict[str, Any], answer: LookupResult
) -> None:
    if "BHLNC" in stored.values() and not harness.CONFIG_HAS_LAYOUT:
        pytest.skip("this vLLM has two layouts")
    with Rig(tmp_root, vllm=stored) as rig:
        rig.fill()
        assert rig.store([0]).success
    with Rig(tmp_root, vllm=asked) as rig:
        assert rig.lookups([0], rig.request("a")) == [answer]


def test_other_weights_or_rows_are_another_cache(tmp_root: Path) -> None:
    with Rig(tmp_root) as rig:
        rig.fill()
        assert rig.store([0]).success
    for changed in ({"weights_fingerprint": "seed 1"}, {"row_bytes": 2 * ROW}):
        with Rig(tmp_root, **changed) as rig:
            assert rig.lookups([0], rig.request("a")) == [MISS]
    with Rig(tmp_root) as rig:
        assert rig.lookups([0], rig.request("a")) == [HIT]


# ---- metrics ---------------------------------------------------------------------------------------------------


def test_metrics_are_declared_and_add_up(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.integrations.vllm_tier.STATS_S", 3600.0)
    declared = KvxferTier.build_metric_definitions({})
    assert len(declared) > 50 and all(name.startswith("vllm:kvxfer_") for name in declared)
    total: dict[tuple[str, tuple[str, ...]], float] = {}

    def take() -> set[str]:
        stats = rig.tier.get_stats()
        if stats is None:
            return set()
        assert set(stats.data["data"]) <= set(declared)
        for name, values in stats.data["data"].items():
            for labels, value in values.items():
                assert len(labels) == len(declared[name].labelnames), name
                kind = stats.data["types"][name]
                assert (kind == "counter") == name.endswith("_total"), name
                if kind == "histogram":
                    total[name, labels] = total.get((name, labels), 0) + len(value)
                else:
                    total[name, labels] = value + (total.get((name, labels), 0) if kind == "counter" else 0)
        return set(stats.data["data"])

    with Rig(tmp_root) as rig:
        assert rig.tier.has_pending_work()  # vLLM takes a first step, and asks with it
        rig.step()
        assert not rig.tier.has_pending_work()
        drive = f"vllm:{DRIVE_WRITTEN.name}"  # of the machine, since it started; told where the system tells it
        assert take() | {drive} == set(declared)  # at zero, from the start
        told = {labels: total.pop((drive, labels)) for name, labels in list(total) if name == drive}
        assert set(told) == {(disk,) for disk in rig.tier._store.drives.look().written}
        assert set(total) == {(f"vllm:{one.name}", labels) for one in SERIES for labels in one.label_values}
        assert not any(value for (name, _), value in total.items() if name.endswith(("_total", "_load_seconds")))
        assert rig.tier.get_stats() is None  # not with every step
        rig.fill()
        rig.store(range(N))
        request = rig.request("a")
        rig.lookups(range(N + 1), request)
        rig.load(range(N + 1), request)
        monkeypatch.setattr("kvxfer.integrations.vllm_tier.STATS_S", 0.0)
        assert take()
        take()
        assert total["vllm:kvxfer_lookup_keys_total", ()] == N + 1
        assert total["vllm:kvxfer_lookup_hit_keys_total", ()] == N
        assert total["vllm:kvxfer_store_chunks_total", ("stored",)] == N
        assert total["vllm:kvxfer_load_chunks_total", ("hit",)] == N
        assert total["vllm:kvxfer_load_chunks_total", ("miss",)] == 1
        assert total["vllm:kvxfer_salvaged_chunks_total", ()] == N
        assert total["vllm:kvxfer_salvaged_tokens_total", ()] == N * 16
        assert total["vllm:kvxfer_entries", ()] == N
        path = (rig.tier._engine.io_mode,)
        assert total["vllm:kvxfer_load_seconds", path] == total["vllm:kvxfer_store_seconds", path] == 1
        assert total["vllm:kvxfer_load_bytes_total", path] == N * rig.row_bytes


# ---- KV events -------------------------------------------------------------------------------------------------

SMALL = {"capacity_bytes": 8 << 20, "slab_bytes": 1 << 20, "index_map_bytes": 1 << 20, "chunks": 200}


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_events_tell_what_is_there(tmp_root: Path, policy: str) -> None:
    """Whoever adds and takes away what the events say has what the store has."""
    there: set[bytes] = set()
    kinds: set[bool] = set()
    with Rig(tmp_root, enable_kv_events=True, policy=policy, vllm={"events": True}, **SMALL) as rig:
        rig.fill()

        def take() -> None:
            for event in rig.tier.take_events():
                kinds.add(event.removed)
                assert event.medium.value == "STORAGE"
                if event.removed:
                    assert set(event.keys) <= there
                    there.difference_update(event.keys)
                else:
                    assert not set(event.keys) & there
                    there.update(event.keys)

        for start in [*range(0, 192, 24), 0, 24]:  # more than fits, and some again
            assert rig.store(range(start, start + 24)).success
            take()
            assert there == set(rig.tier._store.keys(rig.tier._engine.digest))
        rig.overwrite(30, bytes(rig.row_bytes))
        rig.load([30], rig.request("a"))
        take()
        assert there == set(rig.tier._store.keys(rig.tier._engine.digest)) and keys_of([30])[0] not in there
        rig.tier._engine.reset()
        deadline = time.monotonic() + 5
        while there and time.monotonic() < deadline:
            rig.step()
            take()
            time.sleep(0.01)
        assert not there and kinds == {False, True}


def test_events_are_right_where_chunks_went_before_anybody_asked(tmp_root: Path) -> None:
    with Rig(tmp_root, enable_kv_events=True, vllm={"events": True}, **SMALL) as rig:
        rig.fill()
        jobs = []
        for start in range(0, 192, 24):
            jobs.append(rig.submit(range(start, start + 24), rig.request(f"{start}"), load=False))
            assert rig.tier._engine.drain(20)
        assert rig.metric("kvxfer_evicted_chunks_total", reason="capacity")
        for job in jobs:
            rig.wait(job)
        events = list(rig.tier.take_events())
        assert not any(event.removed for event in events)
        told = [key for event in events for key in event.keys]
        assert len(told) == len(set(told)) and set(told) == set(rig.tier._store.keys(rig.tier._engine.digest))


@pytest.mark.parametrize(("enabled", "vllm"), [(False, True), (True, False)])
def test_events_need_both_switches(tmp_root: Path, enabled: bool, vllm: bool) -> None:
    with Rig(tmp_root, enable_kv_events=enabled, vllm={"events": vllm}) as rig:
        rig.fill()
        assert rig.store([0]).success
        assert list(rig.tier.take_events()) == []


# ---- vLLM's manager above it -----------------------------------------------------------------------------------


class Managed:
    """The stock spec's manager, from a configuration as people paste it; this plays the scheduler."""

    def __init__(self, root: Path, **keys: Any) -> None:
        tier = harness.TIER | harness.KEYS | {"root_dir": str(root)} | keys
        extra = {"cpu_bytes_to_use": 64 * ROW, "secondary_tiers": [tier]}
        self.spec = TieringOffloadingSpec(harness.offloading_config(ROW, extra=extra))
        self.manager: Any = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        view = self.manager.primary_tier.get_kv_memoryview()
        self.rows = np.asarray(view).view(np.uint8)

    def context(self, name: str) -> Any:
        context = harness.ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(harness.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def settle(self) -> None:
        deadline = time.monotonic() + 20
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.001)

    def store(self, keys: list[bytes], context: Any, fill: int) -> None:
        output = self.manager.prepare_store(keys, context)
        assert output.keys_to_store == keys
        for n, row in enumerate(getattr(output.store_spec, harness.ROWS)):
            self.rows[row] = fill + n
        self.manager.complete_store(keys, context)
        self.settle()


@contextmanager
def managed(root: Path, **keys: Any) -> Iterator[Managed]:
    each = Managed(root, **keys)
    try:
        yield each
    finally:
        each.rows = np.zeros((0, 0), np.uint8)
        each.manager.shutdown()


def test_vllm_s_own_manager_promotes_and_recomputes(tmp_root: Path) -> None:
    keys = keys_of(range(N))
    with managed(tmp_root) as vllm:
        request = vllm.context("a")
        vllm.store(keys, request, fill=10)
        vllm.manager.reset_cache()
        getattr(vllm.manager, "on_reset_flushed", lambda: None)()
        path, offset, _ = vllm.tier._store.locate(vllm.tier._engine.digest, keys[5])
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(ROW))
        later = vllm.context("b")
        assert {vllm.manager.lookup(key, later) for key in keys} == {LookupResult.HIT_PENDING}
        vllm.step()
        vllm.settle()
        assert [vllm.manager.lookup(key, later) for key in keys] == [MISS if n == 5 else HIT for n in range(N)]
        assert not vllm.manager.has_pending_work()  # and it is not promoted over and over
        there = [key for n, key in enumerate(keys) if n != 5]
        loaded = vllm.manager.prepare_load(there, later)
        for key, row in zip(there, getattr(loaded, harness.ROWS), strict=True):
            assert (vllm.rows[row] == 10 + keys.index(key)).all()
        vllm.manager.complete_load(there, later)
        vllm.store([keys[5]], later, fill=15)
        vllm.manager.reset_cache()
        getattr(vllm.manager, "on_reset_flushed", lambda: None)()
        assert vllm.manager.lookup(keys[5], later) is LookupResult.HIT_PENDING


@pytest.mark.skipif(not harness.HAS_BACKPRESSURE, reason="this vLLM has no back-pressure")
def test_vllm_s_detector_is_fed_with_what_was_written(tmp_root: Path) -> None:
    backpressure = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "DropStorePolicy",
        "high_water_s": 1e-9,
        "low_water_s": 1e-10,
        "warmup_completions": 2,
        "decay_half_life_s": 0,
    }
    with managed(tmp_root, backpressure=backpressure) as vllm:
        request = vllm.context("a")
        for n in range(3):
            vllm.store(keys_of([n]), request, fill=n)
        assert vllm.tier.bp_detector.is_under_pressure()
        vllm.store(keys_of([9]), request, fill=9)
        assert vllm.tier.lookup(keys_of([9])[0], request) is MISS  # vLLM dropped it
        assert vllm.tier.bp_detector.policy.pop_stores_dropped() == (1, 1)


def test_vllm_s_reset_reaches_the_store_only_where_asked(tmp_root: Path) -> None:
    for reset, answer in ((False, LookupResult.HIT_PENDING), (True, MISS)):
        with managed(tmp_root, reset_on_drain=reset) as vllm:
            vllm.store(keys_of([0]), vllm.context("a"), fill=1)
            vllm.manager.reset_cache()
            getattr(vllm.manager, "on_reset_flushed", lambda: None)()
            time.sleep(0.3)
            assert vllm.manager.lookup(keys_of([0])[0], vllm.context("b")) is answer
