"""What the tier leaves out, under vLLM's own manager and its sequence of calls."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvxfer.store import Access
from tests.integrations import harness
from tests.integrations.harness import HIT, MISS, Rig, keys_of
from tests.integrations.test_tier_says import ROW, Managed, managed

pytestmark = pytest.mark.vllm

N = 8
SLOT = ROW + 4096


def counted(vllm: Managed) -> dict[str, int]:
    metrics = vllm.tier._engine.metrics()
    names = ("not_admitted", "budget", "backlog", "stored", "present", "dropped")
    counts = {name: int(metrics.value("kvxfer_store_chunks_total", outcome=name)) for name in names}
    return {name: count for name, count in counts.items() if count}


def in_prompt(context: Any, keys: list[bytes], vllm: Managed) -> list[bytes]:
    """Says where in the prompt keys are, as this vLLM's scheduler does; the keys as it hands them over: in no order."""
    if hasattr(context, "set_offload_key_position"):
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (number + 1))
    else:
        vllm.manager.touch(keys, context)
    shuffled = list(keys)
    random.Random(5).shuffle(shuffled)
    assert shuffled != keys
    return shuffled


def forget_primary(vllm: Managed) -> None:
    vllm.manager.reset_cache()
    getattr(vllm.manager, "on_reset_flushed", lambda: None)()


def test_a_chunk_left_out_is_offered_once_for_each_time_that_it_is_computed(tmp_root: Path) -> None:
    keys = keys_of(range(N))
    with managed(tmp_root, second_touch_names=1000) as vllm:
        request = vllm.context("a")
        offered: list[int] = []
        submit = vllm.tier.submit_store
        vllm.tier.submit_store = lambda job: (offered.append(len(job.keys)), submit(job))[1]
        vllm.store(in_prompt(request, keys, vllm), request, fill=10)
        assert counted(vllm) == {"not_admitted": N} and offered == [N]
        for _ in range(30):
            vllm.step()
            assert vllm.tier.lookup(keys[0], request) is MISS
        assert counted(vllm) == {"not_admitted": N} and offered == [N]
        vllm.manager.on_request_finished(request)

        forget_primary(vllm)
        again = vllm.context("b")
        assert vllm.manager.lookup(keys[0], again) is MISS  # computed anew
        vllm.store(in_prompt(again, [*keys, *keys_of([100])], vllm), again, fill=10)
        assert counted(vllm) == {"not_admitted": N + 1, "stored": N} and offered == [N, N + 1]
        assert [vllm.tier.lookup(key, again) for key in [*keys, *keys_of([100])]] == [HIT] * N + [MISS]


def test_a_short_budget_keeps_the_head_of_the_prompt_whatever_the_order_of_the_keys(tmp_root: Path) -> None:
    keys = keys_of(range(N))
    with managed(tmp_root, write_bytes_per_s=1e-6, write_burst_bytes=3 * SLOT) as vllm:
        request = vllm.context("a")
        vllm.store(in_prompt(request, keys, vllm), request, fill=10)
        assert [vllm.tier.lookup(key, request) for key in keys] == [HIT] * 3 + [MISS] * (N - 3)
        assert counted(vllm) == {"stored": 3, "budget": N - 3}
        later = keys_of(range(50, 54))
        vllm.store(later, request, fill=60)  # further on in the same prompt
        assert counted(vllm) == {"stored": 3, "budget": N - 3 + 4}
        forget_primary(vllm)
        for key in keys[:3]:
            assert vllm.manager.lookup(key, request) is harness.LookupResult.HIT_PENDING
        vllm.step()
        vllm.settle()
        loaded = vllm.manager.prepare_load(keys[:3], request)
        for number, row in enumerate(getattr(loaded, harness.ROWS)):
            stored = in_prompt(request, keys, vllm).index(keys[number])
            assert (vllm.rows[row] == 10 + stored).all(), "each key with the bytes of its own row"
        vllm.manager.complete_load(keys[:3], request)


@pytest.mark.skipif(not harness.HAS_BACKPRESSURE, reason="this vLLM has no back-pressure")
def test_what_is_left_out_on_purpose_is_no_failure_to_vllms_detector(tmp_root: Path) -> None:
    backpressure = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "DropStorePolicy",
        "high_water_s": 100.0,
        "low_water_s": 50.0,
    }
    heard: list[str] = []
    with managed(tmp_root, backpressure=backpressure, second_touch_names=1000, max_queue_s=5.0) as vllm:
        detector = vllm.tier.bp_detector
        detector.on_store_failed = lambda: heard.append("failed")
        detector.on_store_completed = lambda elapsed, nbytes: heard.append(f"{nbytes} bytes")
        request = vllm.context("a")
        vllm.store(keys_of(range(2)), request, fill=1)
        assert heard == [], "nothing was written, and nothing failed"
        forget_primary(vllm)
        vllm.store(keys_of(range(3)), request, fill=1)
        assert heard == [f"{2 * ROW} bytes"]
        vllm.tier._engine._intake.backlog.seconds = lambda: 6.0
        vllm.store(keys_of([9]), request, fill=1)
        assert heard[1:] == (["failed"] if hasattr(type(detector), "on_store_failed") else [])
        assert counted(vllm) == {"not_admitted": 3, "stored": 2, "backlog": 1}


def test_a_job_says_what_it_wrote(tmp_root: Path) -> None:
    with Rig(tmp_root, write_bytes_per_s=1e-6, write_burst_bytes=2 * SLOT, row_bytes=ROW) as rig:
        rig.fill()
        result = rig.store(range(4))
        assert result.success and harness.says_bytes(result, 2 * ROW)
        assert rig.lookups(range(4), rig.request("b")) == [HIT, HIT, MISS, MISS]


def test_keys_whose_place_is_not_known_come_last_as_they_came() -> None:
    from kvxfer.integrations import vllm_compat as compat  # after the harness, which keeps vLLM's warnings quiet

    keys = keys_of([3, 1, 4, 0, 2])
    context = harness.ReqContext(req_id="a")
    access = Access(compat.key_positions(context))
    if hasattr(context, "set_offload_key_position"):
        for number in (1, 3):
            context.set_offload_key_position(keys_of([number])[0], number)
    else:
        access.place(keys_of([1, 3]))
    assert access.order(keys) == [1, 0, 2, 3, 4]
    assert Access(compat.key_positions(harness.ReqContext(req_id="b"))).order(keys) == list(range(5))
